"""Device code of ``softmax_bwd.py``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _term(grad, output, LOG: tl.constexpr):
    """What is summed along the axis."""
    return grad if LOG else grad * output


@triton.jit
def _result(grad, output, total, LOG: tl.constexpr):
    return grad - tl.exp(output) * total if LOG else (grad - total) * output


@triton.jit
def _load(pointer, inside):
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def softmax_bwd_rows(
    grad,
    output,
    dx,
    rows,
    n_groups,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    AGAIN: tl.constexpr,
    LOG: tl.constexpr,
):
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    inside = (row < rows - first) & (place < n)
    offset = row * n + place
    g = _load(grad + first * n + offset, inside)
    if AGAIN:
        y = g
        if not LOG:
            y = tl.load(output + first * n + offset, inside, 0.0, eviction_policy="evict_last")
            y = y.to(tl.float32)
        total = tl.sum(_term(g, y, LOG), 1)
        y = _load(output + first * n + offset, inside)
    else:
        y = _load(output + first * n + offset, inside)
        total = tl.sum(_term(g, y, LOG), 1)
    tl.store(dx + first * n + offset, _result(g, y, total[:, None], LOG), mask=inside)


@triton.jit
def softmax_bwd_split_sum(
    grad,
    output,
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
    row = (program // chunks).to(tl.int64) * n
    place = (program % chunks) * CHUNK + tl.arange(0, CHUNK)
    g = _load(grad + row + place, place < n)
    y = g if LOG else _load(output + row + place, place < n)
    tl.store(sums + program, tl.sum(_term(g, y, LOG), 0))


@triton.jit
def softmax_bwd_split_write(
    grad,
    output,
    dx,
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
    row = (program // chunks).to(tl.int64) * n
    place = (program % chunks) * CHUNK + tl.arange(0, CHUNK)
    g = _load(grad + row + place, place < n)
    y = _load(output + row + place, place < n)
    if DEPENDENT:
        gdc_wait()  # for the sums; what came before them in the stream is complete
    every = tl.arange(0, CHUNKS)
    first = program - program % chunks
    total = tl.sum(tl.load(sums + first + every, mask=every < chunks, other=0.0), 0)
    tl.store(dx + row + place, _result(g, y, total, LOG), mask=place < n)


@triton.jit
def softmax_bwd_columns(
    grad,
    output,
    dx,
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
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, n, STEP):
        place = tl.arange(0, STEP)[:, None].to(tl.int64) + start
        inside = (place < n) & (column < inner)
        g = _load(grad + corner + place * inner, inside)
        y = g if LOG else _load(output + corner + place * inner, inside)
        total += tl.sum(_term(g, y, LOG), 0)
    for start in range(0, n, STEP):
        place = tl.arange(0, STEP)[:, None].to(tl.int64) + start
        inside = (place < n) & (column < inner)
        g = _load(grad + corner + place * inner, inside)
        y = _load(output + corner + place * inner, inside)
        tl.store(dx + corner + place * inner, _result(g, y, total[None, :], LOG), mask=inside)
