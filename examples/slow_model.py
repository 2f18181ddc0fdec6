"""A decoder block that is slow under torch.compile for five reasons, and the same block as each is mended.

docs/tutorial.md finds them with ``tileops explain``. Each class differs from the one above it by one
thing, and all compute the same. ``python -m examples.slow_model`` times the first and the last, with
empty caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

import tileops
from tileops.elementwise import SiLUAndMulFwdOp
from tileops.norm import RMSNormFwdOp

__all__ = ["OneTable", "Pure", "Slow", "Uncounted", "Unwatched"]

LENGTHS = (24, 40, 56)


class Slow(torch.nn.Module):
    """Attention and a gated MLP, each behind a norm and added to ``x`` ``[batch, length, hidden]``."""

    def __init__(self, hidden: int = 256, heads: int = 4, capacity: int = 1024) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.head_dim, self.capacity = heads, hidden // heads, capacity
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)
        self.up = torch.nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.before_attention = torch.nn.Parameter(torch.ones(hidden))
        self.before_mlp = torch.nn.Parameter(torch.ones(hidden))
        self.norm, self.gate = RMSNormFwdOp(hidden, eps=1e-6), SiLUAndMulFwdOp()
        self.calls = 0
        self.tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count()
        h = self.attend(self.norm(x, self.before_attention))
        self.watch(h)
        x = self.add(x, h)
        return self.add(x, self.mlp(self.norm(x, self.before_mlp)))

    def count(self) -> None:
        self.calls += 1

    def watch(self, h: torch.Tensor) -> None:
        peak = h.abs().max().item()
        if peak > 1e3:
            print(f"call {self.calls}: activations reach {peak:.0f}")

    def add(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        x += h
        return x

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(self.up(x)))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        cos, sin = self.table(length)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).reshape(batch, length, hidden))

    def table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length not in self.tables:
            self.tables[length] = angles(length, self.head_dim)
        return self.tables[length]


class Unwatched(Slow):
    """Nothing in the block asks for a number: who wants to watch looks at what it returns."""

    def watch(self, h: torch.Tensor) -> None:
        pass


class Uncounted(Unwatched):
    """Calls are counted where the block is called."""

    def count(self) -> None:
        pass


class OneTable(Uncounted):
    """One table for all lengths, of which a call takes a part."""

    def __init__(self, hidden: int = 256, heads: int = 4, capacity: int = 1024) -> None:
        super().__init__(hidden, heads, capacity)
        cos, sin = angles(capacity, self.head_dim)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[:length], self.sin[:length]


class Pure(OneTable):
    """The caller's tensor stays as it is."""

    def add(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x + h


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def angles(length: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(0, head_dim, 2) / head_dim
    turned = torch.outer(torch.arange(length), 10000.0**-steps)
    return turned.cos(), turned.sin()


slow, unwatched, uncounted, one_table, pure = Slow(), Unwatched(), Uncounted(), OneTable(), Pure()


def main() -> None:
    torch.compile(torch.relu)(torch.ones(64))  # what Inductor does once for a machine
    seconds = []
    for block, options in ((slow, {}), (pure, {"backend": "tileops", "dynamic": True})):
        torch._dynamo.reset()
        run = torch.compile(block, **options)
        inputs = [torch.randn(2, length, 256) for length in LENGTHS]
        with torch.no_grad(), torch._inductor.utils.fresh_cache():
            started = time.perf_counter()
            with tileops.explaining() as report:
                for x in inputs:
                    run(x)
            first = time.perf_counter() - started
            warm = min(_timed(run, inputs[-1]) for _ in range(200))  # others use the machine too
        seconds.append((first, warm))
        counts = (
            ("graphs", report.graphs),
            ("breaks", report.breaks),
            ("recompilations", report.recompiles),
        )
        print(f"{type(block).__name__}:", ", ".join(f"{len(what)} {name}" for name, what in counts))
        print(f"  first calls {first:.1f} s, then {1e3 * warm:.2f} ms each")
    before, after = seconds
    print(
        f"{before[0] / after[0]:.1f} times faster at first, "
        f"{before[1] / after[1]:.1f} times faster then"
    )


def _timed(run: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    started = time.perf_counter()
    run(x)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
