"""The products' kernels on the CPU: oneDNN's in both orders, and torch's, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import check
from tileops.backend import DeviceFacts
from tileops.engine import targets
from tileops.gemm import GEMMEpilogueFwdOp, GEMMFwdOp
from tileops.gemm.kernels import on_cpu

ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
SMALL = ("LEAST_ROWS", "LEAST_COLUMNS", "LEAST", "LEAST_BY_LARGE")


@pytest.fixture
def every_size(monkeypatch):
    """oneDNN serves products of any size on any processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(on_cpu, "FASTER_ON", "")
    for name in SMALL:
        monkeypatch.setattr(on_cpu, name, 1)


def operands(m, n, k, bias=True, residual=True):
    return {
        "a": torch.randn(m, k),
        "b": torch.randn(n, k),
        "bias": torch.randn(n) if bias else None,
        "residual": torch.randn(m, n) if residual else None,
    }


@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_part_of_the_epilogue(every_size, activation, rows):
    """16 rows are multiplied in the other order. The sizes are this test's: plans are kept by them."""
    for bias, residual, scale in ((True, True, -0.75), (True, False, 1.0), (False, True, 1.0)):
        for keeps in (False, True) if activation else (False,):
            op = GEMMEpilogueFwdOp(activation=activation, scale=scale, keeps_preactivation=keeps)
            check(op, operands(rows, 23, 31, bias, residual))
            assert op.last_call.kernel == "onednn_epilogue"


@pytest.mark.parametrize("rows", [32, 1, 29])
def test_the_product(every_size, rows):
    op = GEMMFwdOp()
    check(op, {"a": torch.randn(rows, 23), "b": torch.randn(27, 46)[:, ::2]})
    assert op.last_call.kernel == "onednn_product"


@pytest.mark.parametrize("rows", [16, 19])
def test_what_is_no_number_stays_so(every_size, rows):
    """oneDNN's own ReLU gives 0 for NaN."""
    for activation in ACTIVATIONS:
        given = operands(rows, 21, 33)
        given["a"][3], given["bias"][5] = float("nan"), float("nan")
        op = GEMMEpilogueFwdOp(activation=activation)
        d, _ = check(op, given)
        assert d[3].isnan().all()
        assert d[:, 5].isnan().all()
        assert not d[4, :5].isnan().any()


def test_gradient(every_size):
    a, b, bias = (t.requires_grad_() for t in list(operands(18, 21, 35).values())[:3])
    op = GEMMEpilogueFwdOp(activation="gelu", scale=0.5, keeps_preactivation=True)
    grad = torch.randn(18, 21)
    found = torch.autograd.grad(op(a, b, bias)[0], (a, b, bias), grad)
    assert op.last_call.kernel == "onednn_epilogue"
    wide = [t.detach().double().requires_grad_() for t in (a, b, bias)]
    result = torch.nn.functional.gelu(torch.nn.functional.linear(*wide)) * 0.5
    for one, other in zip(found, torch.autograd.grad(result, wide, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_which_library_serves(monkeypatch):
    """By the sizes, the layout, the dtype and who made the processor."""
    m, n, k = 16, 1 << 10, 1 << 9
    facts = DeviceFacts("cpu", name="AuthenticAMD")

    def kernel(device, trans_b=True, rows=m, columns=n, dtype=torch.float32):
        monkeypatch.setattr(targets, "device_facts", lambda _: device)
        op = GEMMEpilogueFwdOp(trans_b=trans_b)
        shape = (columns, k) if trans_b else (k, columns)
        op(torch.zeros(rows, k, dtype=dtype), torch.zeros(shape, dtype=dtype))
        return op.last_call

    if torch.backends.mkldnn.is_available():
        assert kernel(facts).kernel == "onednn_epilogue"
        assert kernel(facts, rows=256, columns=128).kernel == "onednn_epilogue"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for given, reason in (
        ({"rows": 5}, f"5 rows and {n} columns (at least 6 and 128)"),
        ({"rows": 1 << 12, "columns": 96}, f"{1 << 12} rows and 96 columns (at least 6 and 128)"),
        ({"rows": 6}, f"{6 * n * k} multiplications (at least {1 << 22})"),
        ({"rows": 64, "columns": 256}, f"{64 * 256 * k} multiplications (at least {1 << 24})"),
        ({"trans_b": False}, "rows of an operand are not contiguous"),
        ({"dtype": torch.bfloat16}, "torch's own product serves bfloat16"),
    ):
        last = kernel(facts, **given)
        assert dict(last.refused)["onednn_epilogue"] == reason
        assert last.kernel != "onednn_epilogue"
    for more, name in enumerate(("GenuineIntel", "")):  # of other rows each: a plan asks once
        last = kernel(DeviceFacts("cpu", name=name), rows=m + 16 + more)
        said = f"MKL was not seen to be slower on {name or 'this processor'}"
        assert (last.kernel, dict(last.refused)["onednn_epilogue"]) == ("product_then_steps", said)
