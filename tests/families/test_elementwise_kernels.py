"""SiLU kernels: numerics in Triton's interpreter against float64, and what the compiler says."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, misaligned, poison, run_entry, shapes
from tests.triton_interpreter import interpreted

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One rounding to the dtype, and float32 arithmetic before it.
TOLERANCE = {
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
}


@interpreted
def run_silu(x, inplace, candidate=None):
    from tileops.elementwise.kernels.silu import Silu

    call = call_of(
        "SiLUFwdOp",
        {"input": x},
        shapes(x.device, output=(tuple(x.shape), x.dtype)),
        params={"inplace": inplace},
        written=["input"] if inplace else [],
    )
    entry = Silu.entry_for(call) if candidate is None else Silu.candidates(call)[candidate]
    with poison():
        return run_entry(entry, call, x), x


def silu64(x):
    x = x.double()
    return x / (1 + torch.exp(-x))


def check(actual, expected):
    torch.testing.assert_close(
        actual, expected.to(actual.dtype), equal_nan=True, **TOLERANCE[actual.dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [False, True])
# Nothing, one element, a prime below a tile, exactly two tiles of 4096, and one more than those.
@pytest.mark.parametrize("shape", [(0, 3), (), (1,), (67,), (2, 4096), (8193,)])
def test_silu(shape, inplace, dtype):
    x = (torch.randn(shape) * 4).to(dtype)
    expected = silu64(x)
    returned, given = run_silu(x, inplace)
    assert inplace == (returned is None)
    check(given if inplace else returned, expected)


def test_silu_of_every_kind_of_number():
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e4, -3e4, -88.0, -104.0])
    check(run_silu(x, False)[0], torch.nn.functional.silu(x))


@pytest.mark.parametrize("candidate", range(5))
def test_silu_candidates(candidate):
    x = torch.randn(9001, dtype=torch.bfloat16)
    check(run_silu(x, False, candidate)[0], silu64(x))


def entries(arch, dtype):
    from tileops.elementwise.kernels.silu import Silu

    for kernel, shape in ((Silu, (2048, 14336)),):
        given = shapes(input=(shape, dtype), output=(shape, dtype))
        call = call_of("op", {"input": given["input"]}, {"output": given["output"]}, arch=arch)
        yield kernel.entry_for(call)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_to_wide_accesses(arch, dtype):
    for entry in entries(arch, dtype):
        (build,) = builds_of(entry)
        # 64 registers or fewer: half the threads of a multiprocessor, which hide memory's latency.
        assert assert_fits(build, arch).registers <= 64
        code = sass(build, arch)
        assert "LDG.E.128" in code
        assert "STG.E.128" in code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_every_candidate(arch, dtype):
    from tileops.elementwise.kernels.silu import Silu

    for kernel, shape in ((Silu, (64, 99)),):
        given = shapes(input=(shape, dtype), output=(shape, dtype))
        call = call_of("op", {"input": given["input"]}, {"output": given["output"]}, arch=arch)
        for entry in kernel.candidates(call):
            assert_fits(builds_of(entry)[0], arch)


def test_misaligned_input_is_another_build():
    from tileops.elementwise.kernels.silu import Silu

    x = misaligned(torch.randn(64, dtype=torch.float16))
    output = shapes(output=((64,), x.dtype))
    (build,) = builds_of(Silu.entry_for(call_of("op", {"input": x}, output)))
    assert build.aligned == ("y",)
    (build,) = builds_of(Silu.entry_for(call_of("op", {"input": x}, output, written=["input"])))
    assert build.aligned == ()


def test_float64_is_left_to_the_decomposition():
    from tileops.elementwise.kernels.silu import Silu

    call = call_of("op", shapes(input=((4, 8), torch.float64)), shapes())
    assert "float64" in Silu.refuses(call)


def test_batch_size_is_not_in_the_identity():
    from tileops.elementwise.kernels.silu import Silu

    for kernel in (Silu,):
        calls = [
            call_of("op", shapes(input=((rows, 4096), torch.float16)), shapes()) for rows in (1, 77)
        ]
        assert kernel.entry_for(calls[0]).identity == kernel.entry_for(calls[1]).identity
