"""What the ops of the gemm family mean: sums of products, and autograd's gradients of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tileops.backend.tolerances import UNIT_ROUNDOFF

__all__ = ["EXACT", "ROUNDING"]

Meaning = tuple[tuple[torch.Tensor | None, ...], dict[str, torch.Tensor]]


def _product(op: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows, columns = (a.t() if op.trans_a else a), (b if op.trans_b else b.t())
    return (rows[:, None, :] * columns[None, :, :]).sum(-1)


def forward(op: Any, a: torch.Tensor, b: torch.Tensor) -> Meaning:
    return (_product(op, a.double(), b.double()),), {}


def backward(op: Any, grad_d: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Meaning:
    a, b = a.double().requires_grad_(), b.double().requires_grad_()
    with torch.enable_grad():
        product = _product(op, a, b)
    grad_a, grad_b = torch.autograd.grad(product, (a, b), grad_d.double())
    return (grad_a if op.wants_a else None, grad_b if op.wants_b else None), {}


def _activated(activation: str | None, x: torch.Tensor) -> torch.Tensor:
    if activation == "relu":
        return torch.where(x > 0, x, torch.where(x.isnan(), x, 0.0))
    if activation == "gelu":
        return x * torch.special.ndtr(x)
    if activation == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    return x


def _finished(
    op: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    inner = _product(op, a, b)
    if bias is not None:
        inner = inner + bias
    result = _activated(op.activation, inner) * op.scale
    return (result if residual is None else result + residual), inner


def epilogue(
    op: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Meaning:
    given = (None if t is None else t.double() for t in (a, b, bias, residual))
    d, inner = _finished(op, *given)
    return (d, inner if op.keeps_preactivation else None), {}


def epilogue_backward(
    op: Any,
    grad_d: torch.Tensor,
    grad_preactivation: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    preactivation: torch.Tensor | None,
) -> Meaning:
    """By autograd in two steps; where a preactivation is given, its slope is taken there."""
    a, b = a.double().requires_grad_(), b.double().requires_grad_()
    bias = None if bias is None else bias.double().requires_grad_()
    with torch.enable_grad():
        inner = _product(op, a, b) + (0 if bias is None else bias)
        at = (inner.detach() if preactivation is None else preactivation.double()).requires_grad_()
        # The slope by itself: of an infinite gradient autograd would subtract infinities.
        (slope,) = torch.autograd.grad(_activated(op.activation, at).sum(), at)
    back = slope * op.scale * grad_d.double()
    if grad_preactivation is not None:
        back = back + grad_preactivation
    wanted = {"a": a, "b": b} if bias is None else {"a": a, "b": b, "bias": bias}
    found = dict(zip(wanted, torch.autograd.grad(inner, tuple(wanted.values()), back), strict=True))
    found["residual"] = grad_d.double()
    names = ("a", "b", "bias", "residual")
    return tuple(found.get(n) if getattr(op, f"wants_{n}") else None for n in names), {}


EXACT: dict[str, Callable[..., Meaning]] = {
    "GEMMBwdOp": backward,
    "GEMMEpilogueBwdOp": epilogue_backward,
    "GEMMEpilogueFwdOp": epilogue,
    "GEMMFwdOp": forward,
}


CURVATURE = {"gelu": 0.8, "gelu_tanh": 0.8, "silu": 0.5}
"""The most that an activation's slope changes by, for a change of 1."""


def epilogue_backward_rounding(
    op: Any,
    grad_d: torch.Tensor,
    grad_preactivation: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    preactivation: torch.Tensor | None,
) -> tuple[torch.Tensor | float, ...]:
    """A product that is computed again may be rounded, as the op says. The slope is then another one, which
    shows where slopes are near 0."""
    if preactivation is not None or op.activation not in CURVATURE:
        return 0.0, 0.0, 0.0, 0.0
    unit = UNIT_ROUNDOFF[torch.promote_types(a.dtype, grad_d.dtype)]
    a, b = a.double(), b.double()
    changed = CURVATURE[op.activation] * unit * _product(op, a, b).abs()
    off = (changed * op.scale * grad_d.double()).abs().nan_to_num(0.0, 0.0, 0.0)
    rows = (a.t() if op.trans_a else a).abs().nan_to_num(0.0, 0.0, 0.0)
    columns = (b if op.trans_b else b.t()).abs().nan_to_num(0.0, 0.0, 0.0)
    of_a, of_b = off @ columns, off.t() @ rows
    return of_a.t() if op.trans_a else of_a, of_b if op.trans_b else of_b.t(), off.sum(0), 0.0


ROUNDING: dict[str, Callable[..., tuple[torch.Tensor | float, ...]]] = {
    "GEMMEpilogueBwdOp": epilogue_backward_rounding
}
"""For each output what it may be off by beyond the tolerance of a result."""
