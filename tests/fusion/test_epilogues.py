"""What follows a product moves into it: right in meaning, and only where it may and should."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tileops
from tests.rewriting import rewritten
from tileops.attention import GQADenseFwdOp
from tileops.backend import DeviceFacts, register_kernel_builder
from tileops.backend.tolerances import compare
from tileops.elementwise import AddFwdOp, GELUFwdOp
from tileops.fusion import backend, cost, last_report, policy
from tileops.fusion.cost import epilogue_loses
from tileops.gemm import GEMMEpilogueFwdOp, GEMMFwdOp

OP = "GEMMEpilogueFwdOp"
GEMM, TURNED, ATTENTION = GEMMFwdOp(), GEMMFwdOp(False, False), GQADenseFwdOp()
GELU, ADD = GELUFwdOp(), AddFwdOp()


def fused(seen):
    return [data["takes"] for report in seen.reports for data in report.of("fused")]


def declined(seen):
    return [d["reason"] for r in seen.reports for d in r.of("declined") if d["op"] == OP]


def tensors(*shapes, dtype=torch.float64):
    return [torch.randn(shape).to(dtype) for shape in shapes]


X, W, BIAS, RESIDUAL = (3, 5, 8), (6, 8), (6,), (3, 5, 6)

MEANINGS = {
    "linear, gelu": (lambda x, w, b, r: F.gelu(F.linear(x, w, b)), "gelu"),
    "linear, tanh": (lambda x, w, b, r: F.gelu(F.linear(x, w, b), approximate="tanh"), "gelu_tanh"),
    "linear without bias": (lambda x, w, b, r: F.silu(F.linear(x, w)), "silu"),
    "matmul": (lambda x, w, b, r: torch.relu(x @ w.t() + b), "bias, relu"),
    "bias first": (lambda x, w, b, r: (b + torch.matmul(x, w.t())).relu(), "bias, relu"),
    "residual": (lambda x, w, b, r: F.linear(x, w, b) + r, "residual"),
    "residual first": (lambda x, w, b, r: r + F.linear(x, w), "residual"),
    "whole": (lambda x, w, b, r: F.silu(x @ w.mT + b) * 0.5 + r, "bias, silu, scale, residual"),
    "two scales": (lambda x, w, b, r: 2 * (F.linear(x, w) / 4) + r, "scale, scale, residual"),
    "rows of their own": (lambda x, w, b, r: F.relu(torch.mm(x[0], w.t())), "relu"),
    "addmm": (lambda x, w, b, r: F.gelu(torch.addmm(b, x[0], w.t())), "gelu"),
    "addmm of aten": (lambda x, w, b, r: torch.ops.aten.relu(torch.ops.aten.addmm(b, x[0], w.t())), "relu"),
    "a turned": (lambda x, w, b, r: F.gelu(x[0].t().contiguous().t() @ w.t()), "gelu"),
    "an op": (lambda x, w, b, r: F.gelu(GEMM(x[0], w) + b), "bias, gelu"),
    "an op, turned": (lambda x, w, b, r: TURNED(x[0], w.t()).relu() + r[0], "relu, residual"),
    "ops behind it": (lambda x, w, b, r: ADD(GELU(F.linear(x, w, b)), r), "gelu, residual"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MEANINGS)
def test_it_means_the_same(name, dtype, seed):
    function, taken = MEANINGS[name]
    torch.manual_seed(seed)
    inputs = tensors(X, W, BIAS, RESIDUAL, dtype=dtype)
    run, seen = rewritten(function, "always")
    result = run(*inputs)
    assert fused(seen) == [taken], seen.report
    wanted = function(*inputs)
    assert (result.shape, result.stride(), result.dtype) == (
        wanted.shape,
        wanted.stride(),
        wanted.dtype,
    )
    # The ops in it take float64 too; eager in it is the meaning.
    found = compare(result, function(*(t.double() for t in inputs)), "template")
    assert found.ok, found.text


def test_what_is_wide_stays_wide():
    """Casts between: from a narrow product to a wide result, and back."""
    x, w, b = tensors((4, 8), (6, 8), (6,), dtype=torch.bfloat16)

    def function(x, w, b):
        return F.gelu(F.linear(x, w, b).float()), F.silu(F.linear(x, w, b).float()).to(x.dtype)

    run, seen = rewritten(function, "always")
    results = run(x, w, b)
    assert fused(seen) == ["cast, gelu", "cast, silu, cast"]
    assert [t.dtype for t in results] == [torch.float32, torch.bfloat16]
    inner = F.linear(*(t.double() for t in (x, w, b)))
    for result, wanted in zip(results, (F.gelu(inner), F.silu(inner)), strict=True):
        assert compare(result, wanted, "template").ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_the_op_does_not_mean_stays(dtype):
    x, w, b, r = tensors((4, 8), (6, 8), (6,), (4, 6), dtype=dtype)
    if dtype is torch.float64:  # nothing would be gained
        functions = [lambda: F.gelu(F.linear(x, w, b))]
    else:
        wide = r.float()
        square = x[:, :6] @ w[:, :6].t()
        functions = [
            lambda: F.linear(x, w, b),
            lambda: F.linear(x, w) + b,
            lambda: F.linear(x, w) + wide,
            lambda: F.linear(x, w) - r,
            lambda: F.linear(x, w) + r[:1],
            lambda: F.linear(x, w) * b,
            lambda: F.linear(x, w).add(r, alpha=2),
            lambda: F.gelu(x[:, ::2] @ w[:, ::2].t()),
            lambda: torch.addmm(b, x, w.t(), beta=2).relu(),
            lambda: torch.addmm(r, x, w.t()).relu(),
            lambda: F.elu(F.linear(x, w)),
            lambda: F.linear(x, w) * float("inf"),
            lambda: F.linear(x, w) / 0,
            lambda: torch.bmm(x[None], w.t()[None]).relu() + square[:, :1],
        ]
    for function in functions:
        run, seen = rewritten(lambda *_, f=function: f(), "always")
        torch.testing.assert_close(run(x, w), function())
        assert fused(seen) == [], seen.report


def test_it_stops_where_the_form_ends():
    x, w, b, r = tensors((4, 8), (6, 8), (6,), (4, 6), dtype=torch.float32)

    def function(x, w, b, r):
        return (
            F.relu(F.linear(x, w, b) * 2),  # not the scale of an activation's result
            F.gelu(F.silu(F.linear(x, w, b))),
            (F.linear(x, w) * 2 + b) * 3,
            (F.linear(x, w, b) + r) * 2,
            F.linear(x, w, b) + r + r,
        )

    run, seen = rewritten(function, "always")
    torch.testing.assert_close(run(x, w, b, r), function(x, w, b, r))
    assert fused(seen) == ["scale", "silu", "scale", "residual", "residual"]


NO_GRAD = {
    "product": (lambda h, b: F.relu(h) * 2 + b.sum(), "linear"),
    "product, then bias": (lambda h, b: F.gelu(h + b), "linear"),
    "activation": (lambda h, b: h + b, "gelu"),
}


@pytest.mark.parametrize("name", NO_GRAD)
def test_a_gradient_that_stops_between_stops_the_chain(name):
    then, last = NO_GRAD[name]

    def function(x, w, b):
        with torch.no_grad():
            h = F.linear(x, w)
            if last == "gelu":
                h = F.gelu(h)
        return then(h, b)

    given = [t.float().requires_grad_() for t in tensors((4, 8), W, BIAS)]
    run, seen = rewritten(function, "always")
    result = run(*given)
    torch.testing.assert_close(result, function(*given))
    result.sum().backward()
    assert [t.grad is not None for t in given] == [False, False, True]
    if last == "linear":
        assert "part of it is under torch.no_grad" in declined(seen)


def test_scales_whose_product_float32_does_not_hold_stay_apart():
    run, seen = rewritten(lambda x, w: F.relu(x @ w) * 1e30 * 1e30, "always")
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    torch.testing.assert_close(run(x, w), F.relu(x @ w) * 1e30 * 1e30)
    assert fused(seen) == ["relu, scale"]


def test_two_users_end_the_chain():
    x, w, b, r = tensors((4, 8), (6, 8), (6,), (4, 6), dtype=torch.float32)

    def function(x, w, b, r):
        inner = F.linear(x, w, b)
        hidden = F.gelu(F.linear(x, w))
        return inner, F.gelu(inner), hidden + r, hidden * 2

    run, seen = rewritten(function, "always")
    torch.testing.assert_close(run(x, w, b, r), function(x, w, b, r))
    assert fused(seen) == ["gelu"]


def test_what_is_written_between_is_read_before():
    x, w, b, r = tensors((4, 8), (6, 8), (6,), (4, 6), dtype=torch.float32)

    def function(x, w, b, r):
        x, r = x + 0, r + 0
        inner = F.linear(x, w, b)
        x.zero_()
        first = F.gelu(inner)
        second = F.linear(x + 1, w)
        r.add_(1)  # before it is read
        second = second + r
        second.mul_(2)  # the result itself
        view = F.linear(x + 2, w).view(-1)
        view.mul_(3)
        return first, second, r, view.relu()

    run, seen = rewritten(function, "always")
    torch.testing.assert_close(run(x, w, b, r), function(x, w, b, r))
    assert fused(seen) == ["residual"]
    assert declined(seen) == ["x is written before first"]


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_serves_all_sizes(dynamic):
    w, b = tensors((6, 8), (6,), dtype=torch.float32)

    def function(x, r):
        return F.gelu(F.linear(x, w, b)) * 2 + r

    run, seen = rewritten(function, "always", dynamic=dynamic)
    for batch, length in ((3, 5), (4, 7), (6, 11)):
        x, r = tensors((batch, length, 8), (batch, length, 6), dtype=torch.float32)
        torch.testing.assert_close(run(x, r), function(x, r))
    assert len(seen.graphs) == (1 if dynamic else 2)
    assert set(fused(seen)) == {"gelu, scale, residual"}


@pytest.mark.parametrize("activation", [F.relu, F.gelu, F.silu, lambda x: x * 0.5])
def test_gradient(activation):
    x, w, b, r = (t.requires_grad_() for t in tensors(X, W, BIAS, RESIDUAL, dtype=torch.float32))

    def function(x, w, b, r):
        return activation(F.linear(x, w, b)) + r

    run, seen = rewritten(function, "always")
    grad = torch.randn(RESIDUAL)
    found = torch.autograd.grad(run(x, w, b, r), (x, w, b, r), grad)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b, r)]
    wanted = torch.autograd.grad(function(*wide), wide, grad.double())
    for given, exactly in zip(found, wanted, strict=True):
        result = compare(given, exactly, "template")
        assert result.ok, result.text
    assert len(fused(seen)) == 1
    assert "residual" not in fused(seen)[0]  # its gradient is free outside
    kept = [t for t in seen.targets() if t.startswith("tileops.gemm_epilogue_fwd")]
    last = activation in (F.relu, F.gelu, F.silu)
    assert kept == [f"tileops.gemm_epilogue_fwd{'' if last else '_without_preactivation'}.default"]


# ---- where it must not, or should not ------------------------------------------------------------


def hidden(x, w, b):
    return F.gelu(F.linear(x, w, b))


def test_policies_autocast_and_targets():
    x, w, b = tensors((4, 8), (6, 8), (6,), dtype=torch.float32)

    def said(x, w, b):
        with policy("never"):
            return hidden(x, w, b)

    def cast(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return hidden(x, w, b)

    register_kernel_builder(
        "epilogue_test", "GEMMFwdOp", lambda *_, **__: lambda a, b: torch.full((4, 6), 7.0)
    )
    served = GEMMFwdOp(target="epilogue_test")
    for function, option, reason in (
        (hidden, "never", "policy never, by options"),
        (said, "always", "policy never, by call"),
        (cast, "always", "it is called under torch.autocast"),
        (lambda x, w, b: served(x, w).relu(), "always", "target 'epilogue_test' serves it"),
        (hidden, None, "a gradient is asked for"),
    ):
        run, seen = rewritten(function, option)
        w.requires_grad_(option is None)
        torch.testing.assert_close(run(x, w, b), function(x, w, b))
        assert declined(seen) == [reason]


def test_compiled_code_gives_way_to_a_target():
    x, w, _ = tensors((4, 8), (6, 8), (6,), dtype=torch.float32)
    torch._dynamo.reset()
    run = torch.compile(
        lambda x, w: GEMM(x, w).relu(), backend=backend, options={"tileops.fusion": "always"}
    )
    torch.testing.assert_close(run(x, w), F.linear(x, w).relu())
    assert [data["op"] for data in last_report().of("fused")] == [OP]
    register_kernel_builder(
        "epilogue_late", "GEMMFwdOp", lambda *_, **__: lambda a, b: torch.full((4, 6), 7.0)
    )
    with tileops.use_target("epilogue_late"):
        assert (run(x, w) == 7).all()


@pytest.fixture
def card(monkeypatch):
    """The rule sees an H200 in place of the CPU."""
    facts = DeviceFacts("cuda", 0, (9, 0), "test", 132, 227 << 10)
    monkeypatch.setattr(cost, "device_facts", lambda device: facts)


def reason(op, m, n, k, kept=False):
    half = {"dtype": torch.bfloat16, "device": "meta"}
    a, b, bias = (torch.empty(size, **half) for size in ((m, k), (n, k), (n,)))
    d = torch.empty(m, n, **half)
    inputs = {"a": a, "b": b, "bias": bias, "residual": None}
    outputs = {"d": d, "preactivation": d if kept else None}
    return epilogue_loses(op, inputs, outputs, torch.device("cpu"))


def test_the_rule(card):
    """What is saved does not grow with the depth, what a slower product costs does; the library's own
    epilogue costs next to nothing."""
    exact, roughly = (GEMMEpilogueFwdOp(activation=name) for name in ("gelu", "gelu_tanh"))
    assert reason(exact, 4096, 4096, 1024) == ""
    assert "declared cost" in reason(exact, 4096, 4096, 1 << 14)
    assert reason(roughly, 4096, 4096, 1 << 13) == ""
    keeping = GEMMEpilogueFwdOp(activation="gelu", keeps_preactivation=True)
    depth = next(k for k in range(256, 8192, 256) if reason(exact, 4096, 4096, k))
    assert reason(keeping, 4096, 4096, depth - 256, kept=True)  # that saves half


def test_the_rule_elsewhere():
    op = GEMMEpilogueFwdOp(activation="gelu")
    why = "as fast (onednn_epilogue: torch's own product serves bfloat16;"
    assert why in reason(op, 4096, 4096, 1024)


def test_what_inductor_does_itself_stays(card, monkeypatch):
    """As on a card: an activation with more behind it, and plain products under max_autotune."""
    x, w, b = tensors((256, 64), (512, 64), (512,), dtype=torch.bfloat16)
    w *= 0.1

    def gated(x, w, b):
        return hidden(x, w, b) * torch.sin(F.linear(x, w))

    def layers(x, w, b):
        return hidden(x, w, b).view(4, 64, 512) @ w

    for function, taken in ((gated, []), (layers, ["gelu"]), (hidden, ["gelu"])):
        run, seen = rewritten(function)
        torch.testing.assert_close(run(x, w, b), function(x, w, b), rtol=0.05, atol=0.05)
        assert fused(seen) == taken, seen.report
    plain = lambda self, module, inputs: module  # noqa: E731
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", plain)
    for options, taken in (({}, 1), ({"max_autotune_gemm": True}, 0)):
        torch._dynamo.reset()
        torch.compile(hidden, backend=backend, options=options)(x, w, b)
        assert len(list(last_report().of("fused"))) == taken


def test_fused_code_is_compiled_and_trained():
    """Through Inductor, with a gradient."""
    x, w, b = (t.requires_grad_() for t in tensors(X, W, BIAS, dtype=torch.float32))
    torch._dynamo.reset()
    run = torch.compile(
        hidden, backend=backend, options={"tileops.fusion": "always"}, fullgraph=True
    )
    grad = torch.randn(RESIDUAL)
    found = torch.autograd.grad(run(x, w, b), (x, w, b), grad)
    for given, wanted in zip(
        found, torch.autograd.grad(hidden(x, w, b), (x, w, b), grad), strict=True
    ):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
    (event,) = last_report().of("fused")
    assert event["op"] == OP
    assert "test_epilogues.py" in str(last_report())


# ---- attention -----------------------------------------------------------------------------------


def heads(dtype=torch.float32):
    return tensors((2, 4, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), dtype=dtype)


def test_a_scale_moves_into_attention():
    q, k, v = heads()
    capped = GQADenseFwdOp(sm_scale=0.3, softcap=5.0, is_causal=True)
    for op in (ATTENTION, capped):
        function = lambda q, k, v, op=op: op(q * 0.5, k / 4, v)  # noqa: E731
        run, seen = rewritten(function)
        torch.testing.assert_close(run(q, k, v), function(q, k, v))
        assert fused(seen) == ["scale of q", "scale of k"]
        assert "mul" not in " ".join(seen.targets())
        key = next(str(a) for n in seen.graphs[0].graph.nodes for a in n.args if "GQA" in str(a))
        factor = (op.sm_scale or 1 / math.sqrt(8)) / 8
        assert f"sm_scale={factor!r}" in key


def test_a_scale_whose_gradient_stops_there_stays():
    def function(q, k, v):
        with torch.no_grad():
            scaled = q * 0.5
        return ATTENTION(scaled, k, v)

    given = [t.float().requires_grad_() for t in tensors(*[(1, 4, 2, 8)] * 3)]
    run, seen = rewritten(function, "always")
    run(*given).sum().backward()
    assert [t.grad is not None for t in given] == [False, True, True]
    assert fused(seen) == []


def test_a_scale_that_attention_does_not_take_stays():
    q, k, v = heads()

    def shared(q, k, v):
        scaled = q * 0.5
        return ATTENTION(scaled, k, v), scaled

    def written(q, k, v):
        q = q + 0
        scaled = q * 0.5
        q.zero_()
        return ATTENTION(scaled, k, v)

    for function, reasons in (
        (lambda q, k, v: ATTENTION(q * -1, k, v), ["attention takes no scale of"]),
        (lambda q, k, v: ATTENTION(q * q, k, v), []),
        (shared, []),
        (written, ["q is written before"]),
    ):
        run, seen = rewritten(function)
        torch.testing.assert_close(run(q, k, v), function(q, k, v))
        assert fused(seen) == []
        found = [
            d["reason"]
            for report in seen.reports
            for d in report.of("declined")
            if d["op"] == "GQADenseFwdOp" and "takes" in d
        ]
        assert len(found) == len(reasons)
        assert all(f.startswith(r) for f, r in zip(found, reasons, strict=True))
