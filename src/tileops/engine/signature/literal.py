"""Literal forms: how a parameter value is written in a canonical key, and read back.

The text is a small Python-like literal (``(4096,)``, ``1e-06``, ``inf``, ``float32``,
``MaskedLayoutSpec(max_m=128)``); it is parsed with ``ast``, never executed.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import os
from typing import Any, TypeVar

import torch

from tileops.engine.manifest.expr import DTYPES

__all__ = [
    "NoLiteralError",
    "dtype_name",
    "literal_type",
    "literal_types",
    "read",
    "unique_token",
    "write",
]

T = TypeVar("T")

literal_types: dict[str, type] = {}
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
_CONSTANTS: dict[str, Any] = {
    "inf": math.inf,
    "nan": math.nan,
    "True": True,
    "False": False,
    "None": None,
    **{name: getattr(torch, name) for name in DTYPES if name != "bool"},
    "dtype_bool": torch.bool,
}
_counter = itertools.count()


class NoLiteralError(ValueError):
    """A value has no literal form."""


def literal_type(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose instances may be op parameters and stand in keys.

    Raises ``TypeError`` for another kind of class, or when another class has the name.
    """
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise TypeError(f"literal_type: {cls.__name__} must be a frozen dataclass")
    other = literal_types.get(cls.__name__)
    if other is not None and (other.__module__, other.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise TypeError(f"literal_type: the name {cls.__name__} is taken by {other.__module__}")
    literal_types[cls.__name__] = cls
    return cls


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def write(value: Any) -> str:
    """The canonical literal of a normalised value. Raises ``NoLiteralError``."""
    # Exact types: a subclass (an IntEnum, a NumPy float) prints itself in its own way.
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) is float:
        return "nan" if math.isnan(value) else repr(value)
    if isinstance(value, torch.dtype) and value in _DTYPE_NAMES:
        return "dtype_bool" if value is torch.bool else _DTYPE_NAMES[value]
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, tuple):
        inner = ", ".join(write(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    name = type(value).__name__
    known = literal_types.get(name) is type(value)
    if known:
        inner = ", ".join(
            f"{field.name}={write(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if field.init
        )
        return f"{name}({inner})"
    raise NoLiteralError(f"{name} has no literal form")


def unique_token() -> str:
    """A text that is no literal and that no process ever writes twice."""
    return f"<object {os.getpid():x}.{next(_counter)}.{os.urandom(4).hex()}>"


def read(text: str) -> Any:
    """The value of a literal. Raises ``ValueError`` saying what is wrong."""
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not a literal") from None


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """``Name(a=1)`` as ('Name', {'a': 1}). Raises ``ValueError``."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it is not of the form Name(parameter=literal, ...)") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("it is not of the form Name(parameter=literal, ...)")
    return node.func.id, {str(item.arg): _value(item.value) for item in node.keywords}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in literal_types:
            return literal_types[name](**{str(k.arg): _value(k.value) for k in keywords})
        case ast.Call(func=ast.Name(id=name)):
            raise ValueError(f"the literal class {name!r} is not known here; import its module")
    raise ValueError(f"{ast.unparse(node)!r} is not a literal")
