"""The elementwise family on the CPU against float64 and integer formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.cases import workload_call, workload_cases
from tests.oracle import check, exact, strided
from tileops import CheckError
from tileops.backend.tolerances import compare
from tileops.elementwise import (
    AddFwdOp,
    AlibiFwdOp,
    GELUFwdOp,
    MulFwdOp,
    SiLUFwdOp,
    SinusoidalFwdOp,
)
from tileops.elementwise.activation import _sixths_of_relu6

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
BINARY_SHAPES = [
    ((), ()),
    ((1,), ()),
    ((), (3, 1)),
    ((4,), (4,)),
    ((3, 4), (4,)),
    ((4,), (3, 4)),
    ((3, 1), (1, 4)),
    ((2, 1, 5), (3, 1)),
    ((37,), (37,)),
    ((0,), (0,)),
    ((0,), (1,)),
    ((3, 0), (1, 1)),
    ((0, 1), (1, 0)),
    ((1, 1031), (2, 1)),
]
UNARY_SHAPES = [(), (1,), (37,), (3, 4), (2, 3, 5), (0,), (3, 0), (1031,), (1, 1, 1)]
SPECIALS = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 30.0, -30.0, 1e-7]


@pytest.mark.parametrize(
    ("name", "workload"),
    [c for c in workload_cases("elementwise") if c.values[1].dims],  # the generators: see below
)
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed)
    check(made.op, dict(made.inputs))


def values(shape, dtype):
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        # The whole range: sums and products of such numbers do not fit.
        info = torch.iinfo(dtype)
        low, high = max(info.min, -(2**62)), min(info.max, 2**62)
        return torch.randint(low, high, shape).to(dtype)
    return (torch.randn(shape) * 3).to(dtype)


def specials(dtype):
    return torch.tensor(SPECIALS, dtype=torch.float64).to(dtype)


# ---- Add, Mul ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS])
@pytest.mark.parametrize(("first", "second"), BINARY_SHAPES)
def test_add_and_mul(first, second, dtype):
    inputs = {"input": values(first, dtype), "other": values(second, dtype)}
    check(AddFwdOp(), inputs)
    check(MulFwdOp(), inputs)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("alpha", [0, 1, 2, 100])
def test_integer_alpha_wraps(dtype, alpha):
    info = torch.iinfo(dtype)
    ends = torch.tensor([info.min, info.max, 0, 1, info.max - 1], dtype=dtype)
    check(AddFwdOp(alpha=alpha), {"input": ends[:, None], "other": ends})
    check(MulFwdOp(), {"input": ends[:, None], "other": ends})


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_range_of_an_integer_alpha(dtype):
    info = torch.iinfo(dtype)
    # torch lets a negative number of the same width stand for an unsigned one.
    lowest = -info.max if dtype is torch.uint8 else info.min
    x, y = values((5,), dtype), values((5,), dtype)
    for alpha in (lowest, info.max):
        check(AddFwdOp(alpha=alpha), {"input": x, "other": y})
        assert torch.equal(AddFwdOp(alpha=alpha)(x, y), torch.add(x, y, alpha=alpha))
    for alpha in (lowest - 1, info.max + 1):
        with pytest.raises(CheckError, match="alpha fits") as caught:
            AddFwdOp(alpha=alpha)(x, y)
        assert caught.value.argument == "alpha"


@pytest.mark.parametrize("alpha", [0, 1])
def test_bool_alpha(alpha):
    both = torch.tensor([False, True])
    check(AddFwdOp(alpha=alpha), {"input": both[:, None], "other": both})


@pytest.mark.parametrize("alpha", [2, -1])
def test_bool_refuses_other_alphas(alpha):
    with pytest.raises(CheckError, match="alpha is 0 or 1"):
        AddFwdOp(alpha=alpha)(torch.tensor([True]), torch.tensor([True]))


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS])
def test_integers_refuse_a_fractional_alpha(dtype):
    for alpha in (0.5, 1.0, math.nan):
        with pytest.raises(CheckError, match="alpha is an integer"):
            AddFwdOp(alpha=alpha)(torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("alpha", [0, 1, -1, 0.5, -3, 1e3, 0.1])
def test_float_alpha(dtype, alpha):
    check(AddFwdOp(alpha=alpha), {"input": values((7, 5), dtype), "other": values((5,), dtype)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_add_rounds_once(dtype):
    # Where alpha * other nearly cancels input, a product rounded first would be seen.
    other = torch.linspace(9, 11, 41).to(dtype)
    result = AddFwdOp(alpha=0.1)(torch.full_like(other, -1.0), other)
    wanted = (0.1 * other.double() - 1).to(dtype)
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=2.0**-22)


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_alpha_that_is_not_finite_or_zero(dtype):
    x, y = specials(dtype)[:, None], specials(dtype)
    for alpha in (0, 1, -1, math.inf, -math.inf, math.nan):
        result = AddFwdOp(alpha=alpha)(x, y)
        wanted = torch.add(x, y, alpha=alpha)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(result.signbit()[~result.isnan()], wanted.signbit()[~wanted.isnan()])


@pytest.mark.parametrize("alpha", [True, "1", None, 1j, [1], torch.tensor(1)])
def test_alpha_is_a_number(alpha):
    with pytest.raises(CheckError, match="'alpha'"):
        AddFwdOp(alpha=alpha)


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_of_products(dtype):
    x, y = specials(dtype)[:, None], specials(dtype)
    result = MulFwdOp()(x, y)
    wanted = (x.double() * y.double()).to(dtype)
    torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.signbit()[~result.isnan()], wanted.signbit()[~wanted.isnan()])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, *FLOATS])
def test_binary_strides(dtype):
    x, y = values((3, 4, 6), dtype), values((4, 6), dtype)
    for _, view in strided(x):
        for _, other in strided(y):
            check(AddFwdOp(), {"input": view, "other": other})
            check(MulFwdOp(), {"input": other, "other": view})
    check(AddFwdOp(), {"input": x[:1].expand(3, 4, 6), "other": y})
    check(AddFwdOp(), {"input": x, "other": x})
    if dtype is not torch.bool:
        check(MulFwdOp(), {"input": -x.flip(0), "other": y})


@pytest.mark.parametrize("op", [AddFwdOp(), MulFwdOp()])
def test_shapes_that_do_not_broadcast(op):
    for first, second in (((3,), (4,)), ((2, 3), (2,)), ((0,), (2,)), ((2, 1, 3), (4, 5, 1, 2))):
        with pytest.raises(CheckError, match="broadcast"):
            op(torch.ones(first), torch.ones(second))


@pytest.mark.parametrize("op", [AddFwdOp(), MulFwdOp()])
def test_dtypes_do_not_promote(op):
    for dtype in (torch.float64, torch.int32, torch.bool):
        with pytest.raises(CheckError, match="dtype"):
            op(torch.ones(2), torch.ones(2, dtype=dtype))


def test_a_negated_view():
    # The imaginary part of a conjugate carries a negation that no kernel may miss.
    z = torch.randn(3, 4, dtype=torch.complex64)
    view = torch.imag(z.conj())
    assert view.is_neg()
    for op in (AddFwdOp(), MulFwdOp()):
        assert torch.equal(op(view, view), op(-z.imag, -z.imag))
        assert torch.equal(op(view, view), op(view.clone(), view.clone()))


# ---- activations -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", UNARY_SHAPES)
def test_silu_and_gelu(shape, dtype):
    x = values(shape, dtype)
    check(SiLUFwdOp(), {"input": x})
    check(SiLUFwdOp(inplace=True), {"input": x.clone()})
    if x.numel() == 1:
        # gelu(-4) is -4 * 3e-5, off by a rounding of 4: too much where no larger result is beside it.
        x = x.abs()
    check(GELUFwdOp(), {"input": x})
    check(GELUFwdOp(approximate="tanh"), {"input": x})


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_strides(dtype):
    x = values((3, 4, 6), dtype)
    for op in (SiLUFwdOp(), GELUFwdOp(), GELUFwdOp(approximate="tanh")):
        for _, view in strided(x):
            check(op, {"input": view})
        check(op, {"input": x[:1, :1].expand(3, 4, 6)})
    for _, view in strided(x):
        check(SiLUFwdOp(inplace=True), {"input": view})


def test_writing_a_view_leaves_the_rest_of_its_base():
    base = torch.randn(4, 6)
    before = base.clone()
    view = base[1:3, ::2]
    assert SiLUFwdOp(inplace=True)(view) is view
    torch.testing.assert_close(base[1:3, ::2], F.silu(before[1:3, ::2]))
    base[1:3, ::2] = before[1:3, ::2]
    assert torch.equal(base, before)


def test_a_write_counts_as_one():
    x = torch.randn(4, 6)
    version = x._version
    SiLUFwdOp(inplace=True)(x)
    assert x._version > version
    version = x._version
    SiLUFwdOp()(x)
    assert x._version == version
    with FlopCounterMode(display=False):  # through the dispatcher, below what counts versions
        SiLUFwdOp(inplace=True)(x)
    assert x._version > version


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_of_activations(dtype):
    x = specials(dtype)
    for op, reference in (
        (SiLUFwdOp(), F.silu),
        (GELUFwdOp(), F.gelu),
        (GELUFwdOp(approximate="tanh"), lambda t: F.gelu(t, approximate="tanh")),
    ):
        result = op(x)
        wanted = reference(x.double()).to(dtype)
        if not reference(x)[2].isfinite():
            # torch 2.13's vectorised gelu makes NaN of +inf on the CPU, and inf in the scalar rest.
            wanted[2] = reference(x)[2]
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=1e-6, equal_nan=True)
        assert result[0].item() == 0
        assert not result[0].signbit()
        assert result[1].signbit(), "-0.0 maps to -0.0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_oracle_agrees_with_torch(dtype):
    x = torch.linspace(-6, 6, 97).to(dtype)
    for op, wanted in (
        (SiLUFwdOp(), F.silu(x)),
        (GELUFwdOp(), F.gelu(x)),
        (GELUFwdOp(approximate="tanh"), F.gelu(x, approximate="tanh")),
    ):
        (ours,), _ = exact(op, {"input": x})
        torch.testing.assert_close(ours.to(dtype), wanted)
    for slot, name in enumerate(("none", "tanh")):
        assert GELUFwdOp(approximate=name)(x).ne(GELUFwdOp()(x)).any() == bool(slot)


def test_activation_domains():
    with pytest.raises(CheckError, match="approximate"):
        GELUFwdOp(approximate="sigmoid")
    with pytest.raises(CheckError, match="positional"):
        GELUFwdOp("tanh")
    with pytest.raises(CheckError, match="overlap"):
        SiLUFwdOp(inplace=True)(torch.randn(4, 1).expand(4, 4))


def test_a_plan_of_another_stride_does_not_hide_an_overlap():
    op = SiLUFwdOp(inplace=True)
    op(torch.randn(4, 4).t())  # as large and as strided as what comes
    with pytest.raises(CheckError, match="overlap"):
        op(torch.randn(4, 1).expand(4, 4))


# ---- generators --------------------------------------------------------------------------------

OUTPUTS = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize(("length", "heads"), [(1, 1), (5, 8), (7, 12), (3, 3), (2, 112), (13, 16)])
def test_alibi(length, heads, dtype):
    check(AlibiFwdOp(seq_len=length, num_heads=heads, out_dtype=dtype), {})


def test_alibi_slopes_of_the_paper():
    # Section 3: for 8 heads the slopes are 1/2, 1/4, ... 1/256; symmetric distances, 0 on the diagonal.
    bias = AlibiFwdOp(seq_len=2, num_heads=8)()
    assert bias[:, 0, 1].tolist() == [-(2.0**-n) for n in range(1, 9)]
    assert torch.equal(bias, bias.transpose(1, 2))
    assert not bias[:, 0, 0].any()


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize(("length", "width"), [(1, 2), (7, 6), (64, 10), (3, 512)])
def test_sinusoidal(length, width, dtype):
    check(SinusoidalFwdOp(seq_len=length, d_model=width, out_dtype=dtype), {})


def test_sixths_in_float64_off_the_cpu():
    """What the decompositions take there instead of torch's, whose sixth is float32's."""
    x = torch.cat(
        (torch.randn(1000).double() * 4, torch.tensor([3, -3, math.inf, -math.inf, math.nan]))
    )
    found = compare(_sixths_of_relu6(x), (x + 3).clamp(0, 6) / 6, "pointwise")
    assert found.ok, found.text
    leaf = torch.tensor([-3.0, 0.0, 3.0]).requires_grad_()
    (slope,) = torch.autograd.grad(_sixths_of_relu6(leaf).sum(), leaf)
    assert torch.equal(slope, torch.autograd.grad(F.hardsigmoid(leaf).sum(), leaf)[0])


def test_sinusoidal_is_exact_at_far_positions():
    result = SinusoidalFwdOp(seq_len=100_001, d_model=4)()
    for place in (65_535, 99_999, 100_000):
        wanted = [math.sin(place), math.cos(place), math.sin(place / 100), math.cos(place / 100)]
        torch.testing.assert_close(
            result[place].double(), torch.tensor(wanted).double(), rtol=0, atol=1e-6
        )


def test_generators_fill_poisoned_memory_and_are_fresh():
    for op in (AlibiFwdOp(seq_len=3, num_heads=2), SinusoidalFwdOp(seq_len=3, d_model=4)):
        first = check(op, {})
        kept = first.clone()
        first.fill_(7)
        assert torch.equal(op(), kept)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_generators_on_a_device(device):
    for op in (
        AlibiFwdOp(seq_len=3, num_heads=2, device=device),
        SinusoidalFwdOp(seq_len=3, d_model=4, device=device),
    ):
        assert op().device == torch.device(device)
    with torch.device("meta"):
        assert AlibiFwdOp(seq_len=3, num_heads=2)().device.type == "meta"
        assert AlibiFwdOp(seq_len=3, num_heads=2, device="cpu")().device.type == "cpu"
    assert AlibiFwdOp(seq_len=3, num_heads=2)().device.type == "cpu"


@pytest.mark.parametrize(
    "make",
    [
        lambda: AlibiFwdOp(seq_len=0, num_heads=2),
        lambda: AlibiFwdOp(seq_len=2, num_heads=0),
        lambda: AlibiFwdOp(seq_len=2, num_heads=-1),
        lambda: AlibiFwdOp(seq_len=2, num_heads=2, out_dtype=torch.float64),
        lambda: AlibiFwdOp(seq_len=2, num_heads=2, out_dtype=torch.int32),
        lambda: AlibiFwdOp(2, 2),
        lambda: AlibiFwdOp(seq_len=2.0, num_heads=2),
        lambda: AlibiFwdOp(seq_len=True, num_heads=2),
        lambda: AlibiFwdOp(seq_len=2),
        lambda: SinusoidalFwdOp(seq_len=0, d_model=2),
        lambda: SinusoidalFwdOp(seq_len=2, d_model=3),
        lambda: SinusoidalFwdOp(seq_len=2, d_model=0),
        lambda: SinusoidalFwdOp(seq_len=2, d_model=2, device="no such device"),
        lambda: SinusoidalFwdOp(seq_len=2, d_model=2, device=1.5),
        lambda: AlibiFwdOp(seq_len=2, num_heads=2)(torch.ones(2)),
        lambda: AlibiFwdOp(seq_len=2, num_heads=2)(device="cpu"),
    ],
)
def test_generator_domains(make):
    with pytest.raises(CheckError):
        make()
