"""The way of an eager call that needs a gradient: what it must not pass, and what it still refuses."""

from __future__ import annotations

import inspect

import pytest
import torch

from tileops import CheckError
from tileops.elementwise import SiLUFwdOp
from tileops.engine.gradient import _pull_alone
from tileops.norm import RMSNormFwdOp


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def test_a_call_with_a_gradient_passes_nothing_slow(monkeypatch):
    """Neither the binding of arguments by ``inspect``, nor the careful path and the dispatcher, nor
    functorch: each takes longer than all else together."""
    silu, norm, x, weight = SiLUFwdOp(), RMSNormFwdOp(8, 1e-3), leaf(3, 8), leaf(8)

    def step():
        grad = torch.randn(3, 8)
        (of_silu,) = torch.autograd.grad(silu(x), x, grad)
        wide = x.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(torch.nn.functional.silu(wide), wide, grad.double())
        torch.testing.assert_close(of_silu, expected.float())
        return torch.autograd.grad(norm(x, weight), (x, weight), grad)

    step()

    def slow(*args, **named):
        raise AssertionError("not on the way of a repeated call")

    monkeypatch.setattr(inspect, "signature", slow)
    monkeypatch.setattr(torch.func, "vjp", slow)
    for op in (silu, norm):
        monkeypatch.setattr(type(op), "_call_checked", slow)
        monkeypatch.setattr(type(op), "_call_boundary", slow)
    step()


def test_where_something_watches_the_operator_is_seen():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    op, x = SiLUFwdOp(), leaf(3, 8)
    op(x).sum().backward()
    with Watch():
        op(x).sum().backward()
    assert {"tileops.elementwise_silu_fwd.default", "tileops.elementwise_silu_bwd.default"} <= {
        *seen
    }


def test_a_result_that_depends_on_nothing_has_zeros():
    x, grad = torch.randn(2, 5), torch.randn(2, 5)
    (found,) = _pull_alone(lambda x: (torch.ones(2, 5),), (x,), (grad,))
    assert torch.equal(found, torch.zeros(2, 5))


def test_gradients_made_in_inference_mode():
    x = leaf(2, 5)
    with torch.inference_mode():
        grad = torch.randn(2, 5)
    (found,) = torch.autograd.grad(SiLUFwdOp()(x), x, grad)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(x), x, grad.clone())
    torch.testing.assert_close(found, expected)


def test_a_backward_op_alone_in_inference_mode():
    op, x, grad = SiLUFwdOp.backward_class()(), torch.randn(2, 5), torch.randn(2, 5)
    wide = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(wide), wide, grad.double())
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(op(grad, x), expected.float())
            torch.testing.assert_close(op(grad.clone(), x.clone()), expected.float())
    operator = torch.ops.tileops.elementwise_silu_bwd.default
    with torch.inference_mode():
        torch.testing.assert_close(operator(grad, x, op._instance_key), expected.float())


@pytest.mark.parametrize("layout", ["nested", "sparse"])
def test_layouts_without_strides_are_refused(layout):
    if layout == "nested":
        x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], requires_grad=True)
    else:
        x = torch.randn(3, 8).to_sparse().requires_grad_()
    op = SiLUFwdOp()
    for _ in range(3):
        op(leaf(3, 8))  # then a guard is there, which would end the process
    for _ in range(2):
        with pytest.raises(CheckError, match="a strided tensor"):
            op(x)
