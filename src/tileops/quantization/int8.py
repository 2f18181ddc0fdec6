"""Quantisation to int8; ``formula.py`` has the formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.authoring import KernelInterface, Op
from tileops.quantization.formula import to_int8

GROUP = 128
"""Neighbours that share a scale."""


class INT8QuantPerChannelFwdOp(Op):
    """``w``: ``[*B, K]``; ``q``: int8 ``[*B, K]``; ``scale``: float32 ``[*B]``, one for each row.

    Rows may be the channels of a weight, tokens, or groups that a view has made. API:
    ``vllm.model_executor.layers.quantization.utils.int8_utils.per_token_quant_int8``, which multiplies by
    the inverse of the scale and rounds halves away from 0.
    """

    kernel = KernelInterface(compiled_from=1 << 20, cuda=("rows:HeldRows", "parts:LongRows"))

    @staticmethod
    def decomposition(w: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return to_int8(w.float(), -1, eps)


class INT8QuantPerTensorFwdOp(Op):
    """``x``: ``[*S]``; ``q``: int8 ``[*S]``; ``scale``: float32 ``[1]``, of all elements.

    API: ``vllm._custom_ops.scaled_int8_quant``.
    """

    kernel = KernelInterface(compiled_from=1 << 20, cuda=("parts:WholeTensor",))

    @staticmethod
    def decomposition(x: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale = to_int8(x.float(), tuple(range(x.ndim)), eps)
        return q, scale.reshape(1)


class INT8QuantPerTokenGroupFwdOp(Op):
    """``x``: ``[*B, K]``; ``q``: int8 ``[*B, K]``; ``scale``: float32 ``[*B, ceil(K / 128)]``, one for
    each 128 neighbours of a row, the last ones fewer where 128 does not divide ``K``.

    API: ``vllm.model_executor.layers.quantization.utils.int8_utils.per_token_group_quant_int8``, which
    rounds towards 0.
    """

    kernel = KernelInterface(compiled_from=1 << 20, cuda=("rows:Groups",))

    @staticmethod
    def decomposition(x: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        size = x.shape[-1]
        groups = (size + GROUP - 1) // GROUP
        values = F.pad(x.float(), (0, groups * GROUP - size))
        values = values.reshape(*x.shape[:-1], groups, GROUP)
        q, scale = to_int8(values, -1, eps)
        return q.reshape(*x.shape[:-1], groups * GROUP)[..., :size], scale


class SmoothQuantFwdOp(Op):
    """``y = x / smooth``, rounded to float32 and no further, quantised by rows: ``x``: ``[*B, K]``;
    ``smooth``: float32 ``[K]``; ``q``: int8 ``[*B, K]``; ``scale``: float32 ``[*B]``.

    Paper: Xiao et al., SmoothQuant (2023), equation 3.
    """

    kernel = KernelInterface(compiled_from=1 << 20, cuda=("rows:HeldRows", "parts:LongRows"))

    @staticmethod
    def decomposition(
        x: torch.Tensor, smooth: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return to_int8(x.float() / smooth, -1, eps)
