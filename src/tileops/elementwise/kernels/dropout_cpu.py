"""Dropout on the CPU: a few elements at a time, so that their random words stay in the cache."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.elementwise.dropout import drawn_seed, dropped

__all__ = ["Dropout"]

CHUNK = 1 << 18
"""Elements, a multiple of 4: their words and what they are made of take 4 MiB. A quarter of it takes a
third longer, since each of Philox's 150 steps is then a short call of ATen."""


class Dropout(Kernel):
    """Any dtype; writes its input where that is asked for."""

    name = "chunked_dropout"
    devices = ("cpu",)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return Entry((cls.name, call.key), lambda: None, _bind)


def _bind(_: None, call: CallSpec) -> Run:
    given = call.params
    idle = not given.training or given.p == 0

    def run_into(x: torch.Tensor, y: torch.Tensor) -> None:
        source, to = x.view(-1), y.view(-1)
        seed = drawn_seed(x.device) if given.seed is None else given.seed
        for first in range(0, source.numel(), CHUNK):
            part = slice(first, first + CHUNK)
            to[part] = dropped(source[part], given.p, seed, first)

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
