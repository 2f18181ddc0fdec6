"""What plain PyTorch means an op of this family.

Plain PyTorch counts heads before positions, the op positions before heads. Scores and probabilities may be
rounded to the inputs' dtype in between, as every implementation of attention may do.
"""

from __future__ import annotations

from typing import Any

from tileops.authoring import pattern as p

_SWAPPED = (0, 2, 1, 3)
_q, _v = p.tensor("q", "any", _SWAPPED), p.tensor("v", "any", _SWAPPED)
_k, _k_transposed = p.tensor("k", "any", _SWAPPED), p.tensor("k", "any", (0, 3, 1, 2))
_scale = p.number("sm_scale")


def _attention(scores: p.Term, v: p.Term) -> p.Term:
    return p.call("matmul", p.call("softmax", scores, dim=-1), v)


def _params(found: p.Found) -> dict[str, Any]:
    if found.numbers.get("is_causal") and not found.equal(found.shape("q")[1], found.shape("k")[1]):
        raise p.NoMatchError("is_causal counts from the first key, the op's mask from the last")
    return dict(found.numbers)


ATTENTION = p.Pattern(
    meanings=(
        _attention(p.call("matmul", _q, _k_transposed) * _scale, _v),
        p.call(
            "scaled_dot_product_attention", _q, _k, _v, attn_mask=None, dropout_p=0.0,
            is_causal=p.number("is_causal"), scale=_scale,
        ),
    ),
    hint=_attention(p.tensor("scores", "any"), p.tensor("v", "any")),
    calls=("scaled_dot_product_attention",),
    params=_params,
    layout=_SWAPPED,
    no_gain="its kernels are torch's attention, which Inductor puts there itself",
)  # fmt: skip
