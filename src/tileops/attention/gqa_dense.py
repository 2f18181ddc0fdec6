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


def _by_key_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[B, S, H, D]`` as ``[B, H_kv, group, S, D]``: grouped heads meet their key head by broadcasting,
    uncopied."""
    batch, length, heads, size = x.shape
    return x.reshape(batch, length, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """The way back."""
    batch, kv_heads, group, length, size = x.shape
    return x.permute(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, size)


def _scale(size: int, sm_scale: float | None) -> float:
    return max(size, 1) ** -0.5 if sm_scale is None else sm_scale


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _masked(scores: torch.Tensor, is_causal: bool, left: int, right: int) -> torch.Tensor:
    """-inf where a query does not see a key."""
    s_q, s_kv = scores.shape[-2:]
    place = torch.arange(s_q, device=scores.device)[:, None] + (s_kv - s_q)
    other = torch.arange(s_kv, device=scores.device)[None, :]
    if is_causal:
        scores = scores.masked_fill(other > place, -torch.inf)
    if left >= 0:
        scores = scores.masked_fill(other < place - left, -torch.inf)
    if right >= 0:
        scores = scores.masked_fill(other > place + right, -torch.inf)
    return scores


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp(scores - their largest)``, that of the sink last, and their sum, 1 where all are 0."""
    if sinks is not None:
        batch, kv_heads, group, s_q, _ = scores.shape
        sink = sinks.view(1, kv_heads, group, 1, 1)
        scores = torch.cat((scores, sink.expand(batch, -1, -1, s_q, 1)), -1)
    top = scores.amax(-1, keepdim=True)
    # A row that sees nothing has top -inf; exp(-inf - 0) = 0 where exp(-inf + inf) is NaN.
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights, total.masked_fill(total == 0, 1.0)


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
        s_q, heads, size = q.shape[1:]
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
        query, key, value = (_by_key_head(x, kv_heads) for x in (query, key, value))
        scores = _capped(query @ key.transpose(-1, -2) * _scale(size, sm_scale), softcap)
        scores = _masked(scores, is_causal, window_size_left, window_size_right)
        weights, total = _weights(scores, sinks)
        result = _by_head((weights[..., :s_kv] @ value) / total)
        return result.to(q.dtype if out_dtype is None else out_dtype)


class GQADenseBwdOp(Op):
    """The gradients of ``GQADenseFwdOp`` for ``grad_o`` ``[B, S_q, H, D]``, None where not wanted; shapes
    and dtypes are the forward's. float8 inputs have none.

    With ``P`` the softmax of the scores, ``G = grad_o vᵀ`` and ``m`` the sum of each row of ``P G``:
    ``grad_v = Pᵀ grad_o``; that of the scores is ``S = P (G - m)``, times ``1 - tanh²`` with a
    ``softcap``; ``grad_q = S k * sm_scale`` and ``grad_k = Sᵀ q * sm_scale``, rotated back;
    ``grad_sinks`` is the sum of ``-P m`` in the sink's column. A key head sums over its query heads.
    In float32.
    """

    kernel = KernelInterface(
        cuda=("gqa_dense_backward:SDPAGradient",), cpu=("gqa_dense_backward:SDPAGradientOnCPU",)
    )

    @staticmethod
    def decomposition(
        grad_o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
        wants_q: bool,
        wants_k: bool,
        wants_v: bool,
        wants_sinks: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        s_q, size = q.shape[1], q.shape[3]
        s_kv, kv_heads = k.shape[1], k.shape[2]
        scale = _scale(size, sm_scale)

        def turned(x: torch.Tensor, first: int, way: int = 1) -> torch.Tensor:
            if rope_cos is None or rope_sin is None:
                return x
            places = slice(first, s_kv)
            return _rotate(x, rope_cos[places], rope_sin[places] * way, rope_layout)

        query, key, value, grad = (
            _by_key_head(x, kv_heads)
            for x in (
                turned(q.float(), s_kv - s_q),
                turned(k.float(), 0),
                v.float(),
                grad_o.float(),
            )
        )
        scores = _capped(query @ key.transpose(-1, -2) * scale, softcap)
        weights, total = _weights(
            _masked(scores, is_causal, window_size_left, window_size_right), sinks
        )
        weights = weights / total
        seen = weights[..., :s_kv]
        slope = grad @ value.transpose(-1, -2)
        mean = (seen * slope).sum(-1, keepdim=True)
        grad_scores = seen * (slope - mean) * scale
        if softcap is not None:
            grad_scores = grad_scores * (1 - (scores / softcap).square())
        grad_q = grad_k = grad_v = grad_sinks = None
        if wants_q:
            grad_q = turned(_by_head(grad_scores @ key), s_kv - s_q, -1).to(q.dtype)
        if wants_k:
            grad_k = (grad_scores.transpose(-1, -2) @ query).sum(2, keepdim=True)
            grad_k = turned(_by_head(grad_k), 0, -1).to(k.dtype)
        if wants_v:
            grad_v = _by_head((seen.transpose(-1, -2) @ grad).sum(2, keepdim=True)).to(v.dtype)
        if wants_sinks and sinks is not None:
            grad_sinks = -(weights[..., s_kv:] * mean).sum((0, 3, 4)).reshape(sinks.shape)
        return grad_q, grad_k, grad_v, grad_sinks
