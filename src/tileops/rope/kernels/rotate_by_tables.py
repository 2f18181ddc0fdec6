"""Rotary embedding by given tables, and its gradient.

Tables are broadcast along some leading dims of ``x``, as along heads. A program reads the entries of some
places of the tables once, and turns what they are for: row after row of one broadcast place each or,
where the tables have one place, several of its rows at a time. Dims that lie side by side and are
broadcast alike are one; two of each kind are enough for any order of batch, heads and positions.
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
    pointer_to,
)
from tileops.rope.kernels.rotate import PROGRAMS_PER_SM, turned

__all__ = ["RotateByTables"]

SIZES = ((1024, 4), (512, 2), (1024, 2), (2048, 8))
"""Pairs of features turned at a time and warps, the default first."""
WIDEST = 4096
"""Entries of a row that are held in registers."""
MOST = 2**31 - 1


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


def _entry(call: CallSpec, tile: int, warps: int) -> Entry:
    x, cos, sin = turned(call), call.spec("cos"), call.spec("sin")
    width = x.shape[-1]
    half = next_power_of_2(width // 2)
    rows, warps = max(tile // half, 1), warps * max(half // tile, 1)
    axes = (_of(call) if x.numel else None) or (_Axes(1, 1, 0, 0),) * 2
    most = next_power_of_2(axes[0].count if axes[0].count > 1 else axes[1].count)
    # A tile need not be higher than there are rows for it.
    warps, rows = max(warps * min(rows, most) // rows, 1), min(rows, most)
    several = axes[0].count > 1
    pointer = pointer_to(x.dtype)
    given = {"x": x, "cos": cos, "sin": sin}
    build = TritonBuild(
        f"{__name__}_triton:rotate_by_tables",
        signature=(
            ("x", pointer),
            ("cos", pointer_to(cos.dtype)),
            ("sin", pointer_to(sin.dtype)),
            ("y", pointer),
            *((name, "i32") for name in ("places", "places_inner")),
            *((name, "i64") for name in ("place_step", "place_inner_step")),
            *((name, "i32") for name in ("shared", "shared_inner")),
            *((name, "i64") for name in ("shared_step", "shared_inner_step")),
            *((name, "i32") for name in ("shared_each", "parts")),
        ),
        constexprs=(
            ("D", width),
            ("PAIRS", cos.shape[-1] != width),
            ("PLACES", rows if several else 1),
            ("SHARED", 1 if several else rows),
            ("HALF", half),
            ("INTERLEAVED", call.params.rope_layout == "interleaved"),
            ("BACK", call.op.endswith("BwdOp")),
        ),
        num_warps=warps,
        aligned=(*(name for name, spec in given.items() if spec.aligned), "y"),
        options=(("maxnreg", 255),),  # ptxas would rather spill one than use many
    )

    def bind(launcher: Launcher, call: CallSpec) -> Run:
        return _bind(launcher, call, axes, rows)

    return Entry(build.identity, build, bind)


def _bind(launcher: Launcher, call: CallSpec, axes: tuple[_Axes, _Axes], rows: int) -> Run:
    x, launch = turned(call), launcher.on(call.device.index)
    places, shared = axes
    blocks = cdiv(places.count, rows) if places.count > 1 else 1
    step = 1 if places.count > 1 else rows
    most = PROGRAMS_PER_SM * call.device.multiprocessors
    each = max(cdiv(cdiv(shared.count, step), cdiv(most, blocks)), 1) * step
    parts = cdiv(shared.count, each)
    programs = blocks * parts if x.numel else 0
    arguments = (
        *(places.count, places.inner, places.outer_step, places.inner_step),
        *(shared.count, shared.inner, shared.outer_step, shared.inner_step),
        *(each, parts),
    )
    new = output_of(x)

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = new()
        if programs:
            launch(programs, 1, 1, x, cos, sin, y, *arguments)
        return y

    return run
