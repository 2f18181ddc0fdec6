"""The paged cache write on the CPU: in place, touching only the rows that are written."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Kernel


def _write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        slot_mapping, k, v = slot_mapping[keep], k[keep], v[keep]
    if not slot_mapping.numel() or not k_cache.numel():
        return
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        stored = new
        if scale is not None:
            top = torch.finfo(cache.dtype).max
            stored = (new.float() / scale).clamp(-top, top).to(cache.dtype)
        # Bytes: index writes of float8 are not implemented on the CPU.
        rows = cache.view(-1, cache.shape[2] * cache.shape[3]).view(torch.uint8)
        rows.index_copy_(0, slot_mapping, stored.reshape(stored.shape[0], -1).view(torch.uint8))


class IndexCopy(Kernel):
    """``index_copy_`` of the written rows."""

    name = "index_copy"
    devices = ("cpu",)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return Entry(("index_copy",), lambda: _write)
