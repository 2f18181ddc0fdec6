"""Constructor parameters: normalised once, so that equal ops have equal keys."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from tileops.engine.errors import CheckError
from tileops.engine.manifest.entry import MISSING, Entry, Param, ParamType
from tileops.engine.manifest.expr import DTYPES
from tileops.engine.signature import literal

__all__ = ["bind_params", "key_of", "normalise"]

_REJECTED = object()


def bind_params(entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a construction, defaults filled, normalised, in manifest order.

    Raises ``CheckError`` naming the parameter.
    """
    positional = [param for param in entry.params if not param.kw_only]
    if len(args) > len(positional):
        raise CheckError(
            entry.name,
            f"positional {len(positional) + 1}",
            repr(args[len(positional)]),
            f"{len(positional)} positional parameters ({_names(positional)})",
        )
    given = {param.name: value for param, value in zip(positional, args, strict=False)}
    known = {param.name for param in entry.params}
    for name, value in kwargs.items():
        if name not in known:
            raise CheckError(
                entry.name, name, repr(value), f"the parameters {_names(entry.params) or 'none'}"
            )
        if name in given:
            raise CheckError(entry.name, name, "it twice", "one value")
        given[name] = value
    result = {}
    for param in entry.params:
        value = given.get(param.name, param.default)
        if value is MISSING:
            raise CheckError(entry.name, param.name, "nothing", _describe(param.type))
        result[param.name] = normalise(entry.name, param, value)
    return result


def _names(params: Any) -> str:
    return ", ".join(param.name for param in params)


def normalise(op: str, param: Param, value: Any) -> Any:
    """The canonical form of one value (tuples, literal types). Raises ``CheckError``."""
    if value is None and param.type.nullable:
        return None
    for word, arguments in param.type.alternatives:
        result = _convert(word, arguments, value)
        if result is not _REJECTED:
            return result
    try:
        shown = repr(value)
    except ValueError:  # an int of more digits than Python prints
        shown = "a number too large to print"
    raise CheckError(op, param.name, f"{shown} ({type(value).__name__})", _describe(param.type))


def _describe(kind: ParamType) -> str:
    words = []
    for word, arguments in kind.alternatives:
        match word:
            case "enum":
                words.append("one of " + ", ".join(map(repr, arguments)))
            case "dtype":
                words.append("a torch dtype" + (f" ({', '.join(arguments)})" if arguments else ""))
            case "ints":
                words.append("a list or tuple of non-negative ints, or one int")
            case "floats":
                words.append("a list, a tuple or a 1-d tensor of real numbers")
            case "axes":
                words.append("an axis (int), or a list or tuple of axes")
            case "tuple":
                words.append(f"{arguments[0]} ints")
            case "literal":
                words.append(f"a {arguments[0]}")
            case "object":
                words.append("any object")
            case _:
                words.append(f"a {word}")
    return " or ".join(words) + (" or None" if kind.nullable else "")


def _integer(value: Any) -> Any:
    if isinstance(value, bool | torch.Tensor):
        return _REJECTED
    try:
        whole = int(operator.index(value))
    except TypeError:
        return _REJECTED
    return whole if whole.bit_length() <= 1024 else _REJECTED  # no size; Python will not print it


def _convert(word: str, arguments: tuple[str, ...], value: Any) -> Any:  # noqa: C901  (by type)
    match word:
        case "bool":
            return value if isinstance(value, bool) else _REJECTED
        case "int":
            return _integer(value)
        case "float":
            if isinstance(value, bool | torch.Tensor | str) or not hasattr(value, "__float__"):
                return _REJECTED
            try:
                return float(value)
            except (TypeError, ValueError, OverflowError):  # an array, an int beyond all floats
                return _REJECTED
        case "number":
            if isinstance(value, bool):
                return value
            whole = _integer(value)
            return whole if whole is not _REJECTED else _convert("float", (), value)
        case "str":
            # str.__str__: the plain text of a member of a string enumeration, so that keys agree.
            return str.__str__(value) if isinstance(value, str) else _REJECTED
        case "enum":
            known = isinstance(value, str) and value in arguments
            return str.__str__(value) if known else _REJECTED
        case "dtype":
            if isinstance(value, str) and value in DTYPES:
                value = getattr(torch, value)
            known = isinstance(value, torch.dtype)
            if known and (not arguments or literal.dtype_name(value) in arguments):
                return value
        case "device":
            if isinstance(value, str | torch.device | int) and not isinstance(value, bool):
                try:
                    return torch.device(value)
                except (RuntimeError, ValueError, OverflowError):
                    return _REJECTED
        case "floats":
            if isinstance(value, torch.Tensor) and value.ndim == 1 and value.is_floating_point():
                value = value.tolist()  # waits for the device; each value exactly
            if not isinstance(value, list | tuple):
                return _REJECTED
            items = tuple(_convert("float", (), item) for item in value)
            return _REJECTED if _REJECTED in items else items
        case "ints" | "axes" | "tuple":
            whole = _integer(value)
            if whole is not _REJECTED:
                items = (whole,) * int(arguments[0]) if word == "tuple" else (whole,)
            elif isinstance(value, list | tuple):
                items = tuple(_integer(item) for item in value)
            else:
                return _REJECTED
            if _REJECTED in items or (word != "axes" and any(item < 0 for item in items)):
                return _REJECTED
            return items if word != "tuple" or len(items) == int(arguments[0]) else _REJECTED
        case "literal":
            if isinstance(value, str):  # how a manifest writes it
                try:
                    value = literal.read(value)
                except ValueError:
                    return _REJECTED
            return value if type(value) is literal.literal_types.get(arguments[0]) else _REJECTED
        case "object":
            return value
    return _REJECTED


def key_of(op: str, params: Mapping[str, Any], target: str | None) -> tuple[str, bool]:
    """The canonical instance key and whether it can re-create the op."""
    parts, canonical = [], True
    for name, value in params.items():
        try:
            text = literal.write(value)
        except literal.NoLiteralError:
            text, canonical = literal.unique_token(), False
        parts.append(f"{name}={text}")
    if target is not None:
        parts.append(f"target={target!r}")
    return f"{op}({', '.join(parts)})", canonical
