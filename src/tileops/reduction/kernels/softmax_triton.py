"""Device code of ``softmax.py``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _cast(value, y):
    """The input as the result's dtype holds it (torch casts first), then float32."""
    return value.to(tl.float32).to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def _finite(peak):
    """What to subtract: the maximum, or zero where there is nothing but minus infinity."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _factor(total, LOG: tl.constexpr):
    """What a whole row's sum of exponentials contributes to each of its elements."""
    return tl.log(total) if LOG else 1.0 / total


@triton.jit
def _result(shifted, factor, LOG: tl.constexpr):
    """An element of the result from its distance to the row's maximum."""
    return shifted - factor if LOG else tl.exp(shifted) * factor


@triton.jit
def softmax_rows(
    x,
    y,
    rows,
    n_groups,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    LOG: tl.constexpr,
):
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    inside = (row < rows - first) & (place < n)
    offset = row * n + place
    value = _cast(tl.load(x + first * n + offset, mask=inside, other=float("-inf")), y)
    shifted = value - _finite(tl.max(value, 1))[:, None]
    factor = _factor(tl.sum(tl.exp(shifted), 1), LOG)
    tl.store(y + first * n + offset, _result(shifted, factor[:, None], LOG), mask=inside)


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
def _merge(peaks, sums, LOG: tl.constexpr):
    """The base and the factor of the whole row."""
    base = _finite(tl.max(peaks, 0))
    return base, _factor(tl.sum(sums * tl.exp(peaks - base), 0), LOG)


@triton.jit
def _store_chunk(y, chunk, n, value, CHUNK: tl.constexpr):
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(y + place, value, mask=place < n)


@triton.jit
def softmax_streamed(
    x,
    y,
    n_groups,
    chunks,
    GRAIN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOG: tl.constexpr,
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
    base, factor = _merge(peaks, sums, LOG)
    for back in range(chunks):  # backwards: the last chunks read are those still in cache
        chunk = chunks - 1 - back
        value = _result(_load_chunk(x + row, y, chunk, n, CHUNK) - base, factor, LOG)
        _store_chunk(y + row, chunk, n, value, CHUNK)


@triton.jit
def softmax_split_summarise(
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
def softmax_split_write(
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
    LOG: tl.constexpr,
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
    base, factor = _merge(
        tl.load(peaks + first + every, mask=every < chunks, other=float("-inf")),
        tl.load(sums + first + every, mask=every < chunks, other=0.0),
        LOG,
    )
    _store_chunk(y + row, chunk, n, _result(value - base, factor, LOG), CHUNK)


@triton.jit
def softmax_column_tile(
    x,
    y,
    n,
    inner_groups,
    inner_tiles,
    GRAIN: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG: tl.constexpr,
):
    inner = inner_groups * GRAIN
    program = tl.program_id(0)
    place = tl.arange(0, N)[:, None].to(tl.int64)
    column = (program % inner_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    offset = ((program // inner_tiles).to(tl.int64) * n + place) * inner + column
    inside = (place < n) & (column < inner)
    value = _cast(tl.load(x + offset, mask=inside, other=float("-inf")), y)
    shifted = value - _finite(tl.max(value, 0))[None, :]
    factor = _factor(tl.sum(tl.exp(shifted), 0), LOG)
    tl.store(y + offset, _result(shifted, factor[None, :], LOG), mask=inside)


@triton.jit
def softmax_columns(
    x,
    y,
    n,
    inner_groups,
    inner_tiles,
    GRAIN: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG: tl.constexpr,
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
    factor = _factor(total, LOG)
    for start in range(0, n, STEP):
        place = tl.arange(0, STEP)[:, None].to(tl.int64) + start
        inside = (place < n) & (column < inner)
        value = _cast(tl.load(x + corner + place * inner, mask=inside, other=float("-inf")), y)
        value = _result(value - base[None, :], factor[None, :], LOG)
        tl.store(y + corner + place * inner, value, mask=inside)
