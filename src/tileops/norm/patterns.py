"""What plain PyTorch means an op of this family."""

from __future__ import annotations

from typing import Any

from tileops.authoring import pattern as p

_x, _weight, _eps = p.tensor("x"), p.tensor("weight", over="last"), p.number("eps")


def _over_last(found: p.Found) -> dict[str, Any]:
    return {**found.numbers, "normalized_shape": found.shape("x")[-found.dims :]}


def _mean_square(x: p.Term) -> p.Term:
    return p.mean(x * x) + _eps


def _normalised(x: p.Term) -> p.Term:
    return x * _mean_square(x) ** -0.5


RMS_NORM = p.Pattern(
    meanings=(_normalised(_x) * _weight, _normalised(_x)),
    hint=_mean_square(_x),
    calls=("rms_norm",),
    params=_over_last,
)


def _sum_of(input: str) -> p.Term:
    return p.named("residual_out", p.tensor(input) + p.tensor("residual"))


def _of_one_dim(found: p.Found) -> dict[str, Any]:
    if found.dims != 1:
        raise p.NoMatchError(f"it is over the last {found.dims} dims, the op over one")
    return dict(found.numbers)


FUSED_ADD_RMS_NORM = p.Pattern(
    meanings=(_normalised(_sum_of("input")) * _weight,),
    hint=_mean_square(_x),
    calls=("rms_norm",),
    params=_of_one_dim,
    outputs=("residual_out",),
)


_bias = p.tensor("bias", over="last")


def _variance(x: p.Term) -> p.Term:
    return p.mean((x - p.mean(x)) ** 2) + _eps


def _standard(x: p.Term) -> p.Term:
    return (x - p.mean(x)) * _variance(x) ** -0.5


_input = p.tensor("input")
LAYER_NORM = p.Pattern(
    meanings=(
        _standard(_input) * _weight + _bias,
        _standard(_input) * _weight,
        _standard(_input) + _bias,
        _standard(_input),
    ),
    hint=_variance(_x),
    calls=("layer_norm",),
    params=lambda found: {**found.numbers, "normalized_shape": found.shape("input")[-found.dims :]},
)
FUSED_ADD_LAYER_NORM = p.Pattern(
    meanings=(_standard(_sum_of("x")) * _weight + _bias,),
    hint=_variance(_x),
    calls=("layer_norm",),
    params=_of_one_dim,
    outputs=("residual_out",),
)
