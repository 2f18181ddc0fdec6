"""Softmax, its logarithm and the gradients of both over one axis: rows in registers, long rows in
chunks, axes with an inner stride.

The axis splits a contiguous tensor into ``outer`` x ``n`` x ``inner``. With ``inner == 1`` a row is
contiguous. A row of at most ``register_limit`` elements is read once and held in registers. A
longer one is cut into chunks of ``CHUNK``: each gives a maximum and a sum of exponentials (for a
gradient the sum that it needs), which are merged, and is read again for its result. Where rows together
stay in cache that takes two launches, else one, in which the two readings of a chunk are close to each
other (``turns_triton.py`` says why its waiting ends). Both run the same code on the same chunks, so a
row's result does not depend on how many rows stand beside it.

A row that is minus infinity throughout gives NaN, as do plus infinity and NaN anywhere in it.
"""

from __future__ import annotations

import functools
import math
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
from tileops.reduction.kernels.turns import CLEARED, clearing

__all__ = [
    "ColumnSoftmax",
    "ColumnTileSoftmax",
    "InterleavedSoftmax",
    "RowSoftmax",
    "SplitSoftmax",
]

DEVICE = f"{__name__}_triton"

REGISTER_LIMIT = 32768
"""Elements of a row that 32 warps hold; half as many where accesses have to be narrow."""
HELD_TOGETHER = 16384
"""Elements of a row of which two tensors are held; a longer one takes the values from cache again."""
ROW_TILE_BYTES = 4096
"""That are read of several short rows."""
CHUNK = 8192
CHUNK_WARPS = 8
MOST_CHUNKS = 1024
INTERLEAVED_BYTES = 32 << 20
"""Of what is read twice: from as many on it would come from memory again."""
LEAD = 32
"""Rows between a chunk's two readings: more chunks than run at a time, and far less than the cache holds.
The logarithm of 4096 rows of 128256 halves took 612 µs on an H200, 793 with 16 rows and 716 with 64."""
COLUMN_TILE = 16384
"""Elements of a tile that holds whole columns in registers."""
LEAST_COLUMNS = 16
STEP_TILE = 4096


def axes(call: CallSpec) -> tuple[int, int, int]:
    """``outer``, ``n`` and ``inner`` of a call whose first input is shaped like its output."""
    shape, dim = _source(call).shape, call.params.dim
    if not shape:
        return 1, 1, 1
    if dim is None:
        dim = 0 if len(shape) in (1, 3) else 1  # torch.nn.functional.softmax's implicit axis
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _source(call: CallSpec) -> TensorSpec:
    """The first input: softmax calls it ``x``, its logarithm ``input``."""
    return next(spec for spec in call.inputs.values() if spec is not None)


def _tensors(call: CallSpec) -> dict[str, TensorSpec]:
    """The call's tensors by the kernels' names, the inputs in the op's order."""
    (y,) = (spec for spec in call.outputs.values() if spec is not None)
    if "grad_output" in call.inputs:
        return {"grad": call.spec("grad_output"), "x": call.spec("output"), "y": y}
    return {"x": _source(call), "y": y}


def _wide(call: CallSpec) -> str | None:
    if any(spec.dtype is torch.float64 for spec in _tensors(call).values()):
        return "float64: it computes in float32"
    return None


def chunks_of(n: int) -> int:
    return cdiv(n, CHUNK)


def _read_twice(call: CallSpec) -> int:
    """Bytes that are read for a summary, and again for the result: of a gradient of the logarithm, what
    comes in."""
    *read, _ = _tensors(call).values()
    if call.op.startswith("Log"):
        read = read[:1]
    return sum(spec.numel * spec.dtype.itemsize for spec in read)


def register_limit(call: CallSpec) -> int:
    """Elements of a row to hold in registers: the addresses of narrow accesses take some too."""
    _, n, _ = axes(call)
    specs = [spec for spec in (*call.inputs.values(), *call.outputs.values()) if spec is not None]
    wide = all(spec.aligned and n * spec.dtype.itemsize % 16 == 0 for spec in specs)
    return REGISTER_LIMIT if wide else REGISTER_LIMIT // 2


def grain_of(size: int) -> int:
    return math.gcd(size, 16) or 16


def _build(
    call: CallSpec,
    fn: str,
    scalars: tuple[tuple[str, str], ...],
    constexprs: tuple[tuple[str, Any], ...],
    warps: int,
    options: tuple[tuple[str, Any], ...] = (),
) -> TritonBuild:
    """A build with the tensors that all these kernels share."""
    tensors = _tensors(call)
    signature = tuple((name, pointer_to(spec.dtype)) for name, spec in tensors.items())
    if "grad" not in tensors:
        constexprs = (("grad", None), *constexprs)
    return TritonBuild(
        f"{DEVICE}:{fn}",
        (*signature, *scalars),
        (*constexprs, ("LOG", call.op.startswith("Log"))),
        warps,
        aligned=tuple(name for name, spec in tensors.items() if name == "y" or spec.aligned),
        options=options,
    )


def _single(launcher: Launcher, call: CallSpec, programs: int, *scalars: int) -> Run:
    """The run of one kernel that takes the tensors and scalars."""
    launch, make = launcher.on(call.device.index), output_of(_tensors(call)["y"])

    def run(*given: torch.Tensor) -> torch.Tensor:
        y = make()
        if programs:
            launch(programs, 1, 1, *given, y, *scalars)
        return y

    return run


class RowSoftmax(Kernel):
    """Contiguous rows that fit in registers: read once, written once."""

    name = "triton_row"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        _, n, inner = axes(call)
        if inner != 1:
            return f"the axis has stride {inner}, not 1"
        if n > (most := register_limit(call)):
            return f"rows of {n} elements do not fit in registers (at most {most})"
        return _wide(call)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        sizes = (16, 8, 32) if "grad" in _tensors(call) else (32, 16, 8, 64)
        return [cls._entry(call, held) for held in sizes]

    @classmethod
    def _entry(cls, call: CallSpec, held: int) -> Entry:
        """``held``: elements that one thread holds of a tensor."""
        _, n, _ = axes(call)
        width = next_power_of_2(max(n, 1))
        warps = min(max(width // (32 * held), 4), 32)
        *read, _ = _tensors(call).values()
        height = max(ROW_TILE_BYTES // (width * sum(spec.dtype.itemsize for spec in read)), 1)
        grain, again = grain_of(n), len(read) > 1 and width > HELD_TOGETHER
        build = _build(
            call,
            "softmax_rows",
            (("rows", "i64"), ("n_groups", "i32")),
            (("GRAIN", grain), ("ROWS", height), ("N", width), ("AGAIN", again)),
            warps,
        )

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            outer, n, _ = axes(call)
            programs = cdiv(outer, height) if n else 0
            return _single(launcher, call, programs, outer, n // grain)

        return Entry(build.identity, build, bind)


class InterleavedSoftmax(Kernel):
    """Long contiguous rows, together too large for the cache: in one launch a program summarises a chunk
    of one row, and writes one of a row a few before, which is still in cache."""

    name = "triton_interleaved"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if reason := _refuses_chunks(call):
            return reason
        if (size := _read_twice(call)) < INTERLEAVED_BYTES:
            return f"{size} bytes stay in cache (at least {INTERLEAVED_BYTES} do not)"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, n, _ = axes(call)
        grain, most = grain_of(n), next_power_of_2(chunks_of(n))
        # From Hopper on the launch starts while the words that it waits on are cleared.
        dependent = call.device.arch >= (9, 0)
        build = _build(
            call,
            "softmax_interleaved",
            (
                *(("peaks", "*fp32"), ("sums", "*fp32"), ("words", "*i64")),
                *(("rows", "i32"), ("n_groups", "i32"), ("chunks", "i32"), ("lead", "i32")),
            ),
            (("GRAIN", grain), ("CHUNK", CHUNK), ("CHUNKS", most), ("DEPENDENT", dependent)),
            CHUNK_WARPS,
            (("launch_pdl", True),) if dependent else (),
        )
        clear = clearing(call)
        identity = (clear.identity, build.identity)
        return Entry(identity, functools.partial(load_all, clear, build), _bind_interleaved)


def _bind_interleaved(launchers: tuple[Launcher, Launcher], call: CallSpec) -> Run:
    clear, both = (launcher.on(call.device.index) for launcher in launchers)
    spec, (outer, n, _) = _tensors(call)["y"], axes(call)
    chunks, lead = chunks_of(n), min(LEAD, outer)
    summaries = TensorSpec.contiguous_of((2, outer * chunks), torch.float32, spec.device)
    words = TensorSpec.contiguous_of((outer,), torch.int64, spec.device)
    make, make_summaries, make_words = output_of(spec), output_of(summaries), output_of(words)
    scalars = (outer, n // grain_of(n), chunks, lead)
    programs = (outer + lead) * chunks

    def run(*given: torch.Tensor) -> torch.Tensor:
        y, counts, (peaks, sums) = make(), make_words(), make_summaries()
        clear(cdiv(outer, CLEARED), 1, 1, counts, outer)
        both(programs, 1, 1, *given, y, peaks, sums, counts, *scalars)
        return y

    return run


class SplitSoftmax(Kernel):
    """Long contiguous rows that stay in cache: a program for each chunk, in two launches."""

    name = "triton_split"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if reason := _refuses_chunks(call):
            return reason
        if (size := _read_twice(call)) >= INTERLEAVED_BYTES:
            return f"{size} bytes do not stay in cache (less than {INTERLEAVED_BYTES} do)"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, n, _ = axes(call)
        grain, most = grain_of(n), next_power_of_2(chunks_of(n))
        # From Hopper on the second launch starts, and reads its chunks, while the first runs.
        dependent = call.device.arch >= (9, 0)
        options = (("launch_pdl", True),) if dependent else ()
        more = (("peaks", "*fp32"), ("sums", "*fp32"), ("n_groups", "i32"), ("chunks", "i32"))
        fixed = (("GRAIN", grain), ("CHUNK", CHUNK), ("DEPENDENT", dependent))
        first = _build(call, "softmax_split_summarise", more, fixed, CHUNK_WARPS)
        rest = (*fixed, ("CHUNKS", most))
        second = _build(call, "softmax_split_write", more, rest, CHUNK_WARPS, options)

        def bind(launchers: tuple[Launcher, Launcher], call: CallSpec) -> Run:
            return _bind_split(launchers, call, grain)

        identity = (first.identity, second.identity)
        return Entry(identity, functools.partial(load_all, first, second), bind)


def load_all(*builds: TritonBuild) -> tuple[Launcher, ...]:
    return tuple(build() for build in builds)


def _bind_split(launchers: tuple[Launcher, Launcher], call: CallSpec, grain: int) -> Run:
    summarise, write = (launcher.on(call.device.index) for launcher in launchers)
    spec, (outer, n, _) = _tensors(call)["y"], axes(call)
    groups, chunks = n // grain, chunks_of(n)
    programs = outer * chunks
    summaries = TensorSpec.contiguous_of((2, programs), torch.float32, spec.device)
    make, make_summaries = output_of(spec), output_of(summaries)

    def run(*given: torch.Tensor) -> torch.Tensor:
        y = make()
        if programs:
            peaks, sums = make_summaries()
            summarise(programs, 1, 1, *given, y, peaks, sums, groups, chunks)
            write(programs, 1, 1, *given, y, peaks, sums, groups, chunks)
        return y

    return run


def _refuses_chunks(call: CallSpec) -> str | None:
    _, n, inner = axes(call)
    if inner != 1:
        return f"the axis has stride {inner}, not 1"
    if n <= (most := register_limit(call)):
        return f"rows of {n} elements fit in registers (at most {most})"
    if n > CHUNK * MOST_CHUNKS:
        return f"rows of {n} elements are too long (at most {CHUNK * MOST_CHUNKS})"
    return _wide(call)


class ColumnTileSoftmax(Kernel):
    """An axis with an inner stride, short enough for tiles of whole columns in registers."""

    name = "triton_column_tile"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        _, n, inner = axes(call)
        if inner == 1:
            return "the axis has stride 1"
        if n > COLUMN_TILE // LEAST_COLUMNS:
            return f"columns of {n} elements do not fit (at most {COLUMN_TILE // LEAST_COLUMNS})"
        return _wide(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, n, inner = axes(call)
        height = next_power_of_2(max(n, 1))
        width = max(min(next_power_of_2(max(inner, 1)), STEP_TILE // height), LEAST_COLUMNS)
        fixed = (("GRAIN", grain_of(inner)), ("N", height), ("COLUMNS", width))
        return _column_entry(
            call, "softmax_column_tile", fixed, width, max(height * width // 1024, 4)
        )


class ColumnSoftmax(Kernel):
    """Any axis: tiles of columns walk along it twice."""

    name = "triton_column"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return _wide(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        _, _, inner = axes(call)
        width = min(next_power_of_2(max(inner, 1)), 64)
        fixed = (("GRAIN", grain_of(inner)), ("STEP", STEP_TILE // width), ("COLUMNS", width))
        return _column_entry(call, "softmax_columns", fixed, width, 8)


def _column_entry(
    call: CallSpec, fn: str, fixed: tuple[tuple[str, Any], ...], width: int, warps: int
) -> Entry:
    grain = dict(fixed)["GRAIN"]
    scalars = (("n", "i64"), ("inner_groups", "i64"), ("inner_tiles", "i32"))
    build = _build(call, fn, scalars, fixed, warps)

    def bind(launcher: Launcher, call: CallSpec) -> Run:
        outer, n, inner = axes(call)
        tiles = cdiv(inner, width)
        programs = outer * tiles if n else 0
        return _single(launcher, call, programs, n, inner // grain, tiles)

    return Entry(build.identity, build, bind)
