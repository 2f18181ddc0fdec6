"""The kernels of running sums and products, in Triton's interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, misaligned, poison, run_entry, shapes
from tests.oracle import exact
from tests.triton_interpreter import interpreted
from tileops import reduction
from tileops.backend.tolerances import compare

HALF = torch.bfloat16
NAMES = ["CumsumFwdOp", "CumprodFwdOp"]


def op_of(name, dim, **params):
    return getattr(reduction, name)(dim, **params)


def call_for(op, x, **facts):
    """``x``: a tensor, or (shape, dtype)."""
    real = isinstance(x, torch.Tensor)
    shape, given = (tuple(x.shape), x.dtype) if real else x
    device = x.device if real else torch.device("cuda", 0)
    specs = shapes(
        device, input=x if not real else (shape, given), output=(shape, op.dtype or given)
    )
    return call_of(
        type(op).__name__,
        {"input": x if real else specs["input"]},
        {"output": specs["output"]},
        params=op._params,
        **facts,
    )


@interpreted
def run(op, x, small=False):
    """The result and the number of launches; ``small``: with so small blocks that a small tensor
    has several groups of parts."""
    from tileops.reduction.kernels import scan

    sizes = {
        "WHOLE_ROW": 8, "ROW_BLOCK": 4, "ROW_TILE": 16, "COLUMN_BYTES": 16, "COLUMN_THREADS": 2,
        "COLUMNS_HELD": 8, "GROUP": 4,
    }  # fmt: skip
    before = {name: getattr(scan, name) for name in sizes}
    try:
        if small:
            vars(scan).update(sizes)
        call = call_for(op, x)
        entry = scan.Scan.entry_for(call)
        with poison():
            return run_entry(entry, call, x), len(entry.identity)
    finally:
        vars(scan).update(before)


def check(op, x, result):
    (wanted,), _ = exact(op, {"input": x})
    found = compare(result, wanted, "reduction")
    assert found.ok, f"{op!r}: {found.text}"


def draw(name, shape, dtype=torch.float32):
    """Products stay of the order of 1."""
    x = torch.randn(shape)
    return (x if name == "CumsumFwdOp" else 1 + x / 8).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "dim", "launches"),
    [
        ((), 0, 1),
        ((1,), -1, 1),
        ((5, 8), 1, 1),
        ((7, 3), -1, 1),
        ((3, 13), 1, 2),
        ((2, 67), 1, 2),  # several groups of parts
        ((3, 5), 0, 1),
        ((13, 3), 0, 2),
        ((2, 67, 5), 1, 2),
        ((16, 2), 0, 2),  # nothing after a whole group
        ((2, 3, 9, 4), 2, 2),
    ],
)
def test_small_blocks(name, shape, dim, launches):
    x, op = draw(name, shape), op_of(name, dim)
    few, count = run(op, x, small=True)
    check(op, x, few)
    assert count == launches
    if dim % max(len(shape), 1):
        many, _ = run(op, torch.cat([x, x, x]), small=True)
        assert torch.equal(torch.cat([few, few, few]), many), "it depends on the rows beside it"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, HALF, torch.float32, torch.float64])
def test_real_blocks(name, dtype):
    x = draw(name, (5, 100), dtype)
    for dim in (0, 1):
        check(op_of(name, dim), x, run(op_of(name, dim), x)[0])


def test_long_rows_and_columns_in_real_blocks():
    for shape, dim in (((2, 20000), 1), ((1100, 32), 0)):
        x, op = draw("CumsumFwdOp", shape), op_of("CumsumFwdOp", dim)
        result, count = run(op, x)
        check(op, x, result)
        assert count == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1])
def test_infinities_and_nan_stay_behind_their_place(name, dim):
    x = draw(name, (5, 21))
    x[0, 7] = math.nan
    x[1, 9] = math.inf
    x[2, 4], x[2, 15] = math.inf, -math.inf
    x[3, 5], x[3, 16] = 0.0, math.inf
    x[4, 20] = -math.inf
    x = x if dim == 1 else x.T.contiguous()
    op = op_of(name, dim)
    for small in (False, True):
        check(op, x, run(op, x, small=small)[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_cast_comes_first(name):
    x = (torch.randn(4, 12) * 2).bfloat16().float() * (1 + 2**-10)
    op = op_of(name, 1, dtype=HALF)
    check(op, x, run(op, x)[0])


def test_misaligned_and_nothing():
    x, op = misaligned(torch.randn(3, 64)), op_of("CumsumFwdOp", 1)
    check(op, x, run(op, x)[0])
    for shape in ((0, 4), (4, 0), (2, 0, 3), (0,)):
        for dim in range(len(shape)):
            assert run(op_of("CumsumFwdOp", dim), torch.empty(shape))[0].shape == shape


BUILDS = [
    ("CumsumFwdOp", (4096, 5120), -1, torch.float32),
    ("CumsumFwdOp", (4, 128256), -1, HALF),
    ("CumprodFwdOp", (4096, 4096), 0, HALF),
]
MORE_BUILDS = [
    ("CumsumFwdOp", (4096, 131072), -1, HALF),
    ("CumsumFwdOp", (1, 2**24), -1, torch.float32),
    ("CumsumFwdOp", (4096, 64), -1, torch.float16),
    ("CumsumFwdOp", (1000, 33), -1, torch.float64),
    ("CumsumFwdOp", (512, 100, 1024), 1, torch.float32),
    ("CumprodFwdOp", (4096, 5120), -1, torch.float32),
    ("CumprodFwdOp", (4, 128256), -1, HALF),
    ("CumprodFwdOp", (64, 5000, 3), 1, torch.float64),
]


def compiled(name, shape, dim, dtype, arch):
    from tileops.reduction.kernels.scan import Scan

    call = call_for(op_of(name, dim), (shape, dtype), arch=arch)
    builds = builds_of(Scan.entry_for(call))
    for build in builds:
        assert_fits(build, arch)
    return builds


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("name", "shape", "dim", "dtype"), BUILDS)
def test_compiles_to_wide_accesses(name, shape, dim, dtype, arch):
    *_, build = compiled(name, shape, dim, dtype, arch)
    code = sass(build, arch)
    assert "LDG.E.128" in code
    assert "STG.E.128" in code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("name", "shape", "dim", "dtype"), MORE_BUILDS)
def test_compiles(name, shape, dim, dtype, arch):
    compiled(name, shape, dim, dtype, arch)
