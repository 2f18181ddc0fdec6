"""That what looks like an op is the op: dtypes, shapes, memory and gradients of the steps that it would
replace.

Between the inputs and the result the op computes in float32, or wider where its dtype is, and rounds
once. A step in plain PyTorch may round to the result's dtype where that costs no more than the tolerance
table has room for: products may, on the way to the result. What goes into a mean, what is made of one
and sums on the way may not, nor may anything be wider or of a third dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from tileops.engine.pattern import (
    Bounded,
    Call,
    Half,
    Mask,
    Named,
    NoMatchError,
    Pattern,
    Product,
    Sum,
    Tensor,
    Term,
)
from tileops.fusion.dtypes import (
    JOINS,
    REDUCTIONS,
    WIDENED,
    check_dtypes,
    check_float32,
    short,
)
from tileops.fusion.graph import (
    Edit,
    Modes,
    canonical,
    hint_of,
    is_pointwise,
    tensors_of,
    value_of,
)
from tileops.fusion.heads import between, swapped, unspread
from tileops.fusion.masks import Seen
from tileops.fusion.matching import Binding
from tileops.fusion.positions import known
from tileops.fusion.reading import (
    Expr,
    Made,
    cast_of,
    equal_shapes,
    fixed,
    holds,
    origin,
    transparent,
)
from tileops.fusion.rewrite import Rewrite

__all__ = ["Facts", "Given", "Proof", "permuted", "prove"]


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


@dataclass
class Proof:
    """A match that is the op."""

    root: Node
    region: set[Node]
    """The steps that the op takes, the root among them."""
    inputs: Mapping[str, Given]
    facts: Facts
    params: Mapping[str, Any]
    outputs: Mapping[Node, str]
    """What the op's results stand for, by their names; '' is the first."""
    layout: tuple[int, ...]
    """How the root's dims lie in the op's first output."""
    anchor: Node
    """Before which the op is called."""
    shared: Node | None
    """A step that something else uses too, and that would have to be computed for it."""

    @property
    def device(self) -> torch.device:
        device: torch.device = value_of(self.root).device
        return device

    def as_input(self, edit: Edit, name: str | None) -> Node | None:
        """The node that is passed for an input."""
        if name is None:
            return None
        given = self.inputs[name]
        node = given.node
        if given.shape is not None:
            node = edit.call(torch.reshape, node, given.shape)
        return permuted(edit, node, given.layout) if given.layout else node


def permuted(edit: Edit, node: Node, order: tuple[int, ...]) -> Node:
    """A node with its dims in another order."""
    return node if order == tuple(range(len(order))) else edit.call(torch.permute, node, order)


@dataclass(frozen=True)
class Facts:
    """What a pattern's ``params`` may ask."""

    numbers: Mapping[str, Any]
    dims: int
    given: Mapping[str, Given]
    masks: Mapping[str, Seen]

    def shape(self, name: str) -> tuple[Any, ...]:
        given = self.given[name]
        shape = given.shape or tuple(value_of(given.node).shape)
        return tuple(shape[d] for d in given.layout) if given.layout else shape

    def equal(self, one: Any, other: Any) -> bool:
        return equal_shapes((one,), (other,))

    def at_most(self, one: Any, other: Any) -> bool:
        return known(one <= other)

    def mask(self, name: str) -> tuple[Any, Any]:
        seen = self.masks[name]
        return seen.first, seen.last


def prove(
    rewrite: Rewrite,
    pattern: Pattern,
    meaning: Term,
    root: Node,
    b: Binding,
    beside: Mapping[Node, str],
) -> Proof:
    """The proof that ``root``, read as ``meaning``, is the op, and ``beside`` its further outputs. Raises
    ``NoMatchError``."""
    if pattern.absent:
        raise NoMatchError(pattern.absent)
    if rewrite.autocast:
        raise NoMatchError("it is called under torch.autocast")
    given = _given(meaning, root, b, narrow=bool(pattern.result))
    region = _region([root, *beside], b)
    region |= {step for one in given.values() for step in one.steps}
    for node in (*sorted(region), *(e for seen in b.tensors.values() for e in seen)):
        for value in tensors_of(value_of(node)):
            if not isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(
                value
            ):
                raise NoMatchError(f"{node} is no plain tensor")  # fmt: skip
    named = [origin_node(b.named[name]) for name in b.named]
    if not pattern.layout:
        _check_shapes(root, region, b)
    if pattern.result:
        check_float32(region - {root})
    else:
        check_dtypes(root, region, b, set(named))
    _check_gradients(rewrite.modes, region | set(_skipped(given, b)))
    layout = pattern.layout
    if pattern.leading:
        given, layout = _as_in_memory(given, value_of(root))
    used = {n: name for n, name in beside.items() if any(user not in region for user in n.users)}
    outputs = {root: "", **_steps_used(pattern, region, b), **used}
    anchor = min(outputs)
    _check_memory(rewrite, region, root, given, b)
    for name, one in given.items():
        if not one.node < anchor:
            raise NoMatchError(f"{name} is computed after {anchor.name}, which the op returns")
    facts = Facts(b.numbers, b.dims, given, b.masks)
    params = {name: _settled(name, value) for name, value in pattern.params(facts).items()}
    shared = _shared(region, outputs)
    return Proof(root, region, given, facts, params, outputs, layout, anchor, shared)


def _steps_used(pattern: Pattern, region: set[Node], b: Binding) -> dict[Node, str]:
    """The steps that further outputs stand for."""
    steps = {origin_node(b.named[name]): name for name in pattern.outputs}
    for node in steps:
        if all(user in region for user in node.users):
            raise NoMatchError(f"{node.name} is not used beyond it")
    return steps


def _settled(name: str, value: Any) -> Any:
    """A param without symbols. Raises ``NoMatchError``."""
    if isinstance(value, tuple):
        return tuple(_settled(name, v) for v in value)
    if not isinstance(value, torch.SymInt):
        return value
    size = fixed(value)
    if size is None:
        raise NoMatchError(f"{name} is not fixed: {value}")
    return size


def origin_node(expr: Expr) -> Node:
    """A named step is a node: those inside torch's functions have no names."""
    found = origin(expr)
    if isinstance(found, Made):
        raise NoMatchError(f"a step of {found.name} has no node of its own")
    return found


def _region(ends: list[Node], b: Binding) -> set[Node]:
    """All steps from what the holes and masks stand for to the ends."""
    bound = {mask for seen in b.masks.values() for mask in seen.masks}
    bound |= {node for seen in b.tensors.values() for e in seen for node in _chain(e)}
    region: set[Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in region or node in bound:
            continue
        if not tensors_of(value_of(node)):
            continue  # a size
        if canonical(node) is None:
            raise NoMatchError(f"{node.name} is part of it and not of the op")
        region.add(node)
        waiting += node.all_input_nodes
    return region


def _shared(region: set[Node], outputs: Mapping[Node, str]) -> Node | None:
    """A step used outside that is more than a cast or a view."""
    return next(
        (
            node
            for node in sorted(region)
            if node not in outputs
            and (is_pointwise(node) or canonical(node) in (*REDUCTIONS, "matmul", "softmax"))
            and canonical(node) != "to"
            and any(user not in region for user in node.users)
        ),
        None,
    )


# ---- inputs --------------------------------------------------------------------------------------


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


def _given(meaning: Term, root: Node, b: Binding, narrow: bool) -> dict[str, Given]:
    """``narrow``: each as it was before it was widened, whatever the result's dtype."""
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
    there = {value_of(node).dtype for expr in seen for node in _chain(expr)}
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
        for node in _chain(expr):
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
        raise NoMatchError(f"{name} has shape {_show(given)}, not {_show(shape)}")
    raise NoMatchError(f"{name} is {short(types[-1])} and the result {short(dtype)}")


def _as_in_memory(
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
    for node in _chain(expr):
        value = value_of(node)
        if value.dtype in WIDENED and (shape is None or equal_shapes(value.shape, shape)):
            dtype = value.dtype
    return dtype


def _chain(expr: Expr) -> Iterator[Node]:
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


def _show(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# ---- steps ---------------------------------------------------------------------------------------


def _check_shapes(root: Node, region: set[Node], b: Binding) -> None:
    """Every step has the result's shape, or that of a mean; and broadcasts as such."""
    full = tuple(value_of(root).shape)
    kept = full[: len(full) - b.dims] + (1,) * b.dims
    dropped = full[: len(full) - b.dims]
    on_parts = _joined(region)
    core = region | {e for name, seen in b.tensors.items() for e in seen if _is_core(e, full)}
    for node in sorted(region):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or node in on_parts:
            continue
        pointwise = is_pointwise(node) and canonical(node) != "to"
        if not pointwise and (not transparent(node) or canonical(node) == "to"):
            continue
        accepted = (full, kept, dropped) if pointwise else (full, kept)
        if not any(equal_shapes(value.shape, shape) for shape in accepted):
            raise NoMatchError(f"{node.name} has shape {_show(tuple(value.shape))}")
        broadcasts = pointwise or canonical(node) in ("expand", "expand_as")
        for source in node.all_input_nodes if broadcasts else ():
            other = value_of(source)
            if source not in core or not isinstance(other, torch.Tensor):
                continue
            if other.dim() not in (0, value.dim()):
                raise NoMatchError(f"{source.name} meets other dims in {node.name}")


def _joined(region: set[Node]) -> set[Node]:
    """The steps of which parts of a result come that are then joined."""
    waiting = [s for n in region if canonical(n) in JOINS for s in n.all_input_nodes]
    found: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in region and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_core(expr: Expr, full: tuple[Any, ...]) -> bool:
    return isinstance(expr, Node) and equal_shapes(value_of(expr).shape, full)


def _skipped(given: Mapping[str, Given], b: Binding) -> Iterator[Node]:
    """The casts and views between what is passed and the first step."""
    for name, seen in b.tensors.items():
        ends = {*_chain(given[name].node), *given[name].steps}
        for expr in seen:
            yield from takewhile(lambda node: node not in ends, _chain(expr))  # noqa: B023


def _check_gradients(modes: Modes, region: set[Node]) -> None:
    """A gradient flows through all of it or none."""
    if not modes.one(region):
        raise NoMatchError("part of it is under torch.no_grad")
    for node in sorted(region):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            continue
        asked = any(t.requires_grad for n in node.all_input_nodes for t in tensors_of(value_of(n)))
        if asked != value.requires_grad:
            other = [n for n in region if value_of(n) is not value and n is not node]
            if any(t.requires_grad for n in other for t in tensors_of(value_of(n))):
                raise NoMatchError(f"{node.name} stops the gradient")


def _check_memory(
    rewrite: Rewrite, region: set[Node], root: Node, given: Mapping[str, Given], b: Binding
) -> None:
    """Nothing that the op reads, or that it replaces, is written before the last step; nor, where the op
    reads what a cast or view is of, between that and the last step."""
    first, written = min(region), rewrite.memory.written
    for name, seen in b.tensors.items():
        places = [(given[name].node, first)]
        for expr in seen:
            chain = list(_chain(expr))
            places += [(node, first) for node in chain]
            if expr is not given[name].node:
                places += [(n, node) for node, of in pairwise(chain) for n in (node, of)]
        for node, since in places:
            if written(node, start=max(since, node), end=root):
                raise NoMatchError(f"{name} is written in between")
    for node in sorted(region - {root}):
        if written(node, end=root):
            raise NoMatchError(f"{node.name} is written in between")
