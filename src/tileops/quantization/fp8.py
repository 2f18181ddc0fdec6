"""Quantisation to float8_e4m3fn; ``formula.py`` has the formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.authoring import KernelInterface, Op
from tileops.quantization.formula import to_float8

BLOCK = 128
"""Rows and columns of a block that has one scale."""


class FP8QuantPerTokenGroupFwdOp(Op):
    """``x``: ``[*B, D]``; ``q``: float8_e4m3fn ``[*B, D]``; ``scale``: float32 ``[*B]``, one for each row,
    which is a group of a token's elements.

    API: ``vllm.model_executor.layers.quantization.utils.fp8_utils.per_token_group_quant_fp8`` with scales
    that are no powers of two.
    """

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("rows:HeldRows", "parts:LongRows"))

    @staticmethod
    def decomposition(x: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return to_float8(x.float(), -1, eps)


class FP8QuantPerBlockFwdOp(Op):
    """``w``: ``[N, K]``; ``q``: float8_e4m3fn ``[N, K]``; ``scale``: float32
    ``[ceil(N / 128), ceil(K / 128)]``, one for each block of 128 rows and columns, the last ones smaller
    where 128 does not divide a size.

    API: ``vllm.utils.deep_gemm.per_block_cast_to_fp8`` with scales that are no powers of two.
    """

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("blocks:Blocks",))

    @staticmethod
    def decomposition(w: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = w.shape
        down, across = (rows + BLOCK - 1) // BLOCK, (columns + BLOCK - 1) // BLOCK
        padding = (0, across * BLOCK - columns, 0, down * BLOCK - rows)
        values = F.pad(w.float(), padding).reshape(down, BLOCK, across, BLOCK)
        q, scale = to_float8(values, (1, 3), eps)
        return q.reshape(down * BLOCK, across * BLOCK)[:rows, :columns], scale
