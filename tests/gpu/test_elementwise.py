"""The elementwise family on a card: every workload in every dtype, more than 2**31 elements, and results
that do not depend on what lies beside them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cases import op_classes, workload_call, workloads_in_every_dtype
from tests.oracle import EXACT, call, same_bits
from tests.oracle_elementwise import philox_word
from tileops.backend.tolerances import tolerance
from tileops.elementwise import (
    AddFwdOp,
    AlibiFwdOp,
    DropoutFwdOp,
    EqFwdOp,
    FloorDivideFwdOp,
    GELUAndMulFwdOp,
    PowFwdOp,
    RemainderFwdOp,
    SiLUAndMulBwdOp,
    SiLUAndMulFwdOp,
    SinFwdOp,
    SinusoidalFwdOp,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

NAMES = [n for n, c in op_classes().items() if c.entry.family == "elementwise" and c.entry.inputs]
BEYOND = 2**31


@pytest.fixture(autouse=True)
def _poison():
    # What torch.empty hands out next is what was freed last.
    junk = [torch.full((1 << 24,), math.nan, device="cuda") for _ in range(4)]
    del junk
    yield
    torch.cuda.empty_cache()


def check(op, inputs):
    """One call on the card against the op's meaning, computed there in float64."""
    given = {n: None if t is None else t.cuda() for n, t in inputs.items()}
    before = {n: None if t is None else t.clone() for n, t in given.items()}
    result = call(op, given)
    (wanted,), written = EXACT[type(op).__name__](op, **before)
    assert op.last_call.kernel.startswith("triton") or "float64" in str(op.last_call), op.last_call
    assert (result is given["input"]) == bool(written)
    close(op, result, wanted)
    for name, tensor in given.items():
        if name not in written and tensor is not None:
            assert same_bits(tensor, before[name]), name


def close(op, result, wanted):
    wanted = wanted.to(result.device)
    assert result.shape == wanted.shape
    assert result.is_contiguous()
    if not result.is_floating_point():
        assert torch.equal(result, wanted.to(result.dtype)), op
        return
    bound, exact = tolerance(result.dtype, op.entry.kind), wanted.double()
    rounded = exact.to(result.dtype).double()
    finite = exact.isfinite() & rounded.isfinite()
    same = (result == rounded) | (result.isnan() & rounded.isnan())
    rms = exact[finite].square().mean().sqrt() if finite.any() else torch.zeros((), device="cuda")
    limit = bound.relative * exact.abs() + bound.of_rms * rms + bound.absolute
    wrong = torch.where(finite, (result.double() - exact).abs() > limit, ~same)
    assert not wrong.any(), (op, int(wrong.sum()), result[wrong][:3], exact[wrong][:3])


@pytest.mark.parametrize("name", NAMES)
def test_workloads(name, seed):
    for _, workload in workloads_in_every_dtype(name):
        kinds = set(workload.dtypes.values())
        stated = any(workload.dtypes == w.dtypes for w in op_classes()[name].entry.workloads)
        # The meanings of integers and of dropout are Python loops.
        slow = name == "DropoutFwdOp" or not any("float" in kind for kind in kinds)
        most = 1 << 14 if slow else 1 << 24 if stated else 1 << 18
        made = workload_call(name, workload, seed, most)
        if name != "DropoutFwdOp" or made.op.training:
            check(made.op, dict(made.inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hard_arguments(dtype):
    """Where quotients, powers and angles are large, small or near integers."""
    x = torch.cat(
        (torch.randn(4000) * 10 ** torch.empty(4000).uniform_(-4, 4), torch.arange(-50.0, 50))
    )
    y = torch.cat(
        (torch.randn(4000) * 10 ** torch.empty(4000).uniform_(-4, 4), torch.full((100,), 3.0))
    )
    x, y = x.to(dtype), y.to(dtype)
    y[y == 0] = 1
    for op in (FloorDivideFwdOp(), RemainderFwdOp()):
        check(op, {"input": x, "other": y})
    check(PowFwdOp(), {"input": x.abs(), "exponent": (y / 100).to(dtype)})
    if dtype is torch.float32:
        near, far = 1 + torch.randn_like(x) / 1000, torch.randn_like(x) * 30000
        check(PowFwdOp(), {"input": near, "exponent": far})
    check(SinFwdOp(), {"input": (x * 1e3).to(dtype)})


def test_generators():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for length, heads in ((1, 1), (37, 12), (300, 32)):
            op = AlibiFwdOp(seq_len=length, num_heads=heads, out_dtype=dtype, device="cuda")
            # Its meaning is three loops in Python; the CPU's result is held to that elsewhere.
            wanted = AlibiFwdOp(seq_len=length, num_heads=heads, device="cpu")()
            close(op, op(), wanted.double().cuda())
            assert op.last_call.kernel == "triton_alibi"
        op = SinusoidalFwdOp(seq_len=5000, d_model=514, out_dtype=dtype, device="cuda")
        wanted = SinusoidalFwdOp(seq_len=5000, d_model=514, device="cpu")()
        close(op, op(), wanted.double().cuda())
        assert op.last_call.kernel == "triton_sinusoidal"


def test_a_generator_in_a_graph():
    op = AlibiFwdOp(seq_len=64, num_heads=8, device="cuda")
    wanted, graph = op(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op()
    result.fill_(1)
    graph.replay()
    assert torch.equal(result, wanted)


def test_a_generator_first_called_in_a_graph():
    """Its kernel and its table are there already, from a call of another length."""
    AlibiFwdOp(seq_len=63, num_heads=8, device="cuda")()
    op, graph = AlibiFwdOp(seq_len=61, num_heads=8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op()
    graph.replay()
    assert torch.equal(result.cpu(), AlibiFwdOp(seq_len=61, num_heads=8, device="cpu")())


def test_calls_that_fill_the_card():
    """Long programs, tiles of several rows, rows that are read once for all of them."""
    for first, second in (((2100, 1), (1, 2047)), ((8, 1, 512, 512), (1, 12, 1, 512)), ((1500, 1000), (1500, 1)),
                          ((40, 3, 1, 9000), (1, 3, 5, 1)), ((3_000_017,), (3_000_017,))):  # fmt: skip
        for op, dtype in (
            (EqFwdOp(), torch.int64),
            (AddFwdOp(), torch.float16),
            (AddFwdOp(), torch.bool),
        ):
            a, b = (
                torch.randint(0, 2 if dtype is torch.bool else 50, s).to(dtype)
                for s in (first, second)
            )
            for left, right in ((a, b), (b, a)):
                wanted = left == right if isinstance(op, EqFwdOp) else left + right
                assert torch.equal(op(left.cuda(), right.cuda()).cpu(), wanted)


def test_remainders_of_any_float32():
    """The library's function is exact, but takes subnormal numbers for 0."""
    bits = torch.randint(-(2**31), 2**31, (2, 1 << 20)).to(torch.int32)
    x, y = bits.view(torch.float32)
    x, y = x[y.abs() >= 2.0**-100], y[y.abs() >= 2.0**-100]  # what is left is no subnormal number
    rest = torch.fmod(x.double(), y.double()).float()  # exact
    wanted = torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)
    result = RemainderFwdOp()(x.cuda(), y.cuda()).cpu()
    assert torch.equal(result.isnan(), wanted.isnan())
    assert torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0))


# ---- every number of 16 bits -----------------------------------------------------------------------

ONE_NUMBER = [
    name
    for name in NAMES
    if len(op_classes()[name].entry.inputs) == 1
    and not op_classes()[name].random
    and "AndMul" not in name
    and "bfloat16" in op_classes()[name].entry.dtypes["T"]
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ONE_NUMBER)
def test_every_number_of_16_bits(name, dtype):
    cls = op_classes()[name]
    ops = [cls(min=-1, max=2) if name == "ClampScalarFwdOp" else cls()]
    if name == "GELUFwdOp":
        ops.append(cls(approximate="tanh"))
    for op in ops:
        check(op, {"input": torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [RemainderFwdOp, FloorDivideFwdOp])
def test_quotients_of_numbers_of_all_sizes(cls, dtype):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = bits.view(dtype)
    for y in (x.flip(0), bits[torch.randperm(2**16)].view(dtype), x * 0.37):
        # Where float64 has the exact remainder, and the quotient is one of the dtype.
        known = (x.double() / y.double()).abs() < 2.0**15
        check(cls(), {"input": x[known], "other": y[known]})


# ---- dropout ---------------------------------------------------------------------------------------


def test_dropout_is_the_same_on_every_device():
    x = torch.randn(3, 1001)
    for dtype in (torch.float16, torch.float32):
        op = DropoutFwdOp(p=0.3, seed=2**40 + 5)
        assert torch.equal(op(x.to(dtype).cuda()).cpu() == 0, op(x.to(dtype)) == 0)


def test_dropout_draws_anew_and_after_manual_seed_the_same():
    op, x = DropoutFwdOp(p=0.25), torch.ones(1 << 20, device="cuda")
    first, second = op(x), op(x)
    kept = (first != 0).double(), (second != 0).double()
    for each in kept:  # 5 standard deviations
        assert abs(each.mean() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / x.numel())
    both = (kept[0] * kept[1]).mean()
    assert abs(both - 0.75**2) < 5 * math.sqrt(0.75**2 * (1 - 0.75**2) / x.numel())
    torch.manual_seed(1)
    first = op(x)
    torch.manual_seed(1)
    assert torch.equal(op(x), first)


def test_dropout_in_a_graph_draws_at_every_replay():
    op, x = DropoutFwdOp(p=0.5), torch.ones(4096, device="cuda")
    op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(x)
    graph.replay()
    first = result.clone()
    graph.replay()
    assert not torch.equal(first, result)


# ---- many elements -----------------------------------------------------------------------------------


def test_more_than_2_to_the_31_elements():
    count = BEYOND + 4099
    x = torch.empty(count, dtype=torch.uint8, device="cuda").random_(0, 100)
    other = torch.tensor(3, dtype=torch.uint8, device="cuda")
    result = AddFwdOp(alpha=2)(x, other)
    for place in (slice(0, 5000), slice(BEYOND - 5000, BEYOND), slice(BEYOND, None)):
        assert torch.equal(result[place], x[place] + 6)
    same = EqFwdOp()(x, result)
    assert not same[-5000:].any()


def test_broadcasting_more_than_2_to_the_31_elements():
    rows, columns = 65_600, 32_768
    row = torch.arange(columns, device="cuda").to(torch.uint8)
    column = torch.arange(rows, device="cuda").to(torch.uint8)[:, None]
    result = AddFwdOp()(row, column)
    for place in (0, 65_535, 65_536, rows - 1):
        assert torch.equal(result[place], row + column[place])
    del result
    whole = torch.ones(rows, columns, dtype=torch.uint8, device="cuda")
    result = AddFwdOp()(whole, row)
    for place in (0, 65_535, 65_536, rows - 1):
        assert torch.equal(result[place], row + 1)


def test_gates_of_more_than_2_to_the_31_elements():
    rows, columns = 70_000, 16_000
    x = torch.empty(rows, 2 * columns, dtype=torch.bfloat16, device="cuda").normal_()
    result = SiLUAndMulFwdOp()(x)
    for place in (0, 67_107, 67_109, rows - 1):
        assert torch.equal(result[place], SiLUAndMulFwdOp()(x[place]))
    gradient = SiLUAndMulBwdOp()(result, x)
    for place in (0, 67_107, 67_109, rows - 1):
        assert torch.equal(gradient[place], SiLUAndMulBwdOp()(result[place], x[place]))


def test_dropout_of_more_than_2_to_the_31_elements():
    x = torch.ones(BEYOND + 1000, dtype=torch.float16, device="cuda")
    result = DropoutFwdOp(seed=9)(x)
    for place in (*range(5), *range(BEYOND - 5, BEYOND + 5), *range(BEYOND + 990, BEYOND + 1000)):
        assert (float(result[place]) != 0) == (philox_word(9, place) >= 2**31)


def test_a_stride_over_2_to_the_31():
    base = torch.zeros(BEYOND + 8, dtype=torch.uint8, device="cuda")
    view = base[::BEYOND]
    view.copy_(torch.tensor([5, 7]))
    assert AddFwdOp()(view, view).tolist() == [10, 14]


# ---- alone and among others ----------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [4096, 4099, 14336])
def test_a_row_does_not_depend_on_the_others(columns):
    x = torch.randn(129, 2 * columns, device="cuda").bfloat16()
    for op in (SiLUAndMulFwdOp(), GELUAndMulFwdOp(approximate="tanh")):
        every = op(x)
        for rows in (1, 2, 127):
            assert torch.equal(op(x[:rows]), every[:rows])
    grad = torch.randn(129, columns, device="cuda").bfloat16()
    every = SiLUAndMulBwdOp()(grad, x)
    assert torch.equal(SiLUAndMulBwdOp()(grad[:3], x[:3]), every[:3])
    weight = torch.randn(2 * columns, device="cuda").bfloat16()
    every = PowFwdOp()(x.abs(), weight)
    assert torch.equal(PowFwdOp()(x[:5].abs(), weight), every[:5])
