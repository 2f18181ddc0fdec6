"""Along what a call may be spread over ranks, derived from the named dims of its entry.

A *way* says of every tensor of a call how it lies on the ranks of one mesh dim: cut along an axis,
the same everywhere, or a partial sum. It holds for any number of ranks: what each rank computes from
its part with the very same op is its part of the result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tileops.engine.manifest.entry import Branch, Entry
from tileops.engine.manifest.expr import Expr, is_call_of
from tileops.engine.manifest.sharding import ShardingRule
from tileops.engine.signature.runtime import DTYPE_VALUES

__all__ = ["REPLICATE", "SUM", "Place", "Way", "default_word", "ways"]

REPLICATE = "replicate"
SUM = "sum"
Place = int | str
"""How a tensor lies on one mesh dim: the axis that it is cut along, ``REPLICATE`` or ``SUM``."""
Atom = tuple[str, int]
"""A dim, or one axis of a splice: ``("N", 0)``, ``("B", 1)``."""


@dataclass(frozen=True)
class Way:
    """Places by name of the tensor.

    ``of``: the dims that are cut, or the inputs that are partial sums. ``even``: each rank must get as
    much as the others.
    """

    of: frozenset[str]
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    even: bool = False


class _Size(int):
    """A size that remembers which dim it is; what is computed from it does not."""

    atom: Atom


def _sized(name: str, value: Any) -> Any:
    def one(size: int, index: int) -> _Size:
        result = _Size(size)
        result.atom = (name, index)
        return result

    if isinstance(value, int):
        return one(value, 0)
    return tuple(one(size, index) for index, size in enumerate(value))


def ways(op: Any, branch: Branch, inputs: Mapping[str, torch.Tensor | None]) -> list[Way]:
    """Every way of a call of ``op``, of which the first replicates all.

    ``inputs``: by name, tensors of the whole shapes (no data is read).
    """
    call = _Call(op, branch, inputs)
    same = Way(
        frozenset(), dict.fromkeys(call.inputs, REPLICATE), dict.fromkeys(call.outputs, REPLICATE)
    )
    return [same, *call.cuts(), *call.partials()]


def default_word(entry: Entry, name: str) -> str:
    """What a dim may be where ``sharding`` does not say: all dims of a ``pointwise`` op are free, and
    so are the leading dims ``*B`` of a ``reduction``, which has others to reduce; a ``template`` says."""
    if entry.kind == "pointwise":
        return "shard"
    if entry.kind == "reduction" and any(_leads(item.shape.tree, name) for item in entry.inputs):
        return "shard"
    return REPLICATE


def _leads(tree: ast.expr, name: str) -> bool:
    if isinstance(tree, ast.IfExp):
        return _leads(tree.body, name) or _leads(tree.orelse, name)
    first, *rest = getattr(tree, "elts", None) or [None]
    return bool(rest) and isinstance(first, ast.Starred) and ast.unparse(first.value) == name


def _level(name: str) -> int:
    """How often an op's name says that it computes a gradient: ``RMSNormBwdBwdOp`` is of level 2."""
    stem, level = name.removesuffix("Op"), 0
    while stem.endswith("Bwd"):
        stem, level = stem.removesuffix("Bwd"), level + 1
    return level


class _Call:
    """The axes of one call's tensors as atoms, and which atoms belong together."""

    def __init__(self, op: Any, branch: Branch, inputs: Mapping[str, torch.Tensor | None]) -> None:
        self.entry: Entry = op.entry
        self.branch = branch
        given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        self.passed = frozenset(given)
        outputs, dims, _ = type(op)._signature(op, *inputs.values(), None)
        comes_in = any(item.name.startswith("grad_") for item in self.entry.inputs)
        self.level = _level(self.entry.name) if comes_in else 0
        self.env: dict[str, Any] = {**DTYPE_VALUES, **op._params, **dims}
        for item in self.entry.inputs:
            if item.name in given and item.dtype is not None:
                self.env.setdefault(item.dtype.text, given[item.name].dtype)
        tagged = {
            n: _sized(n, v) for n, v in dims.items() if n not in self.entry.dims and v is not None
        }
        self.tagged = {**self.env, **tagged}
        self.linked: dict[Atom, set[Atom]] = {}
        self.blocked: set[str] = set()
        self.inputs = {i.name: self.axes(i.shape) for i in self.entry.inputs if i.name in given}
        self.outputs = {
            output.name: self.axes(output.shape)
            for output, spec in zip(self.entry.outputs, outputs, strict=True)
            if spec is not None
        }
        self.adds = all(spec is None or spec[1] != torch.bool for spec in outputs)
        self.together()

    # -- atoms

    def axes(self, shape: Expr) -> list[Atom | None]:
        tree = shape.tree
        while isinstance(tree, ast.IfExp):
            test = Expr(ast.unparse(tree.test)).evaluate(self.env, self.passed)
            tree = tree.body if test else tree.orelse
        assert isinstance(tree, ast.Tuple | ast.List), shape.text  # as the manifest's reader saw
        sizes: list[Any] = []
        for element in tree.elts:
            inner = element.value if isinstance(element, ast.Starred) else element
            if is_call_of(inner, "bcast"):
                sizes += self.broadcast([self.value(argument) for argument in inner.args])
            else:
                sizes += self.value(ast.Tuple([element], ast.Load()))
                if not isinstance(inner, ast.Name) and not _selects(inner):
                    self.block(Expr(ast.unparse(inner)).names)
        self.block(Expr(ast.unparse(tree)).names & set(self.entry.dims))
        atoms = [getattr(size, "atom", None) for size in sizes]
        for atom in atoms:
            if atom is not None:
                self.linked.setdefault(atom, {atom})
        return atoms

    def value(self, tree: ast.expr) -> Any:
        return Expr(ast.unparse(tree)).evaluate(self.tagged, self.passed)

    def block(self, names: frozenset[str] | set[str]) -> None:
        """A size that is computed from a dim does not follow where the dim is cut."""
        for name in names:
            self.blocked.add(name)
            if name in self.entry.dims:
                self.block(self.entry.dims[name].names - self.blocked)

    def broadcast(self, shapes: list[Any]) -> list[Any]:
        """The broadcast sizes, each with the dim of one that is so large."""
        result = []
        for axis in range(max(map(len, shapes), default=0), 0, -1):
            column = [shape[-axis] for shape in shapes if len(shape) >= axis]
            wide = [size for size in column if size != 1] or column
            atoms = [getattr(size, "atom", None) for size in wide]
            self.link([atom for atom in atoms if atom is not None])
            result.append(wide[0])
        return result

    def link(self, atoms: list[Atom]) -> None:
        joined = set().union(*(self.linked.setdefault(atom, {atom}) for atom in atoms))
        for atom in joined:
            self.linked[atom] = joined

    def together(self) -> None:
        """Dims that an entry lists side by side are cut side by side, as are those that a rule wants to
        broadcast."""
        self.side_by_side: set[str] = set()
        for call in (call for rule in self.entry.rules for call in rule.require.calls_of("bcast")):
            self.broadcast([self.value(argument) for argument in call.args])
        for rule in self.entry.sharding:
            if len(rule.names) > 1 and not set(rule.names) & {i.name for i in self.entry.inputs}:
                self.link([a for a in list(self.linked) if a[0] in rule.names])
                self.side_by_side |= set(rule.names)

    # -- what the entry says

    def word(self, atom: Atom) -> str:
        name, index = atom
        if name in self.blocked:
            return REPLICATE
        rules = [rule for rule in self.entry.sharding if name in rule.names]
        for rule in sorted(rules, key=lambda rule: rule.at is None):
            if rule.at is None or index in self.picked(rule, name):
                return rule.value(self.env, self.passed)
        return default_word(self.entry, name)

    def picked(self, rule: ShardingRule, name: str) -> range | set[int]:
        """The axes of a splice that ``rule`` is about; all where its parameter is None."""
        at, count = self.env[rule.at or ""], len(self.env[name])
        if at is None:
            return range(count)
        return {axis % max(count, 1) for axis in ((at,) if isinstance(at, int) else at)}

    @property
    def ruled(self) -> frozenset[str]:
        """Dims whose sizes rules speak of: a part must obey them as the whole does."""
        names = frozenset(n for rule in self.entry.rules for n in _sizes_in(rule.require.tree))
        for _ in self.entry.dims:
            names |= {n for d in names & set(self.entry.dims) for n in self.entry.dims[d].names}
        return names

    # -- ways

    def cuts(self) -> Iterator[Way]:
        """A way for each set of linked dims that are free: cut wherever they occur."""
        units = {frozenset(unit) for unit in self.linked.values()}
        for unit in sorted(units, key=sorted):
            words = {self.word(atom) for atom in unit}
            inputs, outputs = _places(self.inputs, unit), _places(self.outputs, unit)
            if REPLICATE in words or inputs is None or outputs is None:
                continue
            if all(place == REPLICATE for place in inputs.values()):
                continue
            whole = [name for name, place in outputs.items() if place == REPLICATE]
            results = (
                [inputs[name] for name in self.gradients(1)] if self.level else outputs.values()
            )
            if (REPLICATE in results and SUM not in words) or (whole and not self.adds):
                continue
            if any(inputs[name] == REPLICATE for name in self.branch.writes):
                continue  # ranks would write different values
            names = {name for name, _ in unit}
            # Dims of two names that are cut side by side must be cut at the same places.
            even = bool(names & self.ruled or names & self.side_by_side)
            yield Way(frozenset(names), inputs, {**outputs, **dict.fromkeys(whole, SUM)}, even)

    def gradients(self, level: int) -> list[str]:
        """The gradients that come in: 1 of the results of the first op, 2 of those of its gradient."""
        prefix = "grad_" * level
        return [
            n for n in self.inputs if n.startswith(prefix) and not n.startswith(prefix + "grad_")
        ]

    def partials(self) -> Iterator[Way]:
        """Sums of parts go through where the op is linear: so is every gradient in what comes in."""
        groups = [self.gradients(self.level)] if self.level else [
            [name for name in rule.names if name in self.inputs]
            for rule in self.entry.sharding
            if set(rule.names) <= {i.name for i in self.entry.inputs}
            and rule.value(self.env, self.passed) == SUM
        ]  # fmt: skip
        for group in groups:
            if group and self.adds and set(self.branch.writes) <= set(group):
                inputs = {name: SUM if name in group else REPLICATE for name in self.inputs}
                yield Way(frozenset(group), inputs, dict.fromkeys(self.outputs, SUM))


def _selects(tree: ast.AST) -> bool:
    """Whether an expression keeps sizes of a splice as they are, or drops them."""
    return (
        isinstance(tree, ast.Call)
        and ast.unparse(tree.func) in ("reduced", "along")
        and isinstance(tree.args[0], ast.Name)
    )


def _sizes_in(tree: ast.AST) -> set[str]:
    """The names in an expression but for those of which it asks the number of axes alone."""
    if isinstance(tree, ast.Name):
        return {tree.id}
    if isinstance(tree, ast.Call) and ast.unparse(tree.func) == "len":
        return set()
    return {name for child in ast.iter_child_nodes(tree) for name in _sizes_in(child)}


def _places(
    tensors: Mapping[str, list[Atom | None]], unit: frozenset[Atom]
) -> dict[str, Place] | None:
    """The one axis of each tensor that ``unit`` cuts; None where it would cut two of one."""
    places: dict[str, Place] = {}
    for name, axes in tensors.items():
        found = [axis for axis, atom in enumerate(axes) if atom in unit]
        if len(found) > 1:
            return None
        places[name] = found[0] if found else REPLICATE
    return places
