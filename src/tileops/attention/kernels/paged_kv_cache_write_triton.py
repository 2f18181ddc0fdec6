"""Device code of ``paged_kv_cache_write.py``."""

import triton
import triton.language as tl


@triton.jit
def _e4m3(value):
    """The float8_e4m3fn bytes of float32 values, rounded to even, beyond 448 saturated.

    By integer arithmetic: cards before compute capability 8.9 have no instruction for it, and
    where there is one the copy is bound by memory all the same.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    held = tl.minimum(magnitude, 0x43E00000)  # 448
    # Dropping 20 bits of the significand; 120 is the difference of the exponents' biases.
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, which is that of float32 numbers from 2**14 on.
    small = (held.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(held < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write(source, cache, scale, from_place, to_place, inside):
    value = tl.load(source + from_place, mask=inside)
    if scale is not None:
        value = _e4m3(tl.div_rn(value.to(tl.float32), tl.load(scale)))
    tl.store(cache + to_place, value, mask=inside)


@triton.jit
def paged_kv_cache_write(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    tokens,
    capacity,
    column_groups,
    column_tiles,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = column_groups * GRAIN  # of one token: all heads; so the compiler knows its divisors
    tile = tl.program_id(0)
    token = (tile // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    # A slot past the end is the caller's mistake; it must not become a write to foreign memory.
    inside = (slot >= 0) & (slot < capacity) & (column < columns)
    from_place = token * columns + column
    to_place = slot * columns + column
    _write(k, k_cache, k_scale, from_place, to_place, inside)
    _write(v, v_cache, v_scale, from_place, to_place, inside)
