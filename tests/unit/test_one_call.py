"""A decomposition that is one call of torch: when that call is repeated alone, and when it is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tileops.elementwise import AddFwdOp, ClampTensorFwdOp, MulFwdOp, SoftplusFwdOp
from tileops.engine.one_call import noted
from tileops.norm import LayerNormFwdOp
from tileops.reduction import SumFwdOp

WEIGHT = torch.tensor([2.0, 3.0, 5.0])


def again(function, *first):
    """What ``function`` is after its first call."""
    run = noted(function)
    result = run(*first)
    assert torch.equal(result, function(*first))
    return run.trusted


def three(count=1):
    return [torch.randn(4, 3) for _ in range(count)]


def test_a_function_of_the_inputs_is_called_itself():
    assert again(lambda x, y: torch.mul(x, y), *three(2)) is torch.mul


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.sub(y, x),
        lambda x, y: torch.sub(x, y, alpha=0.5),
        lambda x, y: torch.add(x, 2) if y.dtype is torch.int8 else torch.atan2(x, y),
        lambda x, y: torch.sum(x, (0,), True, dtype=torch.float64),
        lambda x, y: F.layer_norm(x, (3,), None, y[0] if y.ndim == 3 else None),
        lambda x, y: torch.where(x > 0, x, y) if not x.is_floating_point() else torch.maximum(y, x),
    ],
)
def test_one_call_is_repeated(function):
    first, second = three(2), three(2)
    run = again(function, *first)
    assert run is not function
    assert torch.equal(run(*second), function(*second))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y * 2,  # two
        lambda x, y: torch.add(x, y).mul_(2),  # two, and one tensor
        lambda x, y: torch.mul(x, WEIGHT),  # of a tensor from elsewhere
        lambda x, y: torch.mul(x, x.mean().item()),  # of what data say
        lambda x, y: torch.mul(x, y)[:2],
        lambda x, y: torch.clamp(x, *(-1.0, 1.0)) if float(y.sum()) > 1e9 else torch.abs(x),
        lambda x, y: torch.max(x, 0)[0],
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.clone(),  # of one of two: as good as it is
    ],
)
def test_anything_else_is_not(function):
    assert again(function, *three(2)) is function


def test_a_tensor_given_twice_proves_nothing():
    def square(x, y):
        return torch.mul(x, x)

    x, y = three(2)
    assert again(square, x, x) is square
    assert torch.equal(again(square, x, y)(y, x), y * y)


@pytest.mark.parametrize(
    ("op", "shapes", "wanted"),
    [
        (MulFwdOp(), ((4, 3), (3,)), torch.mul),
        (AddFwdOp(alpha=0.5), ((4, 3), (3,)), lambda x, y: torch.add(x, y, alpha=0.5)),
        (SoftplusFwdOp(beta=0.5), ((4, 3),), lambda x: F.softplus(x, 0.5)),
        (ClampTensorFwdOp(), ((4, 3), None, (3,)), torch.clamp),
        (LayerNormFwdOp((3,)), ((4, 3), (3,)), lambda x, w: F.layer_norm(x, (3,), w)),
        (SumFwdOp(dim=0, dtype=torch.float64), ((4, 3),), lambda x: x.double().sum(0)),
    ],
)
def test_ops_repeat_it(op, shapes, wanted):
    for _ in range(4):  # the plan, its guard, and what the guard finds
        inputs = [None if shape is None else torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(op(*inputs), wanted(*inputs))
    *_, plan = op._state.plans.values()
    assert op.last_call.kernel == "decomposition"
    assert "decomposition" not in repr(plan.bare.trusted)


def test_a_call_within_a_function_mode_is_noted_for_none():
    """The user's mode sees the op, and what the op calls afterwards is as ever."""

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    op, (x, y) = AddFwdOp(alpha=0.25), three(2)
    with Seen():
        assert torch.equal(op(x, y), torch.add(x, y, alpha=0.25))
    for _ in range(3):
        assert torch.equal(op(y, x), torch.add(y, x, alpha=0.25))
