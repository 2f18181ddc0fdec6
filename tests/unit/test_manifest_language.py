"""What a manifest file may say, and what it is read as."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.manifests import entry_of, entry_text, marked_line, write_manifest
from tileops.engine.manifest.catalog import families, family_file, load_family
from tileops.engine.manifest.document import load_document, schema
from tileops.engine.manifest.entry import MISSING, Branch
from tileops.engine.manifest.expr import DTYPES, FUNCTIONS

EVERYTHING = """\
# A comment.
ThingFwdOp:
  status: planned
  reference: torch.thing
  kind: template
  signature:
    dims: {R: "width if width is not None else D"}
    dtypes: {T: [float16, float32], I: [int32, int64]}
    params:
      width: {type: "int?", default: null}
      mode: {type: "enum(none, rope)", default: none, kw_only: true}
    inputs:
      x: {dtype: T, shape: "[*B, D]", mutated: "mode == 'rope'", contiguous: true}
      rows: {dtype: I, shape: "[N]", device: cpu, content: {min: -1, max: D - 1}}
      table: {dtype: [float32, float64], shape: "[N, R]", optional: "mode == 'rope'"}
      bias: {dtype: float32, shape: "[D]", optional: true, kw_only: true}
    outputs:
      y: {dtype: T, shape: "[*B, D]", is_input: x}
      extra: {dtype: float32, shape: "[]", nullable: "not passed(bias)"}
    rules:
      - {require: "N > 0", message: "there are rows", argument: rows}
      - require: "len(B) > 0 or D > 1"
        message: "something is there"
  composition: {first: OtherFwdOp}
  backward: ThingBwdOp
  sharding: {B: shard, "B[width]": "replicate if mode == 'rope' else sum"}
  workloads:
    - {label: plain, dims: {B: [2, 3], D: 8, N: 4}, dtypes: {T: float16, I: int32}}
    - label: rotated
      dims:
        B: []
        D: 8  # here
        N: 4
      params: {mode: rope, width: 4}
      passed: [bias, table]
      dtypes: {T: float32, I: int64, table: float64}
  cost:
    flops: "prod(B) * D"
    read_bytes: nbytes_x
    write_bytes: nbytes_y
"""


@pytest.fixture
def everything(tmp_path):
    return load_family(write_manifest(tmp_path, EVERYTHING))["ThingFwdOp"]


def test_every_field_is_read(everything):
    entry = everything
    assert (entry.status, entry.reference, entry.kind) == ("planned", "torch.thing", "template")
    assert entry.dtypes == {"T": ("float16", "float32"), "I": ("int32", "int64")}
    assert {k: v.text for k, v in entry.dims.items()} == {"R": "width if width is not None else D"}
    assert [(p.name, p.default, p.kw_only) for p in entry.params] == [
        ("width", None, False),
        ("mode", "none", True),
    ]
    assert [i.name for i in entry.inputs] == ["x", "rows", "table", "bias"]
    assert [i.name for i in entry.positional_inputs] == ["x", "rows", "table"]
    x, rows, table, bias = entry.inputs
    assert (x.dtype.text, x.dtypes, x.contiguous, x.host) == ("T", (), True, False)
    assert (x.optional, x.passed_when, x.mutated.text) == (False, None, "mode == 'rope'")
    assert (rows.host, rows.content.min.text, rows.content.max.text) == (True, "-1", "D - 1")
    assert (table.dtype, table.dtypes) == (None, ("float32", "float64"))
    assert (table.optional, table.passed_when.text) == (True, "mode == 'rope'")
    assert (bias.optional, bias.passed_when, bias.dtypes) == (True, None, ("float32",))
    assert (bias.kw_only, bias.mutated, bias.content) == (True, None, None)
    y, extra = entry.outputs
    assert (y.is_input, y.nullable, y.buffer) == ("x", None, False)
    assert (extra.nullable.text, extra.shape.text) == ("not passed(bias)", "[]")
    assert [(r.require.text, r.message, r.argument) for r in entry.rules] == [
        ("N > 0", "there are rows", "rows"),
        ("len(B) > 0 or D > 1", "something is there", None),
    ]
    assert entry.composition == {"first": "OtherFwdOp"}
    assert entry.backward == "ThingBwdOp"
    assert [(r.names, r.at, r.word.text) for r in entry.sharding] == [
        (("B",), None, "shard"),
        (("B",), "width", "replicate if mode == 'rope' else sum"),
    ]
    plain, rotated = entry.workloads
    assert (plain.label, plain.dims, plain.params) == ("plain", {"B": (2, 3), "D": 8, "N": 4}, {})
    assert rotated.params == {"mode": "rope", "width": 4}
    assert rotated.passed == {"bias", "table"}
    assert rotated.dtypes == {"T": "float32", "I": "int64", "table": "float64"}
    assert rotated.dims["B"] == ()
    assert entry.cost.flops.text == "prod(B) * D"
    assert (entry.cost.read_bytes.text, entry.cost.write_bytes.text) == ("nbytes_x", "nbytes_y")


def test_a_field_knows_its_line(everything):
    lines = EVERYTHING.splitlines()
    here = marked_line(EVERYTHING)
    assert everything.line_of("workloads", 1, "dims", "D") == here
    assert everything.line_of("workloads", 1, "dims", "absent") == here - 2
    assert everything.line_of("workloads", 1, "absent") == here - 3
    assert everything.line == everything.line_of() == everything.line_of("absent") == 2
    assert lines[everything.line_of("signature", "inputs", "bias") - 1].startswith("      bias")
    assert lines[everything.line_of("signature", "rules", 1) - 1].startswith("      - require")
    assert [w.line for w in everything.workloads] == [here - 4, here - 3]
    assert everything.where == f"{everything.path}:2"


def test_what_is_left_out_has_a_meaning(tmp_path):
    entry = entry_of(tmp_path, "inputs: {}\noutputs: {y: {dtype: float32, shape: '[2]'}}\n")
    assert (entry.params, entry.inputs, entry.rules) == ((), (), ())
    assert (entry.dims, entry.dtypes, entry.composition) == ({}, {}, {})
    assert (entry.backward, entry.cost.read_bytes, entry.cost.write_bytes) == (None, None, None)
    assert not entry.has_boundary
    assert not entry.has_out
    workload = entry.workloads[0]
    assert (workload.dims, workload.params, workload.passed) == ({}, {}, frozenset())


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1e-6", 1e-6),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000", 1000),
        ("-7", -7),
        ("0", 0),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("inf", math.inf),
        ("-inf", -math.inf),
        # YAML 1.1 would read these as booleans, an octal number, a time, a hexadecimal number.
        ("yes", "yes"),
        ("on", "on"),
        ("No", "No"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1_", "1_"),
        ("1__0", "1__0"),
        ("1e", "1e"),
        ("9" * 5000, "9" * 5000),
        ("'1'", "1"),
        ('"true"', "true"),
        ("[1, 2]", (1, 2)),
    ],
)
def test_scalars_are_what_they_look_like(tmp_path, written, read):
    signature = (
        f"params: {{p: {{type: object, default: {written}}}}}\ninputs: {{}}\noutputs: {{}}\n"
    )
    value = entry_of(tmp_path, signature).params[0].default
    assert value == read
    assert type(value) is type(read)


def test_nan_and_the_absent_default(tmp_path):
    signature = """\
    params:
      required: {type: float}
      given: {type: float, default: nan}
    inputs: {}
    outputs: {}
    """
    required, given = entry_of(tmp_path, signature).params
    assert required.default is MISSING
    assert math.isnan(given.default)
    assert repr(MISSING) == "MISSING"


@pytest.mark.parametrize(
    ("text", "alternatives", "nullable"),
    [
        ("int", [("int", ())], False),
        ("float?", [("float", ())], True),
        ("int|float", [("int", ()), ("float", ())], False),
        ("enum(a, b)?", [("enum", ("a", "b"))], True),
        ("dtype", [("dtype", ())], False),
        ("dtype(float16,bfloat16)", [("dtype", ("float16", "bfloat16"))], False),
        ("ints", [("ints", ())], False),
        ("floats?", [("floats", ())], True),
        ("axes?", [("axes", ())], True),
        ("int[3]", [("tuple", ("3",))], False),
        ("int|int[2]?", [("int", ()), ("tuple", ("2",))], True),
        ("ALayout|BLayout", [("literal", ("ALayout",)), ("literal", ("BLayout",))], False),
        *((word, [(word, ())], False) for word in ("bool", "str", "number", "device", "object")),
    ],
)
def test_param_types(tmp_path, text, alternatives, nullable):
    signature = f"params: {{p: {{type: '{text}'}}}}\ninputs: {{}}\noutputs: {{}}\n"
    kind = entry_of(tmp_path, signature).params[0].type
    assert (kind.text, list(kind.alternatives), kind.nullable) == (text, alternatives, nullable)


def branches(tmp_path, inputs: str, outputs: str, params: str = "") -> list[str]:
    signature = (
        f"dtypes: {{T: [float32]}}\nparams: {{{params}}}\n"
        f"inputs: {{{inputs}}}\noutputs: {{{outputs}}}\n"
    )
    return [branch.suffix for branch in entry_of(tmp_path, signature).branches]


X = "x: {dtype: T, shape: '[N]'%s}"
Y = "y: {dtype: T, shape: '[N]'%s}"
FLAG = "flag: {type: bool, default: false}"


def test_branches_without_side_effects(tmp_path):
    assert branches(tmp_path, X % "", Y % "") == [""]


def test_branches_of_writes(tmp_path):
    assert branches(tmp_path, X % ", mutated: true", Y % "") == ["_writes_x"]
    assert branches(tmp_path, X % ", mutated: flag", Y % "", FLAG) == ["", "_writes_x"]
    always = "a: {dtype: T, shape: '[N]', optional: true}, "
    got = branches(tmp_path, X % ", mutated: 'flag and passed(a)', kw_only: true" + ", " + always,
                   Y % "", FLAG)  # fmt: skip
    assert got == ["", "_writes_x"]


def test_branches_of_out_and_absent_outputs(tmp_path):
    assert branches(tmp_path, X % "", Y % ", buffer: out") == ["", "_out"]
    outputs = Y % "" + ", z: {dtype: T, shape: '[N]', nullable: 'not flag'}"
    assert branches(tmp_path, X % "", outputs, FLAG) == ["", "_without_z"]


def test_conditions_on_one_fact_change_together(tmp_path):
    inputs = X % ", mutated: flag"
    outputs = Y % "" + ", z: {dtype: T, shape: '[N]', nullable: 'not flag'}"
    assert branches(tmp_path, inputs, outputs, FLAG) == ["_writes_x", "_without_z"]


def test_suffixes_stand_in_one_order():
    assert Branch(("a", "b"), True, ("y",)).suffix == "_writes_a_writes_b_out_without_y"


@pytest.mark.parametrize(
    ("inputs", "rest", "boundary"),
    [("{x: {dtype: float32, shape: '[N]'}}", "", True), ("{}", "", False),
     ("{x: {dtype: float32, shape: '[N]'}}", "composition: {a: OtherOp}\n", False)],
)  # fmt: skip
def test_which_entries_have_a_boundary(tmp_path, inputs, rest, boundary):
    rest += "workloads: [{label: one}]\ncost: {flops: 0}\n"
    entry = entry_of(tmp_path, f"inputs: {inputs}\noutputs: {{}}\n", rest)
    assert entry.has_boundary is boundary


def test_true_and_false_need_no_condition(tmp_path):
    signature = """\
    dtypes: {T: [float32]}
    inputs:
      x: {dtype: T, shape: "[N]", optional: false, mutated: false}
      y: {dtype: T, shape: "[N]", optional: true, mutated: true}
    outputs:
      z: {dtype: T, shape: "[N]", nullable: false}
    """
    entry = entry_of(tmp_path, signature)
    x, y = entry.inputs
    assert (x.optional, x.passed_when, x.mutated) == (False, None, None)
    assert (y.optional, y.passed_when, y.mutated.text) == (True, None, "True")
    assert entry.outputs[0].nullable is None


def test_files_are_read_once_and_found_from_modules(tmp_path):
    path = write_manifest(tmp_path, entry_text("inputs: {}\noutputs: {}\n"))
    assert load_family(path) is load_family(path)
    assert load_family(path)["ThingFwdOp"].family == path.parent.name
    inner = path.parent / "more"
    inner.mkdir()
    for folder in (path.parent, inner):
        (folder / "__init__.py").touch()
    assert family_file(str(path.parent / "thing.py")) == path
    assert family_file(str(inner / "thing.py")) == path
    (inner / "__init__.py").unlink()
    assert family_file(str(inner / "thing.py")) is None, "a folder outside the package is searched"


def test_in_tree_families_load():
    names = families()
    assert "norm" in names
    for name, path in names.items():
        assert all(entry.family == name for entry in load_family(path).values())


def test_lines_fall_away_in_plain_data(tmp_path):
    plain = load_document(write_manifest(tmp_path, EVERYTHING)).plain()
    assert plain["ThingFwdOp"]["workloads"][1]["dims"] == {"B": [], "D": 8, "N": 4}
    assert plain["ThingFwdOp"]["signature"]["inputs"]["rows"]["content"]["min"] == -1


# ---- the reference page --------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text(encoding="utf-8")


def test_the_page_explains_an_entry_that_is_sound(tmp_path):
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (text,) = [block for block in blocks if block[0].isalpha()]
    (entry,) = load_family(write_manifest(tmp_path, text)).values()
    assert [branch.suffix for branch in entry.branches] == [
        "",
        "_without_save_mean",
        "_writes_running_mean_writes_running_var",
    ]


def test_the_page_names_every_field_function_type_and_dtype():
    fields = set()

    def walk(value):
        if isinstance(value, dict):
            fields.update(value.get("properties", {}))
            for child in value.values():
                walk(child)

    walk(schema())
    types = {"bool", "int", "float", "number", "str", "dtype", "device", "ints", "floats", "axes"}
    types |= {"object"}
    for word in fields | types | set(DTYPES):
        assert f"`{word}`" in PAGE, word
    for name in [*FUNCTIONS, "passed"]:
        assert f"`{name}(" in PAGE, name
    assert "`enum(" in PAGE
    assert "`int[2]`" in PAGE
