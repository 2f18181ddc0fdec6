"""Numbers out of int8 and their scales: each product in float32, then rounded to ``out_dtype``."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.quantization.int8 import GROUP


class INT8DequantPerTensorFwdOp(Op):
    """``q``: int8 ``[*S]``; ``scale``: float32 ``[1]``; ``x = q * scale``: ``out_dtype`` ``[*S]``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("dequantise:Dequantise",))

    @staticmethod
    def decomposition(
        q: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        return (q.float() * scale.reshape(())).to(out_dtype)


class INT8DequantPerChannelFwdOp(Op):
    """``q``: int8 ``[*B, K]``; ``scale``: float32 ``[*B]``, one for each row; ``x``: ``out_dtype``
    ``[*B, K]``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("dequantise:Dequantise",))

    @staticmethod
    def decomposition(
        q: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        return (q.float() * scale.unsqueeze(-1)).to(out_dtype)


class INT8DequantPerBlockFwdOp(Op):
    """``q``: int8 ``[*B, K]``; ``scale``: float32 ``[*B, ceil(K / 128)]``, one for each 128 neighbours of
    a row; ``x``: ``out_dtype`` ``[*B, K]``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("dequantise:Dequantise",))

    @staticmethod
    def decomposition(
        q: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        each = scale.repeat_interleave(GROUP, -1)[..., : q.shape[-1]]
        return (q.float() * each).to(out_dtype)
