"""Device code of ``dropout.py``."""

import triton
import triton.language as tl

from tileops.lib.dependent_triton import release, wait


@triton.jit
def philox(seed, counter):
    """Four words of Philox-4x32-10 at 64-bit counters (Salmon et al., SC 2011). Both halves of a product
    come from one multiplication of 64 bits; ``tl.philox`` takes two, and these are what it costs."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(10):
        left = c0.to(tl.uint64) * 0xD2511F53
        right = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = right.to(tl.uint32)
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = left.to(tl.uint32)
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words_of(seed, start, BLOCK: tl.constexpr):
    """Words ``start`` to ``start + BLOCK`` of the stream; ``start`` is a multiple of four."""
    w0, w1, w2, w3 = philox(seed, start // 4 + tl.arange(0, BLOCK // 4))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def words_of_eights(seed, start, BLOCK: tl.constexpr):
    """As ``words_of``, and eight consecutive ones are one thread's, as are eight halves of a wide load."""
    counter = start // 4 + 2 * tl.arange(0, BLOCK // 8)
    w0, w1, w2, w3 = philox(seed, counter)
    v0, v1, v2, v3 = philox(seed, counter + 1)
    even = tl.join(tl.join(w0, v0), tl.join(w2, v2))
    odd = tl.join(tl.join(w1, v1), tl.join(w3, v3))
    return tl.reshape(tl.join(even, odd), [BLOCK])


@triton.jit
def _drop(x, y, seed, start, n, least, scale, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
          DEPENDENT: tl.constexpr):  # fmt: skip
    """A tile; WHOLE: none of it lies behind the end."""
    place = tl.arange(0, BLOCK)
    # Asked for before the words are drawn, which takes as long.
    if WHOLE:
        value = tl.load(x + start + place)
    else:
        value = tl.load(x + start + place, mask=place < n - start, other=0.0)
    release(DEPENDENT)
    if x.dtype.element_ty.primitive_bitwidth == 16:
        words = words_of_eights(seed, start, BLOCK)
    else:
        words = words_of(seed, start, BLOCK)
    factor = tl.where(words >= least.to(tl.uint32), scale, 0.0)
    result = (value.to(tl.float32) * factor).to(y.dtype.element_ty)
    if WHOLE:
        tl.store(y + start + place, result)
    else:
        tl.store(y + start + place, result, mask=place < n - start)


@triton.jit
def dropout(x, y, seed, n, least, scale, DRAWN: tl.constexpr, BLOCK: tl.constexpr,
            DEPENDENT: tl.constexpr):  # fmt: skip
    """Element ``i`` is kept where word ``i`` of Philox-4x32-10 under ``seed`` is at least ``least``."""
    wait(DEPENDENT)
    if DRAWN:
        seed = tl.load(seed)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Without a mask n's divisibility does not decide the vector width. One branch for all: where two
    # meet again, what was loaded would be waited for.
    if start + BLOCK <= n:
        _drop(x, y, seed, start, n, least, scale, BLOCK, True, DEPENDENT)
    else:
        _drop(x, y, seed, start, n, least, scale, BLOCK, False, DEPENDENT)
