"""Device code of ``softmax.py``: softmax, its logarithm, and with ``grad`` the gradients of both.

``x`` is what softmax is taken of or, with ``grad``, what softmax gave. A tile is summarised along the
axis by two numbers: its maximum and its sum of exponentials, or twice the sum that a gradient needs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileops.reduction.kernels.turns_triton import announce, await_count


@triton.jit
def _finite(peak):
    """What to subtract: the maximum, or zero where there is nothing but minus infinity."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _read(grad, x, y, corner, offset, inside, POLICY: tl.constexpr):
    """A tile of values, and of gradients where there are any, in float32."""
    if grad is None:
        value = tl.load(x + corner + offset, mask=inside, other=float("-inf"))
        # As the result's dtype holds it: torch casts first.
        value = value.to(tl.float32).to(y.dtype.element_ty).to(tl.float32)
        return value, value
    else:
        value = tl.load(x + corner + offset, mask=inside, other=0.0, eviction_policy=POLICY)
        grads = tl.load(grad + corner + offset, mask=inside, other=0.0)
        return value.to(tl.float32), grads.to(tl.float32)


@triton.jit
def _summary(value, grads, grad, AXIS: tl.constexpr, LOG: tl.constexpr):
    if grad is None:
        peak = tl.max(value, AXIS)
        return peak, tl.sum(tl.exp(value - tl.expand_dims(_finite(peak), AXIS)), AXIS)
    else:
        total = tl.sum(grads if LOG else grads * value, AXIS)
        return total, total


@triton.jit
def _merged(peaks, sums, grad):
    """One summary from those of chunks."""
    if grad is None:
        peak = tl.max(peaks, 0)
        return peak, tl.sum(sums * tl.exp(peaks - _finite(peak)), 0)
    else:
        total = tl.sum(sums, 0)
        return total, total


@triton.jit
def _result(value, grads, peak, total, grad, LOG: tl.constexpr):
    """Results from the summary of the whole axis."""
    if grad is None:
        shifted = value - _finite(peak)
        if LOG:
            return shifted - tl.log(total)
        else:
            return tl.exp(shifted) * (1.0 / total)
    elif LOG:
        return grads - tl.exp(value) * total
    else:
        return (grads - total) * value


@triton.jit
def _whole(
    grad,
    x,
    y,
    corner,
    offset,
    inside,
    AXIS: tl.constexpr,
    AGAIN: tl.constexpr,
    LOG: tl.constexpr,
):
    """A tile of whole axes."""
    value, grads = _read(grad, x, y, corner, offset, inside, "evict_last" if AGAIN else "")
    peak, total = _summary(value, grads, grad, AXIS, LOG)
    if AGAIN:
        value, _ = _read(grad, x, y, corner, offset, inside, "")
    peak, total = tl.expand_dims(peak, AXIS), tl.expand_dims(total, AXIS)
    tl.store(y + corner + offset, _result(value, grads, peak, total, grad, LOG), mask=inside)


@triton.jit
def softmax_rows(
    grad,
    x,
    y,
    rows,
    n_groups,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    AGAIN: tl.constexpr,  # the values are taken from cache again, and not held beside the gradients
    LOG: tl.constexpr,
):
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    inside = (row < rows - first) & (place < n)
    _whole(grad, x, y, first * n, row * n + place, inside, 1, AGAIN, LOG)


@triton.jit
def softmax_interleaved(
    grad,
    x,
    y,
    peaks,
    sums,
    words,
    rows,
    n_groups,
    chunks,
    lead,
    GRAIN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LOG: tl.constexpr,
):
    """A program summarises a chunk, and writes one ``lead`` rows before it, which is still in cache."""
    n = n_groups * GRAIN
    program = tl.program_id(0)
    ahead, start, place = program // chunks, program % chunks * CHUNK, tl.arange(0, CHUNK)
    row, inside = ahead - lead, start + place < n
    reads, writes = ahead < rows, row >= 0
    value, grads = _read(grad, x, y, ahead.to(tl.int64) * n + start, place, inside & reads, "")
    corner = row.to(tl.int64) * n + start
    again, grads_again = _read(grad, x, y, corner, place, inside & writes, "")
    if DEPENDENT:
        gdc_wait()  # for the words; what came before them in the stream is complete
    every, first = tl.arange(0, CHUNKS), row * chunks
    if writes:
        await_count(words + row, chunks)
    known = (every < chunks) & writes
    sum_each = tl.load(sums + first + every, mask=known, other=0.0)
    peak_each = sum_each
    if grad is None:
        peak_each = tl.load(peaks + first + every, mask=known, other=float("-inf"))
    if reads:
        peak, total = _summary(value, grads, grad, 0, LOG)
        if grad is None:
            tl.store(peaks + program, peak)
        tl.store(sums + program, total)
        announce(words + ahead, 1)
    peak, total = _merged(peak_each, sum_each, grad)
    value = _result(again, grads_again, peak, total, grad, LOG)
    tl.store(y + corner + place, value, mask=inside & writes)


@triton.jit
def softmax_split_summarise(
    grad,
    x,
    y,
    peaks,
    sums,
    n_groups,
    chunks,
    GRAIN: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LOG: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    n = n_groups * GRAIN
    program = tl.program_id(0)
    start, place = program % chunks * CHUNK, tl.arange(0, CHUNK)
    corner = (program // chunks).to(tl.int64) * n + start
    value, grads = _read(grad, x, y, corner, place, start + place < n, "")
    peak, total = _summary(value, grads, grad, 0, LOG)
    if grad is None:
        tl.store(peaks + program, peak)
    tl.store(sums + program, total)


@triton.jit
def softmax_split_write(
    grad,
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
    start, place = program % chunks * CHUNK, tl.arange(0, CHUNK)
    corner = (program // chunks).to(tl.int64) * n + start
    value, grads = _read(grad, x, y, corner, place, start + place < n, "")
    if DEPENDENT:
        gdc_wait()  # for the summaries; what came before them in the stream is complete
    every, first = tl.arange(0, CHUNKS), program - program % chunks
    sum_each = tl.load(sums + first + every, mask=every < chunks, other=0.0)
    peak_each = sum_each
    if grad is None:
        peak_each = tl.load(peaks + first + every, mask=every < chunks, other=float("-inf"))
    peak, total = _merged(peak_each, sum_each, grad)
    value = _result(value, grads, peak, total, grad, LOG)
    tl.store(y + corner + place, value, mask=start + place < n)


@triton.jit
def softmax_column_tile(
    grad,
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
    corner = (program // inner_tiles).to(tl.int64) * n * inner
    inside = (place < n) & (column < inner)
    _whole(grad, x, y, corner, place * inner + column, inside, 0, False, LOG)


@triton.jit
def softmax_columns(
    grad,
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
    corner = (program // inner_tiles).to(tl.int64) * n * inner
    step = tl.arange(0, STEP)[:, None].to(tl.int64)
    peak = tl.full([COLUMNS], float("-inf"), tl.float32)
    sums = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, n, STEP):
        place = start + step
        inside = (place < n) & (column < inner)
        value, grads = _read(grad, x, y, corner, place * inner + column, inside, "")
        tile_peak, tile_sum = _summary(value, grads, grad, 0, LOG)
        if grad is None:
            higher = tl.maximum(peak, tile_peak)
            base = _finite(higher)
            tile_sum *= tl.exp(tile_peak - base)
            sums *= tl.exp(peak - base)
            peak = higher
        sums += tile_sum
    for start in range(0, n, STEP):
        place = start + step
        inside = (place < n) & (column < inner)
        value, grads = _read(grad, x, y, corner, place * inner + column, inside, "")
        value = _result(value, grads, peak[None, :], sums[None, :], grad, LOG)
        tl.store(y + corner + place * inner + column, value, mask=inside)
