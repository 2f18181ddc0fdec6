"""Rotary embedding by given tables, and its gradient.

Tables are broadcast along some leading dims of ``x``, as along heads. A program turns neighbouring rows:
several of one place of the tables or, where neighbours have places of their own, one of each of several.
Dims that lie side by side and are broadcast alike are one; two of each kind are enough for any order of
batch, heads and positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
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
from tileops.rope.kernels.rotate import FEWEST_PAIRS, turned

__all__ = ["RotateByTables"]

SIZES = ((512, 2), (256, 1), (1024, 4), (512, 4))
"""Pairs of features turned at a time and warps, the default first."""
WIDEST = 4096
"""Entries of a row that are held in registers."""
MOST = 2**31 - 1
WIDEST_GRID = 65535
"""Programs along the second axis."""


@dataclass(frozen=True)
class _Axes:
    """Of dims of ``x`` that are broadcast alike: how many places they have, how many the inner of at most
    two groups, and how many rows of ``x`` lie between neighbours of the outer and of the inner one."""

    count: int
    inner: int
    outer_step: int
    inner_step: int


def _axes(lead: tuple[int, ...], tables: tuple[int, ...]) -> tuple[_Axes, _Axes] | None:
    """Of the dims along which tables differ, and of those along which they are broadcast; None where
    either lie in more than two groups. ``lead``, ``tables``: the leading dims of both, none of size 0."""
    groups: list[tuple[bool, int, int]] = []
    step = 1
    for size, given in zip(reversed(lead), (*reversed(tables), *(1,) * len(lead)), strict=False):
        if size == 1:
            continue
        if groups and groups[-1][0] == (given != 1):
            differ, count, first = groups.pop()
            groups.append((differ, count * size, first))
        else:
            groups.append((given != 1, size, step))
        step *= size
    found = []
    for wanted in (True, False):
        own = [(count, first) for differ, count, first in groups if differ is wanted]
        if len(own) > 2:
            return None
        (inner, inner_step), (outer, outer_step) = (*own, (1, 0), (1, 0))[:2]
        found.append(_Axes(inner * outer, inner, outer_step, inner_step))
    return found[0], found[1]


def _of(call: CallSpec) -> tuple[_Axes, _Axes] | None:
    return _axes(turned(call).shape[:-1], call.spec("cos").shape[:-1])


class RotateByTables(Kernel):
    """Every call of rows that registers hold, but in float64."""

    name = "triton_rotate_by_tables"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        x = turned(call)
        if x.dtype is torch.float64:
            return "float64: it computes in float32"
        if x.shape[-1] > WIDEST:
            return f"rows of {x.shape[-1]} entries do not fit in registers (at most {WIDEST})"
        if not x.numel:
            return None
        axes = _of(call)
        if axes is None:
            return "the tables are broadcast along dims of more than two places"
        if max(one.count for one in axes) > MOST:
            return f"more than {MOST} places"
        return None

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return list({e.identity: e for e in (_entry(call, *size) for size in SIZES)}.values())


NUMBERS = (
    ("places", "places_inner", "place_step", "place_inner_step"),
    ("shared", "shared_inner", "shared_step", "shared_inner_step"),
)


def _numbers(axes: tuple[_Axes, _Axes]) -> list[tuple[str, str, int | None]]:
    """The kernel's arguments for both, with their types; None where one group of dims needs no number."""
    found: list[tuple[str, str, int | None]] = []
    for names, one in zip(NUMBERS, axes, strict=True):
        outer = (one.inner, one.outer_step) if one.inner != one.count else (None, None)
        values = (one.count, *outer, one.inner_step)
        found += zip(names, ("i32", "i32", "i64", "i64"), values, strict=True)
    return found


def _entry(call: CallSpec, tile: int, warps: int) -> Entry:
    x, cos, sin = turned(call), call.spec("cos"), call.spec("sin")
    width = x.shape[-1]
    half = next_power_of_2(width // 2)
    rows, warps = max(tile // half, 1), warps * max(half // tile, 1)
    axes = (_of(call) if x.numel else None) or (_Axes(1, 1, 0, 0),) * 2
    places, shared = axes
    by_place = shared.inner_step != 1 or shared.inner * half < FEWEST_PAIRS
    # A tile need not be higher than there are rows for it.
    most = next_power_of_2(places.count if by_place else shared.count)
    warps, rows = max(warps * min(rows, most) // rows, 1), min(rows, most)
    pointer, overlap = pointer_to(x.dtype), overlapping(call.device)
    given = {"x": x, "cos": cos, "sin": sin}
    build = TritonBuild(
        f"{__name__}_triton:rotate_by_tables",
        signature=(
            ("x", pointer),
            ("cos", pointer_to(cos.dtype)),
            ("sin", pointer_to(sin.dtype)),
            ("y", pointer),
            *((name, kind) for name, kind, value in _numbers(axes) if value is not None),
            ("resident", "i32"),
        ),
        constexprs=(
            *((name, None) for name, _, value in _numbers(axes) if value is None),
            ("D", width),
            ("PAIRS", cos.shape[-1] != width),
            ("ROWS", rows),
            ("BY_PLACE", by_place),
            ("HALF", half),
            ("INTERLEAVED", call.params.rope_layout == "interleaved"),
            ("BACK", call.op.endswith("BwdOp")),
            ("DEPENDENT", bool(overlap)),
        ),
        num_warps=warps,
        aligned=(*(name for name, spec in given.items() if spec.aligned), "y"),
        options=(("maxnreg", 255), *overlap),  # ptxas would rather spill one than use many
    )

    several, one = (places.count, shared.count) if by_place else (shared.count, places.count)
    layers = cdiv(one, WIDEST_GRID)
    grid = (cdiv(several, rows), cdiv(one, layers), layers)
    numbers = [value for _, _, value in _numbers(axes) if value is not None]
    numbers.append(resident(call.device, warps))

    def bind(launcher: Launcher, call: CallSpec) -> Run:
        return _bind(launcher, call, grid, numbers)

    return Entry(build.identity, build, bind)


def _bind(
    launcher: Launcher, call: CallSpec, grid: tuple[int, int, int], numbers: list[int]
) -> Run:
    launch, new = launcher.on(call.device.index), output_of(turned(call))

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = new()
        if x.numel():
            launch(*grid, x, cos, sin, y, *numbers)
        return y

    return run
