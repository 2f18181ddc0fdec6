"""Dropout on the CPU: a few elements at a time, so that their random words stay in the cache, or never in
memory where Inductor makes the loop."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileops.authoring import CallSpec, Compiled, Entry, Kernel, Run
from tileops.elementwise.dropout import drawn_seed, dropped, philox

__all__ = ["CompiledDropout", "Dropout"]

CHUNK = 1 << 18
"""Elements, a multiple of 4: their words and what they are made of take 4 MiB. A quarter of it takes a
third longer, since each of Philox's 150 steps is then a short call of ATen."""


COMPILED_FROM = 1 << 17
"""Elements from which the loop is compiled, which takes seconds, once in a process; 4 times as fast."""


class Dropout(Kernel):
    """Any dtype; writes its input where that is asked for."""

    name = "chunked_dropout"
    devices = ("cpu",)
    general = True

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return Entry((cls.name, call.key), lambda: dropped, _bind)


class CompiledDropout(Kernel):
    """The same by compiled code."""

    name = "compiled_dropout"
    devices = ("cpu",)
    compiles = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        given, count = call.params, call.spec("input").numel
        if not given.training or given.p == 0:
            return "nothing is dropped"
        if count < COMPILED_FROM:
            return f"compiling pays from {COMPILED_FROM} elements on, here {count}"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return Entry((cls.name,), lambda: Compiled(_kept, "dropout"), _bind_compiled)


def _kept(fours: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Which elements of as many fours stay, one tensor for each place among four; ``given``: the seed, the
    least word that stays and the number of the first four."""
    seed, least, first = given.unbind()
    counter = torch.arange(fours.shape[0], dtype=torch.int64) + first
    return tuple((word >= least).to(torch.uint8) for word in philox(seed, counter))


def _bind_compiled(made: Compiled, call: CallSpec) -> Run:
    least = round(call.params.p * 2**32)
    runs: dict[int, tuple[torch.Tensor, Run]] = {}

    def part(source: torch.Tensor, p: float, seed: int | torch.Tensor, first: int) -> torch.Tensor:
        count = source.numel()
        if count not in runs:  # the whole chunks, and the last one
            runs[count] = torch.empty(-(-count // 4), dtype=torch.bool), made.bound()
        fours, run = runs[count]
        draw = getattr(run, "trusted", run)  # once it has run
        kept = torch.stack(draw(fours, torch.tensor((int(seed), least, first // 4))), -1)
        kept = kept.flatten()[:count]
        return (source * kept).mul_(1 / (1 - p) if p < 1 else 0.0)

    return _bind(part, call)


def _bind(drop: Callable[..., torch.Tensor], call: CallSpec) -> Run:
    """``drop``: ``dropped``, or what gives the same."""
    given = call.params
    idle = not given.training or given.p == 0

    def run_into(x: torch.Tensor, y: torch.Tensor) -> None:
        source, to = x.view(-1), y.view(-1)
        seed = drawn_seed(x.device) if given.seed is None else given.seed
        for first in range(0, source.numel(), CHUNK):
            part = slice(first, first + CHUNK)
            to[part] = drop(source[part], given.p, seed, first)

    def in_place(x: torch.Tensor) -> None:
        if not idle:
            run_into(x, x)

    def out_of_place(x: torch.Tensor) -> torch.Tensor:
        if idle:
            return x.clone()
        y = torch.empty_like(x)
        run_into(x, y)
        return y

    return in_place if call.written else out_of_place
