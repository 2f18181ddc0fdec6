"""The shipped JSON Schema: valid as such, and read alike by jsonschema (as editors do) and by our
small interpreter.

The interpreter is stricter in one thing that JSON Schema cannot say: 1.0 is no integer.
"""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
import yaml

from tests.manifests import write_manifest
from tileops.engine.errors import ManifestError
from tileops.engine.manifest.catalog import families
from tileops.engine.manifest.document import load_document, schema

VALIDATOR = jsonschema.Draft202012Validator(schema())

GOOD = {
    "ThingFwdOp": {
        "status": "planned",
        "reference": "own",
        "kind": "template",
        "signature": {
            "dims": {"R": "N // 2", "S": 3},
            "dtypes": {"T": ["float16", "float32"]},
            "params": {
                "a": {"type": "int"},
                "b": {"type": "float?", "default": None, "kw_only": True},
                "c": {"type": "ints", "default": [1, 2]},
                "d": {"type": "float", "default": 0.5},
            },
            "inputs": {
                "x": {"dtype": "T", "shape": "[*B, N]", "mutated": True, "contiguous": False},
                "y": {
                    "dtype": ["int32", "int64"],
                    "shape": "[N]",
                    "optional": "passed(x)",
                    "kw_only": True,
                    "device": "cpu",
                    "content": {"min": 0, "max": "N"},
                },
            },
            "outputs": {
                "z": {"dtype": "T", "shape": "[]", "nullable": "not passed(y)", "buffer": "out"},
                "w": {"dtype": "T", "shape": "[N]", "is_input": "x"},
            },
            "rules": [{"require": True, "message": "m"}, {"require": "N", "message": "m", "argument": "x"}],
        },
        "composition": {"stage": "OtherOp"},
        "backward": "ThingBwdOp",
        "sharding": {"B": "shard"},
        "workloads": [
            {
                "label": "l",
                "dims": {"B": [1, 2], "N": 3},
                "params": {"a": 1, "b": None, "c": [1], "d": {"any": "thing"}},
                "passed": ["y"],
                "dtypes": {"T": "float16"},
            }
        ],
        "cost": {"flops": "N", "read_bytes": 0, "write_bytes": "1"},
    }
}  # fmt: skip


def places(value, path=()):
    """Every place of a document, the root first."""
    yield path
    if isinstance(value, dict):
        for key, child in value.items():
            yield from places(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from places(child, (*path, index))


def changed(path, replacement):
    """``GOOD`` with the value at ``path`` replaced, or removed for ``...``."""
    if not path:
        return replacement
    document = copy.deepcopy(GOOD)
    value = document
    for key in path[:-1]:
        value = value[key]
    if replacement is ...:
        del value[path[-1]]
    else:
        value[path[-1]] = replacement
    return document


def with_unknown_field(path):
    document = copy.deepcopy(GOOD)
    value = document
    for key in path:
        value = value[key]
    if not isinstance(value, dict):
        return None
    value["unknown"] = "x"
    return document


def ours(folder, document) -> str:
    """The interpreter's complaint, '' for none."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(document, Dumper=dumper, sort_keys=False, width=1000)
    path = write_manifest(folder, text)
    try:
        load_document(path)
    except ManifestError as error:
        return str(error)
    return ""


def test_it_is_a_json_schema():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    json.dumps(schema())


def test_the_interpreter_knows_every_word_the_schema_uses():
    known = {
        "$ref", "additionalProperties", "anyOf", "enum", "items", "minItems", "pattern",
        "patternProperties", "properties", "required", "type",
    }  # fmt: skip
    silent = {"$schema", "title", "description", "$defs"}
    used = set()

    def walk(rule):
        used.update(rule)
        named = ("properties", "patternProperties", "$defs")
        children = [child for name in named for child in rule.get(name, {}).values()]
        children += [rule[name] for name in ("items", "additionalProperties") if name in rule]
        for child in [*children, *rule.get("anyOf", ())]:
            if isinstance(child, dict):
                walk(child)

    walk(schema())
    assert used <= known | silent


def test_a_choice_is_made_by_type():
    """The interpreter takes the first choice of the value's type; so choices must differ in it."""
    text = json.dumps(schema())
    found = []

    def walk(value):
        if isinstance(value, dict):
            if "anyOf" in value:
                found.append([choice["type"] for choice in value["anyOf"]])
            for child in value.values():
                walk(child)

    walk(json.loads(text))
    assert found
    assert all(len(set(kinds)) == len(kinds) for kinds in found)


def test_the_good_document(tmp_path):
    VALIDATOR.validate(GOOD)
    assert ours(tmp_path, GOOD) == ""


REPLACEMENTS = [
    ...,
    None,
    True,
    3,
    2.5,
    "text",
    [],
    ["text"],
    [4],
    [[5]],
    {},
    {"A": "b"},
    {"A": {}},
]


def test_both_agree_on_every_change_of_every_place(tmp_path):
    """Replace, remove or extend each place of a document that has every field."""
    tried = {"good": 0, "bad": 0}
    for path in places(GOOD):
        documents = [changed(path, r) for r in REPLACEMENTS if path or r is not ...]
        documents.append(with_unknown_field(path))
        for document in documents:
            if document is None:
                continue
            theirs = [error.message for error in VALIDATOR.iter_errors(document)]
            complaint = ours(tmp_path, document)
            assert bool(complaint) == bool(theirs), (path, complaint, theirs, document)
            tried["bad" if theirs else "good"] += 1
    assert min(tried.values()) > 100, tried


def test_one_point_zero_is_no_integer(tmp_path):
    document = changed(("ThingFwdOp", "workloads", 0, "dims", "N"), 1.0)
    assert VALIDATOR.is_valid(document)
    assert "given 1.0; accepted: integer or array" in ours(tmp_path, document)


@pytest.mark.parametrize("path", families().values(), ids=families())
def test_in_tree_manifests(path):
    VALIDATOR.validate(load_document(path).plain())
    first = path.read_text(encoding="utf-8").splitlines()[0]
    where = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads((path.parent / where).read_text(encoding="utf-8")) == schema(), (
        "editors find the schema by the file's first line"
    )
