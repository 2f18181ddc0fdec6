"""GEMM kernels: numerics in Triton's interpreter against float64, and what the compiler says."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, poison, run_entry, shapes
from tests.triton_interpreter import interpreted

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LAYOUTS = [(False, True), (False, False), (True, True), (True, False)]


def gemm_call(m, n, k, dtype, trans_a=False, trans_b=True, a=None, b=None, **facts):
    device = torch.device("cuda", 0) if a is None else a.device
    specs = shapes(
        device,
        a=((k, m) if trans_a else (m, k), dtype),
        b=((n, k) if trans_b else (k, n), dtype),
        d=((m, n), dtype),
    )
    inputs = {"a": specs["a"], "b": specs["b"]} if a is None else {"a": a, "b": b}
    params = {"trans_a": trans_a, "trans_b": trans_b}
    return call_of("GEMMFwdOp", inputs, {"d": specs["d"]}, params=params, **facts)


@interpreted
def run_gemm(kernel, a, b, m, n, k, trans_a, trans_b, tile=None, parts=None, **facts):
    from tileops.gemm.kernels import gemm

    call = gemm_call(m, n, k, a.dtype, trans_a, trans_b, a, b, **facts)
    chosen = getattr(gemm, kernel)
    entry = chosen.entry_for(call)
    if tile is not None:
        entry = chosen.entry_of(call, gemm.Tile(*tile), parts)
    with poison():
        return run_entry(entry, call, a, b)


def operands(m, n, k, dtype, trans_a, trans_b):
    a = torch.randn((k, m) if trans_a else (m, k)).to(dtype)
    b = torch.randn((n, k) if trans_b else (k, n)).to(dtype)
    left, right = a.double(), b.double()
    return a, b, (left.T if trans_a else left) @ (right.T if trans_b else right)


def check(actual, expected, k):
    # One rounding to the dtype; float32 sums of k products of about one.
    rtol = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-6}[actual.dtype]
    atol = 2e-7 * max(k, 1)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=rtol, atol=atol)


SIZES = [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (1, 67, 130), (17, 33, 128), (65, 96, 257)]


@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", ["CublasGEMM", "TritonGEMM"])
def test_gemm(kernel, size, dtype, trans_a, trans_b):
    if kernel == "TritonGEMM" and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 as if it were integers")
    a, b, expected = operands(*size, dtype, trans_a, trans_b)
    actual = run_gemm(kernel, a, b, *size, trans_a, trans_b)
    assert actual.is_contiguous()
    check(actual, expected, size[2])


@interpreted
def run_gradients(grad_d, a, b, k, **params):
    from tileops.gemm.kernels.gemm_backward import TwoProducts

    outputs = {"grad_a": a, "grad_b": b}
    specs = shapes(a.device, **{name: (tuple(t.shape), t.dtype) for name, t in outputs.items()})
    inputs = {"grad_d": grad_d, "a": a, "b": b}
    call = call_of("GEMMBwdOp", inputs, specs, params=params)
    with poison():
        return run_entry(TwoProducts.entry_for(call), call, grad_d, a, b)


@pytest.mark.parametrize(("wants_a", "wants_b"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
@pytest.mark.parametrize("size", [(1, 67, 130), (17, 33, 64), (0, 3, 4), (3, 4, 0)])
def test_gradients(size, trans_a, trans_b, wants_a, wants_b):
    (m, n, k), grad_d = size, torch.randn(size[:2])
    a, b, _ = operands(m, n, k, torch.float32, trans_a, trans_b)
    left, right = a.double().requires_grad_(), b.double().requires_grad_()
    product = (left.T if trans_a else left) @ (right.T if trans_b else right)
    expected = torch.autograd.grad(product, (left, right), grad_d.double())
    wants = {"wants_a": wants_a, "wants_b": wants_b}
    actual = run_gradients(grad_d, a, b, k, trans_a=trans_a, trans_b=trans_b, **wants)
    for one, wanted, asked in zip(actual, expected, wants.values(), strict=True):
        if asked:
            check(one, wanted, max(m, n))
        else:
            assert one is None


def test_each_gradient_is_served_by_the_cheaper_kernel():
    from tileops.gemm.kernels.gemm_backward import TwoProducts, products

    def identity(m, n, k):
        sizes = {"grad_d": (m, n), "a": (m, k), "b": (n, k), "grad_a": (m, k), "grad_b": (n, k)}
        specs = shapes(**{name: (size, torch.bfloat16) for name, size in sizes.items()})
        outputs = {name: specs.pop(name) for name in ("grad_a", "grad_b")}
        params = {"trans_a": False, "trans_b": True, "wants_a": True, "wants_b": True}
        call = call_of("GEMMBwdOp", specs, outputs, params=params, arch=(9, 0))
        for one in products(call):
            assert one is not None
        return TwoProducts.entry_for(call).identity

    # One row: grad_a is a vector times a matrix, which Triton serves; grad_b an outer product.
    of_one_row = identity(1, 4096, 4096)
    assert of_one_row[1][0] != "aten.mm"
    assert of_one_row[2] == ("aten.mm", True, False)
    assert identity(8192, 4096, 4096)[1:] == (("aten.mm", False, False), ("aten.mm", True, False))


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [(5, 40, 320), (33, 17, 333)])
def test_split_k(size, parts):
    # Tiles of 32 along K: parts of different length, one of them empty at 8 of 10 or 11 steps.
    a, b, expected = operands(*size, torch.float16, False, True)
    tile = (16, 32, 32, 4, 2)
    check(run_gemm("TritonGEMM", a, b, *size, False, True, tile, parts), expected, size[2])


def test_grouped_tiles_cover_the_result():
    # 5 x 3 tiles in groups of 2 rows: the last group is smaller.
    size = (80, 96, 16)
    a, b, expected = operands(*size, torch.float16, False, True)
    tile = (16, 32, 16, 4, 2, 2)
    check(run_gemm("TritonGEMM", a, b, *size, False, True, tile, 1), expected, size[2])


def test_nan_and_infinity_reach_their_row_and_column_only():
    a, b, _ = operands(5, 7, 33, torch.float32, False, True)
    a[1, 2], b[3, 4] = torch.nan, torch.inf
    actual = run_gemm("TritonGEMM", a, b, 5, 7, 33, False, True)
    assert torch.equal(actual.isfinite(), (a @ b.T).isfinite())


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 512, 8192])
def test_costs_decide(rows):
    from tileops.gemm.kernels.gemm import CublasGEMM, TritonGEMM

    call = gemm_call(rows, 4096, 7168, torch.bfloat16, arch=(9, 0))
    costs = [kernel.cost(call) for kernel in (CublasGEMM, TritonGEMM)]
    assert min(costs) > 0
    assert costs[0] != costs[1]
    later = gemm_call(rows, 8192, 7168, torch.bfloat16, arch=(9, 0))
    assert CublasGEMM.cost(later) > costs[0]


def test_rows_are_not_in_the_identity():
    from tileops.gemm.kernels.gemm import TritonGEMM

    def identity(m):
        return TritonGEMM.entry_for(gemm_call(m, 4096, 4096, torch.bfloat16)).identity

    assert identity(385) == identity(511)
    assert identity(1) == identity(16)


def compiles(m, dtype, trans_a, trans_b, arch, every):
    from tileops.gemm.kernels.gemm import TritonGEMM

    call = gemm_call(m, 2112, 7168, dtype, trans_a, trans_b, arch=arch)
    entries = TritonGEMM.candidates(call) if every else [TritonGEMM.entry_for(call)]
    for entry in entries:
        for build in builds_of(entry):
            assert_fits(build, arch)
    return builds_of(entries[0])[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rows", [128, 8192])
def test_compiles_to_tensor_cores(rows, arch):
    code = sass(compiles(rows, torch.bfloat16, False, True, arch, False), arch)
    assert {(8, 0): "HMMA", (9, 0): "HGMMA", (10, 0): "UTCHMMA"}[arch] in code
    assert "LDGSTS.E.BYPASS.128" in code or "LDGSTS.E.BYPASS.LTC128B.128" in code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rows", [1, 64, 128, 512, 8192])
def test_compiles_every_candidate(rows, arch):
    compiles(rows, torch.float16, False, True, arch, True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_every_layout(dtype, trans_a, trans_b, arch):
    for rows in (48, 4096):
        compiles(rows, dtype, trans_a, trans_b, arch, False)
