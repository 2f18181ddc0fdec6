"""Device code of ``fused_qk_norm_rope.py``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["qk_norm_rope"]


@triton.jit
def _weights(q_weight, k_weight, queries, places, inside):
    """Of each head of a tile, in float32. Read by each, as heads are, so that threads need exchange
    nothing: all but the first reading hits a cache."""
    of_queries = tl.load(q_weight + places, mask=inside & queries, other=0.0).to(tl.float32)
    of_keys = tl.load(k_weight + places, mask=inside & ~queries, other=0.0).to(tl.float32)
    return tl.where(queries, of_queries, of_keys)


@triton.jit
def _pairs(values, TILE: tl.constexpr, HALF: tl.constexpr):
    """The first and the second of adjacent elements."""
    return tl.split(tl.reshape(values, [TILE, HALF, 2]))


@triton.jit
def qk_norm_rope(
    qkv,
    q_weight,
    k_weight,
    cache,
    positions,
    capacity,
    eps,
    WIDTH: tl.constexpr,  # elements of a token
    D: tl.constexpr,
    QUERIES: tl.constexpr,  # heads of queries
    HEADS: tl.constexpr,  # heads of queries and keys
    R: tl.constexpr,
    HALF: tl.constexpr,  # R / 2 rounded up to a power of two
    REST: tl.constexpr,  # D - R rounded up to a power of two, or 0
    TILE: tl.constexpr,  # heads to a program
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,  # may be launched before the stream's previous kernel has ended
):
    """Some heads of one token to a program. Every thread stores where it loaded."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    program = tl.program_id(0)
    token = (program // TILES).to(tl.int64)
    head = program % TILES * TILE + tl.arange(0, TILE)[:, None]
    row = qkv + token * WIDTH + head * D
    queries = head < QUERIES

    position = tl.load(positions + token)
    half = tl.arange(0, HALF)[None, :] + tl.arange(0, TILE)[:, None] * 0
    inside = (half < R // 2) & (head < HEADS)
    if INTERLEAVED:
        pair = tl.arange(0, 2 * HALF)[None, :] + tl.arange(0, TILE)[:, None] * 0
        paired = (pair < R) & (head < HEADS)
        both = tl.load(row + pair, mask=paired, other=0.0).to(tl.float32)
        first, second = _pairs(both, TILE, HALF)
        weights = _weights(q_weight, k_weight, queries, pair, paired)
        first_weight, second_weight = _pairs(weights, TILE, HALF)
    else:
        first = tl.load(row + half, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(row + R // 2 + half, mask=inside, other=0.0).to(tl.float32)
        first_weight = _weights(q_weight, k_weight, queries, half, inside)
        second_weight = _weights(q_weight, k_weight, queries, R // 2 + half, inside)
    if REST:
        place = R + tl.arange(0, REST)[None, :] + tl.arange(0, TILE)[:, None] * 0
        there = (place < D) & (head < HEADS)
        rest = tl.load(row + place, mask=there, other=0.0).to(tl.float32)
    # A position outside is the caller's mistake; it must not become a read of foreign memory.
    known = inside & (position >= 0) & (position < capacity)
    angles = cache + position * R + half
    cosines = tl.load(angles, mask=known, other=0.0).to(tl.float32)
    sines = tl.load(angles + R // 2, mask=known, other=0.0).to(tl.float32)

    squares = tl.sum(first * first + second * second, axis=1)
    if REST:
        squares += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(tl.fma(squares, 1.0 / D, eps))[:, None]

    first = first * scale * first_weight
    second = second * scale * second_weight
    turned = first * cosines - second * sines
    other = second * cosines + first * sines
    dtype = qkv.dtype.element_ty
    if INTERLEAVED:
        joined = tl.reshape(tl.join(turned, other), [TILE, 2 * HALF])
        tl.store(row + pair, joined.to(dtype), mask=paired)
    else:
        tl.store(row + half, turned.to(dtype), mask=inside)
        tl.store(row + R // 2 + half, other.to(dtype), mask=inside)
    if REST:
        rest = rest * scale * _weights(q_weight, k_weight, queries, place, there)
        tl.store(row + place, rest.to(dtype), mask=there)
