"""Softmax, its logarithm, and the gradients of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tileops.authoring import KernelInterface, Op
from tileops.reduction.reduce import not_halves

_SOFTMAX = KernelInterface(
    cuda=(
        "softmax:RowSoftmax",
        "softmax:InterleavedSoftmax",
        "softmax:SplitSoftmax",
        "softmax:ColumnTileSoftmax",
        "softmax:ColumnSoftmax",
    )
)
_HALVES_COMPILED = KernelInterface(
    compiled_from=1 << 17, compiled_unless=not_halves, cuda=_SOFTMAX.cuda
)


def _axis(dim: int | None, rank: int) -> int:
    """The axis that ``torch.nn.functional.softmax`` takes where none is said."""
    return dim if dim is not None else (0 if rank in (0, 1, 3) else 1)


def _from_the_end(op: Any, ranks: Mapping[str, int]) -> Op | None:
    """The same axis, counted from the end."""
    rank = next(iter(ranks.values()))
    if rank == 0:
        return None
    axis = _axis(op.dim, rank)
    params = {**op._params, "dim": axis if axis < 0 else axis - rank}
    made: Op = type(op)(**params, target=op.target)
    return made


class SoftmaxFwdOp(Op):
    """``exp(x - max) / sum`` along ``dim`` of ``x`` ``[*S]``; cast to ``dtype`` first where given.

    ``dim=None`` is axis 0 for 0, 1 and 3 dims, else axis 1, as in
    ``torch.nn.functional.softmax``. A row of only ``-inf`` gives NaN. Accumulates in float32
    (float64 for float64).
    """

    kernel = _SOFTMAX
    batched = _from_the_end

    @staticmethod
    def decomposition(
        x: torch.Tensor, *, dim: int | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        return torch.softmax(x, _axis(dim, x.ndim), dtype=dtype)


class SoftmaxBwdOp(Op):
    """``(grad - sum(grad * output)) * output`` along ``dim``, the sum over that axis.

    The gradient is of the dtype of ``output``: where the forward cast ``x`` to ``dtype``, autograd
    casts back. Accumulates in float32 (float64 for float64).
    """

    kernel = _SOFTMAX
    batched = _from_the_end

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        output: torch.Tensor,
        *,
        dim: int | None,
        dtype: torch.dtype | None,
        wants_x: bool,
    ) -> torch.Tensor:
        axis = _axis(dim, output.ndim)
        return torch._softmax_backward_data(grad_output, output, axis, output.dtype)


class LogSoftmaxFwdOp(Op):
    """``x - max - log(sum(exp(x - max)))`` along ``dim`` of ``input`` ``[*S]``; cast to ``dtype``
    first where given.

    ``dim=None`` is axis 0 for 0, 1 and 3 dims, else axis 1, as in
    ``torch.nn.functional.log_softmax``. A row of only ``-inf`` gives NaN. Accumulates in float32
    (float64 for float64).
    """

    kernel = _HALVES_COMPILED
    batched = _from_the_end

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, dim: int | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        values = input if dtype is None else input.to(dtype)
        if values.dtype in (torch.float16, torch.bfloat16):
            # ATen's kernel for the CPU rounds the logarithm before it subtracts.
            wide = torch.log_softmax(values, _axis(dim, input.ndim), dtype=torch.float32)
            return wide.to(values.dtype)
        return torch.log_softmax(values, _axis(dim, input.ndim))


class LogSoftmaxBwdOp(Op):
    """``grad - exp(output) * sum(grad)`` along ``dim``, the sum over that axis.

    The gradient is of the dtype of ``output``: where the forward cast ``input`` to ``dtype``,
    autograd casts back. Accumulates in float32 (float64 for float64).
    """

    kernel = _SOFTMAX
    batched = _from_the_end

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        output: torch.Tensor,
        *,
        dim: int | None,
        dtype: torch.dtype | None,
        wants_input: bool,
    ) -> torch.Tensor:
        axis = _axis(dim, output.ndim)
        return torch._log_softmax_backward_data(grad_output, output, axis, output.dtype)
