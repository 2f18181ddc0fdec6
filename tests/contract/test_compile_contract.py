"""Every class with a boundary is one node in a cold ``torch.compile(op, fullgraph=True)``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compile_contract import (
    CASES,
    Call,
    Case,
    classes_with_a_boundary,
    exact_call,
    op_class,
    signature,
)
from tests.contract.fresh import fresh, run_fresh

BATCH = 6


# ---- what is registered --------------------------------------------------------------------------


WITH_A_CASE = {case.op for case in CASES.values()}
ALIKE = sorted(classes_with_a_boundary() - WITH_A_CASE)
"""Classes whose signature is that of a class with a case: see ``test_alike``."""


def missing(cases: dict[str, Case]) -> set[str]:
    """Signatures of classes with a boundary that no case of ``cases`` compiles."""
    wanted = {signature(path) for path in classes_with_a_boundary()}
    return wanted - {signature(case.op) for case in cases.values()}


def test_every_signature_with_a_boundary_has_a_cold_test():
    assert not missing(CASES)


def test_a_signature_without_a_cold_test_is_found():
    for wanted in {signature(path) for path in classes_with_a_boundary()}:
        cases = {n: c for n, c in CASES.items() if signature(c.op) != wanted}
        assert missing(cases) == {wanted}


@fresh
def test_every_operator_has_a_cold_test():
    for path in WITH_A_CASE:
        declared = {f"tileops::{case.operator}" for case in CASES.values() if case.op == path}
        assert declared == set(op_class(path).compile_op_names), path


def kinds_of(call: Call) -> set[str]:
    """The kinds of signature that a call shows, from its entry and its operator's branch."""
    entry = call.op.entry
    branch = branch_of(call)
    kinds = {
        "optional input": any(item.optional for item in entry.inputs),
        "several outputs": len(call.returns) > 1,
        "written input": bool(branch.writes),
        "out buffer": branch.out,
        "nullable outputs": bool(branch.without),
        "no outputs": not entry.outputs,
    }
    return {kind for kind, shown in kinds.items() if shown} or {"plain"}


def branch_of(call: Call) -> Any:
    from tileops.engine.plan import call_spec

    inputs = [call.inputs.get(item.name) for item in call.op.entry.inputs]
    return call_spec(call.op, tuple(inputs), call.inputs.get("out"))[1]


@fresh
def test_inductor_compiles_each_kind_of_op_and_of_signature():
    kinds: set[str] = set()
    for case in CASES.values():
        if case.backend == "inductor":
            call = case.make(BATCH)
            kinds |= {call.op.entry.kind} | kinds_of(call)
    assert kinds == {
        "pointwise", "reduction", "template",
        "plain", "optional input", "several outputs", "written input", "out buffer",
        "nullable outputs", "no outputs",
    }  # fmt: skip


# ---- cold compilation ----------------------------------------------------------------------------


class Graphs:
    """A backend of ``torch.compile`` that keeps what Dynamo and AOTAutograd hand over."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.dynamo: list[torch.fx.GraphModule] = []
        self.builds: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from tileops.engine.record import build_count

        self.dynamo.append(graph)
        compiled = torch._dynamo.lookup_backend(self.backend)(graph, inputs)
        self.builds.append(build_count())
        return compiled

    def text(self) -> str:
        """The one graph, byte for byte: code, nodes, and the example shapes."""
        (graph,) = self.dynamo
        metadata = [
            f"{node.name}: {node.meta.get('example_value')}"
            for node in graph.graph.nodes
            if isinstance(node.meta.get("example_value"), torch.Tensor)
        ]
        return "\n".join([graph.code, str(graph.graph), *metadata])

    def operators(self) -> list[str]:
        """Every node of the one graph that computes; taking a tuple apart computes nothing."""
        import operator

        (graph,) = self.dynamo
        return [
            str(node.target)
            for node in graph.graph.nodes
            if node.op not in ("placeholder", "output") and node.target is not operator.getitem
        ]


def _empty_caches() -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert not Path(os.environ[name]).exists()


def compile_cold(name: str) -> str:
    """The contract of one case; returns its graph."""
    case = CASES[name]
    _empty_caches()
    call = case.make(BATCH)
    graphs = Graphs(case.backend)
    assert call.op.last_call is None
    call.check(call.run(torch.compile(call.op, backend=graphs, fullgraph=True)))
    assert graphs.operators() == [f"tileops.{case.operator}.default"]
    assert graphs.builds == [0], "a kernel was built before the compiled code ran"
    assert call.op.serving_target == "builtin"
    return graphs.text()


@pytest.mark.parametrize("name", CASES)
def test_cold(name):
    plain = run_fresh(compile_cold, name=name)
    other = run_fresh(compile_for_another_target, name=name)
    print(plain)
    assert plain == other, "the graph depends on the target that serves it"


@pytest.mark.parametrize("family", sorted({path.split(".")[0] for path in ALIKE}))
@fresh
def test_alike(family):
    """The rest, one after the other in one process: each cold, one node, right."""
    from tests.cases import float32_calls
    from tileops.engine.record import build_count

    for path in (path for path in ALIKE if path.startswith(f"{family}.")):
        # One call of an op: a second would not be cold.
        calls = {repr(made.op): made for made in float32_calls(path.split(".")[1], BATCH)}
        for made in calls.values():
            call = exact_call(made.op, dict(made.inputs))
            graphs, before = Graphs("aot_eager"), build_count()
            assert call.op.last_call is None
            call.check(call.run(torch.compile(call.op, backend=graphs, fullgraph=True)))
            (operator,) = graphs.operators()
            names = {name.replace("::", ".") for name in call.op.compile_op_names}
            assert operator.removesuffix(".default") in names, path
            assert graphs.builds == [before], path
            torch._dynamo.reset()


def compile_for_another_target(name: str) -> str:
    """The graph of a case that a target of another distribution serves from the first call on."""
    import tileops
    from tileops.backend import register_kernel_builder

    case = CASES[name]
    call = case.make(BATCH)
    served = []

    def build_kernel(*specs: Any, **params: Any) -> Any:
        assert params == call.op._params
        return lambda *tensors: served.append(len(tensors)) or call.foreign_result(tensors)

    register_kernel_builder("foreign", case.op.split(".")[1], build_kernel)
    graphs = Graphs("aot_eager")
    with tileops.use_target("foreign"):
        call.check(call.run(torch.compile(call.op, backend=graphs, fullgraph=True)))
    assert call.op.serving_target == "foreign"
    assert served == [len(call.op.entry.inputs) + call.op.entry.has_out]
    return graphs.text()


# ---- without a boundary --------------------------------------------------------------------------


@fresh
def test_an_op_without_tensors_is_traced_through():
    from tileops.elementwise import AlibiFwdOp

    op = AlibiFwdOp(seq_len=4, num_heads=2)
    assert op.compile_op_names == ()
    graphs = Graphs("aot_eager")
    result = torch.compile(lambda: op(), backend=graphs, fullgraph=True)()
    distance = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    torch.testing.assert_close(result, -distance * torch.tensor([2.0**-4, 2.0**-8])[:, None, None])
    assert not any("tileops" in name for name in graphs.operators())


@fresh
def test_a_composition_is_the_operators_of_its_parts():
    from tileops.moe import MoEExpertMLPFwdOp
    from tileops.moe.layouts import ContiguousLayoutSpec

    op = MoEExpertMLPFwdOp(ContiguousLayoutSpec.tight_per_row())
    assert op.compile_op_names == ()
    graphs = Graphs("aot_eager")
    x, up, down = torch.randn(6, 8), torch.randn(2, 10, 8), torch.randn(2, 8, 5)
    experts = torch.tensor([0, 0, 0, 1, 1, -1], dtype=torch.int32)
    result = torch.compile(op, backend=graphs, fullgraph=True)(x, up, down, experts)
    assert graphs.operators() == ["tileops.moe_grouped_gemm_fwd.default"] * 2
    for row, expert in enumerate(experts.tolist()):
        hidden = up[expert].double() @ x[row].double()
        hidden = torch.nn.functional.silu(hidden[:5]) * hidden[5:]
        expected = down[expert].double() @ hidden if expert >= 0 else torch.zeros(8).double()
        torch.testing.assert_close(result[row].double(), expected, rtol=1e-5, atol=1e-5)
