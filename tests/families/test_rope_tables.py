"""Rotation by given tables on the CPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracle import check, strided
from tileops import CheckError
from tileops.engine.errors import BackwardError
from tileops.rope import RoPEFwdOp, RoPETablesBwdOp, RoPETablesFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["neox", "interleaved"]


def hold(x, cos, sin, layout="neox"):
    """Both ways."""
    check(RoPETablesBwdOp(layout), {"grad_output": x, "cos": cos, "sin": sin})
    return check(RoPETablesFwdOp(layout), {"x": x, "cos": cos, "sin": sin})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("lead", "tables"),
    [
        ((2, 5, 3), (2, 5, 1)),
        ((2, 3, 5), (1, 1, 5)),
        ((2, 3, 5), (5,)),
        ((7,), (7,)),
        ((7,), (1,)),
        ((7,), ()),
        ((), ()),
        ((3, 0, 2), (0, 1)),
        ((2, 3, 2, 3, 2, 3), (2, 1, 2, 1, 2, 1)),
    ],
    ids=str,
)
def test_shapes(lead, tables, pairs, layout):
    for width in (2, 14):
        table = (*tables, width // (1 + pairs))
        hold(torch.randn(*lead, width), torch.randn(table), torch.randn(table), layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_and_strides(layout, dtype):
    cos, sin = torch.randn(5, 1, 8).to(dtype), torch.randn(5, 1, 4).to(dtype)
    for _, x in strided(torch.randn(2, 5, 3, 8).to(dtype)):
        hold(x, cos, cos * 2, layout)
        hold(x, cos[..., ::2], sin, layout)
    hold(torch.ones((), dtype=dtype).expand(2, 5, 3, 8), sin[..., :1].expand(5, 1, 8), cos, layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_in_float32(dtype):
    """They are not rounded to the dtype of ``x``."""
    x, cos, sin = torch.ones(3, 2, dtype=dtype), torch.full((3, 1), 1 + 2.0**-12), -torch.ones(3, 1)
    result = hold(x, -cos, sin)
    assert (result[:, 0] == -(2.0**-12)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_of_angles_turn_as_the_angles_do(layout):
    x = torch.randn(2, 9, 3, 16, dtype=torch.float64)
    angles = torch.arange(9)[:, None, None] * 10000.0 ** (-torch.arange(8).double() / 8)
    expected = RoPEFwdOp(layout, "2d")(x)
    torch.testing.assert_close(RoPETablesFwdOp(layout)(x, angles.cos(), angles.sin()), expected)
    whole = torch.cat((angles, angles), -1) if layout == "neox" else angles.repeat_interleave(2, -1)
    torch.testing.assert_close(RoPETablesFwdOp(layout)(x, whole.cos(), whole.sin()), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_stay_in_their_pairs(value):
    x, table = torch.randn(3, 8), torch.rand(3, 8) + 0.5
    x[1, 2] = value
    assert hold(x, table, table).isfinite().logical_not().nonzero().tolist() == [[1, 2], [1, 6]]
    found = hold(x, table, table, "interleaved").isfinite().logical_not().nonzero().tolist()
    assert found == [[1, 2], [1, 3]]


def test_gradients_of_x_and_none_of_tables():
    x, table = torch.randn(4, 8, requires_grad=True), torch.rand(4, 8, requires_grad=True)
    op = RoPETablesFwdOp()
    with pytest.raises(BackwardError, match=r"RoPETablesFwdOp.*argument 'cos'"):
        op(x, table, table.detach()).sum().backward()
    op(x, table.detach(), table.detach()).sum().backward()
    # d/dx of sum(x * t + turned(x) * t), entry by entry.
    expected = table + torch.cat((table[:, 4:], -table[:, :4]), -1)
    torch.testing.assert_close(x.grad, expected.detach())


def test_refusals():
    x, table, op = torch.randn(2, 3, 8), torch.randn(2, 1, 8), RoPETablesFwdOp()
    with pytest.raises(CheckError, match="argument 'cos'.*D / 2: one for each pair"):
        op(x, table[..., :6], table[..., :6])
    with pytest.raises(CheckError, match="argument 'cos'.*broadcast to the leading dims of x"):
        op(x[:1], table, table)
    with pytest.raises(CheckError, match="argument 'cos'.*broadcast to the leading dims of x"):
        op(x, torch.randn(4, 1, 8), torch.randn(4, 1, 8))
    with pytest.raises(CheckError, match="argument 'sin'"):
        op(x, table, table[..., :4])
    for one, other in ((x, table.half()), (x.half(), table.bfloat16()), (x.double(), table)):
        with pytest.raises(CheckError, match="argument 'cos'.*or float32 where that is narrower"):
            op(one, other, other)
    with pytest.raises(CheckError, match="argument 'sin'.*dtype"):
        op(x.half(), table.half(), table)
    with pytest.raises(CheckError, match="argument 'x'.*pairs"):
        op(x[..., :7], table[..., :7], table[..., :7])
    with pytest.raises(CheckError, match="rope_layout"):
        RoPETablesFwdOp("gptj")
    with pytest.raises(CheckError, match="at least one gradient"):
        RoPETablesBwdOp(wants_x=False)
