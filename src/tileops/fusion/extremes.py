"""Reading largest numbers and bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tileops.fusion.graph import canonical, value_of
from tileops.fusion.reading import Expr, Made, argument, factors, number_of, reduced, stripped

__all__ = ["amax_of", "at_least", "bounds_of", "scaled_least"]


def amax_of(expr: Expr) -> tuple[Expr, tuple[int, ...] | int] | None:
    """What the largest is of, and over which dims: how many of the last ones, or which others."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        return None
    name = canonical(expr)
    if name == "getitem":
        pair = expr.args[0]
        if not isinstance(pair, Node) or canonical(pair) != "max" or expr.args[1] != 0:
            return None
        values = value_of(pair)
        # Of two tensors it is the larger of each two elements.
        return None if isinstance(values, torch.Tensor) or _second(pair) else reduced(pair)
    if name == "max" and _second(expr):
        return None
    if name not in ("amax", "max") or not isinstance(value_of(expr), torch.Tensor):
        return None
    return reduced(expr)


def _second(node: Node) -> bool:
    """Whether ``max`` has a second tensor."""
    return isinstance(value_of(argument(node, 1, "other", "dim")), torch.Tensor)


def bounds_of(expr: Expr) -> tuple[Expr, Any, Any] | None:
    """What a step bounds, its least and its largest, None where there is none."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        return (expr.arguments[0], expr.arguments[1], None) if expr.name == "maximum" else None
    name, one = canonical(expr), argument(expr, 0, "input", "self")
    if not isinstance(one, Node):
        return None
    if name == "clamp":
        return one, argument(expr, 1, "min"), argument(expr, 2, "max")
    if name == "maximum":
        return one, argument(expr, 1, "other", "min"), None
    if name == "minimum":
        return one, None, argument(expr, 1, "other", "max")
    return None


def at_least(expr: Expr) -> tuple[Expr, Any] | None:
    """What has a least and no largest, and that."""
    found = bounds_of(expr)
    return None if found is None or found[1] is None or found[2] is not None else found[:2]


def scaled_least(expr: Expr) -> tuple[float, list[tuple[Expr, float]]] | None:
    """``max(k a, b)`` as ``k max(a, b / k)``, where ``k`` is a positive number and ``b`` one that is
    known."""
    found = at_least(expr)
    least = None if found is None else number_of(found[1])
    if found is None or least is None:
        return None
    parts = factors(found[0])
    if (
        parts is None
        or parts[0] <= 0
        or parts[0] == 1
        or len(parts[1]) != 1
        or parts[1][0][1] != 1.0
    ):
        return None
    return parts[0], [(Made("maximum", (parts[1][0][0], least / parts[0])), 1.0)]
