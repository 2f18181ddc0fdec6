"""Dense attention by torch's library kernels, those of ``scaled_dot_product_attention``.

Torch counts heads before positions and aligns a causal mask to the first query and key; here
positions come first, and masks align to the last ones. Hence:

- One query sees the last keys only: no mask, a window is a slice of the keys, and the query heads
  of one key head become as many queries, uncopied, so that every library kernel serves grouped
  heads.
- No mask, or a causal one over as many queries as keys, is what torch takes as it is.
- Any other mask goes to FlashAttention, which aligns as we do, where it takes the call (CUDA,
  16-bit, head size a multiple of 8 up to 256); else to blocks of queries with the keys that they
  see and a boolean mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from tileops.authoring import CallSpec, Entry, Kernel, Run

__all__ = ["SDPA", "Reach", "SDPAOnCPU"]

BLOCK = 1024
"""Queries of one block, which bounds the mask's memory."""
CPU_KEYS = 16
"""Keys that torch's CPU kernel compares at once. Where a query sees fewer and every score is NaN, it
gives 0 (seen on torch 2.13 with AVX-512); so few keys cost nothing another way."""
FLASH_HEAD = 256
"""Features of the widest head that FlashAttention takes."""


@dataclass(frozen=True)
class Reach:
    """Which keys a query sees: from ``left`` before its own place to ``right`` behind it.

    None: no limit, or none that any query of the call meets.
    """

    left: int | None
    right: int | None

    @classmethod
    def of(cls, call: CallSpec) -> Reach:
        """The limits that are left once those that exclude nothing are dropped."""
        params, queries, keys = call.params, call.spec("q").shape[1], call.spec("k").shape[1]
        left = None if params.window_size_left < 0 else params.window_size_left
        right = None if params.window_size_right < 0 else params.window_size_right
        right = 0 if params.is_causal else right
        if left is not None and left >= keys - 1:
            left = None  # the last query sees the first key
        if right is not None and right >= queries - 1:
            right = None  # the first query sees the last key
        return cls(left, right)


class SDPA(Kernel):
    """Attention of 16-bit or float32 inputs, grouped heads and windows included."""

    name = "sdpa"
    devices = ("cuda", "cpu")

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        params, q = call.params, call.spec("q")
        if call.inputs.get("q_scale") is not None or q.dtype.itemsize == 1:
            return "float8 inputs: torch's attention has no scales for them"
        if params.softcap is not None:
            return "softcap: torch's attention has none"
        if params.pos_encoding_mode != "none":
            return "rope: torch's attention does not rotate"
        if call.inputs.get("sinks") is not None:
            return "sinks: torch's attention has none"
        queries, keys = q.shape[1], call.spec("k").shape[1]
        right = Reach.of(call).right
        if call.device.type == "cuda" and right is not None and keys - queries + right < 0:
            return "some queries see no key: not every CUDA kernel of torch gives 0 there"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return Entry(("torch.sdpa",), lambda: scaled_dot_product_attention, _bind)


class SDPAOnCPU(SDPA):
    """The same, for calls in which NaN stays NaN."""

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        keys, reach = call.spec("k").shape[1], Reach.of(call)
        seen = keys if reach.left is None else reach.left + 1 + (reach.right or 0)
        if min(keys, seen) < CPU_KEYS:
            return f"fewer than {CPU_KEYS} keys are seen: torch's CPU kernel gives 0 for NaN there"
        return super().refuses(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        if call.spec("q").dtype.itemsize != 2:
            return super().entry_for(call)
        identity = ("torch.sdpa", "halves on the CPU")
        return Entry(identity, lambda: scaled_dot_product_attention, _bind_bounded)


def _bind_bounded(function: object, call: CallSpec) -> Run:
    """For halves on the CPU: torch's kernel gives 0 where a score is infinite, float32's gives NaN as
    every other one does; so inputs whose scores may overflow go there."""
    run, width = _bind(function, call), call.spec("q").shape[3]

    def bounded(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor | None
    ) -> torch.Tensor:
        if not q.numel() or torch.isfinite(q.abs().amax().float() * k.abs().amax().float() * width):
            return run(q, k, v, *rest)
        wide: torch.Tensor = run(q.float(), k.float(), v.float(), *rest)
        return wide.to(q.dtype)

    return bounded


def _bind(_: object, call: CallSpec) -> Run:
    """The way of one call: see the module's docstring."""
    q, (_, keys, kv_heads, _) = call.spec("q"), call.spec("k").shape
    _, queries, heads, width = q.shape
    reach, scale = Reach.of(call), call.params.sm_scale
    if q.numel == 0:
        return _nothing(q.shape, q.dtype, q.device)
    if queries == 1:
        return _one_query(kv_heads, heads // kv_heads, reach.left, scale)
    # FlashAttention knows grouped heads; the other CUDA kernels want a key head for each.
    short = q.dtype.itemsize == 2 and width <= FLASH_HEAD
    repeats = 1 if call.device.type == "cpu" or short else heads // kv_heads
    if reach == Reach(None, None) or (reach == Reach(None, 0) and queries == keys):
        return _plain(reach.right is not None, repeats, scale)
    if call.device.type == "cuda" and short and width % 8 == 0:
        return _flash(queries, keys, reach, scale)
    return _blocks(queries, keys, reach, repeats, scale)


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Run:
    def run(*_: torch.Tensor | None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return run


def _one_query(kv_heads: int, group: int, left: int | None, scale: float | None) -> Run:
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor | None
    ) -> torch.Tensor:
        if left is not None:
            k, v = k[:, -1 - left :], v[:, -1 - left :]
        folded = q.view(q.shape[0], kv_heads, group, q.shape[3])
        found = scaled_dot_product_attention(
            folded, k.transpose(1, 2), v.transpose(1, 2), scale=scale
        )
        return _no_view(found.contiguous().view(q.shape))

    return run


def _plain(causal: bool, repeats: int, scale: float | None) -> Run:
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor | None
    ) -> torch.Tensor:
        k, v = _repeated(k, repeats), _repeated(v, repeats)
        return _attention(q, k, v, None, causal, scale)

    return run


def _flash(queries: int, keys: int, reach: Reach, scale: float | None) -> Run:
    flash = torch.ops.aten._flash_attention_forward
    causal = reach == Reach(None, 0)
    left = -1 if reach.left is None else reach.left
    right = -1 if reach.right is None else reach.right
    window = {} if causal else {"window_size_left": left, "window_size_right": right}

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor | None
    ) -> torch.Tensor:
        found = flash(q, k, v, None, None, queries, keys, 0.0, causal, False, scale=scale, **window)
        return found[0].contiguous()

    return run


def _blocks(queries: int, keys: int, reach: Reach, repeats: int, scale: float | None) -> Run:
    shift = keys - queries  # the key beside query i is i + shift

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor | None
    ) -> torch.Tensor:
        k, v = _repeated(k, repeats), _repeated(v, repeats)
        found = []
        for start in range(0, queries, BLOCK):
            end = min(start + BLOCK, queries)
            first = 0 if reach.left is None else max(start + shift - reach.left, 0)
            last = keys if reach.right is None else min(end + shift + reach.right, keys)
            if first >= last:
                found.append(torch.zeros_like(q[:, start:end]))  # these queries see no key
                continue
            place = torch.arange(start + shift, end + shift, device=q.device)[:, None]
            other = torch.arange(first, last, device=q.device)[None, :]
            seen = torch.ones((), dtype=torch.bool, device=q.device)
            if reach.left is not None:
                seen = seen & (other >= place - reach.left)
            if reach.right is not None:
                seen = seen & (other <= place + reach.right)
            found.append(
                _attention(q[:, start:end], k[:, first:last], v[:, first:last], seen, False, scale)
            )
        return torch.cat(found, 1)

    return run


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    return heads if times == 1 else heads.repeat_interleave(times, 2)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Torch's attention with positions before heads, contiguous."""
    found = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return _no_view(found.transpose(1, 2).contiguous())


def _no_view(result: torch.Tensor) -> torch.Tensor:
    """A view made under no_grad could not be written later where gradients are on; .data is none. What
    autograd follows stays as it is."""
    return result if result.requires_grad else result.data
