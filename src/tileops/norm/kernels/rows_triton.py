"""Triton kernels that normalise rows by their root mean square, a residual added first or not.

``rms_norm.py`` says which serves when. Offsets within a tile are 32-bit; where a tile begins is
64-bit. ``residual`` (with ``total``, where the sum goes) and ``weight`` may be the constant None.
Arithmetic is in float32 and rounds once, at the store; a sum with the residual is rounded to its
own type first, and it is the rounded sum that is normalised.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["chunk_sums", "normalize_chunks", "normalize_rows", "stream_rows"]


@triton.jit
def _load(pointer, offsets, mask, MASKED: tl.constexpr, POLICY: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(pointer + offsets, eviction_policy=POLICY)


@triton.jit
def _store(pointer, offsets, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer + offsets, values.to(pointer.dtype.element_ty))


@triton.jit
def _add(values, residual_values, total, offsets, mask, MASKED: tl.constexpr):
    """Store the sum; give what was stored."""
    rounded = (values.to(tl.float32) + residual_values.to(tl.float32)).to(total.dtype.element_ty)
    _store(total, offsets, rounded, mask, MASKED)
    return rounded


@triton.jit
def _scale(sum_of_squares, eps, N: tl.constexpr):
    # One rounding, said and not left to the compiler, which contracts or not by what stands around:
    # a row must give the same bits whichever kernel takes it.
    return tl.rsqrt(tl.fma(sum_of_squares, 1.0 / N, eps))


@triton.jit
def _normalize_tile(
    values, added, scales, total, y, here, offsets, mask, eps, N: tl.constexpr, MASKED: tl.constexpr
):
    """Normalise and store a tile that has been read, whose first row begins at ``here``."""
    if added is not None:
        values = _add(values, added, total + here, offsets, mask, MASKED)
    values = values.to(tl.float32)
    values = values * _scale(tl.sum(values * values, axis=1), eps, N)[:, None]
    if scales is not None:
        values = values * scales.to(tl.float32)
    _store(y + here, offsets, values, mask, MASKED)


@triton.jit
def normalize_rows(
    x,
    residual,
    weight,
    y,
    total,
    rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # N rounded up to a power of two
    TILE: tl.constexpr,  # rows held at a time
    VECTOR: tl.constexpr,  # elements read at once: every row begins at a multiple of them
    PERSISTENT: tl.constexpr,  # a program takes several tiles, reading one while it works on one
    POLICY: tl.constexpr,  # how the caches should treat what is read once
    DEPENDENT: tl.constexpr,  # may be launched before the stream's previous kernel has ended
):
    """Rows held in registers: program p takes tile p, or tiles p, p + programs, and so on."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    MASKED: tl.constexpr = N != BLOCK or TILE != 1
    cols = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    lanes = tl.arange(0, TILE)[:, None]
    inside = cols < N
    offsets = lanes * N + cols
    row = tl.program_id(0).to(tl.int64) * TILE
    mask = inside & (row + lanes < rows)

    values = _load(x + row * N, offsets, mask, MASKED, POLICY)
    added = None
    if residual is not None:
        added = _load(residual + row * N, offsets, mask, MASKED, POLICY)
    scales = None
    if weight is not None:
        # By each row of a tile: dearer than once for all by cache hits, cheaper by a barrier.
        scales = _load(weight, cols + lanes * 0, inside, N != BLOCK, "evict_last")

    if PERSISTENT:
        step = tl.num_programs(0).to(tl.int64) * TILE
        for first in range(row, rows, step):
            ahead = first + step
            mask_ahead = inside & (ahead + lanes < rows)
            values_ahead = _load(x + ahead * N, offsets, mask_ahead, True, POLICY)
            mask = inside & (first + lanes < rows)
            # Nothing that may be None is carried from turn to turn: Triton 3.6 refuses it.
            if residual is not None:
                added_ahead = _load(residual + ahead * N, offsets, mask_ahead, True, POLICY)
                _normalize_tile(
                    values, added, scales, total, y, first * N, offsets, mask, eps, N, MASKED
                )
                added = added_ahead
            else:
                _normalize_tile(
                    values, None, scales, total, y, first * N, offsets, mask, eps, N, MASKED
                )
            values = values_ahead
    else:
        _normalize_tile(values, added, scales, total, y, row * N, offsets, mask, eps, N, MASKED)


@triton.jit
def _sum_chunk(x, residual, total, here, begin, cols, N: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of squares of the chunk at ``here``, which is column ``begin`` of its row."""
    MASKED: tl.constexpr = N % CHUNK != 0
    inside = begin + cols < N
    values = _load(x + here, cols, inside, MASKED, "")
    if residual is not None:
        added = _load(residual + here, cols, inside, MASKED, "evict_first")
        values = _add(values, added, total + here, cols, inside, MASKED)
    values = values.to(tl.float32)
    return tl.sum(values * values, axis=0)


@triton.jit
def _normalize_chunk(source, weight, y, scale, begin, cols, N: tl.constexpr, CHUNK: tl.constexpr):
    """The chunk that begins at column ``begin``; pointers are those of its row."""
    MASKED: tl.constexpr = N % CHUNK != 0
    inside = begin + cols < N
    values = _load(source + begin, cols, inside, MASKED, "evict_first").to(tl.float32) * scale
    if weight is not None:
        scales = _load(weight + begin, cols, inside, MASKED, "evict_last")
        values = values * scales.to(tl.float32)
    _store(y + begin, cols, values, inside, MASKED)


@triton.jit
def stream_rows(
    x,
    residual,
    weight,
    y,
    total,
    length,  # N again, at run time: a loop of a known number of turns would be unrolled, and spill
    eps,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One row per program, read twice, in chunks: forwards for its sum, then backwards, beginning
    with what the caches still hold.
    """
    LAST: tl.constexpr = (N - 1) // CHUNK * CHUNK
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    row = tl.program_id(0).to(tl.int64) * N
    sum_of_squares = 0.0
    for begin in range(0, length, CHUNK):
        sum_of_squares += _sum_chunk(x, residual, total, row + begin, begin, cols, N, CHUNK)
    scale = _scale(sum_of_squares, eps, N)
    source = x
    if residual is not None:
        source = total
        tl.debug_barrier()  # other threads of this program may have stored what is read now
    for done in range(0, length, CHUNK):
        _normalize_chunk(source + row, weight, y + row, scale, LAST - done, cols, N, CHUNK)


@triton.jit
def chunk_sums(
    x, residual, total, sums, N: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr
):
    """One chunk per program: the first half of ``stream_rows``, summing in the same order."""
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    program = tl.program_id(0).to(tl.int64)
    begin = program % CHUNKS * CHUNK
    here = program // CHUNKS * N + begin
    tl.store(sums + program, _sum_chunk(x, residual, total, here, begin, cols, N, CHUNK))


@triton.jit
def normalize_chunks(
    source,
    weight,
    y,
    sums,
    eps,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One chunk per program: the second half of ``stream_rows``."""
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    AT_ONCE: tl.constexpr = 16
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    program = tl.program_id(0).to(tl.int64)
    row = program // CHUNKS
    sum_of_squares = 0.0
    for done in range(0, CHUNKS, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            part = sums + row * CHUNKS + done + index
            sum_of_squares += tl.load(part, mask=done + index < CHUNKS, other=0.0)
    scale = _scale(sum_of_squares, eps, N)
    begin = program % CHUNKS * CHUNK
    _normalize_chunk(source + row * N, weight, y + row * N, scale, begin, cols, N, CHUNK)
