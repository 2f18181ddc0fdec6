"""The paged cache write on the CPU: in place, touching only the rows that are written."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, CheckError, Entry, Kernel


def _write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    if not slot_mapping.numel() or not k_cache.numel():
        return
    slots, most = k_cache.shape[0] * k_cache.shape[1], int(slot_mapping.max())
    if most >= slots:
        raise CheckError(
            "PagedKVCacheWriteFwdOp", "slot_mapping", f"slot {most}", f"-1, or 0 to {slots - 1}"
        )
    if int(slot_mapping.min()) < 0:
        keep = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[keep], k[keep], v[keep]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = cache.view(-1, cache.shape[2], cache.shape[3])
        if scale is None:
            rows.index_copy_(0, slot_mapping, new)
        else:
            top = torch.finfo(cache.dtype).max
            stored = (new.float() / scale).clamp(-top, top).to(cache.dtype)
            # Bytes: index writes of float8 are not implemented on the CPU.
            rows.view(torch.uint8).index_copy_(0, slot_mapping, stored.view(torch.uint8))


class IndexCopy(Kernel):
    """``index_copy_`` of the written rows."""

    name = "index_copy"
    devices = ("cpu",)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return Entry(("index_copy",), lambda: _write)
