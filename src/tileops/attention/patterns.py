"""What plain PyTorch means an op of this family.

Plain PyTorch counts heads before positions, the op positions before heads. Scores and probabilities may be
rounded to the inputs' dtype in between, as every implementation of attention may do.
"""

from __future__ import annotations

from typing import Any

from tileops.authoring import pattern as p

_SWAPPED, _HEADS = (0, 2, 1, 3), 2
_q, _v = p.tensor("q", "any", _SWAPPED), p.tensor("v", "any", _SWAPPED, _HEADS)
_k = p.tensor("k", "any", _SWAPPED, _HEADS)
_k_transposed = p.tensor("k", "any", (0, 3, 1, 2), _HEADS)
_scale = p.number("sm_scale")


def _attention(scores: p.Term, v: p.Term) -> p.Term:
    return p.call("matmul", p.call("softmax", scores, dim=-1), v)


def _band(found: p.Found) -> tuple[Any, Any]:
    """Which keys are seen: ``first <= key - query <= last``, some by each query."""
    (batch, queries, _, width), (_, keys, heads, _) = found.shape("q"), found.shape("k")
    wanted = [(batch, keys, heads, width)] * 2
    for given, sizes in zip((found.shape("k"), found.shape("v")), wanted, strict=True):
        if not all(map(found.equal, given, sizes)):
            raise p.NoMatchError("q, k and v are of several batches, lengths, heads or widths")
    first, last = (None, 0) if found.numbers.get("is_causal") else found.mask("mask")
    # Softmax of a row that is hidden whole is NaN, and the op gives 0.
    if (
        (first is not None and not found.at_most(queries - 1 + first, keys - 1))
        or (last is not None and not found.at_most(0, last))
        or (first is not None and last is not None and not found.at_most(first, last))
    ):
        raise p.NoMatchError("its mask may hide all keys from a query")
    return first, last


def _params(found: p.Found) -> dict[str, Any]:
    """The op's masks count from the last query and key."""
    first, last = _band(found)
    shift = found.shape("k")[1] - found.shape("q")[1]
    params = {"sm_scale": found.numbers.get("sm_scale")}
    if last is not None and found.equal(last, shift):
        params["is_causal"] = True
    elif last is not None and found.at_most(shift, last):
        params["window_size_right"] = last - shift
    elif last is not None:
        raise p.NoMatchError("its mask counts from the first key, the op's from the last")
    if first is not None and not found.at_most(first, shift):
        raise p.NoMatchError("its window begins behind a query's own place")
    if first is not None:
        params["window_size_left"] = shift - first
    return params


def _torch(found: p.Found) -> p.Plain:
    first, last = _band(found)
    queries, keys = found.shape("q")[1], found.shape("k")[1]
    if first is not None or (last is not None and not found.equal(last, 0)):
        raise p.NoMatchError("torch's attention has no such window")
    if last is not None and not found.equal(queries, keys):
        raise p.NoMatchError("torch's causal attention is for as many queries as keys")
    named = {"is_causal": last is not None, "scale": found.numbers.get("sm_scale")}
    return p.Plain("scaled_dot_product_attention", ("q", "k", "v"), named, "enable_gqa")


ATTENTION = p.Pattern(
    meanings=(
        _attention(p.mask("mask", p.call("matmul", _q, _k_transposed) * _scale), _v),
        p.call(
            "scaled_dot_product_attention", _q, _k, _v, attn_mask=p.mask("mask"), dropout_p=0.0,
            is_causal=p.number("is_causal"), scale=_scale,
        ),
    ),
    hint=_attention(p.tensor("scores", "any"), p.tensor("v", "any")),
    calls=("scaled_dot_product_attention",),
    params=_params,
    layout=_SWAPPED,
    no_gain="its kernels are torch's attention, which Inductor puts there itself",
    plain=_torch,
)  # fmt: skip
