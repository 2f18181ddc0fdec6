"""The gradient of running products along one axis.

With ``p[i]`` the product of what lies before a place and ``s[i] = grad[i] + x[i + 1] s[i + 1]`` it is
``p[i] s[i]``: a running product forwards and a linear recurrence backwards, both scanned in registers,
without a division. A longer axis is walked in blocks, by one program, so a row's result does not
depend on how many rows stand beside it.
"""

from __future__ import annotations

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
from tileops.reduction.kernels.scan import Shape
from tileops.reduction.kernels.softmax import axes, grain_of

__all__ = ["ProductGradient"]

DEVICE = f"{__name__}_triton"

TILE = 2048
"""Elements of a block, at most."""
ROW_TILE = 512
"""Elements of a tile of several short rows."""
MOST_COLUMNS = 16
"""Neighbouring columns of a block: of float32, 64 bytes."""


def _shape(call: CallSpec) -> Shape:
    """How the call is cut, a part being a block."""
    outer, n, inner = axes(call)
    extent = next_power_of_2(max(n, 1))
    if inner == 1:
        return Shape(outer, n, inner, max(ROW_TILE // extent, 1), min(extent, TILE))
    kept = min(next_power_of_2(max(inner, 1)), MOST_COLUMNS)
    return Shape(outer, n, inner, kept, min(extent, TILE // kept))


def _wide(call: CallSpec) -> bool:
    return torch.float64 in (call.spec("grad_output").dtype, call.spec("input").dtype)


class ProductGradient(Kernel):
    """Blocks in registers, one after the other."""

    name = "triton_product_gradient"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        shape, wide = _shape(call), _wide(call)
        given = {"grad": call.spec("grad_output"), "x": call.spec("input")}
        fixed: tuple[tuple[str, Any], ...] = (
            ("N_GRAIN", grain_of(shape.n)),
            ("INNER_GRAIN", grain_of(shape.inner)),
            ("KEPT", shape.kept),
            ("BLOCK", shape.block),
            ("AXIS", 1 if shape.inner == 1 else 0),
            ("WALKS", shape.parts > 1),
            ("WIDE", wide),
        )
        build = TritonBuild(
            f"{DEVICE}:product_gradients",
            (
                *((name, pointer_to(spec.dtype)) for name, spec in given.items()),
                ("y", pointer_to(given["x"].dtype)),
                ("befores", "*fp64" if wide else "*fp32"),
                ("rows", "i64"),
                ("n_groups", "i64"),
                ("inner_groups", "i64"),
                ("inner_tiles", "i32"),
                ("blocks", "i32"),
            ),
            fixed,
            max(shape.kept * shape.block // 512, 1),
            aligned=(*(name for name, spec in given.items() if spec.aligned), "y"),
        )
        return Entry(build.identity, build, _bind)


def _bind(launcher: Launcher, call: CallSpec) -> Run:
    shape, spec = _shape(call), call.spec("input")
    launch, make = launcher.on(call.device.index), output_of(spec)
    count = shape.outer * shape.inner * shape.parts
    kind = torch.float64 if _wide(call) else torch.float32
    make_befores = output_of(TensorSpec.contiguous_of((count,), kind, spec.device))
    scalars = (
        shape.outer,
        shape.n // grain_of(shape.n),
        shape.inner // grain_of(shape.inner),
        cdiv(shape.inner, shape.kept),
        shape.parts,
    )

    def run(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = make()
        if y.numel():
            befores = make_befores() if shape.parts > 1 else None
            launch(shape.tiles, 1, 1, grad, x, y, befores, *scalars)
        return y

    return run
