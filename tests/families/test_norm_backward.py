"""The gradients of RMSNorm, LayerNorm and fused add RMSNorm: the ops on the CPU and the kernels in
Triton's interpreter, against autograd of PyTorch's functions in float64; what the compiler says."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, chosen, misaligned, poison, run_entry, shapes
from tests.oracle import check, exact, strided
from tests.triton_interpreter import interpreted
from tileops import CheckError
from tileops.authoring import TensorSpec
from tileops.backend.tolerances import compare
from tileops.norm import (
    FusedAddRMSNormBwdOp,
    FusedAddRMSNormFwdOp,
    LayerNormBwdOp,
    RMSNormBwdOp,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
DTYPES = [*FLOATS, torch.float64]
OPS = [RMSNormBwdOp, LayerNormBwdOp, FusedAddRMSNormBwdOp]


def made(cls, shape, dtype, weight=True, eps=1e-3, **wants):
    """An op and its inputs, rows of different sizes."""
    if cls is FusedAddRMSNormBwdOp:
        op = cls(eps, **wants)
        names = ("grad_output", "grad_residual_out", "residual_out")
    else:
        op = cls(shape[-1], eps, **wants)
        names = ("grad_output", "x" if cls is RMSNormBwdOp else "input")
    sizes = torch.logspace(-1, 1, max(shape[0], 1)).view(-1, *[1] * (len(shape) - 1))
    inputs = {name: (torch.randn(shape) * sizes).to(dtype) for name in names}
    given = torch.randn(shape[-1]).to(dtype) if weight else None
    return op, {**inputs, "weight": given}


def wants_of(cls):
    return [param.name for param in cls.entry.params if param.name.startswith("wants_")]


def subsets(cls):
    """Every choice of gradients but none at all."""
    names = wants_of(cls)
    for flags in product((True, False), repeat=len(names)):
        if any(flags):
            yield dict(zip(names, flags, strict=True))


# --- the ops on the CPU -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 5), (37, 41), (0, 4), (3, 0), (5, 1031)])
@pytest.mark.parametrize("cls", OPS)
def test_gradients(cls, shape, dtype):
    check(*made(cls, shape, dtype))
    if cls is not FusedAddRMSNormBwdOp:
        check(*made(cls, shape, dtype, weight=False))


@pytest.mark.parametrize("cls", OPS)
def test_every_choice_of_gradients(cls):
    for wants in subsets(cls):
        check(*made(cls, (6, 12), torch.float32, **wants))


@pytest.mark.parametrize("cls", [RMSNormBwdOp, LayerNormBwdOp])
def test_several_normalised_dims(cls):
    name = "x" if cls is RMSNormBwdOp else "input"
    grad, x, weight = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), torch.randn(4, 5)
    check(cls((4, 5), 1e-3), {"grad_output": grad, name: x, "weight": weight})
    check(cls((2, 3, 4, 5), 1e-3), {"grad_output": grad, name: x})


@pytest.mark.parametrize("cls", OPS)
def test_strides(cls):
    op, inputs = made(cls, (3, 4, 6), torch.float32)
    for name, tensor in inputs.items():
        for _, view in strided(tensor):
            check(op, {**inputs, name: view})
    once = torch.ones(()).expand(3, 4, 6)  # what .sum().backward() hands over
    check(op, {**inputs, "grad_output": once})


@pytest.mark.parametrize("cls", [RMSNormBwdOp, LayerNormBwdOp])
@pytest.mark.parametrize("weight", [True, False])
def test_nothing_wanted_is_refused(cls, weight):
    """At the call, since a weight that is absent has no gradient either."""
    wants = {name: name == "wants_weight" and not weight for name in wants_of(cls)}
    op, inputs = made(cls, (3, 4), torch.float32, weight, **wants)
    for call in (op, op._call_boundary):
        with pytest.raises(CheckError, match="at least one gradient"):
            call(*inputs.values())


def test_nothing_wanted_is_refused_when_the_op_is_made():
    with pytest.raises(CheckError, match="at least one gradient"):
        FusedAddRMSNormBwdOp(wants_input=False, wants_residual=False, wants_weight=False)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    cls=st.sampled_from(OPS),
    lead=st.lists(st.integers(0, 5), max_size=3),
    length=st.integers(3, 50),
    step=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_and_stride(cls, lead, length, step, dtype):
    op, inputs = made(cls, (*lead, length) if lead else (length,), dtype)
    for name, tensor in inputs.items():
        room = tensor.new_empty((*tensor.shape[:-1], length * step + 1))
        inputs[name] = room[..., 1 : length * step + 1 : step].copy_(tensor)
    check(op, inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_gradient_of_both_terms_of_a_sum(compiled):
    """It is written once, and neither term's may be changed by what becomes of the other's."""
    op, weight = FusedAddRMSNormFwdOp(1e-3), torch.randn(8)
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    call = torch.compile(op, backend="aot_eager") if compiled else op
    for turn in (1, 2):  # the second adds to what the first left
        sum(result.square().sum() for result in call(x, residual, weight)).backward()
        assert x.grad is not residual.grad
        assert x.grad.data_ptr() != residual.grad.data_ptr()
        total = (x.detach() + residual.detach()).double().requires_grad_()
        normal = torch.nn.functional.rms_norm(total, (8,), weight.double(), 1e-3)
        (wanted,) = torch.autograd.grad(normal.square().sum() + total.square().sum(), total)
        for grad in (x.grad, residual.grad):
            torch.testing.assert_close(grad.double(), turn * wanted, rtol=1e-5, atol=1e-5)
    x.grad.zero_()
    assert residual.grad.abs().sum() > 0
    frozen = torch.randn(3, 8)
    (only,) = torch.autograd.grad(call(frozen, residual, weight)[0].sum(), residual)
    assert only.shape == (3, 8)


# --- kernels in the interpreter -----------------------------------------------------------------


def kernels():
    from tileops.norm.kernels import rows_backward

    return rows_backward.HeldRows, rows_backward.LongRows


def call_for(op, inputs, **facts):
    """From tensors or specs by name."""
    first, weight = inputs["grad_output"], inputs["weight"]
    like = (tuple(first.shape), first.dtype)
    row = (like[0][-1:], first.dtype)
    outputs = {}
    for output in op.entry.outputs:
        wanted = getattr(op, "wants_" + output.name.removeprefix("grad_"))
        if output.name == "grad_input":
            wanted = wanted or getattr(op, "wants_residual", False)
        if output.name == "grad_weight":
            wanted = wanted and weight is not None
        flat = output.name in ("grad_weight", "grad_bias")
        outputs[output.name] = (row if flat else like) if wanted else None
    return call_of(
        type(op).__name__,
        inputs,
        shapes(first.device, **outputs),
        params=op._params,
        **facts,
    )


@interpreted
def run_backward(name, params, inputs, way=None, **facts):
    import tileops.norm

    op = getattr(tileops.norm, name)(**params)
    call = call_for(op, inputs, **facts)
    kernel = chosen(call, *kernels())
    entry = kernel.entry_for(call) if way is None else kernel.candidates(call)[way]
    with poison():
        return run_entry(entry, call, *inputs.values())


def check_kernel(op, inputs, way=None, multiprocessors=1):
    before = {n: None if t is None else t.clone() for n, t in inputs.items()}
    results = run_backward(
        type(op).__name__, op._params, inputs, way, multiprocessors=multiprocessors
    )
    (wanted, _) = exact(op, before)
    for result, value in zip(results, wanted, strict=True):
        assert (result is None) == (value is None)
        if value is not None:
            if result.dtype is torch.bfloat16:  # the interpreter truncates where a card rounds
                value = value * (1 - 2.0**-9)
            found = compare(result, value, "reduction")
            assert found.ok, found.text
    for name, tensor in inputs.items():
        if tensor is not None:
            assert torch.equal(tensor, before[name]), name


LONG, STREAMED = 4100, 4101
"""Of float32: too long to hold a weight's gradient beside, and too long to hold element by element."""

# Both sides of where rows are no longer held (8192, or 4096 in float32), primes, powers of two.
LENGTHS = [(3, 3), (70, 127), (19, 128), (5, 1000), (3, 1025), (5, 4096), (2, 8191)]


@pytest.mark.parametrize("cls", OPS)
@pytest.mark.parametrize(("count", "length"), LENGTHS)
def test_kernels(cls, count, length):
    check_kernel(*made(cls, (count, length), FLOATS[(length + OPS.index(cls)) % 3]))


@pytest.mark.parametrize("cls", OPS)
@pytest.mark.parametrize("length", [LONG, STREAMED, 16388])
def test_kernels_of_long_rows(cls, length):
    check_kernel(*made(cls, (3, length), torch.float32))


def test_columns_of_many_long_rows():
    """Summed by several programs."""
    op, inputs = made(LayerNormBwdOp, (130, LONG), torch.float32, wants_input=False)
    check_kernel(op, inputs, multiprocessors=132)


@pytest.mark.parametrize("cls", OPS)
def test_kernels_for_every_choice_of_gradients(cls):
    for wants in subsets(cls):
        check_kernel(*made(cls, (5, 96), torch.float32, **wants))
    if cls is not FusedAddRMSNormBwdOp:
        check_kernel(*made(cls, (5, 96), torch.float32, weight=False))


@pytest.mark.parametrize("length", [LONG, STREAMED])
def test_kernels_of_long_rows_for_choices_of_gradients(length):
    shape = (3, length)
    check_kernel(*made(LayerNormBwdOp, shape, torch.float32, wants_weight=False))
    check_kernel(*made(LayerNormBwdOp, shape, torch.float32, wants_input=False, wants_bias=False))
    check_kernel(*made(LayerNormBwdOp, shape, torch.float32, False, wants_bias=False))
    wants = {"wants_input": False, "wants_weight": False}
    check_kernel(*made(FusedAddRMSNormBwdOp, shape, torch.float32, **wants))
    check_kernel(*made(LayerNormBwdOp, shape, torch.float32, **wants))


def test_candidates():
    for length in (96, 2100):
        op, inputs = made(LayerNormBwdOp, (70, length), torch.float32)
        count = len(chosen(call_for(op, inputs), *kernels()).candidates(call_for(op, inputs)))
        assert count > 1
        for way in range(count):
            check_kernel(op, inputs, way, multiprocessors=1)


@pytest.mark.parametrize("length", [100, LONG, STREAMED])
def test_a_row_without_eps_that_is_not_there(length):
    """Rows past the end are zeros, and without eps zeros are infinite when normalised."""
    op, inputs = made(LayerNormBwdOp, (5, length), torch.float32, eps=0.0)
    check_kernel(op, inputs)


@pytest.mark.parametrize("length", [128, 2 * LONG])
def test_misaligned(length):
    op, inputs = made(RMSNormBwdOp, (5, length), torch.float16)
    check_kernel(op, {n: misaligned(t) for n, t in inputs.items()})


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 9000)])
def test_no_elements(shape):
    for cls in OPS:
        check_kernel(*made(cls, shape, torch.float32))


def test_float64_is_refused():
    op, inputs = made(RMSNormBwdOp, (3, 4), torch.float64)
    reasons = [kernel.refuses(call_for(op, inputs)) for kernel in kernels()]
    assert "float64 is not one of float16, bfloat16, float32" in reasons
    assert None not in reasons


# --- what the compiler says ---------------------------------------------------------------------


def spec_call(cls, count, length, dtype, *, aligned=True, weight=True, wants=None, **facts):
    op, inputs = made(cls, (1, 2), dtype, weight, **(wants or {}))
    if "normalized_shape" in op._params:
        op = cls(**{**op._params, "normalized_shape": length})
    specs = {}
    for name, tensor in inputs.items():
        shape = (length,) if name == "weight" else (count, length)
        spec = TensorSpec.contiguous_of(shape, dtype, torch.device("cuda", 0))
        specs[name] = None if tensor is None else replace(spec, aligned=aligned)
    return call_for(op, specs, **facts)


def builds(call):
    return [
        build for build in builds_of(chosen(call, *kernels()).entry_for(call)) if build is not None
    ]


@pytest.mark.parametrize(
    ("cls", "length", "arch"),
    [
        (RMSNormBwdOp, 4096, (8, 0)),
        (LayerNormBwdOp, 4096, (9, 0)),
        (FusedAddRMSNormBwdOp, 4096, (10, 0)),
        (LayerNormBwdOp, 16384, (9, 0)),
        (FusedAddRMSNormBwdOp, 16384, (8, 0)),
        (LayerNormBwdOp, 32768, (9, 0)),
        (RMSNormBwdOp, 128, (9, 0)),
    ],
)
def test_fits(cls, length, arch):
    made = builds(spec_call(cls, 2048, length, torch.bfloat16, arch=arch))
    assert made
    for build in made:
        assert_fits(build, arch)


TIGHT = [(127, True), (1024, True), (4096, False), (8192, True), (16376, True), (99991, True)]


@pytest.mark.slow
@pytest.mark.parametrize("cls", OPS)
def test_fits_everywhere(cls):
    for dtype in (torch.bfloat16, torch.float32):
        for turn, (length, aligned) in enumerate(TIGHT, start=OPS.index(cls) + dtype.itemsize // 2):
            arch = ARCHITECTURES[turn % 3]
            if not aligned and cls is FusedAddRMSNormBwdOp:
                continue  # spills: three gradients ahead, each element with an address of its own
            for build in builds(spec_call(cls, 9, length, dtype, aligned=aligned, arch=arch)):
                assert_fits(build, arch)


def test_two_programs_share_a_multiprocessor():
    """65536 registers: 16 warps of 128, as ``tiles`` counts on."""
    for cls in OPS:
        (build, _) = builds(spec_call(cls, 32768, 4096, torch.bfloat16, arch=(9, 0)))
        assert assert_fits(build, (9, 0)).registers <= 128


@pytest.mark.parametrize(("length", "tile"), [(8, 512), (128, 32), (1024, 4), (1000, 2), (2048, 1)])
def test_four_programs_that_only_add_up_share_a_multiprocessor(length, tile):
    """They hold twice the rows where there is room for as many programs as before."""
    wants = {"wants_x": False}
    call = spec_call(RMSNormBwdOp, 9, length, torch.bfloat16, wants=wants, arch=(9, 0))
    (build, _) = builds(call)
    assert dict(build.constexprs)["TILE"] == tile
    assert assert_fits(build, (9, 0)).registers <= 128


def test_accesses_are_16_bytes_wide():
    (build, _) = builds(spec_call(FusedAddRMSNormBwdOp, 2048, 4096, torch.bfloat16))
    accesses = re.findall(r"\b(?:LDG|STG)\.[.\w]+", sass(build, (9, 0)))
    assert accesses
    assert all(access.endswith(".128") for access in accesses), accesses
