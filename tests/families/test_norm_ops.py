"""The norm ops beside RMSNorm, LayerNorm and BatchNorm, on the CPU against float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import check, strided
from tileops import CheckError
from tileops.norm import (
    AdaLayerNormFwdOp,
    AdaLayerNormZeroFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormPerTokenQuantFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
QUANT = FusedAddRMSNormPerTokenQuantFwdOp
ROWS = {
    AdaLayerNormFwdOp: (("x", "scale", "shift"), ()),
    AdaLayerNormZeroFwdOp: (("x", "scale", "shift", "gate"), ()),
    FusedAddLayerNormFwdOp: (("x", "residual"), ("weight", "bias")),
    QUANT: (("input", "residual"), ("weight",)),
}


def made(cls, shape, dtype):
    rows, vectors = ROWS[cls]
    inputs = {name: torch.randn(shape).to(dtype) for name in rows}
    return cls(eps=1e-3), inputs | {name: torch.randn(shape[-1]).to(dtype) for name in vectors}


# ---- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", ROWS)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 5), (37, 41), (0, 4), (5, 1031)])
def test_rows(shape, cls, dtype):
    if cls is QUANT and dtype is torch.float64:
        pytest.skip("not accepted")
    check(*made(cls, shape, dtype))


@pytest.mark.parametrize("cls", ROWS)
def test_strides(cls):
    op, inputs = made(cls, (3, 4, 6), torch.float32)
    for name, tensor in inputs.items():
        for _, view in strided(tensor):
            check(op, {**inputs, name: view})


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    cls=st.sampled_from(list(ROWS)),
    lead=st.lists(st.integers(0, 5), max_size=3),
    length=st.integers(3, 50),
    step=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES[:3]),
)
def test_any_shape_and_stride(cls, lead, length, step, dtype):
    op, inputs = made(cls, (*lead, length), dtype)
    for name, tensor in inputs.items():
        room = tensor.new_empty((*tensor.shape[:-1], length * step + 1))
        inputs[name] = room[..., 1 : length * step + 1 : step].copy_(tensor)
    check(op, inputs)


def test_scale_multiplies_as_it_is():
    x, scale, shift, gate = torch.randn(4, 3, 8).unbind()
    normal = F.layer_norm(x, (8,))
    torch.testing.assert_close(AdaLayerNormFwdOp()(x, scale, shift), normal * scale + shift)
    gated = AdaLayerNormZeroFwdOp()(x, scale, shift, gate)
    torch.testing.assert_close(gated, gate * (normal * scale + shift))


# ---- quantised rows --------------------------------------------------------------------------


@pytest.mark.parametrize("quant_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_quantised_rows_come_back(quant_dtype, dtype):
    x, residual = torch.randn(2, 9, 64).to(dtype).unbind()
    weight = torch.randn(64).to(dtype)
    q, scale, total = QUANT(quant_dtype)(x, residual, weight)
    assert q.dtype is quant_dtype
    assert scale.shape == (9, 1)
    assert torch.equal(total, x + residual)
    wanted = F.rms_norm(total.double(), (64,), weight.double(), 1e-6)
    top = 127 if quant_dtype is torch.int8 else 448
    torch.testing.assert_close(
        scale.double(), wanted.abs().amax(-1, keepdim=True) / top, rtol=1e-6, atol=0
    )
    back = q.double() * scale.double()
    # Half a step: of the largest for int8; for float8 a 16th of itself, or half of its subnormals'.
    step = (
        scale.double() if quant_dtype is torch.int8 else wanted.abs() / 8 + scale.double() * 2**-9
    )
    assert ((back - wanted).abs() <= step / 2 * (1 + 1e-5)).all()
    largest = q.float().abs().amax(-1)
    assert (largest == top).all()


def test_a_bound_on_the_scale_saturates():
    x = torch.tensor([[100.0, 1.0, -1.0, 0.5]])
    op = QUANT(scale_ub=0.5)
    q, scale, _ = op(x, torch.zeros_like(x), torch.ones(4))
    assert scale.item() == pytest.approx(0.5 / 448)
    assert q[0, 0].item() == 448
    free = QUANT()(x, torch.zeros_like(x), torch.ones(4))
    assert free[1].item() == pytest.approx(100 / math.sqrt((1e4 + 2.25) / 4) / 448)


@pytest.mark.parametrize("quant_dtype", [torch.float8_e4m3fn, torch.int8])
def test_rows_without_a_largest_number(quant_dtype):
    x = torch.zeros(2, 8)
    x[1, 3] = math.nan
    q, scale, _ = QUANT(quant_dtype)(x, torch.zeros_like(x), torch.ones(8))
    least = 1 / (448 * 512) if quant_dtype.is_floating_point else 2.0**-23
    assert scale[0].item() == pytest.approx(least, rel=1e-7)
    assert not q[0].float().any()
    assert scale[1].isnan()
    assert q[1].float().isnan().all() if quant_dtype.is_floating_point else not q[1].any()


@pytest.mark.parametrize(
    "params",
    [{"eps": 0.0}, {"eps": -1.0}, {"scale_ub": 0.0}, {"quant_dtype": torch.int8, "scale_ub": 1.0}],
)
def test_quantised_domain(params):
    with pytest.raises(CheckError):
        QUANT(**params)


def test_quantised_rows_have_elements():
    x = torch.zeros(3, 0)
    with pytest.raises(CheckError, match="at least one element"):
        QUANT()(x, x, torch.zeros(0))


# ---- groups and instances --------------------------------------------------------------------

CHANNEL_SHAPES = [(2, 6), (3, 6, 4), (2, 6, 4, 5), (1, 6, 7), (37, 6, 2), (0, 6, 4), (2, 6, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CHANNEL_SHAPES)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_group_norm(shape, groups, dtype):
    op = GroupNormFwdOp(groups, 1e-3)
    x, weight, bias = torch.randn(shape).to(dtype), *torch.randn(2, 6).to(dtype)
    check(op, {"input": x, "weight": weight, "bias": bias})
    check(op, {"input": x, "bias": bias})
    check(op, {"input": x})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 5, 4, 3), (1, 5, 37)])
def test_instance_norm(shape, dtype):
    x, (weight, bias) = torch.randn(shape).to(dtype), torch.randn(2, 5).to(dtype)
    for use_input_stats in (True, False):
        for momentum in (0.1, 0.0, 1.0):
            op = InstanceNormFwdOp(use_input_stats, momentum, 1e-3)
            running = {"running_mean": torch.randn(5), "running_var": torch.rand(5) + 0.1}
            check(op, {"input": x, **running, "weight": weight, "bias": bias})
            check(op, {"input": x, **running, "weight": weight})
            if use_input_stats:
                check(op, {"input": x, "weight": weight, "bias": bias})


def test_they_agree_with_torch():
    x, weight, bias = torch.randn(4, 6, 5, 3), *torch.randn(2, 6)
    torch.testing.assert_close(GroupNormFwdOp(3)(x, weight, bias), F.group_norm(x, 3, weight, bias))
    mean, var = torch.randn(6), torch.rand(6) + 0.1
    ours, theirs = (mean.clone(), var.clone()), (mean.clone(), var.clone())
    for use in (True, False):
        result = InstanceNormFwdOp(use, 0.3)(x, *ours, weight, bias)
        wanted = F.instance_norm(x, *theirs, weight, bias, use, 0.3)
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_channel_strides(dtype):
    x = torch.randn(3, 4, 6).to(dtype)
    for _, view in strided(x):
        check(GroupNormFwdOp(2, 1e-3), {"input": view})
        check(InstanceNormFwdOp(eps=1e-3), {"input": view})


def test_special_values_stay_in_their_groups():
    x = torch.randn(2, 6, 4)
    x[0, 0, 1], x[1, 5, 2] = math.nan, math.inf
    result = check(GroupNormFwdOp(3), {"input": x})
    assert int((~result.isfinite()).sum()) == 16
    assert int((~check(InstanceNormFwdOp(), {"input": x}).isfinite()).sum()) == 8


@pytest.mark.parametrize(
    ("op", "inputs", "argument"),
    [
        (GroupNormFwdOp(4), {"input": (2, 6, 3)}, "input"),
        (GroupNormFwdOp(1), {"input": (1, 1)}, "input"),
        (GroupNormFwdOp(2), {"input": (2, 6), "weight": (5,)}, "weight"),
        (InstanceNormFwdOp(), {"input": (2, 6)}, "input"),
        (InstanceNormFwdOp(), {"input": (2, 6, 1)}, "input"),
        (InstanceNormFwdOp(False), {"input": (2, 6, 3)}, "running_mean"),
        (InstanceNormFwdOp(), {"input": (2, 6, 3), "running_mean": (6,)}, "running_var"),
    ],
)
def test_channel_domain(op, inputs, argument):
    with pytest.raises(CheckError) as caught:
        op(**{name: torch.rand(shape) for name, shape in inputs.items()})
    assert caught.value.argument == argument


def test_no_groups():
    with pytest.raises(CheckError, match="num_groups is positive"):
        GroupNormFwdOp(0)
