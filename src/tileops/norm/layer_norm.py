"""Layer normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.authoring import Op


class LayerNormFwdOp(Op):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias`` over the last ``len(normalized_shape)``
    dims, with the biased variance.

    ``input``: ``[*B, *normalized_shape]``; ``weight``, ``bias``: ``normalized_shape`` or None; the
    output has the shape and dtype of ``input``. API: ``torch.nn.functional.layer_norm``.
    """

    @staticmethod
    def decomposition(
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        normalized_shape: tuple[int, ...],
        eps: float,
    ) -> torch.Tensor:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
