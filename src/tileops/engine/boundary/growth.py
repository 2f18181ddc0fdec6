"""Calls that grow by one each time (a sequence, a batch) and still share a plan.

A class names the dims (``grows``); its kernels read their sizes from the tensors of each call. A guard
then leaves these sizes free, and what is left to check is generated here from the entry: that they
agree among the arguments, the rules about them, and the class's own ``region``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.entry import Entry
from tileops.engine.manifest.expr import DTYPES, Expr
from tileops.engine.signature.runtime import HELPERS
from tileops.engine.signature.source import compile_source

__all__ = ["Growth", "growth_of"]


@dataclass(frozen=True)
class Growth:
    """How the calls of a class grow."""

    names: tuple[str, ...]
    places: tuple[dict[int, str], ...]
    """``places[n]``: the growing axes of argument ``n`` and their names."""
    sizes: Callable[..., Any]
    """``sizes(op, plan, *arguments)``: the sizes along ``names`` where ``plan`` serves them, or None.
    The guard holds all else."""


def growth_of(entry: Entry, names: tuple[str, ...], regions: bool, suffix: str) -> Growth | None:
    """What a class's ``grows`` asks for; ``regions``: the class has a ``region`` of its own.

    Raises ``ManifestError`` where a dim cannot grow: it must be an axis of a required input, and
    stand nowhere but as an axis and in rules without dtypes.
    """
    if not names:
        return None
    places: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    for item in entry.inputs:
        tree = item.shape.tree
        elements = tree.elts if isinstance(tree, ast.List) else [tree]
        for axis, element in enumerate(elements):
            if isinstance(element, ast.Name) and element.id in places:
                places[element.id].append((item.name, axis))
            elif Expr(ast.unparse(element)).names & places.keys():
                _refuse(entry, item.shape)
    for derived in entry.dims.values():
        if derived.names & places.keys():
            _refuse(entry, derived)
    required = {item.name for item in entry.inputs if not item.optional}
    for name, found in places.items():
        if not found or found[0][0] not in required or entry.has_out:
            raise ManifestError(
                entry.where, entry.name, f"'grows' names {name!r}, no axis of a required input"
            )
    by_input = tuple(
        {axis: name for name, found in places.items() for at, axis in found if at == item.name}
        for item in entry.inputs
    )
    source = _source(entry, places, regions)
    filename = f"tileops_generated/{entry.family}/{entry.name}_growth{suffix}.py"
    return Growth(names, by_input, compile_source(source, filename, dict(HELPERS))["sizes"])


def _refuse(entry: Entry, expr: Expr) -> None:
    raise ManifestError(
        entry.where, entry.name, f"'grows' names a dim that {expr.text!r} derives from"
    )


def _source(entry: Entry, places: Mapping[str, list[tuple[str, int]]], regions: bool) -> str:
    arguments = ", ".join(item.name for item in entry.inputs)
    optional = {item.name for item in entry.inputs if item.optional}

    def rename(name: str) -> str:
        if name in places:
            return name
        if name in DTYPES:
            return f"_dt_{name}"
        return f"_op.{name}" if name in entry.shape_params else f"_plan.dims['{name}']"

    lines = [
        f"# Generated from {entry.family}/manifest.yaml, entry {entry.name}: calls that grow.",
        f"def sizes(_op, _plan, {arguments}):",
    ]
    for name, ((first, axis), *others) in places.items():
        lines.append(f"    {name} = {first}.shape[{axis}]")
        for other, place in others:
            present = f"{other} is not None and " if other in optional else ""
            lines.append(f"    if {present}{other}.shape[{place}] != {name}: return None")
    # An inner size decides the strides outside it, which the guard has left free.
    for inner in dict.fromkeys(at for found in places.values() for at, axis in found if axis):
        present = f"{inner} is not None and " if inner in optional else ""
        lines.append(f"    if {present}not {inner}.is_contiguous(): return None")
    for rule in entry.rules:
        if rule.require.names & places.keys():
            if rule.require.names & entry.dtypes.keys():
                _refuse(entry, rule.require)
            text = rule.require.source(rename, lambda name: f"({name} is not None)")
            lines.append(f"    if not ({text}): return None")
    if regions:
        sizes = ", ".join(f"'{name}': {name}" for name in places)
        lines.append(f"    if _op.region({{**_plan.dims, {sizes}}}) != _plan.region: return None")
    lines.append(f"    return ({''.join(f'{name}, ' for name in places)})")
    return "\n".join(lines) + "\n"
