"""What compiled code calls for a node: the op's own function where nothing watches, the operator else."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tileops
from tileops.attention import PagedKVCacheWriteFwdOp
from tileops.backend import register_kernel_builder
from tileops.elementwise import AbsFwdOp, LeakyReLUFwdOp
from tileops.engine.boundary.compiled_calls import node, with_operators
from tileops.norm import BatchNormFwdOp, RMSNormFwdOp

pytestmark = pytest.mark.usefixtures("own_frames")


@pytest.fixture
def own_frames():
    torch._dynamo.reset()


@pytest.fixture
def dispatched(monkeypatch):
    """Counts the calls of a class that go through the dispatcher from compiled code."""
    counts: dict[type, int] = {}

    def watch(cls: type) -> dict[type, int]:
        names = cls._call_boundary.__globals__
        for index in range(len(cls.compile_op_names)):
            operator = names[f"_dispatched_{index}"]

            def call(*args: Any, operator: Any = operator, **kwargs: Any) -> Any:
                counts[cls] = counts.get(cls, 0) + 1
                return operator(*args, **kwargs)

            monkeypatch.setitem(names, f"_dispatched_{index}", call)
        return counts

    return watch


def rms(x, weight, eps):
    scale = 1.0 if weight is None else weight.double()
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * scale).to(x.dtype)


def leaky(x):
    return torch.where(x > 0, x, 0.25 * x)


class Calls:
    """An op, inputs of a call, and what they must give."""

    def absolute():
        op = AbsFwdOp()
        return op, lambda: (torch.randn(5, 7),), lambda x: x.abs()

    def an_absent_weight():
        op = RMSNormFwdOp(11, eps=0.5)
        return op, lambda: (torch.randn(3, 11),), lambda x: rms(x, None, 0.5)

    def a_weight():
        op = RMSNormFwdOp(11, eps=0.25)
        inputs = lambda: (torch.randn(3, 11), torch.randn(11))  # noqa: E731
        return op, inputs, lambda x, weight: rms(x, weight, 0.25)

    def no_statistics():
        op = BatchNormFwdOp()
        inputs = lambda: (torch.randn(4, 3), torch.randn(3), torch.rand(3) + 0.5)  # noqa: E731
        return op, inputs, lambda x, m, v: ((x - m) / (v + 1e-5).sqrt(), None, None)

    def a_written_input():
        op = LeakyReLUFwdOp(negative_slope=0.25, inplace=True)
        return op, lambda: (torch.randn(5, 7),), leaky


def warm(call, inputs, *, times=3):
    for _ in range(times):
        call(*inputs())


@pytest.mark.parametrize("case", [name for name in vars(Calls) if not name.startswith("_")])
def test_repeated_calls_do_not_enter_the_dispatcher(case, dispatched):
    op, inputs, expected = vars(Calls)[case]()
    counts = dispatched(type(op))
    call, codes = torch.compile(lambda *given: op(*given), fullgraph=True), None
    for turn in range(5):
        given = inputs()
        copies = [value.clone() for value in given]
        if turn:
            result = call(*given)
        else:
            result, codes = run_and_get_code(call, *given)
        wanted = expected(*copies)
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
        if op.entry.branches[0].writes or getattr(op, "inplace", False):
            assert result is given[0]
        if turn == 2:
            assert counts[type(op)]  # the first call at least, which made the plan
            before = dict(counts)
    assert counts == before
    operator = torch.ops.tileops.__name__ + "." + op.compile_op_names[0].split("::")[1]
    assert operator not in re.sub("#.*|assert_.*", "", codes[0])
    assert operator in with_operators(codes[0])


def test_writes_that_grow(dispatched):
    op = PagedKVCacheWriteFwdOp()
    counts = dispatched(type(op))
    caches = [torch.zeros(4, 16, 1, 8) for _ in range(2)]
    call = torch.compile(lambda *given: op(*given), dynamic=True)
    for tokens in (4, 5, 6, 7, 9, 11):
        new = torch.randn(tokens, 1, 8)
        call(new, new + 1, *caches, torch.arange(tokens))
        for cache, wanted in zip(caches, (new, new + 1), strict=True):
            torch.testing.assert_close(cache.view(-1, 1, 8)[:tokens], wanted)
    assert 0 < counts[type(op)] < 4


def test_gradients(dispatched):
    op = RMSNormFwdOp(16, eps=0.125)
    counts = dispatched(type(op))
    backward = dispatched(type(op).backward_class())
    weight = torch.nn.Parameter(torch.randn(16))
    call = torch.compile(lambda x: op(x, weight).square().sum(), fullgraph=True)
    for turn in range(5):
        x = torch.randn(3, 16, requires_grad=True)
        weight.grad = None
        call(x).backward()
        wide, scale = (
            x.detach().double().requires_grad_(),
            weight.detach().double().requires_grad_(),
        )
        rms_of = (wide.square().mean(-1, keepdim=True) + 0.125).sqrt()
        (wide / rms_of * scale).square().sum().backward()
        torch.testing.assert_close(x.grad, wide.grad.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weight.grad, scale.grad.float(), rtol=1e-4, atol=1e-4)
        if turn == 2:
            before = dict(counts)
    assert counts == backward == before
    assert len(before) == 2


def test_the_target_is_decided_at_each_call():
    register_kernel_builder(
        "inverted_by_compiled_calls", "AbsFwdOp", lambda *specs, **params: lambda x: -x.abs()
    )
    op, x = AbsFwdOp(), torch.randn(4, 9)
    call = torch.compile(lambda x: op(x), fullgraph=True)
    warm(call, lambda: (x,))
    for _ in range(4):
        with tileops.use_target("inverted_by_compiled_calls"):
            torch.testing.assert_close(call(x), -x.abs())
        torch.testing.assert_close(call(x), x.abs())


def test_subgraphs_call_it_too(dispatched):
    op = AbsFwdOp()
    counts = dispatched(type(op))

    def call(x):
        return torch.cond(x.sum() > 0, lambda x: op(x) + 1, lambda x: op(x) - 1, (x,))

    compiled = torch.compile(call, fullgraph=True)
    x = torch.randn(4, 9) + 1
    for _ in range(4):
        torch.testing.assert_close(compiled(x), x.abs() + 1)
        torch.testing.assert_close(compiled(-x), x.abs() - 1)
    assert 0 < counts[type(op)] < 5


# ---- what watches --------------------------------------------------------------------------------


def hot_node():
    """A function of compiled code that would go past the dispatcher, and its inputs."""
    op = AbsFwdOp()
    call = node("elementwise_abs_fwd", op._instance_key)
    x = torch.randn(4, 9)
    for _ in range(4):
        call(x, op._instance_key)
    return op, lambda x: call(x, op._instance_key), x


def test_a_profiler_sees_the_operator(dispatched):
    op = AbsFwdOp()
    call, x = torch.compile(lambda x: op(x), fullgraph=True), torch.randn(4, 9)
    warm(call, lambda: (x,), times=4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(x)
    assert op.compile_op_names[0] in {event.name for event in profile.events()}


def test_modes_see_the_operator():
    op, call, x = hot_node()
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode in (Dispatch, Function):
        with mode():
            call(x)
        assert torch.ops.tileops.elementwise_abs_fwd.default in seen
        seen.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(call(x)) is FakeTensor


def test_transforms_tangents_and_gradients_are_seen():
    op, call, x = hot_node()
    torch.testing.assert_close(torch.vmap(call)(x), x.abs())
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(x), x.sign())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        torch.testing.assert_close(forward_ad.unpack_dual(call(dual)).tangent, x.sign())
    leaf = x.clone().requires_grad_()
    for _ in range(3):
        (found,) = torch.autograd.grad(call(leaf).sum(), leaf)
        torch.testing.assert_close(found, x.sign())


def test_no_tensor_and_a_nested_one_are_refused():
    op, call, x = hot_node()
    with pytest.raises((TypeError, RuntimeError)):
        call(3.0)
    with pytest.raises(tileops.CheckError):
        call(torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]))


# ---- what it stands for changes ----------------------------------------------------------------------


def test_an_op_that_is_gone_is_made_again():
    key = RMSNormFwdOp(6, eps=0.75)._instance_key
    call, x = node("norm_rms_norm_fwd", key), torch.randn(2, 6)
    for _ in range(3):
        torch.testing.assert_close(call(x, None, key), rms(x, None, 0.75))


def test_an_operator_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match="lost_fwd"):
        node("lost_fwd", "lost.LostFwdOp()")(torch.randn(2))


# ---- where Inductor writes something else ----------------------------------------------------------


def test_a_release_without_the_table_keeps_the_operator(monkeypatch):
    from torch._inductor.codegen import custom_extern_kernel_codegen as table

    assert table.CUSTOM_EXTERN_KERNEL_CODEGEN is not None  # or the library has fallen back
    op, x = RMSNormFwdOp(9, eps=0.375), torch.randn(2, 9)
    monkeypatch.delattr(table, "CUSTOM_EXTERN_KERNEL_CODEGEN")
    from torch._inductor.codegen import wrapper

    monkeypatch.setattr(wrapper, "CUSTOM_EXTERN_KERNEL_CODEGEN", {})
    with torch._inductor.config.patch(force_disable_caches=True):
        result, codes = run_and_get_code(torch.compile(lambda x: op(x)), x)
    assert "= torch.ops.tileops.norm_rms_norm_fwd.default(" in codes[0]
    torch.testing.assert_close(result, rms(x, None, 0.375))


@pytest.mark.slow
def test_code_in_cpp_keeps_the_operator():
    op, x = RMSNormFwdOp(9, eps=0.4375), torch.randn(2, 9)
    with torch._inductor.config.patch(force_disable_caches=True, cpp_wrapper=True):
        result, codes = run_and_get_code(torch.compile(lambda x: op(x) + 1), x)
    assert "tileops_node" not in codes[0]
    assert "tileops.norm_rms_norm_fwd.default" in codes[0]
    torch.testing.assert_close(result, rms(x, None, 0.4375) + 1)
