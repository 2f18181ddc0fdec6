"""What each op of the rope family means: rotations of complex numbers, each rate by its own formula.

Gradients are autograd's, of the same rotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["EXACT", "RATES", "by_tables"]

Meaning = tuple[tuple[torch.Tensor | None, ...], dict[str, torch.Tensor]]
Spectrum = tuple[list[float], float]


# ---- radians per position, pair by pair, and the factor on lengths -----------------------------------


def plain(op: Any, size: int) -> Spectrum:
    return [op.base ** (-2 * i / size) for i in range(size // 2)], 1.0


def llama31(op: Any, size: int) -> Spectrum:
    rates = []
    for rate in plain(op, size)[0]:
        turns = op.original_max_position * rate / (2 * math.pi)  # in the original context
        if turns > op.high_freq_factor:
            rates.append(rate)
        elif turns < op.low_freq_factor:
            rates.append(rate / op.scaling_factor)
        else:
            part = (turns - op.low_freq_factor) / (op.high_freq_factor - op.low_freq_factor)
            rates.append(rate * (part + (1 - part) / op.scaling_factor))
    return rates, 1.0


def yarn(op: Any, size: int) -> Spectrum:
    def pair(turns: float) -> float:  # the one that turns so often in the original context
        length = op.original_max_position / (2 * math.pi * turns)
        return size / 2 * math.log(length) / math.log(op.base)

    low, high = max(math.floor(pair(op.beta_fast)), 0), min(math.ceil(pair(op.beta_slow)), size - 1)
    rates = []
    for i, rate in enumerate(plain(op, size)[0]):
        ramp = (i - low) / (high - low if high != low else 0.001)
        slowed = min(max(ramp, 0.0), 1.0)
        rates.append(rate * (slowed / op.scaling_factor + 1 - slowed))
    longer = 0.1 * math.log(op.scaling_factor) + 1 if op.scaling_factor > 1 else 1.0
    return rates, longer * op.attn_factor


def long_rope(op: Any, size: int) -> Spectrum:
    rates = plain(op, size)[0]
    if op.rescale_factors is not None:
        rates = [rate / factor for rate, factor in zip(rates, op.rescale_factors, strict=True)]
    ratio = op.max_position / op.original_max_position
    if ratio <= 1:
        return rates, 1.0
    return rates, math.sqrt(1 + math.log(ratio) / math.log(op.original_max_position))


RATES: dict[str, Callable[[Any, int], Spectrum]] = {
    "RoPENeoxPositionIds": plain,
    "RoPE": plain,
    "RoPELlama31": llama31,
    "YaRN": yarn,
    "LongRoPE": long_rope,
}


# ---- the rotation ------------------------------------------------------------------------------------


def _rotated(op: Any, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """``x``: float64 ``[S, D]``, ``[B, S, H, D]``, or ``[N, H, D]`` at ``positions``."""
    size = getattr(op, "rotary_dim", None) or x.shape[-1]
    rates, scale = RATES[type(op).__name__[:-5]](op, size)
    if positions is None:
        positions = torch.arange(x.shape[0 if x.ndim == 2 else 1], device=x.device)
    angles = positions.double()[:, None] * torch.tensor(rates, dtype=torch.float64, device=x.device)
    turns = torch.polar(torch.full_like(angles, abs(scale)), angles) * math.copysign(1.0, scale)
    if x.ndim > 2:
        turns = turns[:, None]
    real, imaginary = turns.real, turns.imag
    if getattr(op, "rope_layout", "neox") == "interleaved":
        first, second = x[..., 0:size:2], x[..., 1:size:2]
    else:
        first, second = x[..., : size // 2], x[..., size // 2 : size]
    # Written out: a complex product of infinities is none of its parts' products.
    pair = (first * real - second * imaginary, first * imaginary + second * real)
    if getattr(op, "rope_layout", "neox") == "interleaved":
        return torch.stack(pair, -1).flatten(-2)
    return torch.cat([*pair, x[..., size:]], -1)


def forward(op: Any, x: torch.Tensor, positions: torch.Tensor | None = None) -> Meaning:
    return (_rotated(op, x.double(), positions),), {}


def backward(op: Any, grad_output: torch.Tensor, positions: torch.Tensor | None = None) -> Meaning:
    x = torch.randn_like(grad_output, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        result = _rotated(op, x, positions)
    return torch.autograd.grad(result, x, grad_output.double()), {}


def by_tables(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, back: bool = False
) -> torch.Tensor:
    """Pair by pair, the matrix ``[[cos, -sin], [sin, cos]]`` or its transpose; each row of it has entries
    of its own where tables have one for each entry of ``x``."""
    size, per_entry = x.shape[-1], cos.shape[-1] == x.shape[-1]
    x, cos, sin = x.double(), cos.double(), sin.double()
    columns: list[torch.Tensor] = [torch.empty(0)] * size
    for i in range(size // 2):
        p, q = (i, i + size // 2) if layout == "neox" else (2 * i, 2 * i + 1)
        one, other = (p, q) if per_entry else (i, i)
        matrix = [[cos[..., one], -sin[..., one]], [sin[..., other], cos[..., other]]]
        if back:
            matrix = [list(column) for column in zip(*matrix, strict=True)]
        for place, (a, b) in zip((p, q), matrix, strict=True):
            columns[place] = x[..., p] * a + x[..., q] * b
    return torch.stack(columns, -1)


def tables_forward(op: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Meaning:
    return (by_tables(x, cos, sin, op.rope_layout),), {}


def tables_backward(
    op: Any, grad_output: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Meaning:
    return (by_tables(grad_output, cos, sin, op.rope_layout, back=True),), {}


EXACT: dict[str, Callable[..., Meaning]] = {
    **{
        f"{name}{way}Op": meaning
        for name in RATES
        for way, meaning in (("Fwd", forward), ("Bwd", backward))
    },
    "RoPETablesFwdOp": tables_forward,
    "RoPETablesBwdOp": tables_backward,
}
