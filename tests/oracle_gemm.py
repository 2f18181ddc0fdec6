"""What the ops of the gemm family mean: sums of products, and autograd's gradients of them."""

from __future__ import annotations

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


EXACT: dict[str, Callable[..., Meaning]] = {"GEMMBwdOp": backward, "GEMMFwdOp": forward}
