"""Constructor parameters: what each type accepts, its normal form, and the key that it becomes.

A key must read back to the same values, equal parameters must give equal keys, and different
parameters different ones: it is by their keys that ops share kernels and compiled graphs.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests import entry_of
from tileops.engine.errors import CheckError
from tileops.engine.manifest.entry import Param
from tileops.engine.manifest.read import _param_type
from tileops.engine.signature import literal
from tileops.engine.signature.params import bind_params, key_of, normalise


@literal.literal_type
@dataclass(frozen=True)
class PaddedLayout:
    rows: int
    kind: str = "tight"
    scale: float = 1.0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unregistered:
    rows: int


class Mode(enum.StrEnum):
    ROPE = "rope"


class Count(enum.IntEnum):
    TWO = 2


class Index:
    def __index__(self):
        return 5


def normal(kind: str, value):
    param = Param("p", _param_type(kind), None, False, 1)
    return normalise("ThingFwdOp", param, value)


def same(a, b) -> bool:
    """Equal, of one type, NaN equal to itself, zeros by sign."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


ACCEPTED = [
    ("bool", True, True),
    ("int", 7, 7),
    ("int", -7, -7),
    ("int", np.int64(7), 7),
    ("int", np.uint8(7), 7),
    ("int", np.array(7), 7),
    ("int", Count.TWO, 2),
    ("int", Index(), 5),
    ("float", 0.5, 0.5),
    ("float", 1, 1.0),
    ("float", -0.0, -0.0),
    ("float", math.inf, math.inf),
    ("float", -math.inf, -math.inf),
    ("float", math.nan, math.nan),
    ("float", np.float32(0.5), 0.5),
    ("float", np.int8(2), 2.0),
    ("float", Fraction(1, 4), 0.25),
    ("int|float", 1, 1),
    ("int|float", 1.0, 1.0),
    ("int|float", np.int32(1), 1),
    ("int|float", np.float64(1), 1.0),
    ("number", True, True),
    ("number", 2, 2),
    ("number", 2.0, 2.0),
    ("number", np.int16(2), 2),
    ("str", "word", "word"),
    ("str", Mode.ROPE, "rope"),
    ("str", np.str_("word"), "word"),
    ("enum(none,rope)", "rope", "rope"),
    ("enum(none,rope)", Mode.ROPE, "rope"),
    ("dtype", torch.int8, torch.int8),
    ("dtype", torch.complex64, torch.complex64),
    ("dtype", "bfloat16", torch.bfloat16),
    ("dtype(float16,bool)", torch.bool, torch.bool),
    ("device", "cpu", torch.device("cpu")),
    ("device", torch.device("cuda", 1), torch.device("cuda", 1)),
    ("ints", 4, (4,)),
    ("axes", -1, (-1,)),
    ("axes", [2, -1], (2, -1)),
    ("axes", (), ()),
    ("ints", [4, 5], (4, 5)),
    ("ints", (), ()),
    ("ints", torch.Size([4]), (4,)),
    ("ints", [np.int64(4)], (4,)),
    ("floats", [1, 0.5], (1.0, 0.5)),
    ("floats", (), ()),
    ("floats", (np.float32(0.5),), (0.5,)),
    ("floats", torch.tensor([0.1], dtype=torch.bfloat16), (0.10009765625,)),
    ("int[2]", 3, (3, 3)),
    ("int[2]", [3, 4], (3, 4)),
    ("int|int[2]", 3, 3),
    ("PaddedLayout", PaddedLayout(3), PaddedLayout(3)),
    ("PaddedLayout", "PaddedLayout(rows=3)", PaddedLayout(3)),
    ("float?", None, None),
]


@pytest.mark.parametrize(("kind", "value", "wanted"), ACCEPTED)
def test_normal_forms(kind, value, wanted):
    result = normal(kind, value)
    assert same(result, wanted), (result, type(result))
    assert same(normal(kind, result), result), "normalising twice changes nothing"


REJECTED = [
    ("bool", 1, "1 (int)", "a bool"),
    ("bool", None, "None (NoneType)", "a bool"),
    ("int", True, "True (bool)", "a int"),
    ("int", np.True_, None, "a int"),
    ("int", 1.0, "1.0 (float)", "a int"),
    ("int", "1", "'1' (str)", "a int"),
    ("int", torch.tensor(1), None, "a int"),
    ("float", True, "True (bool)", "a float"),
    ("float", "0.5", "'0.5' (str)", "a float"),
    ("float", torch.tensor(0.5), None, "a float"),
    ("float", np.array([1.0, 2.0]), None, "a float"),
    ("float", 10**400, None, "a float"),
    ("float", 1j, "1j (complex)", "a float"),
    ("float?", "x", "'x' (str)", "a float or None"),
    ("number", "2", "'2' (str)", "a number"),
    ("str", 3, "3 (int)", "a str"),
    ("enum(none,rope)", "rop", "'rop' (str)", "one of 'none', 'rope'"),
    ("enum(none,rope)", 0, "0 (int)", "one of 'none', 'rope'"),
    ("dtype", "half", "'half' (str)", "a torch dtype"),
    ("dtype(float16,int8)", torch.float32, "torch.float32 (dtype)", "a torch dtype (float16, int8)"),
    ("device", "nowhere", "'nowhere' (str)", "a device"),
    ("device", True, "True (bool)", "a device"),
    ("axes", True, "True (bool)", "an axis (int), or a list or tuple of axes"),
    ("axes", [0.0], "[0.0] (list)", "axes"),
    ("ints", -1, "-1 (int)", "a list or tuple of non-negative ints, or one int"),
    ("ints", [1, -1], "[1, -1] (list)", "non-negative"),
    ("ints", [True], "[True] (list)", "ints"),
    ("ints", [1.0], "[1.0] (list)", "ints"),
    ("ints", {1}, "{1} (set)", "ints"),
    ("ints", "12", "'12' (str)", "ints"),
    ("floats", 1.0, "1.0 (float)", "a list, a tuple or a 1-d tensor of real numbers"),
    ("floats", [True], "[True] (list)", "real numbers"),
    ("floats", ["1"], "['1'] (list)", "real numbers"),
    ("floats", torch.ones(1, 2), None, "a 1-d tensor"),
    ("floats", torch.tensor([1]), None, "real numbers"),
    ("int[2]", [1, 2, 3], "[1, 2, 3] (list)", "2 ints"),
    ("PaddedLayout", Unregistered(3), "Unregistered(rows=3) (Unregistered)", "a PaddedLayout"),
    ("PaddedLayout", "Unregistered(rows=3)", None, "a PaddedLayout"),
    ("PaddedLayout", "rows", None, "a PaddedLayout"),
    ("int|enum(a)?", 2.5, "2.5 (float)", "a int or one of 'a' or None"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "given", "accepted"), REJECTED)
def test_refused_values(kind, value, given, accepted):
    with pytest.raises(CheckError) as caught:
        normal(kind, value)
    error = caught.value
    assert (error.op, error.argument) == ("ThingFwdOp", "p")
    assert given is None or error.given == given
    assert accepted in error.accepted


# ---- keys ----------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"))
VALUES = {
    "bool": st.booleans(),
    "int": st.integers(-(2**70), 2**70),
    "float": st.floats(),
    "number": st.one_of(st.booleans(), st.integers(), st.floats()),
    "str": TEXT,
    "enum(none,rope)": st.sampled_from(["none", "rope"]),
    "dtype(float16,int8,bool,float8_e4m3fn)": st.sampled_from(
        [torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn]
    ),
    "device": st.sampled_from(["cpu", "cuda", "cuda:3", "meta"]),
    "ints": st.lists(st.integers(0, 2**70)),
    "floats": st.lists(st.floats()),
    "int[3]": st.lists(st.integers(0, 99), min_size=3, max_size=3),
    "PaddedLayout": st.builds(
        PaddedLayout, st.integers(), TEXT, st.floats(), st.lists(st.integers()).map(tuple)
    ),
    "float?": st.none(),
}


@pytest.mark.parametrize("kind", VALUES)
def test_every_type_reads_back_as_written(kind):
    @settings(max_examples=60, deadline=None)
    @given(VALUES[kind])
    def check(value):
        value = normal(kind, value)
        key, canonical = key_of("ThingFwdOp", {"p": value}, None)
        assert canonical
        name, params = literal.read_call(key)
        assert name == "ThingFwdOp"
        again = normal(kind, params["p"])
        if isinstance(value, PaddedLayout):
            assert repr(again) == repr(value)
        else:
            assert same(again, value)
        assert key_of("ThingFwdOp", {"p": again}, None)[0] == key

    check()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(VALUES)), st.data())
def test_different_values_have_different_keys(kind, data):
    one, other = (normal(kind, data.draw(VALUES[kind])) for _ in range(2))
    keys = {key_of("ThingFwdOp", {"p": value}, None)[0] for value in (one, other)}
    equal = repr(one) == repr(other) if isinstance(one, PaddedLayout) else same(one, other)
    assert len(keys) == (1 if equal else 2)


def test_keys_are_what_the_design_says():
    params = {
        "normalized_shape": (4096,), "eps": 1e-6, "flag": True, "mode": "it's", "none": None,
        "dtype": torch.float16, "boolean": torch.bool, "device": torch.device("cuda:1"),
        "layout": PaddedLayout(3, sizes=(1, 2)), "low": -math.inf, "zero": -0.0, "nan": -math.nan,
    }  # fmt: skip
    key, canonical = key_of("RMSNormFwdOp", params, "mine")
    assert key == (
        'RMSNormFwdOp(normalized_shape=(4096,), eps=1e-06, flag=True, mode="it\'s", none=None, '
        "dtype=float16, boolean=dtype_bool, device='cuda:1', "
        "layout=PaddedLayout(rows=3, kind='tight', scale=1.0, sizes=(1, 2)), low=-inf, zero=-0.0, "
        "nan=nan, target='mine')"
    )
    assert canonical
    _, again = literal.read_call(key)
    assert again.pop("target") == "mine"
    assert list(again) == list(params)


def test_a_value_without_a_literal_makes_the_key_unique():
    for value in (object(), Unregistered(1), torch.complex32, [1], {"a": 1}, np.float32(1)):
        keys = [key_of("ThingFwdOp", {"p": value}, None) for _ in range(2)]
        assert keys[0][0] != keys[1][0]
        assert not keys[0][1]
        assert "=<object " in keys[0][0]
    with pytest.raises(literal.NoLiteralError, match="Unregistered has no literal form"):
        literal.write((1, Unregistered(1)))


@pytest.mark.parametrize(
    "text",
    ["f()", "Unknown(rows=1)", "PaddedLayout(1)", "1 + 1", "a", "[x for x in y]", "b'x'", "1j", "-True",
     "-'x'", "{1: 2}", "__import__('os')", "PaddedLayout.__init__", "(", "", "...", "f'{1}'",
     "(" * 300 + ")" * 300, "-" * 5000 + "1"],
)  # fmt: skip
def test_text_that_is_no_literal(text):
    with pytest.raises(ValueError, match="literal"):
        literal.read(text)


@pytest.mark.parametrize("text", ["a", "a.b(c=1)", "f(1)", "f(a=1", "f()()", "(" * 300])
def test_text_that_is_no_key(text):
    with pytest.raises(ValueError, match="not of the form Name"):
        literal.read_call(text)


def test_what_may_be_a_literal_type():
    with pytest.raises(TypeError, match="must be a frozen dataclass"):
        literal.literal_type(type("Plain", (), {}))
    with pytest.raises(TypeError, match="must be a frozen dataclass"):
        literal.literal_type(dataclass(type("Thawed", (), {})))
    other = dataclass(frozen=True)(type("PaddedLayout", (), {"__module__": "elsewhere"}))
    with pytest.raises(TypeError, match="the name PaddedLayout is taken by"):
        literal.literal_type(other)
    # A module that is loaded again defines the same class again.
    again = dataclass(frozen=True)(
        type("PaddedLayout", (), {"__module__": PaddedLayout.__module__, "__annotations__": {}})
    )
    try:
        assert literal.literal_type(again) is again
    finally:
        literal.literal_types["PaddedLayout"] = PaddedLayout


# ---- binding -------------------------------------------------------------------------------------


@pytest.fixture
def entry(tmp_path):
    signature = """\
    params:
      size: {type: ints}
      eps: {type: "float?", default: null}
      mode: {type: "enum(a,b)", default: a, kw_only: true}
      dtype: {type: dtype, default: float16, kw_only: true}
    inputs: {}
    outputs: {y: {dtype: dtype, shape: "[*size]"}}
    """
    return entry_of(tmp_path, signature)


def test_binding_fills_defaults_in_manifest_order(entry):
    bound = bind_params(entry, ([3],), {"dtype": "int8"})
    assert list(bound.items()) == [
        ("size", (3,)), ("eps", None), ("mode", "a"), ("dtype", torch.int8)
    ]  # fmt: skip
    assert bind_params(entry, (3, 1), {})["eps"] == 1.0
    assert bind_params(entry, (), {"size": 3})["dtype"] is torch.float16


@pytest.mark.parametrize(
    ("args", "kwargs", "argument", "given", "accepted"),
    [
        ((), {}, "size", "nothing", "a list or tuple of non-negative ints"),
        ((1, 2, 3), {}, "positional 3", "3", "2 positional parameters (size, eps)"),
        ((1,), {"sise": 2}, "sise", "2", "the parameters size, eps, mode, dtype"),
        ((1,), {"size": 2}, "size", "it twice", "one value"),
        ((1,), {"mode": "c"}, "mode", "'c' (str)", "one of 'a', 'b'"),
    ],
)
def test_binding_names_the_parameter(entry, args, kwargs, argument, given, accepted):
    with pytest.raises(CheckError) as caught:
        bind_params(entry, args, kwargs)
    error = caught.value
    assert (error.op, error.argument, error.given) == ("ThingFwdOp", argument, given)
    assert accepted in error.accepted
    assert isinstance(error, ValueError)
    assert (
        str(error)
        == f"ThingFwdOp: argument '{argument}': given {given}; accepted: {error.accepted}"
    )


def test_an_op_without_parameters(tmp_path):
    entry = entry_of(tmp_path, "inputs: {}\noutputs: {}\n")
    assert bind_params(entry, (), {}) == {}
    with pytest.raises(CheckError, match="accepted: the parameters none"):
        bind_params(entry, (), {"a": 1})


def test_equal_ops_have_equal_keys_and_are_equal():
    from tileops.norm import RMSNormFwdOp

    spellings = [
        RMSNormFwdOp(64),
        RMSNormFwdOp([64], None),
        RMSNormFwdOp(normalized_shape=(np.int64(64),)),
        RMSNormFwdOp(eps=None, normalized_shape=torch.Size([64])),
    ]
    assert {repr(op) for op in spellings} == {"RMSNormFwdOp(normalized_shape=(64,), eps=None)"}
    assert len(set(spellings)) == 1
    assert all(op == spellings[0] for op in spellings)
    different = [RMSNormFwdOp(64, 1e-6), RMSNormFwdOp((64, 1)), RMSNormFwdOp(64, target="builtin")]
    assert len({*different, spellings[0]}) == 4
    assert all(op != spellings[0] for op in different)
    assert spellings[0] != SimpleNamespace()


def test_rules_on_parameters_alone_hold_at_construction():
    from tileops.norm import RMSNormFwdOp

    with pytest.raises(CheckError, match="names at least one dimension"):
        RMSNormFwdOp(())


def test_a_rule_may_name_a_dtype(tmp_path):
    from tileops.engine.signature.construction import make_constructor_check

    signature = """\
    params: {dtype: {type: dtype}}
    inputs: {}
    outputs: {}
    rules:
      - {require: "dtype != float16", message: "float16 is too small"}
      - {require: "1 == 1", message: "never"}
    """
    check = make_constructor_check(entry_of(tmp_path, signature))
    check({"dtype": torch.float32})
    with pytest.raises(CheckError) as caught:
        check({"dtype": torch.float16})
    assert caught.value.argument == "dtype"
    assert caught.value.given == "dtype=float16"
    assert caught.value.accepted == "float16 is too small"


def test_a_rule_may_name_nothing(tmp_path):
    from tileops.engine.signature.construction import make_constructor_check

    signature = "inputs: {}\noutputs: {}\nrules: [{require: false, message: not today}]\n"
    with pytest.raises(CheckError) as caught:
        make_constructor_check(entry_of(tmp_path, signature))({})
    assert (caught.value.argument, caught.value.accepted) == ("the constructor", "not today")
