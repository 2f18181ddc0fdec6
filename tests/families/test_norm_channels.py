"""BatchNorm's kernels, those of its gradient, and InstanceNorm by running statistics: in Triton's
interpreter against the float64 oracle, and what the compiler says. ``BatchNormBwdOp`` on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits
from tests.families.test_norm_rows import call_for as any_call
from tests.kernel_calls import builds_of, chosen, poison, run_entry, shapes
from tests.oracle import check, exact, strided
from tests.triton_interpreter import interpreted
from tileops.backend.tolerances import compare
from tileops.norm import BatchNormBwdOp, BatchNormFwdOp, InstanceNormFwdOp

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(3, 5), (2, 3, 4), (2, 3, 4, 5), (2, 4, 3), (37, 7), (1, 3, 2)]


def forward(shape, dtype, running=True, affine=True, **params):
    op = BatchNormFwdOp(eps=1e-3, **params)
    channels = shape[1]
    x = torch.randn(shape) + torch.arange(channels).view(1, -1, *[1] * (len(shape) - 2)) / channels
    inputs = {"input": x.to(dtype)}
    if running:
        inputs |= {"running_mean": torch.randn(channels), "running_var": torch.rand(channels) + 0.1}
    if affine:
        inputs |= {"weight": torch.randn(channels), "bias": torch.randn(channels)}
    return op, inputs


def backward(shape, dtype, weight=True):
    doutput, x = torch.randn(2, *shape).to(dtype).unbind()
    inputs = {"doutput": doutput, "input": x, "save_mean": torch.randn(shape[1]) * 0.1}
    inputs["save_invstd"] = torch.rand(shape[1]) + 0.5
    if weight:
        inputs["weight"] = torch.randn(shape[1])
    return BatchNormBwdOp(), inputs


# --- the gradient on the CPU --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3), (2, 3, 0)])
def test_gradients(shape, dtype):
    check(*backward(shape, dtype))
    check(*backward(shape, dtype, weight=False))


def test_gradients_are_those_of_autograd():
    x = torch.randn(6, 3, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grad = torch.randn(6, 3, 5, dtype=torch.float64)
    torch.nn.functional.batch_norm(x, None, None, weight, bias, True, eps=1e-3).backward(grad)
    _, mean, invstd = BatchNormFwdOp(training=True, eps=1e-3)(x.detach().float())
    given = (grad.float(), x.detach().float(), mean, invstd)
    found = BatchNormBwdOp()(*given, weight=weight.detach().float())
    for ours, theirs in zip(found, (x.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_strides():
    op, inputs = backward((3, 4, 6), torch.float32)
    for name, tensor in inputs.items():
        for _, view in strided(tensor):
            check(op, {**inputs, name: view})


# --- kernels ------------------------------------------------------------------------------------


def kernels(name):
    from tileops.norm.kernels import channels

    if name == "InstanceNormFwdOp":
        return (channels.SplitChannels,)
    if name == "BatchNormFwdOp":
        return channels.HeldChannels, channels.SplitChannels
    return channels.HeldChannelGradients, channels.SplitChannelGradients


def call_for(op, inputs, **facts):
    return any_call(op, inputs, **facts)


@interpreted
def run_channels(name, params, inputs, **facts):
    import tileops.norm

    op = getattr(tileops.norm, name)(**params)
    call = call_for(op, inputs, **facts)
    with poison():
        result = run_entry(
            chosen(call, *kernels(name)).entry_for(call),
            call,
            *(inputs.get(item.name) for item in op.entry.inputs),
        )
    return result, inputs


def check_kernel(op, inputs, multiprocessors=132):
    before = {n: t.clone() for n, t in inputs.items()}
    results, after = run_channels(
        type(op).__name__, op._params, inputs, multiprocessors=multiprocessors
    )
    wanted, written = exact(op, before)
    results = results if isinstance(results, tuple) else (results,)
    for given, value in zip(results, wanted, strict=True):
        assert (given is None) == (value is None)
        if value is not None:
            if given.dtype is torch.bfloat16:  # the interpreter truncates where a card rounds
                value = value * (1 - 2.0**-9)
            found = compare(given, value, "reduction")
            assert found.ok, found.text
    for name, tensor in after.items():
        if name in written:
            found = compare(tensor, written[name], "reduction")
            assert found.ok, (name, found.text)
        else:
            assert torch.equal(tensor, before[name]), name


# Held and split channels, adjacent or not, alone and several to a program, vectors and odd sizes.
KERNEL_SHAPES = [*SHAPES, (32, 64), (3, 5, 7, 8), (2, 2, 70, 70), (1100, 9), (700, 70)]


@pytest.mark.parametrize("shape", KERNEL_SHAPES)
def test_training(shape):
    dtype = FLOATS[sum(shape) % 3]
    check_kernel(*forward(shape, dtype, training=True, momentum=0.25))
    check_kernel(*forward(shape, torch.float32, False, False, training=True), multiprocessors=2)


def test_training_where_a_tile_that_is_not_full_comes_before_others():
    """In three tiles of 65 places, by programs that take several instances."""
    check_kernel(*forward((130, 2, 65), torch.float32, training=True), multiprocessors=1)


@pytest.mark.parametrize("shape", [*KERNEL_SHAPES, (1, 3), (0, 3), (2, 3, 0)])
def test_evaluation(shape):
    check_kernel(*forward(shape, FLOATS[sum(shape) % 3]))
    check_kernel(*forward(shape, torch.float32, affine=False))


@pytest.mark.parametrize("shape", [(3, 5, 7, 8), (2, 2, 4900), (0, 3, 4)])
def test_instances_by_running_statistics(shape):
    dtype = FLOATS[sum(shape) % 3]
    _, inputs = forward(shape, dtype)
    inputs |= {name: inputs[name].to(dtype) for name in ("weight", "bias")}
    check_kernel(InstanceNormFwdOp(False, eps=1e-3), inputs)


def test_instances_by_their_own_statistics_are_refused():
    op, inputs = InstanceNormFwdOp(), {"input": torch.randn(2, 3, 4)}
    assert "rows" in kernels("InstanceNormFwdOp")[0].refuses(call_for(op, inputs))


@pytest.mark.parametrize("shape", [*KERNEL_SHAPES, (0, 3), (2, 3, 0)])
def test_kernels_of_gradients(shape):
    check_kernel(*backward(shape, FLOATS[sum(shape) % 3]))
    check_kernel(*backward(shape, torch.float32, weight=False), multiprocessors=2)


def test_a_mean_far_from_zero():
    op = BatchNormFwdOp(training=True, eps=1e-9)
    for shape in ((4, 2, 100), (4, 1, 5000)):
        x = torch.randn(shape) * 1e-2 + 100.0
        (_, mean, invstd), _ = run_channels("BatchNormFwdOp", op._params, {"input": x})
        wanted = x.double().transpose(0, 1).flatten(1)
        torch.testing.assert_close(mean.double(), wanted.mean(1), rtol=1e-6, atol=0)
        spread = (wanted.var(1, correction=0) + 1e-9).rsqrt()
        # A mean off by half a unit of 100 in float32, 4e-6 of a spread of 1e-2: 1e-7 of it, squared.
        torch.testing.assert_close(invstd.double(), spread, rtol=1e-5, atol=0)


def test_written_statistics_that_are_not_contiguous_are_refused():
    op, inputs = forward((3, 5), torch.float32, training=True)
    inputs["running_mean"] = torch.zeros(5, 2)[:, 0]
    call = call_for(op, inputs)
    reasons = {kernel.refuses(call) for kernel in kernels("BatchNormFwdOp")}
    assert "running statistics that are written are not contiguous" in reasons
    assert None not in reasons


def specs(op, inputs, shape, dtype):
    channels = ((shape[1],), torch.float32)
    named = {n: (shape, dtype) if n in ("input", "doutput") else channels for n in inputs}
    return shapes(**named)


@pytest.mark.parametrize(
    ("kind", "shape", "arch"),
    [
        ("train", (32, 64), (8, 0)),
        ("train", (32, 64, 56, 56), (9, 0)),
        ("eval", (32, 256, 196), (10, 0)),
        ("backward", (32, 64, 3136), (9, 0)),
    ],
)
def test_fits(kind, shape, arch):
    """One architecture for each; all of them in the slow tier."""
    fits(kind, shape, arch)


def fits(kind, shape, arch):
    small = (2, 2, *(1 for _ in shape[2:]))
    if kind == "backward":
        op, inputs = backward(small, torch.bfloat16)
    else:
        op, inputs = forward(small, torch.bfloat16, training=kind == "train")
    call = call_for(op, specs(op, inputs, shape, torch.bfloat16), arch=arch)
    made = builds_of(chosen(call, *kernels(type(op).__name__)).entry_for(call))
    assert made
    for build in made:
        assert_fits(build, arch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "eval", "backward"])
def test_fits_everywhere(kind):
    for arch in ARCHITECTURES:
        for shape in ((32, 64), (32, 64, 56, 56), (5000, 40)):
            fits(kind, shape, arch)


@pytest.mark.parametrize(
    "shape", [(8, 64, 56, 56), (32, 64, 56, 56), (128, 256, 28, 28), (3, 7, 9999)]
)
def test_few_threads_are_idle(shape):
    """Where instances are few as well as where their places are no power of two."""
    op, inputs = backward((2, 2, *(1 for _ in shape[2:])), torch.bfloat16)
    call = call_for(op, specs(op, inputs, shape, torch.bfloat16))
    from tileops.norm.kernels.channels import Channels

    channels = Channels.of(call)
    tile = channels.split_tile
    beside = tile.elements // tile.places
    held = -(-channels.spatial // tile.places) * -(-shape[0] // beside) * tile.elements
    assert channels.count <= held <= 1.35 * channels.count, tile
