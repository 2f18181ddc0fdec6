"""Ops that become their decomposition: right, in the order of the caller's writes, and where they may."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tileops
from tests.cases import float32_calls, op_classes, workload_call, workloads_in_every_dtype
from tests.conformance.test_gradients import NAMES as DIFFERENTIABLE
from tests.conformance.test_gradients import calls, gradients, hold
from tests.oracle import call, exact, strided
from tests.rewriting import rewritten
from tileops.backend import register_kernel_builder
from tileops.backend.tolerances import compare
from tileops.elementwise import DropoutFwdOp, FloorDivideFwdOp, SiLUAndMulFwdOp
from tileops.engine.errors import BackwardError
from tileops.fusion import policy
from tileops.gemm import GEMMFwdOp
from tileops.norm import (
    BatchNormFwdOp,
    FusedAddRMSNormFwdOp,
    FusedAddRMSNormPerTokenQuantFwdOp,
    RMSNormFwdOp,
)
from tileops.rope import RoPEFwdOp

MELTING = sorted(
    name
    for name, cls in op_classes().items()
    if cls.entry.kind != "template" and cls.entry.has_boundary
)
FLOOR = FloorDivideFwdOp()
MAY_DECLINE = (
    "it writes", "it draws random numbers", "its decomposition holds constants",
)  # fmt: skip


def always(op, inputs):
    """A call through the passes, everything inlined that can be; and what they saw."""
    present = [n for n, t in inputs.items() if t is not None]

    def function(*tensors):
        return call(op, dict(zip(present, tensors, strict=True)))

    run, seen = rewritten(function, "always")
    return run(*(inputs[n] for n in present)), seen


def held(op, inputs, result):
    outputs = exact(op, inputs)[0]
    results = result if isinstance(result, tuple) else (result,)
    for declared, given, wanted in zip(op.entry.outputs, results, outputs, strict=True):
        label = f"{op!r}: {declared.name}"
        if wanted is None:
            assert given is None, label
            continue
        found = compare(given, wanted, op.entry.kind)
        assert found.ok, f"{label}: {found.text}"
        assert given.is_contiguous(), label


@pytest.mark.parametrize("name", MELTING)
def test_an_inlined_op_is_what_it_means(name, seed):
    """In float32 with each presence of inputs, and once in a dtype and a workload chosen at random."""
    made = float32_calls(name, seed)
    cases = workloads_in_every_dtype(name)
    _, workload = cases[torch.randint(len(cases), ()).item()]
    for one in [*made, workload_call(name, workload, seed, 96)]:
        inputs = dict(one.inputs)
        result, seen = always(
            one.op, {n: None if t is None else t.clone() for n, t in inputs.items()}
        )
        if seen.inlined() == [name]:
            held(one.op, inputs, result)
            assert not any("tileops" in target for target in seen.targets())
        else:
            assert seen.declined()[name].startswith(MAY_DECLINE), seen.report


@pytest.mark.parametrize("name", sorted(set(DIFFERENTIABLE) & set(MELTING)))
def test_its_gradient_is_that_of_the_meaning(name, seed):
    for op, inputs in calls(name, seed)[:2]:
        seen = []

        def run(op, given, seen=seen):
            result, what = always(op, given)
            seen.append(what)
            return result

        names, grads, found = gradients(op, inputs, run)
        hold(op, inputs, names, grads, found)
        if not seen[0].inlined():
            assert seen[0].declined()[name].startswith(MAY_DECLINE), seen[0].report


def test_any_strides_come_in_and_contiguous_ones_out():
    op, weight = RMSNormFwdOp(6, eps=1e-6), torch.randn(6)
    expected = None
    for label, x in strided(torch.randn(3, 5, 6)):
        expected = F.rms_norm(x.double(), (6,), weight.double(), 1e-6)
        run, seen = rewritten(lambda x: op(x, weight), "always")
        result = run(x)
        assert seen.inlined() == ["RMSNormFwdOp"], label
        assert result.is_contiguous(), label
        assert compare(result, expected, "reduction").ok, label


def test_what_is_written_round_an_inlined_op_stays_in_order():
    """Its input before and after, its result in place through a view, an input that it returns."""
    norm, silu = RMSNormFwdOp(8, eps=1e-6), SiLUAndMulFwdOp()

    def function(x):
        x = x + 0
        before = norm(x)
        view = x[1:]
        view.mul_(2)
        after = norm(x)
        after[0].add_(1)
        half = silu(after)
        after.zero_()
        return before, after, half, x

    x = torch.randn(4, 8)
    run, seen = rewritten(function, "always")
    result, expected = run(x), function(x)
    assert seen.inlined() == ["RMSNormFwdOp", "RMSNormFwdOp", "SiLUAndMulFwdOp"]
    for given, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(given, wanted)


def test_a_result_is_no_alias_of_an_input(monkeypatch):
    """A decomposition may return its input, an op never does: writing the result must not reach it."""
    monkeypatch.setattr(RMSNormFwdOp, "decomposition", staticmethod(lambda x, weight, **_: x))

    def function(x):
        x = x + 0
        return op(x).add_(1), x

    op, x = RMSNormFwdOp(8), torch.randn(4, 8)
    run, seen = rewritten(function, "always")
    result, same = run(x)
    assert seen.inlined() == ["RMSNormFwdOp"]
    torch.testing.assert_close(result, x + 1)
    torch.testing.assert_close(same, x)


def test_a_result_of_other_type_than_the_op_promises_takes_the_rewrite_back(monkeypatch):
    op, x = RMSNormFwdOp(8), torch.randn(4, 8)
    expected = op(x)
    real = RMSNormFwdOp.decomposition
    monkeypatch.setattr(
        RMSNormFwdOp, "decomposition", staticmethod(lambda *a, **k: real(*a, **k).double())
    )
    run, seen = rewritten(lambda x: op(x) * 2, "always")
    torch.testing.assert_close(run(x), expected * 2)
    reason = seen.declined()["RMSNormFwdOp"]
    assert "dtype torch.float64 instead of torch.float32" in reason
    assert [t for t in seen.targets() if "tileops" in t] == ["tileops.norm_rms_norm_fwd.default"]


def test_two_users_and_two_results():
    op, w = FusedAddRMSNormFwdOp(), torch.randn(8)

    def function(x, r):
        y, total = op(x, r, w)
        again, _ = op(y, total, w)
        return y * 2, y.sum(), total - 1, again

    x, r = torch.randn(3, 8), torch.randn(3, 8)
    run, seen = rewritten(function)
    for given, wanted in zip(run(x, r), function(x, r), strict=True):
        torch.testing.assert_close(given, wanted)
    assert len(seen.inlined()) == 2


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_serves_all_sizes(dynamic):
    norm, rope = RMSNormFwdOp(16, eps=1e-6), RoPEFwdOp(input_layout="2d")

    def function(x):
        return rope(norm(x)) * x.shape[1]

    run, seen = rewritten(function, "always", dynamic=dynamic)
    for batch, length in ((3, 5), (4, 7), (6, 11), (5, 13)):
        x = torch.randn(batch, length, 2, 16)
        torch.testing.assert_close(run(x), function(x))
    assert len(seen.graphs) == (1 if dynamic else 2)
    assert set(seen.inlined()) == {"RMSNormFwdOp", "RoPEFwdOp"}


# ---- where it must not --------------------------------------------------------------------------


def reasons(function, *inputs, option="always", **more):
    """Reasons for which the ops of ``function`` stay what they are, and its result."""
    run, seen = rewritten(function, option, **more)
    result = run(*inputs)
    return seen.declined(), result


def test_a_template_that_was_changed_did_not_stay():
    gemm, x, w = GEMMFwdOp(), torch.randn(4, 8), torch.randn(5, 8)
    for function, rows, kind in (
        (lambda x, w: gemm(x, w).relu() * 2, 4, "fused"),
        (lambda x, w: gemm(x, w), 1, "inlined"),
    ):
        run, seen = rewritten(function, "always")
        run(x[:rows], w)
        assert [event.kind for event in seen.report.events] == [kind]


def test_templates_random_ops_and_autocast_stay():
    gemm, drop, norm = GEMMFwdOp(), DropoutFwdOp(0.5), RMSNormFwdOp(8)
    x = torch.randn(8, 8)
    found, _ = reasons(lambda x: (gemm(x, x), drop(x)), x)
    assert found["GEMMFwdOp"] == "a template keeps its kernel"
    assert found["DropoutFwdOp"] == "it draws random numbers"

    def under(x):
        with torch.autocast("cpu", torch.bfloat16):
            return norm(x) @ x

    found, result = reasons(under, x)
    assert found["RMSNormFwdOp"] == "it is called under torch.autocast"
    assert result.dtype == under(x).dtype


def test_no_gradient_comes_from_a_result_that_declares_none():
    norm, w = FusedAddRMSNormPerTokenQuantFwdOp(quant_dtype=torch.int8), torch.randn(8)

    def function(x, r):
        return norm(x, r, w)

    x, r = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    run, seen = rewritten(function, "always")
    results, expected = run(x, r), function(x, r)
    assert seen.inlined() == ["FusedAddRMSNormPerTokenQuantFwdOp"]
    assert [t.requires_grad for t in results] == [t.requires_grad for t in expected]
    assert any(t.requires_grad for t in results)
    assert reasons(lambda x: FLOOR(x, x + 1), x)[0]["FloorDivideFwdOp"].startswith(
        "it declares no gradient for input"
    )


def test_an_input_without_gradient_that_asks_for_one_keeps_the_op_and_its_refusal():
    norm, x = BatchNormFwdOp(), torch.randn(4, 3, 5)
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    assert reasons(lambda x, m, v: norm(x, m, v)[0] * 2, x, mean, var)[0] == {}
    found, result = reasons(lambda x, m, v: norm(x, m, v)[0] * 2, x, mean.requires_grad_(), var)
    assert found["BatchNormFwdOp"] == "it declares no gradient for running_mean, which asks for one"
    with pytest.raises(BackwardError, match="running_mean"):
        result.sum().backward()


def test_ops_under_a_checkpoint_stay():
    norm, x = RMSNormFwdOp(8), torch.randn(4, 8, requires_grad=True)

    def function(x):
        return checkpoint(lambda x: norm(x) * 2, x, use_reentrant=False)

    run, seen = rewritten(function, "always")
    torch.testing.assert_close(run(x), function(x))
    assert seen.inlined() == []


def test_policies_of_call_options_and_entry():
    norm, x = RMSNormFwdOp(8), torch.randn(4, 8)

    def said(word):
        def function(x):
            with policy(word):
                y = norm(x)
            return y * 2

        return function

    assert reasons(said("never"), x)[0] == {"RMSNormFwdOp": "policy never, by call"}
    assert reasons(lambda x: norm(x) * 2, x, option="never")[0] == {
        "RMSNormFwdOp": "policy never, by options"
    }
    run, seen = rewritten(said("always"), "never")
    torch.testing.assert_close(run(x), norm(x) * 2)
    assert seen.inlined() == ["RMSNormFwdOp"]
    torch.testing.assert_close(said("never")(x), norm(x) * 2)  # eager code ignores it
    with pytest.raises(
        ValueError, match="fusion policy 'sometimes'; accepted: never, always, auto"
    ):
        policy("sometimes")


def test_an_entry_has_a_policy(monkeypatch):
    norm, x = RMSNormFwdOp(8), torch.randn(4, 8)
    assert norm.entry.fusion == "auto"
    object.__setattr__(norm.entry, "fusion", "never")
    try:
        found, _ = reasons(lambda x: norm(x) * 2, x, option=None)
    finally:
        object.__setattr__(norm.entry, "fusion", "auto")
    assert found == {"RMSNormFwdOp": "policy never, by entry"}


def test_a_target_keeps_its_ops():
    def build(*specs, **params):
        return lambda x, weight: torch.full_like(x, 7.0)

    register_kernel_builder("fusion_test", "RMSNormFwdOp", build)
    mine, plain, x = RMSNormFwdOp(8, target="fusion_test"), RMSNormFwdOp(8), torch.randn(4, 8)
    found, result = reasons(lambda x: mine(x) + plain(x) * 0, x)
    assert found["RMSNormFwdOp"] == "target 'fusion_test' serves it"
    assert (result == 7).all()
    with tileops.use_target("fusion_test"):
        run, seen = rewritten(lambda x: plain(x) * 2, "always")
        assert (run(x) == 14).all()
        assert seen.inlined() == []


def test_events_go_to_recordings_with_the_users_place():
    norm, x = RMSNormFwdOp(8), torch.randn(4, 8)
    run, seen = rewritten(lambda x: norm(x) * 2)
    with tileops.recording() as events:
        run(x)
    (event,) = (e for e in events if e.kind == "inlined")
    assert event.data["op"] == "RMSNormFwdOp"
    assert "fusion saves" in event.data["why"]
    assert "test_inlining.py" in str(seen.report)
