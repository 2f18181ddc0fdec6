"""Softmax."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class SoftmaxFwdOp(Op):
    """``exp(x - max) / sum`` along ``dim`` of ``x`` ``[*S]``; cast to ``dtype`` first where given.

    ``dim=None`` is axis 0 for 0, 1 and 3 dims, else axis 1, as in
    ``torch.nn.functional.softmax``. A row of only ``-inf`` gives NaN. Accumulates in float32
    (float64 for float64).
    """

    kernel = KernelInterface(
        cuda=(
            "softmax:RowSoftmax",
            "softmax:StreamedSoftmax",
            "softmax:SplitSoftmax",
            "softmax:ColumnTileSoftmax",
            "softmax:ColumnSoftmax",
        )
    )

    @staticmethod
    def decomposition(
        x: torch.Tensor, *, dim: int | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        axis = dim if dim is not None else (0 if x.ndim in (0, 1, 3) else 1)
        return torch.softmax(x, axis, dtype=dtype)
