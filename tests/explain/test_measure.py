"""What a warm run took: joined from spans that are written here, and from those of real calls."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
import torch

import tileops
from tests.explain import golden
from tests.explain.test_golden import fresh  # noqa: F401
from tileops.explain import torch_private as private
from tileops.explain.collect.measure import CALL, UNMEASURED, attach, kernels_marked, tree
from tileops.explain.model import Break, Compilation, CudaGraphs, Guards, Inductor, Kernel, Report
from tileops.explain.torch_private import Profile, Span


def kernel(name, language, size=None):
    return Kernel(name, "pointwise", language, None, None, [], None, {}, bytes=size)


def lowered(key, *kernels):
    return Inductor("inference", list(kernels), None, [], None, "", None, key)


def report():
    """A graph of three kernels, a break that reads a value, and a graph of one kernel."""
    first = Compilation("0/0", "f", None, False, None, guards=Guards([], 3.0))
    first.breaks = [Break("item", "", None, [], "", [])]
    first.inductor = [
        lowered("one", kernel("triton_poi_0", "triton", 4_000), kernel("extern_kernels.mm", "extern"),
                kernel("triton_red_1", "triton", 1_000)),
    ]  # fmt: skip
    second = Compilation("1/0", "f", None, True, None, guards=Guards([], 3.0))
    second.inductor = [lowered("two", kernel("triton_poi_0", "triton", 2_000))]
    return Report(compilations=[first, second])


def on_gpu(start):
    """One call: spans of the host, kernels of the device; microseconds after ``start``."""
    launched = (
        (
            "one",
            30,
            [("triton_poi_0", 10), ("gemm", 20), ("splitk_reduce", 5), ("triton_red_1", 8)],
        ),
        ("two", 130, [("triton_poi_0", 4)]),
    )
    spans = [
        (CALL, 0, 200, ()),
        ("TorchDynamo Cache Lookup", 1, 6, ()),
        ("Torch-Compiled Region: 0/0", 10, 190, ()),
        *(
            (f"## Call CompiledFxGraph {key} ##", at, at + 40, tuple(own))
            for key, at, own in launched
        ),
        ("cudaStreamSynchronize", 80, 100, ()),  # of item, at the break
        ("cudaStreamSynchronize", 40, 41, ()),  # within a graph: none of the break's
        ("TorchDynamo Cache Lookup", 110, 113, ()),
        ("Torch-Compiled Region: 1/0", 115, 185, ()),
    ]
    host = [Span(name, start + a, start + b, 1, tuple(own)) for name, a, b, own in spans]
    # Between the second and third kernel the device waits 3, before the last one 50.
    starts = [("triton_poi_0", 40, 10), ("gemm", 50, 20), ("splitk_reduce", 73, 5),
              ("triton_red_1", 78, 8), ("triton_poi_0", 136, 4)]  # fmt: skip
    return host, [Span(name, start + at, start + at + us) for name, at, us in starts]


def measured(monkeypatch, gbps=1_000.0):
    monkeypatch.setattr(private, "memory_gbps", lambda: gbps)
    made = report()
    profile = Profile()
    for start in (0, 1_000):
        host, device = on_gpu(start)
        profile.host += host
        profile.device += device
    attach(made, profile)
    return made


def test_a_call_on_a_gpu(monkeypatch):
    whole = measured(monkeypatch).measured
    assert (whole.call_us, whole.graph_calls, whole.synchronizations) == (200, 2, 2)
    assert whole.outside_us == 200 - 2 * 40
    assert (whole.device_us, whole.idle_us) == (10 + 20 + 5 + 8 + 4, 3 + 50)
    assert whole.memory_gbps == 1_000


def test_a_break_on_a_gpu(monkeypatch):
    (at,) = measured(monkeypatch).breaks
    assert at.synchronizations == 1
    assert at.extra_launches == 1
    assert at.python_us == 110 - 70


def test_lookups(monkeypatch):
    assert [one.guards.lookup_us for one in measured(monkeypatch).compilations] == [5, 3]


def test_kernels_on_a_gpu(monkeypatch):
    """The library's call between two kernels of Triton is what ran between them."""
    made = measured(monkeypatch)
    first, second = (one.inductor[0] for one in made.compilations)
    assert [each.time_us for each in first.kernels] == [10, 25, 8]
    assert (first.run.host_us, first.run.device_us, first.run.idle_us) == (40, 43, 3)
    assert [each.time_us for each in second.kernels] == [4]
    # Bytes in a nanosecond are gigabytes in a second.
    assert first.kernels[0].bandwidth_fraction == pytest.approx(4_000 / 10_000 / 1_000)
    assert first.kernels[1].bandwidth_fraction is None  # its bytes are unknown
    assert made.unknown == []


def test_marks_are_for_the_cpu(monkeypatch):
    """On a GPU the marked calls have a clock of their own: its kernels are the plain calls'."""
    made = report()
    marked = Profile(*on_gpu(5_000_000))
    attach(made, Profile(*on_gpu(0)), marked)
    assert [each.time_us for each in made.compilations[0].inductor[0].kernels] == [10, 25, 8]


def test_recorded_graphs_on_a_gpu(monkeypatch):
    made = report()
    for one in made.compilations:
        one.cuda_graphs = CudaGraphs(None, None)
    host, device = on_gpu(0)
    attach(made, Profile([*host, Span("cudaGraphLaunch", 35, 36, 1)], device))
    first, second = (one.cuda_graphs for one in made.compilations)
    assert first.used is True
    assert second.used is False
    assert second.reason


def test_memory_of_an_unknown_card(monkeypatch):
    made = measured(monkeypatch, gbps=None)
    assert made.compilations[0].inductor[0].kernels[0].time_us == 10
    assert made.compilations[0].inductor[0].kernels[0].bandwidth_fraction is None


def test_a_launch_without_its_kernel(monkeypatch):
    """What of it is a graph's is not known then, nor is the time of a kernel that of its launch."""
    made = report()
    host, device = on_gpu(0)
    host.append(Span("triton_poi_0", 32, 34, 1))  # the host's, round the launch
    host.append(Span("aten::mm", 35, 38, 1))
    attach(made, Profile(host, [Span("triton_poi_0", 40, 49), *device[1:]]))
    assert made.measured.device_us == 47
    assert made.measured.idle_us is None
    assert made.compilations[0].inductor[0].run.idle_us is None
    kernels = made.compilations[0].inductor[0].kernels
    assert [kernel.time_us for kernel in kernels] == [None, None, None]
    assert [each.time_us for each in made.compilations[1].inductor[0].kernels] == [4]


def test_launches_within_and_beside_others(monkeypatch):
    """A graph launches Triton's kernels itself, and those of a library by an operator in between; and
    something of the device is no launch."""
    made = report()
    host, device = on_gpu(0)
    graph = next(span for span in host if span.kernels)
    poi, gemm, splitk, red = graph.kernels
    host.remove(graph)
    host.append(dataclasses.replace(graph, kernels=(poi, red)))
    host.append(Span("aten::mm", 35, 38, 1, (gemm, splitk)))
    attach(made, Profile(host, [*device, Span("Context Sync", 71, 73)]))
    first = made.compilations[0].inductor[0]
    assert [each.time_us for each in first.kernels] == [10, 25, 8]
    assert first.run.idle_us == 3


def test_two_libraries_in_a_row(monkeypatch):
    """What ran between two kernels of Triton is of both: the time of neither is known."""
    made = report()
    kernels = made.compilations[0].inductor[0].kernels
    kernels.insert(1, kernel("extern_kernels.bmm", "extern"))
    attach(made, Profile(*on_gpu(0)))
    assert [each.time_us for each in kernels] == [10, None, None, 8]


def test_a_call_that_compiles_is_not_warm():
    made = report()
    host, device = on_gpu(0)
    attach(made, Profile([*host, Span("_compile (dynamo_timed)", 90, 95, 1)], device))
    assert made.measured is None
    assert [each.what for each in made.unknown] == [UNMEASURED]


def test_spans_of_threads_are_apart():
    nodes = {
        node.span.name: node
        for node in tree([Span("a", 0, 10, 1), Span("b", 2, 4, 2), Span("c", 3, 4, 1)])
    }
    assert nodes["b"].parent is None
    assert nodes["c"].parent is nodes["a"]


# ---- real calls ----------------------------------------------------------------------------------


def test_kernels_on_the_cpu():
    """512 × 512 tanh take longer than anything around them."""
    x, w = torch.randn(512, 512), torch.randn(512, 512)
    made = tileops.explain(golden.interrupted, x, w, measure=True)
    (one,) = made.compilations
    (inductor,) = one.inductor
    size = 512 * 512 * 4
    assert [each.bytes for each in inductor.kernels] == [2 * size, 3 * size, 2 * size]
    assert all(each.time_us > 0 for each in inductor.kernels)
    assert all(each.bandwidth_fraction is None for each in inductor.kernels)
    assert inductor.run.host_us > 0
    assert made.measured.call_us > made.measured.outside_us > 0
    assert inductor.run.device_us is None
    assert made.measured.graph_calls == 1
    assert made.measured.synchronizations == 0
    assert one.guards.lookup_us > 0
    assert inductor.peak_bytes == 2 * size  # one dies before the third is made
    assert [each.kept for each in inductor.buffers] == [False, False, True]
    assert UNMEASURED not in [each.what for each in made.unknown]


def test_the_branch_that_runs_has_a_time():
    """Inductor's cache passes ``cond`` by: its graph has no key in a profile."""
    made = tileops.explain(golden.chooses, torch.ones(64), measure=True)
    (inductor,) = made.compilations[0].inductor
    assert inductor.key is None
    times = {each.name: each.time_us for each in inductor.kernels}
    (taken,) = [time for name, time in times.items() if "sin" in name]
    (other,) = [time for name, time in times.items() if "cos" in name]
    assert taken > 0
    assert other is None
    assert made.measured.synchronizations == 1  # the condition is read


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_waits_once(sign):
    made = tileops.explain(golden.branches, sign * torch.ones(4), backend="eager", measure=True)
    (only,) = made.breaks
    assert (only.synchronizations, only.extra_launches) == (1, 1)
    assert made.measured.synchronizations == 1
    assert made.measured.graph_calls == 2


def test_a_print_waits_for_nothing(capsys):
    made = tileops.explain(golden.prints, torch.randn(4), backend="eager", measure=True)
    assert [each.synchronizations for each in made.breaks] == [0]


def test_an_own_loop():
    compiled = torch.compile(golden.branches, backend="eager")
    with tileops.explaining(measure=True) as made:
        for _ in range(3):
            compiled(torch.ones(4))
    assert made.breaks[0].synchronizations == 1
    assert made.measured.call_us > 0
    with tileops.explaining(measure=True) as made:
        torch.compile(golden.whole, backend="eager")(torch.ones(4))
    assert made.measured is None  # its only call was the first
    assert UNMEASURED in [each.what for each in made.unknown]


def test_a_loop_that_ends_by_an_exception():
    compiled = torch.compile(golden.branches, backend="eager")

    def loop():
        for _ in range(2):
            compiled(torch.ones(4))
        raise StopIteration

    with pytest.raises(StopIteration), tileops.explaining(measure=True) as made:
        loop()
    assert made.measured.synchronizations == 1


def test_what_is_measured_is_called_with_copies():
    x = torch.zeros(4)
    torch._dynamo.mark_dynamic(x, 0)
    before = torch.get_rng_state()
    made = tileops.explain(golden.writes_input, x, backend="aot_eager", measure=True)
    assert x.tolist() == [1.0] * 4
    assert torch.equal(made.result, torch.full((4,), 2.0))
    assert torch.equal(torch.get_rng_state(), before)
    assert made.measured is not None  # the copies did not recompile: they are as dynamic as x


def test_names_of_kernels_are_put_back():
    with tileops.explaining() as made:
        torch.compile(golden.fuses)(torch.randn(8, 8))
    (inductor,) = made.compilations[0].inductor
    (names,) = private.generated_names(inductor.path)
    plain = names[inductor.kernels[0].name]
    with contextlib.suppress(KeyError), kernels_marked(made):
        assert names[inductor.kernels[0].name] is not plain
        raise KeyError
    assert names[inductor.kernels[0].name] is plain


def test_a_running_profiler_is_left_alone():
    with torch.autograd.profiler.profile(use_kineto=False) as own:
        made = tileops.explain(golden.whole, torch.randn(4), backend="eager", measure=True)
    assert made.measured is None
    (why,) = [each.why for each in made.unknown if each.what == UNMEASURED]
    assert "another profiler" in why
    assert any(event.name == "aten::relu" for event in own.function_events)


def test_measured_beside_threads():
    """Compiled calls of other threads are none of the call's."""
    other = torch.compile(golden.branches, backend="eager")
    other(torch.ones(4))
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            other(torch.ones(4))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        made = tileops.explain(golden.prints, torch.randn(4), backend="eager", measure=True)
    finally:
        stop.set()
        thread.join()
    assert made.measured.synchronizations == 0
