"""Reading the steps of a graph as arithmetic: of which factors a node is the product, of which terms the
sum, over which dims it reduces, and what it is but for casts; ``primitives`` reads what is neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tileops.fusion.graph import canonical, idle, value_of

__all__ = [
    "Expr", "Made", "argument", "cast_of", "equal_shapes", "factors", "fixed", "holds", "mean_of",
    "number_of", "origin", "reduced", "stripped", "summands", "transparent",
]  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A step inside a function of torch, such as the mean in ``rms_norm``: computed in float32 or wider
    and rounded nowhere."""

    name: str
    arguments: tuple[Any, ...]
    dims: int = 0
    """How many of the last dims a mean is over."""


Expr = Node | Made
Parts = tuple[float, list[tuple[Expr, float]]]


def argument(node: Node, place: int, *names: str, default: Any = None) -> Any:
    """An argument by its position or one of its names."""
    if place < len(node.args):
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def number_of(value: Any) -> float | None:
    """The number that an argument is, None for a tensor, a symbolic size or anything else."""
    value = value_of(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def fixed(size: Any) -> int | None:
    """The number that a size is, also where it was symbolic until a guard settled it."""
    if isinstance(size, torch.SymInt):
        found: int | None = size.node.maybe_as_int()
        return found
    return size if isinstance(size, int) else None


def equal_shapes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal; no guard comes of it."""
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


# ---- what changes no value -----------------------------------------------------------------------


def _cast(node: Expr) -> tuple[torch.Tensor, torch.Tensor] | None:
    """From what to what a cast between floating dtypes goes."""
    if isinstance(node, Made) or canonical(node) != "to" or not node.args:
        return None
    old, new = value_of(node.args[0]), value_of(node)
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None
    floats = old.dtype.is_floating_point and new.dtype.is_floating_point
    return (old, new) if floats and old.device == new.device else None


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a floating dtype has all numbers of another."""
    one, other = torch.finfo(wide), torch.finfo(narrow)
    return one.eps <= other.eps and one.max >= other.max and one.tiny <= other.tiny


def cast_of(node: Expr) -> Node | None:
    """What a node is a cast of, where that loses nothing."""
    found = _cast(node)
    if found is None or not holds(found[1].dtype, found[0].dtype):
        return None
    assert isinstance(node, Node)
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def origin(expr: Expr) -> Expr:
    """A value before casts that lose nothing."""
    while (source := cast_of(expr)) is not None:
        expr = source
    return expr


_RESHAPING = ("contiguous", "expand", "expand_as", "getitem", "reshape", "squeeze", "unsqueeze")


def transparent(expr: Expr) -> bool:
    """Whether a node only casts, or only adds, removes or repeats dims of size 1."""
    if isinstance(expr, Made):
        return False
    if _cast(expr) is not None:
        return True
    name = canonical(expr)
    if name == "dropout":
        return idle(expr)
    if name not in _RESHAPING:
        return False
    source = expr.args[0] if expr.args else None
    old, new = value_of(source), value_of(expr)
    if not isinstance(source, Node) or not isinstance(old, torch.Tensor):
        return False
    if name == "getitem":
        given = expr.args[1] if isinstance(expr.args[1], tuple) else (expr.args[1],)
        if any(g is not None and g is not ... and g != slice(None) for g in given):
            return False
    if name in ("expand", "expand_as"):
        return True
    return equal_shapes(*([s for s in t.shape if not _is_one(s)] for t in (old, new)))


def _is_one(size: Any) -> bool:
    return bool(statically_known_true(size == 1))


def stripped(expr: Expr) -> Expr:
    """A value before casts and dims of size 1."""
    while transparent(expr):
        assert isinstance(expr, Node)
        assert isinstance(expr.args[0], Node)
        expr = expr.args[0]
    return expr


# ---- arithmetic ----------------------------------------------------------------------------------


def factors(expr: Expr) -> Parts | None:
    """A coefficient and the factors, each with its power; None for what is no product."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        return _made_factors(expr)
    name = canonical(expr)
    if name in ("mul", "div"):
        return _product(expr, -1.0 if name == "div" else 1.0)
    one = argument(expr, 0, "input", "self")
    if not isinstance(one, Node):
        return None
    if name in _POWERS:
        return 1.0, [(one, _POWERS[name])]
    if name == "neg":
        return -1.0, [(one, 1.0)]
    if name == "pow":
        power = number_of(argument(expr, 1, "exponent"))
        return None if power is None else (1.0, [(one, float(power))])
    if name == "matmul":
        return _scaled_matmul(expr)
    if name == "silu":
        return 1.0, [(one, 1.0), (Made("sigmoid", (one,)), 1.0)]
    if name == "rms_norm":
        return 1.0, _rms_norm(expr, one)
    if name == "layer_norm" and argument(expr, 3, "bias") is None:
        return 1.0, _layer_norm(expr, one)
    if name == "std":
        variance = _variance(expr, one)
        return None if variance is None else (1.0, [(variance, 0.5)])
    return None


_POWERS = {"reciprocal": -1.0, "rsqrt": -0.5, "sqrt": 0.5, "square": 2.0}


def _made_factors(expr: Made) -> Parts | None:
    if expr.name == "mul":
        return 1.0, [(a, 1.0) for a in expr.arguments]
    if expr.name == "pow":
        return 1.0, [(expr.arguments[0], expr.arguments[1])]
    return None


def _product(node: Node, power: float) -> Parts | None:
    if node.kwargs.get("rounding_mode") is not None:
        return None
    coefficient = 1.0
    found: list[tuple[Expr, float]] = []
    pair = (argument(node, 0, "input", "self"), argument(node, 1, "other"))
    for value, exponent in zip(pair, (1.0, power), strict=True):
        known = number_of(value)
        if known is not None:
            if known == 0:
                return None
            coefficient *= known**exponent
        elif isinstance(value, Node):
            found.append((value, exponent))
        else:
            return None
    return coefficient, found


def _scaled_matmul(node: Node) -> Parts | None:
    """Numbers by which either side is multiplied come before the product."""
    coefficient, sides = 1.0, []
    for side in (argument(node, 0, "input", "self"), argument(node, 1, "other")):
        inner = side
        if isinstance(side, Node) and canonical(side) in ("mul", "div"):
            parts = factors(side)
            if parts is not None and len(parts[1]) == 1 and parts[1][0][1] == 1.0:
                coefficient, inner = coefficient * parts[0], parts[1][0][0]
        sides.append(inner)
    return None if coefficient == 1.0 else (coefficient, [(Made("matmul", tuple(sides)), 1.0)])


def summands(expr: Expr) -> tuple[Any, list[tuple[Expr, float]]] | None:
    """A constant and the terms, each with its coefficient; None for what is no sum."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        first = (expr.arguments[0], 1.0)
        if expr.name == "add":
            return expr.arguments[1], [first]
        return (0.0, [first, (expr.arguments[1], -1.0)]) if expr.name == "sub" else None
    name = canonical(expr)
    if name == "layer_norm":
        one, bias = argument(expr, 0, "input"), argument(expr, 3, "bias")
        product = Made("mul", tuple(f for f, _ in _layer_norm(expr, one)))
        return 0.0, [(product, 1.0), *([] if bias is None else [(bias, 1.0)])]
    if name not in ("add", "sub", "rsub"):
        return None
    alpha = number_of(expr.kwargs.get("alpha", 1))
    if alpha is None:
        return None
    constant: Any = 0.0
    terms: list[tuple[Expr, float]] = []
    pair = [argument(expr, 0, "input", "self"), argument(expr, 1, "other")]
    signs = [1.0, float(alpha) if name == "add" else -float(alpha)]
    for value, sign in zip(pair, signs[::-1] if name == "rsub" else signs, strict=True):
        known = number_of(value)
        if known is not None:
            constant += sign * known
        elif isinstance(value, Node):
            terms.append((value, sign))
        else:
            return None
    return constant, terms


# ---- reductions ----------------------------------------------------------------------------------


def mean_of(expr: Expr) -> tuple[Expr, tuple[int, ...] | int] | None:
    """What a mean is of, and over which dims: how many of the last ones, or which others."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        return (expr.arguments[0], expr.dims) if expr.name == "mean" else None
    name = canonical(expr)
    if name == "mean":
        return reduced(expr)
    if name == "var":
        variance = _variance(expr, argument(expr, 0, "input", "self"))
        return None if variance is None else (variance.arguments[0], variance.dims)
    if name in ("div", "mul"):
        parts = _product(expr, -1.0 if name == "div" else 1.0)
        if parts is None or len(parts[1]) != 1 or parts[1][0][1] != 1.0:
            return None
        total = stripped(parts[1][0][0])
        if isinstance(total, Made) or canonical(total) != "sum":
            return None
        found = reduced(total)
        if found is None or not isinstance(found[1], int):
            return None
        sizes = [fixed(s) for s in value_of(found[0]).shape[-found[1] :]]
        count = math.prod(s or 0 for s in sizes)
        return found if abs(parts[0] * count - 1.0) < 1e-9 else None
    return None


def reduced(node: Node) -> tuple[Node, tuple[int, ...] | int] | None:
    """What a reduction is of, and over which dims."""
    one = argument(node, 0, "input", "self")
    value = value_of(one)
    if not isinstance(one, Node) or not isinstance(value, torch.Tensor):
        return None
    given = argument(node, 1, "dim", "axis")
    if given is None or given in ((), []):
        given = range(value.dim())
    dims = [given] if isinstance(given, int) else list(given)
    if not all(isinstance(d, int) for d in dims) or not value.dim():
        return None
    sorted_dims = tuple(sorted(d % value.dim() for d in dims))
    last = sorted_dims == tuple(range(value.dim() - len(dims), value.dim()))
    return one, (len(dims) if last and dims else sorted_dims)


def _rms_norm(node: Node, x: Node) -> list[tuple[Expr, float]]:
    dims = len(argument(node, 1, "normalized_shape"))
    weight, eps = argument(node, 2, "weight"), argument(node, 3, "eps")
    mean = Made("mean", (Made("pow", (x, 2.0)),), dims)
    found: list[tuple[Expr, float]] = [(x, 1.0), (Made("add", (mean, eps)), -0.5)]
    return found if weight is None else [*found, (weight, 1.0)]


def _layer_norm(node: Node, x: Node) -> list[tuple[Expr, float]]:
    dims = len(argument(node, 1, "normalized_shape"))
    weight, eps = argument(node, 2, "weight"), argument(node, 4, "eps", default=1e-5)
    apart = Made("sub", (x, Made("mean", (x,), dims)))
    variance = Made("mean", (Made("pow", (apart, 2.0)),), dims)
    rstd = Made("pow", (Made("add", (variance, eps)), -0.5))
    found: list[tuple[Expr, float]] = [(apart, 1.0), (rstd, 1.0)]
    return found if weight is None else [*found, (weight, 1.0)]


def _variance(node: Node, x: Node) -> Made | None:
    """The biased variance over the last dims; None for another."""
    over = reduced(node)
    biased = node.kwargs.get("unbiased") is False or node.kwargs.get("correction") == 0
    if len(node.args) > 2 and node.args[2] is False:
        biased = True
    if over is None or not isinstance(over[1], int) or not biased:
        return None
    apart = Made("sub", (x, Made("mean", (x,), over[1])))
    return Made("mean", (Made("pow", (apart, 2.0)),), over[1])
