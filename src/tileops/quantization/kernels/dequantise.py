"""Numbers out of int8 on CUDA, one multiplication each."""

from __future__ import annotations

import math

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
ELEMENTS = 4096
"""Of a program: 32 to each of 128 threads."""
WIDEST = 1024
"""Columns of a program, where rows differ in their scales."""


def _sizes(call: CallSpec) -> tuple[int, int, int]:
    """Rows that have a scale of their own or several, their length, and how many columns share one of
    several."""
    q = call.spec("q")
    if call.op == "INT8DequantPerTensorFwdOp":
        return 1, q.numel, 0
    length = q.shape[-1]
    return q.numel // max(length, 1), length, GROUP if call.op == "INT8DequantPerBlockFwdOp" else 0


def _vector(call: CallSpec) -> int:
    q = call.spec("q")
    return math.gcd(16, _sizes(call)[1]) if q.aligned else 1


def _tile(call: CallSpec) -> tuple[int, int]:
    """Rows and columns of a program: all columns where there is one row."""
    length = next_power_of_2(max(_sizes(call)[1], 1))
    if call.op == "INT8DequantPerTensorFwdOp":
        return 1, min(ELEMENTS, length)
    block = min(WIDEST, length)
    return ELEMENTS // block, block


class Dequantise(Kernel):
    """Tiles of rows and columns."""

    name = "triton_dequantise"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        tile, block = _tile(call)
        vector = _vector(call)
        build = TritonBuild(
            f"{DEVICE}:dequantise",
            (
                *(("q", "*i8"), ("scale", "*fp32"), ("x", pointer_to(call.spec("x").dtype))),
                *(("rows", "i64"), ("groups", "i64")),
            ),
            (("GROUP", _sizes(call)[2]), ("TILE", tile), ("BLOCK", block), ("VECTOR", vector)),
            num_warps=4,
            num_stages=1,
            aligned=("q", "x") if vector > 1 else ("x",),
        )
        return Entry(build.identity, build, _bind)


def _bind(launcher: Launcher, call: CallSpec) -> Run:
    rows, length, _ = _sizes(call)
    tile, block = _tile(call)
    programs = cdiv(rows, tile) * cdiv(length, block)
    launch, make = launcher.on(call.device.index), output_of(call.spec("x"))
    groups = length // _vector(call)

    def run(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = make()
        if programs:
            launch(programs, 1, 1, q, scale, x, rows, groups)
        return x

    return run
