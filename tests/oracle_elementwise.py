"""What each elementwise op means, written a second time: see ``oracle.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["EXACT", "alibi_slope", "gelu64", "silu64"]

Meaning = tuple[tuple[torch.Tensor | None, ...], dict[str, torch.Tensor]]


def _wrapped(value: int, dtype: torch.dtype) -> int:
    """Two's complement, as hardware adds."""
    info = torch.iinfo(dtype)
    return (value - info.min) % (info.max - info.min + 1) + info.min


def _integers(
    function: Callable[[int, int], int], input: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    first, second = torch.broadcast_tensors(input, other)
    values = [
        function(int(a), int(b))
        for a, b in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True)
    ]
    if input.dtype is torch.bool:
        return torch.tensor([bool(v) for v in values], dtype=torch.bool).view(first.shape)
    wrapped = [_wrapped(v, input.dtype) for v in values]
    return torch.tensor(wrapped, dtype=input.dtype).view(first.shape)


def add(op: Any, input: torch.Tensor, other: torch.Tensor) -> Meaning:
    if input.is_floating_point():
        return (input.double() + op.alpha * other.double(),), {}
    return (_integers(lambda a, b: a + int(op.alpha) * b, input, other),), {}


def mul(op: Any, input: torch.Tensor, other: torch.Tensor) -> Meaning:
    if input.is_floating_point():
        return (input.double() * other.double(),), {}
    return (_integers(lambda a, b: a * b, input, other),), {}


def silu64(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def gelu64(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))
    # erfc: for negative x, 1 + erf(x) would be a difference of nearly equal numbers.
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def silu(op: Any, input: torch.Tensor) -> Meaning:
    result = silu64(input.double())
    return (result,), ({"input": result} if op.inplace else {})


def silu_and_mul(op: Any, input: torch.Tensor) -> Meaning:
    gate, up = input.double().chunk(2, -1)
    return (silu64(gate) * up,), {}


def gelu(op: Any, input: torch.Tensor) -> Meaning:
    return (gelu64(input.double(), op.approximate),), {}


def alibi_slope(head: int, heads: int) -> float:
    """By the recursion of the paper's published code."""
    if math.log2(heads).is_integer():
        ratio = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return ratio ** (head + 1)
    below = 2 ** math.floor(math.log2(heads))
    return alibi_slope(head, below) if head < below else alibi_slope(2 * (head - below), 2 * below)


def alibi(op: Any) -> Meaning:
    result = torch.empty(op.num_heads, op.seq_len, op.seq_len, dtype=torch.float64)
    for h in range(op.num_heads):
        for i in range(op.seq_len):
            for j in range(op.seq_len):
                result[h, i, j] = -alibi_slope(h, op.num_heads) * abs(i - j)
    return (result,), {}


def sinusoidal(op: Any) -> Meaning:
    result = torch.empty(op.seq_len, op.d_model, dtype=torch.float64)
    for place in range(op.seq_len):
        for i in range(op.d_model // 2):
            angle = place / 10000.0 ** (2 * i / op.d_model)
            result[place, 2 * i], result[place, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return (result,), {}


# ---- gated activations -------------------------------------------------------------------------


def gelu_and_mul(op: Any, input: torch.Tensor) -> Meaning:
    gate, up = input.double().chunk(2, -1)
    return (gelu64(gate, op.approximate) * up,), {}


def _gradient(
    reference: Callable[[torch.Tensor], torch.Tensor], grad: torch.Tensor, x: torch.Tensor
) -> Meaning:
    leaf = x.double().detach().requires_grad_()
    with torch.enable_grad():
        gate, up = leaf.chunk(2, -1)
        result = reference(gate) * up
    (given,) = torch.autograd.grad(result, leaf, grad.double())
    return (given,), {}


def silu_and_mul_backward(op: Any, grad_output: torch.Tensor, input: torch.Tensor) -> Meaning:
    return _gradient(F.silu, grad_output, input)


def gelu_and_mul_backward(op: Any, grad_output: torch.Tensor, input: torch.Tensor) -> Meaning:
    return _gradient(lambda x: F.gelu(x, approximate=op.approximate), grad_output, input)


EXACT: dict[str, Callable[..., Meaning]] = {
    "AddFwdOp": add,
    "AlibiFwdOp": alibi,
    "GELUAndMulBwdOp": gelu_and_mul_backward,
    "GELUAndMulFwdOp": gelu_and_mul,
    "GELUFwdOp": gelu,
    "MulFwdOp": mul,
    "SiLUAndMulBwdOp": silu_and_mul_backward,
    "SiLUAndMulFwdOp": silu_and_mul,
    "SiLUFwdOp": silu,
    "SinusoidalFwdOp": sinusoidal,
}
