"""One scheme for every op whose outputs each depend on one element of each input.

An op's device function in ``expressions_triton.py`` is a compile-time argument of the two kernels: over
flat memory, and over rows that broadcast. The numbers among an op's parameters are run-time arguments.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from tileops.authoring import CallSpec, Entry, Run, TensorSpec
from tileops.elementwise.kernels.expressions import care_of, expression_of, usual_of
from tileops.elementwise.kernels.tiles import BYTES, Tile, Tiled
from tileops.lib.launch import (
    DeviceFunction,
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    output_of,
    overlapping,
    pointer_to,
    resident,
)

__all__ = ["ClampScalar", "NanToNum", "PReLU", "Pointwise", "Pow", "Round", "collapsed"]

DEVICE = f"{__name__}_triton"

NARROWEST = 128
"""Columns to which a tile of rows narrows where an eighth of its places would lie behind their ends."""
OUTER = 3
"""Most axes outside the innermost that the broadcasting kernel walks."""
HEIGHT = 4
"""Times as many rows in a tile where no input is as long as the output: a program that only writes is
short, and what it has read serves all its rows."""

Shape = tuple[int, ...]


def collapsed(shape: Shape, operands: Sequence[Shape]) -> tuple[list[int], list[list[int]]]:
    """The axes that a loop over ``shape`` needs, outermost first, and the strides of each contiguous
    operand along them (0 where it broadcasts): neighbours that every operand walks as one are one."""
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in operands]
    steps = [1] * len(operands)
    for axis in range(1, len(shape) + 1):
        size, here = shape[-axis], []
        for n, operand in enumerate(operands):
            own = operand[-axis] if axis <= len(operand) else 1
            here.append(steps[n] if own != 1 else 0)
            steps[n] *= own
        if size == 1:
            continue
        if sizes and all(s == kept[0] * sizes[0] for s, kept in zip(here, strides, strict=True)):
            sizes[0] *= size
            continue
        sizes.insert(0, size)
        for kept, step in zip(strides, here, strict=True):
            kept.insert(0, step)
    return sizes, strides


class Pointwise(Tiled):
    """Any shapes, dtypes and alignments; floating-point values are computed in float32."""

    name = "triton_pointwise"
    general = True

    # -- what an op may say of itself ----------------------------------------------------------

    @classmethod
    def expression(cls, call: CallSpec) -> DeviceFunction:
        """The device function."""
        return expression_of(call)

    @classmethod
    def scalars(cls, call: CallSpec) -> tuple[float, ...]:
        """Its run-time arguments after the tensors."""
        given = vars(call.params).values()
        return tuple(v for v in given if isinstance(v, int | float) and not isinstance(v, bool))

    @classmethod
    def shapes(cls, call: CallSpec) -> list[Shape]:
        """The shapes as which the inputs that are given broadcast."""
        return [spec.shape for spec in call.inputs.values() if spec is not None]

    # -- the kernel ----------------------------------------------------------------------------

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if torch.float64 in {spec.dtype for spec in call.inputs.values() if spec is not None}:
            return "float64: it computes in float32"
        axes = len(collapsed(_output(call).shape, cls.shapes(call))[0])
        if axes > OUTER + 1:
            return f"the shapes broadcast along {axes} axes (at most {OUTER + 1})"
        return None

    @classmethod
    def itemsize(cls, call: CallSpec) -> int:
        return max(spec.dtype.itemsize for spec in (*cls.long(call), _output(call)))

    @classmethod
    def tile(cls, call: CallSpec) -> Tile:
        """Where rows broadcast, those of four bytes and more are found once for twice as many elements."""
        elements, warps = super().tile(call)
        if (elements, warps) == cls.few or not cls.long(call):
            return elements, warps
        axes = len(collapsed(_output(call).shape, cls.shapes(call))[0])
        return (2 * elements if axes > 1 and elements < 1024 else elements), warps

    @classmethod
    def long(cls, call: CallSpec) -> list[TensorSpec]:
        """The inputs that have as many elements as the output."""
        count = _output(call).numel
        shapes = zip(_given(call), cls.shapes(call), strict=True)
        return [spec for spec, shape in shapes if math.prod(shape) == count]

    @classmethod
    def entry_of(cls, call: CallSpec, tile: Tile) -> Entry:
        sizes, strides = collapsed(_output(call).shape, cls.shapes(call))
        make = _flat if len(sizes) < 2 else _broadcasting
        build, launches = make(cls, call, tile, sizes, strides)

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind(launcher, call, launches)

        return Entry(build.identity, build, bind)


def _given(call: CallSpec) -> list[TensorSpec]:
    return [spec for spec in call.inputs.values() if spec is not None]


def _output(call: CallSpec) -> TensorSpec:
    (output,) = call.outputs.values()
    assert output is not None
    return output


Numbers = tuple[float, ...]
Made = tuple[TritonBuild, tuple[int, Numbers]]
"""A build, and for one call its programs and the numbers after the tensors."""


def _build(
    cls: type[Pointwise],
    call: CallSpec,
    kernel: str,
    numbers: dict[str, str | int | None],
    constants: dict[str, object],
    warps: int,
    steps: Sequence[int],
) -> TritonBuild:
    """``numbers``: each size or stride with its type, or its value where that is compiled in."""
    specs, output, scalars = _given(call), _output(call), cls.scalars(call)
    expression = cls.expression(call)
    floating = specs[0].dtype.is_floating_point
    kind = "fp32" if floating else "i64" if specs[0].dtype is torch.int64 else "i32"
    tensors = dict(zip("abc", specs, strict=False))
    aligned = [n for (n, s), step in zip(tensors.items(), steps, strict=True) if s.aligned and step]
    in_place, overlap = bool(call.written), overlapping(call.device)
    if specs[0].aligned or not in_place:
        aligned.append("y")
    return TritonBuild(
        f"{DEVICE}:{kernel}",
        signature=(
            *((name, pointer_to(spec.dtype)) for name, spec in tensors.items()),
            ("y", pointer_to(output.dtype)),
            *((name, given) for name, given in numbers.items() if isinstance(given, str)),
            ("resident", "i32"),
            *((name, kind) for name in "pqr"[: len(scalars)]),
        ),
        constexprs=(
            ("EXPRESSION", expression),
            ("CARE", care_of(expression, output.dtype.itemsize < 4)),
            ("TENSORS", len(specs)),
            ("SCALARS", len(scalars)),
            *((name, None) for name in "abc"[len(specs) :]),
            *((name, None) for name in "pqr"[len(scalars) :]),
            *((name, given) for name, given in numbers.items() if not isinstance(given, str)),
            *constants.items(),
            ("DEPENDENT", bool(overlap)),
        ),
        num_warps=warps,
        aligned=tuple(aligned),
        options=overlap,
    )


def _rest(cls: type[Pointwise], call: CallSpec, warps: int) -> Numbers:
    """What a launch takes after sizes and strides. What float32 cannot hold becomes infinite, as in a
    conversion."""
    floating, most = _given(call)[0].dtype.is_floating_point, resident(call.device, warps)
    scalars = cls.scalars(call)
    return most, *(ctypes.c_float(s).value if floating else int(s) for s in scalars)


def _flat(
    cls: type[Pointwise], call: CallSpec, tile: Tile, sizes: list[int], strides: list[list[int]]
) -> Made:
    count, (block, warps) = _output(call).numel, tile
    steps = [stride[0] if stride else 1 for stride in strides]
    # Two elements for each thread.
    usual = usual_of(cls.expression(call), _output(call).dtype.itemsize < 4)
    constants = {
        "STEPS": (*steps, 0, 0)[:3], "BLOCK": block, "TAIL": min(block, 64 * warps), "USUAL": usual,
    }  # fmt: skip
    build = _build(cls, call, "flat", {"n": "i64", "whole": "i32"}, constants, warps, steps)
    return build, (cdiv(count, block), (count, count // block, *_rest(cls, call, warps)))


def _width(columns: int, most: int) -> int:
    """Columns of a tile of rows."""
    width = min(next_power_of_2(columns), most)
    while width > NARROWEST and 8 * (cdiv(columns, width) * width - columns) > columns:
        width //= 2
    return width


def _broadcasting(
    cls: type[Pointwise], call: CallSpec, tile: Tile, sizes: list[int], strides: list[list[int]]
) -> Made:
    columns, outer, (block, warps) = sizes[-1], sizes[-2::-1], tile
    grain, count = math.gcd(columns, 16), _output(call).numel
    width = _width(columns, block)
    if not cls.long(call) and count >= 2 * HEIGHT * block * call.device.multiprocessors:
        block *= HEIGHT
    height, column_tiles, rows = block // width, cdiv(columns, width), math.prod(outer)
    row_tiles = cdiv(outer[0], height)
    tiled = len(outer) == 1 or 8 * (row_tiles * height - outer[0]) <= outer[0]
    kind = "i32" if count < 1 << 31 else "i64"
    # A stride that the kernel walks is a number of grains; one of 0 is compiled in.
    given = {"rows": rows, "groups": columns // grain, "column_tiles": column_tiles, "n0": outer[0]}
    if tiled and len(outer) > 1:
        given["row_tiles"] = row_tiles
    if len(outer) > 2:
        given["n1"] = outer[1]
    moves, itemsize = [], cls.itemsize(call)
    for name, stride, spec in zip("abc", strides, _given(call), strict=False):
        walked = stride[-2::-1]
        # One row for all rows of a tile is read by other threads than need it where a row is less than
        # the program's threads take at once. To read it for each is then cheaper, unless it is wider.
        again = stride[-1] != 0 and width < tile[0] and spec.dtype.itemsize <= itemsize
        moves.append(walked[0] != 0 or not tiled or again)
        for d, step in enumerate(walked):
            given[f"{name}{d}"] = step // grain if stride[-1] else step
    strided = [f"{name}{d}" for name in "abc" for d in range(OUTER)]
    names = ("rows", "groups", "column_tiles", "row_tiles", "n0", "n1", *strided)
    numbers: dict[str, str | int | None] = {name: kind if given.get(name) else 0 for name in names}
    if column_tiles == 1:
        numbers["column_tiles"] = None
    steps = [stride[-1] for stride in strides]
    constants = {
        "STEPS": (*steps, 0, 0)[:3], "MOVES": (*moves, False, False)[:3], "OUTER": len(outer),
        "TILED": tiled, "WIDE": kind == "i64", "GRAIN": grain, "ROWS": height, "COLUMNS": width,
    }  # fmt: skip
    build = _build(cls, call, "broadcasting", numbers, constants, warps, steps)
    passed = [given[name] for name, kind in numbers.items() if isinstance(kind, str)]
    tiles = rows // outer[0] * row_tiles if tiled and outer[0] else cdiv(rows, height)
    return build, (tiles * column_tiles, (*passed, *_rest(cls, call, warps)))


def _bind(launcher: Launcher, call: CallSpec, launches: tuple[int, Numbers]) -> Run:
    launch, (programs, numbers) = launcher.on(call.device.index), launches
    if call.written:

        def in_place(x: torch.Tensor) -> None:
            if programs:
                launch(programs, 1, 1, x, x, *numbers)

        return in_place
    fresh, whole = output_of(_output(call)), None not in call.inputs.values()

    def run(*inputs: torch.Tensor | None) -> torch.Tensor:
        y = fresh()
        if programs:
            given = inputs if whole else [x for x in inputs if x is not None]
            launch(programs, 1, 1, *given, y, *numbers)
        return y

    return run


# ---- ops whose parameters or shapes are not their expression's arguments ---------------------------


class ClampScalar(Pointwise):
    """A bound that is not given is infinite."""

    @classmethod
    def scalars(cls, call: CallSpec) -> Numbers:
        low, high = call.params.min, call.params.max
        return (-math.inf if low is None else low, math.inf if high is None else high)


class NanToNum(Pointwise):
    """What is not given is the dtype's largest and lowest number."""

    @classmethod
    def scalars(cls, call: CallSpec) -> Numbers:
        limits, given = torch.finfo(call.spec("input").dtype), call.params
        return (
            given.nan,
            limits.max if given.posinf is None else given.posinf,
            limits.min if given.neginf is None else given.neginf,
        )


class Round(Pointwise):
    """Decimals multiply, tens divide; the power of ten goes with its inverse."""

    @classmethod
    def expression(cls, call: CallSpec) -> DeviceFunction:
        places = call.params.decimals
        return expression_of(call, more="" if not places else "decimals" if places > 0 else "tens")

    @classmethod
    def scalars(cls, call: CallSpec) -> Numbers:
        if not call.params.decimals:
            return ()
        power = ctypes.c_float(10.0 ** abs(call.params.decimals)).value
        return power, 1 / power


class Pow(Pointwise):
    """Bound by instructions, so those around them are shared by more elements."""

    bytes = 2 * BYTES

    @classmethod
    def tile(cls, call: CallSpec) -> Tile:
        """At least 16 elements to a thread where the call fills the card: 3 % faster on an H200."""
        elements, warps = super().tile(call)
        return elements, min(warps, elements // 512) if elements > cls.few[0] else warps


class PReLU(Pointwise):
    """The weight lies along axis 1."""

    @classmethod
    def shapes(cls, call: CallSpec) -> list[Shape]:
        shape, weight = call.spec("input").shape, call.spec("weight").numel
        return [shape, (weight, *(1 for _ in shape[2:])) if weight != 1 else ()]
