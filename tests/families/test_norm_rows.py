"""The rows kernels for every op that they serve beside RMSNorm: in Triton's interpreter against the
float64 oracle, and what the compiler says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.aot import ARCHITECTURES, assert_fits
from tests.kernel_calls import builds_of, call_of, chosen, misaligned, poison, run_entry
from tests.oracle import exact
from tests.triton_interpreter import interpreted
from tileops.authoring import TensorSpec
from tileops.backend.tolerances import compare
from tileops.norm import (
    AdaLayerNormFwdOp,
    AdaLayerNormZeroFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormPerTokenQuantFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormFwdOp,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
ROW_OPS = {
    "layer": (LayerNormFwdOp, ("input",), ("weight", "bias")),
    "ada": (AdaLayerNormFwdOp, ("x", "scale", "shift"), ()),
    "zero": (AdaLayerNormZeroFwdOp, ("x", "scale", "shift", "gate"), ()),
    "added": (FusedAddLayerNormFwdOp, ("x", "residual"), ("weight", "bias")),
    "quant": (FusedAddRMSNormPerTokenQuantFwdOp, ("input", "residual"), ("weight",)),
}


def made(name, count, length, dtype, draw=torch.randn, **params):
    """An op and its inputs, each row off 0 by another amount."""
    cls, rows, vectors = ROW_OPS[name]
    if name == "layer":
        params["normalized_shape"] = (length,)
    inputs = {n: draw(count, length).to(dtype) for n in rows}
    if count:
        inputs[rows[0]] = inputs[rows[0]] + (torch.arange(count) / count).view(-1, 1).to(dtype)
    return cls(**params), {**inputs, **{n: draw(length).to(dtype) for n in vectors}}


def kernels():
    from tileops.norm.kernels import rows

    return rows.ManyShortRows, rows.RegisterRow, rows.StreamedRow


def of_op(op):
    """The kernels that the class names."""
    names = [name.partition(":")[2] for name in type(op).kernel.cuda]
    return [kernel for kernel in kernels() if kernel.__name__ in names]


def call_for(op, inputs, **facts):
    whole = {item.name: inputs.get(item.name) for item in op.entry.inputs}
    given = [
        torch.empty(t.shape, dtype=t.dtype, device="meta") if isinstance(t, TensorSpec) else t
        for t in whole.values()
    ]
    specs, *_ = type(op)._signature(op, *given, None)
    device = next(iter(inputs.values())).device
    outputs = {
        output.name: spec and TensorSpec.contiguous_of(tuple(spec[0]), spec[1], device)
        for output, spec in zip(op.entry.outputs, specs, strict=True)
    }
    return call_of(type(op).__name__, whole, outputs, params=op._params, **facts)


@interpreted
def run_rows(name, params, inputs, way=None, **facts):
    import tileops.norm

    op = getattr(tileops.norm, name)(**params)
    call = call_for(op, inputs, **facts)
    kernel = chosen(call, *of_op(op))
    if way is None:
        entry = kernel.entry_for(call)
    else:
        entry = kernel.candidates(call)[way] if isinstance(way, int) else getattr(kernel, way)(call)
    with poison():
        return run_entry(entry, call, *(inputs.get(item.name) for item in op.entry.inputs))


def steps_off(given, wanted):
    """How many numbers of its type each quantised one is off: the tolerance of float8 is a quarter."""
    numbers = []
    for tensor in (given, wanted.to(given.dtype)):
        code = tensor.view(torch.int8).int()
        if given.dtype is not torch.int8:  # a sign and a magnitude
            code = torch.where(code < 0, -(code & 127), code)
        numbers.append(code)
    return (numbers[0] - numbers[1]).abs()


def check(op, inputs, way=None, multiprocessors=132):
    before = {n: t.clone() for n, t in inputs.items()}
    result = run_rows(type(op).__name__, op._params, inputs, way, multiprocessors=multiprocessors)
    results = result if isinstance(result, tuple) else (result,)
    if "residual" in inputs and results[-1].dtype is torch.bfloat16:
        # The interpreter truncates to bfloat16 where a card rounds: its own sum is what counts.
        first = next(iter(inputs))
        before |= {first: results[-1].clone(), "residual": torch.zeros_like(results[-1])}
    wanted, _ = exact(op, before)
    for given, value in zip(results, wanted, strict=True):
        if "quant_dtype" in op._params and given is results[0]:
            off = steps_off(given, value)
            assert (off <= 1).all()
            assert (
                off > 0
            ).sum() <= off.numel() // 100  # a quotient that lies at the middle of two
            continue
        if given.dtype is torch.bfloat16:
            value = value * (1 - 2.0**-9)
        found = compare(given, value, "reduction")
        assert found.ok, found.text
    for name, tensor in inputs.items():
        if "residual" not in inputs:
            assert torch.equal(tensor, before[name])
    return results


@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize(
    ("count", "length"), [(5, 1), (19, 127), (3, 1024), (3, 1031), (2, 5120), (0, 64), (0, 4096)]
)
def test_held_rows(name, count, length):
    dtype = FLOATS[(length + len(name)) % 3]
    check(*made(name, count, length, dtype))


@pytest.mark.parametrize("name", ["layer", "ada", "zero", "added"])
@pytest.mark.parametrize("length", [33001, 40000])
def test_streamed_rows_are_the_same_whole_and_split(name, length):
    dtype = torch.float32 if length % 2 else torch.float16
    op, inputs = made(name, 2, length, dtype)
    whole, split = check(op, inputs, "whole"), check(op, inputs, "split")
    assert all(map(torch.equal, whole, split))


@pytest.mark.parametrize(
    ("name", "count", "length"),
    [("layer", 50, 160), ("ada", 11, 2048), ("added", 11, 2048), ("quant", 50, 160)],
)
def test_every_candidate(name, count, length):
    op, inputs = made(name, count, length, torch.float32)
    call = call_for(op, inputs)
    for way in range(1, len(chosen(call, *of_op(op)).candidates(call)), 4):
        check(op, inputs, way, multiprocessors=1)


@pytest.mark.parametrize(
    ("absent", "length"), [("weight", 100), ("bias", 100), ("both", 100), ("weight", 33001)]
)
def test_layer_norm_without(absent, length):
    op, inputs = made("layer", 3, length, torch.float32)
    for name in ("weight", "bias"):
        if absent in (name, "both"):
            del inputs[name]
    check(op, inputs)


@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("length", [128, 4096])
def test_misaligned(name, length):
    op, inputs = made(name, 2, length, torch.float16)
    check(op, {n: misaligned(t) for n, t in inputs.items()})


@pytest.mark.parametrize("length", [96, 4096, 40000])
def test_a_mean_far_from_zero(length):
    """The variance is that of what is left without the mean, not a difference of large sums."""
    x = torch.randn(2, length) * 1e-3 + 100.0
    op = LayerNormFwdOp(length, 1e-9)
    result = run_rows("LayerNormFwdOp", op._params, {"input": x})
    wanted = F.layer_norm(x.double(), (length,), eps=1e-9)
    # The mean's rounding, 2**-24 of 100, is 6e-3 of the spread.
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=2e-2)


@pytest.mark.parametrize("length", [64, 3000])
def test_values_that_are_no_numbers_stay_in_their_rows(length):
    x = torch.randn(4, length)
    x[0, 1], x[1, 2], x[2] = float("nan"), float("inf"), 0
    for op, name in ((LayerNormFwdOp(length), "input"),):
        result = run_rows(type(op).__name__, op._params, {name: x})
        torch.testing.assert_close(result, F.layer_norm(x, (length,)), equal_nan=True)


# --- quantised rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [96, 4096])
@pytest.mark.parametrize(
    "params",
    [{"quant_dtype": torch.int8}, {"scale_ub": 1.5}, {"scale_ub": 1e9, "eps": 1e-3}],
)
def test_quantised(params, length):
    check(*made("quant", 5, length, torch.float32, **params))


@pytest.mark.parametrize("quant_dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_rows_of_zeros_and_of_no_numbers(quant_dtype):
    x, zeros = torch.randn(4, 64), torch.zeros(4, 64)
    x[0], x[2, 3], x[3, 5] = 0, float("nan"), float("inf")
    x[1, 7] = zeros[1, 7] = -0.0
    inputs = {"input": x, "residual": zeros, "weight": torch.ones(64)}
    op = FusedAddRMSNormPerTokenQuantFwdOp(quant_dtype)
    plain = op(*inputs.values())
    given = run_rows(type(op).__name__, op._params, inputs)
    assert torch.equal(plain[0].view(torch.uint8), given[0].view(torch.uint8))
    torch.testing.assert_close(plain[1:], given[1:], equal_nan=True)
    assert given[1][0] == (2.0**-9 / 448 if quant_dtype.is_floating_point else 2.0**-23)
    assert given[1][2].isnan()


# --- groups of channels -------------------------------------------------------------------------


def group_call(shape, groups, dtype, weight=True, bias=True, eps=1e-5):
    inputs = {"input": (torch.randn(shape) + torch.arange(shape[1]).view(1, -1, 1)).to(dtype)}
    for name, there in (("weight", weight), ("bias", bias)):
        if there:
            inputs[name] = torch.randn(shape[1]).to(dtype)
    op = InstanceNormFwdOp(eps=eps) if groups is None else GroupNormFwdOp(groups, eps)
    return op, inputs


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 6, 5), 3),
        ((3, 4, 64), 2),
        ((2, 4, 1), 2),
        ((2, 8, 300), 2),
        ((2, 6, 48), 2),
        ((1, 2, 17000), 1),
        ((1, 2, 32768), 1),
        ((2, 3, 37), None),
        ((2, 2, 1031), None),
        ((0, 4, 8), 2),
    ],
)
def test_groups(shape, groups):
    check(*group_call(shape, groups, FLOATS[shape[2] % 3]))


@pytest.mark.parametrize(
    ("shape", "groups"), [((9, 6, 16), 3), ((4, 6, 520), 3), ((5, 3, 96), None)]
)
def test_every_candidate_for_groups(shape, groups):
    """Those among them that give several tiles to a program would have to read weights anew."""
    op, inputs = group_call(shape, groups, torch.float32)
    call = call_for(op, inputs)
    for way in range(1, len(chosen(call, *of_op(op)).candidates(call)), 2):
        check(op, inputs, way, multiprocessors=1)


def test_groups_with_and_without_weight_and_bias():
    for weight in (True, False):
        for bias in (True, False):
            check(*group_call((2, 6, 10), 3, torch.float32, weight, bias))
    check(*group_call((1, 2, 33001), None, torch.float32, bias=False))


def test_a_long_group_is_the_same_whole_and_split():
    op, inputs = group_call((1, 4, 20000), 2, torch.float32)
    assert all(map(torch.equal, check(op, inputs, "whole"), check(op, inputs, "split")))


def running_call(shape, dtype, momentum=0.25, **more):
    op, inputs = group_call(shape, None, dtype, **more)
    # Of few elements that chance lays close together any float32 arithmetic is off by much.
    inputs["input"] = inputs["input"] + 4 * (torch.arange(shape[2]) % 2).to(dtype)
    channels = shape[1]
    running = {"running_mean": torch.randn(channels), "running_var": torch.rand(channels) + 0.1}
    op = InstanceNormFwdOp(momentum=momentum)
    return op, {"input": inputs.pop("input"), **running, **inputs}


@interpreted
def run_running(params, inputs, way):
    op = InstanceNormFwdOp(**params)
    call = call_for(op, inputs)
    kernel = chosen(call, *of_op(op))
    entry = getattr(kernel, way)(call)
    with poison():
        return run_entry(entry, call, *(inputs.get(i.name) for i in op.entry.inputs)), inputs


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ((3, 5, 37), "entry_for"),
        ((70, 33, 4), "entry_for"),
        ((1, 2, 1031), "entry_for"),
        ((2, 2, 33001), "whole"),
        ((2, 2, 33001), "split"),
    ],
)
def test_running_statistics(shape, way):
    op, inputs = running_call(shape, torch.float32, bias=shape[0] != 3)
    before = {n: t.clone() for n, t in inputs.items()}
    result, after = run_running(op._params, inputs, way)
    (wanted,), written = exact(op, before)
    assert compare(result, wanted, "reduction").ok
    assert set(written) == {"running_mean", "running_var"}
    for name, value in written.items():
        found = compare(after[name], value, "reduction")
        assert found.ok, (name, found.text)


def test_what_of_running_statistics_is_refused():
    op, inputs = running_call((2, 3, 8), torch.float32)

    def reasons(op, inputs):
        return {kernel.refuses(call_for(op, inputs)) for kernel in of_op(op)}

    assert "its statistics are given" in reasons(InstanceNormFwdOp(False), inputs)
    scattered = inputs | {"running_mean": torch.zeros(3, 2)[:, 0]}
    found = reasons(op, scattered)
    assert "running statistics that are written are not contiguous" in found
    assert None not in found
    op, inputs = running_call((0, 3, 8), torch.float32)
    assert None not in reasons(op, inputs)


# --- what the compiler says ---------------------------------------------------------------------


def specs(op, inputs, shape, aligned=True):
    """The same inputs with rows of ``shape``, on a card that need not be there."""
    cuda = torch.device("cuda", 0)
    return {
        name: replace(
            TensorSpec.contiguous_of(shape if t.ndim > 1 else shape[-1:], t.dtype, cuda),
            aligned=aligned,
        )
        for name, t in inputs.items()
    }


def builds(name, count, length, dtype, aligned=True, **facts):
    params = {"normalized_shape": (length,)} if name == "layer" else {}
    op, inputs = made(name, 1, 2, dtype)
    op = ROW_OPS[name][0](**params)
    call = call_for(op, specs(op, inputs, (count, length), aligned), **facts)
    kernel = chosen(call, *of_op(op))
    if kernel is kernels()[2]:
        return builds_of(kernel.whole(call)) + builds_of(kernel.split(call))
    return builds_of(kernel.entry_for(call))


@pytest.mark.parametrize(
    ("name", "length", "arch"),
    [
        ("layer", 4096, (9, 0)),
        ("layer", 768, (8, 0)),
        ("ada", 4096, (10, 0)),
        ("zero", 1152, (9, 0)),
        ("added", 4096, (8, 0)),
        ("quant", 4096, (9, 0)),
        ("layer", 70000, (9, 0)),
    ],
)
def test_fits(name, length, arch):
    for build in builds(name, 2048, length, torch.bfloat16, arch=arch):
        assert_fits(build, arch)


TIGHT = [1, 127, 1001, 5120, 8192, 16381, 16384, 32768, 99991]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_OPS)
def test_fits_where_registers_are_tight(name):
    for dtype in (torch.bfloat16, torch.float32):
        for turn, length in enumerate(TIGHT, start=len(name) + dtype.itemsize):
            arch = ARCHITECTURES[turn % 3]
            # Of one element: 8 bytes are spilled on sm_80, where nobody quantises.
            if name == "quant" and (length == 1 or length * dtype.itemsize > 32768):
                continue
            for build in builds(name, 9, length, dtype, arch=arch):
                assert_fits(build, arch)


@pytest.mark.parametrize(("shape", "arch"), [((8, 128, 1024), (9, 0)), ((2, 320, 4096), (8, 0))])
def test_groups_fit(shape, arch):
    op, inputs = group_call((1, 32, 2), 32, torch.bfloat16)
    given = specs(op, inputs, shape)
    given |= {n: TensorSpec.contiguous_of((shape[1],), s.dtype, s.device)
              for n, s in given.items() if n != "input"}  # fmt: skip
    call = call_for(op, given, arch=arch)
    for build in builds_of(chosen(call, *of_op(op)).entry_for(call)):
        assert_fits(build, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_running_statistics_fit(arch):
    op, inputs = running_call((1, 2, 2), torch.float32)
    cuda = torch.device("cuda", 0)
    given = {
        n: TensorSpec.contiguous_of((8, 128, 1024) if n == "input" else (128,), t.dtype, cuda)
        for n, t in inputs.items()
    }
    call = call_for(op, given, arch=arch)
    made = builds_of(chosen(call, *of_op(op)).entry_for(call))
    assert len(made) == 2
    for build in made:
        assert_fits(build, arch)
