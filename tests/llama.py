"""A Llama decoder block, whose norms, rotations, activation and attention are ours or PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["Block"]


class Block(torch.nn.Module):
    """``ours``: of this package's ops, else the same in plain PyTorch. Its input is ``[B, S, hidden]``."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int, ours: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.norms = torch.nn.ParameterList(torch.ones(hidden) for _ in range(2))
        kv = kv_heads * self.size
        self.q = torch.nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (torch.nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.o = torch.nn.Linear(hidden, hidden, bias=False)
        self.gate_up = torch.nn.Linear(hidden, 2 * inner, bias=False)
        self.down = torch.nn.Linear(inner, hidden, bias=False)
        self.parts: Any = _ours(hidden) if ours else _plain(hidden, self.size)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        norm, rope, attention, activation = self.parts
        batch, length, _ = x.shape
        normal = norm(x, self.norms[0])
        q = rope(self.q(normal).view(-1, self.heads, self.size), positions)
        k = rope(self.k(normal).view(-1, self.kv_heads, self.size), positions)
        v = self.v(normal)
        shape = (batch, length, -1, self.size)
        seen = attention(q.view(shape), k.view(shape), v.view(shape))
        x = x + self.o(seen.reshape(batch, length, -1))
        return x + self.down(activation(self.gate_up(norm(x, self.norms[1]))))


def _ours(hidden: int) -> tuple[Any, ...]:
    from tileops.attention import GQADenseFwdOp
    from tileops.elementwise import SiLUAndMulFwdOp
    from tileops.norm import RMSNormFwdOp
    from tileops.rope import RoPENeoxPositionIdsFwdOp

    rope = RoPENeoxPositionIdsFwdOp(max_position=4096)
    return RMSNormFwdOp(hidden, eps=1e-5), rope, GQADenseFwdOp(is_causal=True), SiLUAndMulFwdOp()


def _plain(hidden: int, size: int) -> tuple[Any, ...]:
    def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        powers = torch.arange(0, size, 2, device=x.device) / size
        angles = positions[:, None].float() * (1.0 / 10000.0**powers)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return seen.transpose(1, 2)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (hidden,), weight, 1e-5)

    def activation(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return norm, rope, attention, activation
