"""Convention 4: ops inside a CUDA graph capture, eager, compiled, and in ``reduce-overhead`` mode.

A warm op is captured and replayed on new values; a cold one says what to do and leaves the capture's
process usable.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compile_contract import CASES, Call, exact_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def on_card(name: str, batch: int = 6) -> Call:
    call = CASES[name].make(batch)
    call.inputs = {n: None if t is None else t.cuda() for n, t in call.inputs.items()}
    return call


def check(call: Call, result: Any) -> None:
    """As ``call.check``, with the expectation made on the CPU."""
    results = result if isinstance(result, tuple) else (result,) if call.returns else ()
    for given, wanted in zip(results, call.returns, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(given.cpu().double(), wanted.double(), rtol=2e-5, atol=2e-5)
    for name, wanted in call.written.items():
        held = call.inputs[name]
        torch.testing.assert_close(held.cpu().double(), wanted.double(), rtol=2e-5, atol=2e-5)


def warm_up(call: Call, function: Any) -> None:
    """As torch asks for it: on a side stream, before the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.run(function)
    torch.cuda.current_stream().wait_stream(stream)


def give(call: Call, values: Call) -> None:
    """Put the inputs of ``values`` where the captured kernels read."""
    for name, tensor in call.inputs.items():
        if tensor is not None:
            tensor.copy_(values.inputs[name])


def fresh_values(name: str, salt: int) -> Call:
    """The same shapes with other floats, and what they give."""
    call = CASES[name].make(6)
    torch.manual_seed(salt)
    inputs = {
        n: t if t is None or not t.is_floating_point() else t + torch.rand_like(t)
        for n, t in call.inputs.items()
    }
    return exact_call(call.op, inputs)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_a_warm_op_is_captured_and_replayed(name, compiled):
    from tileops.engine.record import build_count

    call = on_card(name)
    function: Any = call.op
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(call.op, backend="inductor", fullgraph=True)
    warm_up(call, function)
    builds = build_count()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run(function)
    assert build_count() == builds
    for salt in (1, 2):
        values = fresh_values(name, salt)
        give(call, values)
        graph.replay()
        torch.cuda.synchronize()
        call.returns, call.written = values.returns, values.written
        check(call, result)


def forget_builds(op: Any) -> None:
    """Make the op cold again, though code that calls it is compiled."""
    from tileops.engine import build

    build._artifacts.clear()
    op._state.forget()
    op._state.last = None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_cold_op_inside_a_capture_names_the_warm_up(compiled):
    from tileops.engine.errors import ColdCaptureError
    from tileops.engine.record import build_count
    from tileops.norm import RMSNormFwdOp

    op, x = RMSNormFwdOp(64, 0.0123), torch.randn(4, 64, device="cuda")
    function: Any = op
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(op, backend="aot_eager", fullgraph=True)
        function(x)
    forget_builds(op)
    builds = build_count()

    def capture() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return graph, function(x)

    with pytest.raises(ColdCaptureError, match=r"RMSNormFwdOp.*warm up first"):
        capture()
    torch.cuda.synchronize()
    assert build_count() == builds
    assert op.last_call is None
    # Nothing is broken or pinned: warm up, capture, replay.
    function(x)
    graph, y = capture()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    expected = torch.nn.functional.rms_norm(x.double(), (64,), None, op.eps)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)


def test_reduce_overhead_mode_captures_ops():
    from tileops.elementwise import SiLUAndMulFwdOp
    from tileops.gemm import GEMMFwdOp
    from tileops.norm import RMSNormFwdOp

    torch._dynamo.reset()
    norm, gemm, gate = RMSNormFwdOp(64, 1e-6), GEMMFwdOp(), SiLUAndMulFwdOp()
    weight = torch.randn(128, 64, device="cuda") / 8

    def block(x: torch.Tensor) -> torch.Tensor:
        return gate(gemm(norm(x), weight)) + 1.0

    run = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):  # warm up, record, replay
        x = torch.randn(16, 64, device="cuda")
        with torch.no_grad():
            result = run(x).clone()
        hidden = torch.nn.functional.rms_norm(x.double(), (64,), None, 1e-6) @ weight.double().t()
        first, second = hidden.chunk(2, -1)
        expected = torch.nn.functional.silu(first) * second + 1.0
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_capture_on_a_side_stream_launches_there():
    from tileops.elementwise import SiLUFwdOp

    op, x = SiLUFwdOp(), torch.randn(1024, device="cuda")
    op(x)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = op(x)
    y.zero_()
    torch.cuda.synchronize()
    assert not y.any()
    graph.replay()
    torch.cuda.synchronize()
    expected = torch.nn.functional.silu(x.cpu().double())
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-6, atol=1e-6)
