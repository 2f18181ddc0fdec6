"""The quantization family on the CPU: against exact fractions, PyTorch in float64, and its edges."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import call, check, exact, strided
from tileops import CheckError, quantization
from tileops.engine.errors import BackwardError
from tileops.quantization import (
    FP8QuantPerBlockFwdOp,
    FP8QuantPerTokenGroupFwdOp,
    INT8DequantPerBlockFwdOp,
    INT8DequantPerChannelFwdOp,
    INT8DequantPerTensorFwdOp,
    INT8QuantPerChannelFwdOp,
    INT8QuantPerTensorFwdOp,
    INT8QuantPerTokenGroupFwdOp,
    SmoothQuantFwdOp,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
QUANTISING = [
    FP8QuantPerBlockFwdOp,
    FP8QuantPerTokenGroupFwdOp,
    INT8QuantPerChannelFwdOp,
    INT8QuantPerTensorFwdOp,
    INT8QuantPerTokenGroupFwdOp,
    SmoothQuantFwdOp,
]
DEQUANTISING = [
    INT8DequantPerBlockFwdOp,
    INT8DequantPerChannelFwdOp,
    INT8DequantPerTensorFwdOp,
]
BY_ROWS = [INT8QuantPerChannelFwdOp, FP8QuantPerTokenGroupFwdOp]


def made(cls, shape, dtype, **params):
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1).mul(20).sub(10).exp2()
    inputs = {cls.entry.inputs[0].name: x.to(dtype)}
    if cls is SmoothQuantFwdOp:
        inputs["smooth"] = torch.rand(shape[-1]) + 0.25
    return cls(**params), inputs


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cls", QUANTISING)
def test_shapes(cls, dtype):
    for shape in [(1, 1), (3, 5), (0, 4), (2, 128), (131, 257)]:
        if 0 not in shape or cls is not INT8QuantPerTensorFwdOp:
            check(*made(cls, shape, dtype))
    if cls is not FP8QuantPerBlockFwdOp:
        for shape in [(7,), (2, 3, 131), (2, 1, 3, 64)]:
            check(*made(cls, shape, dtype))


@pytest.mark.parametrize("cls", QUANTISING)
def test_strides(cls):
    op, inputs = made(cls, (6, 10) if cls is FP8QuantPerBlockFwdOp else (3, 4, 6), torch.float32)
    for name, tensor in inputs.items():
        for _, view in strided(tensor):
            check(op, {**inputs, name: view})


def nearest(value):
    """The float32 nearest to a fraction, halves to even, as a fraction."""
    if not value:
        return value
    exponent = math.floor(math.log2(abs(value)))
    exponent -= abs(value) < Fraction(2) ** exponent
    exponent += abs(value) >= Fraction(2) ** (exponent + 1)
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / unit) * unit


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(1 << 12), 1 << 12), min_size=1, max_size=9), st.integers(-12, 12))
def test_int8_in_fractions(numbers, exponent):
    """Every step by hand, for rows with many quotients that lie between two integers."""
    row = [Fraction(n) * Fraction(2) ** exponent for n in numbers]
    largest = max([abs(v) for v in row] + [Fraction(float(torch.tensor(1e-10)))])
    scale = nearest(largest / 127)
    wanted = [round(nearest(v / scale)) for v in row]
    x = torch.tensor([float(v) for v in row])
    q, given_scale = INT8QuantPerChannelFwdOp()(x)
    assert q.tolist() == wanted
    assert Fraction(given_scale.item()) == scale


@pytest.mark.parametrize("cls", QUANTISING)
def test_what_comes_back(cls):
    """Half a step off, at most: of the largest for int8; for float8 a 16th of itself, or half of its
    subnormals'; the largest is met."""
    op, inputs = made(cls, (256, 384), torch.float32)
    x = inputs.get("x", inputs.get("w")).double()
    if cls is SmoothQuantFwdOp:
        x = x / inputs["smooth"].double()
    q, scale = call(op, inputs)
    apart = {INT8QuantPerTokenGroupFwdOp: (1, 128), FP8QuantPerBlockFwdOp: (128, 128)}
    if cls is INT8QuantPerTensorFwdOp:
        scale = scale.view(1, 1)
    elif cls in apart:
        for axis, size in enumerate(apart[cls]):
            scale = scale.repeat_interleave(size, axis)
    else:
        scale = scale.unsqueeze(-1)
    back, scale = q.double() * scale.double(), scale.double().expand(256, 384)
    step = scale if q.dtype is torch.int8 else torch.maximum(x.abs() / 8, scale * 2.0**-9)
    assert ((back - x).abs() <= step / 2 * (1 + 1e-5)).all()
    largest = 127 if q.dtype is torch.int8 else 448
    assert q.float().abs().amax() == largest


@pytest.mark.parametrize("cls", BY_ROWS)
def test_a_row_does_not_depend_on_its_neighbours(cls):
    op, inputs = made(cls, (40, 96), torch.bfloat16)
    (x,) = inputs.values()
    q, scale = op(x)
    for n in (0, 17, 39):
        one, its = op(x[n])
        assert torch.equal(one.view(torch.int8), q[n].view(torch.int8))
        assert torch.equal(its, scale[n])


def test_groups_are_rows_of_a_view():
    x = torch.randn(5, 512)
    q, scale = INT8QuantPerTokenGroupFwdOp()(x)
    other, its = INT8QuantPerChannelFwdOp()(x.view(5, 4, 128))
    assert torch.equal(q, other.view(5, 512))
    assert torch.equal(scale, its)


# ---- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", QUANTISING)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity(cls, value):
    x = torch.randn(1, 8)
    x[0, 3] = value
    inputs = {cls.entry.inputs[0].name: x}
    if cls is SmoothQuantFwdOp:
        inputs["smooth"] = torch.ones(8)
    q, scale = check(cls(), inputs)
    numbers = q.float().flatten()
    assert scale.isnan().all() if math.isnan(value) else scale.isinf().all()
    if q.dtype is torch.int8:
        assert not numbers.any()
    elif math.isnan(value):
        assert numbers.isnan().all()
    else:
        assert numbers.isnan().tolist() == [n == 3 for n in range(8)]
        assert not numbers.nan_to_num().any()


@pytest.mark.parametrize("cls", QUANTISING)
def test_zeros(cls):
    x = torch.zeros(2, 8)
    more = [torch.ones(8)] if cls is SmoothQuantFwdOp else []
    least = torch.tensor(cls().eps)
    q, scale = cls()(x, *more)
    top = 127.0 if q.dtype is torch.int8 else 448.0
    assert not q.float().any()
    assert (scale == least / top).all()
    q, scale = cls(eps=0.0)(x, *more)
    assert not scale.any()
    assert not q.any() if q.dtype is torch.int8 else q.float().isnan().all()


@pytest.mark.parametrize("cls", BY_ROWS)
def test_least_magnitude(cls):
    """Of rows that are smaller than eps it is the largest."""
    op, x = cls(eps=2.0), torch.tensor([[1.0, -0.5], [4.0, 1.0]])
    q, scale = check(op, {cls.entry.inputs[0].name: x})
    top = 127.0 if q.dtype is torch.int8 else 448.0
    assert torch.equal(scale, torch.tensor([2.0, 4.0]) / top)
    assert q[0].float().abs().max() <= top / 2 + 1


@pytest.mark.parametrize("cls", QUANTISING)
@pytest.mark.parametrize("eps", [-1e-10, math.nan, math.inf, 1e39])
def test_domain(cls, eps):
    with pytest.raises(CheckError, match="eps is not negative and fits float32"):
        cls(eps=eps)


def test_what_has_no_largest_number_is_refused():
    with pytest.raises(CheckError, match="a row has at least one element"):
        INT8QuantPerChannelFwdOp()(torch.ones(3, 0))
    with pytest.raises(CheckError, match="there is at least one element"):
        INT8QuantPerTensorFwdOp()(torch.ones(0, 3))
    with pytest.raises(CheckError, match="a group has at least one element"):
        FP8QuantPerTokenGroupFwdOp()(torch.ones(3, 0))


@pytest.mark.parametrize("cls", QUANTISING)
def test_nothing_has_a_gradient(cls):
    op, inputs = made(cls, (4, 8), torch.float32)
    q, scale = call(op, {name: tensor.requires_grad_() for name, tensor in inputs.items()})
    assert not q.requires_grad or q.is_floating_point()
    with pytest.raises(BackwardError, match="declares no backward for argument"):
        scale.sum().backward()


def test_every_op_is_here():
    assert {cls.__name__ for cls in [*QUANTISING, *DEQUANTISING]} == set(dir(quantization))


# ---- back ----------------------------------------------------------------------------------------


def numbers(cls, shape, dtype):
    """An op that dequantises, and its inputs."""
    scales = {
        INT8DequantPerTensorFwdOp: (1,),
        INT8DequantPerChannelFwdOp: shape[:-1],
        INT8DequantPerBlockFwdOp: (*shape[:-1], math.ceil(shape[-1] / 128)),
    }
    q = torch.randint(-128, 128, shape, dtype=torch.int8)
    return cls(dtype), {"q": q, "scale": torch.rand(scales[cls]) + 0.01}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cls", DEQUANTISING)
def test_back(cls, dtype):
    """To the bit: a product in float32, rounded."""
    for shape in [(1, 1), (3, 5), (0, 4), (7,), (2, 3, 257), (130, 128)]:
        op, inputs = numbers(cls, shape, dtype)
        x = check(op, inputs)
        (wanted,), _ = exact(op, inputs)
        assert torch.equal(x, wanted.float().to(dtype))


@pytest.mark.parametrize("cls", DEQUANTISING)
def test_back_of_strides(cls):
    op, inputs = numbers(cls, (3, 4, 6), torch.float32)
    for name, tensor in inputs.items():
        for _, view in strided(tensor):
            check(op, {**inputs, name: view})


@pytest.mark.parametrize(
    ("quantise", "dequantise"),
    [
        (INT8QuantPerTensorFwdOp, INT8DequantPerTensorFwdOp),
        (INT8QuantPerChannelFwdOp, INT8DequantPerChannelFwdOp),
        (INT8QuantPerTokenGroupFwdOp, INT8DequantPerBlockFwdOp),
    ],
)
def test_there_and_back(quantise, dequantise):
    """The scales fit; a number is off by half a step."""
    x = torch.randn(5, 300)
    q, scale = quantise()(x)
    back = dequantise(torch.float32)(q, scale)
    assert ((back - x).abs() <= scale.max() / 2 * (1 + 1e-5)).all()


def test_dtypes_of_numbers():
    with pytest.raises(CheckError, match="out_dtype"):
        INT8DequantPerTensorFwdOp(torch.int8)
