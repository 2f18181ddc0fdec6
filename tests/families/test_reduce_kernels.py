"""The kernels of all reductions, in Triton's interpreter, against float64."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.cases import op_classes
from tests.kernel_calls import builds_of, call_of, misaligned, poison, run_entry, shapes
from tests.oracle import exact
from tests.triton_interpreter import interpreted
from tileops import reduction
from tileops.backend.tolerances import compare

HALF = torch.bfloat16
SAMPLES = {
    "SumFwdOp": {},
    "MeanFwdOp": {},
    "AmaxFwdOp": {},
    "AminFwdOp": {},
    "LogSumExpFwdOp": {},
    "VarFwdOp": {},
    "StdFwdOp": {"correction": 0},
    "VarMeanFwdOp": {"correction": 2.5},
    "VectorNormFwdOp": {},
    "AllFwdOp": {},
    "AnyFwdOp": {},
    "CountNonzeroFwdOp": {},
}
"""Ops that take any axes, with parameters."""
FOLDS = ["SumFwdOp", "AmaxFwdOp", "LogSumExpFwdOp", "VarMeanFwdOp", "AnyFwdOp"]
"""One of them for each way to merge states."""
SINGLE = {"ArgmaxFwdOp": {}, "ArgminFwdOp": {}, "ProdFwdOp": {}}


def op_of(name, dim, **params):
    return getattr(reduction, name)(dim=dim, **params)


def call_for(op, x, **facts):
    """``x``: a tensor, or (shape, dtype)."""
    real = isinstance(x, torch.Tensor)
    meta = torch.empty(x.shape if real else x[0], dtype=x.dtype if real else x[1], device="meta")
    outputs, _, _ = type(op)._signature(op, meta, None)
    device = x.device if real else torch.device("cuda", 0)
    names = [output.name for output in op.entry.outputs]
    (given,) = (item.name for item in op.entry.inputs)
    return call_of(
        type(op).__name__,
        {given: x if real else shapes(device, x=x)["x"]},
        shapes(device, **dict(zip(names, outputs, strict=True))),
        params=op._params,
        **facts,
    )


@interpreted
def run(op, x):
    from tileops.reduction.kernels.reduce import Reduce

    call = call_for(op, x)
    assert Reduce.refuses(call) is None, Reduce.refuses(call)
    with poison():
        return run_entry(Reduce.entry_for(call), call, x)


@contextmanager
def small_tiles():
    """Tiles so small that a small tensor needs every kind of launch."""
    from tileops.reduction.kernels import reduce

    sizes = {"REGISTER_ROW": 16, "ROW_PART": 4, "ROW_TILE_BYTES": 64, "STATES": 4}
    sizes |= {"COLUMN_BYTES": 8, "PART_BYTES": 32, "WALK_BYTES": 16, "WALKED_ROW": 30}
    sizes |= {"LEAST_WALK": 8}
    sizes |= {"TURNS_HELD": 2, "ROW_TURNS": (2, 4), "WIDE_BYTES": 64, "WIDE_TURN_BYTES": 1024}
    sizes |= {"WIDE_TURNS": (2, 4), "NARROW_BYTES": 8, "NARROW_TILE": 16, "NARROW_TURNS": 4}
    sizes |= {"STATE_TILE": 8, "ROW_STATES": 8}
    before = {name: getattr(reduce, name) for name in sizes}
    try:
        vars(reduce).update(sizes)
        yield
    finally:
        vars(reduce).update(before)


@interpreted
def run_small(op, x):
    from tileops.reduction.kernels.reduce import Reduce

    with small_tiles(), poison():
        call = call_for(op, x)
        return run_entry(Reduce.entry_for(call), call, x)


def check(op, x, result):
    wanted, _ = exact(op, {op.entry.inputs[0].name: x})
    results = result if isinstance(result, tuple) else (result,)
    for given, exactly in zip(results, wanted, strict=True):
        found = compare(given, exactly, "reduction")
        assert found.ok, f"{op!r}: {found.text}"


def draw(shape, dtype=torch.float32):
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(shape, dtype=dtype if dtype.is_complex else torch.float32).to(dtype)
        return x.masked_fill_(torch.rand(shape) < 0.3, 0) if dtype.is_complex else x
    return torch.randint(0, 2, shape).to(dtype)


@pytest.mark.parametrize(("name", "params"), {**SAMPLES, **SINGLE}.items())
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((3, 13), -1),  # walked
        ((4, 12), -1),  # walked, no element outside
        ((3, 16), -1),
        ((13, 3), 0),
        ((2, 5, 7), 1),
        ((1, 7, 1), 0),
        ((), 0),
        ((2, 37), 1),  # several launches
        ((37, 3), 0),
        ((2, 67, 3), 1),
        ((37, 19), 0),
        ((2, 9, 33), 1),
    ],
)
def test_one_axis_in_small_tiles(name, params, shape, dim):
    x, op = draw(shape), op_of(name, dim, **params)
    if "correction" not in params and "Var" in name and 1 in shape:
        x = torch.cat([x, draw(shape)], dim)
    check(op, x, run_small(op, x))


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((4, 5), (0, 1)),
        ((3, 5, 7), (0, 2)),
        ((3, 5, 7), (-2, 0)),
        ((2, 3, 5, 7), (1, 3)),
        ((3, 2, 5, 2, 3), (4, 0, 2)),
        ((17, 2, 19), (0, 2)),
        ((4, 3, 1, 5), (2, 3)),
    ],
)
def test_several_axes_in_small_tiles(name, shape, dim):
    x, op = draw(shape), op_of(name, dim, **SAMPLES[name])
    check(op, x, run_small(op, x))


@pytest.mark.parametrize("name", [*FOLDS[:1], "VarMeanFwdOp", "ArgmaxFwdOp"])
def test_everything(name):
    for shape in ((), (1,), (41,), (3, 5, 7)):
        x = draw(shape)
        for keepdim in (False, True):
            op = op_of(name, None, keepdim=keepdim)
            check(op, x, run_small(op, x))


@pytest.mark.parametrize("dtype", [torch.float16, HALF, torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "params"), SAMPLES.items())
def test_dtypes_in_real_tiles(name, params, dtype):
    x = draw((5, 100), dtype)
    for dim in (0, 1):
        op = op_of(name, dim, **params)
        check(op, x, run(op, x))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64]
)
@pytest.mark.parametrize("name", ["AllFwdOp", "AnyFwdOp", "CountNonzeroFwdOp"])
def test_what_is_zero(name, dtype):
    for probability in (0.0, 0.5, 1.0):
        x = (torch.rand(6, 9) < probability).to(dtype)
        if dtype is torch.complex64:
            x = x * torch.tensor([0 + 1j, -1 + 0j, complex(math.nan, 0)]).repeat(3)
            x = torch.where(x == 0, torch.tensor(complex(-0.0, -0.0)), x)
        for dim in (0, 1):
            op = op_of(name, dim)
            check(op, x, run(op, x))
    x = torch.tensor([[-0.0, math.nan], [0.0, -math.inf]])
    check(op_of(name, 1), x, run(op_of(name, 1), x))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
@pytest.mark.parametrize("name", ["AllFwdOp", "AnyFwdOp"])
def test_four_bytes_at_a_time(name, dtype):
    for shape, dim in (((3, 8), 1), ((2, 5, 4, 6), (1, 2, 3)), ((6, 2, 2), (1, 2)), ((36,), None)):
        op = op_of(name, dim)
        for odd in (0, 1):  # one that is unlike all others, of every byte's value
            others = torch.arange(math.prod(shape)) % 255 - 127 if odd == 0 else torch.zeros(shape)
            x = others.reshape(shape).to(dtype)
            x[x == 0] = 1 - odd
            for serve in (run, run_small):
                check(op, x, serve(op, x))
                lone = x.clone()
                lone.view(-1)[int(torch.randint(x.numel(), ()))] = odd
                check(op, lone, serve(op, lone))


def test_large_integers_are_not_zero():
    x = torch.tensor([[2**40, 2**40], [-(2**63), 0]])
    assert run(op_of("CountNonzeroFwdOp", 1), x).tolist() == [2, 1]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("name", "params"), {**SAMPLES, **SINGLE}.items())
def test_infinities_nan_and_signed_zeros(name, params, dim):
    x = torch.randn(8, 21)
    x[0, 5] = math.nan
    x[1] = math.inf
    x[2] = -math.inf
    x[3, 20] = math.inf
    x[4, ::2], x[4, 1::2] = -0.0, 0.0
    x[5, 3], x[5, 17] = -math.nan, math.nan
    x[6, 2], x[6, 3] = math.inf, -math.inf
    x[7, :8] = -math.inf
    x = x if dim == 1 else x.T.contiguous()
    op = op_of(name, dim, **params)
    for serve in (run, run_small):
        check(op, x, serve(op, x))


@pytest.mark.parametrize("ord", [0, 1, 2, 2.0, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_norms(ord, dtype):
    x = draw((7, 33), dtype).masked_fill_(torch.rand(7, 33) < 0.2, 0)
    for dim in (0, 1, None):
        op = op_of("VectorNormFwdOp", dim, ord=ord)
        check(op, x, run_small(op, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ord", [3, 8.0, 9, 0.5, -1, -2.5])
def test_other_norms(ord, dtype):
    x = draw((5, 11), dtype)
    x[0, :6], x[1, 0] = 0, math.inf
    for dim in (0, 1):
        op = op_of("VectorNormFwdOp", dim, ord=ord)
        check(op, x, run_small(op, x))


def test_a_norm_of_small_numbers():
    x = torch.tensor([[1e-13, -1e-13], [math.nan, 0.0], [-math.inf, 1.0], [0.0, -0.0]])
    op = op_of("VectorNormFwdOp", 1, ord=3)
    check(op, x, run(op, x))


@pytest.mark.parametrize("name", ["SumFwdOp", "MeanFwdOp", "ProdFwdOp", "VectorNormFwdOp"])
def test_the_cast_comes_first(name):
    x = (torch.randn(4, 12) * 20).bfloat16().float() * (1 + 2**-10)
    wanted = torch.float64 if name == "VectorNormFwdOp" else HALF
    for dim in (0, 1):
        op = op_of(name, dim, dtype=wanted)
        check(op, x, run_small(op, x))


@pytest.mark.parametrize("name", ["ArgmaxFwdOp", "ArgminFwdOp"])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_the_first_of_equals_wins(name, dim):
    x = torch.randint(-2, 3, (23, 29)).float()
    op = op_of(name, dim)
    check(op, x, run_small(op, x))


@pytest.mark.parametrize("name", ["ArgmaxFwdOp", "ArgminFwdOp"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 37), (13, 16)])
def test_the_first_of_the_least_wins(name, shape):
    """What lies outside a tile is no greater than what it holds, and must not be found."""
    x = torch.full(shape, -math.inf if name == "ArgmaxFwdOp" else math.inf)
    for dim in (0, 1, None):
        op = op_of(name, dim)
        assert not run_small(op, x).any()


@pytest.mark.parametrize(("name", "params"), {**SAMPLES, **SINGLE}.items())
def test_tiles_without_an_outside(name, params):
    from tileops.reduction.kernels import reduce

    for shape, dim in (((128, 8), 0), ((3, 64), 1), ((2, 128, 8), 1), ((16, 32), 0)):
        x, op = draw(shape), op_of(name, dim, **params)
        if name == "ProdFwdOp":  # 128 normal numbers may have a product too small for float32
            x = torch.exp2(2 * torch.rand(shape) - 1)
        with small_tiles():
            assert reduce._planned(call_for(op, x)).whole
        check(op, x, run_small(op, x))


@pytest.mark.parametrize(
    ("name", "n", "dtype", "turns"),
    [
        ("SumFwdOp", 4096, HALF, 1),
        ("SumFwdOp", 11008, HALF, 6),
        ("AllFwdOp", 11008, torch.bool, 6),  # four at a time
        ("SumFwdOp", 5120, HALF, 5),
        ("LogSumExpFwdOp", 11008, HALF, 1),
        ("SumFwdOp", 3000, HALF, 1),
    ],
)
def test_rows_that_fill_a_tile_badly_are_walked(name, n, dtype, turns):
    from tileops.reduction.kernels import reduce

    plan = reduce._planned(call_for(op_of(name, -1), ((2048, n), dtype)))
    assert (plan.tile.turns, plan.parts, plan.merges) == (turns, 1, ())


def test_real_tiles_of_long_rows_and_columns():
    for shape, dim in (((2, 20000), 1), ((1100, 70), 0), ((16385,), 0), ((3, 520, 33), 1)):
        x = draw(shape)
        for name in ("SumFwdOp", "VarFwdOp", "LogSumExpFwdOp", "ArgmaxFwdOp"):
            op = op_of(name, dim)
            check(op, x, run(op, x))


def test_misaligned():
    for name, dtype in (("SumFwdOp", HALF), ("AllFwdOp", torch.bool)):
        x = misaligned(draw((3, 64), dtype))
        check(op_of(name, 1), x, run(op_of(name, 1), x))


@pytest.mark.parametrize("name", ["SumFwdOp", "VarFwdOp", "LogSumExpFwdOp"])
@pytest.mark.parametrize("n", [13, 100, 20000])
def test_a_row_does_not_depend_on_the_rows_beside_it(name, n):
    x = draw((9, n))
    op = op_of(name, -1)
    together = run(op, x)
    for row in (0, 8):
        assert torch.equal(run(op, x[row : row + 1].contiguous())[0], together[row])


def test_nothing_in_nothing_out():
    for name in ("SumFwdOp", "VarMeanFwdOp"):
        result = run(op_of(name, 1), torch.empty(0, 4))
        assert (result[0] if isinstance(result, tuple) else result).shape == (0,)


def test_what_is_left_to_the_decomposition():
    from tileops.reduction.kernels.reduce import Reduce

    for op, shape, dtype in (
        (op_of("SumFwdOp", 1), (3, 0), torch.float32),
        (op_of("AllFwdOp", 1), (3, 4), torch.complex128),
        (op_of("VectorNormFwdOp", 1, ord=1000), (3, 4), torch.float32),
        (op_of("VectorNormFwdOp", 1, ord=-0.01), (3, 4), torch.float32),
    ):
        assert Reduce.refuses(call_for(op, (shape, dtype)))


def test_how_many_rows_is_not_in_the_identity():
    from tileops.reduction.kernels.reduce import Reduce

    def identity(rows, n):
        return Reduce.entry_for(call_for(op_of("SumFwdOp", -1), ((rows, n), HALF))).identity

    assert identity(1, 4096) == identity(77, 4096)
    assert identity(1, 128256) == identity(7000, 128256)


def test_launches():
    from tileops.reduction.kernels.reduce import Reduce

    def launches(shape, dim):
        call = call_for(op_of("SumFwdOp", dim), (shape, HALF))
        return len(builds_of(Reduce.entry_for(call)))

    assert launches((2048, 4096), -1) == 1
    assert launches((4, 128256), -1) == 2
    assert launches((4096, 4096), 0) == 2
    assert launches((32, 64, 56, 56), (0, 2, 3)) == 2
    assert launches((2**31,), None) == 3


# ---- what the compiler says ----------------------------------------------------------------------


def builds(op, shape, dtype, arch):
    from tileops.reduction.kernels.reduce import Reduce

    call = call_for(op, (shape, dtype), arch=arch)
    return [] if Reduce.refuses(call) else builds_of(Reduce.entry_for(call))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "shape", "dim", "dtype"),
    [
        ("SumFwdOp", (2048, 4096), -1, HALF),
        ("VarMeanFwdOp", (4, 128256), -1, torch.float32),
        ("LogSumExpFwdOp", (4096, 4096), 0, torch.float16),
        ("ArgmaxFwdOp", (4096, 4096), 0, HALF),
        ("AllFwdOp", (2048, 11008), -1, torch.bool),
        ("CountNonzeroFwdOp", (2048, 11008), -1, torch.float16),
        ("VarFwdOp", (2048, 9000), -1, torch.float64),
        ("AmaxFwdOp", (2048, 4096), -1, torch.float64),
    ],
)
def test_compiles_to_wide_accesses(name, shape, dim, dtype, arch):
    read, *merges = builds(op_of(name, dim), shape, dtype, arch)
    assert_fits(read, arch)
    assert re.search(r"LDG\.E(\.EF)?\.128", sass(read, arch))
    for merge in merges:
        assert_fits(merge, arch)


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [("SumFwdOp", (4096, 4096), 0), ("VarFwdOp", (4, 128256), 1), ("ArgmaxFwdOp", (4096, 64), 1)],
)
def test_the_next_launch_starts_when_all_is_read(name, shape, dim):
    """Programs that wait beside programs that read would be spread unevenly when their turn comes."""
    for build in builds(op_of(name, dim), shape, HALF, (9, 0)):
        code = sass(build, (9, 0))
        waits, reads, lets = (code.index("ACQBULK"), code.rindex("LDG"), code.index("PREEXIT"))
        assert waits < code.index("LDG") <= reads < lets < code.index("STG")


def declared():
    """Each workload of these ops in the dtype that it declares."""
    return [
        pytest.param(name, workload, id=f"{name}-{workload.label}")
        for name in {**SAMPLES, **SINGLE}
        for workload in op_classes()[name].entry.workloads
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workload"), declared())
def test_every_workload_compiles(name, workload):
    op = op_classes()[name](**workload.params)
    dtype = getattr(torch, workload.dtypes["T"])
    for arch in ARCHITECTURES:
        for build in builds(op, workload.dims["S"], dtype, arch):
            assert_fits(build, arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_candidates_compile(dtype):
    from tileops.reduction.kernels.reduce import Reduce

    for name, shape, dim in (
        ("VarFwdOp", (2048, 11008), -1),
        ("ArgmaxFwdOp", (4096, 4096), 0),
    ):
        call = call_for(op_of(name, dim), (shape, dtype), arch=(9, 0))
        for entry in Reduce.candidates(call):
            for build in builds_of(entry):
                assert_fits(build, (9, 0))
