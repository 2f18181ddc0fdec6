"""Products of one row on the CPU: which become multiplication and sum, and that they are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tileops
from tests.rewriting import rewritten
from tileops.backend import register_kernel_builder
from tileops.backend.tolerances import compare
from tileops.fusion import backend, cost, policy
from tileops.fusion.products import NAME
from tileops.gemm import GEMMFwdOp

N, K = 37, 29


SPELLINGS = {
    "linear": lambda x, w, b: F.linear(x, w),
    "linear, bias": lambda x, w, b: F.linear(x, w, bias=b),
    "mm": lambda x, w, b: torch.mm(x.reshape(1, -1), w.t()),
    "matmul": lambda x, w, b: x @ w.t(),
    "matmul, method": lambda x, w, b: x.matmul(w.mT),
}


def refused(function, *inputs, policy=None):
    """Why a product stays, in a graph that has one."""
    run, seen = rewritten(function, policy)
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs), function(*inputs))
    assert not list(seen.report.of("inlined"))
    return seen.declined().get(NAME)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(K,), (1, K), (1, 1, K)], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_right(spelling, shape, dtype):
    function = SPELLINGS[spelling]
    x, w, b = (torch.randn(s, dtype=dtype) for s in (shape, (N, K), (N,)))
    with torch.no_grad():
        run, seen = rewritten(function, "always" if dtype is torch.float16 else None)
        result = run(x, w, b)
    assert seen.inlined() == [NAME]
    exact = function(x.double(), w.double(), b.double())
    assert (result.dtype, result.shape) == (dtype, exact.shape)
    found = compare(result, exact, "template")
    assert found.ok, found.text
    if dtype is not torch.float32:  # one rounding, of the result: float32 errors seldom change it
        assert (result == exact.to(dtype)).float().mean() > 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_makes_a_loop_of_it(dtype):
    """With what stands before and after it, and non-finite numbers."""

    def function(x, w, b):
        return F.silu(F.linear(x * 2, w, b)) + 1

    x, w, b = (torch.randn(s, dtype=dtype) for s in ((1, K), (N, K), (N,)))
    w[3, 5], w[4, 0] = float("inf"), float("nan")
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(function, backend=backend, fullgraph=True)(x, w, b)
    exact = function(x.double(), w.double(), b.double())
    found = compare(result, exact, "template")
    assert found.ok, found.text


def test_an_empty_product_and_a_row_in_strides():
    w = torch.randn(N, 2 * K)[:, ::2].contiguous()
    x = torch.randn(2 * K)[::2]
    with torch.no_grad():
        run, seen = rewritten(lambda x, w: F.linear(x, w))
        torch.testing.assert_close(run(x, w), F.linear(x, w), rtol=1e-5, atol=1e-5)
    assert seen.inlined() == [NAME]
    for shape in ((N, 0), (0, K)):
        empty, row = torch.randn(shape), torch.randn(1, shape[1])
        run, _ = rewritten(lambda x, w: F.linear(x, w))
        with torch.no_grad():
            assert torch.equal(run(row, empty), F.linear(row, empty))


@pytest.mark.parametrize("bias", [None, torch.randn(3)], ids=["alone", "bias"])
def test_rows_of_no_elements_are_not_one(bias):
    assert refused(lambda x, w: F.linear(x, w, bias), torch.randn(5, 0), torch.randn(3, 0)) is None


def test_a_number_of_rows_that_only_the_data_tell():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, w, chosen = torch.randn(4, K), torch.randn(N, K), torch.tensor([True, False] * 2)
        assert refused(lambda x, w, m: F.linear(x[m], w), x, w, chosen) is None


def test_a_matrix_that_is_written_later_is_read_before():
    def function(x, w):
        y = F.linear(x, w)
        w.mul_(2)
        return y + F.linear(x, w)

    x, w = torch.randn(1, K), torch.randn(N, K)
    expected = function(x, w.clone())
    run, seen = rewritten(function)
    with torch.no_grad():
        torch.testing.assert_close(run(x, w), expected, rtol=1e-5, atol=1e-5)
    assert seen.inlined() == [NAME, NAME]


def test_what_stays():
    x, w, rows = torch.randn(1, K), torch.randn(N, K), torch.randn(3, K)
    assert refused(F.linear, rows, w) is None  # no product of one row
    columns = torch.randn(K, N)
    assert refused(torch.mm, x, columns) == "rows of the matrix are not contiguous"
    assert refused(torch.mm, x.long(), w.long().t()) == "its operands are not of one floating dtype"
    assert refused(F.linear, x.half(), w.half()) == "the library's product serves torch.float16"
    assert refused(F.linear, x.double(), w.double()) == "the library's product serves torch.float64"
    assert refused(F.linear, x, w, policy="never") == "policy never, by options"


def test_long_rows_stay_where_the_library_has_all_cores(monkeypatch):
    monkeypatch.setattr(cost, "LONGEST_ROW", dict.fromkeys(cost.LONGEST_ROW, K - 1))
    x, w = torch.randn(1, K), torch.randn(N, K)
    slow = f"the library's product is faster for more than {K - 1} elements a row, here {K}"
    assert refused(F.linear, x.bfloat16(), w.bfloat16()) == slow
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert refused(F.linear, x, w) == slow
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with torch.no_grad():
        run, seen = rewritten(F.linear)
        run(x, w)
    assert seen.inlined() == [NAME]


def test_policies_decide_first(monkeypatch):
    def kept(x, w):
        with policy("never"):
            return F.linear(x, w)

    x, w = torch.randn(1, K), torch.randn(N, K)
    assert refused(kept, x, w) == "policy never, by call"
    monkeypatch.setattr(cost, "LONGEST_ROW", {})
    run, seen = rewritten(F.linear, "always")
    with torch.no_grad():
        run(x, w)
    assert seen.inlined() == [NAME]


@pytest.mark.parametrize("trans_a", [False, True])
def test_the_op_is_unrolled_where_its_kernel_is_in_tree(trans_a):
    gemm, x, w = GEMMFwdOp(trans_a=trans_a), torch.randn(1, K), torch.randn(N, K)
    x = x.t() if trans_a else x
    run, seen = rewritten(gemm)
    with torch.no_grad():
        found = compare(run(x, w), (x.t() if trans_a else x).double() @ w.double().t(), "template")
    assert found.ok, found.text
    assert seen.inlined() == ["GEMMFwdOp"]


def test_a_target_keeps_its_products():
    register_kernel_builder("products_test", "GEMMFwdOp", lambda *s, **p: lambda a, b: a @ b.t())
    x, w = torch.randn(1, K), torch.randn(N, K)
    with tileops.use_target("products_test"), torch.no_grad():
        run, seen = rewritten(GEMMFwdOp())
        run(x, w)
    assert "target 'products_test' serves it" in seen.declined()["GEMMFwdOp"]
    assert not seen.inlined()


def test_a_gradient_keeps_the_product():
    x, w = torch.randn(1, K), torch.randn(N, K, requires_grad=True)
    run, seen = rewritten(F.linear)
    run(x, w).sum().backward()
    assert seen.declined() == {NAME: "a gradient is asked for"}
    torch.testing.assert_close(w.grad, x.expand(N, K))
    with torch.no_grad():
        run, seen = rewritten(F.linear)
        run(x, w)
    assert seen.inlined() == [NAME]


def test_under_autocast_the_product_stays():
    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w)

    x, w = torch.randn(1, K), torch.randn(N, K)
    run, seen = rewritten(function)
    with torch.no_grad():
        assert torch.equal(run(x, w), function(x, w))
    assert not seen.inlined()


def test_lengths_that_vary_beside_it():
    """The product keeps its graph while another size is a symbol."""

    def function(x, w, other):
        return F.linear(x, w).sum() + other.sum()

    run, seen = rewritten(function, dynamic=True)
    x, w = torch.randn(1, K), torch.randn(N, K)
    with torch.no_grad():
        for length in (5, 8, 3):
            other = torch.randn(length)
            torch.testing.assert_close(
                run(x, w, other), function(x, w, other), rtol=1e-4, atol=1e-4
            )
    assert len(seen.graphs) == 1
