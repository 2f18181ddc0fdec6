"""Writing new keys and values into their slots of a paged cache, in place."""

from __future__ import annotations

import math

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, cdiv, next_power_of_2, pointer_to

__all__ = ["PagedKVCacheWrite"]

DEVICE = f"{__name__}_triton"

TILE = 1024
"""Elements of keys, and of values, that one program writes."""
WARPS = 4


class PagedKVCacheWrite(Kernel):
    """Every call: a program copies some tokens, or a part of one."""

    name = "triton_paged_kv_cache_write"
    general = True

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        spec, cache = call.spec("k"), call.spec("k_cache")
        columns = math.prod(spec.shape[1:])
        width = min(next_power_of_2(max(columns, 1)), TILE)
        height = TILE // width
        scaled = call.inputs.get("k_scale") is not None
        source, target = pointer_to(spec.dtype), "*u8" if scaled else pointer_to(cache.dtype)
        pointers = {"k": source, "v": source, "k_cache": target, "v_cache": target}
        scales = ("k_scale", "v_scale")
        grain = math.gcd(columns, 16) or 16
        build = TritonBuild(
            f"{DEVICE}:paged_kv_cache_write",
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
    columns = math.prod(shape[1:])
    capacity = cache.shape[0] * cache.shape[1]
    groups, tiles = columns // grain, cdiv(columns, width)
    tiles = tiles if capacity else 0

    def copy(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        *_: torch.Tensor | None,
    ) -> None:
        tokens = k.shape[0]  # which may differ from call to call
        programs = -(-tokens // height) * tiles
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
        tokens = k.shape[0]
        programs = -(-tokens // height) * tiles
        if programs:
            bytes_of = (k_cache.view(torch.uint8), v_cache.view(torch.uint8))
            sizes = (tokens, capacity, groups, tiles)
            launch(programs, 1, 1, k, v, *bytes_of, slots, k_scale, v_scale, *sizes)

    return copy if call.inputs.get("k_scale") is None else scale
