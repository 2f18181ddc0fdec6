"""RMS normalisation."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import mean_of_squares


class RMSNormFwdOp(Op):
    """``y = x / sqrt(mean(x²) + eps) * weight`` over the last ``len(normalized_shape)`` dims.

    ``x``: ``[*B, *normalized_shape]``; ``weight``: ``normalized_shape`` or None; the output has the
    shape and dtype of ``x``. Accumulates in float32 (float64 for float64); ``eps=None`` is the
    machine epsilon of that type. Formula: Zhang and Sennrich, Root Mean Square Layer Normalization,
    2019; API: ``torch.nn.functional.rms_norm``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17,
        cuda=("rows:RegisterRow", "rows:StreamedRow", "rows:ManyShortRows"),
    )

    @staticmethod
    def decomposition(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        normalized_shape: tuple[int, ...],
        eps: float | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        values = x.to(wide)
        scale = mean_of_squares(values, len(normalized_shape))
        result = values * torch.rsqrt(scale + (torch.finfo(wide).eps if eps is None else eps))
        if weight is not None:
            result = result * weight.to(wide)
        return result.to(x.dtype)
