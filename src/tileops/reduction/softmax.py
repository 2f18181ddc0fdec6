"""Softmax."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tileops.authoring import KernelInterface, Op


def _axis(dim: int | None, rank: int) -> int:
    return dim if dim is not None else (0 if rank in (0, 1, 3) else 1)


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

    dim: int | None
    dtype: torch.dtype | None

    def batched(self, ranks: Mapping[str, int]) -> Op | None:
        """The same axis, counted from the end."""
        rank = ranks["x"]
        if rank == 0:
            return None
        axis = _axis(self.dim, rank)
        return type(self)(axis if axis < 0 else axis - rank, dtype=self.dtype, target=self.target)

    @staticmethod
    def decomposition(
        x: torch.Tensor, *, dim: int | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        return torch.softmax(x, _axis(dim, x.ndim), dtype=dtype)
