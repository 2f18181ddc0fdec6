"""Softmax kernels: numerics in Triton's interpreter against float64, and what the compiler says."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, chosen, poison, run_entry, shapes
from tests.triton_interpreter import interpreted

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One rounding to the dtype; results are at most 1, so the rest is absolute.
TOLERANCE = {
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
    # A sum of n terms in any order is off by up to n units; some thirty of them were seen for 3000.
    torch.float32: {"rtol": 1e-5, "atol": 1e-7},
}


def softmax_call(x, dim, dtype=None, **facts):
    shape, given = (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cuda", 0)
    specs = shapes(device, x=(shape, given), output=(shape, dtype or given))
    source = x if isinstance(x, torch.Tensor) else specs["x"]
    params = {"dim": dim, "dtype": dtype}
    return call_of(
        "SoftmaxFwdOp", {"x": source}, {"output": specs["output"]}, params=params, **facts
    )


def serving(call):
    from tileops.reduction.kernels import softmax

    return chosen(call, *(getattr(softmax, name) for name in softmax.__all__))


@contextmanager
def interleaving(rows):
    """Within it, rows too long for registers are read again as many rows later; none of 0."""
    from tileops.reduction.kernels import softmax

    before = softmax.INTERLEAVED_BYTES, softmax.LEAD
    try:
        if rows:
            softmax.INTERLEAVED_BYTES, softmax.LEAD = 0, rows
        yield
    finally:
        softmax.INTERLEAVED_BYTES, softmax.LEAD = before


@interpreted
def run_softmax(x, dim, dtype=None, interleaved=0):
    """The result and the name of the kernel."""
    call = softmax_call(x, dim, dtype)
    with interleaving(interleaved), poison():
        kernel = serving(call)
        return run_entry(kernel.entry_for(call), call, x), kernel.name


@interpreted
def run_kernel(name, x, dim, dtype=None, candidate=0):
    from tileops.reduction.kernels import softmax

    call = softmax_call(x, dim, dtype)
    with poison():
        return run_entry(getattr(softmax, name).candidates(call)[candidate], call, x)


def softmax64(x, dim, dtype=None):
    if dim is None:
        dim = 0 if x.dim() in (0, 1, 3) else 1
    x = x.to(dtype or x.dtype).double()
    x = torch.exp(x - x.amax(dim, keepdim=True))
    return x / x.sum(dim, keepdim=True)


def check(actual, expected):
    torch.testing.assert_close(
        actual, expected.to(actual.dtype), equal_nan=True, **TOLERANCE[actual.dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((), 0),
        ((), None),
        ((1,), -1),
        ((5, 1), 1),
        ((67, 13), -1),  # several odd rows to a tile
        ((3, 64), None),
        ((2, 3, 4096), 2),
        ((2, 4099), 1),
    ],
)
def test_rows_in_registers(shape, dim, dtype):
    x = (torch.randn(shape) * 4).to(dtype)
    actual, kernel = run_softmax(x, dim)
    check(actual, softmax64(x, dim))
    assert kernel == "triton_row"


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 20000), (3, 0, 5), (0, 3, 5)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_nothing_to_do(shape, dim):
    actual, _ = run_softmax(torch.empty(shape), dim)
    assert actual.shape == shape


@pytest.mark.parametrize("candidate", range(4))
def test_row_candidates(candidate):
    x = torch.randn(3, 4096)
    check(run_kernel("RowSoftmax", x, -1, candidate=candidate), softmax64(x, -1))


# The longest odd row in registers and one more, the longest wide one, a multiple of the chunk, and a
# prime number of elements.
@pytest.mark.parametrize("n", [16383, 16385, 32768, 40960, 32771])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_rows_split_or_interleaved(n, dtype):
    x = (torch.randn(3, n) * 3).to(dtype)
    expected = softmax64(x, -1, torch.float32)
    split, kernel = run_softmax(x, -1, torch.float32)
    held = n in (16383, 32768)
    assert kernel == ("triton_row" if held else "triton_split")
    check(split, expected)
    if not held:
        for lead in (1, 2, 5):
            result, kernel = run_softmax(x, -1, torch.float32, interleaved=lead)
            assert kernel == "triton_interleaved"
            assert torch.equal(result, split), "a row's result depends on the rows beside it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1, 4), 0),
        ((4, 3), 0),
        ((67, 13), 0),
        ((2, 64, 40), 1),
        ((2, 3, 5, 7), None),
        ((2, 1024, 17), 1),
        ((2, 1025, 17), 1),  # one more than fits in a tile
        ((3000, 3), -2),
    ],
)
def test_axes_with_an_inner_stride(shape, dim, dtype):
    x = (torch.randn(shape) * 4).to(dtype)
    actual, kernel = run_softmax(x, dim)
    check(actual, softmax64(x, dim))
    assert kernel == ("triton_column" if max(shape) > 1024 else "triton_column_tile")


@pytest.mark.parametrize("shape", [(3, 33), (2, 4096)])
def test_general_kernel_takes_every_axis(shape):
    x = torch.randn(shape)
    for dim in (0, 1):
        check(run_kernel("ColumnSoftmax", x, dim), softmax64(x, dim))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize(("shape", "dim"), [((3, 100), 1), ((3, 100), 0)])
def test_the_input_is_cast_first(shape, dim, given, dtype):
    # Values a little above those that bfloat16 holds: the interpreter rounds to it towards zero.
    x = ((torch.randn(shape) * 20).bfloat16().float() * (1 + 2**-10)).to(given)
    check(run_softmax(x, dim, dtype)[0], softmax64(x, dim, dtype))


@pytest.mark.parametrize(
    ("shape", "dim"), [((5, 300), 1), ((300, 5), 0), ((2000, 5), 0), ((5, 17001), 1)]
)
@pytest.mark.parametrize("interleaved", [0, 1])
def test_infinities_and_nan_as_torch_has_them(shape, dim, interleaved):
    x = torch.randn(shape)
    rows = x if dim == 1 else x.T
    rows[0] = -torch.inf
    rows[1, 5:290] = -torch.inf
    rows[2, 7] = torch.inf
    rows[3, 11] = torch.nan
    rows[4, :-1] = -torch.inf  # all chunks but the last are empty
    check(run_softmax(x, dim, interleaved=interleaved)[0], torch.softmax(x, dim))


def test_regions_cover_every_call_once():
    for shape in [
        (4, 16384),
        (4, 16385),
        (4, 32768),
        (4, 32776),
        (5000, 128256),
        (1, 2**23),
        (1, 2**23 + 1),
        (9, 4, 3),
    ]:
        for dim in range(len(shape)):
            serving(softmax_call((shape, torch.float16), dim))
    assert serving(softmax_call(((1, 2**23 + 1), torch.float16), 1)).name == "triton_column"


@pytest.mark.parametrize("shape", [(4, 8), (4, 70000)])
def test_float64_is_left_to_the_decomposition(shape):
    from tileops.reduction.kernels import softmax

    for given, dtype in [(torch.float64, None), (torch.float32, torch.float64)]:
        for dim in (0, 1):
            call = softmax_call((shape, given), dim, dtype)
            assert all(getattr(softmax, name).refuses(call) for name in softmax.__all__)


def test_row_count_is_not_in_the_identity():
    def identity(shape):
        call = softmax_call((shape, torch.bfloat16), -1)
        return serving(call).entry_for(call).identity

    assert identity((1, 4096)) == identity((77, 4096))
    assert identity((1, 128256)) == identity((7, 128256))
    assert identity((1000, 128256)) == identity((7000, 128256))


WORKLOADS = [
    ((32768, 4096), -1, torch.bfloat16, None),
    ((4096, 32768), -1, torch.bfloat16, torch.float32),
    ((4, 128256), -1, torch.bfloat16, torch.float32),
    ((4096, 128256), -1, torch.bfloat16, torch.float32),
    ((8, 1024, 128), 1, torch.bfloat16, None),
    ((8, 4096, 128), 1, torch.bfloat16, None),
]
MORE = [
    ((1024, 16384), -1, torch.float32, None),
    ((1024, 64), -1, torch.float16, None),
    ((1000, 33), -1, torch.bfloat16, None),
    ((4, 262147), -1, torch.float32, torch.float16),
    ((4, 2**23), -1, torch.bfloat16, None),
    ((4096, 2**23), -1, torch.bfloat16, None),
    ((8, 64, 3), 1, torch.float32, None),
    ((8, 5000, 3), 1, torch.bfloat16, torch.float32),
]


def compiles(shape, dim, given, dtype, arch):
    call = softmax_call((shape, given), dim, dtype, arch=arch)
    for entry in serving(call).candidates(call):
        for build in builds_of(entry):
            assert_fits(build, arch)
    return builds_of(serving(call).entry_for(call))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("shape", "dim", "given", "dtype"), WORKLOADS)
def test_compiles_to_wide_accesses(shape, dim, given, dtype, arch):
    for build in compiles(shape, dim, given, dtype, arch):
        if build.fn.endswith(":clear"):
            continue
        code = sass(build, arch)
        assert "LDG.E.128" in code
        assert "STG.E.128" in code or "summarise" in build.identity[0]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("shape", "dim", "given", "dtype"), MORE)
def test_compiles(shape, dim, given, dtype, arch):
    compiles(shape, dim, given, dtype, arch)
