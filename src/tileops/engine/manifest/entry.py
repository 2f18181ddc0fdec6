"""One manifest entry as immutable data, parsed from a validated document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.branches import Branch, branches_of
from tileops.engine.manifest.document import Located
from tileops.engine.manifest.expr import DTYPES, Expr, ExpressionError, parse
from tileops.engine.manifest.names import check_names
from tileops.engine.manifest.sharding import ShardingRule, read_sharding

__all__ = [
    "MISSING", "Branch", "Content", "Cost", "Entry", "Input", "Output", "Param", "ParamType",
    "Rule", "Workload", "branches_of", "has_gradient", "parse_entry",
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


class _Reader:
    """Turns the located fields of one entry into data; every fault names file and line."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def fail(self, node: Located, problem: str) -> NoReturn:
        raise ManifestError(f"{self.path}:{node.line}", self.name, problem)

    def expr(self, node: Located | None) -> Expr | None:
        if node is None:
            return None
        try:
            return parse(node.value)
        except ExpressionError as error:
            self.fail(node, str(error))

    def need_expr(self, node: Located) -> Expr:
        result = self.expr(node)
        assert result is not None
        return result

    def condition(self, node: Located | None) -> tuple[bool, Expr | None]:
        """false / true / a condition, as (is it there at all, the condition)."""
        if node is None or node.value is False:
            return False, None
        return True, self.need_expr(node)

    def fields(self, node: Located | None) -> Iterator[tuple[str, Located]]:
        for name, child in (node.value if node else {}).items():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
                self.fail(child, f"'{name}' is not a valid name")
            yield name, child

    def param(self, name: str, node: Located) -> Param:
        text = node.value["type"]
        default = node.get("default")
        value = MISSING if default is None else default.plain()
        if isinstance(value, list):
            value = tuple(value)
        kw_only = node.get("kw_only")
        kind = _param_type(text.value)
        if kind is None:
            self.fail(text, f"params.{name}: type {text.value!r} is not in the language")
        return Param(name, kind, value, bool(kw_only and kw_only.value), node.line)

    def input(self, name: str, node: Located) -> Input:
        dtype = node.value["dtype"]
        fixed: tuple[str, ...] = ()
        expression = None
        if isinstance(dtype.value, list):
            fixed = tuple(item.value for item in dtype.value)
        elif dtype.value in DTYPES:
            fixed = (dtype.value,)
        else:
            expression = self.need_expr(dtype)
        self.known_dtypes(dtype, fixed)
        optional, passed_when = self.condition(node.get("optional"))
        if passed_when is not None and passed_when.text == "True":
            passed_when = None
        _, mutated = self.condition(node.get("mutated"))
        content = node.get("content")
        holds = None
        if content is not None:
            holds = Content(self.expr(content.get("min")), self.expr(content.get("max")))

        def flag(field_name: str) -> bool:
            child = node.get(field_name)
            return bool(child and child.value)

        return Input(
            name, expression, fixed, self.need_expr(node.value["shape"]), optional, passed_when,
            mutated, flag("contiguous"), flag("kw_only"), flag("device"),
            holds, node.line, _differentiable(node),
        )  # fmt: skip

    def output(self, name: str, node: Located) -> Output:
        is_input = node.get("is_input")
        return Output(
            name,
            self.need_expr(node.value["dtype"]),
            self.need_expr(node.value["shape"]),
            self.condition(node.get("nullable"))[1],
            node.get("buffer") is not None,
            is_input.value if is_input else None,
            node.line,
            _differentiable(node),
        )

    def known_dtypes(self, node: Located, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in DTYPES:
                self.fail(node, f"unknown dtype {name!r}; accepted: {', '.join(DTYPES)}")

    def workload(self, node: Located) -> Workload:
        def plain(name: str) -> Any:
            child = node.get(name)
            return child.plain() if child else {}

        return Workload(
            node.value["label"].value,
            {k: tuple(v) if isinstance(v, list) else v for k, v in plain("dims").items()},
            {k: tuple(v) if isinstance(v, list) else v for k, v in plain("params").items()},
            frozenset(plain("passed")),
            plain("dtypes"),
            node.line,
        )


def has_gradient(dtype: str) -> bool:
    """Whether tensors of a dtype can be differentiated."""
    return "float" in dtype or "complex" in dtype


def _differentiable(node: Located) -> bool:
    child = node.get("differentiable")
    return child is None or bool(child.value)


_ALTERNATIVE = re.compile(r"([A-Za-z][A-Za-z0-9_]*)(?:\[(\d+)\]|\(([^)]*)\))?")
_SIMPLE = {"int", "float", "bool", "str", "ints", "floats", "axes", "number", "device", "object"}


def _param_type(text: str) -> ParamType | None:
    body = text.replace(" ", "")
    nullable = body.endswith("?")
    alternatives: list[tuple[str, tuple[str, ...]]] = []
    for part in body.removesuffix("?").split("|"):
        match = _ALTERNATIVE.fullmatch(part)
        if match is None:
            return None
        word, length, arguments = match.groups()
        values = tuple(arguments.split(",")) if arguments else ()
        if length is not None:
            if word != "int":
                return None
            alternatives.append(("tuple", (length,)))
        elif word in ("enum", "dtype"):
            if word == "enum" and not values:
                return None
            if word == "dtype" and any(value not in DTYPES for value in values):
                return None
            alternatives.append((word, values))
        elif arguments is not None:
            return None
        elif word in _SIMPLE:
            alternatives.append((word, ()))
        elif word[0].isupper():
            alternatives.append(("literal", (word,)))
        else:
            return None
    return ParamType(text, tuple(alternatives), nullable)


def parse_entry(name: str, node: Located, path: Path, family: str) -> Entry:
    """The entry of one op class. Raises ``ManifestError``."""
    read = _Reader(path, name)
    signature = node.value["signature"]
    dtypes: dict[str, tuple[str, ...]] = {}
    for variable, child in read.fields(signature.get("dtypes")):
        dtypes[variable] = tuple(item.value for item in child.value)
        read.known_dtypes(child, dtypes[variable])
    rules = signature.get("rules")
    cost = node.value["cost"]
    composition = node.get("composition")
    backward = node.get("backward")
    autocast, fusion = node.get("autocast"), node.get("fusion")
    entry = Entry(
        name=name,
        family=family,
        path=path,
        line=node.line,
        status=node.value["status"].value,
        reference=node.value["reference"].value,
        kind=node.value["kind"].value,
        dtypes=dtypes,
        dims={key: read.need_expr(child) for key, child in read.fields(signature.get("dims"))},
        params=tuple(read.param(key, child) for key, child in read.fields(signature.get("params"))),
        inputs=tuple(read.input(key, child) for key, child in read.fields(signature.get("inputs"))),
        outputs=tuple(
            read.output(key, child) for key, child in read.fields(signature.get("outputs"))
        ),
        rules=tuple(
            Rule(
                read.need_expr(child.value["require"]),
                child.value["message"].value,
                child.value["argument"].value if child.get("argument") else None,
                child.line,
            )
            for child in (rules.value if rules else ())
        ),
        composition=composition.plain() if composition else {},
        backward=backward.value if backward else None,
        sharding=read_sharding(read.fail, node.get("sharding")),
        workloads=tuple(read.workload(child) for child in node.value["workloads"].value),
        cost=Cost(
            read.need_expr(cost.value["flops"]),
            read.expr(cost.get("read_bytes")),
            read.expr(cost.get("write_bytes")),
        ),
        autocast=autocast.value if autocast else None,
        fusion=fusion.value if fusion else "auto",
        node=node,
    )
    check_names(read.fail, node, entry)
    object.__setattr__(entry, "branches", branches_of(entry))
    return entry
