"""What the ops of the gemm family mean: sums of products, and autograd's gradients of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["EXACT"]

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
    """By autograd; where a preactivation is given, through it and not through the product's own value."""
    a, b = a.double().requires_grad_(), b.double().requires_grad_()
    bias = None if bias is None else bias.double().requires_grad_()
    residual = torch.zeros(grad_d.shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        inner = _product(op, a, b) + (0 if bias is None else bias)
        if preactivation is not None:
            inner = inner + (preactivation.double() - inner).detach()
        d = _activated(op.activation, inner) * op.scale + residual
        total = (d * grad_d.double()).sum()
        if grad_preactivation is not None:
            total = total + (inner * grad_preactivation.double()).sum()
    wanted = {"a": a, "b": b, "bias": bias, "residual": residual}
    asked = [t for n, t in wanted.items() if t is not None and getattr(op, f"wants_{n}")]
    found = iter(torch.autograd.grad(total, asked))
    return tuple(
        next(found) if t is not None and getattr(op, f"wants_{n}") else None
        for n, t in wanted.items()
    ), {}


EXACT: dict[str, Callable[..., Meaning]] = {
    "GEMMBwdOp": backward,
    "GEMMEpilogueBwdOp": epilogue_backward,
    "GEMMEpilogueFwdOp": epilogue,
    "GEMMFwdOp": forward,
}
