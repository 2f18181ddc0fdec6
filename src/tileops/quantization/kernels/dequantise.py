"""Numbers out of int8 on CUDA, one multiplication each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    output_of,
    pointer_to,
)

__all__ = ["Dequantise"]

DEVICE = f"{__name__}_triton"

GROUP = 128
THREADS = 128
HELD = 16
"""Elements of a thread: few, so that a small call has programs for all multiprocessors."""


@dataclass(frozen=True)
class Tile:
    """What a program makes: ``rows`` by ``spans`` of ``width`` columns."""

    count: int
    """Rows that have a scale of their own or several."""
    length: int
    many: bool
    """A row has a scale for each ``width``."""
    rows: int
    spans: int
    width: int
    vector: int
    """Columns that a thread can take at once."""

    @classmethod
    def of(cls, call: CallSpec) -> Tile:
        q, size = call.spec("q"), call.spec("x").dtype.itemsize
        count, length = 1, q.numel
        if call.op != "INT8DequantPerTensorFwdOp":
            length = q.shape[-1]
            count = q.numel // max(length, 1)
        many = call.op == "INT8DequantPerBlockFwdOp"
        elements = THREADS * HELD
        extent = next_power_of_2(max(length, 1))
        width = GROUP if many else min(elements, extent)
        spans = max(min(elements, extent) // width, 1)
        rows = max(elements // (width * spans), 1)
        # No more than a thread can write at once.
        vector = math.gcd(16 // size, length) if q.aligned else 1
        return cls(count, length, many, rows, spans, width, vector)

    @property
    def across(self) -> int:
        """Programs for all columns."""
        return cdiv(self.length, self.width * self.spans)


class Dequantise(Kernel):
    """Tiles of rows and columns."""

    name = "triton_dequantise"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        tile = Tile.of(call)
        build = TritonBuild(
            f"{DEVICE}:dequantise",
            (
                *(("q", "*i8"), ("scale", "*fp32"), ("x", pointer_to(call.spec("x").dtype))),
                *(("rows", "i64"), ("groups", "i64"), ("across", "i32")),
            ),
            (
                *(("WIDTH", tile.width), ("MANY", tile.many), ("TILE", tile.rows)),
                *(("SPANS", tile.spans), ("VECTOR", tile.vector)),
            ),
            num_warps=THREADS // 32,
            num_stages=1,
            aligned=("q", "x") if tile.vector > 1 else ("x",),
        )
        return Entry(build.identity, build, _bind)


def _bind(launcher: Launcher, call: CallSpec) -> Run:
    tile = Tile.of(call)
    launch, make = launcher.on(call.device.index), output_of(call.spec("x"))
    programs, groups = cdiv(tile.count, tile.rows) * tile.across, tile.length // tile.vector

    def run(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = make()
        if programs:
            launch(programs, 1, 1, q, scale, x, tile.count, groups, tile.across)
        return x

    return run
