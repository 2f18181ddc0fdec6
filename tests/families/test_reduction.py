"""The reduction family on the CPU against float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.cases import workload_call, workload_cases
from tests.oracle import check, exact, strided
from tileops import CheckError
from tileops.reduction import SoftmaxFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [
    (),
    (1,),
    (37,),
    (0,),
    (3, 4),
    (3, 0),
    (0, 4),
    (1, 7),
    (2, 3, 5),
    (2, 0, 5),
    (1, 1, 1),
    (3, 1, 4),
    (2, 3, 4, 5),
    (5, 1031),
    (1031, 3),
]


@pytest.mark.parametrize(("name", "workload"), workload_cases("reduction"))
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed)
    check(made.op, dict(made.inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_axis(shape, dtype):
    x = (torch.randn(shape) * 4).to(dtype)
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        check(SoftmaxFwdOp(dim), {"x": x})


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_axis_that_is_not_said(shape, dtype):
    x = torch.randn(shape).to(dtype)
    result = check(SoftmaxFwdOp(), {"x": x})
    torch.testing.assert_close(result, F.softmax(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_the_result_dtype(dtype, wanted):
    x = (torch.randn(5, 7) * 4).to(dtype)
    result = check(SoftmaxFwdOp(1, dtype=wanted), {"x": x})
    assert result.dtype is wanted
    assert result.data_ptr() != x.data_ptr()


def test_the_cast_comes_first():
    # 70000 is infinite in float16: had the cast come last, the row would be [1, 0].
    x = torch.tensor([[70000.0, 0.0]])
    assert SoftmaxFwdOp(1, dtype=torch.float16)(x).isnan().all()
    assert SoftmaxFwdOp(1)(x).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_special_rows(dtype, dim):
    x = torch.randn(6, 8).to(dtype)
    x[0] = -math.inf
    x[1, 2] = -math.inf
    x[2, 3] = math.inf
    x[3, 4] = math.nan
    x[4] = -0.0
    x[5] = torch.finfo(dtype).max
    stacked = x[None].expand(2, 6, 8).movedim(2, dim).contiguous()
    result = check(SoftmaxFwdOp(dim), {"x": stacked}).movedim(dim, 2)
    assert result[:, 0].isnan().all(), "a row of only -inf gives NaN"
    assert (result[:, 1, 2] == 0).all()
    assert result[:, 2:4].isnan().all()
    assert (result[:, 4:] == 1 / 8).all()
    assert torch.equal(result.isnan(), F.softmax(x, 1).isnan()[None].expand(2, 6, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(dtype):
    x = torch.tensor([[-6e4, 0.0, 6e4], [6e4, 6e4, -6e4]]).to(dtype)
    result = check(SoftmaxFwdOp(-1), {"x": x})
    assert result.tolist() == [[0, 0, 1], [0.5, 0.5, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    for _, view in strided(torch.randn(3, 4, 6).to(dtype)):
        for dim in range(3):
            check(SoftmaxFwdOp(dim), {"x": view})
    check(SoftmaxFwdOp(0), {"x": torch.randn(1, 4).to(dtype).expand(3, 4)})


def test_the_oracle_agrees_with_torch():
    x = torch.randn(3, 4, 5)
    for dim in range(3):
        (ours,), _ = exact(SoftmaxFwdOp(dim), {"x": x})
        torch.testing.assert_close(ours.float(), F.softmax(x, dim))


@pytest.mark.parametrize(
    ("shape", "dim"), [((), 1), ((), -2), ((3,), 1), ((3,), -2), ((2, 3), 2), ((2, 3), -3)]
)
def test_an_axis_that_is_not_there(shape, dim):
    with pytest.raises(CheckError, match="dim is an axis of x") as caught:
        SoftmaxFwdOp(dim)(torch.randn(shape))
    assert caught.value.argument == "dim"


@pytest.mark.parametrize("dim", [1.0, True, "1", (0,)])
def test_the_axis_is_an_int(dim):
    with pytest.raises(CheckError, match="'dim'"):
        SoftmaxFwdOp(dim)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "float8", 1])
def test_the_dtype_is_a_float(dtype):
    with pytest.raises(CheckError, match="'dtype'"):
        SoftmaxFwdOp(0, dtype=dtype)
