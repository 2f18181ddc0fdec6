"""Expressions of the manifest: a closed subset of Python's, parsed with ``ast``, never executed
as given. One parsed expression can be evaluated here (validator, costs, workloads) or turned into
source for a generated check; both work on ints and SymInts alike.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

__all__ = ["DTYPES", "FUNCTIONS", "Expr", "ExpressionError", "broadcast", "is_call_of", "parse"]

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64",
    "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
"""Dtype names an entry may use; in an expression they are constants."""


MAX_LENGTH = 1000
"""Longest expression, in characters. Longer ones are no longer read aloud."""
MAX_DEPTH = 40
"""Deepest nesting; keeps every walk over a tree far from Python's recursion limit."""


class ExpressionError(ValueError):
    """An expression outside the language; the message quotes it."""


def prod(values: Any) -> Any:
    """Product of a splice (1 for the empty one)."""
    result = 1
    for value in values:
        result = result * value
    return result


def ceil_div(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, for non-negative integers."""
    return (a + b - 1) // b


def broadcast(*shapes: Any) -> tuple[Any, ...]:
    """The shape to which ``shapes`` broadcast; raises ``ValueError`` where they do not."""
    rank = max((len(shape) for shape in shapes), default=0)
    out: list[Any] = []
    for axis in range(-rank, 0):
        size: Any = 1
        for shape in shapes:
            if -axis > len(shape):
                continue
            here = shape[axis]
            if isinstance(here, int) and here == 1:
                continue
            if isinstance(size, int) and size == 1:
                size = here
            elif isinstance(here, int) or isinstance(size, int) or here is not size:
                if size != here:
                    if here == 1:
                        continue
                    raise ValueError(f"shapes {[tuple(s) for s in shapes]} do not broadcast")
                if isinstance(here, int):
                    size = here
        out.append(size)
    return tuple(out)


def _axes(dim: Any, rank: int) -> tuple[int, ...]:
    """``dim`` (None: every axis) as ascending, non-negative axes. A scalar has one, of no size."""
    if dim is None:
        return tuple(range(rank))
    return tuple(
        sorted(axis % max(rank, 1) for axis in (dim if isinstance(dim, tuple) else (dim,)))
    )


def is_axes(dim: Any, rank: int) -> bool:
    """Whether ``dim`` names axes of a tensor of that rank, each once; a scalar takes 0 and -1."""
    given = () if dim is None else dim if isinstance(dim, tuple) else (dim,)
    if not all(-max(rank, 1) <= axis < max(rank, 1) for axis in given):
        return False
    return len(set(_axes(given, rank))) == len(given)


def along(shape: Any, dim: Any) -> tuple[Any, ...]:
    """The sizes of the axes ``dim`` of ``shape``."""
    return tuple(shape[axis] for axis in _axes(dim, len(shape)) if axis < len(shape))


def reduced(shape: Any, dim: Any, keepdim: bool) -> tuple[Any, ...]:
    """``shape`` without the axes ``dim``, which stay as 1 with ``keepdim``."""
    gone = _axes(dim, len(shape))
    if keepdim:
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "min": min,
    "max": max,
    "abs": abs,
    "prod": prod,
    "ceil_div": ceil_div,
    "bcast": broadcast,
    "is_axes": is_axes,
    "along": along,
    "reduced": reduced,
    "isfinite": math.isfinite,
    "float": float,
    "is_int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "type_name": lambda value: type(value).__name__,
}
"""Functions an expression may call, besides ``passed(<input>)``."""

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_NODES = (
    ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List, ast.Starred, ast.BinOp,
    ast.UnaryOp, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.IfExp, ast.Attribute, ast.Call,
    ast.Subscript, *_BINARY, *_COMPARE, *_UNARY,
)  # fmt: skip


def _reject(text: str, node: ast.AST, why: str) -> ExpressionError:
    part = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
    return ExpressionError(f"expression {text!r} is outside the language: {part!r} {why}")


def _depth(tree: ast.AST) -> int:
    level, nodes = 0, [tree]
    while nodes and level <= MAX_DEPTH:
        level, nodes = level + 1, [c for node in nodes for c in ast.iter_child_nodes(node)]
    return level


def _validate(text: str, tree: ast.AST) -> None:
    if _depth(tree) > MAX_DEPTH:
        raise ExpressionError(f"expression {text!r} is nested too deeply (at most {MAX_DEPTH})")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise _reject(text, node, f"({type(node).__name__}) is not allowed")
        if isinstance(node, ast.Constant) and not isinstance(
            node.value, int | float | str | type(None)
        ):
            raise _reject(text, node, "is not an int, float, string, True, False or None")
        if isinstance(node, ast.Attribute) and (
            not isinstance(node.value, ast.Name) or node.attr.startswith("_")
        ):
            raise _reject(text, node, "must be <parameter>.<public field>")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            _validate_power(text, node)
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise _reject(text, node, "begins with an underscore")
        if isinstance(node, ast.Call):
            _validate_call(text, node)


def _validate_power(text: str, node: ast.BinOp) -> None:
    power = node.right
    if not (isinstance(power, ast.Constant) and power.value in range(129)):
        raise _reject(text, node, "must have a constant exponent from 0 to 128")


def _validate_call(text: str, node: ast.Call) -> None:
    if not isinstance(node.func, ast.Name) or node.keywords:
        raise _reject(text, node, "must call a named function with positional arguments")
    if node.func.id == "passed":
        if len(node.args) != 1 or not isinstance(node.args[0], ast.Name):
            raise _reject(text, node, "must name one input: passed(<input>)")
    elif node.func.id not in FUNCTIONS:
        known = ", ".join(sorted([*FUNCTIONS, "passed"]))
        raise _reject(text, node, f"calls an unknown function; known: {known}")


@dataclass(frozen=True)
class Expr:
    """One parsed expression."""

    text: str

    @cached_property
    def tree(self) -> ast.expr:
        """The validated syntax tree."""
        if len(self.text) > MAX_LENGTH:
            raise ExpressionError(
                f"expression {self.text[:40]!r}... has {len(self.text)} characters "
                f"(at most {MAX_LENGTH})"
            )
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"expression {self.text!r} does not parse: {error}") from None
        _validate(self.text, tree)
        return tree.body

    @cached_property
    def names(self) -> frozenset[str]:
        """Free names: dims, dtype variables, params, dtypes (not functions, not ``passed``'s)."""
        skip = {id(n.func) for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        skip |= {id(call.args[0]) for call in self.calls_of("passed")}
        return frozenset(
            n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and id(n) not in skip
        )

    @cached_property
    def presence(self) -> frozenset[str]:
        """Inputs whose presence the expression asks for."""
        asked = (call.args[0] for call in self.calls_of("passed"))
        return frozenset(node.id for node in asked if isinstance(node, ast.Name))

    @cached_property
    def bases(self) -> frozenset[str]:
        """Names whose fields the expression reads (``layout`` of ``layout.max_m``)."""
        return frozenset(
            n.value.id
            for n in ast.walk(self.tree)
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
        )

    def calls_of(self, function: str) -> list[ast.Call]:
        """The calls of ``function``, however deep they stand."""
        return [node for node in ast.walk(self.tree) if is_call_of(node, function)]

    def evaluate(self, env: Mapping[str, Any], passed: frozenset[str] = frozenset()) -> Any:
        """The value under ``env``; raises ``KeyError`` for a name that has none."""
        return _evaluate(self.tree, env, passed)

    def source(self, rename: Callable[[str], str], passed: Callable[[str], str]) -> str:
        """Python source with every free name replaced; calls become ``_f_<function>(...)``."""
        _ = self.tree  # validates
        return ast.unparse(
            _Renamer(rename, passed).visit(ast.parse(self.text.strip(), mode="eval"))
        )

    def atoms(self) -> list[Expr]:
        """The maximal subexpressions that are no and/or/not."""
        return [Expr(ast.unparse(node)) for node in _atoms(self.tree)]


def parse(text: object) -> Expr:
    """Parse and validate; raises ``ExpressionError``."""
    expr = Expr(str(text))
    expr.tree  # noqa: B018  (validates)
    return expr


def is_call_of(node: ast.AST, function: str) -> TypeGuard[ast.Call]:
    """Whether a node is a call of ``function``."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    )


def _atoms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        return [atom for value in node.values for atom in _atoms(value)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _atoms(node.operand)
    return [node]


class _Renamer(ast.NodeTransformer):
    def __init__(self, rename: Callable[[str], str], passed: Callable[[str], str]) -> None:
        self._rename, self._passed = rename, passed

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id  # type: ignore[attr-defined]
        if name == "passed":
            return ast.parse(self._passed(node.args[0].id), mode="eval").body  # type: ignore[attr-defined]
        args = [self.visit(arg) for arg in node.args]
        return ast.Call(ast.Name(f"_f_{name}", ast.Load()), args, [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.parse(self._rename(node.id), mode="eval").body

    def visit_List(self, node: ast.List) -> ast.AST:
        # A list is written for a shape; sizes are tuples everywhere.
        return ast.Tuple([self.visit(element) for element in node.elts], ast.Load())


def _evaluate(  # noqa: C901  (one case for each kind of node)
    node: ast.expr, env: Mapping[str, Any], passed: frozenset[str]
) -> Any:
    def value(child: ast.expr) -> Any:
        return _evaluate(child, env, passed)

    def values(children: list[ast.expr]) -> list[Any]:
        items: list[Any] = []
        for child in children:
            if isinstance(child, ast.Starred):
                items.extend(value(child.value))
            else:
                items.append(value(child))
        return items

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return env[node.id] if node.id in env else _dtype_constant(node.id)
        case ast.Tuple() | ast.List():
            return tuple(values(node.elts))
        case ast.BinOp():
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        case ast.UnaryOp():
            return _UNARY[type(node.op)](value(node.operand))
        case ast.BoolOp():
            wanted = isinstance(node.op, ast.Or)
            result: Any = None
            for child in node.values:
                result = value(child)
                if bool(result) is wanted:
                    break
            return result
        case ast.Compare():
            left = value(node.left)
            for op, right_node in zip(node.ops, node.comparators, strict=True):
                right = value(right_node)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.IfExp():
            return value(node.body if value(node.test) else node.orelse)
        case ast.Attribute():
            return getattr(value(node.value), node.attr)
        case ast.Subscript():
            return value(node.value)[value(node.slice)]
        case ast.Call():
            name = node.func.id  # type: ignore[attr-defined]
            if name == "passed":
                return node.args[0].id in passed  # type: ignore[attr-defined]
            return FUNCTIONS[name](*values(node.args))
    raise ExpressionError(f"cannot evaluate {ast.unparse(node)!r}")


def _dtype_constant(name: str) -> str:
    if name in DTYPES:
        return name
    raise KeyError(name)
