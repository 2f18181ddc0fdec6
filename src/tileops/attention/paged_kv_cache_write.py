"""Writing new keys and values into a paged cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tileops.authoring import KernelInterface, Op


class PagedKVCacheWriteFwdOp(Op):
    """Writes row ``n`` of ``k`` and ``v`` ``[N, H_kv, D]`` into slot ``slot_mapping[n]`` of the caches
    ``[NP, PS, H_kv, D]`` (page ``slot // PS``, place ``slot % PS``); -1 skips the row. Returns None.

    The caches are written in place; they are of ``k``'s dtype, or float8_e4m3fn, where
    ``x / scale`` is stored, saturated to the finite range. Two rows of one slot: either may win. API:
    ``vllm._custom_ops.reshape_and_cache_flash``.
    """

    grows = ("N",)
    kernel = KernelInterface(
        cuda=("paged_kv_cache_write:PagedKVCacheWrite",),
        cpu=("paged_kv_cache_write_cpu:IndexCopy",),
    )

    @staticmethod
    def decomposition(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages, places, heads, size = k_cache.shape
        # Skipped rows go to one slot past the end, which is then cut off.
        slots = torch.where(slot_mapping < 0, pages * places, slot_mapping)

        def write(
            new: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None
        ) -> torch.Tensor:
            if heads * size == 0:
                return cache
            if scale is not None:
                top = torch.finfo(cache.dtype).max
                new = (new.float() / scale).clamp(-top, top).to(cache.dtype)
            rows = cache.reshape(pages * places, heads * size)
            source = new.reshape(-1, heads * size)
            if scale is not None:  # bytes: index writes of float8 are not implemented everywhere
                rows, source = rows.view(torch.uint8), source.view(torch.uint8)
            padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
            written = padded.index_put((slots,), source)[: pages * places]
            return written.view(cache.dtype).view(cache.shape)

        return write(k, k_cache, k_scale), write(v, v_cache, v_scale)

    def fill_workload(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Slots that differ, some of them skipped, for tests and benchmarks."""
        slots, cache = inputs["slot_mapping"], inputs["k_cache"]
        slots.fill_(-1)
        count = min(slots.numel() - slots.numel() // 8, cache.shape[0] * cache.shape[1])
        chosen = torch.randperm(cache.shape[0] * cache.shape[1], device=slots.device)[:count]
        slots[:count] = chosen
