"""Ops under the backend "tileops": where they went, and where they stayed."""

from __future__ import annotations

import torch
from torch._inductor.compile_fx import compile_fx

import tileops
from tests.explain.test_golden import fresh, line_of  # noqa: F401
from tileops.engine.record import emit
from tileops.explain.views.terminal import render
from tileops.fusion.compiler import backend
from tileops.norm import RMSNormFwdOp

op = RMSNormFwdOp(16)


def neighbours(x, w):
    """The norm reads and is read by pointwise work, and so becomes part of one kernel."""
    y = op(x * 2, w)
    return y + x


def two_graphs(x, w):
    y = op(x, w) + 1
    print("between")
    return op(y, w) * 2


def explained(function, *args, **options):
    def run(gm, inputs):
        return backend(gm, inputs, options=options)

    return tileops.explain(function, *args, backend=run)


def test_an_op_in_a_kernel():
    x, w = torch.randn(8, 16), torch.ones(16)
    (one,) = explained(neighbours, x, w).compilations
    (node,) = one.ops
    (kernel,) = one.inductor[0].kernels
    assert node.fused_into == kernel.name
    assert node.not_fused is None
    assert node.at.number == line_of(neighbours, "op(")
    assert one.near_misses == []


def test_an_op_that_stays():
    x, w = torch.randn(8, 16), torch.ones(16)
    (one,) = explained(neighbours, x, w, **{"tileops.fusion": "never"}).compilations
    (node,) = one.ops
    assert node.fused_into is None
    assert "policy never" in node.not_fused
    kinds = [kernel.kind for kernel in one.inductor[0].kernels]
    assert kinds == ["pointwise", "tileops", "pointwise"]


def test_each_graph_has_its_own():
    """What the backend tells names no compilation; the same node has the same name in both."""
    x, w = torch.randn(8, 16), torch.ones(16)
    said = []

    def run(gm, inputs):
        told = "first" if not said else "second"
        said.append(told)
        node = next(n for n in gm.graph.nodes if "norm_rms_norm_fwd" in str(n.target))
        emit("declined", op="RMSNormFwdOp", node=node.name, reason=told, stack=node.stack_trace)
        return gm

    first, second = tileops.explain(two_graphs, x, w, backend=run).compilations
    assert [node.not_fused for node in first.ops] == ["first"]
    assert [node.not_fused for node in second.ops] == ["second"]


def test_plain_code_that_became_an_op_or_nearly():
    def plain(x, w):
        return torch.nn.functional.rms_norm(x, (16,), w)

    number = line_of(plain, "rms_norm")
    stack, above = (
        f'  File "{__file__}", line {at}, in plain\n    rms_norm\n' for at in (number, number - 1)
    )

    def run(gm, inputs):
        call = "RMSNormFwdOp(normalized_shape=(16,), eps=None)"
        emit(
            "substituted",
            op="RMSNormFwdOp",
            node="made",
            call=call,
            steps=4,
            stack=stack,
            stacks=[stack, above, above],
        )
        emit("inlined", op="RMSNormFwdOp", node="made", why="it pays", stack=stack)
        emit("near miss", op="LayerNormFwdOp", node="rms_norm", reason="no mean", stack=stack)
        return compile_fx(gm, inputs)

    (one,) = tileops.explain(plain, torch.ones(2, 16), torch.ones(16), backend=run).compilations
    (node,) = one.ops
    assert (node.op, node.node) == ("RMSNormFwdOp", "made")
    assert node.parameters == "(normalized_shape=(16,), eps=None)"
    assert [line.number for line in node.substituted_from] == [number - 1, number]
    assert node.fused_into == one.inductor[0].kernels[0].name  # what has these lines computes it
    (near,) = one.near_misses
    assert (near.op, near.reason, near.at.number) == ("LayerNormFwdOp", "no mean", number)
    assert not near.means_it


def test_plain_code_that_is_an_op_and_stays(capsys):
    """On the CPU Inductor's code for what follows a product is as fast as the op: it is no near miss."""

    def plain(x, w):
        return torch.relu(torch.nn.functional.linear(x, w))

    report = explained(plain, torch.randn(8, 16), torch.randn(16, 16))
    (left,) = report.compilations[0].near_misses
    assert (left.op, left.means_it) == ("GEMMEpilogueFwdOp", True)
    report.show("ops", width=1000)
    shown = capsys.readouterr().out
    assert "is GEMMEpilogueFwdOp, left alone: test_fusion_nodes.py" in shown
    assert f"because: {left.reason}" in shown
    assert "nearly" not in shown


def test_plain_code_that_became_a_function_of_torch():
    def causal(q):
        seen = torch.ones(6, 6, dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, seen)

    report = explained(causal, torch.randn(1, 2, 6, 4))
    (node,) = report.compilations[0].ops
    function = "torch.nn.functional.scaled_dot_product_attention"
    assert (node.op, node.target, node.kernel) == (
        function,
        "torch",
        "scaled_dot_product_attention",
    )
    assert node.parameters == "(q, k, v, is_causal=True, scale=None)"
    assert line_of(causal, "attention(q") in [line.number for line in node.substituted_from]
    assert f"  {function}(q" in render(report, width=200)
