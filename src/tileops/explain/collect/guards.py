"""Guards by what they hold fast, and which one a recompilation failed."""

from __future__ import annotations

import ast
import re
from typing import Any

from tileops.explain import torch_private as private
from tileops.explain.collect.events import Event
from tileops.explain.model import Failure, Guard, Guards, Line, Recompile

_GUARD = re.compile(r"^[|\s]*\+- (?P<kind>[A-Z][A-Z_0-9]+): (?P<code>.*)$")
_ENTRY = re.compile(r"^[|\s]*\+- GuardManager: source=(?P<source>.+?), accessed_by=")
_AT = re.compile(
    r"\s+# (?P<text>.*?)\s*# (?P<file>\S+?):(?P<number>\d+) in (?P<function>\S+)(?:\s*| \(.*\))$"
)
_LATENCY = re.compile(r"Guard latency = ([\d.]+) us")
_GLOBAL = ("GLOBAL_STATE", "DEFAULT_DEVICE", "TORCH_FUNCTION", "DETERMINISTIC", "GRAD_MODE",
           "FSDP", "AUTOCAST", "DISPATCH_KEY_SET", "DUAL_LEVEL", "FUNCTORCH")  # fmt: skip
_TENSOR = ("TENSOR_", "DIMENSION_DYNAMIC", "NO_TENSOR_ALIASING", "STORAGE_OVERLAPPING",
           "OBJECT_ALIASING", "DYNAMIC_INDICES", "TENSOR_SUBCLASS")  # fmt: skip
_IDENTITY = ("TYPE_MATCH", "ID_MATCH", "EQUALS_MATCH", "LENGTH_CHECK", "DICT_", "FUNCTION",
             "CLASS_MATCH", "CLOSURE", "MODULE_MATCH", "WEAKREF", "NONE_MATCH", "BOOL", "NOT_",
             "TUPLE_ITERATOR", "MAPPING", "SET_", "NO_HASATTR", "HASATTR", "CONSTANT_MATCH",
             "NN_MODULE", "RANGE", "DATA_PTR", "TRUE_MATCH", "FALSE_MATCH")  # fmt: skip


def read_guards(event: Event) -> Guards:
    """Of the tree that torch prints: one guard a line, below the source that it checks."""
    guards = []
    source = ""
    for line in event.text.splitlines():
        if entry := _ENTRY.match(line):
            source = entry["source"]
        elif match := _GUARD.match(line):
            code, at = _split(match["code"])
            kind = match["kind"]
            named = re.search(r"[LG]\[[^\]]+\](?:\.\w+|\[[^\]]+\])*", code)
            about = named[0] if named else (source if kind not in _GLOBAL else "")
            group = _group(kind, code)
            about = "" if group == "global" else about
            properties = _properties(kind, code)
            if group == "shape" and (size := _range(code)):
                about, properties = size
            guards.append(Guard(group, kind, about, code, at, properties))
    latency = _LATENCY.search(event.text)
    return Guards(guards, float(latency[1]) if latency else None)


def _split(code: str) -> tuple[str, Line | None]:
    at = _AT.search(code)
    if at is None:
        return re.sub(r"\s+# _\w+/.*$", "", code).strip(), None
    # Torch keeps the last characters of a long path; the whole one is looked up by the caller.
    return code[: at.start()].strip(), Line(
        at["file"], int(at["number"]), at["function"], at["text"]
    )


def _group(kind: str, code: str) -> str:
    if kind.startswith(_GLOBAL) or "top_saved_tensors_hooks" in code:
        return "global"
    if (
        re.search(r"\.(size|stride|storage_offset)\(\)", code)
        or "SYMBOLIC" in kind
        or "SHAPE" in kind
    ):
        return "shape"
    if kind.startswith(_TENSOR):
        return "tensor"
    return "identity" if kind.startswith(_IDENTITY) else "other"


def _properties(kind: str, code: str) -> dict[str, Any]:
    if kind != "TENSOR_MATCH":
        return {}
    found: dict[str, Any] = {}
    if dtype := re.search(r"torch\.((?:b?float|u?int|bool|complex|half)\w*)", code):
        found["dtype"] = dtype[1]
    for name in ("device", "requires_grad", "size", "stride"):
        if value := re.search(rf"\b{name}=(\[.*?\]|\w+)", code):
            found[name] = _literal(value[1])
    if keys := re.search(r"DispatchKeySet\((.*?)\)", code):
        found["dispatch_keys"] = [key.strip() for key in keys[1].split(",")]
        # Torch prints the index alone, None for a device of which there is one.
        index = found.get("device")
        kind = found["dispatch_keys"][0].lower()
        found["device"] = kind if index is None else f"{kind}:{index}"
    return found


def _range(code: str) -> tuple[str, dict[str, Any]] | None:
    """``2 <= L['x'].size()[0] <= 64``: what may vary, and how far."""
    try:
        compared = ast.parse(code, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(compared, ast.Compare):
        return None
    terms = [compared.left, *compared.comparators]
    about = [term for term in terms if not isinstance(term, ast.Constant)]
    if len(about) != 1:
        return None
    found: dict[str, Any] = {}
    for left, how, right in zip(terms, compared.ops, terms[1:], strict=False):
        number, below = (
            (left, right is about[0]) if isinstance(left, ast.Constant) else (right, False)
        )
        if not isinstance(number, ast.Constant) or type(number.value) is not int:
            return None
        upward = isinstance(how, ast.Lt | ast.LtE)
        if not upward and not isinstance(how, ast.Gt | ast.GtE):
            return None
        strict = isinstance(how, ast.Lt | ast.Gt)
        if below == upward:
            found["min"] = number.value + strict
        else:
            found["max"] = number.value - strict
    source = about[0]
    is_size = isinstance(source, ast.Subscript) and isinstance(source.slice, ast.Constant)
    if (
        isinstance(source, ast.Subscript)
        and is_size
        and ast.unparse(source.value).endswith(".size()")
    ):
        found["dimension"] = ast.literal_eval(source.slice)
    return ast.unparse(source), found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# ---- recompilations ------------------------------------------------------------------------------

_REASON = re.compile(r"^(?P<id>!?[\d/]+): (?P<guard>.*)$", re.DOTALL)
_TENSOR_REASON = re.compile(
    r"tensor '(?P<source>.+?)' (?P<what>.+?) mismatch(?: at index (?P<index>\d+))?\.?,? "
    r"expected (?P<expected>.+?), actual (?P<actual>.+)$",
    re.DOTALL,
)
# Torch writes a local's name plain from 2.13 on, `L['n']` before.
_COMPARED = re.compile(
    r"^(?P<source>[A-Za-z_]\w*(?:\.\w+|\[[^\]]+\])*) (?:==|is) (?P<expected>.+)$"
)


def compared_source(reason: str) -> str | None:
    """``n`` of ``0/0: n == 3``."""
    compared = _COMPARED.match(_parts(reason)[1])
    return compared["source"] if compared else None


def _parts(reason: str) -> tuple[str, str]:
    """Id of the compilation and the guard, without the place that torch adds to it."""
    match = _REASON.match(reason.strip())
    place, guard = (match["id"], match["guard"]) if match else ("", reason)
    return place, re.split(r"\s+# |\nUser stack trace", guard.strip())[0].strip()


def source_value(source: str, names: dict[str, Any], module: dict[str, Any]) -> str | None:
    """The value that a guard's source has in a frame, if plain access finds it."""
    try:
        value = _follow(ast.parse(source, mode="eval").body, {**names, "L": names, "G": module})
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, SyntaxError):
        return None
    return repr(value) if isinstance(value, int | float | str | bool | None) else None


def _follow(node: ast.expr, roots: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return roots[node.id]
    if isinstance(node, ast.Subscript):
        return _follow(node.value, roots)[ast.literal_eval(node.slice)]
    if isinstance(node, ast.Attribute):
        return vars(_follow(node.value, roots))[node.attr]  # no property of the user's runs
    raise ValueError(ast.unparse(node))


def read_recompile(event: Event, number: int, error: str) -> Recompile:
    """``number``: compilations of this code before; ``error``: why there was none this time."""
    actual = event.data["actual"]
    failures = [_failure(reason, actual) for reason in event.data["reasons"]]
    gave_up = bool(re.search(r"recompile[ _]limit", error))
    return Recompile(failures, number + (not gave_up), private.limit(), gave_up)


def _failure(reason: str, values: dict[str, str]) -> Failure:
    place, guard = _parts(reason)
    if tensor := _TENSOR_REASON.search(guard):
        what = tensor["what"].strip()
        index = tensor["index"]
        name = f"{what}[{index}]" if index is not None else what
        source = tensor["source"]
        return Failure(
            place,
            guard,
            source,
            name,
            tensor["expected"].strip(),
            tensor["actual"].strip(),
            _advice(what, source, index),
        )
    if compared := _COMPARED.match(guard):
        source = compared["source"]
        return Failure(
            place,
            guard,
            source,
            "value",
            compared["expected"].strip(),
            values.get(source),
            _advice("value", source, None),
        )
    what = "global state" if "global_state" in guard or "GLOBAL_STATE" in guard else None
    return Failure(place, guard, None, what, None, None, _advice(what or "", "", None))


def _advice(what: str, source: str, index: str | None) -> str:
    if what in ("size", "stride"):
        return (
            f"If this size varies, say so before the first call: torch._dynamo.mark_dynamic({source}, "
            f"{index}), or torch.compile(..., dynamic=True). Else pad to a few sizes."
        )
    if what == "dtype":
        return f"Cast {source} to one dtype before the call, or accept one graph for each dtype."
    if what == "requires_grad":
        return f"Call with {source} always detached or always requiring grad."
    if what == "value":
        text = f"Pass {source} as a 0-dim tensor, or keep it constant"
        return text + ("; an attribute that counts calls belongs outside the compiled function."
                       if "." in source else " for the life of the model.")  # fmt: skip
    if what == "global state":
        return (
            "Set grad mode, autocast, default dtype and deterministic mode once, around all calls."
        )
    return "Keep what this guard names the same between calls, or move it out of the compiled function."
