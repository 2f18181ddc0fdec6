"""What plain PyTorch means an op of this family."""

from __future__ import annotations

from tileops.authoring import pattern as p

_LAYOUT = p.number("rope_layout")
_x = p.tensor("x")
_cos, _sin = p.tensor("cos", over="any", wide=True), p.tensor("sin", over="any", wide=True)


def _turned(x: p.Tensor) -> p.Term:
    """``(-b, a)`` for each pair ``(a, b)``."""
    return p.call("turn", x, rope_layout=_LAYOUT)


def _first(of: p.Tensor, other: p.Tensor, cos: p.Tensor, sin: p.Tensor) -> p.Term:
    return p.half(of, layout=_LAYOUT) * cos - p.half(other, second=True, layout=_LAYOUT) * sin


def _second(of: p.Tensor, other: p.Tensor, cos: p.Tensor, sin: p.Tensor) -> p.Term:
    return p.half(of, second=True, layout=_LAYOUT) * cos + p.half(other, layout=_LAYOUT) * sin


def _any(*names: str) -> list[p.Tensor]:
    return [p.tensor(name, over="any") for name in names]


_joined = (_first(_x, _x, _cos, _sin), _second(_x, _x, _cos, _sin))
_like = (_first(*_any("a", "b", "c", "d")), _second(*_any("e", "f", "g", "h")))
ROTATION = p.Pattern(
    meanings=(
        _turned(_x) * _sin + _x * _cos,
        p.call("join", *_joined, rope_layout=_LAYOUT),
    ),
    hint=(
        _turned(p.tensor("turned")) * _sin + _x * _cos,
        p.call("join", *_like, rope_layout=_LAYOUT),
    ),
    leading=True,
)
