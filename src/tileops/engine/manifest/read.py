"""Reading an entry out of a validated document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.document import Located
from tileops.engine.manifest.entry import (
    MISSING,
    Content,
    Cost,
    Entry,
    Input,
    Output,
    Param,
    ParamType,
    Rule,
    Workload,
    branches_of,
)
from tileops.engine.manifest.expr import DTYPES, Expr, ExpressionError, parse
from tileops.engine.manifest.names import check_names
from tileops.engine.manifest.sharding import read_sharding

__all__ = ["parse_entry"]


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
    autocast, fusion, pattern = node.get("autocast"), node.get("fusion"), node.get("pattern")
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
        pattern=pattern.value if pattern else None,
        node=node,
    )
    check_names(read.fail, node, entry)
    object.__setattr__(entry, "branches", branches_of(entry))
    return entry
