"""Running sums and products along one axis: contiguous rows, and axes with an inner stride.

Every element is read once. An axis of one block is scanned in registers and written. A longer one is
cut into parts of a block, a program each: it leaves what its part gives, waits for what the parts
before it gave, and writes (``turns_triton.py`` says why that ends). Parts form groups: a program adds
up what those of its own group gave, in one order, and takes what the groups before gave as the last
part of the previous group left it. Parts follow from the axis alone and no order of programs matters,
so a result is reproducible, and does not depend on how many rows stand beside its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run, TensorSpec
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    output_of,
    pointer_to,
)
from tileops.reduction.kernels.softmax import axes, grain_of, load_all
from tileops.reduction.kernels.turns import CLEARED, clearing

__all__ = ["Scan"]

DEVICE = f"{__name__}_triton"

WHOLE_ROW = 8192
"""Elements of a row that are one block."""
ROW_BLOCK = 4096
ROW_TILE = 2048
"""Elements of a block of several short rows."""
COLUMN_BYTES = 64
"""Contiguous bytes of a block of columns, where the inner axes have as many."""
COLUMN_THREADS = 128
"""Of a block of columns."""
GROUP = 32
"""Parts of a group; at most 62, which have a bit each of an int64."""
HELD = 64
"""Elements that one thread holds of rows, at most. Few warps hold many: each thread adds up what all
warps before its own gave, so a row costs a step for each pair of warps."""
COLUMNS_HELD = 32
"""And of columns: blocks are small, so that some are read while others wait or are written. Along 4096 of
4096 x 4096 halves an H200 took 42 µs so, 47 with blocks of twice the threads and columns, and 75 with
twice the elements to a thread of these."""


@dataclass(frozen=True)
class Shape:
    """How a call is cut: a block is ``kept`` indices times ``block`` elements along the axis."""

    outer: int
    n: int
    inner: int
    kept: int
    block: int

    @property
    def parts(self) -> int:
        """Blocks along the axis."""
        return cdiv(self.n, self.block)

    @property
    def tiles(self) -> int:
        """Of kept indices."""
        if self.inner == 1:
            return cdiv(self.outer, self.kept)
        return self.outer * cdiv(self.inner, self.kept)


@dataclass(frozen=True)
class Cut(Shape):
    """A block is scanned in ``stretches``, each by threads of its own."""

    stretches: int
    warps: int

    @classmethod
    def of(cls, call: CallSpec, held: int) -> Cut:
        """``held``: elements that one thread holds of rows; half as many of float64."""
        outer, n, inner = axes(call)
        extent, shrink = next_power_of_2(max(n, 1)), 2 if _wide(call) else 1
        if inner == 1:
            block = extent if n <= WHOLE_ROW else ROW_BLOCK
            kept = max(ROW_TILE // block, 1)
            return cls(
                outer,
                n,
                inner,
                kept,
                block,
                1,
                min(max(kept * block * shrink // (32 * held), 4), 16),
            )
        size = max(_source(call).dtype.itemsize, call.spec("output").dtype.itemsize)
        kept = min(next_power_of_2(max(inner, 1)), COLUMN_BYTES // size)
        vector = min(16 // size, kept, grain_of(inner))
        stretches = min(max(COLUMN_THREADS * vector // kept, 1), extent)
        block = min(stretches * (COLUMNS_HELD // shrink // vector), extent)
        return cls(outer, n, inner, kept, block, stretches, max(COLUMN_THREADS // 32, 1))

    @property
    def groups(self) -> int:
        return cdiv(self.parts, GROUP)


class Scan(Kernel):
    """Blocks in registers, which wait for those before them."""

    name = "triton_scan"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, HELD)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        _, _, inner = axes(call)
        return [cls._entry(call, held) for held in ((HELD, HELD // 2) if inner == 1 else (HELD,))]

    @classmethod
    def _entry(cls, call: CallSpec, held: int) -> Entry:
        cut = Cut.of(call, held)
        scan = _build(call, cut)
        builds = (scan,) if cut.parts <= 1 else (clearing(call), scan)
        identity = tuple(build.identity for build in builds)
        return Entry(identity, functools.partial(load_all, *builds), functools.partial(_bind, cut))


def _wide(call: CallSpec) -> bool:
    return torch.float64 in (_source(call).dtype, call.spec("output").dtype)


def _source(call: CallSpec) -> TensorSpec:
    return call.spec("input")


def _build(call: CallSpec, cut: Cut) -> TritonBuild:
    x, y = _source(call), call.spec("output")
    rows, alone = cut.inner == 1, cut.parts <= 1
    # From Hopper on the launch starts while the words that it waits on are cleared.
    dependent = not alone and call.device.arch >= (9, 0)
    if rows:
        sizes: tuple[tuple[str, str], ...] = (("rows", "i64"), ("n_groups", "i64"))
        block: tuple[tuple[str, Any], ...] = (("BLOCK", cut.block),)
    else:
        sizes = (("count", "i64"), ("n", "i64"), ("inner_groups", "i64"), ("inner_tiles", "i32"))
        block = (("STRETCHES", cut.stretches), ("LENGTH", cut.block // cut.stretches))
    return TritonBuild(
        f"{DEVICE}:{'scan_rows' if rows else 'scan_columns'}",
        (
            ("x", pointer_to(x.dtype)),
            ("y", pointer_to(y.dtype)),
            ("states", "*fp64" if _wide(call) else "*fp32"),
            ("words", "*i64"),
            *sizes,
            ("tiles", "i32"),
            ("parts", "i32"),
        ),
        (
            ("GRAIN", grain_of(cut.n if rows else cut.inner)),
            ("KEPT", cut.kept),
            *block,
            ("GROUP", GROUP),
            ("ALONE", alone),
            ("PRODUCT", call.op == "CumprodFwdOp"),
            ("WIDE", _wide(call)),
            ("DEPENDENT", dependent),
        ),
        cut.warps,
        aligned=("x", "y") if x.aligned else ("y",),
        options=(("launch_pdl", True),) if dependent else (),
    )


def _bind(cut: Cut, launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
    spec = call.spec("output")
    *before, scan = (launcher.on(call.device.index) for launcher in launchers)
    make, grain = output_of(spec), grain_of(cut.n if cut.inner == 1 else cut.inner)
    kind = torch.float64 if _wide(call) else torch.float32
    count, n_words = cut.outer * cut.inner, cut.groups * cut.tiles
    states = TensorSpec.contiguous_of(((cut.parts + cut.groups) * count,), kind, spec.device)
    words = TensorSpec.contiguous_of((n_words,), torch.int64, spec.device)
    make_states, make_words = output_of(states), output_of(words)
    sizes: tuple[int, ...] = (cut.outer, cut.n // grain)
    if cut.inner != 1:
        inner_tiles = cdiv(cut.inner, cut.kept)
        sizes = (count, cut.n, cut.inner // grain, inner_tiles)
    scalars = (*sizes, cut.tiles, cut.parts)
    programs = cut.tiles * cut.parts

    def run(x: torch.Tensor) -> torch.Tensor:
        y = make()
        if not programs:
            return y
        given = marks = None
        for clear in before:
            given, marks = make_states(), make_words()
            clear(cdiv(n_words, CLEARED), 1, 1, marks, n_words)
        scan(programs, 1, 1, x, y, given, marks, *scalars)
        return y

    return run
