"""Residual addition followed by RMS normalisation, and its gradient."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import mean_of_squares
from tileops.norm.rms_norm_backward import rms_norm_gradients


class FusedAddRMSNormFwdOp(Op):
    """``residual_out = input + residual``; ``output = rms_norm(residual_out, eps) * weight``.

    ``input``, ``residual``: ``[*B, N]``; ``weight``: ``[N]``; returns ``(output, residual_out)``, both
    new. The sum is rounded to the dtype before it is normalised, so that the op equals the two
    steps done apart; sums of squares accumulate in float32 (float64 for float64). API:
    ``flashinfer.norm.fused_add_rmsnorm`` (which writes its inputs instead).
    """

    kernel = KernelInterface(
        compiled_from=1 << 17,
        cuda=(
            "rows:RegisterRow",
            "rows:StreamedRow",
            "rows:ManyShortRows",
        ),
    )

    @staticmethod
    def decomposition(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        total = input + residual
        values = total.to(wide)
        scale = torch.rsqrt(mean_of_squares(values) + eps)
        return (values * scale * weight.to(wide)).to(input.dtype), total


class FusedAddRMSNormBwdOp(Op):
    """The gradients of ``FusedAddRMSNormFwdOp``: ``(grad_input, grad_weight)``, None where not wanted.

    ``grad_input``, which is that of ``residual`` too, is ``RMSNormBwdOp``'s gradient of ``residual_out``
    plus ``grad_residual_out``, rounded once. All are ``[*B, N]`` but ``weight`` and its gradient, ``[N]``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("rows_backward:HeldRows", "rows_backward:LongRows")
    )

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        grad_residual_out: torch.Tensor,
        residual_out: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        wants_input: bool,
        wants_residual: bool,
        wants_weight: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        dtype = residual_out.dtype
        wide = torch.promote_types(dtype, torch.float32)
        grad_total, grad_weight = rms_norm_gradients(
            grad_output.to(wide), residual_out.to(wide), weight, 1, eps
        )
        grad_total = (grad_total + grad_residual_out.to(wide)).to(dtype)
        return (
            grad_total if wants_input or wants_residual else None,
            grad_weight.to(dtype) if wants_weight else None,
        )
