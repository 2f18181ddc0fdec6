"""What the ops of the reduction family mean: formulas, or torch's functions, in float64.

torch's own function is called with the axes spelled out, so that what ``None`` and ``()`` mean is said
here once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tileops.backend.tolerances import CANCELLATION, UNIT_ROUNDOFF

__all__ = ["EXACT", "ROUNDING"]

Meaning = tuple[tuple[torch.Tensor | None, ...], dict[str, torch.Tensor]]


def _axis(x: torch.Tensor, dim: int | None) -> int:
    """``torch.nn.functional.softmax``'s rule."""
    return dim if dim is not None else (0 if x.ndim in (0, 1, 3) else 1)


def _cast(op: Any, x: torch.Tensor) -> torch.Tensor:
    return (x if op.dtype is None else x.to(op.dtype)).double()


def softmax(op: Any, x: torch.Tensor) -> Meaning:
    axis, values = _axis(x, op.dim), _cast(op, x)
    if not values.numel():
        return (values,), {}
    powers = torch.exp(values - values.amax(axis, keepdim=True))
    return (powers / powers.sum(axis, keepdim=True),), {}


def log_softmax(op: Any, input: torch.Tensor) -> Meaning:
    axis, values = _axis(input, op.dim), _cast(op, input)
    if not values.numel():
        return (values,), {}
    shifted = values - values.amax(axis, keepdim=True)
    return (shifted - torch.exp(shifted).sum(axis, keepdim=True).log(),), {}


def softmax_bwd(op: Any, grad_output: torch.Tensor, output: torch.Tensor) -> Meaning:
    grad, y, axis = grad_output.double(), output.double(), _axis(output, op.dim)
    return (y * (grad - (y * grad).sum(axis, keepdim=True)),), {}


def log_softmax_bwd(op: Any, grad_output: torch.Tensor, output: torch.Tensor) -> Meaning:
    grad, axis = grad_output.double(), _axis(output, op.dim)
    return (grad - torch.exp(output.double()) * grad.sum(axis, keepdim=True),), {}


def _axes(op: Any, x: torch.Tensor, empty_is_all: bool = True) -> list[int]:
    if op.dim is None or (op.dim == () and empty_is_all):
        return list(range(x.ndim))
    return [axis % max(x.ndim, 1) for axis in (op.dim if isinstance(op.dim, tuple) else (op.dim,))]


def _rows(op: Any, x: torch.Tensor, empty_is_all: bool = True) -> tuple[torch.Tensor, list[int]]:
    """``x`` as ``[*kept, n]``, the reduced axes in order, and the shape of the result."""
    axes = _axes(op, x, empty_is_all) if x.ndim else []
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    n = math.prod(x.shape[axis] for axis in axes)
    rows = x.permute([*kept, *sorted(axes)]).reshape([*(x.shape[axis] for axis in kept), n])
    if getattr(op, "keepdim", False):
        return rows, [1 if axis in axes else x.shape[axis] for axis in range(x.ndim)]
    return rows, [x.shape[axis] for axis in kept]


def _reduction(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    empty_is_all: bool = True,
    keeps: bool = False,
) -> Callable[..., Meaning]:
    """``function(op, rows)`` reduces the last axis; ``keeps``: rows stay of the input's dtype."""

    def exact(op: Any, input: torch.Tensor) -> Meaning:
        wanted = getattr(op, "dtype", None)
        values = input if wanted is None else input.to(wanted)
        rows, shape = _rows(op, values if keeps else values.double(), empty_is_all)
        results = function(op, rows)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(result.reshape(shape) for result in results), {}

    return exact


def _log_sum_exp(op: Any, rows: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(rows, -1)


def _var(op: Any, rows: torch.Tensor) -> torch.Tensor:
    n, correction = rows.shape[-1], 1 if op.correction is None else op.correction
    away = rows - rows.mean(-1, keepdim=True)
    return (away * away).sum(-1) / torch.tensor(float(max(n - correction, 0)))


def _nonzero(rows: torch.Tensor) -> torch.Tensor:
    if rows.is_complex():
        return (rows.real != 0) | (rows.imag != 0)
    return rows != 0


def _first(op: Any, rows: torch.Tensor) -> torch.Tensor:
    """By the rule: the first NaN, else the first extreme."""
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    found = []
    for row in flat.tolist():
        nans = [n for n, value in enumerate(row) if value != value]
        best = max(row) if type(op).__name__.startswith("Argmax") else min(row)
        found.append(nans[0] if nans else row.index(best))
    return torch.tensor(found, dtype=torch.int64).reshape(rows.shape[:-1])


def _norm(op: Any, rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rows, op.ord, -1)


def _running(function: Callable[..., torch.Tensor]) -> Callable[..., Meaning]:
    def exact(op: Any, input: torch.Tensor) -> Meaning:
        values = _cast(op, input)
        return (function(values, op.dim) if values.ndim else values,), {}

    return exact


def cumprod_bwd(op: Any, grad_output: torch.Tensor, input: torch.Tensor) -> Meaning:
    """Every derivative by its definition: the product of all others up to the place.

    Where a row is not finite, NaN or infinite as autograd of ``torch.cumprod`` has it."""
    if not input.ndim:
        return (grad_output.double(),), {}
    values, grad = _cast(op, input).movedim(op.dim, -1), grad_output.double().movedim(op.dim, -1)
    result, n = torch.zeros_like(values), values.shape[-1]
    for i in range(n):
        others = values.clone()
        others[..., i] = 1
        result[..., i] = (others.cumprod(-1) * grad)[..., i:].sum(-1)
    finite = values.isfinite().all(-1, keepdim=True)
    if not finite.all():
        leaf = values.detach().requires_grad_()
        with torch.enable_grad():
            (theirs,) = torch.autograd.grad(leaf.cumprod(-1), leaf, grad)
        result = torch.where(finite, result, theirs)
    return (result.movedim(-1, op.dim),), {}


EXACT = {
    "CumprodBwdOp": cumprod_bwd,
    "AllFwdOp": _reduction(lambda op, rows: _nonzero(rows).all(-1), False, True),
    "AmaxFwdOp": _reduction(lambda op, rows: rows.amax(-1)),
    "AminFwdOp": _reduction(lambda op, rows: rows.amin(-1)),
    "AnyFwdOp": _reduction(lambda op, rows: _nonzero(rows).any(-1), False, True),
    "ArgmaxFwdOp": _reduction(_first),
    "ArgminFwdOp": _reduction(_first),
    "CountNonzeroFwdOp": _reduction(lambda op, rows: _nonzero(rows).sum(-1), True, True),
    "CumprodFwdOp": _running(torch.cumprod),
    "CumsumFwdOp": _running(torch.cumsum),
    "LogSoftmaxBwdOp": log_softmax_bwd,
    "LogSoftmaxFwdOp": log_softmax,
    "LogSumExpFwdOp": _reduction(_log_sum_exp),
    "MeanFwdOp": _reduction(lambda op, rows: rows.sum(-1) / rows.shape[-1]),
    "ProdFwdOp": _reduction(lambda op, rows: rows.prod(-1)),
    "SoftmaxBwdOp": softmax_bwd,
    "SoftmaxFwdOp": softmax,
    "StdFwdOp": _reduction(lambda op, rows: _var(op, rows).sqrt()),
    "SumFwdOp": _reduction(lambda op, rows: rows.sum(-1)),
    "VarFwdOp": _reduction(_var),
    "VarMeanFwdOp": _reduction(lambda op, rows: (_var(op, rows), rows.mean(-1))),
    "VectorNormFwdOp": lambda op, x: _reduction(_norm)(op, x),
}


def lone_sum_rounding(op: Any, input: torch.Tensor) -> tuple[float, ...]:
    """A sum of everything has no sums beside it whose size would say what its cancellation costs: that of
    n terms is sqrt(n) times theirs."""
    if not input.is_floating_point() or op.dim not in (None, ()):
        return (0.0,)
    dtype = op.dtype if op.dtype in UNIT_ROUNDOFF else input.dtype
    accumulator = min(UNIT_ROUNDOFF[torch.float32], UNIT_ROUNDOFF[dtype])
    size = float(input.double().square().nan_to_num(0.0, 0.0, 0.0).sum().sqrt())
    share = input.numel() if type(op).__name__ == "MeanFwdOp" else 1
    return (CANCELLATION * accumulator * size / max(share, 1),)


ROUNDING: dict[str, Callable[..., tuple[float, ...]]] = {
    "MeanFwdOp": lone_sum_rounding, "SumFwdOp": lone_sum_rounding,
}  # fmt: skip
"""For each output what it may be off by beyond the tolerance of a result."""
