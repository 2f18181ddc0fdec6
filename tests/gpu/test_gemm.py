"""The gradients of a matrix product on a card against float64."""

from __future__ import annotations

import pytest
import torch

from tests.cases import op_classes
from tileops.backend.tolerances import compare
from tileops.engine.workloads import workload_inputs
from tileops.gemm import GEMMBwdOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def hold(op, grad_d, a, b, results):
    left, right = a.double().requires_grad_(), b.double().requires_grad_()
    product = (left.t() if op.trans_a else left) @ (right.t() if op.trans_b else right)
    expected = torch.autograd.grad(product, (left, right), grad_d.double())
    for wants, wanted, given in zip((op.wants_a, op.wants_b), expected, results, strict=True):
        assert (given is not None) == wants
        if wants:
            found = compare(given, wanted, "template")
            assert found.ok, f"{op!r}: {found.text}"


@pytest.mark.parametrize("workload", GEMMBwdOp.entry.workloads, ids=lambda w: w.label)
def test_workloads(workload, seed):
    made = workload_inputs(op_classes()["GEMMBwdOp"], workload, "cuda", scale_to=1 << 24, seed=seed)
    hold(made.op, *made.inputs.values(), made.op(*made.inputs.values()))
    assert made.op.last_call.kernel == "two_products"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_layouts(trans_a, trans_b, dtype):
    for m, n, k in (
        (1, 1, 1),
        (1, 4096, 2048),
        (300, 500, 129),
        (17, 33, 65),
        (0, 4, 4),
        (4, 4, 0),
    ):
        a = torch.randn((k, m) if trans_a else (m, k), device="cuda").to(dtype)
        b = torch.randn((n, k) if trans_b else (k, n), device="cuda").to(dtype)
        op, grad_d = GEMMBwdOp(trans_a, trans_b), torch.randn(m, n, device="cuda").to(dtype)
        hold(op, grad_d, a, b, op(grad_d, a, b))
    ones = torch.ones((), device="cuda", dtype=dtype).expand(m, n)
    hold(op, ones, a, b, op(ones, a, b))
