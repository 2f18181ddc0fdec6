"""What stands for the inputs of an op in a match: of which dtype, in which shape and order of dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from tileops.engine.pattern import (
    Bounded,
    Call,
    Half,
    Mask,
    Named,
    NoMatchError,
    Product,
    Sum,
    Tensor,
    Term,
)
from tileops.fusion.dtypes import WIDENED, short
from tileops.fusion.graph import hint_of, value_of
from tileops.fusion.heads import between, swapped, unspread
from tileops.fusion.matching import Binding
from tileops.fusion.reading import Expr, cast_of, equal_shapes, holds, transparent

__all__ = ["Given", "as_in_memory", "chain", "inputs_of", "shape_text"]


@dataclass(frozen=True)
class Given:
    """What stands for an input of the op: a node, and its shape or its order of dims where that must
    change. ``spread``: the same where entries of a dim are repeated. ``steps``: from the node to what was
    found."""

    node: Node
    shape: tuple[Any, ...] | None = None
    layout: tuple[int, ...] = ()
    spread: Node | None = None
    steps: frozenset[Node] = frozenset()


def _holes(term: Term) -> Iterator[Tensor]:
    if isinstance(term, Tensor):
        yield term
    elif isinstance(term, Half):
        yield Tensor(term.tensor.name, "any")
    elif isinstance(term, Named | Bounded):
        yield from _holes(term.term)
    elif isinstance(term, Mask) and term.scores is not None:
        yield from _holes(term.scores)
    elif isinstance(term, Product):
        for part, _ in term.factors:
            yield from _holes(part)
    elif isinstance(term, Sum):
        for part, _ in term.terms:
            yield from _holes(part)
    elif isinstance(term, Call):
        for part in term.arguments:
            yield from _holes(part)


def inputs_of(meaning: Term, root: Node, b: Binding, narrow: bool) -> dict[str, Given]:
    """What stands for each input, by name. ``narrow``: each as it was before it was widened, whatever the
    result's dtype."""
    full, dtype = tuple(value_of(root).shape), value_of(root).dtype
    found: dict[str, Given] = {}
    for hole in _holes(meaning):
        if hole.name in found:
            continue
        seen = b.tensors[hole.name]
        if hole.layout:
            rank = value_of(seen[0]).dim()
            if rank != len(hole.layout):
                raise NoMatchError(f"{hole.name} has {rank} dims, not {len(hole.layout)}")
            found[hole.name] = _arranged(hole, seen[0], dtype)
            continue
        shape = {"all": full, "last": full[len(full) - b.dims :]}.get(hole.over)
        own = _narrowest(seen[0], shape) if narrow else dtype
        own = _wide(seen, own) if hole.wide else own
        found[hole.name] = _as_given(hole.name, seen, own, shape, hole.over == "last")
    return found


def _wide(seen: tuple[Expr, ...], dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result, or the wider one that there is instead."""
    wide = torch.promote_types(dtype, torch.float32)
    there = {value_of(node).dtype for expr in seen for node in chain(expr)}
    return wide if wide in there and dtype not in there else dtype


def _arranged(hole: Tensor, expr: Expr, dtype: torch.dtype) -> Given:
    """What lies in another order: of that dtype, before its dims were swapped and entries repeated."""
    assert isinstance(expr, Node)
    node, layout, steps = expr, hole.layout, frozenset[Node]()
    found: Given | None = None
    while True:
        if value_of(node).dtype is dtype:
            found = Given(node, None, layout, None, steps)
        steps |= {node}
        swap = swapped(node)
        repeated = unspread(node) if found is not None and hole.grouped is not None else None
        if swap is not None:
            node, layout = swap[0], tuple(swap[1][d] for d in layout)
        elif repeated is not None and repeated[1] == layout[hole.grouped or 0]:
            return Given(repeated[0], None, layout, node, steps | between(repeated[0], node))
        elif found is None and (wide := cast_of(node)) is not None:
            node = wide
        elif found is not None:
            return found
        else:
            given = short(value_of(expr).dtype)
            raise NoMatchError(f"{hole.name} is {given} and the result {short(dtype)}")


def _as_given(
    name: str,
    seen: tuple[Expr, ...],
    dtype: torch.dtype,
    shape: tuple[Any, ...] | None,
    aligned: bool,
) -> Given:
    """The node of that dtype and shape among those that are one value; ``aligned``: and that lies along
    the last dims wherever it is met, as a column of it does not."""
    near: Given | None = None
    types = []
    for expr in seen:
        for node in chain(expr):
            value = value_of(node)
            types.append(value.dtype)
            if aligned and not equal_shapes(value.shape[-len(shape or ()) :], shape or ()):
                break
            if value.dtype is not dtype:
                continue
            if shape is None or equal_shapes(value.shape, shape):
                return Given(node)
            lead = value.dim() - len(shape)
            if lead > 0 and equal_shapes(value.shape, (1,) * lead + shape):
                near = Given(node, shape)
    if near is not None:
        return near
    if dtype in types:
        assert shape is not None
        given = tuple(value_of(seen[0]).shape)
        raise NoMatchError(f"{name} has shape {shape_text(given)}, not {shape_text(shape)}")
    raise NoMatchError(f"{name} is {short(types[-1])} and the result {short(dtype)}")


def as_in_memory(
    given: Mapping[str, Given], root: torch.Tensor
) -> tuple[dict[str, Given], tuple[int, ...]]:
    """Inputs with their leading dims in the order that the result has them in memory, and how the result's
    dims lie in what the op makes of these."""
    # Of two dims of one stride, one of size 1 is the inner one.
    sizes = zip(root.shape, root.stride(), strict=True)
    places = [(-hint_of(stride), hint_of(n) == 1) for n, stride in sizes]
    order = (*sorted(range(root.dim() - 1), key=places.__getitem__), root.dim() - 1)
    if order == tuple(range(root.dim())):
        return dict(given), ()
    found = {}
    for name, one in given.items():
        known = one.shape or tuple(value_of(one.node).shape)
        missing = (1,) * (root.dim() - len(known))
        shape = (*missing, *known) if missing else one.shape
        found[name] = replace(one, shape=shape, layout=order)
    return found, tuple(order.index(d) for d in range(root.dim()))


def _narrowest(expr: Expr, shape: tuple[Any, ...] | None) -> torch.dtype:
    """The dtype in which a value of that shape was first."""
    dtype: torch.dtype = value_of(expr).dtype
    for node in chain(expr):
        value = value_of(node)
        if value.dtype in WIDENED and (shape is None or equal_shapes(value.shape, shape)):
            dtype = value.dtype
    return dtype


def chain(expr: Expr) -> Iterator[Node]:
    """A node and what it is of, through dims of size 1 and casts that lose nothing."""
    assert isinstance(expr, Node)
    while True:
        yield expr
        if not transparent(expr):
            return
        source = expr.args[0]
        assert isinstance(source, Node)
        old, new = value_of(source).dtype, value_of(expr).dtype
        if not holds(new, old):
            return
        expr = source


def shape_text(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
