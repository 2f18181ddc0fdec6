"""What the ops of the attention family mean: loops over queries, and autograd's gradients of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tileops.backend.tolerances import TEMPLATE_CANCELLATION, UNIT_ROUNDOFF

__all__ = ["EXACT", "ROUNDING"]

Meaning = tuple[tuple[torch.Tensor | None, ...], dict[str, torch.Tensor]]


def _turned(row: torch.Tensor, cosine: list[float], sine: list[float], layout: str) -> torch.Tensor:
    """One head's ``[D]``, rotated pair by pair."""
    half = len(cosine)
    result = row.clone()
    for i in range(half):
        p, q = (i, i + half) if layout == "neox" else (2 * i, 2 * i + 1)
        result[p] = row[p] * cosine[i] - row[q] * sine[i]
        result[q] = row[q] * cosine[i] + row[p] * sine[i]
    return result


def _all_turned(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, start: int, layout: str
) -> torch.Tensor:
    result = x.clone()
    cosines, sines = cosine.double().tolist(), sine.double().tolist()
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            for h in range(x.shape[2]):
                place = start + s
                result[b, s, h] = _turned(x[b, s, h], cosines[place], sines[place], layout)
    return result


def gqa_dense(
    op: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Meaning:
    batch, s_q, heads, size = q.shape
    s_kv, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    query, key, value = q.double(), k.double(), v.double()
    if q_scale is not None and k_scale is not None and v_scale is not None:
        for h in range(heads):
            query[:, :, h] *= q_scale[:, h // group].double()[:, None, None]
        key *= k_scale.double()[:, None, :, None]
        value *= v_scale.double()[:, None, :, None]
    if rope_cos is not None and rope_sin is not None:
        query = _all_turned(query, rope_cos, rope_sin, s_kv - s_q, op.rope_layout)
        key = _all_turned(key, rope_cos, rope_sin, 0, op.rope_layout)
    scale = 1 / math.sqrt(size or 1) if op.sm_scale is None else op.sm_scale
    result = torch.zeros(batch, s_q, heads, size, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(s_q):
                seen = _seen(op, i + s_kv - s_q, s_kv)
                if not seen:
                    continue
                scores = key[b, seen, h // group] @ query[b, i, h] * scale
                if op.softcap is not None:
                    scores = op.softcap * torch.tanh(scores / op.softcap)
                all_scores = scores
                if sinks is not None:
                    all_scores = torch.cat((scores, sinks[h : h + 1].double()))
                top = all_scores.max().detach()  # whatever is subtracted, the result is the same
                if top == -math.inf:  # as if nothing were seen: 0, whose slope is 0
                    result[b, i, h] = torch.exp(scores).sum()
                    continue
                shares = torch.exp(scores - top) / torch.exp(all_scores - top).sum()
                result[b, i, h] = (shares[:, None] * value[b, seen, h // group]).sum(0)
    return (result,), {}


def _seen(op: Any, place: int, s_kv: int) -> list[int]:
    """The keys that the query at ``place`` sees."""
    return [
        j
        for j in range(s_kv)
        if (not op.is_causal or j <= place)
        and (op.window_size_left < 0 or j >= place - op.window_size_left)
        and (op.window_size_right < 0 or j <= place + op.window_size_right)
    ]


def paged_kv_cache_write(
    op: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> Meaning:
    written = {}
    for name, new, cache, scale in (
        ("k_cache", k, k_cache, k_scale),
        ("v_cache", v, v_cache, v_scale),
    ):
        result = cache.double()
        for n, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                page, place = divmod(slot, cache.shape[1])
                row = new[n].double()
                if scale is not None:
                    top = torch.finfo(cache.dtype).max
                    row = (row / scale.double()).clamp(-top, top)
                result[page, place] = row
        written[name] = result
    return (), written


def gqa_dense_backward(
    op: Any,
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Meaning:
    given = {"q": q, "k": k, "v": v, "sinks": sinks}
    leaves = {n: t.double().detach().requires_grad_() for n, t in given.items() if t is not None}
    with torch.enable_grad():
        (result,), _ = gqa_dense(
            op, leaves["q"], leaves["k"], leaves["v"], None, None, None,
            rope_cos, rope_sin, leaves.get("sinks"),
        )  # fmt: skip
        result = result + 0 * sum(leaf.sum() for leaf in leaves.values() if not result.numel())
    found = dict.fromkeys(given)
    gradients = torch.autograd.grad(
        result, tuple(leaves.values()), grad_o.double(), materialize_grads=True
    )
    found.update(zip(leaves, gradients, strict=True))
    return tuple(found[n] if getattr(op, f"wants_{n}") else None for n in given), {}


def gqa_dense_backward_rounding(
    op: Any, grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any
) -> tuple[torch.Tensor | float, ...]:
    """What a library's kernel may be off by since it rounds to the inputs' dtype: the output, from whose
    product with its gradient the mean of each row is taken, the probabilities, the gradients of the
    scores, and each head's share of a key head's gradient. By rows, which differ in size: of a causal
    mask's first key many queries see much. Of calls without rope, softcap and sinks."""
    batch, s_q, heads, size = q.shape
    s_kv, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    most = TEMPLATE_CANCELLATION * UNIT_ROUNDOFF[q.dtype]
    scale = (size or 1) ** -0.5 if op.sm_scale is None else op.sm_scale
    query, grad = q.double(), grad_o.double()
    key, value = (t.double().repeat_interleave(group, 2) for t in (k, v))
    seen = torch.zeros(s_q, s_kv, dtype=torch.bool, device=q.device)
    for i in range(s_q):
        seen[i, _seen(op, i + s_kv - s_q, s_kv)] = True
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale
    shares = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).masked_fill(~seen, 0.0)
    output = torch.einsum("bhij,bjhd->bihd", shares, value)
    mean = torch.einsum("bihd,bihd->bhi", output, grad)
    slopes = shares * (torch.einsum("bihd,bjhd->bhij", grad, value) - mean[..., None])
    of_mean = (output * grad).square().sum(-1).sqrt().permute(0, 2, 1)

    def by_key_head(
        pattern: str, errors: torch.Tensor, shares: torch.Tensor, x: torch.Tensor
    ) -> Any:
        each = torch.einsum(pattern, shares, x).square()
        squares = torch.einsum(pattern, errors.square(), x.square()) + group * each
        return squares.reshape(batch, s_kv, kv_heads, group, size).sum(3).sqrt()

    of_q = torch.einsum("bhij,bjhd->bihd", shares, key).abs() * of_mean.permute(0, 2, 1)[..., None]
    of_q = of_q + torch.einsum("bhij,bjhd->bihd", slopes.square(), key.square()).sqrt()
    errors = (slopes.square() + (shares * of_mean[..., None]).square()).sqrt()
    of_k = by_key_head("bhij,bihd->bjhd", errors, slopes, query)
    of_v = by_key_head("bhij,bihd->bjhd", shares, shares, grad)
    return most * scale * of_q, most * scale * of_k, most * of_v, 0.0


EXACT: dict[str, Callable[..., Meaning]] = {
    "GQADenseBwdOp": gqa_dense_backward,
    "GQADenseFwdOp": gqa_dense,
    "PagedKVCacheWriteFwdOp": paged_kv_cache_write,
}
ROUNDING: dict[str, Callable[..., tuple[torch.Tensor | float, ...]]] = {
    "GQADenseBwdOp": gqa_dense_backward_rounding
}
"""For each output what kernels other than the decomposition may be off by, beyond the tolerance of a
result, where that does not say how far the rows of one tensor differ."""
