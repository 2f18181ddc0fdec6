"""Generated checks: which calls they accept, what they find out, and what they say otherwise."""

from __future__ import annotations

import ast
import linecache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.signatures import Check, zeros
from tileops.engine.signature.generate import signature_source

# ---- conditionals and derived dims -----------------------------------------------------------------

CONDITIONAL = """\
params: {trans: {type: bool, default: false}, width: {type: "int?", default: null}}
dims: {R: "width if width is not None else N", H: R // 2}
dtypes: {T: [float32, float16]}
inputs:
  a: {dtype: T, shape: "[K, M] if trans else [M, K]"}
  b: {dtype: T, shape: "[K, N]"}
  c: {dtype: float32, shape: "[H]"}
outputs:
  y: {dtype: T, shape: "[M, H] if trans else [M, R]"}
"""


def test_conditional_lists_and_derived_dims(tmp_path):
    check = Check(tmp_path, CONDITIONAL)
    given = {"a": zeros(2, 3), "b": zeros(3, 8), "c": zeros(4)}
    assert check.dims(given) == {"M": 2, "K": 3, "N": 8, "R": 8, "H": 4}
    assert check.shapes(given) == [(2, 8)]
    given["a"] = zeros(3, 2)
    assert check.shapes(given, trans=True) == [(2, 4)]
    error = check.refusal(given)
    assert (error.argument, error.accepted) == ("b", "shape [K, N] with K=2")
    given |= {"a": zeros(2, 3), "c": zeros(3)}
    assert check.dims(given, width=6) == {"M": 2, "K": 3, "N": 8, "R": 6, "H": 3}
    assert check.refusal(given).accepted == "shape [H] with H=4"


def test_an_input_that_needs_what_later_ones_tell(tmp_path):
    """A gradient comes before the inputs from which its shape and dtype follow."""
    signature = """\
    dims: {H: N // 2}
    dtypes: {T: [float32, float16], U: [float32, float64]}
    inputs:
      mask: {dtype: int64, shape: "[*bcast(A, B)]"}
      grad: {dtype: "T if U == float64 else U", shape: "[*bcast(A, B), H]"}
      first: {dtype: T, shape: "[*A, N]"}
      second: {dtype: U, shape: "[*B]"}
    outputs: {y: {dtype: T, shape: "[N]"}}
    """
    check = Check(tmp_path, signature)
    given = {"grad": zeros(3, 2, 4), "first": zeros(3, 1, 8), "second": zeros(2),
             "mask": zeros(3, 2, dtype=torch.int64)}  # fmt: skip
    assert check.dims(given) == {"A": (3, 1), "B": (2,), "N": 8, "H": 4}
    error = check.refusal({**given, "grad": zeros(3, 2, 5)})
    assert (error.argument, error.accepted) == (
        "grad", "shape [*bcast(A, B), H] with A=[3, 1], B=[2], H=4",
    )  # fmt: skip
    error = check.refusal({**given, "mask": zeros(3, 1, dtype=torch.int64)})
    assert (error.argument, error.accepted) == (
        "mask", "shape [*bcast(A, B)] with A=[3, 1], B=[2]",
    )  # fmt: skip
    wide = {**given, "second": zeros(2, dtype=torch.float64)}
    assert check.dims(wide)
    half = zeros(3, 2, 4, dtype=torch.float16)
    assert "dtype float32" in check.refusal({**wide, "grad": half}).accepted


def test_a_list_that_is_chosen_by_presence(tmp_path):
    signature = """\
    dtypes: {T: [float32]}
    inputs:
      grad: {dtype: T, shape: "[*bcast(A, L)] if passed(low) else [*bcast(A, U)]"}
      x: {dtype: T, shape: "[*A]"}
      low: {dtype: T, shape: "[*L]", optional: true}
      high: {dtype: T, shape: "[*U]", optional: true}
    outputs: {y: {dtype: T, shape: "[*A]"}}
    """
    check = Check(tmp_path, signature)
    given = {"grad": zeros(2, 3), "x": zeros(1, 3)}
    assert check.dims({**given, "low": zeros(2, 1)})["L"] == (2, 1)
    assert check.dims({**given, "high": zeros(2, 3)})["U"] == (2, 3)
    assert check.refusal({**given, "low": zeros(4, 1)}).argument == "grad"
    error = check.refusal(given)
    assert (error.argument, error.given, error.accepted) == ("grad", "no U", "[*bcast(A, U)]")


def test_a_condition_on_a_dtype_chooses_a_list(tmp_path):
    signature = """\
    dtypes: {T: [float32, float16]}
    inputs: {x: {dtype: T, shape: "[N] if T == float16 else [N, 2]"}}
    outputs: {y: {dtype: "float32 if T == float16 else float64", shape: "[N]"}}
    """
    check = Check(tmp_path, signature)
    (output,), dims, _ = check({"x": zeros(3, dtype=torch.float16)})
    assert (output, dims) == (((3,), torch.float32), {"N": 3})
    assert check({"x": zeros(3, 2)})[0] == (((3,), torch.float64),)
    assert check.refusal({"x": zeros(3)}).accepted == "shape [N, 2]"


@pytest.mark.parametrize("spelled", ["bcast(A, B)", "bcast (A, B)"])
def test_broadcasting(tmp_path, spelled):
    signature = f"""\
    dtypes: {{T: [float32]}}
    inputs: {{a: {{dtype: T, shape: "[*A]"}}, b: {{dtype: T, shape: "[*B]"}}}}
    outputs: {{y: {{dtype: T, shape: "[*{spelled}, 2]"}}}}
    """
    check = Check(tmp_path, signature)
    assert check.shapes({"a": zeros(4, 1, 3), "b": zeros(5, 1)}) == [(4, 5, 3, 2)]
    error = check.refusal({"a": zeros(4), "b": zeros(3)})
    assert (error.argument, error.given) == ("b", "shapes [4] and [3]")
    assert error.accepted == "shapes that broadcast"


@pytest.mark.parametrize("spelled", ["bcast(A, B)", "bcast (A, B)"])
def test_a_rule_on_broadcasting(tmp_path, spelled):
    signature = f"""\
    dtypes: {{T: [float32]}}
    inputs: {{a: {{dtype: T, shape: "[*A]"}}, b: {{dtype: T, shape: "[*B]"}}}}
    outputs: {{y: {{dtype: T, shape: "[*A]"}}}}
    rules: [{{require: "{spelled} == A", message: "b broadcasts to a", argument: b}}]
    """
    check = Check(tmp_path, signature)
    assert check.shapes({"a": zeros(4, 3), "b": zeros(4, 1)}) == [(4, 3)]
    for wider in (zeros(2, 1, 1), zeros(5, 1)):
        error = check.refusal({"a": zeros(4, 3), "b": wider})
        assert (error.argument, error.accepted) == ("b", "b broadcasts to a")


# ---- optional inputs ---------------------------------------------------------------------------------

OPTIONAL = """\
params: {rope: {type: bool, default: false}}
dtypes: {T: [float32, float16]}
inputs:
  x: {dtype: float32, shape: "[M]"}
  weight: {dtype: T, shape: "[N]", optional: true}
  bias: {dtype: T, shape: "[N]", optional: true}
  table: {dtype: "T if passed(weight) else float64", shape: "[K]", optional: rope}
  scale: {dtype: float32, shape: "[K]", optional: passed(table)}
outputs:
  y: {dtype: float32, shape: "[M]"}
  z: {dtype: float32, shape: "[N]", nullable: not passed(weight)}
"""


@pytest.fixture
def optional(tmp_path):
    return Check(tmp_path, OPTIONAL)


@pytest.mark.parametrize("weight", [None, 3])
@pytest.mark.parametrize("bias", [None, 3, 4])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_optional_inputs_share_dims_and_dtypes(optional, weight, bias, kind):
    given = {"x": zeros(2)}
    if weight is not None:
        given["weight"] = zeros(weight)
    if bias is not None:
        given["bias"] = zeros(bias, dtype=getattr(torch, kind))
    if weight is not None and bias == 4 and kind == "float32":
        assert optional.refusal(given).accepted == "shape [N] with N=3"
    elif weight is not None and bias is not None and kind == "float16":
        assert "as T of the earlier inputs" in optional.refusal(given).accepted
    else:
        assert optional.dims(given)["N"] == (weight or bias)
        assert optional.shapes(given)[1] == (None if weight is None else (3,))


def test_a_dim_that_no_input_gave_is_not_shown(optional):
    error = optional.refusal({"x": zeros(2), "bias": zeros(3, 1)})
    assert (error.argument, error.accepted) == ("bias", "shape [N]")


def test_inputs_passed_by_a_condition(optional):
    given = {"x": zeros(2)}
    error = optional.refusal(given, rope=True)
    assert (error.argument, error.given) == ("table", "nothing")
    assert error.accepted == "a torch.Tensor, because rope"
    given["table"] = zeros(5, dtype=torch.float64)
    error = optional.refusal(given)
    assert (error.given, error.accepted) == ("a tensor", "None, because not: rope")
    error = optional.refusal(given, rope=True)
    assert (error.argument, error.accepted) == ("scale", "a torch.Tensor, because passed(table)")
    given["scale"] = zeros(5)
    assert optional.dims(given, rope=True) == {"M": 2, "N": None, "K": 5}
    given["scale"] = zeros(6)
    assert optional.refusal(given, rope=True).accepted == "shape [K] with K=5"


def test_a_dtype_by_expression(optional):
    given = {"x": zeros(2), "table": zeros(5), "scale": zeros(5)}
    error = optional.refusal(given, rope=True)
    assert error.argument == "table"
    assert error.accepted == "dtype float64 (dtype T if passed(weight) else float64)"
    given["weight"] = zeros(3, dtype=torch.float16)
    assert "dtype float16" in optional.refusal(given, rope=True).accepted
    given["table"] = zeros(5, dtype=torch.float16)
    assert optional.dims(given, rope=True)["K"] == 5


def test_missing_and_foreign_arguments(optional):
    error = optional.refusal({})
    assert (error.argument, error.given, error.accepted) == ("x", "nothing", "a torch.Tensor")
    error = optional.refusal({"x": zeros(2), "weight": [1.0]})
    assert (error.argument, error.given) == ("weight", "builtins.list")
    assert error.accepted == "a torch.Tensor or None"


# ---- dtypes, devices, memory -------------------------------------------------------------------------

MEMORY = """\
params: {inplace: {type: bool, default: false}, other: {type: bool, default: false}}
dtypes: {T: [float32, float16]}
inputs:
  x: {dtype: T, shape: "[N]", mutated: "inplace or other"}
  y: {dtype: T, shape: "[N]", contiguous: true}
  host: {dtype: [int32, int64], shape: "[2]", device: cpu}
outputs:
  z: {dtype: T, shape: "[N]", buffer: out}
"""


@pytest.fixture
def memory(tmp_path):
    return Check(tmp_path, MEMORY)


def good(**changes) -> dict:
    return {"x": zeros(4), "y": zeros(4), "host": zeros(2, dtype=torch.int32), **changes}


def test_dtypes(memory):
    assert memory.dims(good()) == {"N": 4}
    assert memory.dims(good(host=zeros(2, dtype=torch.int64))) == {"N": 4}
    error = memory.refusal(good(x=zeros(4, dtype=torch.float64)))
    assert (error.given, error.accepted) == ("dtype float64", "dtype float16, float32")
    error = memory.refusal(good(y=zeros(4, dtype=torch.float16)))
    assert (error.argument, error.accepted) == ("y", "dtype float32 (dtype T)")
    error = memory.refusal(good(host=zeros(2)))
    assert (error.argument, error.accepted) == ("host", "dtype int32, int64")


def test_devices(memory):
    error = memory.refusal(good(y=zeros(4, device="meta")))
    assert (error.argument, error.given) == ("y", "device meta")
    assert error.accepted == "device cpu, where the others are"
    error = memory.refusal(good(host=zeros(2, dtype=torch.int32, device="meta")))
    assert (error.argument, error.accepted) == ("host", "a tensor on the CPU")
    meta = good(x=zeros(4, device="meta"), y=zeros(4, device="meta"))
    assert memory(meta)[2] == torch.device("meta"), "a host input does not say where the call runs"


def test_layouts_and_strides(memory):
    error = memory.refusal(good(x=zeros(4).to_sparse()))
    assert (error.argument, error.accepted) == ("x", "a strided tensor")
    assert memory.dims(good(x=zeros(8)[::2])) == {"N": 4}
    error = memory.refusal(good(y=zeros(8)[::2]))
    assert (error.argument, error.given) == ("y", "strides [2]")
    assert error.accepted == "a contiguous tensor"


@pytest.mark.parametrize("params", [{}, {"inplace": True}, {"other": True}])
def test_what_is_written_does_not_overlap_itself(memory, params):
    given = good(x=zeros(1).expand(4))
    if params:
        error = memory.refusal(given, **params)
        assert (error.argument, error.given) == ("x", "strides [0] (it overlaps itself)")
    else:
        assert memory.dims(given) == {"N": 4}
    one = zeros(1).as_strided((1,), (0,))
    assert memory.dims(good(x=one, y=zeros(1)), **params) == {"N": 1}


@pytest.mark.parametrize(
    ("out", "given", "accepted"),
    [
        (zeros(4, dtype=torch.float16), "dtype float16", "dtype float32"),
        (zeros(5), "shape [5]", "shape [4]"),
        (zeros(4, device="meta"), "device meta", "device cpu"),
        (zeros(8)[::2], "strides [2]", "a contiguous tensor"),
        (3, "builtins.int", "a torch.Tensor or None"),
    ],
)
def test_out(memory, out, given, accepted):
    assert memory(good(), zeros(4))[0] == (((4,), torch.float32),)
    error = memory.refusal(good(), out)
    assert (error.argument, error.given, error.accepted) == ("out", given, accepted)


# ---- rules -------------------------------------------------------------------------------------------


def test_rules(tmp_path):
    signature = """\
    params: {dim: {type: "int?", default: null}}
    dims: {R: N // 2}
    dtypes: {T: [float32, int8]}
    inputs: {x: {dtype: T, shape: "[*B, N]"}, w: {dtype: T, shape: "[N]", optional: true}}
    outputs: {}
    rules:
      - {require: "dim is None or dim > 0", message: "at construction", argument: x}
      - {require: "R > 1", message: "N is at least 4"}
      - {require: "N < 100", message: "N is small", argument: x}
      - {require: "T != int8 or passed(w)", message: "int8 needs w", argument: w}
      - {require: "dim is None or dim < len(B)", message: "dim is an axis"}
    """
    check = Check(tmp_path, signature)
    assert check.dims({"x": zeros(2, 4)})["R"] == 2
    assert check.dims({"x": zeros(2, 4)}, dim=-3)["R"] == 2, (
        "the constructor's rule is not repeated"
    )
    error = check.refusal({"x": zeros(2, 3)})
    assert (error.argument, error.given, error.accepted) == ("the call", "R=1", "N is at least 4")
    error = check.refusal({"x": zeros(2, 100)})
    assert (error.argument, error.given) == ("x", "N=100")
    error = check.refusal({"x": zeros(2, 4, dtype=torch.int8)})
    assert (error.argument, error.given) == ("w", "T=int8, w_passed=False")
    error = check.refusal({"x": zeros(2, 4)}, dim=1)
    assert (error.argument, error.given) == ("dim", "B=(2,), dim=1")


# ---- what compilation needs --------------------------------------------------------------------------


def fake_pair(signature, folder, sizes):
    """A check and fake tensors whose sizes are unbacked symbols."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    symbols = {}
    tensors = {}
    for name, dims in sizes.items():
        shape = []
        for dim in dims:
            if dim not in symbols:
                symbols[dim] = env.create_unbacked_symint()
                torch._check(symbols[dim] >= 0)
            shape.append(symbols[dim])
        with mode:
            tensors[name] = torch.empty(shape)
    return Check(folder, signature), mode, env, symbols, tensors


TWO = """\
inputs: {x: {dtype: float32, shape: "[M, N]"}, y: {dtype: float32, shape: "[N, 2*K]"}}
outputs: {z: {dtype: float32, shape: "[M, K]"}}
rules: [{require: "M > 3", message: "m"}]
"""


def test_unbacked_sizes_are_asserted_when_the_graph_runs(tmp_path):
    sizes = {"x": ("a", "b"), "y": ("c", "d")}
    check, mode, env, symbols, tensors = fake_pair(TWO, tmp_path, sizes)
    with mode:
        (output,), dims, _ = check(tensors)
    assert dims["M"].node.expr == symbols["a"].node.expr
    assert isinstance(output[0][1], torch.SymInt)
    asserted = {str(a.expr) for found in env.deferred_runtime_asserts.values() for a in found}
    assert any("Eq" in text and "Mod" not in text for text in asserted), asserted
    assert any("Mod" in text for text in asserted), asserted
    assert any("> 3" in text or "3 <" in text for text in asserted), asserted
    assert not env.guards


def test_one_symbol_asserts_nothing_about_itself(tmp_path):
    signature = """\
    inputs: {x: {dtype: float32, shape: "[N]"}, y: {dtype: float32, shape: "[N]"}}
    outputs: {z: {dtype: float32, shape: "[N]"}}
    """
    check, mode, env, symbols, tensors = fake_pair(signature, tmp_path, {"x": ("a",), "y": ("a",)})
    before = sum(map(len, env.deferred_runtime_asserts.values()))
    with mode:
        assert check.dims(tensors)["N"].node.expr == symbols["a"].node.expr
    assert sum(map(len, env.deferred_runtime_asserts.values())) == before


def test_the_source_can_be_read(tmp_path):
    check = Check(tmp_path, CONDITIONAL)
    source, _ = signature_source(check.entry)
    ast.parse(source)
    family = check.entry.family
    assert source.startswith(
        f"# Generated from {family}/manifest.yaml, entry ThingFwdOp: its check.\n"
    )
    name = check.function.__code__.co_filename
    assert name == f"tileops_generated/{family}/thing_fwd_op_signature.py"
    assert "".join(linecache.getlines(name)) == source
