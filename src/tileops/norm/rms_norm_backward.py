"""The gradient of RMS normalisation."""

from __future__ import annotations

import math

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import mean_of_squares

__all__ = ["RMSNormBwdOp", "rms_norm_gradients"]


def rms_norm_gradients(
    grads: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor | None,
    normal_dims: int,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``values`` and of the weight, all in the dtype of ``values``."""
    dims = tuple(range(-normal_dims, 0))
    least = torch.finfo(values.dtype).eps if eps is None else eps
    scale = torch.rsqrt(mean_of_squares(values, normal_dims) + least)
    normal = values * scale
    scaled = grads if weight is None else grads * weight.to(values.dtype)
    grad_values = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * scale
    return grad_values, sum_of_rows(grads * normal, normal_dims)


def sum_of_rows(values: torch.Tensor, normal_dims: int) -> torch.Tensor:
    """Summed over all but the last ``normal_dims`` dims."""
    split = values.ndim - normal_dims
    return values.reshape(math.prod(values.shape[:split]), *values.shape[split:]).sum(0)


class RMSNormBwdOp(Op):
    """The gradients of ``RMSNormFwdOp``: ``(grad_x, grad_weight)``, None where not wanted.

    With ``r = 1 / sqrt(mean(x²) + eps)``, ``n = x r`` and ``h = grad_output weight``:
    ``grad_x = r (h - n mean(h n))``, ``grad_weight`` = the sum over rows of ``grad_output n``. Shapes
    and dtypes are the forward's; sums are in float32 (float64 for float64).
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("rows_backward:HeldRows", "rows_backward:LongRows")
    )

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        normalized_shape: tuple[int, ...],
        eps: float | None,
        wants_x: bool,
        wants_weight: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        wide = torch.promote_types(x.dtype, torch.float32)
        grad_x, grad_weight = rms_norm_gradients(
            grad_output.to(wide), x.to(wide), weight, len(normalized_shape), eps
        )
        return (
            grad_x.to(x.dtype) if wants_x else None,
            grad_weight.to(x.dtype) if wants_weight and weight is not None else None,
        )
