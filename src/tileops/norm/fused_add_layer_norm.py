"""Residual addition followed by layer normalisation."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import layer_norm


class FusedAddLayerNormFwdOp(Op):
    """``residual_out = x + residual``; ``output = layer_norm(residual_out, eps) * weight + bias``.

    ``x``, ``residual``: ``[*B, N]``; ``weight``, ``bias``: ``[N]``; returns ``(output, residual_out)``.
    As in ``FusedAddRMSNormFwdOp`` it is the rounded sum that is normalised. API:
    ``flash_attn.ops.triton.layer_norm.layer_norm_fn`` with ``prenorm=True``.
    """

    kernel = KernelInterface(cuda=("rows:RegisterRow", "rows:StreamedRow", "rows:ManyShortRows"))

    @staticmethod
    def decomposition(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        *,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return layer_norm(total, total.shape[-1:], weight, bias, eps), total
