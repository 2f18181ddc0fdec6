"""Log-softmax, and the gradients of both, on the CPU against float64 and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.oracle import check, exact, strided
from tileops import CheckError
from tileops.reduction import (
    CumprodBwdOp,
    CumprodFwdOp,
    LogSoftmaxBwdOp,
    LogSoftmaxFwdOp,
    SoftmaxBwdOp,
    SoftmaxFwdOp,
)
from tileops.reduction.scan import _gradient_of_products

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (37,), (0,), (3, 0), (0, 4), (2, 3, 5), (3, 1, 4), (5, 1031)]
PAIRS = [(SoftmaxFwdOp, SoftmaxBwdOp, F.softmax), (LogSoftmaxFwdOp, LogSoftmaxBwdOp, F.log_softmax)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_axis(shape, dtype):
    # Not much spread: where one probability is nearly 1 the gradient is a difference of equals.
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        check(LogSoftmaxFwdOp(dim), {"input": x})
        check(SoftmaxBwdOp(dim), {"grad_output": grad, "output": torch.softmax(x, dim)})
        check(LogSoftmaxBwdOp(dim), {"grad_output": grad, "output": torch.log_softmax(x, dim)})


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(("forward", "backward", "reference"), PAIRS)
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4), (5,)])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_gradients_are_autograds(forward, backward, reference, shape, dim):
    x, grad = torch.randn(shape).double().requires_grad_(), torch.randn(shape).double()
    wanted = torch.autograd.grad(reference(x, dim), x, grad)[0]
    saved = forward(dim)(x.detach())
    torch.testing.assert_close(backward(dim)(grad, saved), wanted)


@pytest.mark.parametrize(("forward", "backward", "reference"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_forward_has_its_gradient_in_the_dtype_of_the_result(
    forward, backward, reference, dtype
):
    y = reference(torch.randn(4, 7), 1).to(dtype)
    result = check(backward(1, dtype=dtype), {"grad_output": torch.randn_like(y), "output": y})
    assert result.dtype is dtype
    with pytest.raises(CheckError, match="'grad_output'"):
        backward(1, dtype=torch.float32)(torch.randn(4, 7).double(), torch.randn(4, 7).double())
    with pytest.raises(CheckError, match="'output'"):
        backward(1)(torch.randn(4, 7), torch.randn(4, 7).double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    grad = torch.randn(3, 4, 6).to(dtype)
    for _, view in strided(torch.randn(3, 4, 6).to(dtype)):
        check(LogSoftmaxFwdOp(1), {"input": view})
        check(SoftmaxBwdOp(1), {"grad_output": grad, "output": view})
        check(LogSoftmaxBwdOp(2), {"grad_output": view, "output": grad})
    expanded = torch.randn(()).to(dtype).expand(3, 4, 6)
    check(LogSoftmaxBwdOp(2), {"grad_output": expanded, "output": grad})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_special_rows(dtype, dim):
    x = torch.randn(5, 8).to(dtype)
    x[0] = -torch.inf
    x[1, 2] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 4] = torch.nan
    x[4] = torch.finfo(dtype).max
    x = x if dim == 1 else x.T
    result = check(LogSoftmaxFwdOp(dim), {"input": x})
    assert torch.equal(result.isnan(), F.log_softmax(x, dim).isnan())


def test_no_gradient_is_wanted():
    with pytest.raises(CheckError, match="a gradient is wanted"):
        SoftmaxBwdOp(wants_x=False)
    with pytest.raises(CheckError, match="a gradient is wanted"):
        LogSoftmaxBwdOp(wants_input=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, -1])
def test_gradient_of_running_products(dtype, dim):
    x = (1 + torch.randn(5, 9) / 4).to(dtype)
    for zeros in ((), ((1, 3),), ((1, 3), (2, 2), (1, 7), (4, 2))):
        for place in zeros:
            x[place] = 0.0
        check(CumprodBwdOp(dim), {"grad_output": torch.randn(5, 9).to(dtype), "input": x})


@pytest.mark.parametrize("zeros", [(), (3,), (0, 5, 9)], ids=str)
def test_gradient_of_running_products_off_the_cpu(zeros):
    """The same function, twice differentiable, without a look at the values."""
    for n, dim in ((0, 1), (1, 1), (2, 0), (7, -1), (16, 0), (33, 1)):
        x = 1 + torch.randn((n, 3) if dim == 0 else (3, n), dtype=torch.float64) / 4
        for place in zeros:
            if place < n:
                x.movedim(dim, 0)[place, :2] = 0.0
        grad = torch.randn_like(x)
        wanted, _ = exact(CumprodBwdOp(dim), {"grad_output": grad, "input": x})
        torch.testing.assert_close(_gradient_of_products(grad, x, dim), *wanted)
        if n == 7:
            leaves = (grad.requires_grad_(), x.requires_grad_())
            assert torch.autograd.gradcheck(lambda g, x: _gradient_of_products(g, x, -1), leaves)
    scalar = torch.tensor(2.0)
    assert torch.equal(_gradient_of_products(scalar, scalar, 0), scalar)


def test_gradient_of_running_products_does_not_walk_step_by_step():
    import time

    x = (1 + torch.randn(8, 4000) / 100).requires_grad_()
    start = time.perf_counter()
    CumprodFwdOp(-1)(x).sum().backward()
    assert time.perf_counter() - start < 2  # a step for each element takes over ten times as long
    torch.testing.assert_close(x.grad, torch.autograd.grad(torch.cumprod(x, -1).sum(), x)[0])
