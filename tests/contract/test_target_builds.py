"""Builds and runs of foreign kernels: once per identity, no trace of a failure, wrong results
refused, and one compiled artifact whichever target serves."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.contract.children import (
    BACKENDS,
    EPS,
    close,
    control,
    in_child,
    refused,
    rms,
    warned,
)

# ---- declining and failing ---------------------------------------------------------------------


def _explicit_target_does_not_serve() -> str:
    import tileops
    from tileops.reduction import SoftmaxFwdOp

    x = rms()[1]
    op = SoftmaxFwdOp(-1, target="testcpu")
    return refused(tileops.OpNotAvailableError, lambda: op(x))


def test_an_explicit_target_that_does_not_serve_the_op():
    text = in_child(_explicit_target_does_not_serve)
    for part in ("SoftmaxFwdOp", "'testcpu'", "RMSNormFwdOp, SiLUAndMulFwdOp"):
        assert part in text


def _declines() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "decline"
    explicit = RMSNormFwdOp(8, EPS, target="testcpu")
    text = refused(tileops.OpNotAvailableError, lambda: explicit(x, weight))
    assert "told to decline" in text
    assert "'testcpu'" in text
    op = RMSNormFwdOp(8, EPS)
    with tileops.use_target("testcpu"):
        with warned() as texts:
            close(op(x, weight), expected)
            close(op(x[:2], weight), expected[:2])
        assert len(texts) == 1
        assert "told to decline" in texts[0]
        assert op.serving_target == "builtin"
        assert ("target testcpu", "testcpu: told to decline") in op.last_call.refused
    control().behaviour = "serve"
    close(explicit(x, weight), expected)
    assert explicit.serving_target == "testcpu"


def test_a_target_declines_a_call():
    in_child(_declines)


def _context_target_does_not_serve() -> None:
    import tileops
    from tileops.reduction import SoftmaxFwdOp

    x = rms()[1]
    op = SoftmaxFwdOp(-1)
    compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    with tileops.use_target("testcpu"), warned() as texts:
        for call in (op, op, lambda x: op(x[:2]), compiled, SoftmaxFwdOp(0)):
            call(x)
        close(op(x), x.softmax(-1))
        assert op.last_call.target == op.serving_target == "builtin"
        assert op.last_call.decided_by == "use_target"
        assert [reason for name, reason in op.last_call.refused if name == "target testcpu"]
        assert "does not serve" in str(op.last_call)
    assert len(texts) == 1, texts
    for part in ("SoftmaxFwdOp", "'testcpu'", "builtin serves instead"):
        assert part in texts[0]


def test_a_context_target_that_does_not_serve_the_op_warns_once():
    in_child(_context_target_does_not_serve)


def _failed_build(backend: str) -> str:
    from tileops.backend import BackendError

    RMSNormFwdOp, x, weight, expected = rms()
    op = RMSNormFwdOp(8, EPS, target="testcpu")
    call: Any = op
    if backend != "eager":
        torch._dynamo.config.error_on_recompile = True
        call = torch.compile(lambda x, w: op(x, w), backend=backend, fullgraph=True)
    control().behaviour = "fail_build"
    text = refused(BackendError, lambda: call(x, weight))
    assert op.last_call is None
    refused(BackendError, lambda: call(x, weight))
    control().behaviour = "build_nothing"
    assert "not a callable" in refused(BackendError, lambda: call(x, weight))
    assert control().builds == {"RMSNormFwdOp": 3}
    control().behaviour = "serve"
    close(call(x, weight), expected)
    close(call(x, weight), expected)
    assert control().builds == {"RMSNormFwdOp": 4}
    assert op.serving_target == "testcpu"
    return text


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_a_failed_build_leaves_no_trace(backend):
    text = in_child(_failed_build, backend)
    for part in ("RMSNormFwdOp", "'testcpu'", "RuntimeError: the test compiler crashed"):
        assert part in text


def _failed_run() -> str:
    RMSNormFwdOp, x, weight, expected = rms()
    op = RMSNormFwdOp(8, EPS, target="testcpu")
    control().behaviour = "fail_run"
    text = refused(RuntimeError, lambda: op(x, weight))
    control().behaviour = "serve"
    close(op(x, weight), expected)
    return text


def test_a_failed_run_names_the_target():
    text = in_child(_failed_run)
    assert "the test device was lost" in text
    assert "'testcpu'" in text


REFUSED = {
    "wrong_shape": "output 'output' is torch.float32[4, 7]",
    "wrong_dtype": "torch.float64[4, 8]",
    "input": "output 'output' is an input or a view of it",
    "view": "output 'output' is an input or a view of it",
    "strided": "strides [16, 2]",
    "two_outputs": "returned 2 outputs, not 1",
    "none": "output 'output' is missing",
    "no_tensor": "output 'output' is a list, no tensor",
}


def _wrong_results(backend: str) -> dict[str, str]:
    from tileops.backend import BackendError
    from tileops.elementwise import SiLUAndMulFwdOp

    x = torch.randn(4, 16)  # twice the output, so that a view of it need not begin where it does
    op = SiLUAndMulFwdOp(target="testcpu")
    call: Any = op
    if backend != "eager":
        call = torch.compile(lambda x: op(x), backend=backend, fullgraph=True)
    texts = {}
    for behaviour in REFUSED:
        control().behaviour = behaviour
        texts[behaviour] = refused(BackendError, lambda: call(x))
    control().behaviour = "serve"
    gate, up = x.double().chunk(2, -1)
    close(call(x), (F.silu(gate) * up).float())
    return texts


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_wrong_results_are_refused(backend):
    texts = in_child(_wrong_results, backend)
    for behaviour, part in REFUSED.items():
        assert part in texts[behaviour], behaviour
        assert "SiLUAndMulFwdOp: target 'testcpu'" in texts[behaviour]


# ---- one artifact ------------------------------------------------------------------------------


def _one_artifact(backend: str) -> None:
    import tileops
    from tileops.elementwise import SiLUAndMulFwdOp

    RMSNormFwdOp, x, weight, normed = rms()
    norm, silu = RMSNormFwdOp(8, EPS), SiLUAndMulFwdOp()
    control().behaviour = "mark"
    gate, up = normed.double().chunk(2, -1)
    expected = (F.silu(gate) * up).float()
    gate, up = (normed + 1).double().chunk(2, -1)
    marked = (F.silu(gate) * up).float() + 1
    compiled = torch.compile(lambda x, w: silu(norm(x, w)), backend=backend, fullgraph=True)
    torch._dynamo.config.error_on_recompile = True
    graphs = torch._dynamo.utils.counters["stats"]
    close(compiled(x, weight), expected)
    assert graphs["unique_graphs"] == 1
    for _ in range(2):
        with tileops.use_target("testcpu"):
            close(compiled(x, weight), marked)
            assert (norm.serving_target, silu.serving_target) == ("testcpu", "testcpu")
        close(compiled(x, weight), expected)
        assert (norm.serving_target, silu.serving_target) == ("builtin", "builtin")
    tileops.set_default_target("testcpu")
    close(compiled(x, weight), marked)
    assert graphs["unique_graphs"] == 1
    assert control().builds == {"RMSNormFwdOp": 1, "SiLUAndMulFwdOp": 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compiled_artifact_follows_the_target(backend):
    in_child(_one_artifact, backend)


def _captured(target: str) -> tuple[str, str]:
    """The graphs of Dynamo and of AOTAutograd, compiled while ``target`` serves."""
    from torch._dynamo.backends.common import aot_autograd

    import tileops
    from tileops.elementwise import SiLUAndMulFwdOp

    RMSNormFwdOp, x, weight, _ = rms()
    norm, silu = RMSNormFwdOp(8, EPS), SiLUAndMulFwdOp()
    seen: dict[str, str] = {}

    def lowered(graph: Any, example: Any) -> Any:
        seen["aot"] = f"{graph.code}\n{graph.graph}"
        return graph

    def capture(graph: Any, example: Any) -> Any:
        seen["dynamo"] = f"{graph.code}\n{graph.graph}"
        return aot_autograd(fw_compiler=lowered)(graph, example)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return silu(norm(x, w) + 1)

    with tileops.use_target(target):
        torch.compile(model, backend=capture, fullgraph=True)(x, weight)
    assert norm.serving_target == silu.serving_target == target
    return seen["dynamo"], seen["aot"]


def test_the_captured_graph_does_not_depend_on_the_target():
    plain, foreign = in_child(_captured, "builtin"), in_child(_captured, "testcpu")
    print("Dynamo's graph, whichever serves:", plain[0], "AOTAutograd's:", plain[1], sep="\n")
    assert plain == foreign
    for graph in plain:
        assert "norm_rms_norm_fwd" in graph
        assert "testcpu" not in graph


def _target_inside_compiled_code() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    op = RMSNormFwdOp(8, EPS)
    control().behaviour = "mark"

    def model(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with tileops.use_target("testcpu"):
            inside = op(x, w)
        return inside, op(x, w)

    for _ in range(2):
        inside, outside = torch.compile(model, backend="aot_eager")(x, weight)
        close(inside, expected + 1)
        close(outside, expected)
    torch._dynamo.reset()  # or the frame, given up before, would run uncompiled
    refused(
        torch._dynamo.exc.Unsupported,
        lambda: torch.compile(model, backend="aot_eager", fullgraph=True)(x, weight),
    )


def test_a_context_inside_compiled_code_is_never_lost():
    in_child(_target_inside_compiled_code)


# ---- builds ------------------------------------------------------------------------------------


def _threads_on_a_cold_op(fails: bool) -> None:
    RMSNormFwdOp, x, weight, expected = rms()
    control().build_seconds = 0.3
    if fails:
        control().behaviour = "fail_build"
    together = threading.Barrier(16)
    results: list[Any] = []

    def work() -> None:
        op = RMSNormFwdOp(8, EPS, target="testcpu")  # equal ops share their builds
        together.wait(60)
        try:
            results.append(op(x, weight))
        except RuntimeError as error:
            control().build_seconds, control().behaviour = 0.01, "serve"
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16
    good = [r for r in results if isinstance(r, torch.Tensor)]
    assert len(good) == (15 if fails else 16), results
    for result in good:
        close(result, expected)
    assert control().builds == {"RMSNormFwdOp": 2 if fails else 1}
    assert control().runs == {"RMSNormFwdOp": len(good)}


@pytest.mark.parametrize("fails", [False, True])
def test_sixteen_threads_build_once(fails):
    in_child(_threads_on_a_cold_op, fails)


def _what_a_builder_is_told() -> None:
    RMSNormFwdOp, x, _, _ = rms()
    op = RMSNormFwdOp((8,), EPS, target="testcpu")
    close(op(x.t().contiguous().t(), torch.ones(8)), F.rms_norm(x, (8,), None, EPS))
    op(x)
    (_, (first, weight), params), (_, (second, absent), _) = control().specs
    assert params == {"normalized_shape": (8,), "eps": EPS}
    assert (first.shape, first.dtype, first.device) == ((4, 8), torch.float32, x.device)
    assert first.contiguous  # inputs that are not written arrive contiguous
    assert first.strides == (8, 1)
    assert weight.shape == (8,)
    assert second == first
    assert absent is None


def test_what_a_builder_is_told():
    in_child(_what_a_builder_is_told)


# ---- pickling ----------------------------------------------------------------------------------


def _pickles() -> bytes:
    RMSNormFwdOp, x, weight, expected = rms()
    op = RMSNormFwdOp(8, EPS, target="testcpu")
    op(x, weight)  # now the op's state holds a kernel with a lock, under a builder with a lock
    data = pickle.dumps(op)
    for other in (pickle.loads(data), copy.copy(op), copy.deepcopy(op)):
        assert other == op
        assert other.target == "testcpu"
        close(other(x, weight), expected)
    assert op != RMSNormFwdOp(8, EPS)
    assert control().builds == {"RMSNormFwdOp": 1}
    return data


def _unpickles(data: bytes) -> None:
    op = pickle.loads(data)
    _, x, weight, expected = rms()
    close(op(x, weight), expected)
    assert op.serving_target == "testcpu"


def _unpickles_without_the_plugin(data: bytes) -> str:
    import tileops

    return refused(tileops.UnknownTargetError, lambda: pickle.loads(data))


def test_an_op_with_a_target_pickles():
    data = in_child(_pickles)
    in_child(_unpickles, data)
    assert "'testcpu'" in in_child(_unpickles_without_the_plugin, data, installed=())
