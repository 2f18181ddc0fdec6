"""The norm family on the CPU against float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.cases import workload_call, workload_cases
from tests.oracle import check, exact, strided
from tileops import CheckError
from tileops.norm import BatchNormFwdOp, FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PRIME = 37


@pytest.mark.parametrize(("name", "workload"), workload_cases("norm"))
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed)
    check(made.op, dict(made.inputs))


def rows(*shape, dtype=torch.float32):
    """Rows of different sizes and offsets, so that a statistic of another row would show."""
    x = torch.randn(shape)
    if x.ndim > 1:
        x = x * torch.logspace(-2, 1, max(shape[0], 1)).view(-1, *[1] * (x.ndim - 1))
    return x.to(dtype)


# ---- RMSNorm and LayerNorm -----------------------------------------------------------------

SHAPES = [
    ((4,), (4,)),
    ((3, 4), (4,)),
    ((3, 4), (3, 4)),
    ((2, 3, 5), (3, 5)),
    ((2, 3, 5), (5,)),
    ((1, 1), (1,)),
    ((PRIME, 41), (41,)),
    ((0, 4), (4,)),
    ((3, 0), (0,)),
    ((0, 0), (0,)),
    ((2, 0, 5), (5,)),
    ((2, 1, 5), (1, 5)),
    ((5, 1031), (1031,)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "normal"), SHAPES)
@pytest.mark.parametrize("eps", [None, 1e-6, 0.5])
def test_rms_norm(shape, normal, eps, dtype):
    x, weight = rows(*shape, dtype=dtype), torch.randn(normal).to(dtype)
    op = RMSNormFwdOp(normal, eps)
    check(op, {"x": x, "weight": weight})
    check(op, {"x": x})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "normal"), [s for s in SHAPES if math.prod(s[1]) != 1])
@pytest.mark.parametrize("eps", [1e-5, 0.5, 0.0])
def test_layer_norm(shape, normal, eps, dtype):
    x = rows(*shape, dtype=dtype)
    weight, bias = torch.randn(normal).to(dtype), torch.randn(normal).to(dtype)
    op = LayerNormFwdOp(normal, eps)
    check(op, {"input": x, "weight": weight, "bias": bias})
    check(op, {"input": x, "weight": weight})
    check(op, {"input": x, "bias": bias})
    check(op, {"input": x})


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_rows_of_one(dtype):
    x, bias = torch.randn(5, 1).to(dtype), torch.randn(1).to(dtype)
    result = LayerNormFwdOp(1, 0.01)(x, None, bias)
    # x / sqrt(eps) less the same: off by a rounding of each in the accumulator, then by the dtype's.
    bound = 2.0**-24 * 2 * 10 * x.abs().double() + 2.0**-8 * bias.abs().double()
    assert ((result.double() - bias.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_oracle_agrees_with_torch(dtype):
    x, weight, bias = (
        torch.randn(5, 7).to(dtype),
        torch.randn(7).to(dtype),
        torch.randn(7).to(dtype),
    )
    for eps in (None, 1e-3):
        op = RMSNormFwdOp(7, eps)
        (wanted,), _ = exact(op, {"x": x, "weight": weight})
        torch.testing.assert_close(F.rms_norm(x, (7,), weight, eps), wanted.to(dtype))
    (wanted,), _ = exact(LayerNormFwdOp(7, 1e-3), {"input": x, "weight": weight, "bias": bias})
    torch.testing.assert_close(F.layer_norm(x, (7,), weight, bias, 1e-3), wanted.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_eps_rms_norm_uses_that_of_its_accumulator(dtype):
    # Rows so small that eps decides: float16's own epsilon would give another result by far.
    x = torch.full((2, 64), 2.0**-14, dtype=dtype)
    result = check(RMSNormFwdOp(64), {"x": x})
    wanted = 2.0**-14 / math.sqrt(2.0**-28 + 2.0**-23)
    torch.testing.assert_close(
        result.double(), torch.full((2, 64), wanted).double(), rtol=5e-3, atol=0
    )


def special_rows(dtype):
    x = torch.randn(8, 16).to(dtype)
    x[0, 3] = math.nan
    x[1, 5] = math.inf
    x[2, 7] = -math.inf
    x[3] = 0.0
    x[4] = -0.0
    x[5, 0], x[5, 1] = math.inf, -math.inf
    x[6] = torch.finfo(dtype).tiny
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_rows(dtype):
    x, weight = special_rows(dtype), torch.randn(16).to(dtype)
    check(RMSNormFwdOp(16, 1e-6), {"x": x, "weight": weight})
    result = check(LayerNormFwdOp(16), {"input": x, "weight": weight, "bias": weight})
    assert result[3:5].isfinite().all()
    assert result[7].isfinite().all()
    zeros = torch.full_like(x, -0.0)
    check(FusedAddRMSNormFwdOp(), {"input": x, "residual": zeros, "weight": weight})


def test_large_values_do_not_overflow_their_accumulator():
    x = torch.full((2, 64), 60000.0, dtype=torch.float16)  # its square is beyond float16
    result = check(RMSNormFwdOp(64, 1e-6), {"x": x})
    torch.testing.assert_close(result, torch.ones_like(x), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    x, weight = torch.randn(3, 4, 6).to(dtype), torch.randn(6).to(dtype)
    for _, view in strided(x):
        for _, scale in strided(weight):
            check(RMSNormFwdOp(6), {"x": view, "weight": scale})
            check(LayerNormFwdOp(6), {"input": view, "weight": scale, "bias": weight})
        check(FusedAddRMSNormFwdOp(), {"input": view, "residual": x, "weight": weight})
        check(FusedAddRMSNormFwdOp(), {"input": x, "residual": view, "weight": weight})
    spread = torch.randn(1, 1, 6).to(dtype).expand(3, 4, 6)
    check(RMSNormFwdOp(6), {"x": spread, "weight": torch.ones(1, dtype=dtype).expand(6)})


# ---- FusedAddRMSNorm -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 5), (1, 1), (PRIME, 41), (0, 4), (3, 0)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_fused_add_rms_norm(shape, eps, dtype):
    x, residual = rows(*shape, dtype=dtype), rows(*shape, dtype=dtype)
    weight = torch.randn(shape[-1:]).to(dtype)
    op = FusedAddRMSNormFwdOp(eps)
    output, total = check(op, {"input": x, "residual": residual, "weight": weight})
    assert output.data_ptr() != total.data_ptr() or not total.numel()
    check(op, {"input": x, "residual": x, "weight": weight})


def test_the_sum_is_rounded_before_it_is_normalised():
    # 2048 + 1 is 2048 in float16: an unrounded sum would leave 1 of it in the output.
    x = torch.tensor([[2048.0, 0.0]], dtype=torch.float16)
    residual = torch.tensor([[1.0, 1.0]], dtype=torch.float16)
    weight = torch.ones(2, dtype=torch.float16)
    output, total = FusedAddRMSNormFwdOp(1e-6)(x, residual, weight)
    assert total.tolist() == [[2048.0, 1.0]]
    wanted, _ = FusedAddRMSNormFwdOp(1e-6)(total, torch.zeros_like(total), weight)
    assert torch.equal(output, wanted)


# ---- BatchNorm -----------------------------------------------------------------------------

BATCH_SHAPES = [(3, 5), (2, 3, 4), (2, 3, 4, 5), (2, 1, 3), (PRIME, 7), (2, 0, 3), (1, 3, 2)]
BATCH_DTYPES = DTYPES[:3]


def statistics(channels):
    return {"running_mean": torch.randn(channels), "running_var": torch.rand(channels) + 0.1}


def affine(channels):
    return {"weight": torch.randn(channels), "bias": torch.randn(channels)}


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
@pytest.mark.parametrize("shape", BATCH_SHAPES)
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
def test_batch_norm_training(shape, momentum, dtype):
    op = BatchNormFwdOp(training=True, momentum=momentum, eps=1e-3)
    # Values of a channel that lie close together, far from 0, would lose digits in any float32.
    x = rows(*shape, dtype=dtype) + (shape[0] > 1)
    check(op, {"input": x, **statistics(shape[1]), **affine(shape[1])})
    check(op, {"input": x, **statistics(shape[1])})
    check(op, {"input": x, **affine(shape[1])})
    check(op, {"input": x})
    check(op, {"input": x, "bias": torch.randn(shape[1])})


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
@pytest.mark.parametrize("shape", [*BATCH_SHAPES, (0, 3), (0, 3, 4), (2, 3, 0), (1, 3)])
def test_batch_norm_evaluation(shape, dtype):
    op = BatchNormFwdOp(eps=1e-3)
    x = rows(*shape, dtype=dtype)
    output, mean, invstd = check(op, {"input": x, **statistics(shape[1]), **affine(shape[1])})
    assert mean is None
    assert invstd is None
    check(op, {"input": x, **statistics(shape[1])})
    check(op, {"input": x, **statistics(shape[1]), "weight": torch.randn(shape[1])})


def test_batch_norm_agrees_with_torch():
    x, mean, var = torch.randn(6, 3, 5), torch.randn(3), torch.rand(3) + 0.1
    weight, bias = torch.randn(3), torch.randn(3)
    ours, theirs = (mean.clone(), var.clone()), (mean.clone(), var.clone())
    output, saved_mean, saved_invstd = BatchNormFwdOp(training=True, momentum=0.3)(
        x, *ours, weight, bias
    )
    wanted = torch.ops.aten.native_batch_norm(x, weight, bias, *theirs, True, 0.3, 1e-5)
    torch.testing.assert_close((output, saved_mean, saved_invstd), wanted)
    torch.testing.assert_close(ours, theirs)
    output, _, _ = BatchNormFwdOp()(x, mean, var, weight, bias)
    torch.testing.assert_close(output, F.batch_norm(x, mean, var, weight, bias))


def test_a_second_training_step_starts_from_the_first():
    stats, op = statistics(3), BatchNormFwdOp(training=True)
    for _ in range(3):
        check(op, {"input": torch.randn(4, 3), **stats})


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_batch_norm_strides(dtype):
    x = torch.randn(3, 4, 6).to(dtype)
    for training in (True, False):
        op = BatchNormFwdOp(training=training)
        for _, view in strided(x):
            check(op, {"input": view, **statistics(4), **affine(4)})
        for (_, mean), (_, var) in zip(
            strided(torch.randn(4)), strided(torch.rand(4)), strict=True
        ):
            check(op, {"input": x, "running_mean": mean, "running_var": var})


def test_batch_norm_special_values_stay_in_their_channels():
    x = torch.randn(4, 4, 3)
    x[1, 0, 1], x[:, 2] = math.nan, -0.0
    check(BatchNormFwdOp(training=True), {"input": x, **statistics(4)})
    x[2, 1, 0] = math.inf
    output, _, _ = check(BatchNormFwdOp(), {"input": x, **statistics(4)})
    assert int((~output.isfinite()).sum()) == 2


@pytest.mark.parametrize(
    ("op", "inputs", "argument"),
    [
        (BatchNormFwdOp(training=True), {"input": (1, 3)}, "input"),
        (BatchNormFwdOp(training=True), {"input": (1, 3, 1)}, "input"),
        (BatchNormFwdOp(training=True), {"input": (0, 3)}, "input"),
        (BatchNormFwdOp(training=True), {"input": (2, 3, 0)}, "input"),
        (BatchNormFwdOp(), {"input": (4, 3)}, "running_mean"),
        (BatchNormFwdOp(), {"input": (4, 3), "running_mean": (3,)}, "running_var"),
        (BatchNormFwdOp(), {"input": (4, 3), "running_var": (3,)}, "running_var"),
        (BatchNormFwdOp(training=True), {"input": (4, 3), "running_mean": (3,)}, "running_var"),
        (BatchNormFwdOp(training=True), {"input": (4, 3), "weight": (4,)}, "weight"),
        (BatchNormFwdOp(training=True), {"input": (4,)}, "input"),
    ],
)
def test_batch_norm_domain(op, inputs, argument):
    made = {name: torch.rand(shape) for name, shape in inputs.items()}
    with pytest.raises(CheckError) as caught:
        op(**made)
    assert caught.value.argument == argument
    assert caught.value.op == "BatchNormFwdOp"
