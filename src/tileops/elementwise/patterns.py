"""What plain PyTorch means an op of this family."""

from __future__ import annotations

from tileops.authoring import pattern as p

_input = p.tensor("input", over="any")
_gate, _factor = p.half(_input), p.half(_input, second=True)
_one, _other = p.tensor("gate", over="any"), p.tensor("factor", over="any")


def _silu(x: p.Term) -> p.Term:
    return x * p.call("sigmoid", x)


def _gelu(x: p.Term) -> p.Term:
    return p.call("gelu", x, approximate=p.number("approximate"))


SILU_AND_MUL = p.Pattern(meanings=(_silu(_gate) * _factor,), hint=_silu(_one) * _other)
GELU_AND_MUL = p.Pattern(meanings=(_gelu(_gate) * _factor,), hint=_gelu(_one) * _other)
