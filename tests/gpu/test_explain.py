"""What `explain` says of a card: times, bandwidth, gaps, waits, block sizes and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import tileops
from tests.explain import golden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def device_us(function, *args):
    """Of one call among many, by events; the queue hides the host where work is long."""
    for _ in range(3):
        function(*args)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        function(*args)
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / 20


def test_a_kernel_of_triton():
    """A gigabyte read and written once: the time is the memory's."""
    x = torch.randn(1 << 14, 1 << 13, device="cuda")
    report = tileops.explain(golden.fuses, x, measure=True)
    (inductor,) = report.compilations[0].inductor
    (kernel,) = inductor.kernels
    assert kernel.bytes == 2 * x.numel() * 4
    assert kernel.time_us == pytest.approx(device_us(torch.compile(golden.fuses), x), rel=0.15)
    assert 0.4 < kernel.bandwidth_fraction < 1.05
    assert int(kernel.schedule["XBLOCK"]) > 0
    assert int(kernel.schedule["num_warps"]) > 0
    assert inductor.run.device_us == pytest.approx(kernel.time_us, rel=0.1)
    assert inductor.run.idle_us == 0  # one kernel has no gap
    assert report.measured.synchronizations == 0


def test_kernels_and_a_product():
    x, w = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    report = tileops.explain(golden.interrupted, x, w, measure=True)
    (inductor,) = report.compilations[0].inductor
    times = [kernel.time_us for kernel in inductor.kernels]
    assert all(times)
    assert times[1] == max(times)
    assert sum(times) == pytest.approx(inductor.run.device_us, rel=0.1)
    assert inductor.run.idle_us is not None


def test_a_branch_waits():
    report = tileops.explain(golden.branches, torch.ones(64, device="cuda"), measure=True)
    (only,) = report.breaks
    assert (only.synchronizations, only.extra_launches) == (1, 1)
    assert only.python_us > 0


def test_a_print_of_a_word_waits_for_nothing():
    report = tileops.explain(golden.prints, torch.ones(64, device="cuda"), measure=True)
    assert [each.synchronizations for each in report.breaks] == [0]


def test_cuda_graphs_are_used():
    report = tileops.explain(
        golden.fuses, torch.ones(64, 64, device="cuda"), mode="reduce-overhead", measure=True
    )
    assert report.compilations[0].cuda_graphs.used is True


def test_training():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    report = tileops.explain(golden.masks, x, training=True, measure=True)
    forward, backward = report.compilations[0].inductor
    assert forward.run.device_us > 0
    assert backward.run.device_us > 0
    assert x.grad is None
