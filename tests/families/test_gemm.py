"""The gemm family on the CPU against float64 sums."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cases import workload_call, workload_cases
from tests.oracle import check, exact, strided
from tileops import CheckError
from tileops.gemm import GEMMBwdOp, GEMMFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize(("name", "workload"), workload_cases("gemm"))
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed)
    check(made.op, dict(made.inputs))


def operands(m, n, k, trans_a, trans_b, dtype):
    a = torch.randn((k, m) if trans_a else (m, k)).to(dtype)
    b = torch.randn((n, k) if trans_b else (k, n)).to(dtype)
    return {"a": a, "b": b}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (3, 4, 5), (37, 41, 43), (1, 64, 33), (64, 1, 33), (0, 4, 5), (3, 0, 5), (0, 0, 0)],
)
def test_gemm(m, n, k, trans_a, trans_b, dtype):
    check(GEMMFwdOp(trans_a, trans_b), operands(m, n, k, trans_a, trans_b, dtype))


WANTED = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (37, 41, 43), (64, 1, 33), (0, 4, 5), (3, 0, 5), (3, 4, 0)]
)
def test_gradients(m, n, k, trans_a, trans_b, dtype):
    op = GEMMBwdOp(trans_a, trans_b)
    check(op, {"grad_d": torch.randn(m, n).to(dtype), **operands(m, n, k, trans_a, trans_b, dtype)})


@pytest.mark.parametrize(("wants_a", "wants_b"), WANTED)
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
def test_gradients_that_are_wanted(trans_a, trans_b, wants_a, wants_b):
    op = GEMMBwdOp(trans_a, trans_b, wants_a=wants_a, wants_b=wants_b)
    made = operands(3, 4, 5, trans_a, trans_b, torch.float32)
    grad_a, grad_b = check(op, {"grad_d": torch.randn(3, 4), **made})
    assert [grad_a is not None, grad_b is not None] == [wants_a, wants_b]


def test_a_gradient_is_wanted():
    with pytest.raises(CheckError, match="at least one gradient"):
        GEMMBwdOp(wants_a=False, wants_b=False)


@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
def test_gradients_of_strided_tensors(trans_a, trans_b):
    op, made = GEMMBwdOp(trans_a, trans_b), operands(4, 6, 5, trans_a, trans_b, torch.float32)
    for _, grad_d in strided(torch.randn(4, 6)):
        check(op, {"grad_d": grad_d, **made})
    check(op, {"grad_d": torch.randn(1, 1).expand(4, 6), **made})  # as sum() hands it down
    (_, a), *_ = strided(made["a"])
    check(op, {"grad_d": torch.randn(4, 6), "a": a, "b": made["b"]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
def test_an_empty_sum_is_0(trans_a, trans_b, dtype):
    result = check(GEMMFwdOp(trans_a, trans_b), operands(3, 4, 0, trans_a, trans_b, dtype))
    assert not result.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_sum_accumulates_wide(dtype):
    # In the dtype itself 2048 ones sum to 2048 in float16 and 256 in bfloat16; here come 4096.
    a, b = torch.ones(2, 4096, dtype=dtype), torch.ones(3, 4096, dtype=dtype)
    assert (GEMMFwdOp()(a, b) == 4096).all()
    small = torch.randn(2, 8191).to(dtype)
    check(GEMMFwdOp(), {"a": small, "b": torch.randn(3, 8191).to(dtype)})


def test_float32_is_not_rounded_further():
    # TF32 and bfloat16 passes would lose the last bits: 1 + 2**-20.
    a = torch.full((4, 64), 1 + 2.0**-20)
    b = torch.eye(64)
    assert torch.equal(GEMMFwdOp()(a, b), a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_rows_and_columns(dtype):
    a, b = torch.rand(4, 5).to(dtype) + 1, torch.rand(3, 5).to(dtype) + 1
    a[0, 1], a[1, 2], a[2] = math.nan, math.inf, -0.0
    result = check(GEMMFwdOp(), {"a": a, "b": b})
    assert result[0].isnan().all()
    assert result[1].isinf().all()
    assert not result[2].any()
    assert result[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
def test_strides(trans_a, trans_b, dtype):
    made = operands(4, 6, 5, trans_a, trans_b, dtype)
    for _, a in strided(made["a"]):
        for _, b in strided(made["b"]):
            check(GEMMFwdOp(trans_a, trans_b), {"a": a, "b": b})
    check(
        GEMMFwdOp(),
        {"a": torch.randn(1, 5).to(dtype).expand(3, 5), "b": torch.randn(2, 5).to(dtype)},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_oracle_agrees_with_torch(dtype):
    for trans_a, trans_b in TRANSPOSES:
        made = operands(3, 4, 5, trans_a, trans_b, dtype)
        (ours,), _ = exact(GEMMFwdOp(trans_a, trans_b), made)
        a, b = made["a"], made["b"]
        theirs = torch.mm(a.t() if trans_a else a, b.t() if trans_b else b)
        torch.testing.assert_close(ours.to(dtype), theirs)


@pytest.mark.parametrize(
    ("trans_a", "trans_b", "a", "b"),
    [
        (False, True, (3, 4), (5, 6)),
        (False, False, (3, 4), (5, 6)),
        (True, True, (3, 4), (5, 4)),
        (True, False, (3, 4), (4, 5)),
        (False, True, (3,), (5, 3)),
        (False, True, (2, 3, 4), (5, 4)),
        (False, True, (3, 4), (4,)),
    ],
)
def test_shapes_that_do_not_match(trans_a, trans_b, a, b):
    with pytest.raises(CheckError, match="shape"):
        GEMMFwdOp(trans_a, trans_b)(torch.randn(a), torch.randn(b))


@pytest.mark.parametrize("value", [1, "True", None, 0.0])
def test_the_transposes_are_bools(value):
    with pytest.raises(CheckError, match="trans_a"):
        GEMMFwdOp(value)
