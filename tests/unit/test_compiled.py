"""A decomposition compiled for the CPU: what a repeated call repeats, and when it is traced anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tileops.elementwise import CeilFwdOp, ELUFwdOp, FloorFwdOp, MulFwdOp, SiLUFwdOp, TruncFwdOp
from tileops.engine import compiled
from tileops.engine.decomposition import _owning, decomposition_kernels
from tileops.norm import BatchNormFwdOp
from tileops.quantization import FP8QuantPerTokenGroupFwdOp
from tileops.reduction import VarMeanFwdOp


def node(op, *inputs):
    """The compiled kernel of a call of ``op``, bound, after its first run."""
    entry = op.entry
    is_input = next((o.is_input for o in entry.outputs if o.is_input), "")
    kernel = decomposition_kernels(type(op).decomposition, 0, entry.has_out, is_input)[1]
    call = op._spec(inputs)
    served = kernel.entry_for(call)
    run = served.bind(served.build(), call)
    run(*inputs)
    return run.trusted


@pytest.fixture
def traced(monkeypatch):
    """The calls that went by Dynamo."""
    calls = []
    through = compiled.Compiled._traced

    def count(self, args, changed):
        calls.append(args)
        return through(self, args, changed)

    monkeypatch.setattr(compiled.Compiled, "_traced", count)
    return calls


def test_a_repeated_call_enters_the_code_at_once(traced):
    run = node(MulFwdOp(), torch.randn(5, 7), torch.randn(7))
    assert len(traced) == 1
    for _ in range(3):
        x, y = torch.randn(5, 7), torch.randn(7)
        assert torch.equal(run(x, y), x * y)
    weight = torch.nn.Parameter(torch.randn(7))
    with torch.no_grad():
        result = run(x, weight)
    assert torch.equal(result, x * weight.detach())
    assert not result.requires_grad
    assert len(traced) == 1


def test_numbers_are_constants_of_the_code(traced):
    """Else Dynamo makes tensors of them, which no call gives again."""
    op = ELUFwdOp(alpha=0.3125)
    run = node(op, torch.randn(3, 11))
    x = torch.randn(3, 11)
    torch.testing.assert_close(run(x), torch.nn.functional.elu(x, 0.3125))
    assert len(traced) == 1


def test_two_outputs_and_none(traced):
    x = torch.randn(6, 13)
    variance, mean = node(VarMeanFwdOp(dim=-1), torch.randn(6, 13))(x)
    torch.testing.assert_close(variance, x.var(-1))
    torch.testing.assert_close(mean, x.mean(-1))
    given = (torch.randn(3), torch.rand(3) + 1, None, None)
    x = torch.randn(4, 3, 5)
    output, *statistics = node(BatchNormFwdOp(training=False), torch.randn(4, 3, 5), *given)(
        x, *given
    )
    torch.testing.assert_close(output, torch.nn.functional.batch_norm(x, given[0], given[1]))
    assert statistics == [None, None]
    assert len(traced) == 2


def test_what_is_written_is_written_in_place(traced):
    run = node(SiLUFwdOp(inplace=True), torch.randn(4, 9))
    x = torch.randn(4, 9)
    wanted = torch.nn.functional.silu(x)
    assert run(x) is None
    torch.testing.assert_close(x, wanted)
    assert len(traced) == 1


def test_another_number_of_threads_is_traced_anew(traced):
    x, y, threads = torch.randn(5, 7), torch.randn(5, 7), torch.get_num_threads()
    run = node(MulFwdOp(), x, y)
    try:
        torch.set_num_threads(threads + 1)
        for _ in range(3):
            assert torch.equal(run(x, y), x * y)
    finally:
        torch.set_num_threads(threads)
    assert len(traced) == 2


def test_one_tensor_twice_is_never_repeated(traced):
    """Inference tensors are not detached, so Dynamo's code may be for the one alone."""
    run = compiled.Compiled(lambda x, y: x * y, "product").bound()
    with torch.inference_mode():
        x, y = torch.randn(5, 7), torch.randn(5, 7)
        run(x, x)
        kept = run.trusted
        for given in ((x, y), (y, x), (x, y)):
            assert torch.equal(kept(*given), x * y)
            assert len(traced) == 2


@pytest.mark.parametrize("op", [FloorFwdOp(), CeilFwdOp(), TruncFwdOp()], ids=repr)
def test_what_is_exact_is_exact_when_compiled(op):
    """Signs of zeros included."""
    edges = torch.tensor([0.0, -0.0, 0.5, -0.5, -1.5, 2.5, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([edges, torch.randn(503) * torch.logspace(-3, 9, 503)])
    exactly = {FloorFwdOp: np.floor, CeilFwdOp: np.ceil, TruncFwdOp: np.trunc}[type(op)]
    result, wanted = node(op, torch.randn(512))(x), torch.from_numpy(exactly(x.numpy()))
    assert torch.equal(result.view(torch.int32), wanted.view(torch.int32))
    assert type(op).kernel.compiled_from is not None


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    def refuse(graph, examples):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "_inductor", refuse)
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    with pytest.warns(RuntimeWarning, match="MulFwdOp.decomposition runs uncompiled"):
        run = node(MulFwdOp(), x, y)
    assert torch.equal(run(x, y), x * y)


def test_a_kernel_of_many_parts_is_right_when_repeated():
    op = FP8QuantPerTokenGroupFwdOp()
    run = node(op, torch.randn(4, 256))
    x = torch.randn(4, 256)
    plain = type(op).decomposition(x, **op._params)
    for ours, theirs in zip(run(x), plain, strict=True):
        assert torch.equal(ours.float(), theirs.float())


# ---- whose memory a result is ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [lambda x: x, lambda x: x[:2], lambda x: (x + 1).t(), lambda x: (x + 1)[1:]],
)
def test_a_result_that_is_not_its_own_is_asked_of_every_call(function):
    run = _owning(function, 1)
    for _ in range(3):
        x = torch.randn(3, 4)
        result = run(x)
        assert torch.equal(result, function(x))
        assert result.is_contiguous()
        assert not result._is_view()
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert not hasattr(run, "trusted")


def test_an_own_result_is_asked_once():
    def function(x):
        return x + 1

    run = _owning(function, 1)
    run(torch.randn(3))
    assert run.trusted is function


def test_inference_mode_which_has_no_views_proves_nothing():
    run = _owning(lambda x: (x + 1)[1:], 1)
    with torch.inference_mode():
        run(torch.randn(3))
    assert not hasattr(run, "trusted")


def test_results_of_another_type_are_asked_of_every_call():
    run = _owning(lambda x: torch.max(x, 0), 2)
    result = run(torch.randn(3, 4))
    assert type(result) is tuple
    assert not hasattr(run, "trusted")
