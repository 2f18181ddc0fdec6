"""The kernel of a running product's gradient: in Triton's interpreter against float64, and what the
compiler says."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits
from tests.kernel_calls import builds_of, call_of, misaligned, poison, run_entry, shapes
from tests.oracle import exact
from tests.triton_interpreter import interpreted
from tileops.backend.tolerances import compare
from tileops.reduction import CumprodBwdOp

HALF = torch.bfloat16


def call_for(op, grad, x, **facts):
    """From tensors or specs."""
    output = shapes(x.device, grad_input=(tuple(x.shape), x.dtype))
    inputs = {"grad_output": grad, "input": x}
    return call_of("CumprodBwdOp", inputs, output, params=op._params, **facts)


@interpreted
def run(op, grad, x, small=False):
    """``small``: with so small blocks that a small tensor is walked."""
    from tileops.reduction.kernels import product_gradient as module

    sizes = {"TILE": 16, "ROW_TILE": 16, "MOST_COLUMNS": 4} if small else {}
    before = {name: getattr(module, name) for name in sizes}
    try:
        vars(module).update(sizes)
        call = call_for(op, grad, x)
        with poison():
            return run_entry(module.ProductGradient.entry_for(call), call, grad, x)
    finally:
        vars(module).update(before)


def made(shape, given=torch.float32, **params):
    op = CumprodBwdOp(**params)
    x = 1 + torch.randn(shape) / 8  # products stay of the order of 1
    return op, torch.randn(shape).to(op.dtype or given), x.to(given)


def check(op, grad, x, **how):
    (wanted,), _ = exact(op, {"grad_output": grad, "input": x})
    found = compare(run(op, grad, x, **how), wanted, "reduction")
    assert found.ok, f"{op!r}: {found.text}"


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((), 0), ((1,), 0), ((7,), 0), ((5, 37), -1), ((37, 5), 0), ((3, 19, 7), 1), ((2, 16, 8), 1)],
)
def test_every_region(shape, dim, small):
    check(*made(shape, dim=dim), small=small)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_zeros(dim, small):
    op, grad, x = made((21, 23), dim=dim)
    x[3, 4], x[5, 6], x[9, 6], x[0, 0], x[20, 22] = 0, 0, 0, 0, -0.0
    check(op, grad, x, small=small)


@pytest.mark.parametrize("dtype", [torch.float16, HALF, torch.float64])
@pytest.mark.parametrize("dim", [0, 1])
def test_dtypes(dtype, dim):
    check(*made((6, 33), dtype, dim=dim), small=True)


def test_casts_come_first():
    for wanted in (torch.float32, torch.float64):
        check(*made((4, 12), HALF, dim=1, dtype=wanted), small=True)
    op, grad, x = made((4, 12), dim=1, dtype=HALF)
    # The interpreter truncates to bfloat16 where a card rounds.
    result = run(op, grad, x.bfloat16().float() * (1 + 2**-10), small=True)
    (wanted,), _ = exact(op, {"grad_output": grad, "input": x.bfloat16().float()})
    assert compare(result, wanted, "reduction").ok


def test_misaligned():
    op, grad, x = made((3, 64), HALF, dim=1)
    check(op, misaligned(grad), misaligned(x))


def test_nothing_to_do():
    for shape in ((0, 4), (4, 0)):
        for dim in (0, 1):
            assert run(*made(shape, dim=dim)).shape == shape


def test_a_row_does_not_depend_on_the_rows_beside_it():
    op, grad, x = made((9, 50), dim=1)
    together = run(op, grad, x, small=True)
    for row in (0, 8):
        alone = run(op, grad[row : row + 1].clone(), x[row : row + 1].clone(), small=True)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("shape", "dim", "dtype"),
    [
        ((256, 128), -1, torch.float32),
        ((64, 100), 0, HALF),
        ((4096, 5120), -1, torch.float32),
        ((4, 128256), -1, torch.float64),
    ],
)
def test_fits(shape, dim, dtype, arch):
    from tileops.reduction.kernels.product_gradient import ProductGradient

    given = shapes(grad=(shape, dtype), x=(shape, dtype))
    call = call_for(CumprodBwdOp(dim), given["grad"], given["x"], arch=arch)
    for build in builds_of(ProductGradient.entry_for(call)):
        assert_fits(build, arch)
