"""What the ops of the reduction family mean, in float64."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["EXACT"]

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
    return (y * grad - y * (y * grad).sum(axis, keepdim=True),), {}


def log_softmax_bwd(op: Any, grad_output: torch.Tensor, output: torch.Tensor) -> Meaning:
    grad, axis = grad_output.double(), _axis(output, op.dim)
    return (grad - torch.exp(output.double()) * grad.sum(axis, keepdim=True),), {}


EXACT = {
    "LogSoftmaxBwdOp": log_softmax_bwd,
    "LogSoftmaxFwdOp": log_softmax,
    "SoftmaxBwdOp": softmax_bwd,
    "SoftmaxFwdOp": softmax,
}
