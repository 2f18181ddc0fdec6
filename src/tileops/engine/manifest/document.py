"""Reading a manifest file: YAML with line numbers, then the shipped JSON Schema.

Faults are located. Tags, anchors, aliases, merge keys and duplicate keys are refused: an entry
must read as it stands. ``schema.json`` is the one list of fields; the small interpreter here knows
the part of JSON Schema that file uses.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tileops.engine.errors import ManifestError

__all__ = ["Located", "load_document", "schema"]


@dataclass(frozen=True)
class Located:
    """A YAML value and the line where it begins. ``value``: scalar, list or dict of ``Located``."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def get(self, key: str) -> Located | None:
        """A field of a mapping, None where absent."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def find(self, *path: str | int) -> Located:
        """The innermost value along ``path`` that is written: it has the line of the fault."""
        found = self
        for key in path:
            within = found.value
            inside = isinstance(within, list) and isinstance(key, int) and key < len(within)
            if not inside and not (isinstance(within, dict) and key in within):
                break
            found = within[key]
        return found


@lru_cache(maxsize=1)
def schema() -> dict[str, Any]:
    """The JSON Schema of a manifest file."""
    text = Path(__file__).with_name("schema.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def load_document(path: Path) -> Located:
    """The validated document of one file. Raises ``ManifestError`` with file, line and entry."""
    import yaml  # here, so that importing tileops costs nothing

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"{path}:1", "", f"cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise ManifestError(f"{path}:{line}", "", f"cannot be read: {error}") from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        for token in yaml.scan(text, Loader=loader):
            if isinstance(token, yaml.AliasToken | yaml.AnchorToken | yaml.TagToken):
                kind = type(token).__name__.removesuffix("Token").lower()
                hint = '; quote a splice: "[*B, N]"' if kind == "alias" else ""
                where = f"{path}:{token.start_mark.line + 1}"
                # A tag's value is (handle, suffix).
                name = (
                    token.value
                    if isinstance(token.value, str)
                    else "".join(filter(None, token.value))
                )
                raise ManifestError(where, "", f"YAML {kind} '{name}' is not allowed{hint}")
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark:
            line = mark.line + 1
        else:  # an unreadable character: libyaml counts bytes
            line = 1 + text.encode()[: getattr(error, "position", 0)].count(b"\n")
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ManifestError(f"{path}:{line}", "", f"malformed YAML: {problem}") from None
    except RecursionError:
        raise ManifestError(f"{path}:1", "", _TOO_DEEP) from None
    if root is None:
        raise ManifestError(f"{path}:1", "", "the file is empty")
    document = _convert(root, path, (), 0)
    _conform(document, schema(), path, ())
    return document


_DEEPEST = 20
_TOO_DEEP = "malformed YAML: nested too deeply"


def _entry_of(trail: tuple[str, ...]) -> str:
    return trail[0] if trail else ""


def _convert(node: Any, path: Path, trail: tuple[str, ...], depth: int) -> Located:
    import yaml

    line = node.start_mark.line + 1
    if depth > _DEEPEST:
        raise ManifestError(f"{path}:{line}", _entry_of(trail), _TOO_DEEP)
    if isinstance(node, yaml.MappingNode):
        fields: dict[str, Located] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            where = f"{path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode) or key == "<<":
                raise ManifestError(where, _entry_of(trail), "a key must be a plain word")
            if key in fields:
                first = fields[key].line
                raise ManifestError(
                    where, _entry_of(trail), f"duplicate key '{key}' (first at line {first})"
                )
            child = _convert(value_node, path, (*trail, key), depth + 1)
            # A field is located by its key: that is the line a reader looks for.
            fields[key] = Located(child.value, key_node.start_mark.line + 1)
        return Located(fields, line)
    if isinstance(node, yaml.SequenceNode):
        return Located([_convert(child, path, trail, depth + 1) for child in node.value], line)
    return Located(_scalar(node), line)


_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")


def _scalar(node: Any) -> Any:
    # YAML 1.1 reads 1e-6 as a string, and yes/no/on/off as booleans; authors mean neither.
    text: str = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    if text in ("true", "false"):
        return text == "true"
    if text in ("null", "~", ""):
        return None
    if _INT.fullmatch(text) and len(text) < 100:  # Python refuses to read very long numbers
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if text in ("inf", "-inf", "nan"):
        return float(text)
    return text


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _TYPES[name])


def _conform(node: Located, rule: dict[str, Any], path: Path, trail: tuple[str, ...]) -> None:
    where, entry = f"{path}:{node.line}", _entry_of(trail)
    label = ".".join(trail[1:]) or "the entry"
    if "$ref" in rule:
        rule = {**schema()["$defs"][rule["$ref"].rsplit("/", 1)[1]], **{
            key: value for key, value in rule.items() if key != "$ref"
        }}  # fmt: skip
    if "anyOf" in rule:
        # The choices differ in type, so the value's own type says which one its author meant.
        kinds = [choice["type"] for choice in rule["anyOf"]]
        rule = next((c for c in rule["anyOf"] if _is_type(node.value, c["type"])), {"type": kinds})
    if "type" in rule:
        names = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if not any(_is_type(node.value, name) for name in names):
            given = "a mapping" if isinstance(node.value, dict) else repr(node.plain())
            raise ManifestError(
                where, entry, f"{label}: given {given}; accepted: {' or '.join(names)}"
            )
    if "enum" in rule and node.value not in rule["enum"]:
        accepted = ", ".join(map(str, rule["enum"]))
        raise ManifestError(where, entry, f"{label}: given {node.plain()!r}; accepted: {accepted}")
    if "pattern" in rule and not re.search(rule["pattern"], str(node.value)):
        raise ManifestError(
            where,
            entry,
            f"{label}: given {node.value!r}; accepted: text matching {rule['pattern']}",
        )
    if isinstance(node.value, dict):
        _conform_mapping(node, rule, path, trail)
    elif isinstance(node.value, list):
        if len(node.value) < rule.get("minItems", 0):
            raise ManifestError(where, entry, f"{label}: must not be empty")
        for child in node.value if "items" in rule else ():
            _conform(child, rule["items"], path, trail)


def _conform_mapping(
    node: Located, rule: dict[str, Any], path: Path, trail: tuple[str, ...]
) -> None:
    where, entry = f"{path}:{node.line}", _entry_of(trail)
    label = ".".join(trail[1:]) or ("the entry" if trail else "the file")
    known: dict[str, Any] = rule.get("properties", {})
    patterns: dict[str, Any] = rule.get("patternProperties", {})
    for name in rule.get("required", ()):
        if name not in node.value:
            raise ManifestError(where, entry, f"{label}: field '{name}' is missing")
    for name, child in node.value.items():
        inner = (*trail, name)
        sub = known.get(name)
        if sub is None:
            sub = next((r for p, r in patterns.items() if re.search(p, name)), None)
        if sub is None and isinstance(rule.get("additionalProperties"), dict):
            sub = rule["additionalProperties"]
        if sub is not None:
            _conform(child, sub, path, inner)
        elif rule.get("additionalProperties") is False:
            accepted = ", ".join(known) or "names matching " + ", ".join(patterns)
            raise ManifestError(
                f"{path}:{child.line}",
                _entry_of(inner),
                f"{label}: unknown field '{name}'; accepted: {accepted}",
            )
