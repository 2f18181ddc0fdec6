"""Gated activations and their gradients on the CPU against float64 and autograd of PyTorch's functions."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import check, strided
from tileops import CheckError
from tileops.elementwise import (
    GELUAndMulBwdOp,
    GELUAndMulFwdOp,
    SiLUAndMulBwdOp,
    SiLUAndMulFwdOp,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OPS = {
    SiLUAndMulFwdOp(): SiLUAndMulBwdOp(),
    GELUAndMulFwdOp(): GELUAndMulBwdOp(),
    GELUAndMulFwdOp(approximate="tanh"): GELUAndMulBwdOp(approximate="tanh"),
}
pairs = pytest.mark.parametrize(("op", "backward"), OPS.items(), ids=str)


def pair(shape, dtype):
    """Of a gradient ``[*M, N]`` and an input ``[*M, 2*N]``."""
    grad = torch.randn(shape).to(dtype)
    return grad, (torch.randn(*shape[:-1], 2 * shape[-1]) * 3).to(dtype)


@pairs
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(1,), (3, 2), (2, 3, 5), (0, 2), (3, 0), (0,), (37, 41), (1, 1031)]
)
def test_shapes(op, backward, shape, dtype):
    grad, x = pair(shape, dtype)
    if shape == (1,):
        # 1 + erf of a gate far left is a rounding u off, which u times the rms of other elements covers;
        # alone it is u / (1 + erf(-2 / sqrt(2))) = 22 u of itself at -2, and 16000 u at -4.
        x = x.clamp(min=-2)
    check(op, {"input": x})
    check(backward, {"grad_output": grad, "input": x})


@pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_strides(op, backward, dtype):
    grad, x = pair((3, 4, 6), dtype)
    for _, view in strided(x):
        check(op, {"input": view})
        check(backward, {"grad_output": grad, "input": view})
    for _, view in strided(grad):
        check(backward, {"grad_output": view, "input": x})
    # As .sum().backward() hands it over.
    check(backward, {"grad_output": grad[:1, :1, :1].expand(3, 4, 6), "input": x})


@pairs
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(op, backward, dtype):
    x = torch.tensor([0.0, -0.0, torch.nan, 1.0, -1.0, 30.0, -30.0, 1e-7], dtype=dtype)
    for both in (torch.cat((x, x.flip(0))), torch.cat((x, x))):
        check(op, {"input": both})
        check(backward, {"grad_output": x, "input": both})


def test_infinite_gates():
    x = torch.tensor([torch.inf, -torch.inf, 1.0, 1.0])
    check(SiLUAndMulFwdOp(), {"input": x})
    check(SiLUAndMulFwdOp(), {"input": x.flip(0)})


def test_it_rounds_once():
    # Of these pairs about every third would come out otherwise, were silu(gate) rounded first.
    x = torch.randn(2, 1000).to(torch.bfloat16)
    gate, up = x[0].double(), x[1].double()
    wanted = (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16)
    assert torch.equal(SiLUAndMulFwdOp()(x.flatten()), wanted)


@pairs
def test_the_gradient_is_that_of_the_forward(op, backward):
    grad, x = pair((3, 5), torch.float64)
    step = torch.randn_like(x)
    # The central difference of a smooth function is off by the third power's share of the step.
    difference = (op(x + 1e-4 * step) - op(x - 1e-4 * step)) / 2e-4
    torch.testing.assert_close((grad * difference).sum(), (backward(grad, x) * step).sum())


def test_domains():
    for op in OPS:
        with pytest.raises(CheckError, match="2 \\* N"):
            op(torch.randn(3, 5))
        with pytest.raises(CheckError, match="shape"):
            op(torch.tensor(1.0))
    for backward in (SiLUAndMulBwdOp, GELUAndMulBwdOp):
        with pytest.raises(CheckError, match="grad_output|input"):
            backward()(torch.randn(3, 4), torch.randn(3, 6))
        with pytest.raises(CheckError, match="only gradient"):
            backward(wants_input=False)
    with pytest.raises(CheckError, match="approximate"):
        GELUAndMulFwdOp(approximate="sigmoid")
