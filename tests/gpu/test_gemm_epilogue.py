"""The product with an epilogue on a card, each kernel and each configuration against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cases import op_classes
from tileops.backend.tolerances import compare
from tileops.engine.plan import call_spec
from tileops.engine.select import claimants
from tileops.engine.workloads import workload_inputs
from tileops.fusion import backend, last_report
from tileops.gemm import GEMMEpilogueFwdOp
from tileops.gemm.kernels import epilogue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

KERNELS = [
    epilogue.CublasEpilogue,
    epilogue.CublasThenFinish,
    epilogue.PersistentEpilogue,
    epilogue.TritonEpilogue,
]
ACTIVATIONS = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def meaning(op, a, b, bias, residual):
    left, right = (a.t() if op.trans_a else a), (b.t() if op.trans_b else b)
    inner = left.double() @ right.double() + (0 if bias is None else bias.double())
    d = ACTIVATIONS[op.activation](inner) * op.scale + (
        0 if residual is None else residual.double()
    )
    return d, inner if op.keeps_preactivation else None


def hold(op, results, exact):
    for given, wanted in zip(results, exact, strict=True):
        assert (given is None) == (wanted is None)
        if given is not None:
            found = compare(given, wanted, "template")
            assert found.ok, f"{op!r}: {found.text}"


def operands(m, n, k, op, dtype=torch.bfloat16, bias=True, residual=True):
    def make(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    a, b = make(*(k, m) if op.trans_a else (m, k)), make(*(n, k) if op.trans_b else (k, n))
    return a, b, make(n) if bias else None, make(m, n) if residual else None


@pytest.mark.parametrize("workload", GEMMEpilogueFwdOp.entry.workloads, ids=lambda w: w.label)
def test_workloads(workload, seed):
    made = workload_inputs(
        op_classes()["GEMMEpilogueFwdOp"], workload, "cuda", scale_to=1 << 22, seed=seed
    )
    hold(made.op, made.op(*made.inputs.values()), meaning(made.op, *made.inputs.values()))


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_kernel_and_configuration(activation, trans_a, trans_b):
    for size in ((328, 520, 264), (16, 1000, 512)):
        for bias, residual, keeps in ((True, False, False), (True, True, activation is not None)):
            op = GEMMEpilogueFwdOp(
                trans_a, trans_b, activation=activation, keeps_preactivation=keeps
            )
            given = operands(*size, op, bias=bias, residual=residual)
            call, _ = call_spec(op, given, None)
            exact = meaning(op, *given)
            for kernel in claimants(call, KERNELS)[0]:
                for entry in kernel.candidates(call):
                    artifact = entry.build()
                    run = entry.bind(artifact, call) if entry.bind else artifact
                    hold(op, run(*given), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_and_wider_results(dtype):
    op = GEMMEpilogueFwdOp(activation="gelu", scale=0.5, out_dtype=torch.float32)
    given = operands(200, 264, 136, op, dtype)
    hold(op, op(*given), meaning(op, *given))


def test_gradient():
    op = GEMMEpilogueFwdOp(activation="gelu", keeps_preactivation=True)
    given = [t.requires_grad_() for t in operands(136, 264, 72, op, torch.float32)]
    grad = torch.randn(136, 264, device="cuda")
    found = torch.autograd.grad(op(*given)[0], given, grad)
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad(meaning(op, *wide)[0], wide, grad.double())
    for one, other in zip(found, wanted, strict=True):
        result = compare(one, other, "template")
        assert result.ok, result.text


def test_compiled_products_take_their_epilogue():
    x, w, b = (
        torch.randn(s, device="cuda").bfloat16() for s in ((2048, 1024), (4096, 1024), (4096,))
    )
    w = w * 1024**-0.5
    torch._dynamo.reset()
    run = torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b)), backend=backend, fullgraph=True)
    result = run(x, w, b)
    assert [data["op"] for data in last_report().of("fused")] == ["GEMMEpilogueFwdOp"]
    wanted = F.gelu(F.linear(x.double(), w.double(), b.double()))
    assert compare(result, wanted, "template").ok
