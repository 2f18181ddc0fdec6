"""One manifest entry as immutable data; ``read`` makes it of a document."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tileops.engine.manifest.document import Located
from tileops.engine.manifest.expr import DTYPES, Expr
from tileops.engine.manifest.sharding import ShardingRule

__all__ = [
    "MISSING", "Branch", "Content", "Cost", "Entry", "Input", "Output", "Param", "ParamType",
    "Rule", "Workload", "branches_of", "has_gradient",
]  # fmt: skip


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


@dataclass(frozen=True)
class ParamType:
    """A parameter's type: alternatives such as ``int``, ``enum(a,b)``, ``dtype(float16)``,
    ``ints``, ``int[2]`` or the name of a literal class; ``nullable`` for a trailing ``?``."""

    text: str
    alternatives: tuple[tuple[str, tuple[str, ...]], ...]
    nullable: bool


@dataclass(frozen=True)
class Param:
    """A constructor parameter; ``default`` is ``MISSING`` where required."""

    name: str
    type: ParamType
    default: Any
    kw_only: bool
    line: int


@dataclass(frozen=True)
class Content:
    """What an integer input must hold (inclusive), checked only on request."""

    min: Expr | None
    max: Expr | None


@dataclass(frozen=True)
class Input:
    """A call argument. ``dtypes``: a fixed set, or () with ``dtype`` an expression or variable."""

    name: str
    dtype: Expr | None
    dtypes: tuple[str, ...]
    shape: Expr
    optional: bool
    passed_when: Expr | None
    mutated: Expr | None
    contiguous: bool
    kw_only: bool
    host: bool
    content: Content | None
    line: int
    differentiable: bool = True
    """Whether the entry lets a gradient flow to it; see ``Entry.differentiable_inputs``."""


@dataclass(frozen=True)
class Output:
    """A returned tensor, None under ``nullable``; a ``buffer`` may be handed in as ``out``."""

    name: str
    dtype: Expr
    shape: Expr
    nullable: Expr | None
    buffer: bool
    is_input: str | None
    line: int
    differentiable: bool = True


@dataclass(frozen=True)
class Rule:
    """A condition on params, dims, dtypes and presence, with its message."""

    require: Expr
    message: str
    argument: str | None
    line: int


@dataclass(frozen=True)
class Workload:
    """One benchmark row: sizes, params, optional inputs passed, dtype of each variable."""

    label: str
    dims: Mapping[str, Any]
    params: Mapping[str, Any]
    passed: frozenset[str]
    dtypes: Mapping[str, str]
    line: int


@dataclass(frozen=True)
class Cost:
    """Expressions over dims and params; bytes default to what the signature implies."""

    flops: Expr
    read_bytes: Expr | None
    write_bytes: Expr | None


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


@dataclass(frozen=True)
class Entry:
    """The one declaration of an op class."""

    name: str
    family: str
    path: Path
    line: int
    status: str
    reference: str
    kind: str
    dtypes: Mapping[str, tuple[str, ...]]
    dims: Mapping[str, Expr]
    params: tuple[Param, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    rules: tuple[Rule, ...]
    composition: Mapping[str, str]
    backward: str | None
    sharding: tuple[ShardingRule, ...]
    workloads: tuple[Workload, ...]
    cost: Cost
    autocast: str | None = None
    """What ``torch.autocast`` does, where it is not what follows from the rest."""
    fusion: str = "auto"
    """Whether the ``tileops`` backend inlines the op: ``never``, ``always``, or by its cost."""
    pattern: str | None = None
    """The name in the family's ``patterns`` of what the ``tileops`` backend may replace by the op."""
    branches: tuple[Branch, ...] = field(default=(), compare=False)
    node: Located | None = field(default=None, compare=False, repr=False)
    """The entry as written, for the lines of its fields."""

    def line_of(self, *path: str | int) -> int:
        """The line of a field, such as ``("workloads", 0, "dims", "B")``; of the innermost field
        around it that is written."""
        return self.line if self.node is None else self.node.find(*path).line

    @property
    def where(self) -> str:
        """``file:line``."""
        return f"{self.path}:{self.line}"

    @property
    def has_boundary(self) -> bool:
        """Call-time tensor inputs and no composition."""
        return bool(self.inputs) and not self.composition

    @property
    def has_out(self) -> bool:
        """The call takes ``out=``."""
        return any(output.buffer for output in self.outputs)

    def input(self, name: str) -> Input:
        """The input of that name."""
        return next(item for item in self.inputs if item.name == name)

    def may_be_complex(self, item: Input) -> bool:
        """Whether an input may have a complex dtype."""
        variables = () if item.dtype is None else item.dtype.names
        names = [*item.dtypes, *variables, *(d for v in variables for d in self.dtypes.get(v, ()))]
        return any(name.startswith("complex") for name in names)

    @property
    def differentiable_inputs(self) -> tuple[Input, ...]:
        """Inputs that a gradient may flow to: declared so, not of integers, not always written."""
        return tuple(
            item
            for item in self.inputs
            if item.differentiable
            and (item.mutated is None or item.mutated.text != "True")
            and self._has_gradient(item.dtypes or item.dtype)
        )

    @property
    def differentiable_outputs(self) -> tuple[Output, ...]:
        """Outputs that a gradient may come from."""
        return tuple(
            output
            for output in self.outputs
            if output.differentiable and self._has_gradient(output.dtype)
        )

    def _has_gradient(self, dtype: tuple[str, ...] | Expr | None) -> bool:
        if isinstance(dtype, tuple):  # of several no expression could say which the gradient has
            return len(dtype) == 1 and has_gradient(dtype[0])
        assert dtype is not None
        found: set[str] = set()
        for name in dtype.names:
            found |= {name} if name in DTYPES else set(self.dtypes.get(name, ()))
        for param in self.params:
            for kind, names in param.type.alternatives if param.name in dtype.names else ():
                found |= set(names or DTYPES) if kind == "dtype" else set()
        return any(map(has_gradient, found))

    @property
    def positional_inputs(self) -> tuple[Input, ...]:
        """Inputs that are passed by position."""
        return tuple(item for item in self.inputs if not item.kw_only)

    @property
    def shape_params(self) -> frozenset[str]:
        """Names that are params (known before a call)."""
        return frozenset(param.name for param in self.params)


def has_gradient(dtype: str) -> bool:
    """Whether tensors of a dtype can be differentiated."""
    return "float" in dtype or "complex" in dtype


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
