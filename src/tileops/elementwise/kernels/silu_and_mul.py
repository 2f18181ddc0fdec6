"""SiLU of the left half times the right half of every row."""

from __future__ import annotations

import math

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, cdiv, next_power_of_2, pointer_to

__all__ = ["SiluAndMul"]

DEVICE = f"{__name__}_triton"

TILE = {2: 1024, 4: 512}
"""Outputs of one program by bytes an element: the fastest of 1024 to 8192 halves on an H200."""
WARPS = 4


class SiluAndMul(Kernel):
    """Any number of rows and columns; computed in float32, rounded once."""

    name = "triton_silu_and_mul"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.spec("input").dtype is torch.float64:
            return "float64: it computes in float32"
        return None

    @classmethod
    def build(cls, call: CallSpec, tile: int, warps: int) -> TritonBuild:
        """The kernel for ``tile`` outputs a program."""
        spec, columns = call.spec("input"), call.spec("input").shape[-1] // 2
        pointer = pointer_to(spec.dtype)
        width = min(next_power_of_2(max(columns, 1)), tile)
        return TritonBuild(
            f"{DEVICE}:silu_and_mul",
            signature=(
                ("x", pointer),
                ("y", pointer),
                ("rows", "i64"),
                ("column_groups", "i64"),
                ("column_tiles", "i32"),
            ),
            constexprs=(
                ("GRAIN", math.gcd(columns, 16) or 16),
                ("ROWS", tile // width),
                ("COLUMNS", width),
            ),
            num_warps=warps,
            aligned=("x", "y") if spec.aligned else ("y",),
        )

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, TILE[call.spec("input").dtype.itemsize], WARPS)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        tile = TILE[call.spec("input").dtype.itemsize]
        sizes = [(tile, 4), (tile // 2, 4), (tile * 2, 4), (tile * 2, 8), (tile * 4, 8)]
        return [cls._entry(call, *size) for size in sizes]

    @classmethod
    def _entry(cls, call: CallSpec, tile: int, warps: int) -> Entry:
        build = cls.build(call, tile, warps)
        facts = dict(build.constexprs)

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind(launcher, call, facts["GRAIN"], facts["ROWS"], facts["COLUMNS"])

        return Entry(build.identity, build, bind)


def _bind(launcher: Launcher, call: CallSpec, grain: int, height: int, width: int) -> Run:
    spec, launch = call.spec("input"), launcher.on(call.device.index)
    rows, columns = math.prod(spec.shape[:-1]), spec.shape[-1] // 2
    shape, dtype, device = (*spec.shape[:-1], columns), spec.dtype, spec.device
    groups, column_tiles = columns // grain, cdiv(columns, width)
    programs = cdiv(rows, height) * column_tiles

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(shape, dtype=dtype, device=device)
        if programs:
            launch(programs, 1, 1, x, y, rows, groups, column_tiles)
        return y

    return run
