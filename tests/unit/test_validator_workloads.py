"""The validator on what an entry says and on its workloads."""

from __future__ import annotations

import pytest

from tests.op_packages import MANIFEST, MODULE, assert_faults, marked, swap
from tileops.engine.validate import check

# ---- what an entry says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("factor: {type: float, default: 2.0}",
         "factor:\n        type: float\n        default: two  # here",
         "params.factor.default: given 'two' (str); accepted: a float"),
        ("default: a,", "default: c,  # here\n       ",
         "params.mode.default: given 'c' (str); accepted: one of 'a', 'b'"),
        ("    dtypes: {T: [float16, float32]}",
         "    dtypes:\n      T: [float16, float32]\n      U: [int8]  # here",
         "dtypes.U: is not used"),
        ('      bias: {dtype: T, shape: "[N]", optional: true}',
         '      bias:\n        content: {max: N}  # here\n        dtype: T\n        shape: "[N]"',
         "inputs.bias.content: is for integers, and bias may be float16"),
    ],
)  # fmt: skip
def test_entries(package, old, new, problem):
    manifest = swap(MANIFEST, old, new)
    report = check(manifests=[package(manifest)])
    lines = {f.line for f in report.faults if f.problem == problem}
    assert lines == {marked(manifest)}, report.faults


def test_a_dtype_variable_that_nothing_binds(package):
    manifest = swap(
        MANIFEST, "dtypes: {T: [float16, float32]}",
        "dtypes:\n      T: [float16, float32]\n      U: [float32]  # here",
        'y: {dtype: T, shape: "[*B, N]"}', 'y: {dtype: "U if mode == \'z\' else T", shape: "[*B, N]"}',
    )  # fmt: skip
    assert_faults(package(manifest), "dtypes.U: is never bound: no input's dtype names it")


def test_a_parameter_with_the_name_of_an_attribute(package):
    manifest = MANIFEST.replace("mode:", "last_call:  # here\n       ", 1)
    manifest = manifest.replace("mode == 'b'", "last_call == 'b'").replace(
        "{mode: b}", "{last_call: b}"
    )
    module = MODULE.replace("mode", "last_call")
    report = check(manifests=[package(manifest, module)])
    assert ("params.last_call: every op has an attribute of this name", marked(manifest)) in [
        (f.problem, f.line) for f in report.faults
    ]


def test_a_shape_that_cannot_be_solved(package):
    manifest = swap(
        MANIFEST, 'x: {dtype: T, shape: "[*B, N]"}', 'x: {dtype: T, shape: "[*B, N + 1]"}  # here'
    )
    assert_faults(
        package(manifest),
        "inputs.x.shape: cannot solve 'N + 1': N not known by then; only <dim>, <int>*<dim> and "
        "<dim>*<int> find a dim",
    )


def test_a_planned_shape_that_cannot_be_solved(package):
    manifest = swap(
        MANIFEST, 'x: {dtype: T, shape: "[*B, N]"}', 'x: {dtype: T, shape: "[*B, *N]"}  # here',
        "status: implemented", "status: planned",
    )  # fmt: skip
    (fault,) = check(manifests=[package(manifest, None)]).faults
    assert (fault.line, fault.entry) == (marked(manifest), "ScaleFwdOp")
    assert "cannot solve '*N'" in fault.problem


# ---- optional inputs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("passed: [bias], ", ""), "inputs.bias: no workload passes it"),
        (("params: {mode: b}, dtypes", "params: {mode: b}, passed: [bias], dtypes"),
         "inputs.bias: no workload omits it"),
        (("params: {mode: b}, ", "", ", table: int64", ""),
         "inputs.table: no workload makes \"mode == 'b'\" true"),
        (("passed: [bias], ", "passed: [bias], params: {mode: b}, "),
         "inputs.table: no workload makes \"mode == 'b'\" false"),
    ],
)  # fmt: skip
def test_optional_inputs(package, changes, problem):
    name = problem.split(":")[0].removeprefix("inputs.")
    text = swap(MANIFEST, *changes)
    lines = [
        line + "  # here" if line.startswith(f"      {name}:") else line
        for line in text.splitlines()
    ]
    assert_faults(package("\n".join(lines)), problem)


# ---- workloads -----------------------------------------------------------------------------------

ONE = "    - {label: one, dims: {B: [4], N: 8}, passed: [bias], dtypes: {T: float32}}"


def with_workload(row: str, **changes: str) -> str:
    """The manifest with its first workload written over several lines, one of them bent."""
    fields = {
        "label": "one",
        "dims": "{B: [4], N: 8}",
        "passed": "[bias]",
        "dtypes": "{T: float32}",
    }
    key = row.partition(":")[0]
    fields[key] = row.split(":", 1)[1].strip()
    lines = [f"      {k}: {v}{'  # here' if k == key else ''}" for k, v in fields.items()]
    return swap(MANIFEST, ONE, "    -" + "\n".join(lines)[5:])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("dims: {B: [4], N: 8, M: 2}", "dims.M: no shape has it; accepted: B, N"),
        ("dims: {B: 4, N: 8}", "dims.B: given 4; accepted: a list, because it is spliced"),
        ("dims: {B: [4], N: [8]}", "dims.N: given [8]; accepted: one size"),
        ("dims: {B: [-4], N: 8}", "dims.B: given [-4]; accepted: sizes of at least 0"),
        ("params: {factors: 2}", "params.factors: no such parameter; accepted: factor, mode"),
        ("passed: [bias, x]", "passed: 'x' is no optional input; accepted: bias, table"),
        ("passed: [bias, y]", "passed: 'y' is no optional input; accepted: bias, table"),
        ("passed: [bias, table]", "passed: 'table', but not: mode == 'b'"),
        ("dtypes: {T: float32, U: int8}", "dtypes.U: nothing has this dtype; accepted: T, table"),
        ("dtypes: {T: float64}", "dtypes.T: given float64; accepted: float16, float32"),
        ("dtypes: {T: float32, table: float32}", "dtypes.table: given float32; accepted: int32, int64"),
    ],
)  # fmt: skip
def test_what_a_workload_names(package, row, problem):
    report = assert_faults(package(with_workload(row)), f"workload 'one': {problem}")
    assert report.faults[0].entry == "ScaleFwdOp"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("dims: {N: 8}", "dims.B: is missing; input x needs it"),
        ("dims: {B: [4]}", "dims.N: is missing; input x needs it"),
        ("dtypes: {}", "dtypes.T: is missing; input x needs it"),
        ("params: {factor: x}", "'factor': given 'x' (str); accepted: a float"),
    ],
)
def test_workloads_that_do_not_bind(package, row, problem):
    field, _, value = row.partition(": ")
    fields = {"dims": "{B: [4], N: 8}", "params": "{}", "dtypes": "{T: float32}", field: value}
    words = ", ".join(f"{name}: {text}" for name, text in fields.items())
    manifest = swap(MANIFEST, ONE, f"    - {{label: one, {words}, passed: [bias]}}  # here")
    assert_faults(package(manifest), f"workload 'one': {problem}")


def test_a_workload_that_breaks_a_rule(package):
    rule = "    rules: [{require: N % 16 == 0 or len(B) == 0, message: N is a multiple of 16}]\n"
    manifest = swap(MANIFEST, "  workloads:", rule + "  workloads:", ONE, ONE + "  # here")
    problem = "workload 'one': 'table': given B=(4,), N=8; accepted: N is a multiple of 16"
    assert_faults(package(manifest), problem)


def test_a_dim_that_a_workload_does_not_use(package):
    shape = "\"[N] if mode == 'b' else [N, M]\", optional: true}"
    manifest = swap(
        MANIFEST, 'bias: {dtype: T, shape: "[N]", optional: true}', "bias: {dtype: T, shape: " + shape,
        ONE, ONE.replace("N: 8", "N: 8, M: 8"),
        "    - {label: two, dims: {B: [], N: 8}",
        "    - label: two\n      dims: {B: [], N: 8, M: 3}  # here\n",
        ", params: {mode: b}, dtypes: {T: float16, table: int64}}",
        "      params: {mode: b}\n      dtypes: {T: float16, table: int64}",
    )  # fmt: skip
    module = swap(MODULE, BODY, "return x * factor")
    assert_faults(
        package(manifest, module), "workload 'two': dims.M: this workload does not use it"
    )


def test_a_derived_dim_is_not_stated(package):
    manifest = swap(
        with_workload("dims: {B: [4], N: 8, H: 4}"),
        "    dtypes: {T: [f",
        "    dims: {H: N // 2}\n    dtypes: {T: [f",
    )
    assert_faults(package(manifest), "workload 'one': dims.H: is derived, so no workload states it")


def test_a_label_twice(package):
    manifest = swap(
        MANIFEST, "label: two", "label: one", "table: int64}}", "table: int64}}  # here"
    )
    assert_faults(package(manifest), "workload 'one': the label is also at line 17")


# ---- decompositions under fake tensors -----------------------------------------------------------

BODY = "return x * factor if bias is None else x * factor + bias"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return x.double()", "decomposition gives y as float64[4, 8]; the entry says float32[4, 8]"),
        ("return x[0]", "decomposition gives y as float32[8]; the entry says float32[4, 8]"),
        ("return x, x", "decomposition returns 2 values; the entry says 1: y"),
        ("return None", "decomposition gives y as None; the entry says float32[4, 8]"),
        ("return 3", "decomposition gives y as int; the entry says float32[4, 8]"),
        ("raise OSError('no')", "OSError: no (ops.py:15)"),
        ("assert not x.numel()", "AssertionError (ops.py:15)"),
        ("return x @ x", "RuntimeError: "),
        ("return x[:int(x.sum()) * 0]",
         "decomposition gives y as float32[0, 8]; the entry says float32[4, 8]"),
        ("return x[x > 9e9]", "decomposition gives y as float32[0]; the entry says float32[4, 8]"),
    ],
)  # fmt: skip
def test_decompositions(package, body, problem):
    module = swap(MODULE, BODY, f"if mode == 'b':\n            {BODY}\n        {body}")
    manifest = package(swap(MANIFEST, ONE, ONE + "  # here"), module)
    (fault,) = check(manifests=[manifest]).faults
    assert fault.problem.startswith(f"workload 'one': {problem}")
    assert (fault.file, fault.line, fault.entry) == (str(manifest), 17, "ScaleFwdOp")


def test_a_decomposition_that_reads_data_is_run_small(package):
    """It cannot run on fake tensors: real ones are made, of few elements."""
    body = "x = x + 0 * x.sum().item()\n        assert x.numel() <= 4096\n        " + BODY
    big = swap(MANIFEST, "B: [4], N: 8", "B: [4096, 4096], N: 4096")
    assert check(manifests=[package(big, swap(MODULE, BODY, body))]).faults == []


# ---- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "problem"),
    [
        ("flops: 4 - N", "cost.flops is -4; accepted: an int of at least 0"),
        ("flops: N * 0.5", "cost.flops is 4.0; accepted: an int of at least 0"),
        ("flops: N > 1", "cost.flops is True; accepted: an int of at least 0"),
        ("flops: N\n    read_bytes: nbytes_x - 9999", "cost.read_bytes is -9871; accepted: an int"),
        ("flops: N\n    write_bytes: -nbytes_y", "cost.write_bytes is -128; accepted: an int"),
        ("flops: N // len(B)", "ZeroDivisionError: "),
    ],
)
def test_costs(package, cost, problem):
    manifest = swap(MANIFEST, 'flops: "2 * prod(B) * N"', cost)
    faults = check(manifests=[package(manifest)]).faults
    assert {(f.line, f.entry) for f in faults} <= {(17, "ScaleFwdOp"), (18, "ScaleFwdOp")}
    assert faults
    assert any(problem in f.problem for f in faults)
