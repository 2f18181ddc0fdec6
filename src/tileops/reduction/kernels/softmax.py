"""Softmax over one axis: rows in registers, long rows in chunks, and axes with an inner stride.

The axis splits a contiguous tensor into ``outer`` x ``n`` x ``inner``. With ``inner == 1`` a row is
contiguous. A row of at most ``REGISTER_LIMIT`` elements is read once and held in registers. A
longer one is cut into chunks of ``CHUNK``: each gives a maximum and a sum of exponentials, which
are merged. Where there are rows enough to fill the device one program serves a row, else the chunks
of a row go to as many programs. Both run the same code on the same chunks, so a row's result does
not depend on how many rows stand beside it.

A row that is minus infinity throughout gives NaN, as do plus infinity and NaN anywhere in it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, pointer_to

__all__ = ["ColumnSoftmax", "ColumnTileSoftmax", "RowSoftmax", "SplitSoftmax", "StreamedSoftmax"]

REGISTER_LIMIT = 16384
CHUNK = 4096
CHUNK_WARPS = 8
MOST_CHUNKS = 1024
STREAM_ROWS_PER_SM = 2
"""Rows for each multiprocessor from which one program serves a whole long row."""
COLUMN_TILE = 16384
"""Elements of a tile that holds whole columns in registers."""
LEAST_COLUMNS = 16
STEP_TILE = 4096


@triton.jit
def _cast(value, y):
    """The input as the result's dtype holds it (torch casts first), then float32."""
    return value.to(tl.float32).to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def _finite(peak):
    """What to subtract: the maximum, or zero where there is nothing but minus infinity."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _softmax_rows(x, y, rows, n_groups, GRAIN: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    inside = (row < rows - first) & (place < n)
    offset = row * n + place
    value = _cast(tl.load(x + first * n + offset, mask=inside, other=float("-inf")), y)
    value = tl.exp(value - _finite(tl.max(value, 1))[:, None])
    scale = 1.0 / tl.sum(value, 1)
    tl.store(y + first * n + offset, value * scale[:, None], mask=inside)


@triton.jit
def _load_chunk(x, y, chunk, n, CHUNK: tl.constexpr):
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    return _cast(tl.load(x + place, mask=place < n, other=float("-inf")), y)


@triton.jit
def _summarise(value):
    """Maximum and sum of exponentials of one chunk."""
    peak = tl.max(value, 0)
    return peak, tl.sum(tl.exp(value - _finite(peak)), 0)


@triton.jit
def _merge(peaks, sums):
    """What to subtract from and multiply with in the whole row."""
    base = _finite(tl.max(peaks, 0))
    return base, 1.0 / tl.sum(sums * tl.exp(peaks - base), 0)


@triton.jit
def _store_chunk(y, chunk, n, value, CHUNK: tl.constexpr):
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(y + place, value, mask=place < n)


@triton.jit
def _softmax_streamed(
    x, y, n_groups, chunks, GRAIN: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    n = n_groups * GRAIN
    row = tl.program_id(0).to(tl.int64) * n
    every = tl.arange(0, CHUNKS)
    peaks = tl.full([CHUNKS], float("-inf"), tl.float32)
    sums = tl.zeros([CHUNKS], tl.float32)
    for chunk in range(chunks):
        peak, total = _summarise(_load_chunk(x + row, y, chunk, n, CHUNK))
        peaks = tl.where(every == chunk, peak, peaks)
        sums = tl.where(every == chunk, total, sums)
    base, scale = _merge(peaks, sums)
    for back in range(chunks):  # backwards: the last chunks read are those still in cache
        chunk = chunks - 1 - back
        value = tl.exp(_load_chunk(x + row, y, chunk, n, CHUNK) - base) * scale
        _store_chunk(y + row, chunk, n, value, CHUNK)


@triton.jit
def _softmax_split_summarise(
    x,
    y,
    peaks,
    sums,
    n_groups,
    chunks,
    GRAIN: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    n = n_groups * GRAIN
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64) * n
    peak, total = _summarise(_load_chunk(x + row, y, program % chunks, n, CHUNK))
    tl.store(peaks + program, peak)
    tl.store(sums + program, total)


@triton.jit
def _softmax_split_write(
    x,
    y,
    peaks,
    sums,
    n_groups,
    chunks,
    GRAIN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    n = n_groups * GRAIN
    program = tl.program_id(0)
    chunk = program % chunks
    row = (program // chunks).to(tl.int64) * n
    value = _load_chunk(x + row, y, chunk, n, CHUNK)
    if DEPENDENT:
        gdc_wait()  # for the summaries; what came before them in the stream is complete
    every = tl.arange(0, CHUNKS)
    first = program - chunk
    base, scale = _merge(
        tl.load(peaks + first + every, mask=every < chunks, other=float("-inf")),
        tl.load(sums + first + every, mask=every < chunks, other=0.0),
    )
    _store_chunk(y + row, chunk, n, tl.exp(value - base) * scale, CHUNK)


@triton.jit
def _softmax_column_tile(
    x,
    y,
    n,
    inner_groups,
    inner_tiles,
    GRAIN: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    inner = inner_groups * GRAIN
    program = tl.program_id(0)
    place = tl.arange(0, N)[:, None].to(tl.int64)
    column = (program % inner_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    offset = ((program // inner_tiles).to(tl.int64) * n + place) * inner + column
    inside = (place < n) & (column < inner)
    value = _cast(tl.load(x + offset, mask=inside, other=float("-inf")), y)
    value = tl.exp(value - _finite(tl.max(value, 0))[None, :])
    scale = 1.0 / tl.sum(value, 0)
    tl.store(y + offset, value * scale[None, :], mask=inside)


@triton.jit
def _softmax_columns(
    x,
    y,
    n,
    inner_groups,
    inner_tiles,
    GRAIN: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    inner = inner_groups * GRAIN
    program = tl.program_id(0)
    column = (program % inner_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    corner = (program // inner_tiles).to(tl.int64) * n * inner + column
    peak = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, n, STEP):
        place = tl.arange(0, STEP)[:, None].to(tl.int64) + start
        inside = (place < n) & (column < inner)
        value = _cast(tl.load(x + corner + place * inner, mask=inside, other=float("-inf")), y)
        higher = tl.maximum(peak, tl.max(value, 0))
        base = _finite(higher)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(value - base[None, :]), 0)
        peak = higher
    base = _finite(peak)
    scale = 1.0 / total
    for start in range(0, n, STEP):
        place = tl.arange(0, STEP)[:, None].to(tl.int64) + start
        inside = (place < n) & (column < inner)
        value = _cast(tl.load(x + corner + place * inner, mask=inside, other=float("-inf")), y)
        value = tl.exp(value - base[None, :]) * scale[None, :]
        tl.store(y + corner + place * inner, value, mask=inside)


def _axes(call: CallSpec) -> tuple[int, int, int]:
    """``outer``, ``n`` and ``inner`` of the call."""
    shape, dim = call.spec("x").shape, call.params.dim
    if not shape:
        return 1, 1, 1
    if dim is None:
        dim = 0 if len(shape) in (1, 3) else 1  # torch.nn.functional.softmax's implicit axis
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _wide(call: CallSpec) -> str | None:
    if torch.float64 in (call.spec("x").dtype, call.spec("output").dtype):
        return "float64: it computes in float32"
    return None


def _chunks(n: int) -> int:
    return triton.cdiv(n, CHUNK)


def _streams(call: CallSpec, outer: int) -> bool:
    return outer >= STREAM_ROWS_PER_SM * call.device.multiprocessors


def _grain(size: int) -> int:
    return math.gcd(size, 16) or 16


def _build(
    call: CallSpec,
    fn: Any,
    scalars: tuple[tuple[str, str], ...],
    constexprs: tuple[tuple[str, Any], ...],
    warps: int,
    workspace: bool = False,
    options: tuple[tuple[str, Any], ...] = (),
) -> TritonBuild:
    """A build with the pointers that all these kernels share."""
    x, y = call.spec("x"), call.spec("output")
    signature = [("x", pointer_to(x.dtype)), ("y", pointer_to(y.dtype))]
    if workspace:
        signature += [("peaks", "*fp32"), ("sums", "*fp32")]
    aligned = ("x", "y") if x.aligned else ("y",)
    return TritonBuild(
        fn, (*signature, *scalars), constexprs, warps, aligned=aligned, options=options
    )


def _single(launcher: Launcher, call: CallSpec, programs: int, *scalars: int) -> Run:
    """The run of a kernel that takes ``x``, ``y`` and scalars."""
    launch, spec = launcher.on(call.device.index), call.spec("output")
    shape, dtype, device = spec.shape, spec.dtype, spec.device

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(shape, dtype=dtype, device=device)
        if programs:
            launch(programs, 1, 1, x, y, *scalars)
        return y

    return run


class RowSoftmax(Kernel):
    """Contiguous rows that fit in registers: read once, written once."""

    name = "triton_row"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        _, n, inner = _axes(call)
        if inner != 1:
            return f"the axis has stride {inner}, not 1"
        if n > REGISTER_LIMIT:
            return f"rows of {n} elements do not fit in registers (at most {REGISTER_LIMIT})"
        return _wide(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, 32)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [cls._entry(call, held) for held in (32, 16, 8, 64)]

    @classmethod
    def _entry(cls, call: CallSpec, held: int) -> Entry:
        """``held``: elements that one thread holds."""
        _, n, _ = _axes(call)
        width = triton.next_power_of_2(max(n, 1))
        warps = min(max(width // (32 * held), 4), 32)
        height = max(2048 // width, 1)
        grain = _grain(n)
        build = _build(
            call,
            _softmax_rows,
            (("rows", "i64"), ("n_groups", "i32")),
            (("GRAIN", grain), ("ROWS", height), ("N", width)),
            warps,
        )

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            outer, n, _ = _axes(call)
            programs = triton.cdiv(outer, height) if n else 0
            return _single(launcher, call, programs, outer, n // grain)

        return Entry(build.identity, build, bind)


class StreamedSoftmax(Kernel):
    """Long contiguous rows, enough of them to give each multiprocessor some."""

    name = "triton_streamed"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        outer, _, _ = _axes(call)
        if reason := _refuses_chunks(call):
            return reason
        if not _streams(call, outer):
            least = STREAM_ROWS_PER_SM * call.device.multiprocessors
            return f"{outer} rows do not fill the device (at least {least} do)"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, n, _ = _axes(call)
        grain = _grain(n)
        build = _build(
            call,
            _softmax_streamed,
            (("n_groups", "i32"), ("chunks", "i32")),
            (
                ("GRAIN", grain),
                ("CHUNK", CHUNK),
                ("CHUNKS", triton.next_power_of_2(_chunks(n))),
            ),
            CHUNK_WARPS,
        )

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            outer, n, _ = _axes(call)
            return _single(launcher, call, outer, n // grain, _chunks(n))

        return Entry(build.identity, build, bind)


class SplitSoftmax(Kernel):
    """Few long contiguous rows: a program for each chunk, in two launches."""

    name = "triton_split"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        outer, _, _ = _axes(call)
        if reason := _refuses_chunks(call):
            return reason
        if _streams(call, outer):
            return f"{outer} rows fill the device one program a row"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, n, _ = _axes(call)
        grain, most = _grain(n), triton.next_power_of_2(_chunks(n))
        # From Hopper on the second launch starts, and reads its chunks, while the first runs.
        dependent = call.device.arch >= (9, 0)
        options = (("launch_pdl", True),) if dependent else ()
        scalars = (("n_groups", "i32"), ("chunks", "i32"))
        fixed = (("GRAIN", grain), ("CHUNK", CHUNK), ("DEPENDENT", dependent))
        first = _build(call, _softmax_split_summarise, scalars, fixed, CHUNK_WARPS, True)
        rest = (*fixed, ("CHUNKS", most))
        second = _build(call, _softmax_split_write, scalars, rest, CHUNK_WARPS, True, options)

        def bind(launchers: tuple[Launcher, Launcher], call: CallSpec) -> Run:
            return _bind_split(launchers, call, grain)

        identity = (first.identity, second.identity)
        return Entry(identity, functools.partial(_load, first, second), bind)


def _load(*builds: TritonBuild) -> tuple[Launcher, ...]:
    return tuple(build() for build in builds)


def _bind_split(launchers: tuple[Launcher, Launcher], call: CallSpec, grain: int) -> Run:
    summarise, write = (launcher.on(call.device.index) for launcher in launchers)
    spec, (outer, n, _) = call.spec("output"), _axes(call)
    shape, dtype, device = spec.shape, spec.dtype, spec.device
    groups, chunks = n // grain, _chunks(n)
    programs = outer * chunks

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(shape, dtype=dtype, device=device)
        if programs:
            peaks, sums = torch.empty((2, programs), dtype=torch.float32, device=device)
            summarise(programs, 1, 1, x, y, peaks, sums, groups, chunks)
            write(programs, 1, 1, x, y, peaks, sums, groups, chunks)
        return y

    return run


def _refuses_chunks(call: CallSpec) -> str | None:
    _, n, inner = _axes(call)
    if inner != 1:
        return f"the axis has stride {inner}, not 1"
    if n <= REGISTER_LIMIT:
        return f"rows of {n} elements fit in registers (at most {REGISTER_LIMIT})"
    if n > CHUNK * MOST_CHUNKS:
        return f"rows of {n} elements are too long (at most {CHUNK * MOST_CHUNKS})"
    return _wide(call)


class ColumnTileSoftmax(Kernel):
    """An axis with an inner stride, short enough for tiles of whole columns in registers."""

    name = "triton_column_tile"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        _, n, inner = _axes(call)
        if inner == 1:
            return "the axis has stride 1"
        if n > COLUMN_TILE // LEAST_COLUMNS:
            return f"columns of {n} elements do not fit (at most {COLUMN_TILE // LEAST_COLUMNS})"
        return _wide(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, n, inner = _axes(call)
        height = triton.next_power_of_2(max(n, 1))
        width = max(min(triton.next_power_of_2(max(inner, 1)), STEP_TILE // height), LEAST_COLUMNS)
        fixed = (("GRAIN", _grain(inner)), ("N", height), ("COLUMNS", width))
        return _column_entry(call, _softmax_column_tile, fixed, width, 4 if n <= 256 else 8)


class ColumnSoftmax(Kernel):
    """Any axis: tiles of columns walk along it twice."""

    name = "triton_column"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return _wide(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, _, inner = _axes(call)
        width = min(triton.next_power_of_2(max(inner, 1)), 64)
        fixed = (("GRAIN", _grain(inner)), ("STEP", STEP_TILE // width), ("COLUMNS", width))
        return _column_entry(call, _softmax_columns, fixed, width, 8)


def _column_entry(
    call: CallSpec, fn: Any, fixed: tuple[tuple[str, Any], ...], width: int, warps: int
) -> Entry:
    grain = dict(fixed)["GRAIN"]
    scalars = (("n", "i64"), ("inner_groups", "i64"), ("inner_tiles", "i32"))
    build = _build(call, fn, scalars, fixed, warps)

    def bind(launcher: Launcher, call: CallSpec) -> Run:
        outer, n, inner = _axes(call)
        tiles = triton.cdiv(inner, width)
        programs = outer * tiles if n else 0
        return _single(launcher, call, programs, n, inner // grain, tiles)

    return Entry(build.identity, build, bind)
