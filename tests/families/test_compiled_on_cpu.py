"""Calls so large that Inductor's code serves them on the CPU, and those that it leaves to ATen, against
float64: means far from 0, long rows, odd sizes. Each compilation takes seconds, so cases are few."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import check, same_bits
from tileops.elementwise import DivFwdOp, DropoutFwdOp, ELUFwdOp
from tileops.elementwise.kernels.dropout_cpu import CHUNK, Dropout
from tileops.engine.plan import in_tree_kernels
from tileops.engine.settings import settings
from tileops.norm import (
    BatchNormFwdOp,
    FusedAddRMSNormFwdOp,
    InstanceNormFwdOp,
    RMSNormBwdOp,
    RMSNormFwdOp,
)
from tileops.reduction import (
    LogSoftmaxFwdOp,
    MeanFwdOp,
    StdFwdOp,
    SumFwdOp,
    VarFwdOp,
    VarMeanFwdOp,
    VectorNormFwdOp,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def channels(shape, dtype, far=0.0, statistics=True, affine=F32):
    """The input of a norm whose channels lie around different numbers."""
    count = shape[1]
    centre = far * torch.randn(count) + torch.randn(count)
    spread = torch.rand(count) + 0.1
    x = torch.randn(shape) * spread.view(-1, *[1] * (len(shape) - 2))
    inputs = {"input": (x + centre.view(-1, *[1] * (len(shape) - 2))).to(dtype)}
    if statistics:
        inputs |= {"running_mean": centre, "running_var": spread.square()}
    return inputs | {name: torch.randn(count).to(affine) for name in ("weight", "bias")}


def served(op, inputs, kernel):
    check(op, inputs)
    assert op.last_call.kernel == kernel


@pytest.mark.parametrize("length", [4096, 5120, 5101])
def test_long_rows_through_aten(length):
    """In parts of 256 where they are more than 4096 and made of these."""
    x, weight = torch.randn(3, length), torch.randn(length)
    served(RMSNormFwdOp((length,), 1e-6), {"x": x, "weight": weight}, "decomposition")
    check(RMSNormFwdOp((length // 4, 4), 1e-6), {"x": x[:, : length // 4 * 4].view(3, -1, 4)})
    check(RMSNormBwdOp((length,), 1e-6), {"grad_output": x.flip(0), "x": x, "weight": weight})
    half = {"input": x.to(BF16), "residual": x.flip(1).to(BF16), "weight": weight.to(BF16)}
    check(FusedAddRMSNormFwdOp(1e-6), half)


@pytest.mark.parametrize("length", [131072 + 256, 131101])
def test_long_rows(length):
    op = RMSNormFwdOp((length,), 1e-6)
    served(op, {"x": torch.randn(2, length), "weight": torch.randn(length)}, "inductor")


@pytest.mark.parametrize(("shape", "dtype"), [((5, 3, 97, 101), F32), ((30011, 5), BF16)])
def test_batch_norm_trains(shape, dtype):
    op = BatchNormFwdOp(training=True, momentum=0.25, eps=1e-3)
    served(op, channels(shape, dtype), "inductor")


def test_batch_norm_evaluates():
    op, shape = BatchNormFwdOp(eps=1e-3), (7, 23, 29, 31)
    served(op, channels(shape, F32, far=1e3), "inductor")
    served(op, channels(shape, F16, far=30.0), "inductor")


def test_instance_norm():
    shape = (3, 5, 97, 101)
    served(InstanceNormFwdOp(), channels(shape, F32), "inductor")
    served(InstanceNormFwdOp(False), channels(shape, F32, far=1e3), "inductor")
    served(InstanceNormFwdOp(), channels(shape, F32, statistics=False), "decomposition")


@pytest.mark.parametrize(
    ("cls", "shape", "dim", "dtype"),
    [
        (VarMeanFwdOp, (3, 50021), -1, F32),
        (VarFwdOp, (1009, 131), 0, F32),
        (StdFwdOp, (401, 331), -1, F16),
    ],
)
def test_variances(cls, shape, dim, dtype):
    op = cls(dim=dim, correction=1.0)
    served(op, {"input": torch.randn(shape).to(dtype)}, "inductor")
    x = torch.randn(shape) + 100.0  # a sum of squares would leave nothing of the variance
    x.select(dim, 0)[0], x.select(dim, 1)[1] = torch.inf, torch.nan
    served(op, {"input": x.to(dtype)}, "inductor")


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (SumFwdOp(), "input"),
        (MeanFwdOp(dim=(0, 2), keepdim=True), "input"),
        (VectorNormFwdOp(ord=float("inf"), dim=0), "x"),
        (LogSoftmaxFwdOp(dim=-1), "input"),
    ],
)
def test_halves(op, name):
    for dtype, kernel in ((BF16, "inductor"), (F32, "decomposition")):
        # Of one sign: a sum of everything has no others beside it by which to say what is small.
        served(op, {name: torch.rand(31, 67, 71).to(dtype)}, kernel)
    x = torch.randn(31, 67, 71)
    x[3, 5, 7], x[4, 5, 8] = torch.inf, torch.nan
    served(op, {name: x.to(BF16)}, "inductor")


def test_quotients_of_halves():
    x, y = torch.randn(2, 401, 331).unbind()
    y[3, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    for mode, kernel in (
        ("trunc", "inductor"),
        ("floor", "decomposition"),
        (None, "decomposition"),
    ):
        op = DivFwdOp(rounding_mode=mode)
        served(op, {"input": x.to(BF16) * 50, "other": y.to(BF16)}, kernel)
    served(DivFwdOp(rounding_mode="trunc"), {"input": x, "other": y}, "decomposition")


def test_dropout():
    """In chunks, of which the last is no multiple of four; by one compilation for all."""
    op, x = DropoutFwdOp(0.25, True, seed=2**62 + 5), torch.randn(1, 131075)
    served(op, {"input": x}, "compiled_dropout")  # which holds chunked_dropout to it as well
    for p, dtype, inplace in ((0.25, F16, False), (0.75, F32, True), (1.0, BF16, False)):
        x = torch.randn(CHUNK + 7).to(dtype)
        x[:9] = torch.inf
        op = DropoutFwdOp(p, True, inplace=inplace, seed=3)
        given, written = x.clone(), x.clone()
        result = op(given)
        assert op.last_call.kernel == "compiled_dropout"
        entry = Dropout.entry_for(op.last_call.call)
        wanted = entry.bind(entry.build(), op.last_call.call)(written)
        assert same_bits(result, written if inplace else wanted)
    op = DropoutFwdOp(0.5, False)
    assert torch.equal(op(x), x)
    assert op.last_call.kernel == "chunked_dropout"


@pytest.fixture
def fresh_settings():
    yield
    settings.cache_clear()


def test_nothing_is_compiled_where_the_setting_says_so(fresh_settings, monkeypatch):
    monkeypatch.setenv("TILEOPS_CPU_KERNEL", "plain")
    settings.cache_clear()
    for cls in (DropoutFwdOp, VarFwdOp, BatchNormFwdOp):
        names = {kernel.name for kernel in in_tree_kernels(cls, "cpu")}
        assert not {"inductor", "compiled_dropout"} & names
    monkeypatch.setenv("TILEOPS_CPU_KERNEL", "inductor")
    settings.cache_clear()
    names = {kernel.name for kernel in in_tree_kernels(DropoutFwdOp, "cpu")}
    assert names == {"chunked_dropout", "compiled_dropout", "decomposition"}


def test_a_class_says_for_which_calls_compiling_does_not_pay():
    op = SumFwdOp()
    for dtype, reason in ((F32, "ATen's kernel is faster for float32"), (BF16, "elements on")):
        op(torch.randn(4, 5).to(dtype) if dtype is BF16 else torch.randn(401, 331))
        assert any(name == "inductor" and reason in why for name, why in op.last_call.refused)
    # What was found of the forward's dtypes says nothing of the gradient.
    assert SumFwdOp.backward_class().kernel.compiled_from is None
    assert VarFwdOp.backward_class().kernel.compiled_from == VarFwdOp.kernel.compiled_from


def test_what_compiled_code_writes_counts_as_written():
    op, x = ELUFwdOp(inplace=True), torch.randn(401, 331)
    for _ in range(4):
        wanted, version = torch.nn.functional.elu(x), x._version
        assert op(x) is x
        torch.testing.assert_close(x, wanted)
        assert x._version > version
    assert op.last_call.kernel == "inductor"
