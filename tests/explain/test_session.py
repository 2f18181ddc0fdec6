"""A session sees what happens and changes nothing; what it cannot know it calls unknown."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re

import pytest
import torch

import tileops
from tests.explain import golden
from tests.explain.test_golden import fresh, line_of  # noqa: F401
from tileops.explain import torch_private as private
from tileops.norm import RMSNormFwdOp

LOGGERS = [
    private.TRACE, private.TRACE_SOURCE, private.TRACE_CALL, private.FUSION, private.POST_FUSION,
    private.CUDAGRAPHS,
]  # fmt: skip


def state_of_torch():
    from torch._dynamo import pgo, symbolic_convert

    loggers = [logging.getLogger(name) for name in LOGGERS]
    return {
        "loggers": [(each.level, each.propagate, list(each.handlers)) for each in loggers],
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "functorch": torch._functorch.config.get_config_copy(),
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "sizes": copy.deepcopy(pgo._CODE_STATE),
        "tables": list(symbolic_convert.InstructionTranslator.dispatch_table),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
    }


def test_explain_changes_nothing():
    compiled = torch.compile(golden.scaled, backend="eager")
    compiled(torch.randn(4), 2)
    torch._inductor.runtime.cache_dir_utils.cache_dir()  # torch sets its variable at first use
    versions = private.compiled_times(golden.scaled.__code__)
    before = state_of_torch()
    x = torch.arange(6.0)
    report = tileops.explain(golden.scaled, x, 3, backend="aot_eager")
    assert torch.equal(report.result, x * 3)
    after = state_of_torch()
    for name, value in before.items():
        assert after[name] == value, name
    assert private.compiled_times(golden.scaled.__code__) == versions == 1


def test_disk_cache_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compile(golden.fuses)(torch.randn(4, 4))
    before = sorted(tmp_path.rglob("*"))
    tileops.explain(golden.fuses, torch.randn(4, 5))
    assert before == sorted(tmp_path.rglob("*"))


def test_own_listeners_hear_what_they_would(monkeypatch):
    """Who listens to warnings hears no details; who asked for details still hears them."""
    logger = logging.getLogger(private.TRACE_CALL)
    heard = []

    class Listener(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    listener = Listener()
    logger.addHandler(listener)
    try:
        tileops.explain(golden.unrolls, torch.randn(4), backend="eager")
        assert heard == []
        monkeypatch.setattr(logger, "level", logging.DEBUG)
        logger.manager._clear_cache()
        tileops.explain(golden.unrolls, torch.randn(4), backend="eager")
        assert len(heard) == 3
        assert all("inlined call helper" in text for text in heard)
    finally:
        logger.removeHandler(listener)


def test_a_failure_is_reported_and_raised():
    def fails(gm, inputs):
        raise RuntimeError("no code today")

    compiled = torch.compile(golden.whole, backend=fails)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed), tileops.explaining() as report:
        compiled(torch.randn(4))
    (one,) = report.compilations
    assert "no code today" in one.error
    assert [node.target for node in one.capture.nodes if node.opcode.startswith("call")]


def test_calls_without_compilation_say_nothing():
    compiled = torch.compile(golden.whole, backend="eager")
    compiled(torch.randn(4))
    with tileops.explaining() as report:
        compiled(torch.randn(4))
    assert report.compilations == []
    assert report.calls is None


def test_module():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    x = torch.randn(2, 4)
    report = tileops.explain(model, x, backend="aot_eager", training=True)
    assert torch.equal(report.result, model(x))
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    made = report.compilations[0].normalisation
    assert [graph.stage for graph in made.graphs] == ["joint", "forward", "backward"]


def test_training_differentiates_what_the_call_uses():
    """Parameters of a global module too, and no graph of the user's."""
    layer, ran = torch.nn.Linear(4, 4), []
    layer.weight.register_post_accumulate_grad_hook(ran.append)

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ran.append("backward")
            return grad * 2

    base = torch.ones(4, requires_grad=True)
    outside = base.exp()

    def step(x):
        return Noted.apply(layer(x)) * outside, x, layer.bias, 3

    tileops.explain(step, torch.randn(2, 4), backend="eager", training=True)
    assert ran == ["backward"]
    assert layer.weight.grad is None
    outside.sum().backward()
    assert torch.equal(base.grad, base.exp())
    tileops.explain(lambda x: x, base.exp(), backend="eager", training=True)  # returns no new thing


def test_lines_are_the_users():
    """Not those of torch's modules, in each stage."""
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def model(x):
        x = first(x)
        return second(x)

    report = tileops.explain(model, torch.randn(2, 4), backend="aot_eager_decomp_partition")
    expected = {line_of(model, "first("), line_of(model, "second(")}
    one = report.compilations[0]
    for graph in (one.capture, *one.normalisation.graphs):
        lines = [node.line for node in graph.nodes if node.opcode == "call_function"]
        assert {line.number for line in lines} == expected
        assert {line.file for line in lines} == {__file__}
    changes = [(change.at.number, change.after[-1]) for change in one.normalisation.decompositions]
    assert sorted(changes) == [(number, "aten.addmm") for number in sorted(expected)]


def test_ops_of_this_library():
    op = RMSNormFwdOp(8)
    x, w = torch.randn(3, 8), torch.randn(8)

    def model(x, w):
        return op(x * 2, w) + 1

    report = tileops.explain(model, x, w, backend="aot_eager")
    (node,) = report.compilations[0].ops
    assert report.compilations[0].normalisation.decompositions == []
    assert node.op == "RMSNormFwdOp"
    assert "normalized_shape=(8,)" in node.parameters
    assert (node.target, node.kernel) == (op.last_call.target, op.last_call.kernel)
    assert node.at.file == __file__
    assert node.plan_hit is False
    names = [dispatch.operator for dispatch in report.dispatch]
    assert "tileops.norm_rms_norm_fwd" in names
    assert report.eager_ops == []
    with tileops.explaining() as report:
        op(torch.randn(5, 8, dtype=torch.float64), w.double())
    assert [each.op for each in report.eager_ops] == ["RMSNormFwdOp"]


def test_an_op_and_its_gradient_in_inductor():
    op = RMSNormFwdOp(8)

    def model(x, w):
        return op(x * 2, w) + 1

    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    report = tileops.explain(model, x, w, training=True)
    (one,) = report.compilations
    assert [node.op for node in one.ops] == ["RMSNormFwdOp", "RMSNormBwdOp"]
    assert all(node.not_fused for node in one.ops)
    assert report.eager_ops == []
    forward, backward = one.inductor
    assert [kernel.kind for kernel in forward.kernels] == ["pointwise", "tileops", "pointwise"]
    assert [kernel.kind for kernel in backward.kernels] == ["tileops", "pointwise"]


def test_dispatch_order():
    x = torch.randn(4, requires_grad=True)
    report = tileops.explain(golden.whole, x, backend="aot_eager", training=True)
    relu = next(each for each in report.dispatch if each.operator == "aten.relu")
    table = {entry.key: entry.kernel for entry in relu.table}
    assert table["CPU"] == "kernel"
    assert all(entry.registered_at for entry in relu.table)
    visited = [(step.key, step.what) for step in relu.visited]
    assert visited[0] == ("AutogradCPU", "kernel")
    assert visited[-1] == ("CPU", "kernel")
    assert "AutogradCPU" in relu.visited[0].excludes


def test_json_holds_all():
    report = tileops.explain(golden.prints, torch.randn(4), backend="eager")
    plain = json.loads(report.to_json())
    assert plain == report.plain()
    assert plain["compilations"][0]["breaks"][0]["kind"] == "print"
    assert "result" not in plain
    assert plain["sources"][golden.__file__].startswith('"""Functions with known answers')


def test_terminal(capsys):
    report = tileops.explain(golden.prints, torch.randn(4, 4), backend="eager")
    report.show(width=100)
    shown = capsys.readouterr().out
    assert "2 graphs, 1 break, 0 recompilations" in shown
    assert "Break (print)" in shown
    assert "values that cross: y f32 [4, 4] 64 B" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_terminal_shows_who_called_what_breaks(capsys):
    report = tileops.explain(golden.breaks_below, torch.randn(4, 4), backend="eager")
    report.show("breaks", width=200)
    shown = capsys.readouterr().out
    number = line_of(golden.breaks_below, "return")
    assert f"called from: golden.py:{number}\n" in shown
    assert report.breaks[0].at.text == 'print("loud")'
    assert (
        shown.count("called from") == 1
    )  # the callee, which is compiled too, is called by the function


def test_a_further_call_that_is_no_tuple():
    x = torch.randn(4, 4)
    with pytest.raises(TypeError, match="then holds Tensor; accepted is a tuple of arguments"):
        tileops.explain(golden.whole, x, then=[x], backend="eager")


def test_further_calls_and_what_each_compiled():
    then = [(torch.randn(5, 4),), (torch.randn(6, 4),), (torch.randn(4, 4).double(),)]
    x = torch.randn(4, 4)
    report = tileops.explain(golden.whole, x, then=then, backend="eager")
    assert [len(call.compiled) for call in report.calls] == [1, 1, 0, 1]
    assert len(report.recompiles) == 2
    torch.testing.assert_close(report.result, golden.whole(x))


class Net(torch.nn.Module):
    def forward(self, x):
        return x + 1


def no_work(x):
    return 3


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Net(), "was compiled before, and one of its versions served the call.*_dynamo.reset"),
        (no_work, "found no work on tensors"),
    ],
)
def test_nothing_compiled_is_said_aloud(target, why, off, capsys, tmp_path):
    if isinstance(target, Net):
        torch.compile(Net(), backend="eager")(torch.ones(2))
    with torch._dynamo.config.patch(disable=off):
        report = tileops.explain(target, torch.ones(2), backend="eager")
    why = "torch.compile is switched off" if off else why
    assert re.search(why, report.nothing)
    report.show("breaks", width=1000)
    shown = capsys.readouterr().out
    assert re.search(f"NOTHING WAS COMPILED: .*{why}", shown)
    assert "0 breaks" not in shown
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Nothing compiled" in page
    assert "No graph break" not in page


def test_a_block_that_compiled_nothing():
    with tileops.explaining() as report:
        golden.whole(torch.ones(2))
    assert "nothing that was called is compiled code" in report.nothing
    with tileops.explaining() as report:
        torch.compile(golden.whole, backend="eager")(torch.ones(2))
    assert report.nothing is None


def test_terminal_shows_the_stages_that_are_asked_for(capsys):
    report = tileops.explain(golden.prints, torch.randn(4, 4), backend="aot_eager")
    report.show("aten", width=100)
    shown = capsys.readouterr().out
    assert "2 graphs, 1 break" in shown
    assert "ATen: operations" in shown
    assert "Capture" not in shown
    assert "Guards" not in shown
    with pytest.raises(ValueError, match="'fusion'.*breaks"):
        report.show("fusion")


@pytest.mark.slow
def test_overhead():
    """At most twice the work of a plain compilation, in CPU time of this process and of the
    compilers that it starts: other work on the machine does not count."""

    from torch._inductor.utils import fresh_cache

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(32)
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def spent():
        return sum(os.times()[:4])

    def compile_afresh(layers, context):
        torch._dynamo.reset()
        model = torch.nn.Sequential(*(Layer() for _ in range(layers)))
        x = torch.randn(4, 32, requires_grad=True)
        started = spent()
        with fresh_cache(), context:  # the caches on disk and those in memory
            torch.compile(model)(x).sum().backward()
        return spent() - started

    plainly = contextlib.nullcontext()
    compile_afresh(1, plainly)  # what a process does once counts for neither
    explained = compile_afresh(12, tileops.explaining())
    plain = compile_afresh(12, plainly)
    print(f"explained {explained:.1f} s, plain {plain:.1f} s")
    assert explained <= 2 * plain
