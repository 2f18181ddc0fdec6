"""Threads, streams, devices, forks and graphs: what shares an op must not notice the others."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
import torch.nn.functional as F

from tileops.backend.tolerances import compare
from tileops.elementwise import SiLUAndMulFwdOp
from tileops.gemm import GEMMFwdOp
from tileops.norm import RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
two_cards = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two CUDA cards"
)
_salt = count(1)


def norm_op(width):
    """Of a key of its own: nothing is built or planned for it yet."""
    return RMSNormFwdOp(normalized_shape=(width,), eps=1e-5 + next(_salt) * 1e-9)


def check(result, wanted, kind="reduction"):
    found = compare(result, wanted, kind)
    assert found.ok, found.text


def check_norm(op, x, weight, result):
    check(result, F.rms_norm(x.double(), weight.shape, weight.double(), op.eps))


# ---- threads and streams -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [96, 1500, 40000])
def test_16_threads_with_10_shapes_and_streams_of_their_own_on_a_cold_op(width):
    op, start = norm_op(width), threading.Barrier(16)
    weight = torch.randn(width, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()

    def work(n):
        stream = torch.cuda.Stream()
        start.wait()
        with torch.cuda.stream(stream):
            rows = [(n * 10 + k) % 29 + 1 for k in range(10)]
            inputs = [torch.randn(r, width, device="cuda", dtype=torch.float16) for r in rows]
            return [(x, op(x, weight)) for _ in range(3) for x in inputs]

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(work, range(16)))
    torch.cuda.synchronize()
    for results in made:
        for x, y in results:
            check_norm(op, x, weight, y)


def test_a_side_stream_waits_for_its_slow_producer():
    op, weight = norm_op(512), torch.randn(512, device="cuda")
    source = torch.randn(64, 512, device="cuda")
    check_norm(op, source, weight, op(source, weight))
    stream = torch.cuda.Stream()
    for _ in range(5):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            x = torch.full_like(source, float("nan"))
            torch.cuda._sleep(50_000_000)
            x.copy_(source)
            y = op(x, weight)  # on the default stream it would read NaN
        stream.synchronize()
        check_norm(op, source, weight, y)


def test_threads_of_one_stream_each_launch_what_they_packed():
    """Arguments are packed into buffers that threads must not share while the driver reads them."""
    op = SoftmaxFwdOp(dim=-1)
    inputs = [torch.full((n, 256), float(n), device="cuda") for n in range(1, 17)]
    op(inputs[0])
    torch.cuda.synchronize()

    def work(x):
        return [op(x) for _ in range(300)]

    with ThreadPoolExecutor(16) as pool:
        for x, results in zip(inputs, pool.map(work, inputs), strict=True):
            for y in results:
                assert y.shape == x.shape and y.eq(1 / 256).all()


# ---- two cards ---------------------------------------------------------------------------------------


@two_cards
def test_inputs_on_a_card_that_is_not_current():
    op = norm_op(1024)
    assert torch.cuda.current_device() == 0
    x, weight = torch.randn(8, 1024, device="cuda:1"), torch.randn(1024, device="cuda:1")
    for _ in range(4):
        y = op(x, weight)
        assert y.device == x.device and torch.cuda.current_device() == 0
        check_norm(op, x, weight, y)


@two_cards
def test_one_op_goes_from_card_to_card():
    width = 640
    norm, softmax, silu = norm_op(width), SoftmaxFwdOp(dim=-1), SiLUAndMulFwdOp()
    rope, gemm = RoPENeoxPositionIdsFwdOp(max_position=4096), GEMMFwdOp()
    for turn in range(6):
        device = f"cuda:{turn % 2}"
        x = torch.randn(4 + turn // 2, width, device=device)
        weight = torch.randn(width, device=device)
        check_norm(norm, x, weight, norm(x, weight))
        check(softmax(x), x.double().softmax(-1))
        left, right = x.double().chunk(2, -1)
        check(silu(x), F.silu(left) * right)
        product = gemm(x, torch.eye(width, device=device))
        torch.testing.assert_close(product, x, rtol=1e-4, atol=1e-4)
        heads, positions = x.view(-1, 5, 128), torch.zeros(len(x), dtype=torch.int64, device=device)
        assert rope(heads, positions).equal(heads)


@two_cards
def test_threads_on_two_cards():
    op, start = norm_op(2048), threading.Barrier(8)

    def work(n):
        device = torch.device("cuda", n % 2)
        start.wait()
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                weight = torch.randn(2048, device=device)
                made = [torch.randn(k + 1, 2048, device=device) for k in range(10)]
                results = [(x, weight, op(x, weight)) for x in made]
            stream.synchronize()
        return results

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            for x, weight, y in results:
                assert y.device == x.device
                check_norm(op, x, weight, y)


@two_cards
def test_inputs_on_two_cards_are_refused():
    op = norm_op(64)
    with pytest.raises(ValueError, match="device cuda:1"):
        op(torch.randn(2, 64, device="cuda:0"), torch.randn(64, device="cuda:1"))


# ---- processes ---------------------------------------------------------------------------------------

_FORKED = """
import os, sys, torch
import tileops.norm, tileops.reduction
from tileops.norm import RMSNormFwdOp
op = RMSNormFwdOp(normalized_shape=(64,), eps=1e-5)
op(torch.randn(2, 64), torch.ones(64))
children = []
for n in range(3):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            x, w = torch.randn(5 + n, 64, device="cuda"), torch.randn(64, device="cuda")
            for _ in range(3):
                y = op(x, w)
            wanted = torch.nn.functional.rms_norm(x.double(), (64,), w.double(), 1e-5)
            code = 0 if torch.allclose(y.double(), wanted, atol=1e-5) else 2
        finally:
            os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
x, w = torch.randn(5, 64, device="cuda"), torch.randn(64, device="cuda")
assert op(x, w).shape == x.shape
assert codes == [0, 0, 0], codes
"""


def test_children_forked_after_the_import(tmp_path):
    import subprocess
    import sys

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _FORKED], env=environment, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---- graphs ------------------------------------------------------------------------------------------


def test_the_kernel_of_an_op_that_was_collected_lives_on_in_its_graph():
    op, weight = norm_op(777), torch.randn(777, device="cuda")
    x = torch.randn(33, 777, device="cuda")
    op(x, weight)
    eps, graph = op.eps, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, weight)
    del op
    gc.collect()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(y, F.rms_norm(x.double(), (777,), weight.double(), eps))


@pytest.mark.parametrize("rows", [256, 1000, 4096, 65536])
def test_reduce_overhead_between_linears(rows):
    torch.manual_seed(rows)
    op = norm_op(256)
    first = torch.nn.Linear(128, 256, device="cuda", dtype=torch.float16)
    last = torch.nn.Linear(256, 64, device="cuda", dtype=torch.float16)
    weight = torch.randn(256, device="cuda", dtype=torch.float16)

    def model(x):
        return last(op(first(x), weight))

    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(rows, 128, device="cuda", dtype=torch.float16)
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(x).clone()
            hidden = F.rms_norm(first(x).double(), (256,), weight.double(), op.eps)
            wanted = hidden @ last.weight.double().t() + last.bias.double()
            torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2e-2)
