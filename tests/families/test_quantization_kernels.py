"""Quantising kernels in Triton's interpreter, bit for bit, and what the compiler says of them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.families.test_quantization import DEQUANTISING, numbers
from tests.kernel_calls import builds_of, misaligned
from tests.op_kernels import check_kernel, cuda_call, entry_of
from tests.oracle import exact, same_bits
from tileops import quantization
from tileops.engine.plan import resolve_entry

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
OPS = [
    "FP8QuantPerBlockFwdOp",
    "FP8QuantPerTokenGroupFwdOp",
    "INT8QuantPerChannelFwdOp",
    "INT8QuantPerTensorFwdOp",
    "INT8QuantPerTokenGroupFwdOp",
    "SmoothQuantFwdOp",
]


def op_of(name, **params):
    return getattr(quantization, name)(**params)


def made(name, shape, dtype, **params):
    """An op and its inputs, of rows of all sizes."""
    op = op_of(name, **params)
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1).mul(20).sub(10).exp2()
    inputs = {op.entry.inputs[0].name: x.to(dtype)}
    if name == "SmoothQuantFwdOp":
        inputs["smooth"] = torch.rand(shape[-1]) + 0.25
    return op, inputs


def plain(tensor):
    """With one NaN for all."""
    wide = tensor.float()
    return torch.where(wide.isnan(), math.nan, wide)


def held(op, inputs, candidate=None):
    """The kernel of a call to the op's meaning, its results bit for bit."""
    wanted, _ = exact(op, inputs)
    result = check_kernel(op, inputs, candidate, arch=(8, 0))
    given = result if isinstance(result, tuple) else (result,)
    for one, other in zip(given, wanted, strict=True):
        assert same_bits(plain(one), plain(other.float().to(one.dtype))), op


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 1), torch.float32),
        ((19, 127), torch.bfloat16),
        ((3, 256), torch.float16),
        ((2, 1031), torch.float32),
        ((130, 200), torch.bfloat16),
    ],
)
def test_sizes(name, shape, dtype):
    held(*made(name, shape, dtype))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("INT8QuantPerChannelFwdOp", (2, 3, 50)),
        ("INT8QuantPerChannelFwdOp", (2, 40001)),
        ("FP8QuantPerTokenGroupFwdOp", (7,)),
        ("FP8QuantPerTokenGroupFwdOp", (2, 17000)),
        ("SmoothQuantFwdOp", (3, 16896)),
        ("INT8QuantPerTensorFwdOp", ()),
        ("INT8QuantPerTensorFwdOp", (3, 5, 2731)),
        ("INT8QuantPerTokenGroupFwdOp", (2, 3, 257)),
        ("FP8QuantPerBlockFwdOp", (129, 257)),
    ],
)
def test_other_ranks_and_long_rows(name, shape):
    if not shape:
        held(op_of(name), {"x": torch.tensor(-2.5)})
        return
    held(*made(name, shape, FLOATS[len(shape) % 2]))


@pytest.mark.parametrize("name", OPS)
def test_no_elements(name):
    if name != "INT8QuantPerTensorFwdOp":
        held(*made(name, (0, 40), torch.float16))
    if name in ("INT8QuantPerTokenGroupFwdOp", "FP8QuantPerBlockFwdOp"):
        held(*made(name, (3, 0), torch.float16))


@pytest.mark.parametrize("name", OPS)
def test_misaligned(name):
    op, inputs = made(name, (6, 256), torch.bfloat16)
    held(op, {key: misaligned(tensor) for key, tensor in inputs.items()})


@pytest.mark.parametrize("name", ["INT8QuantPerChannelFwdOp", "INT8QuantPerTokenGroupFwdOp"])
@pytest.mark.parametrize("width", [96, 1100])
def test_every_candidate(name, width):
    op, inputs = made(name, (21, width), torch.float32)
    call = cuda_call(op, inputs, (8, 0))
    kernel = resolve_entry(op, call)[0].kernel
    for candidate in range(1, len(kernel.candidates(call))):
        held(op, inputs, candidate)


def hostile(eps):
    """Rows of zeros, of an infinity, of a NaN, of what lies between two numbers, and of the smallest."""
    x = torch.randn(12, 130)
    x[0], x[1, 3], x[2, 5], x[3, 129] = 0.0, math.inf, math.nan, -math.inf
    x[4] = torch.arange(130) - 64.5
    x[4, 0] = -127.0
    x[5], x[6] = x[5] * 1e-42, x[6] * 2.0**-110
    x[7], x[8] = 3e38, x[8] * 1e-45
    x[9, ::2] = -0.0
    x[10] = eps
    x[11] = torch.randint(-63, 64, (130,)) * 2.0**-149
    return x


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("eps", [1e-10, 0.0, 1e-30, 1.0])
def test_hostile_rows(name, eps):
    """One row after the other, where rows do not differ in their scale."""
    op, x = op_of(name, eps=eps), hostile(eps)
    if name in ("INT8QuantPerTensorFwdOp", "FP8QuantPerBlockFwdOp"):
        calls = list(x.split(1))
    else:
        calls = [x]
    for rows in calls:
        inputs = {op.entry.inputs[0].name: rows}
        if name == "SmoothQuantFwdOp":
            inputs["smooth"] = torch.rand(130) + 0.5
        held(op, inputs)


# ---- back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", DEQUANTISING)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 1), torch.float32),
        ((0, 8), torch.float32),
        ((3, 384), torch.float16),
        ((2, 3, 1031), torch.float32),
        ((70, 130), torch.float16),
        ((2, 5000), torch.float32),
    ],
)
def test_back(cls, shape, dtype):
    held(*numbers(cls, shape, dtype))


@pytest.mark.parametrize("cls", DEQUANTISING)
def test_back_misaligned(cls):
    op, inputs = numbers(cls, (6, 256), torch.float32)
    held(op, {key: misaligned(tensor) for key, tensor in inputs.items()})


@pytest.mark.parametrize("cls", DEQUANTISING)
def test_back_fits(cls):
    for shape, dtype in (((4096, 7168), torch.bfloat16), ((512, 1001), torch.float32)):
        op = cls(dtype)
        _, inputs = numbers(cls, shape, dtype)
        (build,) = builds_of(entry_of(cuda_call(op, inputs, (9, 0)), op))
        assert_fits(build, (9, 0))


# ---- what the compiler says ----------------------------------------------------------------------


def builds(name, shape, dtype, arch, **params):
    op = op_of(name, **params)
    inputs = {op.entry.inputs[0].name: torch.empty(shape, dtype=dtype, device="meta")}
    if name == "SmoothQuantFwdOp":
        inputs["smooth"] = torch.empty(shape[-1], device="meta")
    return builds_of(entry_of(cuda_call(op, inputs, arch), op))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "arch"),
    [
        ("INT8QuantPerChannelFwdOp", (14336, 4096), torch.bfloat16, (9, 0)),
        ("INT8QuantPerChannelFwdOp", (2048, 16384), torch.float16, (8, 0)),
        ("SmoothQuantFwdOp", (4096, 4096), torch.bfloat16, (9, 0)),
        ("FP8QuantPerTokenGroupFwdOp", (8192, 64), torch.bfloat16, (9, 0)),
        ("INT8QuantPerTensorFwdOp", (4096, 4096), torch.bfloat16, (10, 0)),
        ("FP8QuantPerBlockFwdOp", (7168, 18432), torch.bfloat16, (9, 0)),
    ],
)
def test_fits(name, shape, dtype, arch):
    for build in builds(name, shape, dtype, arch):
        assert_fits(build, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", OPS)
def test_fits_everywhere(name, arch):
    """Lengths at the edges of each kernel, in both forms of the division."""
    lengths = [1, 127, 1001, 4096, 8192, 16381, 16384, 70000]
    for n, length in enumerate(lengths):
        dtype = FLOATS[(n + OPS.index(name)) % 3]
        for build in builds(name, (2048, length), dtype, arch, eps=(1e-10, 0.0)[n % 2]):
            assert_fits(build, arch)


def test_sixteen_bytes_are_read_at_once():
    (build,) = builds("INT8QuantPerTokenGroupFwdOp", (4096, 7168), torch.bfloat16, (9, 0))
    code = sass(build, (9, 0))
    assert "LDG.E.128" in code
    assert "STG.E.64" in code
