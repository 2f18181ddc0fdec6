"""Triton kernels that normalise rows, by their root mean square or centred; ``rows.py`` says which
serves when.

Offsets within a tile are 32-bit; where a tile begins is 64-bit. Tensors that an op has not may be the
constant None: ``residual`` (with ``total``, where the sum goes); ``weight`` and ``bias``, of a row's
elements or, with GROUPS, of channels; ``scale``, ``shift`` and ``gate``, of the shape of ``x``;
``moments`` (``[2, rows]``), where each row's mean and its sum of squares about it go; ``quanta``, the
scales of rows that are quantised. Arithmetic is in float32 and rounds once, at the
store; a sum with the residual is rounded to its own type first, and it is the rounded sum that is
normalised. Where a product and a sum might be contracted they are (``fma``), and not left to the
compiler, which contracts or not by what stands around: a row must give the same bits whichever
kernel takes it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileops.lib.quantised_triton import largest_magnitude, quantised
from tileops.norm.kernels.access_triton import inverse_root, load, store

__all__ = ["chunk_sums", "normalize_chunks", "normalize_rows", "stream_rows"]


@triton.jit
def _add(values, residual_values, total, offsets, mask, MASKED: tl.constexpr):
    """Store the sum; give what was stored."""
    rounded = (values.to(tl.float32) + residual_values.to(tl.float32)).to(total.dtype.element_ty)
    store(total, offsets, rounded, mask, MASKED)
    return rounded


@triton.jit
def _of_channels(
    pointer,
    row,
    begin,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SPATIAL: tl.constexpr,
):
    """The weights of columns ``begin`` and on of a row, or of the rows ``[TILE, 1]``: those of their
    channels, each read once for as many columns as share it for certain."""
    # The largest power of two that divides SPATIAL.
    TOGETHER: tl.constexpr = SPATIAL & -SPATIAL
    RUN: tl.constexpr = BLOCK if SPATIAL == N or TOGETHER > BLOCK else TOGETHER
    first = (row % GROUPS).to(tl.int32) * (N // SPATIAL)
    if RUN == BLOCK:
        return tl.load(pointer + first + begin // SPATIAL, eviction_policy="evict_last")
    else:
        starts = begin + RUN * tl.arange(0, BLOCK // RUN)
        if len(row.shape) == 2:
            starts = starts[None, :]
        weights = tl.load(
            pointer + first + starts // SPATIAL,
            mask=starts < N,
            other=0.0,
            eviction_policy="evict_last",
        )
        if RUN == 1:
            return weights
        elif len(row.shape) == 2:
            TILE: tl.constexpr = row.shape[0]
            weights = tl.broadcast_to(weights[:, :, None], [TILE, BLOCK // RUN, RUN])
            return tl.reshape(weights, [TILE, BLOCK])
        else:
            return tl.reshape(tl.broadcast_to(weights[:, None], [BLOCK // RUN, RUN]), [BLOCK])


@triton.jit
def _affine(values, weights, biases):
    if weights is not None:
        if biases is not None:
            values = tl.fma(values, weights.to(tl.float32), biases.to(tl.float32))
        else:
            values = values * weights.to(tl.float32)
    elif biases is not None:
        values = values + biases.to(tl.float32)
    return values


@triton.jit
def _quantised(
    values,
    quanta,
    rows,
    present,
    bound,
    TOP: tl.constexpr,
    LEAST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The bytes of quantised rows; stores their scales."""
    largest = largest_magnitude(values, 1)
    if bound is not None:
        largest = tl.where(largest > bound, bound, largest)
    scale = tl.div_rn(largest, TOP)
    scale = tl.where(scale < LEAST, LEAST, scale)
    tl.store(quanta + rows, scale, mask=present)
    return quantised(values, scale, TOP, NATIVE, bound is not None)


@triton.jit
def _normalize_tile(
    values,
    others,
    weights,
    biases,
    scale,
    shift,
    gate,
    moments,
    y,
    total,
    quanta,
    first,
    rows,
    offsets,
    mask,
    inside,
    eps,
    bound,
    N: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
    POLICY: tl.constexpr,
    CENTRED: tl.constexpr,
    TOP: tl.constexpr,
    LEAST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Normalise and store a tile that has been read, whose first row is row ``first``."""
    here = first * N
    # What differs by row is asked for before sums are waited for.
    factors = None
    terms = None
    gates = None
    if scale is not None:
        factors = load(scale + here, offsets, mask, MASKED, POLICY)
        terms = load(shift + here, offsets, mask, MASKED, POLICY)
    if gate is not None:
        gates = load(gate + here, offsets, mask, MASKED, POLICY)
    if total is not None:
        values = _add(values, others, total + here, offsets, mask, MASKED)
    values = values.to(tl.float32)
    row = first + tl.arange(0, TILE)
    present = row < rows
    if CENTRED:
        mean = tl.sum(values, axis=1) * (1.0 / N)
        values = values - mean[:, None]
        if PADDED:
            values = tl.where(inside, values, 0.0)
    squares = tl.sum(values * values, axis=1)
    if moments is not None:
        tl.store(moments + row, mean, mask=present)
        tl.store(moments + rows + row, squares, mask=present)
    values = values * inverse_root(squares, eps, N)[:, None]
    values = _affine(values, weights, biases)
    values = _affine(values, factors, terms)
    if gates is not None:
        values = values * gates.to(tl.float32)
    if quanta is not None:
        values = _quantised(values, quanta, row, present, bound, TOP, LEAST, NATIVE)
    store(y + here, offsets, values, mask, MASKED)


@triton.jit
def normalize_rows(
    x,
    residual,
    weight,
    bias,
    scale,
    shift,
    gate,
    moments,
    y,
    total,
    quanta,
    rows,
    eps,
    bound,  # of a quantised row's largest magnitude
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # N rounded up to a power of two
    TILE: tl.constexpr,  # rows held at a time
    VECTOR: tl.constexpr,  # elements read at once: every row begins at a multiple of them
    PERSISTENT: tl.constexpr,  # a program takes several tiles, reading one while it works on one
    POLICY: tl.constexpr,  # how the caches should treat what is read once
    DEPENDENT: tl.constexpr,  # may be launched before the stream's previous kernel has ended
    CENTRED: tl.constexpr,
    GROUPS: tl.constexpr,  # rows that share no channel, 0 where weights are not of channels
    SPATIAL: tl.constexpr,  # adjacent elements of one channel
    TOP: tl.constexpr,  # largest quantised number
    LEAST: tl.constexpr,  # smallest scale
    NATIVE: tl.constexpr,  # the card has an instruction that makes float8
):
    """Rows held in registers: program p takes tile p, or tiles p, p + programs, and so on."""
    if DEPENDENT:
        gdc_wait()
    PADDED: tl.constexpr = N != BLOCK
    MASKED: tl.constexpr = PADDED or TILE != 1
    cols = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    lanes = tl.arange(0, TILE)[:, None]
    inside = cols < N
    offsets = lanes * N + cols
    row = tl.program_id(0).to(tl.int64) * TILE
    mask = inside & (row + lanes < rows)

    values = load(x + row * N, offsets, mask, MASKED, POLICY)
    others = values  # stands for none: None cannot be carried from turn to turn
    if residual is not None:
        others = load(residual + row * N, offsets, mask, MASKED, POLICY)
    weights = None
    biases = None
    if GROUPS == 0:
        # By each row of a tile: dearer than once for all by cache hits, cheaper by a barrier.
        places = cols + lanes * 0
        if weight is not None:
            weights = load(weight, places, inside, PADDED, "evict_last")
        if bias is not None:
            biases = load(bias, places, inside, PADDED, "evict_last")
    else:
        if weight is not None:
            weights = _of_channels(weight, row + lanes, 0, N, BLOCK, GROUPS, SPATIAL)
        if bias is not None:
            biases = _of_channels(bias, row + lanes, 0, N, BLOCK, GROUPS, SPATIAL)

    if DEPENDENT:
        # Not before: programs that wait would be spread unevenly among those that read.
        gdc_launch_dependents()
    if PERSISTENT:
        step = tl.num_programs(0).to(tl.int64) * TILE
        for first in range(row, rows, step):
            ahead = first + step
            mask_ahead = inside & (ahead + lanes < rows)
            values_ahead = load(x + ahead * N, offsets, mask_ahead, True, POLICY)
            others_ahead = values_ahead
            if residual is not None:
                others_ahead = load(residual + ahead * N, offsets, mask_ahead, True, POLICY)
            _normalize_tile(
                values, others, weights, biases, scale, shift, gate, moments, y, total, quanta,
                first, rows, offsets, inside & (first + lanes < rows), inside, eps, bound,
                N, TILE, MASKED, PADDED, POLICY, CENTRED, TOP, LEAST, NATIVE,
            )  # fmt: skip
            values, others = values_ahead, others_ahead
    else:  # as a loop of one turn it would hold its operands in more registers
        _normalize_tile(
            values, others, weights, biases, scale, shift, gate, moments, y, total, quanta,
            row, rows, offsets, mask, inside, eps, bound,
            N, TILE, MASKED, PADDED, POLICY, CENTRED, TOP, LEAST, NATIVE,
        )  # fmt: skip


# --- rows in chunks -----------------------------------------------------------------------------


@triton.jit
def _read_chunk(x, residual, total, here, begin, cols, N: tl.constexpr, CHUNK: tl.constexpr):
    """The chunk at ``here``, which is column ``begin`` of its row, with the residual."""
    MASKED: tl.constexpr = N % CHUNK != 0
    inside = begin + cols < N
    values = load(x + here, cols, inside, MASKED, "")
    if residual is not None:
        added = load(residual + here, cols, inside, MASKED, "evict_first")
        values = _add(values, added, total + here, cols, inside, MASKED)
    return values.to(tl.float32)


@triton.jit
def _moments(values, begin, cols, N: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk's mean and the sum of squares about it."""
    mean = tl.div_rn(tl.sum(values, axis=0), tl.minimum(N - begin, CHUNK).to(tl.float32))
    values = values - mean
    if N % CHUNK != 0:
        values = tl.where(begin + cols < N, values, 0.0)
    return mean, tl.sum(values * values, axis=0)


@triton.jit
def _join(mean, squares, count, part_mean, part_squares, more):
    """The moments of ``count`` elements and ``more`` (Chan, Golub and LeVeque 1979)."""
    share = tl.div_rn(more, count + more)
    apart = part_mean - mean
    joined = tl.fma(apart * apart, count * share, squares + part_squares)
    return tl.fma(apart, share, mean), joined


@triton.jit
def _normalize_chunk(
    source,
    weight,
    bias,
    scale,
    shift,
    gate,
    y,
    mean,
    size,
    row,
    begin,
    cols,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    CENTRED: tl.constexpr,
    GROUPS: tl.constexpr,
    SPATIAL: tl.constexpr,
):
    """The chunk of row ``row`` that begins at column ``begin``."""
    MASKED: tl.constexpr = N % CHUNK != 0
    inside = begin + cols < N
    here = row * N + begin
    values = load(source + here, cols, inside, MASKED, "evict_first").to(tl.float32)
    if CENTRED:
        values = values - mean
    values = values * size
    weights = None
    biases = None
    if GROUPS == 0:
        if weight is not None:
            weights = load(weight + begin, cols, inside, MASKED, "evict_last")
        if bias is not None:
            biases = load(bias + begin, cols, inside, MASKED, "evict_last")
    else:
        if weight is not None:
            weights = _of_channels(weight, row, begin, N, CHUNK, GROUPS, SPATIAL)
        if bias is not None:
            biases = _of_channels(bias, row, begin, N, CHUNK, GROUPS, SPATIAL)
    values = _affine(values, weights, biases)
    if scale is not None:
        factors = load(scale + here, cols, inside, MASKED, "evict_first")
        terms = load(shift + here, cols, inside, MASKED, "evict_first")
        values = _affine(values, factors, terms)
    if gate is not None:
        values = values * load(gate + here, cols, inside, MASKED, "evict_first").to(tl.float32)
    store(y + here, cols, values, inside, MASKED)


@triton.jit
def stream_rows(
    x,
    residual,
    weight,
    bias,
    scale,
    shift,
    gate,
    moments,
    y,
    total,
    length,  # N again, at run time: a loop of a known number of turns would be unrolled, and spill
    eps,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
    GROUPS: tl.constexpr,
    SPATIAL: tl.constexpr,
):
    """One row per program, read twice, in chunks: forwards for its sum, then backwards, beginning
    with what the caches still hold.
    """
    LAST: tl.constexpr = (N - 1) // CHUNK * CHUNK
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    squares = 0.0
    for begin in range(0, length, CHUNK):
        values = _read_chunk(x, residual, total, row * N + begin, begin, cols, N, CHUNK)
        if CENTRED:
            part_mean, part = _moments(values, begin, cols, N, CHUNK)
            more = tl.minimum(N - begin, CHUNK).to(tl.float32)
            mean, squares = _join(mean, squares, begin * 1.0, part_mean, part, more)
        else:
            squares += tl.sum(values * values, axis=0)
    size = inverse_root(squares, eps, N)
    if moments is not None:
        tl.store(moments + row, mean)
        tl.store(moments + tl.num_programs(0) + row, squares)
    source = x
    if residual is not None:
        source = total
        tl.debug_barrier()  # other threads of this program may have stored what is read now
    for done in range(0, length, CHUNK):
        _normalize_chunk(
            source, weight, bias, scale, shift, gate, y, mean, size, row, LAST - done, cols,
            N, CHUNK, CENTRED, GROUPS, SPATIAL,
        )  # fmt: skip


@triton.jit
def chunk_sums(
    x,
    residual,
    total,
    sums,  # a number for each chunk, or two where rows are centred
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """One chunk per program: the first half of ``stream_rows``, summing in the same order."""
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    program = tl.program_id(0).to(tl.int64)
    begin = program % CHUNKS * CHUNK
    here = program // CHUNKS * N + begin
    values = _read_chunk(x, residual, total, here, begin, cols, N, CHUNK)
    if CENTRED:
        mean, squares = _moments(values, begin, cols, N, CHUNK)
        tl.store(sums + 2 * program, mean)
        tl.store(sums + 2 * program + 1, squares)
    else:
        tl.store(sums + program, tl.sum(values * values, axis=0))


@triton.jit
def normalize_chunks(
    source,
    weight,
    bias,
    scale,
    shift,
    gate,
    moments,
    y,
    sums,
    eps,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
    GROUPS: tl.constexpr,
    SPATIAL: tl.constexpr,
):
    """One chunk per program: the second half of ``stream_rows``."""
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    AT_ONCE: tl.constexpr = 16
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    program = tl.program_id(0).to(tl.int64)
    row = program // CHUNKS
    mean = 0.0
    squares = 0.0
    for done in range(0, CHUNKS, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            chunk = done + index
            there = chunk < CHUNKS
            if CENTRED:
                part = sums + 2 * (row * CHUNKS + chunk)
                part_mean = tl.load(part, mask=there, other=0.0)
                part_squares = tl.load(part + 1, mask=there, other=0.0)
                begin = tl.minimum(chunk * CHUNK, N)
                more = tl.minimum(N - begin, CHUNK).to(tl.float32)
                mean, squares = _join(mean, squares, begin * 1.0, part_mean, part_squares, more)
            else:
                squares += tl.load(sums + row * CHUNKS + chunk, mask=there, other=0.0)
    size = inverse_root(squares, eps, N)
    begin = program % CHUNKS * CHUNK
    if moments is not None:
        tl.store(moments + row, mean, mask=begin == 0)
        tl.store(moments + tl.num_programs(0) // CHUNKS + row, squares, mask=begin == 0)
    _normalize_chunk(
        source, weight, bias, scale, shift, gate, y, mean, size, row, begin, cols,
        N, CHUNK, CENTRED, GROUPS, SPATIAL,
    )  # fmt: skip
