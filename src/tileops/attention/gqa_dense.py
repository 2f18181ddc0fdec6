"""Attention over dense keys and values, with grouped query heads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from tileops.authoring import KernelInterface, Op


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Rotary embedding of ``[B, S, H, D]`` by tables ``[S, R/2]``, in float32."""
    size = 2 * cos.shape[-1]
    cos, sin = cos.float()[None, :, None], sin.float()[None, :, None]
    part = x[..., :size]
    if layout == "neox":
        first, second = part[..., : size // 2], part[..., size // 2 :]
    else:
        first, second = part[..., 0::2], part[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if layout == "neox" else torch.stack(turned, -1).flatten(-2)
    return torch.cat((joined, x[..., size:]), -1)


class GQADenseFwdOp(Op):
    """``softmax(q kᵀ * sm_scale) v`` per head; query head ``h`` uses key head ``h // (H / H_kv)``.

    ``q``: ``[B, S_q, H, D]``; ``k``, ``v``: ``[B, S_kv, H_kv, D]``; the output ``[B, S_q, H, D]`` is of
    ``out_dtype`` (``q``'s dtype when None). ``sm_scale=None`` is ``D**-0.5``. Masks align to the last
    query and key: query ``i`` stands at ``p = i + S_kv - S_q``, and sees key ``j`` where
    ``j <= p`` (``is_causal``), ``j >= p - window_size_left``, ``j <= p + window_size_right`` (-1: no
    limit); a query that sees nothing gives 0. ``softcap`` c maps scores to ``c * tanh(s / c)``.
    ``sinks`` ``[H]`` adds one score to each head's denominator. ``pos_encoding_mode="rope"`` rotates
    ``q`` and ``k`` by ``rope_cos``/``rope_sin`` ``[>= S_kv, rotary_dim / 2]`` first. float8 inputs are
    multiplied by their scales ``[B, H_kv]``. API: ``flash_attn_interface.flash_attn_func``.
    """

    window_size_left: int

    kernel = KernelInterface(cuda=("gqa_dense:SDPA",), cpu=("gqa_dense:SDPAOnCPU",))

    grows = ("S_kv",)

    def region(self, dims: Mapping[str, Any]) -> Hashable | None:
        """For one query every kernel takes keys of any number; few are a kernel's matter."""
        if dims["S_q"] != 1:
            return None
        return (min(dims["S_kv"], 64), 0 <= self.window_size_left < dims["S_kv"] - 1)

    @staticmethod
    def decomposition(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_scale: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        rope_cos: torch.Tensor | None,
        rope_sin: torch.Tensor | None,
        sinks: torch.Tensor | None,
        *,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        sm_scale: float | None,
        softcap: float | None,
        pos_encoding_mode: str,
        rotary_dim: int | None,
        rope_layout: str,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        batch, s_q, heads, size = q.shape
        s_kv, kv_heads = k.shape[1], k.shape[2]
        query, key, value = q.float(), k.float(), v.float()
        if q_scale is not None and k_scale is not None and v_scale is not None:
            group = heads // kv_heads
            query = query * q_scale.repeat_interleave(group, 1)[:, None, :, None]
            key, value = key * k_scale[:, None, :, None], value * v_scale[:, None, :, None]
        if rope_cos is not None and rope_sin is not None:
            query = _rotate(
                query, rope_cos[s_kv - s_q : s_kv], rope_sin[s_kv - s_q : s_kv], rope_layout
            )
            key = _rotate(key, rope_cos[:s_kv], rope_sin[:s_kv], rope_layout)
        # [B, H_kv, group, S, D]: grouped heads meet their key head by broadcasting, uncopied.
        query = query.reshape(batch, s_q, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
        key, value = key.permute(0, 2, 1, 3)[:, :, None], value.permute(0, 2, 1, 3)[:, :, None]
        scores = (
            query @ key.transpose(-1, -2) * (max(size, 1) ** -0.5 if sm_scale is None else sm_scale)
        )
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(s_q, device=q.device)[:, None] + (s_kv - s_q)
        other = torch.arange(s_kv, device=q.device)[None, :]
        if is_causal:
            scores = scores.masked_fill(other > place, -torch.inf)
        if window_size_left >= 0:
            scores = scores.masked_fill(other < place - window_size_left, -torch.inf)
        if window_size_right >= 0:
            scores = scores.masked_fill(other > place + window_size_right, -torch.inf)
        if sinks is not None:
            sink = sinks.view(1, kv_heads, heads // kv_heads, 1, 1)
            scores = torch.cat((scores, sink.expand(batch, -1, -1, s_q, 1)), -1)
        top = scores.amax(-1, keepdim=True)
        # A row that sees nothing has top -inf; exp(-inf - 0) = 0 where exp(-inf + inf) is NaN.
        weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
        total = weights.sum(-1, keepdim=True)
        result = (weights[..., :s_kv] @ value) / total.masked_fill(total == 0, 1.0)
        result = result.permute(0, 3, 1, 2, 4).reshape(batch, s_q, heads, size)
        return result.to(q.dtype if out_dtype is None else out_dtype)
