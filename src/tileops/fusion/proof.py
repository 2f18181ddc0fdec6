"""That what looks like an op is the op: dtypes, shapes, memory and gradients of the steps that it would
replace.

Between the inputs and the result the op computes in float32, or wider where its dtype is, and rounds
once. A step in plain PyTorch may round to the result's dtype where that costs no more than the tolerance
table has room for: products may, on the way to the result. What goes into a mean, what is made of one
and sums on the way may not, nor may anything be wider or of a third dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from tileops.engine.pattern import NoMatchError, Pattern, Term
from tileops.fusion.dtypes import JOINS, REDUCTIONS, check_dtypes, check_float32
from tileops.fusion.given import Given, as_in_memory, chain, inputs_of, shape_text
from tileops.fusion.graph import Edit, Modes, canonical, is_pointwise, tensors_of, value_of
from tileops.fusion.masks import Seen
from tileops.fusion.matching import Binding
from tileops.fusion.positions import known
from tileops.fusion.reading import Expr, Made, equal_shapes, fixed, origin, transparent
from tileops.fusion.rewrite import Rewrite

__all__ = ["Facts", "Proof", "permuted", "prove"]


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
    given = inputs_of(meaning, root, b, narrow=bool(pattern.result))
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
        given, layout = as_in_memory(given, value_of(root))
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
    bound |= {node for seen in b.tensors.values() for e in seen for node in chain(e)}
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
            raise NoMatchError(f"{node.name} has shape {shape_text(tuple(value.shape))}")
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
        ends = {*chain(given[name].node), *given[name].steps}
        for expr in seen:
            yield from takewhile(lambda node: node not in ends, chain(expr))  # noqa: B023


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
            behind = list(chain(expr))
            places += [(node, first) for node in behind]
            if expr is not given[name].node:
                places += [(n, node) for node, of in pairwise(behind) for n in (node, of)]
        for node, since in places:
            if written(node, start=max(since, node), end=root):
                raise NoMatchError(f"{name} is written in between")
    for node in sorted(region - {root}):
        if written(node, end=root):
            raise NoMatchError(f"{node.name} is written in between")
