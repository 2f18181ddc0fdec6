"""How heads are arranged before attention: dims swapped, key heads repeated for their queries."""

from __future__ import annotations

import torch
from torch.fx import Node

from tileops.fusion.graph import canonical, value_of
from tileops.fusion.reading import argument, equal_shapes, fixed, transparent

__all__ = ["between", "swapped", "unspread"]


def swapped(node: Node) -> tuple[Node, list[int]] | None:
    """Of what a node is with its dims in another order, and which dim of that each of its dims is."""
    name, source = canonical(node), argument(node, 0, "input", "self")
    if name not in ("getattr", "permute", "t", "transpose") or not isinstance(source, Node):
        return None
    rank = value_of(source).dim()
    places = list(range(rank))
    if name == "permute":
        dims = node.args[1:] if len(node.args) > 2 else argument(node, 1, "dims")
        return source, [d % rank for d in dims]
    one, other = -1, -2
    if name == "transpose":
        one, other = (argument(node, n, f"dim{n - 1}") for n in (1, 2))
    elif rank < 2 or (
        name == "getattr" and node.args[1] not in (("mT", "T") if rank == 2 else ("mT",))
    ):
        return None
    places[one], places[other] = places[other], places[one]
    return source, places


def unspread(node: Node) -> tuple[Node, int] | None:
    """What a node repeats so that each entry of a dim comes several times in a row, and that dim."""
    source, rank = argument(node, 0, "input", "self"), value_of(node).dim()
    if canonical(node) == "repeat_interleave":
        dim, times = argument(node, 2, "dim"), fixed(value_of(argument(node, 1, "repeats")))
        found = isinstance(source, Node) and isinstance(dim, int) and times is not None
        return (source, dim % rank) if found else None
    if (
        canonical(node) != "reshape"
        or not isinstance(source, Node)
        or canonical(source) != "expand"
    ):
        return None
    one, wide = argument(source, 0, "input", "self"), tuple(value_of(source).shape)
    before = one.args[0] if isinstance(one, Node) and transparent(one) else None
    if not isinstance(before, Node) or value_of(before).dim() != rank or len(wide) != rank + 1:
        return None
    shape = tuple(value_of(before).shape)
    for dim in range(rank):
        left, size, right, times = shape[:dim], shape[dim], shape[dim + 1 :], wide[dim + 1]
        if (
            equal_shapes(value_of(one).shape, (*left, size, 1, *right))
            and equal_shapes(wide, (*left, size, times, *right))
            and equal_shapes(value_of(node).shape, (*left, size * times, *right))
        ):
            return before, dim
    return None


def between(start: Node, end: Node) -> frozenset[Node]:
    """The steps of one chain, without its start."""
    steps = set()
    while end is not start:
        steps.add(end)
        (end,) = (n for n in end.all_input_nodes if isinstance(value_of(n), torch.Tensor))
    return frozenset(steps)
