"""Pointwise ops on the CPU: special values of each, dropout's contract, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import op_classes
from tests.oracle import check, strided
from tests.oracle_elementwise import philox_word
from tileops import CheckError
from tileops.elementwise import (
    ClampScalarFwdOp,
    ClampTensorFwdOp,
    DropoutFwdOp,
    HardtanhFwdOp,
    MaskedFillScalarFwdOp,
    MaskedFillTensorFwdOp,
    MulFwdOp,
    NegFwdOp,
    PReLUFwdOp,
    ReciprocalFwdOp,
    ReLUFwdOp,
    RoundFwdOp,
    SubFwdOp,
    WhereFwdOp,
)
from tileops.elementwise.kernels.dropout_cpu import CHUNK

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
# No infinities: what torch 2.13 gives for those on the CPU is not what it gives elsewhere.
SPECIALS = [0.0, -0.0, math.nan, 1.0, -1.0, 0.5, -2.5, 3.0, -3.0, 20.0, -88.0, 1e-6, -1e-6, 1e4]


def unary_and_binary():
    for name, cls in op_classes().items():
        if cls.entry.family == "elementwise" and "float32" in cls.entry.dtypes.get("T", ()):
            tensors = [item for item in cls.entry.inputs if item.dtype is not None]
            if name not in ("DropoutFwdOp", "PReLUFwdOp") and "AndMul" not in name:
                yield pytest.param(cls, tensors, id=name)


@pytest.mark.parametrize(("cls", "tensors"), list(unary_and_binary()))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_special_values(cls, tensors, dtype):
    op = cls(min=-1, max=2) if cls is ClampScalarFwdOp else cls()
    one = torch.tensor(SPECIALS).to(dtype)
    inputs = {item.name: torch.arange(len(one)) % 2 == 0 for item in op.entry.inputs}
    first, second = torch.meshgrid(one, one, indexing="ij")
    for item, value in zip(tensors, (first, second, second.flip(1)), strict=False):
        scalar = cls is MaskedFillTensorFwdOp and item.name == "value"
        inputs[item.name] = torch.tensor(2.0).to(dtype) if scalar else value
    check(op, inputs)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_at_their_ends(dtype):
    info = torch.iinfo(dtype)
    ends = torch.tensor([info.min, info.max, 0, 1, info.max - 1], dtype=dtype)
    for op in (
        op_classes()["AbsFwdOp"](),
        NegFwdOp(),
        op_classes()["SignFwdOp"](),
        ReciprocalFwdOp(),
    ):
        check(op, {"input": ends})
    check(SubFwdOp(), {"input": ends[:, None], "other": ends})


def test_strides():
    x = torch.randn(3, 4, 6)
    for _, view in strided(x):
        check(ReLUFwdOp(), {"input": view})
        check(ReLUFwdOp(inplace=True), {"input": view})
        check(WhereFwdOp(), {"condition": view > 0, "input": view, "other": x[:1]})


IN_PLACE = [name for name, cls in op_classes().items() if cls.entry.family == "elementwise"
            and any(param.name == "inplace" for param in cls.entry.params)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_the_same_and_takes_no_second_pass(name, dtype):
    params = {"seed": 3} if name == "DropoutFwdOp" else {}
    made, op = op_classes()[name](**params), op_classes()[name](**params, inplace=True)
    for _, x in strided((torch.randn(3, 4, 6) * 4).to(dtype)):
        wanted = made(x)
        assert op(x) is x
        assert torch.equal(x, wanted)
    assert op.last_call.kernel in ("aten_in_place", "chunked_dropout")


sizes = st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sizes, st.data())
def test_any_shapes(shape, data):
    pair = []
    for _ in range(2):
        kept = [data.draw(st.sampled_from([size, 1])) for size in shape]
        pair.append(tuple(kept[data.draw(st.integers(0, len(kept))) :]))
    a, b = (torch.randint(-9, 9, s, dtype=torch.int32) for s in pair)
    result = MulFwdOp()(a, b)
    assert torch.equal(result, (a.long() * b.long()).int())


# ---- dropout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout(p):
    for dtype in (torch.float16, torch.float64):
        for seed in (0, 2**63 - 1):
            check(DropoutFwdOp(p=p, seed=seed), {"input": torch.randn(7, 5).to(dtype)})
    x = torch.randn(9)
    assert torch.equal(DropoutFwdOp(p=p, training=False)(x), x)


def test_a_word_of_philox():
    # The first known answer of the authors' own test vectors, for a counter and a key of zeros.
    assert [philox_word(0, n) for n in range(4)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_dropout_of_more_than_a_chunk():
    """An element's word is that of its place, not of its place in a chunk."""
    x, places = torch.ones(CHUNK + 5), [0, 1, CHUNK - 1, *range(CHUNK, CHUNK + 5)]
    result = DropoutFwdOp(p=0.5, seed=11)(x)
    assert [float(result[n]) != 0 for n in places] == [philox_word(11, n) >= 2**31 for n in places]
    assert torch.equal(DropoutFwdOp(p=0.5, seed=11, inplace=True)(x), result)


def test_dropout_keeps_as_many_as_it_says_and_each_by_itself():
    x = torch.ones(200_000)
    for seed in (None, 3):
        kept = DropoutFwdOp(p=0.3, seed=seed)(x) != 0
        # 5 standard deviations of a mean, here and below.
        assert abs(kept.double().mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / len(x))
        for lag in (1, 2, 4, 1024):
            both = (kept[:-lag] & kept[lag:]).double().mean()
            assert abs(both - 0.49) < 5 * math.sqrt(0.49 * 0.51 / (len(x) - lag))
    other = DropoutFwdOp(p=0.3, seed=4)(x) != 0
    assert abs((kept & other).double().mean() - 0.49) < 5 * math.sqrt(0.49 * 0.51 / len(x))


def test_dropout_without_a_seed_follows_the_generator():
    op, x = DropoutFwdOp(), torch.ones(1000)
    assert not torch.equal(op(x), op(x))
    torch.manual_seed(5)
    first = op(x)
    torch.manual_seed(5)
    assert torch.equal(op(x), first)
    run = torch.compile(lambda t: (op(t), op(t)), fullgraph=True, backend="aot_eager")
    left, right = run(x)
    assert not torch.equal(left, right), "two calls became one"
    with pytest.raises(CheckError, match="seed"):  # what a default gradient would run again
        op.decomposition(x.requires_grad_(), 0.5, True, inplace=False, seed=None)


# ---- what is refused ---------------------------------------------------------------------------------


def test_domains():
    x, halves, whole = torch.randn(2, 3), torch.randn(3).half(), torch.arange(3)
    for make, words in (
        (lambda: DropoutFwdOp(p=1.5), "0 to 1"),
        (lambda: DropoutFwdOp(seed=-1), "seed"),
        (lambda: HardtanhFwdOp(min_val=2.0, max_val=1.0), "at most"),
        (lambda: HardtanhFwdOp(max_val=1e6)(halves), "fits T"),
        (lambda: ClampScalarFwdOp(), "min, max or both"),
        (lambda: ClampTensorFwdOp()(x), "min, max or both"),
        (lambda: ClampTensorFwdOp()(x, torch.randn(4)), "broadcast"),
        (lambda: MaskedFillScalarFwdOp(value=0.5)(whole, whole > 1), "integer"),
        (lambda: MaskedFillScalarFwdOp(value=300)(whole.to(torch.uint8), whole > 1), "fits T"),
        (lambda: PReLUFwdOp()(x, torch.rand(2)), "axis 1"),
        (lambda: RoundFwdOp(decimals=1)(whole), "decimals"),
        (lambda: SubFwdOp()(whole > 1, whole > 1), "dtype"),
    ):
        with pytest.raises(CheckError, match=words):
            make()
    # A bound that is whole may be written as a float, as the default is.
    assert torch.equal(MaskedFillScalarFwdOp()(whole, whole > 1), torch.tensor([0, 1, 0]))
