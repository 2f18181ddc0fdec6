"""Products of many rows on the CPU by oneDNN: right in meaning, and only where they may and should."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import tileops
from tests.contract.fresh import run_fresh
from tests.rewriting import rewritten
from tileops.backend import DeviceFacts, register_kernel_builder
from tileops.backend.tolerances import compare
from tileops.fusion import backend, cost, last_report, policy
from tileops.gemm import GEMMFwdOp
from tileops.gemm.kernels import on_cpu

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
OP, CALL = "GEMMEpilogueFwdOp", "tileops.onednn_linear.default"
N, K = 37, 29
GEMM = GEMMFwdOp()


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """The rule sees one of AMD's processors, and products of any size."""
    facts = DeviceFacts("cpu", name="AuthenticAMD")
    monkeypatch.setattr(cost, "device_facts", lambda device: facts)
    for name in ("LEAST_ROWS", "LEAST_COLUMNS", "LEAST", "LEAST_BY_LARGE"):
        monkeypatch.setattr(on_cpu, name, 1)


def tensors(rows=19):
    return [torch.randn(s) for s in ((rows, K), (N, K), (N,))]


def taken(seen):
    return [data["takes"] for report in seen.reports for data in report.of("fused")]


def reasons(seen):
    return [d["reason"] for r in seen.reports for d in r.of("declined") if d["op"] == OP]


def without_gradient(function, *inputs, option=None, **more):
    run, seen = rewritten(function, option, **more)
    with torch.no_grad():
        return run(*inputs), seen


MEANINGS = {
    "linear": (lambda x, w, b: F.linear(x, w, b), "nothing"),
    "without bias": (lambda x, w, b: F.linear(x, w), "nothing"),
    "batches": (lambda x, w, b: F.linear(torch.stack([x, x]), w, b), "nothing"),
    "mm": (lambda x, w, b: x @ w.t() + b, "bias"),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w.mT), "nothing"),
    "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), "gelu"),
    "gelu by tanh": (lambda x, w, b: F.gelu(F.linear(x, w), approximate="tanh"), "gelu_tanh"),
    "silu": (lambda x, w, b: F.silu(x.matmul(w.t()) + b), "bias, silu"),
    "relu": (lambda x, w, b: F.relu(F.linear(x, w, b)), "nothing"),
    "op": (lambda x, w, b: GEMM(x, w) + b, "bias"),
    "op alone": (lambda x, w, b: GEMM(x.t().contiguous().t(), w), "nothing"),
    "residual": (lambda x, w, b: F.linear(x, w, b) * 0.5 + x.sum(), "nothing"),
    "gate": (lambda x, w, b: F.silu(F.linear(x, w)) * F.linear(x, w, b), "nothing, nothing"),
}


@pytest.mark.parametrize("rows", [16, 19])
@pytest.mark.parametrize("meaning", MEANINGS)
def test_it_means_the_same(meaning, rows):
    """16 rows are multiplied in the other order; there the activation is Inductor's."""
    function, takes = MEANINGS[meaning]
    inputs = tensors(rows)
    result, seen = without_gradient(function, *inputs)
    exact = function(*(t.double() for t in inputs))
    assert result.shape == exact.shape
    assert result.is_contiguous()
    found = compare(result, exact, "template")
    assert found.ok, found.text
    if rows == 16:
        takes = takes.removesuffix("silu").removesuffix("gelu_tanh").removesuffix("gelu")
        takes = takes.removesuffix(", ") or "nothing"
    assert ", ".join(taken(seen)) == takes, seen.report
    assert seen.targets().count(CALL) == len(taken(seen))


@pytest.mark.parametrize("rows", [32, 21])
def test_compiled_code_calls_it(rows):
    """No Python between, and what is no number stays so."""

    def function(x, w, b):
        h = F.relu(F.linear(x * 2, w, b))
        return F.gelu(F.linear(h, w.t().contiguous(), x[0]))

    x, w, b = tensors(rows)
    x[3, 5] = float("nan")
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(function, backend=backend, fullgraph=True)
        result, (code, *_) = run_and_get_code(run, x, w, b)
    found = compare(result, function(x.double(), w.double(), b.double()), "template")
    assert found.ok, found.text
    assert result[3].isnan().all()
    assert not result[4:].isnan().any()
    assert code.count("torch.ops.mkldnn._linear_pointwise.default(") == 2
    assert "= torch.ops.tileops" not in code


def test_weights_that_change_and_lengths_that_vary():
    """Nothing of a weight is kept from call to call."""
    x, w, b = tensors()
    torch._dynamo.reset()
    run = torch.compile(F.linear, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (19, 16, 5):
            torch.testing.assert_close(run(x[:rows], w, b), F.linear(x[:rows], w, b))
            w.mul_(-2)
    assert [data["op"] for data in last_report().of("fused")] == [OP]


def test_what_is_written_is_read_before():
    def function(x, w, b):
        y = F.linear(x, w, b)
        w.mul_(2)
        return F.gelu(y) + F.linear(x, w)

    x, w, b = tensors()
    expected = function(x, w.clone(), b)
    result, seen = without_gradient(function, x, w, b)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert len(taken(seen)) == 2


def test_what_stays(monkeypatch):
    """Each for its reason; an activation is behind each, since a product alone stays without a word."""
    x, w, b = tensors()
    gelu = lambda x, w, b: F.gelu(F.linear(x, w, b))  # noqa: E731

    def cast(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return gelu(x, w, b)

    def kept(x, w, b):
        with policy("never"):
            return gelu(x, w, b)

    half = [t.bfloat16() for t in (x, w, b)]
    turned = lambda x, w, b: F.gelu(x @ w.t().contiguous())  # noqa: E731
    served = "the library's product and a kernel after it are as fast (onednn_epilogue: "
    for function, inputs, reason in (
        (cast, (x, w, b), "it is called under torch.autocast"),
        (kept, (x, w, b), "policy never, by call"),
        (gelu, half, f"{served}torch's own product serves bfloat16"),
        (turned, (x, w, b), f"{served}rows of an operand are not contiguous"),
    ):
        _, seen = without_gradient(function, *inputs)
        (given,) = reasons(seen)
        assert given.startswith(reason)
        assert not taken(seen)
    for name, value, reason in (
        ("LEAST_ROWS", 20, f"19 rows and {N} columns (at least 20 and 1)"),
        ("LEAST", 1 << 16, f"{19 * N * K} multiplications (at least {1 << 16})"),
        ("FASTER_ON", "Intel", "MKL was not seen to be slower on AuthenticAMD"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(on_cpu, name, value)
            _, seen = without_gradient(gelu, x, w, b)
            assert (reasons(seen), taken(seen)) == ([f"{served}{reason})"], [])


def test_a_gradient_keeps_the_product():
    x, w, b = tensors()
    run, seen = rewritten(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    run(x, w.requires_grad_(), b).sum().backward()
    assert (reasons(seen), taken(seen)) == (["a gradient is asked for"], [])
    assert w.grad.abs().sum() > 0


@pytest.mark.parametrize("option", ["freezing", "max_autotune"])
def test_where_inductor_has_products_of_its_own(option, monkeypatch):
    plain = lambda self, module, inputs: module  # noqa: E731
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", plain)
    inputs = tensors()
    for options, calls in (({}, 1), ({option: True}, 0)):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(F.linear, backend=backend, options=options)(*inputs)
        assert len(list(last_report().of("fused"))) == calls


def test_a_target_keeps_its_products_and_gets_them_later():
    x, w, _ = tensors()
    register_kernel_builder(
        "onednn_test", "GEMMFwdOp", lambda *_, **__: lambda a, b: torch.full((19, N), 7.0)
    )
    torch._dynamo.reset()
    run = torch.compile(lambda x, w: GEMM(x, w), backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(run(x, w), F.linear(x, w))
        assert len(list(last_report().of("fused"))) == 1
        with tileops.use_target("onednn_test"):
            assert (run(x, w) == 7).all()


def _warm(cache: str) -> tuple[torch.Tensor, int, int]:
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    cost.device_facts = lambda device: DeviceFacts("cpu", name="AuthenticAMD")
    on_cpu.LEAST = on_cpu.LEAST_ROWS = on_cpu.LEAST_COLUMNS = 1
    with torch.no_grad():
        result = torch.compile(F.linear, backend=backend)(torch.ones(19, K), torch.ones(N, K))
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return result, hits, len(list(last_report().of("fused")))


@pytest.mark.slow
def test_a_second_process_finds_it_on_disk(tmp_path):
    for hits in (0, 1):
        result, found, calls = run_fresh(_warm, cache=str(tmp_path))
        assert (result == K).all()
        assert (found, calls) == (hits, 1)
