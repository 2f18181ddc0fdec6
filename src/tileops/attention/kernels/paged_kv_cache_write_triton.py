"""Device code of ``paged_kv_cache_write.py``."""

import triton
import triton.language as tl

from tileops.lib.float8_triton import e4m3_bytes


@triton.jit
def _write(source, cache, scale, from_place, to_place, inside):
    value = tl.load(source + from_place, mask=inside)
    if scale is not None:
        value = e4m3_bytes(tl.div_rn(value.to(tl.float32), tl.load(scale)))
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
