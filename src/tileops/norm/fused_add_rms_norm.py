"""Residual addition followed by RMS normalisation."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class FusedAddRMSNormFwdOp(Op):
    """``residual_out = input + residual``; ``output = rms_norm(residual_out, eps) * weight``.

    ``input``, ``residual``: ``[*B, N]``; ``weight``: ``[N]``; returns ``(output, residual_out)``, both
    new. The sum is rounded to the dtype before it is normalised, so that the op equals the two
    steps done apart; sums of squares accumulate in float32 (float64 for float64). API:
    ``flashinfer.norm.fused_add_rmsnorm`` (which writes its inputs instead).
    """

    kernel = KernelInterface(
        compiled_from=1 << 22,
        cuda=(
            "fused_add_rms_norm:RegisterRow",
            "fused_add_rms_norm:StreamedRow",
            "fused_add_rms_norm:ManyShortRows",
        ),
    )

    @staticmethod
    def decomposition(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        total = input + residual
        values = total.to(wide)
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        return (values * scale * weight.to(wide)).to(input.dtype), total
