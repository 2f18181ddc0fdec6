"""Rows too long for registers, and whole tensors, quantised on CUDA by two launches.

Which parts there are follows from the length alone; a largest number does not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run, TensorSpec
from tileops.lib.launch import Launcher, cdiv, output_of
from tileops.quantization.kernels.rows import EMPTY, LONGEST, Quantisation, bytes_of

__all__ = ["LongRows", "WholeTensor"]

DEVICE = f"{__name__}_triton"

CHUNK = 4096
"""Elements that a program reads at a time."""
TURNS = 4
"""Chunks of a part, where that makes neither more parts than PARTS nor fewer than multiprocessors."""
PARTS = 1024
"""Parts of a row, at most: each program that quantises reads what all of its row left."""
WARPS = 8


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    return first(), second()


def _entry(call: CallSpec, whole: bool) -> Entry:
    """``call`` in parts; ``whole``: of all its elements as one row."""
    asked = Quantisation.of(call)
    if asked.x.numel == 0:
        return EMPTY
    vector = asked.vector(_length(call, whole))
    sizes = {"CHUNK": CHUNK, "VECTOR": vector, "DEPENDENT": asked.dependent}
    counts = (("groups", "i64"), ("parts", "i32"), ("turns", "i32"))
    tensors = (("x", None), ("smooth", None), ("maxima", "*i32"))
    maxima = asked.build(f"{DEVICE}:part_maxima", (*tensors, *counts), WARPS, **sizes)
    quanta = asked.build(
        f"{DEVICE}:quantise_parts",
        (*tensors, ("q", None), ("scales", None), *counts, ("eps", "fp32")),
        WARPS,
        PARTS=PARTS,
        **sizes,
        **asked.numbers,
    )
    identity = (maxima.identity, quanta.identity)
    return Entry(
        identity, functools.partial(_both, maxima, quanta), functools.partial(_bind, whole)
    )


def _length(call: CallSpec, whole: bool) -> int:
    x = Quantisation.of(call).x
    return x.numel if whole else x.shape[-1]


def _bind(whole: bool, launchers: tuple[Launcher, Launcher], call: CallSpec) -> Run:
    asked, length = Quantisation.of(call), _length(call, whole)
    rows, chunks = asked.x.numel // length, cdiv(length, CHUNK)
    turns = min(TURNS, cdiv(rows * chunks, call.device.multiprocessors))
    turns = max(turns, cdiv(chunks, PARTS))
    parts = cdiv(chunks, turns)
    search, quantise = (launcher.on(call.device.index) for launcher in launchers)
    make, make_scales = asked.results()
    make_maxima = output_of(TensorSpec.contiguous_of((rows * parts,), torch.int32, asked.x.device))
    counts, eps = (length // asked.vector(length), parts, turns), asked.eps

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, scales, maxima = make(), make_scales(), make_maxima()
        search(rows * parts, 1, 1, *given, maxima, *counts)
        quantise(rows * parts, 1, 1, *given, maxima, bytes_of(q), scales, *counts, eps)
        return q, scales

    return run


class LongRows(Kernel):
    """Rows that one program does not hold."""

    name = "triton_long_rows"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        x = Quantisation.of(call).x
        longest = LONGEST[x.dtype.itemsize]
        if x.shape[-1] <= longest:
            return f"rows of {x.shape[-1]} elements need no second reading (more than {longest})"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return _entry(call, whole=False)


class WholeTensor(Kernel):
    """One scale for all elements."""

    name = "triton_whole_tensor"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return _entry(call, whole=True)
