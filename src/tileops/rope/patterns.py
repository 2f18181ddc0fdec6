"""What plain PyTorch means an op of this family."""

from __future__ import annotations

from tileops.authoring import pattern as p

_x, _cos, _sin = (p.tensor(name, over="any") for name in ("x", "cos", "sin"))


def _turning(how: str) -> p.Pattern:
    turned = p.call(how, _x) * _sin + _x * _cos
    return p.Pattern(
        meanings=(turned,),
        hint=turned,
        absent="its cosines and sines come in tensors; this op makes its own of positions",
    )


ROTATED_HALVES, ROTATED_PAIRS = _turning("rotate_half"), _turning("rotate_pairs")
