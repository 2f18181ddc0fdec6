"""The side-effect branches of an entry: one operator each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tileops.engine.manifest.expr import Expr

if TYPE_CHECKING:
    from tileops.engine.manifest.entry import Entry

__all__ = ["Branch", "branches_of"]


@dataclass(frozen=True)
class Branch:
    """One side-effect branch: which inputs are written, whether ``out`` is given, which outputs
    do not exist. Its ``suffix`` names its operator."""

    writes: tuple[str, ...] = ()
    out: bool = False
    without: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """``_writes_<input>``, ``_out``, ``_without_<output>``, in this order."""
        return (
            "".join(f"_writes_{name}" for name in self.writes)
            + ("_out" if self.out else "")
            + "".join(f"_without_{name}" for name in self.without)
        )


def branches_of(entry: Entry) -> tuple[Branch, ...]:
    """All side-effect branches some construction and call can take, the plainest first."""
    conditions = [item.mutated for item in entry.inputs if item.mutated is not None]
    conditions += [output.nullable for output in entry.outputs if output.nullable is not None]
    found: dict[Branch, None] = {}
    for parts in itertools.product(*map(_outcomes, _connected(conditions))):
        true = {expr.text for part in parts for expr in part}

        def holds(expr: Expr | None, true: set[str] = true) -> bool:
            return expr is not None and expr.text in true

        writes = tuple(i.name for i in entry.inputs if holds(i.mutated))
        absent = tuple(o.name for o in entry.outputs if holds(o.nullable))
        if not writes and absent and len(absent) == len(entry.outputs):
            continue  # no effect at all: no operator, and the entry's rules must refuse the call
        for out in (False, True) if entry.has_out else (False,):
            found[Branch(writes, out, absent)] = None
    return tuple(sorted(found, key=lambda b: (len(b.suffix), b.suffix)))


def _atoms(conditions: list[Expr]) -> set[str]:
    return {atom.text for expr in conditions for atom in expr.atoms()} - {"True", "False"}


def _connected(conditions: list[Expr]) -> list[list[Expr]]:
    """The conditions in groups that share no atom, so that each group is settled for itself."""
    groups: list[list[Expr]] = []
    for expr in conditions:
        near = [group for group in groups if _atoms(group) & _atoms([expr])]
        groups = [group for group in groups if group not in near]
        groups.append([*itertools.chain.from_iterable(near), expr])
    return groups


def _outcomes(conditions: list[Expr]) -> list[tuple[Expr, ...]]:
    """Which of the conditions can be true together."""
    atoms = sorted(_atoms(conditions))
    found: dict[tuple[Expr, ...], None] = {}
    for values in itertools.product((False, True), repeat=len(atoms)):
        truth = dict(zip(atoms, values, strict=True))
        found[tuple(expr for expr in conditions if _truth(expr, truth))] = None
    return list(found)


def _truth(expr: Expr, truth: Mapping[str, bool]) -> bool:
    import ast

    def walk(node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            combine = any if isinstance(node.op, ast.Or) else all
            return combine(walk(value) for value in node.values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not walk(node.operand)
        if isinstance(node, ast.Constant):
            return bool(node.value)
        return truth[ast.unparse(node)]

    return walk(expr.tree)
