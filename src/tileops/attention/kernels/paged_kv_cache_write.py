"""Writing new keys and values into their slots of a paged cache, in place."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, pointer_to

__all__ = ["PagedKVCacheWrite"]

TILE = 1024
"""Elements of keys, and of values, that one program writes."""
WARPS = 4


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
def _paged_kv_cache_write(
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


class PagedKVCacheWrite(Kernel):
    """Every call: a program copies some tokens, or a part of one."""

    name = "triton_paged_kv_cache_write"
    general = True

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        spec, cache = call.spec("k"), call.spec("k_cache")
        columns = math.prod(spec.shape[1:])
        width = min(triton.next_power_of_2(max(columns, 1)), TILE)
        height = TILE // width
        scaled = call.inputs.get("k_scale") is not None
        source, target = pointer_to(spec.dtype), "*u8" if scaled else pointer_to(cache.dtype)
        pointers = {"k": source, "v": source, "k_cache": target, "v_cache": target}
        scales = ("k_scale", "v_scale")
        grain = math.gcd(columns, 16) or 16
        build = TritonBuild(
            _paged_kv_cache_write,
            signature=(
                *pointers.items(),
                ("slots", "*i64"),
                *((name, "*fp32") for name in scales if scaled),
                ("tokens", "i32"),
                ("capacity", "i64"),
                ("column_groups", "i32"),
                ("column_tiles", "i32"),
            ),
            constexprs=(
                *((name, None) for name in scales if not scaled),
                ("GRAIN", grain),
                ("ROWS", height),
                ("COLUMNS", width),
            ),
            num_warps=WARPS,
            aligned=tuple(name for name in pointers if call.spec(name).aligned),
        )

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind(launcher, call, grain, height, width)

        return Entry(build.identity, build, bind)


def _bind(launcher: Launcher, call: CallSpec, grain: int, height: int, width: int) -> Run:
    launch, shape, cache = (
        launcher.on(call.device.index),
        call.spec("k").shape,
        call.spec("k_cache"),
    )
    tokens, columns = shape[0], math.prod(shape[1:])
    capacity = cache.shape[0] * cache.shape[1]
    groups, tiles = columns // grain, triton.cdiv(columns, width)
    programs = triton.cdiv(tokens, height) * tiles if capacity else 0

    def copy(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        *_: torch.Tensor | None,
    ) -> None:
        if programs:
            launch(programs, 1, 1, k, v, k_cache, v_cache, slots, tokens, capacity, groups, tiles)

    def scale(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> None:
        if programs:
            bytes_of = (k_cache.view(torch.uint8), v_cache.view(torch.uint8))
            sizes = (tokens, capacity, groups, tiles)
            launch(programs, 1, 1, k, v, *bytes_of, slots, k_scale, v_scale, *sizes)

    return copy if call.inputs.get("k_scale") is None else scale
