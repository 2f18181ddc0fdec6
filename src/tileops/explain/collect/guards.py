"""Guards by what they hold fast, and which one a recompilation failed."""

from __future__ import annotations

import ast
import inspect
import re
import types
from typing import Any

import torch

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
_NAME = r"[A-Za-z_]\w*(?:\.\w+|\[[^\]]+\])*"
_SOURCE = rf"(?P<source>{_NAME})"
_STATED = {
    "alias": rf"^{_SOURCE} is (?!(?:None|True|False|Ellipsis)$|torch\.)(?P<expected>{_NAME})$",
    "value": rf"^{_SOURCE} (?:==|is) (?P<expected>.+)$",
    "length": rf"^len\({_SOURCE}\) == (?P<expected>\d+)$",
    "type": rf"^___check_type_id\({_SOURCE}, \d+\)(?:, type=<class '(?P<expected>.+)'>)?$",
    "identity": rf"^___check_obj_id\({_SOURCE}, \d+\)(?:, type=(?P<expected>.+))?$",
}
"""Guards on what is no tensor, by what they compare."""
_REQUIRES_GRAD = re.compile(
    r"^tensor '(?P<source>.+?)' requires_grad mismatch\. .*requires_grad=(?P<e>[01])"
)
_NO_TENSOR = re.compile(
    r"^expected type of '(?P<source>.+)' to be a tensor type, .*<class '(?P<found>.+)'>"
)
_DUPLICATE = re.compile(r"^Duplicate tensors? found.*?: (?P<names>\[.+\])$")
_STATE = re.compile(r"^GLOBAL_STATE changed: (?P<names>.+)$", re.DOTALL)
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
)
_SIZED = (list, tuple, dict, set, frozenset, str, bytes)


def stated(reason: str) -> tuple[str, str, str | None] | None:
    """Property, source and what is expected: ``value``, ``n`` and ``3`` of ``0/0: n == 3``."""
    guard = _parts(reason)[1]
    for name, words in _STATED.items():
        if found := re.match(words, guard, re.DOTALL):
            expected = found["expected"]
            return name, found["source"], _one(expected) if name == "identity" else expected
    return None


def _one(thing: str | None) -> str | None:
    """What torch says of an object that it knows by identity: a class, or before 2.13 the object."""
    if found := re.match(r"<class '(.+)'>$", thing or ""):
        return f"one {found[1]}"
    found = re.match(
        r"<(?:code object|function|built-in function) (\S+?)(?: at 0x.*)?>$", thing or ""
    )
    return found[1] if found else None


def what_came(reason: str, names: dict[str, Any], module: dict[str, Any]) -> tuple[str, str] | None:
    """What a guard names, as :func:`_asked` calls it, and what the refused call brought there."""
    if state := _STATE.match(_parts(reason)[1]):
        now = {name: private.global_state(name) for name in state["names"].split()}
        known = [f"{name}={value}" for name, value in now.items() if value is not None]
        return (reason, ", ".join(known)) if len(known) == len(now) else None
    guard = stated(reason)
    roots = {**names, "L": names, "G": module}
    try:
        if guard is None:
            sizes = _sizes(_parts(reason)[1], roots)
            return None if sizes is None else (reason, sizes)
        about, source, _ = guard
        value = _follow(ast.parse(source, mode="eval").body, roots)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, SyntaxError):
        return None
    told = _told(about, value)
    return None if told is None else (_asked(about, source), told)


def _sizes(guard: str, roots: dict[str, Any]) -> str | None:
    """What a guard on what may vary compares, as it came."""
    terms = _terms(guard)
    values = [_follow(term, roots) for term in terms]
    if not terms or any(type(value) is not int for value in values):
        return None
    if len(values) == 1:
        return str(values[0])
    return ", ".join(f"{ast.unparse(t)} = {v}" for t, v in zip(terms, values, strict=True))


def _terms(guard: str) -> list[ast.expr]:
    """Sizes and numbers that a guard on what may vary compares: ``x.size()[0]`` of ``2 <= x.size()[0]``."""
    found: dict[str, ast.expr] = {}
    waiting: list[ast.AST] = [ast.parse(guard, mode="eval").body]
    if not isinstance(waiting[0], ast.Compare):
        return []
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            found[ast.unparse(node)] = node
        elif not isinstance(node, ast.Call):
            waiting += ast.iter_child_nodes(node)
    return list(found.values())


def _asked(about: str, source: str) -> str:
    return source if about == "value" else f"{about} of {source}"


def _told(about: str, value: Any) -> str | None:
    """Without running code of the user's, such as a ``__repr__``."""
    if about == "value":
        return repr(value) if type(value) in _PLAIN else None
    if about == "length":
        return str(len(value)) if type(value) in _SIZED else None
    if about == "identity" and isinstance(
        value, type | types.FunctionType | types.BuiltinFunctionType
    ):
        return value.__qualname__
    if about == "identity" and isinstance(value, types.CodeType):  # of a function
        return value.co_name
    kind = type(value)
    plain = kind.__module__ in ("builtins", "__main__")
    named = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    return named if about == "type" else f"another {named}"


def _parts(reason: str) -> tuple[str, str]:
    """Id of the compilation and the guard, without the place that torch adds to it."""
    match = _REASON.match(reason.strip())
    place, guard = (match["id"], match["guard"]) if match else ("", reason)
    return place, re.split(r"\s+# |\nUser stack trace", guard.strip())[0].strip()


def _follow(node: ast.expr, roots: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return roots[node.id]
    if isinstance(node, ast.Subscript):
        return _follow(node.value, roots)[ast.literal_eval(node.slice)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = _follow(node.func.value, roots)
        plain = type(owner) in (torch.Tensor, torch.nn.Parameter)
        if plain and node.func.attr in ("size", "stride", "storage_offset"):
            return getattr(torch.Tensor, node.func.attr)(owner)
    if isinstance(node, ast.Attribute):
        owner = _follow(node.value, roots)
        slot = inspect.getattr_static(type(owner), node.attr, None)
        if isinstance(slot, types.MemberDescriptorType | types.GetSetDescriptorType):
            return slot.__get__(owner)
        return vars(owner)[node.attr]  # no property of the user's runs
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
        what, index, source = tensor["what"].strip(), tensor["index"], tensor["source"]
        name = f"{what}[{index}]" if index is not None else what
        expected, actual = tensor["expected"].strip(), tensor["actual"].strip()
        if what == "dispatch key set":
            devices = [
                re.sub(r"DispatchKeySet\((\w*).*", r"\1", each).lower()
                for each in (expected, actual)
            ]
            if devices[0] != devices[1]:
                what = name = "device"
                expected, actual = devices
        return Failure(place, guard, source, name, expected, actual, _advice(what, source, index))
    if flag := _REQUIRES_GRAD.match(guard):
        wanted = flag["e"] == "1"
        told = str(wanted), str(not wanted)
        return Failure(place, guard, flag["source"], "requires_grad", *told,
                       _advice("requires_grad", flag["source"], None))  # fmt: skip
    if no_tensor := _NO_TENSOR.match(guard):
        source = no_tensor["source"]
        told = "a tensor", no_tensor["found"]
        return Failure(place, guard, source, "type", *told, _advice("type", source, None))
    if twice := _DUPLICATE.match(guard):
        source = " and ".join(re.findall(r"[\"'](.+?)[\"']", twice["names"]))
        told = "tensors of their own", "one tensor"
        return Failure(place, guard, source, "identity", *told, _advice("alias", source, None))
    if known := stated(reason):
        what, source, expected = known
        if what == "alias":
            told = f"the same object as {expected}", "another"
            advice = _advice(what, f"{source} and {expected}", None)
            return Failure(place, guard, source, "identity", *told, advice)
        came = values.get(_asked(what, source))
        how = "constant" if what == "value" and not _is_number(expected) else what
        return Failure(place, guard, source, what, expected, came, _advice(how, source, None))
    if _STATE.match(guard):
        what, came = "global state", values.get(reason)
        return Failure(place, guard, None, what, _before(came), came, _advice(what, "", None))
    if reason in values:  # of what may vary
        source = ", ".join(map(ast.unparse, _terms(guard)))
        return Failure(place, guard, source, "range", guard, values[reason],
                       _advice("range", source, None))  # fmt: skip
    return Failure(place, guard, None, None, None, None, _advice("", "", None))


def _is_number(text: str | None) -> bool:
    return bool(re.fullmatch(r"-?\d[\d.]*(e[+-]?\d+)?|True|False|-?inf|nan", text or ""))


def _before(came: str | None) -> str | None:
    """What was the other way round; unknown where a state has more than two values."""
    turned = {"True": "False", "False": "True"}
    parts = [each.rsplit("=", 1) for each in came.split(", ")] if came else []
    known = parts and all(value in turned for _, value in parts)
    return ", ".join(f"{name}={turned[value]}" for name, value in parts) if known else None


_ADVICE = {
    "size": """If this size varies, say so before the first call:
        torch._dynamo.mark_dynamic({source}, {index}), or torch.compile(..., dynamic=True). Else pad to a
        few sizes.""",
    "stride": """Pass {source} with one layout, such as {source}.contiguous(), or accept one graph for
        each.""",
    "range": """A version serves the sizes for which it was made; 0 and 1 have versions of their own. Pad
        to its range, or accept one more version.""",
    "dtype": "Cast {source} to one dtype before the call, or accept one graph for each dtype.",
    "requires_grad": "Call with {source} always detached or always requiring grad.",
    "value": "Pass {source} as a 0-dim tensor, or keep it constant for the life of the model.",
    "attribute": """Pass {source} as a 0-dim tensor, or keep it constant; an attribute that counts calls
        belongs outside the compiled function.""",
    "constant": """Keep {source} constant for the life of the model; each value is a version of its own.""",
    "length": "Each length of {source} is a version of its own: keep it, or pass one tensor.",
    "type": "Pass {source} always of one type; each type is a version of its own.",
    "identity": "Pass the same object as {source}: make it once, outside the calls.",
    "alias": "Pass as {source} always different tensors, or always one: each is a version of its own.",
    "device": "Move {source} to one device before the call, or accept one graph for each device.",
    "global state": """Set grad mode, autocast, default dtype and deterministic mode once, around all
        calls.""",
}
_ANY = "Keep what this guard names the same between calls, or move it out of the compiled function."


def _advice(what: str, source: str, index: str | None) -> str:
    what = "attribute" if what == "value" and "." in source else what
    return " ".join(_ADVICE.get(what, _ANY).split()).format(source=source, index=index)
