"""The activated left half of every row times its right half, and the gradient of that."""

from __future__ import annotations

import math

import torch

from tileops.authoring import CallSpec, Entry, Run
from tileops.elementwise.kernels.expressions import expression_of
from tileops.elementwise.kernels.tiles import Tile, Tiled
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    output_of,
    overlapping,
    pointer_to,
    resident,
)

__all__ = ["Gated", "GatedBackward"]

DEVICE = f"{__name__}_triton"

MOST = 65535
"""Programs along a grid's second axis."""


class Gated(Tiled):
    """Any number of rows and columns; computed in float32, rounded once."""

    name = "triton_gated"
    general = True
    device_function = "gated"
    op_ending = "AndMulFwdOp"
    few = (512, 4)
    tensors: tuple[str, ...] = ("input", "output")
    """What the device function takes, outputs last."""

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.spec("input").dtype is torch.float64:
            return "float64: it computes in float32"
        return None

    @classmethod
    def build(cls, call: CallSpec, tile: Tile) -> TritonBuild:
        """The kernel whose program has ``tile`` gates, each with what it multiplies."""
        spec, columns = call.spec("input"), call.spec("input").shape[-1] // 2
        rows = math.prod(spec.shape[:-1])
        elements, warps = tile
        width, overlap = min(next_power_of_2(max(columns, 1)), elements), overlapping(call.device)
        return TritonBuild(
            f"{DEVICE}:{cls.device_function}",
            signature=(
                *((name, pointer_to(spec.dtype)) for name in cls.tensors),
                ("rows", "i64"),
                ("column_groups", "i64"),
                ("resident", "i32"),
            ),
            constexprs=(
                ("ACTIVATION", expression_of(call, without=cls.op_ending, more="and_slope")),
                ("NARROW", spec.dtype.itemsize < 4),
                ("GRAIN", math.gcd(columns, 16) or 16),
                ("ROWS", elements // width),
                ("COLUMNS", width),
                # A tile is part of one row, rows are of whole tiles, and one axis of the grid numbers them.
                ("WHOLE", width == elements and columns % width == 0 and rows <= MOST),
                ("DEPENDENT", bool(overlap)),
            ),
            num_warps=warps,
            options=overlap,
            aligned=tuple(
                name for name in cls.tensors if name not in call.inputs or call.spec(name).aligned
            ),
        )

    @classmethod
    def itemsize(cls, call: CallSpec) -> int:
        return call.spec("input").dtype.itemsize

    @classmethod
    def entry_of(cls, call: CallSpec, tile: Tile) -> Entry:
        build = cls.build(call, tile)
        facts = dict(build.constexprs)

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            most = resident(call.device, build.num_warps)
            return cls._bind(launcher, call, facts["GRAIN"], facts["ROWS"], facts["COLUMNS"], most)

        return Entry(build.identity, build, bind)

    @classmethod
    def _bind(
        cls, launcher: Launcher, call: CallSpec, grain: int, height: int, width: int, most: int
    ) -> Run:
        spec, launch = call.spec("input"), launcher.on(call.device.index)
        rows, columns = math.prod(spec.shape[:-1]), spec.shape[-1] // 2
        groups, tiles = columns // grain, cdiv(rows, height)
        layers = cdiv(tiles, MOST) or 1
        grid = (cdiv(columns, width), cdiv(tiles, layers), layers)
        fresh = output_of(call.spec(cls.tensors[-1]))

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            y = fresh()
            if rows and columns:
                launch(*grid, *inputs, y, rows, groups, most)
            return y

        return run


class GatedBackward(Gated):
    """The gradient of both halves, each row of the input read once."""

    name = "triton_gated_backward"
    device_function = "gated_backward"
    op_ending = "AndMulBwdOp"
    tensors = ("grad_output", "input", "grad_input")
