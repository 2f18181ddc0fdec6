"""Reading the steps of a graph as arithmetic: of which factors a node is the product, of which terms the
sum, over which dims it reduces, and what it is but for casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tileops.fusion.graph import canonical, idle, value_of

__all__ = [
    "Expr", "Made", "argument", "cast_of", "equal_shapes", "factors", "fixed", "half_of", "mean_of",
    "holds", "number_of", "origin", "primitive", "reduced", "stripped", "summands", "transparent",
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


# ---- the rest ------------------------------------------------------------------------------------


def primitive(expr: Expr) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Name, arguments and named arguments of a primitive."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        return expr.name, expr.arguments, {}
    name, named = canonical(expr), dict(expr.kwargs)
    if name is None:
        return None
    if name in ("cat", "reshape"):
        turned = _turned(expr, name)
        return None if turned is None else (*turned, {})
    named.update(_attributes(expr, name))
    first = argument(expr, 0, "input", "self")
    return name, (first, *expr.args[1:]), named


_ATTENTION = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def _attributes(node: Node, name: str) -> dict[str, Any]:
    """What may be given by position or left out, by name."""
    if name == "gelu":
        return {"approximate": argument(node, 1, "approximate", default="none")}
    if name == "round":
        return {"decimals": argument(node, 1, "decimals", default=0)}
    if name == "softmax":
        dim = argument(node, 1, "dim")
        value = value_of(node)
        if isinstance(dim, int) and dim >= 0 and isinstance(value, torch.Tensor):
            dim -= value.dim()
        return {"dim": dim}
    if name == "scaled_dot_product_attention":
        return {
            key: argument(node, place, key, default=default)
            for place, (key, default) in enumerate(_ATTENTION.items(), 3)
        }
    return {}


def _turned(node: Node, name: str) -> tuple[str, tuple[Expr]] | None:
    """``rotate_half``: the negative second half before the first; ``rotate_pairs``: so for neighbours."""
    joined: Any = node if name == "cat" else node.args[0]
    if not isinstance(joined, Node) or canonical(joined) != ("cat" if name == "cat" else "stack"):
        return None
    pieces, rank = argument(joined, 0, "tensors"), value_of(joined).dim()
    if argument(joined, 1, "dim", "axis", default=0) not in (-1, rank - 1) or len(pieces) != 2:
        return None
    second = factors(pieces[0])
    if second is None or second[0] != -1.0 or len(second[1]) != 1:
        return None
    cut = half_of if name == "cat" else _neighbour_of
    one, other = cut(second[1][0][0]), cut(pieces[1])
    if one is None or other is None or (one[1], other[1]) != (True, False):
        return None
    kind = "rotate_half" if name == "cat" else "rotate_pairs"
    return (kind, (one[0],)) if one[0] is other[0] else None


def _neighbour_of(expr: Expr) -> tuple[Node, bool] | None:
    """The tensor of which an expression is every second entry of the last dim, and whether the later."""
    expr = origin(expr)
    if isinstance(expr, Made) or canonical(expr) != "getitem" or not isinstance(expr.args[0], Node):
        return None
    index = expr.args[1] if isinstance(expr.args[1], tuple) else (expr.args[1],)
    last = index[-1] if index else None
    if not isinstance(last, slice) or last.step != 2 or last.start not in (None, 0, 1):
        return None
    return expr.args[0], last.start == 1


def half_of(expr: Expr) -> tuple[Node, bool] | None:
    """The tensor of whose last dim an expression is one half, and whether it is the second."""
    expr = origin(expr)
    if isinstance(expr, Made):
        return None
    cut = _cut(expr)
    if cut is None:
        return None
    source, start, stop = cut
    size = fixed(value_of(source).shape[-1])
    if size is None or size % 2:
        return None
    stop = size if stop is None else stop
    if not isinstance(start, int) or not isinstance(stop, int):
        return None
    start, stop = (n + size if n < 0 else min(n, size) for n in (start, stop))
    if (start, stop) == (0, size // 2):
        return source, False
    return (source, True) if (start, stop) == (size // 2, size) else None


def _cut(node: Node) -> tuple[Node, Any, Any] | None:
    """A slice of the last dim: of what, from where, to where."""
    name = canonical(node)
    source = argument(node, 0, "input", "self")
    if not isinstance(source, Node):
        return None
    value = value_of(source)
    if name == "getitem" and isinstance(value, tuple | list):
        return _piece(source, node.args[1])
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    last = value.dim() - 1
    if name == "getitem" and node.target is getitem:
        return _sliced(source, last, node.args[1])
    if name == "narrow" and argument(node, 1, "dim") in (-1, last):
        start, length = argument(node, 2, "start"), argument(node, 3, "length")
        if isinstance(start, int) and isinstance(length, int):
            return source, start, start + length
    return None


def _sliced(source: Node, last: int, index: Any) -> tuple[Node, Any, Any] | None:
    given = list(index) if isinstance(index, tuple) else [index]
    if not given or not isinstance(given[-1], slice) or given[-1].step not in (None, 1):
        return None
    rest = given[:-1]
    full = all(g is ... or (isinstance(g, slice) and g == slice(None)) for g in rest)
    if not full or (... not in rest and len(given) != last + 1):
        return None
    return source, given[-1].start or 0, given[-1].stop


def _piece(parts: Node, place: Any) -> tuple[Node, Any, Any] | None:
    """Of ``chunk``, ``split`` or ``tensor_split`` along the last dim."""
    source = argument(parts, 0, "input", "self", "tensor")
    value = value_of(source)
    name = canonical(parts)
    if name not in ("chunk", "split", "split_with_sizes", "tensor_split") or not isinstance(
        place, int
    ):
        return None
    dim = argument(parts, 2, "dim", default=0)
    if not isinstance(value, torch.Tensor) or dim not in (-1, value.dim() - 1):
        return None
    sizes = [fixed(t.shape[-1]) for t in value_of(parts)]
    if None in sizes:
        return None
    place %= len(sizes)
    ends = list(accumulate(s or 0 for s in sizes))
    return source, ends[place] - (sizes[place] or 0), ends[place]
