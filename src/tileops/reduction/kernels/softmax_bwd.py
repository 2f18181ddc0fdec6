"""Gradients of softmax and its logarithm over one axis: one sum along it, then one pass.

Rows of at most ``register_limit`` elements are read once and held in registers; longer ones are cut
into chunks, each summed by one program and written by another. A row's result does not depend on how
many rows stand beside it.
"""

from __future__ import annotations

import functools
from typing import Any

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
from tileops.reduction.kernels.softmax import (
    CHUNK,
    CHUNK_WARPS,
    MOST_CHUNKS,
    STEP_TILE,
    axes,
    chunks_of,
    grain_of,
    load_all,
    log,
    register_limit,
)

__all__ = ["ColumnSoftmaxBwd", "RowSoftmaxBwd", "SplitSoftmaxBwd"]

DEVICE = f"{__name__}_triton"

HELD_TOGETHER = 16384
"""Elements of a row of which two tensors are held; a longer one takes the output from cache again."""


def _refuses(call: CallSpec) -> str | None:
    if call.spec("output").dtype is torch.float64:
        return "float64: it computes in float32"
    return None


def _build(
    call: CallSpec,
    fn: str,
    more: tuple[tuple[str, str], ...],
    constexprs: tuple[tuple[str, Any], ...],
    warps: int,
    writes: bool = True,
    options: tuple[tuple[str, Any], ...] = (),
) -> TritonBuild:
    pointer = pointer_to(call.spec("output").dtype)
    names = ("grad", "output", "dx") if writes else ("grad", "output")
    aligned = tuple(
        name
        for name, given in (("grad", "grad_output"), ("output", "output"))
        if call.spec(given).aligned
    )
    return TritonBuild(
        f"{DEVICE}:{fn}",
        (*((name, pointer) for name in names), *more),
        (*constexprs, log(call)),
        warps,
        aligned=(*aligned, "dx") if writes else aligned,
        options=options,
    )


def _single(launcher: Launcher, call: CallSpec, programs: int, *scalars: int) -> Run:
    launch, make = launcher.on(call.device.index), output_of(call.spec("output"))

    def run(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        dx = make()
        if programs:
            launch(programs, 1, 1, grad, output, dx, *scalars)
        return dx

    return run


class RowSoftmaxBwd(Kernel):
    """Contiguous rows that fit in registers: read once, written once."""

    name = "triton_row"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        _, n, inner = axes(call)
        if inner != 1:
            return f"the axis has stride {inner}, not 1"
        if n > (most := register_limit(call)):
            return f"rows of {n} elements do not fit in registers (at most {most})"
        return _refuses(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, 16)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [cls._entry(call, held) for held in (16, 8, 32)]

    @classmethod
    def _entry(cls, call: CallSpec, held: int) -> Entry:
        """``held``: elements of each tensor that one thread holds."""
        _, n, _ = axes(call)
        width = next_power_of_2(max(n, 1))
        warps = min(max(width // (32 * held), 4), 32)
        height = max(2048 // width, 1)
        grain = grain_of(n)
        build = _build(
            call,
            "softmax_bwd_rows",
            (("rows", "i64"), ("n_groups", "i32")),
            (("GRAIN", grain), ("ROWS", height), ("N", width), ("AGAIN", width > HELD_TOGETHER)),
            warps,
        )

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            outer, n, _ = axes(call)
            return _single(launcher, call, cdiv(outer, height) if n else 0, outer, n // grain)

        return Entry(build.identity, build, bind)


class SplitSoftmaxBwd(Kernel):
    """Long contiguous rows: a program for each chunk, in two launches."""

    name = "triton_split"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        _, n, inner = axes(call)
        if inner != 1:
            return f"the axis has stride {inner}, not 1"
        if n <= (most := register_limit(call)):
            return f"rows of {n} elements fit in registers (at most {most})"
        if n > CHUNK * MOST_CHUNKS:
            return f"rows of {n} elements are too long (at most {CHUNK * MOST_CHUNKS})"
        return _refuses(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, n, _ = axes(call)
        grain, most = grain_of(n), next_power_of_2(chunks_of(n))
        # From Hopper on the second launch starts, and reads its chunks, while the first runs.
        dependent = call.device.arch >= (9, 0)
        options = (("launch_pdl", True),) if dependent else ()
        more = (("sums", "*fp32"), ("n_groups", "i32"), ("chunks", "i32"))
        fixed = (("GRAIN", grain), ("CHUNK", CHUNK), ("DEPENDENT", dependent))
        first = _build(call, "softmax_bwd_split_sum", more, fixed, CHUNK_WARPS, False)
        rest = (*fixed, ("CHUNKS", most))
        second = _build(call, "softmax_bwd_split_write", more, rest, CHUNK_WARPS, True, options)

        def bind(launchers: tuple[Launcher, Launcher], call: CallSpec) -> Run:
            return _bind_split(launchers, call, grain)

        identity = (first.identity, second.identity)
        return Entry(identity, functools.partial(load_all, first, second), bind)


def _bind_split(launchers: tuple[Launcher, Launcher], call: CallSpec, grain: int) -> Run:
    add, write = (launcher.on(call.device.index) for launcher in launchers)
    spec, (outer, n, _) = call.spec("output"), axes(call)
    make, device = output_of(spec), spec.device
    groups, chunks = n // grain, chunks_of(n)
    programs = outer * chunks

    def run(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        dx = make()
        if programs:
            sums = torch.empty(programs, dtype=torch.float32, device=device)
            add(programs, 1, 1, grad, output, sums, groups, chunks)
            write(programs, 1, 1, grad, output, dx, sums, groups, chunks)
        return dx

    return run


class ColumnSoftmaxBwd(Kernel):
    """Any axis: tiles of columns walk along it twice."""

    name = "triton_column"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return _refuses(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, _, inner = axes(call)
        width = min(next_power_of_2(max(inner, 1)), 64)
        grain = grain_of(inner)
        build = _build(
            call,
            "softmax_bwd_columns",
            (("n", "i64"), ("inner_groups", "i64"), ("inner_tiles", "i32")),
            (("GRAIN", grain), ("STEP", STEP_TILE // width), ("COLUMNS", width)),
            8,
        )

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            outer, n, inner = axes(call)
            tiles = cdiv(inner, width)
            programs = outer * tiles if n else 0
            return _single(launcher, call, programs, n, inner // grain, tiles)

        return Entry(build.identity, build, bind)
