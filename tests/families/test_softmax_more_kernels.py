"""Kernels of log-softmax and of both gradients, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.families.test_reduction_kernels import interleaving
from tests.kernel_calls import builds_of, call_of, chosen, misaligned, poison, run_entry, shapes
from tests.oracle import nearer
from tests.triton_interpreter import interpreted
from tileops.backend.tolerances import compare

HALF = torch.bfloat16
OPS = ["LogSoftmaxFwdOp", "SoftmaxBwdOp", "LogSoftmaxBwdOp"]


def call_for(op, tensors, dim, dtype=None, **facts):
    """``tensors``: real ones, or (shape, dtype)."""
    real = isinstance(tensors[0], torch.Tensor)
    shape, given = (tuple(tensors[0].shape), tensors[0].dtype) if real else tensors[0]
    names = ("input",) if op.endswith("FwdOp") else ("grad_output", "output")
    result = "output" if op.endswith("FwdOp") else "grad_x"
    device = tensors[0].device if real else torch.device("cuda", 0)
    specs = shapes(device, **{result: (shape, dtype or given)})
    if real:
        inputs = dict(zip(names, tensors, strict=True))
    else:
        inputs = shapes(device, **dict.fromkeys(names, tensors[0]))
    return call_of(op, inputs, specs, params={"dim": dim, "dtype": dtype}, **facts)


def serving(call):
    from tileops.reduction.kernels import softmax

    return chosen(call, *(getattr(softmax, name) for name in softmax.__all__))


@interpreted
def run(op, tensors, dim, dtype=None, interleaved=0):
    """The result and the name of the kernel."""
    call = call_for(op, tensors, dim, dtype)
    with interleaving(interleaved), poison():
        kernel = serving(call)
        return run_entry(kernel.entry_for(call), call, *tensors), kernel.name


def draw(op, shape, dtype, dim):
    """Inputs: for a gradient, one that comes in and what the forward gave."""
    x = torch.randn(shape) * 3
    if op == "LogSoftmaxFwdOp":
        return (x.to(dtype),)
    forward = torch.softmax if op == "SoftmaxBwdOp" else torch.log_softmax
    return torch.randn(shape).to(dtype), forward(x, dim).to(dtype)


def exact(op, tensors, dim):
    wide = [tensor.double() for tensor in tensors]
    if op == "LogSoftmaxFwdOp":
        return torch.log_softmax(wide[0], dim)
    grad, output = wide
    if op == "SoftmaxBwdOp":
        return output * (grad - (grad * output).sum(dim, keepdim=True))
    return grad - output.exp() * grad.sum(dim, keepdim=True)


def rounding(op, tensors, dim):
    """How far float32 moves a gradient whose two terms nearly cancel, which the result's own size does not
    tell: a rounding of each, and of the sum 5 standard deviations, for terms added one after the other, as
    NumPy does for the interpreter (``CANCELLATION`` of the tolerances)."""
    if op == "LogSoftmaxFwdOp":
        return 0.0
    grad, output = (tensor.double() for tensor in tensors)
    softmax = output if op == "SoftmaxBwdOp" else output.exp()
    first, summed = (softmax * grad,) * 2 if op == "SoftmaxBwdOp" else (grad, grad)
    sums = (
        5 * (grad.shape[dim] if grad.ndim else 1) ** 0.5 / 2.4 * summed.abs().sum(dim, keepdim=True)
    )
    return 2.0**-24 * (2 * first.abs() + softmax * sums)


def check(op, tensors, dim, actual):
    wanted = exact(op, tensors, dim)
    actual = nearer(actual, wanted, rounding(op, tensors, dim))
    found = compare(actual, wanted, "reduction")
    assert found.ok, found.text


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "kernel"),
    [
        ((), 0, torch.float32, "triton_row"),
        ((67, 13), -1, torch.float16, "triton_row"),
        ((3, 4099), 1, HALF, "triton_row"),
        ((3, 64), 1, torch.float32, "triton_row"),
        ((2, 16385), -1, HALF, "triton_split"),
        ((2, 20480), -1, HALF, "triton_row"),
        ((2, 36864), -1, torch.float32, "triton_split"),
        ((67, 13), 0, HALF, "triton_column_tile"),
        ((2, 300, 40), 1, torch.float32, "triton_column_tile"),
        ((1024, 17), 0, torch.float32, "triton_column_tile"),
        ((1025, 17), 0, torch.float32, "triton_column"),
    ],
)
def test_every_region(op, shape, dim, dtype, kernel):
    tensors = draw(op, shape, dtype, dim)
    actual, name = run(op, tensors, dim)
    check(op, tensors, dim, actual)
    assert name == kernel


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 20000), (0, 3, 5)])
@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_to_do(op, shape, dim):
    tensors = draw(op, shape, torch.float32, dim)
    assert run(op, tensors, dim)[0].shape == shape


@pytest.mark.parametrize("op", OPS)
def test_misaligned(op):
    tensors = tuple(misaligned(t) for t in draw(op, (5, 64), HALF, 1))
    check(op, tensors, 1, run(op, tensors, 1)[0])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lead", [1, 2, 4])
def test_interleaved_and_split_agree(op, lead):
    tensors = draw(op, (3, 17001), HALF, 1)
    split, _ = run(op, tensors, 1)
    interleaved, name = run(op, tensors, 1, interleaved=lead)
    assert name == "triton_interleaved"
    assert torch.equal(split, interleaved)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("shape", "dim"), [((5, 300), 1), ((300, 5), 0), ((5, 17001), 1)])
def test_infinities_and_nan_as_torch_has_them(op, shape, dim):
    given, *output = draw(op, shape, torch.float32, dim)
    tensors = (given.mul(64).round().div(64), *output)  # numbers whose sum no order rounds
    first = tensors[0] if dim == 1 else tensors[0].T
    first[0] = -torch.inf
    first[1, 5:290] = -torch.inf
    first[2, 7] = torch.inf
    first[3, 11] = torch.nan
    if op == "LogSoftmaxFwdOp":
        wanted = torch.log_softmax(tensors[0], dim)
    elif op == "SoftmaxBwdOp":
        wanted = torch._softmax_backward_data(*tensors, dim, torch.float32)
    else:
        wanted = torch._log_softmax_backward_data(*tensors, dim, torch.float32)
    actual, _ = run(op, tensors, dim)
    torch.testing.assert_close(actual, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_the_input_is_cast_first():
    x = (torch.randn(3, 100) * 20).bfloat16().float() * (1 + 2**-10)
    actual, _ = run("LogSoftmaxFwdOp", (x,), 1, HALF)
    check("LogSoftmaxFwdOp", (x.to(HALF),), 1, actual)


@pytest.mark.parametrize("op", OPS)
def test_float64_is_left_to_the_decomposition(op):
    from tileops.reduction.kernels import softmax

    for shape, dim in (((4, 8), 1), ((4, 8), 0), ((4, 70000), 1)):
        call = call_for(op, [(shape, torch.float64)], dim)
        assert all(getattr(softmax, name).refuses(call) for name in softmax.__all__)


BUILDS = [
    ("LogSoftmaxFwdOp", (4096, 128256), -1, HALF),
    ("SoftmaxBwdOp", (32768, 4096), -1, HALF),
    ("SoftmaxBwdOp", (4096, 32768), -1, HALF),
    ("LogSoftmaxBwdOp", (4096, 128256), -1, HALF),
    ("SoftmaxBwdOp", (64, 512, 64), 1, HALF),
]
MORE_BUILDS = [
    ("LogSoftmaxFwdOp", (4096, 64), -1, torch.float32),
    ("LogSoftmaxFwdOp", (64, 512, 64), 1, HALF),
    ("LogSoftmaxFwdOp", (64, 5000, 3), 1, torch.float32),
    ("LogSoftmaxFwdOp", (4, 128256), -1, HALF),
    ("SoftmaxBwdOp", (4, 128256), -1, torch.float32),
    ("SoftmaxBwdOp", (8192, 512), -1, torch.float16),
    ("SoftmaxBwdOp", (1024, 16384), -1, torch.float32),
    ("SoftmaxBwdOp", (4096, 32768), -1, torch.float32),
    ("LogSoftmaxBwdOp", (4096, 32768), -1, torch.float32),
    ("LogSoftmaxBwdOp", (4096, 16383), -1, HALF),
    ("LogSoftmaxFwdOp", (4096, 32768), -1, HALF),
    ("LogSoftmaxBwdOp", (4096, 64), 1, torch.float32),
    ("LogSoftmaxBwdOp", (64, 512, 3), 1, HALF),
    ("SoftmaxBwdOp", (64, 1024, 64), 1, torch.float32),
    ("LogSoftmaxBwdOp", (64, 1500, 64), 1, HALF),
]


def compiled(op, shape, dim, dtype, arch):
    call = call_for(op, [(shape, dtype)], dim, arch=arch)
    kernel = serving(call)
    for entry in kernel.candidates(call):
        for build in builds_of(entry):
            assert_fits(build, arch)
    return builds_of(kernel.entry_for(call))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("op", "shape", "dim", "dtype"), BUILDS)
def test_compiles_to_wide_accesses(op, shape, dim, dtype, arch):
    for build in compiled(op, shape, dim, dtype, arch):
        assert build.fn.endswith(":clear") or "LDG.E.128" in sass(build, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("op", "shape", "dim", "dtype"), MORE_BUILDS)
def test_compiles(op, shape, dim, dtype, arch):
    compiled(op, shape, dim, dtype, arch)
