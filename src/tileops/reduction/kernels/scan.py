"""Running sums and products along one axis: contiguous rows, and axes with an inner stride.

An axis of one block is read, scanned in registers and written. A longer one is walked in blocks,
which form at most ``MOST_PARTS`` parts. Where there are kept indices enough to fill the device, one
program walks along all parts and every element is read once. Where there are not, a first launch
finds what each part gives and a second one writes the parts. Both compute each element by the same
operations in the same order, so a row's result does not depend on how many rows stand beside it.
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

__all__ = ["Scan"]

DEVICE = f"{__name__}_triton"

WHOLE_ROW = 8192
"""Elements of a row that are one block."""
ROW_BLOCK = 4096
ROW_TILE = 2048
"""Elements of a block of several short rows."""
COLUMN_TILE = 2048
COLUMN_BYTES = 128
"""Contiguous bytes of a block of columns, where the inner axes have as many."""
MOST_PARTS = 64
PROGRAMS_PER_SM = 2
"""From as many on, one program walks along all parts."""
HELD = 64
"""Elements that one thread holds, at most; half as many of float64. Few warps hold many: each thread
adds up what all warps before its own gave, so a row costs a step for each pair of warps."""


@dataclass(frozen=True)
class Shape:
    """How a call is cut: a block is ``kept`` indices times ``block`` elements along the axis."""

    outer: int
    n: int
    inner: int
    kept: int
    block: int
    blocks: int
    """Of a part."""

    @classmethod
    def of(cls, call: CallSpec) -> Shape:
        outer, n, inner = axes(call)
        if inner == 1:
            block = next_power_of_2(max(n, 1)) if n <= WHOLE_ROW else ROW_BLOCK
            kept = max(ROW_TILE // block, 1)
        else:
            kept = min(
                next_power_of_2(max(inner, 1)), COLUMN_BYTES // call.spec("output").dtype.itemsize
            )
            tile = COLUMN_TILE // (2 if _wide(call) else 1)
            block = min(tile // kept, next_power_of_2(max(n, 1)))
        return cls(outer, n, inner, kept, block, cdiv(cdiv(n, block), MOST_PARTS))

    @property
    def parts(self) -> int:
        return cdiv(self.n, self.block * self.blocks) if self.blocks else 0

    @property
    def tiles(self) -> int:
        """Programs that walk along whole axes."""
        if self.inner == 1:
            return cdiv(self.outer, self.kept)
        return self.outer * cdiv(self.inner, self.kept)


class Scan(Kernel):
    """Blocks in registers, one after the other; parts side by side where few are long."""

    name = "triton_scan"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, _held(call))

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [cls._entry(call, held) for held in (_held(call), _held(call) // 2)]

    @classmethod
    def _entry(cls, call: CallSpec, held: int) -> Entry:
        """``held``: elements that one thread holds."""
        shape = Shape.of(call)
        enough = shape.tiles >= PROGRAMS_PER_SM * call.device.multiprocessors
        modes: tuple[str, ...] = ("whole",) if enough else ("totals", "write")
        if shape.n <= shape.block:
            modes = ("only",)
        builds = tuple(_build(call, shape, mode, held) for mode in modes)
        identity = tuple(build.identity for build in builds)
        return Entry(identity, functools.partial(load_all, *builds), _bind)


def _held(call: CallSpec) -> int:
    return HELD // 2 if _wide(call) else HELD


def _wide(call: CallSpec) -> bool:
    return torch.float64 in (_source(call).dtype, call.spec("output").dtype)


def _source(call: CallSpec) -> TensorSpec:
    return call.spec("input")


def _build(call: CallSpec, shape: Shape, mode: str, held: int) -> TritonBuild:
    x, y = _source(call), call.spec("output")
    rows = shape.inner == 1
    sizes = (
        (("rows", "i64"), ("n_groups", "i64"))
        if rows
        else (("n", "i64"), ("inner_groups", "i64"), ("inner_tiles", "i32"))
    )
    fixed: tuple[tuple[str, Any], ...] = (
        ("GRAIN", grain_of(shape.n if rows else shape.inner)),
        ("KEPT", shape.kept),
        ("BLOCK", shape.block),
        ("MODE", mode),
        ("PRODUCT", call.op == "CumprodFwdOp"),
        ("WIDE", _wide(call)),
        # From Hopper on the second launch starts while the first runs.
        ("DEPENDENT", call.device.arch >= (9, 0)),
    )
    dependent = mode == "write" and call.device.arch >= (9, 0)
    return TritonBuild(
        f"{DEVICE}:{'scan_rows' if rows else 'scan_columns'}",
        (
            ("x", pointer_to(x.dtype)),
            ("y", pointer_to(y.dtype)),
            ("totals", "*fp64" if _wide(call) else "*fp32"),
            *sizes,
            ("parts", "i32"),
            ("blocks", "i64"),
        ),
        fixed,
        min(max(shape.kept * shape.block // (32 * held), 4), 16),
        aligned=("x", "y") if x.aligned else ("y",),
        options=(("launch_pdl", True),) if dependent else (),
    )


def _bind(launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
    shape, spec = Shape.of(call), call.spec("output")
    launches = [launcher.on(call.device.index) for launcher in launchers]
    make, rows = output_of(spec), shape.inner == 1
    kind = torch.float64 if _wide(call) else torch.float32
    count = shape.outer * shape.inner * shape.parts
    make_totals = output_of(TensorSpec.contiguous_of((count,), kind, spec.device))
    sizes: tuple[int, ...] = (shape.outer, shape.n // grain_of(shape.n))
    if not rows:
        grain = grain_of(shape.inner)
        sizes = (shape.n, shape.inner // grain, cdiv(shape.inner, shape.kept))
    scalars = (*sizes, shape.parts, shape.blocks)
    programs = shape.tiles * (1 if len(launches) == 1 else shape.parts)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = make()
        if y.numel():
            totals = make_totals() if len(launches) > 1 else None
            for launch in launches:
                launch(programs, 1, 1, x, y, totals, *scalars)
        return y

    return run
