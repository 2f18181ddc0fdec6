"""Faulty manifests: each fault is refused with its file, its line, its entry and the reason.

In the texts, ``# here`` marks the line that the message must name.
"""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent, indent

import pytest

from tests.manifests import entry_text, marked_line, write_manifest
from tileops.engine.errors import ManifestError
from tileops.engine.manifest.catalog import load_family
from tileops.engine.signature.generate import signature_source


def fault(folder, text: str) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        load_family(write_manifest(folder, text))
    return caught.value


def check(folder, text: str, entry: str, problem: str, line: int | None = None) -> None:
    error = fault(folder, text)
    line = marked_line(text) if line is None else line
    path, _, given = error.where.rpartition(":")
    assert (int(given), error.entry) == (line, entry), error
    assert problem in error.problem
    assert path.endswith("manifest.yaml")
    assert str(error) == f"{error.where}: {entry + ': ' if entry else ''}{error.problem}"


# ---- YAML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "the file is empty"),
        ("# only a comment\n", 1, "the file is empty"),
        ("a: [1,\n  b: {\n", 3, "malformed YAML"),
        ("a: 1\n\tb: 2\n", 2, "malformed YAML"),
        ("a: 'open\n", 2, "malformed YAML"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a:\n  b: \x07\n", 2, "malformed YAML"),
        ("ä:\n  b: \x07\n", 2, "malformed YAML"),
        ("- a\n- b\n", 1, "accepted: object"),
        ("word\n", 1, "accepted: object"),
        ("? [a]\n: b\n", 1, "a key must be a plain word"),
        ("? {a: b}\n: b\n", 1, "a key must be a plain word"),
        ("a:\n  <<: {b: c}\n", 2, "a key must be a plain word"),
        ("a: 1\nb: &name 2\n", 2, "YAML anchor 'name' is not allowed"),
        ("a: 1\nb: *name\n", 2, "YAML alias 'name' is not allowed; quote a splice"),
        ("a:\n  b: !!python/object/apply:os.getcwd []\n", 2, "YAML tag '!!python/object/apply:os"),
        ("a: !local 2\n", 1, "YAML tag '!local' is not allowed"),
        ("a: !!str 2\n", 1, "YAML tag '!!str' is not allowed"),
        ("a: !<verbatim> 2\n", 1, "YAML tag 'verbatim' is not allowed"),
        ("a:\n  " + "[" * 5000 + "]" * 5000 + "\n", 2, "exceeded maximum nesting depth"),
        ("a:\n  " + "[" * 900 + "]" * 900 + "\n", 2, "nested too deeply"),
        ("a:\n  " + "{b: " * 300 + "1" + "}" * 300 + "\n", 2, "nested too deeply"),
    ],
)
def test_yaml(tmp_path, text, line, problem):
    error = fault(tmp_path, text)
    assert int(error.where.rpartition(":")[2]) == line, error
    assert problem in error.problem
    assert "\n" not in str(error)


@pytest.mark.parametrize("depth", [5000, 900, 300])
def test_huge_nesting_without_the_c_loader(tmp_path, monkeypatch, depth):
    import yaml

    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    error = fault(tmp_path, "a:\n  " + "[" * depth + "]" * depth + "\n")
    assert "nested too deeply" in error.problem


def test_unreadable_files(tmp_path):
    with pytest.raises(ManifestError, match=r"nothing\.yaml:1: cannot be read"):
        load_family(tmp_path / "nothing.yaml")
    path = tmp_path / "manifest.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ManifestError, match=r"manifest\.yaml:2: cannot be read: .*utf-8"):
        load_family(path)


def test_duplicate_keys(tmp_path):
    text = """\
    ThingFwdOp:
      status: implemented
      reference: own
      status: planned  # here
    """
    check(tmp_path, text, "ThingFwdOp", "duplicate key 'status' (first at line 2)")
    text = "AFwdOp: {}\nBFwdOp: {}\nAFwdOp: {}  # here\n"
    check(tmp_path, text, "", "duplicate key 'AFwdOp' (first at line 1)")


def test_a_failed_load_leaves_nothing_behind(tmp_path):
    path = write_manifest(tmp_path, "AFwdOp: {}\n")
    with pytest.raises(ManifestError):
        load_family(path)
    path.write_text(entry_text("inputs: {}\noutputs: {}\n"))
    assert list(load_family(path)) == ["ThingFwdOp"]


# ---- fields --------------------------------------------------------------------------------------

REST = """\
workloads:
  - {label: one}
cost:
  flops: "1"
"""


def test_a_name_that_is_no_op(tmp_path):
    check(
        tmp_path, "thing: {}  # here\n", "thing", "unknown field 'thing'; accepted: names matching"
    )


def test_a_missing_field(tmp_path):
    text = "\nThingFwdOp:  # here\n  status: planned\n  reference: own\n"
    check(tmp_path, text, "ThingFwdOp", "the entry: field 'kind' is missing")


@pytest.mark.parametrize(
    ("signature", "rest", "problem"),
    [
        ("inputs: {}\noutputs: {}\nextra: {}  # here\n", REST, "signature: unknown field 'extra'"),
        ("outputs: {}\n", REST, "signature: field 'inputs' is missing"),
        (
            "inputs:\n  x:\n    dtype: float32\n    shape: '[N]'\n    shapes: 3  # here\noutputs: {}\n",
            REST,
            "signature.inputs.x: unknown field 'shapes'; accepted: dtype, shape, optional",
        ),
        (
            "inputs: {}\noutputs: {}\n",
            REST + "notes: x  # here\n",
            "the entry: unknown field 'notes'",
        ),
        (
            "inputs: {}\noutputs: {}\n",
            "workloads: []  # here\ncost: {flops: 1}\n",
            "workloads: must not be empty",
        ),
        (
            "inputs: {}\noutputs: {}\n",
            "workloads:\n  - {label: a}\n  - {lable: b}  # here\ncost: {flops: 1}\n",
            "workloads: field 'label' is missing",
        ),
        (
            "inputs: {}\noutputs: {}\n",
            "workloads: [{label: a}]\ncost:\n  flops: [1]  # here\n",
            "cost.flops: given [1]; accepted: string or integer or boolean",
        ),
        (
            "inputs: {}\noutputs: {}\n",
            "workloads:\n  - label: a\n    dims: {N: 2.5}  # here\ncost: {flops: 1}\n",
            "workloads.dims.N: given 2.5; accepted: integer or array",
        ),
        (
            "inputs: {}\noutputs: {}\n",
            "workloads:\n  - label: a\n    dims:\n      N: [2, x]  # here\ncost: {flops: 1}\n",
            "workloads.dims.N: given 'x'; accepted: integer",
        ),
        (
            "inputs: {}\noutputs: {}\n",
            "workloads:\n  - label: a\n    dims: {N: true}  # here\ncost: {flops: 1}\n",
            "given True; accepted: integer or array",
        ),
        (
            "inputs:\n  x:\n    shape: '[N]'\n    dtype: {a: b}  # here\noutputs: {}\n",
            REST,
            "signature.inputs.x.dtype: given a mapping; accepted: string or array",
        ),
        (
            "inputs:\n  x: {dtype: float32, shape: '[N]', device: cuda}  # here\noutputs: {}\n",
            REST,
            "device: given 'cuda'; accepted: cpu",
        ),
        (
            "inputs:\n  x: {dtype: float32, shape: '[N]', contiguous: yes}  # here\noutputs: {}\n",
            REST,
            "contiguous: given 'yes'; accepted: boolean",
        ),
        (
            "inputs:\n  x: {dtype: [], shape: '[N]'}  # here\noutputs: {}\n",
            REST,
            "signature.inputs.x.dtype: must not be empty",
        ),
        ("inputs: [x]  # here\noutputs: {}\n", REST, "given ['x']; accepted: object"),
    ],
)
def test_fields(tmp_path, signature, rest, problem):
    text = entry_text(signature, rest)
    if "# here" not in text:
        text = text.replace("  signature:\n", "  signature:  # here\n")
    check(tmp_path, text, "ThingFwdOp", problem)


@pytest.mark.parametrize("field", ["status: done", "kind: fused", "reference: 3"])
def test_entry_fields_of_a_closed_kind(tmp_path, field):
    name = field.split(":")[0]
    lines = entry_text("inputs: {}\noutputs: {}\n").splitlines()
    lines = [f"  {field}  # here" if line.startswith(f"  {name}:") else line for line in lines]
    check(tmp_path, "\n".join(lines), "ThingFwdOp", f"{name}: given")


# ---- types and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["integer", "int[x]", "float[2]", "enum", "enum()", "dtype(half)", "int(3)", "list", "int |",
     "ints[2]", "__import__('os')", "?", ""],
)  # fmt: skip
def test_param_types(tmp_path, kind):
    signature = f"""\
    params:
      p:
        kw_only: true
        type: "{kind}"  # here
    inputs: {{}}
    outputs: {{}}
    """
    problem = f"params.p: type {kind!r} is not in the language"
    check(tmp_path, entry_text(signature), "ThingFwdOp", problem)


BODY = {
    "params": "flag: {type: bool, default: false}",
    "dims": "",
    "dtypes": "T: [float32, float16]",
    "inputs": "x: {dtype: T, shape: '[*B, N]'}",
    "outputs": "y: {dtype: T, shape: '[*B, N]'}",
    "rules": "",
    "cost": "flops: 1",
}


def body(**changes: str) -> str:
    """A sound entry with some sections replaced; a section's text is indented to its place."""
    parts = {**BODY, **changes}
    signature = "".join(
        f"{name}:\n{indent(dedent(parts[name]), '  ')}\n"
        for name in parts
        if name != "cost" and parts[name]
    )
    rest = "workloads:\n  - {label: one}\ncost:\n" + indent(dedent(parts["cost"]), "  ") + "\n"
    return entry_text(signature, rest)


def test_the_sound_entry_is_sound(tmp_path):
    (entry,) = load_family(write_manifest(tmp_path, body())).values()
    assert entry.has_boundary


def use(expression: str) -> str:
    return f"x: {{dtype: T, shape: '[*B, N]', optional: \"{expression}\"}}  # here"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        # names
        ({"params": "2p: {type: int}  # here"}, "'2p' is not a valid name"),
        ({"params": "_p: {type: int}  # here"}, "'_p' is not a valid name"),
        ({"params": "lambda: {type: int}  # here"}, "params.lambda: the name is reserved"),
        ({"params": "target: {type: str}  # here"}, "params.target: the name is reserved"),
        ({"params": "x: {type: int}", "inputs": "x: {dtype: T, shape: '[N]'}  # here"},
         "inputs.x: the name is used twice (first in params)"),
        ({"params": "T: {type: int}", "dtypes": "T: [float32]  # here"},
         "dtypes.T: the name is used twice (first in params)"),
        ({"params": "float16: {type: int}  # here"}, "params.float16: the name is that of a dtype"),
        ({"inputs": "in: {dtype: T, shape: '[N]'}  # here"}, "inputs.in: the name is reserved"),
        ({"inputs": "out: {dtype: T, shape: '[N]'}  # here"}, "inputs.out: the name is reserved"),
        ({"inputs": "x: {dtype: T, shape: '[s]'}  # here"}, "dim 's': the name is reserved"),
        ({"inputs": "x: {dtype: T, shape: '[int8]'}  # here"}, "dim 'int8': the name is reserved"),
        ({"inputs": "x: {dtype: T, shape: '[T]'}  # here"}, "dim 'T' has the name of another in dtypes"),
        ({"inputs": "x: {dtype: T, shape: '[x]'}  # here"}, "dim 'x' has the name of another in inputs"),
        ({"dims": "flag: N + 1  # here"}, "dims.flag: the name is used twice (first in params)"),
        ({"outputs": "self: {dtype: T, shape: '[N]'}  # here"}, "outputs.self: the name is reserved"),
        # order
        ({"params": "a: {type: int, default: 1}\nb: {type: int}  # here"},
         "params.b: is required and follows 'a', which is not"),
        ({"inputs": "x: {dtype: T, shape: '[*B, N]', optional: true}\nz: {dtype: T, shape: '[N]'}  # here"},
         "inputs.z: is required and follows 'x', which is not"),
        # dtypes
        ({"dtypes": "T: [half]  # here"}, "unknown dtype 'half'; accepted: bool"),
        ({"inputs": "x: {dtype: [float32, half], shape: '[*B, N]'}  # here"}, "unknown dtype 'half'"),
        ({"inputs": "x: {dtype: U, shape: '[*B, N]'}  # here"}, "inputs.x.dtype: unknown name 'U' in 'U'"),
        ({"outputs": "y: {dtype: N, shape: '[*B, N]'}  # here"},
         "outputs.y.dtype: unknown name 'N' here in 'N'"),
        # dims
        ({"dims": "M: K // 2  # here"}, "dims.M: unknown name 'K' in 'K // 2'"),
        ({"dims": "M: K + 1  # here\nK: M - 1"}, "dims.M: is derived from itself in 'K + 1'"),
        ({"dims": "M: M + 1  # here"}, "dims.M: is derived from itself"),
        # expressions out of place
        ({"inputs": use("N > 1")}, "inputs.x.optional: unknown name 'N' here in 'N > 1'"),
        ({"inputs": use("T == float16")}, "inputs.x.optional: unknown name 'T' here"),
        ({"inputs": use("passed(z)")}, "inputs.x.optional: passed(z) names no input"),
        ({"inputs": use("flag.real")}, None),
        ({"inputs": use("passed(x) and flagg")}, "inputs.x.optional: unknown name 'flagg'"),
        ({"inputs": "x: {dtype: T, shape: '[N]', mutated: T == float16}  # here"},
         "inputs.x.mutated: unknown name 'T' here"),
        ({"inputs": "x: {dtype: T, shape: '[N] if passed(z) else [N, N]'}  # here"},
         "inputs.x.shape: passed(z) names no input"),
        ({"inputs": "x: {dtype: T, shape: N}  # here"}, "inputs.x.shape: 'N' is no list of dims"),
        ({"inputs": "x: {dtype: T, shape: '[N] if flag else N'}  # here"}, "is no list of dims"),
        ({"inputs": "x: {dtype: T, shape: '[N.real]'}  # here"},
         "'N' is no parameter, so it has no fields"),
        ({"inputs": "x:\n  dtype: T\n  shape: '[N]'\n  content:\n    min: 0\n    max: M  # here"},
         "inputs.x.content.max: unknown name 'M'"),
        ({"outputs": "y: {dtype: T, shape: '[*B, M]'}  # here"}, "outputs.y.shape: unknown name 'M'"),
        ({"outputs": "y: {dtype: T, shape: '[*B, N]', nullable: N > 1}  # here"},
         "outputs.y.nullable: unknown name 'N' here"),
        ({"outputs": "y: {dtype: T, shape: '[*B, N]', is_input: z}  # here"},
         "outputs.y.is_input: unknown input 'z'"),
        ({"outputs": "y: {dtype: T, shape: '[*B, N]', is_input: x}  # here"},
         "outputs.y.is_input: input 'x' is never written"),
        ({"rules": "- {require: N > 0, message: a}\n- {require: M > 0, message: b}  # here"},
         "rules.1.require: unknown name 'M'"),
        ({"rules": "- {require: N > 0, message: a, argument: N}  # here"},
         "rules.0.argument: 'N' is no input or parameter"),
        ({"cost": "flops: N * M  # here"}, "cost.flops: unknown name 'M' in 'N * M'"),
        ({"cost": "flops: N\nread_bytes: nbytes_z  # here"}, "cost.read_bytes: unknown name 'nbytes_z'"),
        ({"cost": "flops: N if T == float16 else 0  # here"}, "cost.flops: unknown name 'T'"),
        ({"cost": "flops: N\nwrite_bytes: nbytes_y if passed(y) else 0  # here"},
         "cost.write_bytes: passed(y) names no input"),
    ],
)  # fmt: skip
def test_names_and_places(tmp_path, changes, problem):
    text = body(**changes)
    if problem is None:
        load_family(write_manifest(tmp_path, text))
    else:
        check(tmp_path, text, "ThingFwdOp", problem)


def test_out_is_for_one_output(tmp_path):
    outputs = "y: {dtype: T, shape: '[N]', buffer: out}\nz: {dtype: T, shape: '[N]'}"
    text = body(outputs=outputs).replace("    outputs:", "    outputs:  # here")
    check(tmp_path, text, "ThingFwdOp", "'buffer: out' is for an op with one output")


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        (["[A + N]"], "cannot solve 'A + N': A, N not known by then"),
        (["[N // 2]"], "cannot solve 'N // 2': N not known by then; only <dim>, <int>*<dim>"),
        (["[2*N*M]"], "cannot solve '2 * N * M'"),
        (["[*A, *B]"], "cannot solve '*B': one list can find the length of one splice, once"),
        (["[*A, N, *A]"], "cannot solve '*A': one list can find the length of one splice, once"),
        (["[*bcast(A, B)]"], "cannot solve '*bcast(A, B)': only a name can be found as a splice"),
        (["[N]", "[N, M + 1]"], "cannot solve 'M + 1': M not known by then"),
    ],
)
def test_shapes_that_cannot_be_solved(tmp_path, shapes, problem):
    inputs = "\n".join(f"x{n}: {{dtype: T, shape: '{shape}'}}" for n, shape in enumerate(shapes))
    text = body(inputs=inputs + "  # here", outputs="y: {dtype: T, shape: '[1]'}")
    (entry,) = load_family(write_manifest(tmp_path, text)).values()
    with pytest.raises(ManifestError) as caught:
        signature_source(entry)
    assert problem in caught.value.problem
    assert caught.value.where == f"{entry.path}:{marked_line(text)}"
    assert caught.value.entry == "ThingFwdOp"


def test_a_derived_dim_before_its_source(tmp_path):
    inputs = "h: {dtype: T, shape: '[H]'}\nx: {dtype: T, shape: '[*B, H, N]'}"
    text = body(inputs=inputs, dims="H: N // 2  # here")
    (entry,) = load_family(write_manifest(tmp_path, text)).values()
    with pytest.raises(ManifestError) as caught:
        signature_source(entry)
    assert "dims.H: 'N' in 'N // 2' is not known where H is used first" in caught.value.problem
    assert caught.value.where == f"{entry.path}:{marked_line(text)}"


# ---- expressions ---------------------------------------------------------------------------------

OUTSIDE = [
    "__import__('os').system('touch FILE')",
    "__import__('os')",
    "open('FILE', 'w')",
    "exec('x')",
    "eval('x')",
    "getattr(N, 'real')",
    "N.real.imag",
    "(1).real",
    "''.join",
    "flag.__class__",
    "flag._private",
    "__debug__",
    "_hidden",
    "[].append(N)",
    "lambda: N",
    "lambda x: x",
    "[n for n in B]",
    "{n for n in B}",
    "{n: n for n in B}",
    "(n for n in B)",
    "f'{N}'",
    "f'{open(1)}'",
    "b'bytes'",
    "1j",
    "...",
    "{1, 2}",
    "{1: 2}",
    "B[0:1]",
    "(N := 3)",
    "await N",
    "(yield N)",
    "N @ N",
    "N ** N",
    "N ** -1",
    "N ** 0.5",
    "N ** 129",
    "9 ** 9 ** 9",
    "N / 2",
    "N << 2",
    "N >> 2",
    "N | 1",
    "N & 1",
    "N ^ 1",
    "~N",
    "+N",
    "min(N, key=abs)",
    "min(N, **flag)",
    "min(N, *B, default=0)",
    "N()",
    "passed()",
    "passed(x, x)",
    "passed(N + 1)",
    "passed('x')",
    "",
    "N +",
    "N; N",
    "N = 1",
    "import os",
    "(" * 300 + "N" + ")" * 300,
    "-" * 500 + "N",
    "not " * 100 + "N",
    " + ".join(["N"] * 100),
    "N" + " " * 2000,
    "x\x00y",
]


@pytest.mark.parametrize("text", OUTSIDE, ids=lambda text: text[:30].replace("\x00", "0"))
def test_expressions_outside_the_language(tmp_path, text):
    written = text.replace("\\", "\\\\").replace('"', '\\"').replace("\x00", "\\0")
    manifest = body(rules=f'- message: m\n  require: "{written}"  # here')
    check(tmp_path, manifest, "ThingFwdOp", "expression ")


PLACES = ["optional", "mutated", "shape", "dtype", "content", "rule", "dim", "nullable", "cost"]


@pytest.mark.parametrize("place", PLACES)
def test_manifest_text_is_never_executed(tmp_path, place):
    """A hostile expression in any place has no effect: not on loading, not on validating."""
    proof = tmp_path / "proof"
    bad = f"__import__('pathlib').Path('{proof}').touch()"
    x = {"dtype": "T", "shape": "'[*B, N]'"}
    changes: dict[str, str] = {}
    if place in ("optional", "mutated", "shape", "dtype"):
        x[place] = f'"{bad}"'
    elif place == "content":
        x["content"] = f'{{min: "{bad}"}}'
    elif place == "rule":
        changes["rules"] = f'- {{require: "{bad}", message: m}}'
    elif place == "dim":
        changes["dims"] = f'M: "{bad}"'
    elif place == "nullable":
        changes["outputs"] = f"y: {{dtype: T, shape: '[N]', nullable: \"{bad}\"}}"
    else:
        changes["cost"] = f'flops: "{bad}"'
    changes["inputs"] = "x: {" + ", ".join(f"{k}: {v}" for k, v in x.items()) + "}"
    path = write_manifest(tmp_path, body(**changes))
    with pytest.raises(ManifestError, match="outside the language"):
        load_family(path)
    # The text would do harm if it were run: the test can fail.
    assert not proof.exists()
    subprocess.run([sys.executable, "-c", bad], check=True)
    assert proof.exists()
