"""Reading the steps of a graph as primitives with arguments and attributes, and as parts of a last dim."""

from __future__ import annotations

from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from tileops.fusion.graph import canonical, value_of
from tileops.fusion.reading import (
    Expr,
    Made,
    argument,
    equal_shapes,
    factors,
    fixed,
    origin,
    stripped,
)

__all__ = ["entries_of", "primitive"]


def primitive(expr: Expr) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Name, arguments and named arguments of a primitive."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        return expr.name, expr.arguments, {}
    name, named = canonical(expr), dict(expr.kwargs)
    if name is None:
        return None
    if name in ("cat", "reshape"):
        return _turn(expr) or _join(expr)
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


def _turn(node: Node) -> tuple[str, tuple[Expr, ...], dict[str, Any]] | None:
    """``turn``: each pair ``(a, b)`` of the last dim as ``(-b, a)``; ``rope_layout``: which are pairs."""
    joined = _joined(node)
    if joined is None:
        return None
    one, other, layout = joined
    negative = factors(one)
    if negative is None or negative[0] != -1.0 or len(negative[1]) != 1 or negative[1][0][1] != 1:
        return None
    second, first = entries_of(negative[1][0][0]), entries_of(other)
    if second is None or first is None or second[0] is not first[0]:
        return None
    if (second[1:], first[1:]) != ((True, layout), (False, layout)):
        return None
    return "turn", (first[0],), {"rope_layout": layout}


def _join(node: Node) -> tuple[str, tuple[Expr, ...], dict[str, Any]] | None:
    """``join``: two tensors as one last dim; ``rope_layout`` says how."""
    joined = _joined(node)
    return None if joined is None else ("join", joined[:2], {"rope_layout": joined[2]})


def _joined(node: Node) -> tuple[Any, Any, str] | None:
    """Two tensors of one shape and how they make up a last dim: as its halves, ``neox``, or by turns,
    ``interleaved``."""
    joined = node if canonical(node) == "cat" else argument(node, 0, "input", "self")
    name, layout = ("cat", "neox") if joined is node else ("stack", "interleaved")
    if not isinstance(joined, Node) or canonical(joined) != name:
        return None
    pieces, rank = argument(joined, 0, "tensors"), value_of(joined).dim()
    if argument(joined, 1, "dim", "axis", default=0) not in (-1, rank - 1):
        return None
    if not isinstance(pieces, tuple | list) or len(pieces) != 2:
        return None
    one, other = pieces
    shape = tuple(value_of(one).shape)
    whole = (*shape[:-1], 2 * shape[-1]) if shape else ()
    alike = equal_shapes(shape, value_of(other).shape)
    return (one, other, layout) if alike and equal_shapes(value_of(node).shape, whole) else None


def entries_of(expr: Expr) -> tuple[Node, bool, str] | None:
    """The tensor of whose last dim an expression is one entry of each pair, whether the second one, and
    which are pairs."""
    half = half_of(expr)
    if half is not None:
        return *half, "neox"
    expr = origin(expr)
    if isinstance(expr, Made) or canonical(expr) not in ("getitem", "select"):
        return None
    source, index = argument(expr, 0, "input", "self"), argument(expr, 1, "dim")
    parts = value_of(source)
    if not isinstance(source, Node):
        return None
    if isinstance(parts, tuple | list):
        pairs = argument(source, 0, "input", "self")
        whole = value_of(pairs)
        if canonical(source) != "unbind" or not isinstance(whole, torch.Tensor):
            return None
        last = argument(source, 1, "dim", default=0) in (-1, whole.dim() - 1)
        return _of_pairs(pairs, index) if last else None
    if not isinstance(parts, torch.Tensor) or not parts.dim():
        return None
    if canonical(expr) == "select":
        place = argument(expr, 2, "index")
        return _of_pairs(source, place) if index in (-1, parts.dim() - 1) else None
    cut = _along_last(parts.dim(), index)
    if type(cut) is int:
        return _of_pairs(source, cut)
    size = fixed(parts.shape[-1])
    if not isinstance(cut, slice) or cut.step != 2 or size is None or size % 2:
        return None
    if cut.start not in (None, 0, 1) or cut.stop not in (None, size):
        return None
    return source, cut.start == 1, "interleaved"


def _of_pairs(pairs: Any, place: Any) -> tuple[Node, bool, str] | None:
    """Of a last dim that ``pairs`` has as a dim of its own, of size 2, behind that of the pairs."""
    if not isinstance(pairs, Node) or canonical(pairs) not in ("reshape", "unflatten"):
        return None
    source = argument(pairs, 0, "input", "self")
    if not isinstance(source, Node):
        return None
    old, new = value_of(source), value_of(pairs)
    if new.dim() != old.dim() + 1 or not equal_shapes(new.shape[:-2], old.shape[:-1]):
        return None
    if fixed(new.shape[-1]) != 2 or place not in (0, 1, -1, -2):
        return None
    return source, place in (1, -1), "interleaved"


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
    cut = _along_last(last + 1, index)
    if not isinstance(cut, slice) or cut.step not in (None, 1):
        return None
    return source, cut.start or 0, cut.stop


def _along_last(dims: int, index: Any) -> Any:
    """What an index takes of the last dim, where it takes all of the others; else None."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not given:
        return None
    *rest, cut = given
    full = all(g is ... or (isinstance(g, slice) and g == slice(None)) for g in rest)
    return cut if full and (... in rest or len(given) == dims) else None


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
