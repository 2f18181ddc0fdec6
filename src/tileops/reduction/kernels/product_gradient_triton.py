"""Device code of ``product_gradient.py``."""

import triton
import triton.language as tl


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _chained(factor, total, nearer_factor, nearer_total):
    """``s -> total + factor * s`` of what comes later along the axis, after which what comes before."""
    return factor * nearer_factor, nearer_total + nearer_factor * total


@triton.jit
def _taken(pointer, inside, as_type, WIDE: tl.constexpr):
    """Factors as the result's dtype holds them (torch casts first), 1 outside."""
    NUMBER: tl.constexpr = tl.float64 if WIDE else tl.float32
    value = tl.load(pointer, mask=inside, other=1.0).to(NUMBER)
    return value.to(as_type.dtype.element_ty).to(NUMBER)


@triton.jit
def product_gradients(
    grad,
    x,
    y,
    befores,  # [kept, blocks]: products of what lies before each block
    rows,
    n_groups,
    inner_groups,
    inner_tiles,
    blocks,
    N_GRAIN: tl.constexpr,
    INNER_GRAIN: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    AXIS: tl.constexpr,  # of a tile: 1 for contiguous rows, 0 for an axis with an inner stride
    WALKS: tl.constexpr,  # an axis has several blocks
    WIDE: tl.constexpr,
):
    """Some kept indices to a program: the products before each block, forwards, then the gradients,
    backwards."""
    NUMBER: tl.constexpr = tl.float64 if WIDE else tl.float32
    n, inner = n_groups * N_GRAIN, inner_groups * INNER_GRAIN
    program = tl.program_id(0)
    lane = tl.arange(0, KEPT)
    if AXIS == 1:
        kept = program.to(tl.int64) * KEPT + lane
        there, base, stride = kept < rows, kept * n, 1
    else:
        outer = (program // inner_tiles).to(tl.int64)
        column = (program % inner_tiles).to(tl.int64) * KEPT + lane
        kept = outer * inner + column
        there, base, stride = column < inner, outer * n * inner + column, inner
    allowed, base = tl.expand_dims(there, AXIS), tl.expand_dims(base, AXIS)
    step = tl.expand_dims(tl.arange(0, BLOCK), 1 - AXIS).to(tl.int64)

    before = tl.full([KEPT], 1.0, NUMBER)
    if WALKS:
        for block in range(blocks):
            tl.store(befores + kept * blocks + block, before, mask=there)
            place = block * BLOCK + step
            values = _taken(x + base + place * stride, allowed & (place < n), grad, WIDE)
            # Not multiplied after it is reduced: a pass of Triton's would take that for its own.
            values = tl.where(step == 0, values * tl.expand_dims(before, AXIS), values)
            before = tl.reduce(values, AXIS, _times)
        tl.debug_barrier()  # other threads of this program have stored what is read now
    later = tl.zeros([KEPT], NUMBER)
    for back in range(blocks):
        block = blocks - 1 - back
        place = block * BLOCK + step
        inside = allowed & (place < n)
        here = x + base + place * stride
        grads = tl.load(grad + base + place * stride, mask=inside, other=0.0).to(NUMBER)
        factors = _taken(here + stride, allowed & (place < n - 1), grad, WIDE)
        factors, totals = tl.associative_scan((factors, grads), AXIS, _chained, reverse=True)
        products = _taken(here - stride, inside & (step > 0), grad, WIDE)
        products = tl.cumprod(products, AXIS)
        if WALKS:
            totals += tl.where(block < blocks - 1, factors * tl.expand_dims(later, AXIS), 0.0)
            later = tl.sum(tl.where(step == 0, totals, 0.0), AXIS)
            before = tl.load(befores + kept * blocks + block, mask=there, other=1.0)
            products *= tl.expand_dims(before, AXIS)
        result = products * totals
        if y.dtype.element_ty != NUMBER:  # no instruction makes a half of a double
            result = result.to(tl.float32)
        tl.store(y + base + place * stride, result.to(y.dtype.element_ty), mask=inside)
