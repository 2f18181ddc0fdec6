"""What the ops of the quantization family mean; see ``oracle.py``.

Both quotients are rounded to float32 out of float64, which rounds a quotient of two float32 numbers once.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

__all__ = ["EXACT"]

Outputs = tuple[torch.Tensor | None, ...]
Meaning = tuple[Outputs, dict[str, torch.Tensor]]


def together(values: torch.Tensor, top: float, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """All of ``values`` by one scale, and the scale."""
    least = torch.tensor(eps, dtype=torch.float32).double()
    largest = values.double().abs().max()
    largest = torch.where(largest < least, least, largest)
    scale = (largest / top).float().double()
    quotient = (values.double() / scale).float().double()
    if top == 127:
        quotient = torch.where(quotient.isnan(), 0.0, quotient.round()).clamp(-128, 127)
    else:
        quotient = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    return quotient, scale


def by_rows(values: torch.Tensor, top: float, eps: float) -> Meaning:
    q = torch.empty(values.shape, dtype=torch.float64)
    scale = torch.empty(values.shape[:-1], dtype=torch.float64)
    for at in itertools.product(*map(range, scale.shape)):
        q[at], scale[at] = together(values[at], top, eps)
    return (q, scale), {}


def per_channel(op: Any, w: torch.Tensor) -> Meaning:
    return by_rows(w, 127, op.eps)


def per_tensor(op: Any, x: torch.Tensor) -> Meaning:
    q, scale = together(x, 127, op.eps)
    return (q, scale.view(1)), {}


def per_token_group(op: Any, x: torch.Tensor) -> Meaning:
    groups = math.ceil(x.shape[-1] / 128)
    if not groups:
        return (x.double(), torch.empty(*x.shape[:-1], 0, dtype=torch.float64)), {}
    parts = [by_rows(part, 127, op.eps)[0] for part in x.split(128, -1)]
    return (torch.cat([q for q, _ in parts], -1), torch.stack([s for _, s in parts], -1)), {}


def smooth_quant(op: Any, x: torch.Tensor, smooth: torch.Tensor) -> Meaning:
    return by_rows((x.double() / smooth.double()).float(), 127, op.eps)


def fp8_per_token_group(op: Any, x: torch.Tensor) -> Meaning:
    return by_rows(x, 448, op.eps)


def fp8_per_block(op: Any, w: torch.Tensor) -> Meaning:
    q = torch.empty(w.shape, dtype=torch.float64)
    scale = torch.empty(*(math.ceil(n / 128) for n in w.shape), dtype=torch.float64)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            q[here], scale[i, j] = together(w[here], 448, op.eps)
    return (q, scale), {}


def dequantise(op: Any, q: torch.Tensor, scale: torch.Tensor) -> Meaning:
    return (q.double() * scale.double().view(()),), {}


def dequantise_rows(op: Any, q: torch.Tensor, scale: torch.Tensor) -> Meaning:
    return (q.double() * scale.double()[..., None],), {}


def dequantise_blocks(op: Any, q: torch.Tensor, scale: torch.Tensor) -> Meaning:
    if not q.shape[-1]:
        return (q.double(),), {}
    parts = [
        part.double() * scale[..., n : n + 1].double() for n, part in enumerate(q.split(128, -1))
    ]
    return (torch.cat(parts, -1),), {}


EXACT = {
    "FP8QuantPerBlockFwdOp": fp8_per_block,
    "FP8QuantPerTokenGroupFwdOp": fp8_per_token_group,
    "INT8DequantPerBlockFwdOp": dequantise_blocks,
    "INT8DequantPerChannelFwdOp": dequantise_rows,
    "INT8DequantPerTensorFwdOp": dequantise,
    "INT8QuantPerChannelFwdOp": per_channel,
    "INT8QuantPerTensorFwdOp": per_tensor,
    "INT8QuantPerTokenGroupFwdOp": per_token_group,
    "SmoothQuantFwdOp": smooth_quant,
}
