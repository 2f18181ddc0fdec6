"""What each elementwise op means, written a second time: see ``oracle.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["EXACT", "alibi_slope", "gelu64", "philox_word", "silu64"]

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


def silu64(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def gelu64(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))
    # erfc: for negative x, 1 + erf(x) would be a difference of nearly equal numbers.
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def silu_and_mul(op: Any, input: torch.Tensor) -> Meaning:
    gate, up = input.double().chunk(2, -1)
    return (silu64(gate) * up,), {}


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


# ---- one element of each input ------------------------------------------------------------------


def _of(function: Callable[..., torch.Tensor]) -> Callable[..., Meaning]:
    """``function(op, *inputs)`` of floats in float64 and of integers in int64, whose lower bits are the
    result; what is written is the first input."""

    def meaning(op: Any, *inputs: torch.Tensor | None, **named: torch.Tensor | None) -> Meaning:
        given = [*inputs, *named.values()]
        wide = [
            t if t is None or t.dtype is torch.bool else t.double() if t.is_floating_point() else t.long()
            for t in given
        ]  # fmt: skip
        result = function(op, *wide)
        if not result.is_floating_point() and result.dtype is not torch.bool:
            present = [t.dtype for t in given if t is not None]
            result = result.to(next((d for d in present if d is not torch.bool), torch.bool))
        return (result,), ({"input": result} if getattr(op, "inplace", False) else {})

    return meaning


def _arithmetic(function: Callable[[Any, Any, Any], Any]) -> Callable[..., Meaning]:
    """``function(op, a, b)`` of tensors in float64, or of Python's integers one by one."""

    def meaning(op: Any, input: torch.Tensor, other: torch.Tensor) -> Meaning:
        if input.is_floating_point():
            return (function(op, input.double(), other.double()),), {}
        return (_integers(lambda a, b: function(op, a, b), input, other),), {}

    return meaning


def _round(op: Any, x: torch.Tensor) -> torch.Tensor:
    if not op.decimals:
        return torch.round(x)
    # Whether a product is a tie depends on the precision: float32's, as torch has it.
    return torch.round(x.float(), decimals=op.decimals).double()


def _round_of(op: Any, input: torch.Tensor) -> Meaning:
    if op.decimals and input.dtype is torch.float64:
        return (torch.round(input, decimals=op.decimals),), {}
    return _of(_round)(op, input)


def _quotient(op: Any, input: torch.Tensor, other: torch.Tensor) -> Meaning:
    if op.rounding_mode == "trunc" and input.is_floating_point():
        # The integer part is that of the rounded quotient: float32's, as torch has it.
        wide = torch.promote_types(input.dtype, torch.float32)
        return (torch.trunc(input.to(wide) / other.to(wide)).double(),), {}
    return _of(lambda op, x, y: torch.div(x, y, rounding_mode=op.rounding_mode))(op, input, other)


def _nan_to_num(op: Any, input: torch.Tensor) -> Meaning:
    # In the dtype itself, whose largest number stands for infinity.
    return (torch.nan_to_num(input, op.nan, op.posinf, op.neginf).double(),), {}


def philox_word(seed: int, place: int) -> int:
    """Word ``place % 4`` of Philox-4x32-10 for the counter ``place // 4``, by the paper's figure 1."""
    counter, low = place // 4, 2**32 - 1
    words, key = [counter & low, counter >> 32, 0, 0], [seed & low, seed >> 32]
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (right >> 32) ^ words[1] ^ key[0], right & low, (left >> 32) ^ words[3] ^ key[1], left & low,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return words[place % 4]


def _dropout(op: Any, x: torch.Tensor) -> torch.Tensor:
    if not op.training or op.p == 0:
        return x
    if op.p == 1:
        return x * 0
    kept = [philox_word(op.seed, place) >= round(op.p * 2**32) for place in range(x.numel())]
    return x * torch.tensor(kept, dtype=x.dtype, device=x.device).view(x.shape) / (1 - op.p)


def _prelu(op: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    shape = (weight.numel(), *(1 for _ in x.shape[2:])) if weight.numel() > 1 else ()
    return torch.where(x > 0, x, x * weight.reshape(shape))


EXACT: dict[str, Callable[..., Meaning]] = {
    "AbsFwdOp": _of(lambda op, x: x.abs()),
    "AddFwdOp": _arithmetic(lambda op, a, b: a + op.alpha * b),
    "AlibiFwdOp": alibi,
    "BitwiseAndFwdOp": _of(lambda op, x, y: x & y),
    "BitwiseNotFwdOp": _of(lambda op, x: ~x),
    "BitwiseOrFwdOp": _of(lambda op, x, y: x | y),
    "BitwiseXorFwdOp": _of(lambda op, x, y: x ^ y),
    "CeilFwdOp": _of(lambda op, x: x.ceil()),
    "ClampScalarFwdOp": _of(lambda op, x: x.clamp(op.min, op.max)),
    "ClampTensorFwdOp": _of(lambda op, x, low, high: torch.clamp(x, low, high)),
    "CosFwdOp": _of(lambda op, x: x.cos()),
    "DivFwdOp": _quotient,
    "DropoutFwdOp": _of(_dropout),
    "ELUFwdOp": _of(lambda op, x: torch.where(x > 0, x, op.alpha * x.expm1())),
    "EqFwdOp": _of(lambda op, x, y: x == y),
    "ErfFwdOp": _of(lambda op, x: x.erf()),
    "ExpFwdOp": _of(lambda op, x: x.exp()),
    "Expm1FwdOp": _of(lambda op, x: x.expm1()),
    "FloorDivideFwdOp": _of(lambda op, x, y: torch.floor_divide(x, y)),
    "FloorFwdOp": _of(lambda op, x: x.floor()),
    "GELUAndMulBwdOp": gelu_and_mul_backward,
    "GELUAndMulFwdOp": gelu_and_mul,
    "GELUFwdOp": _of(lambda op, x: gelu64(x, op.approximate)),
    "GeFwdOp": _of(lambda op, x, y: x >= y),
    "GtFwdOp": _of(lambda op, x, y: x > y),
    "HardsigmoidFwdOp": _of(lambda op, x: (x + 3).clamp(0, 6) / 6),
    "HardswishFwdOp": _of(lambda op, x: x * (x + 3).clamp(0, 6) / 6),
    "HardtanhFwdOp": _of(lambda op, x: x.clamp(op.min_val, op.max_val)),
    "IsfiniteFwdOp": _of(lambda op, x: x.isfinite()),
    "IsinfFwdOp": _of(lambda op, x: x.isinf()),
    "IsnanFwdOp": _of(lambda op, x: x.isnan()),
    "LeFwdOp": _of(lambda op, x, y: x <= y),
    "LeakyReLUFwdOp": _of(lambda op, x: torch.where(x > 0, x, op.negative_slope * x)),
    "LerpScalarFwdOp": _of(lambda op, x, end: torch.lerp(x, end, op.weight)),
    "LerpTensorFwdOp": _of(lambda op, x, end, weight: torch.lerp(x, end, weight)),
    "Log1pFwdOp": _of(lambda op, x: x.log1p()),
    "LogFwdOp": _of(lambda op, x: x.log()),
    "LogicalAndFwdOp": _of(lambda op, x, y: (x != 0) & (y != 0)),
    "LogicalNotFwdOp": _of(lambda op, x: x == 0),
    "LogicalOrFwdOp": _of(lambda op, x, y: (x != 0) | (y != 0)),
    "LtFwdOp": _of(lambda op, x, y: x < y),
    "MaskedFillScalarFwdOp": _of(lambda op, x, mask: torch.where(mask, op.value, x).to(x.dtype)),
    "MaskedFillTensorFwdOp": _of(lambda op, x, mask, value: torch.where(mask, value, x)),
    "MaximumFwdOp": _of(lambda op, x, y: torch.maximum(x, y)),
    "MinimumFwdOp": _of(lambda op, x, y: torch.minimum(x, y)),
    "MishFwdOp": _of(lambda op, x: x * torch.tanh(torch.log1p(x.exp()))),
    "MulFwdOp": _arithmetic(lambda op, a, b: a * b),
    "NanToNumFwdOp": _nan_to_num,
    "NeFwdOp": _of(lambda op, x, y: x != y),
    "NegFwdOp": _of(lambda op, x: -x),
    "PReLUFwdOp": _of(_prelu),
    "PowFwdOp": _of(lambda op, x, y: x**y),
    "ReLUFwdOp": _of(lambda op, x: x.clamp_min(0)),
    "ReciprocalFwdOp": _of(lambda op, x: 1 / x.double()),
    "RemainderFwdOp": _of(lambda op, x, y: torch.remainder(x, y)),
    "RoundFwdOp": _round_of,
    "RsqrtFwdOp": _of(lambda op, x: 1 / x.sqrt()),
    "SELUFwdOp": _of(lambda op, x: F.selu(x)),
    "SiLUAndMulBwdOp": silu_and_mul_backward,
    "SiLUAndMulFwdOp": silu_and_mul,
    "SiLUFwdOp": _of(lambda op, x: silu64(x)),
    "SigmoidFwdOp": _of(lambda op, x: x.sigmoid()),
    "SignFwdOp": _of(lambda op, x: x.sign()),
    "SinFwdOp": _of(lambda op, x: x.sin()),
    "SinusoidalFwdOp": sinusoidal,
    "SoftplusFwdOp": _of(lambda op, x: F.softplus(x, op.beta, op.threshold)),
    "SqrtFwdOp": _of(lambda op, x: x.sqrt()),
    "SubFwdOp": _arithmetic(lambda op, a, b: a - op.alpha * b),
    "TanhFwdOp": _of(lambda op, x: x.tanh()),
    "TruncFwdOp": _of(lambda op, x: x.trunc()),
    "WhereFwdOp": _of(lambda op, condition, x, y: torch.where(condition, x, y)),
}
