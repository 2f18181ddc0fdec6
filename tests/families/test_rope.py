"""The rope family on the CPU against float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cases import workload_call, workload_cases
from tests.oracle import check, strided
from tileops import CheckError
from tileops.rope import RoPENeoxPositionIdsBwdOp, RoPENeoxPositionIdsFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INDICES = [torch.int32, torch.int64]


@pytest.mark.parametrize(("name", "workload"), workload_cases("rope"))
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed)
    check(made.op, dict(made.inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize(
    ("shape", "rotary"),
    [
        ((3, 2, 8), None),
        ((1, 1, 2), None),
        ((1, 1, 2), 2),
        ((0, 2, 8), None),
        ((3, 0, 8), None),
        ((3, 2, 8), 6),
        ((3, 2, 7), 6),
        ((3, 2, 7), 2),
        ((37, 1, 4), None),
        ((2, 5, 64), 64),
    ],
)
def test_rope(shape, rotary, index, dtype):
    op = RoPENeoxPositionIdsFwdOp(131072, rotary_dim=rotary)
    x = torch.randn(shape).to(dtype)
    positions = torch.randint(0, 131072, shape[:1]).to(index)
    result = check(op, {"x": x, "positions": positions})
    rest = shape[-1] if rotary is None else rotary
    assert torch.equal(result[..., rest:], x[..., rest:]), "what is not rotated is copied"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "rotary"), [((3, 2, 8), None), ((0, 2, 8), None), ((3, 2, 7), 6), ((37, 1, 4), None)]
)
def test_gradient(shape, rotary, dtype):
    op = RoPENeoxPositionIdsBwdOp(131072, rotary_dim=rotary)
    positions = torch.randint(0, 131072, shape[:1])
    for _, grad in strided(torch.randn(shape).to(dtype)):
        check(op, {"grad_output": grad, "positions": positions})
    check(op, {"grad_output": torch.ones((), dtype=dtype).expand(shape), "positions": positions})


def test_a_gradient_is_wanted():
    with pytest.raises(CheckError, match="at least one gradient"):
        RoPENeoxPositionIdsBwdOp(16, wants_x=False)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1.0, 2, 0.5, 1e-3])
def test_every_base(base):
    op = RoPENeoxPositionIdsFwdOp(max_position=4096, base=base)
    check(op, {"x": torch.randn(9, 2, 16), "positions": torch.randint(0, 4096, (9,))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles_are_exact_at_any_position(dtype):
    positions = torch.tensor([0, 1, 1000, 4095, 65535, 65536, 99999, 131070, 131071, 2**24 + 1])
    x = torch.zeros(len(positions), 1, 128, dtype=dtype)
    x[..., :64] = 1  # the output is the cosines, then the sines
    result = RoPENeoxPositionIdsFwdOp(2**25)(x, positions)
    # float32: the sine is rounded once, from an exact angle. Had the angle been float32, it would
    # be off by 2**-7 at position 131071. float64: the angle itself is rounded, at 2**24 to 2**-29.
    bound = 2.0**-24 if dtype is torch.float32 else 2.0**-27
    for n, position in enumerate(positions.tolist()):
        for i in range(64):
            angle = position * 10000.0 ** (-2 * i / 128)
            assert abs(float(result[n, 0, i]) - math.cos(angle)) <= bound
            assert abs(float(result[n, 0, 64 + i]) - math.sin(angle)) <= bound


def test_position_0_copies():
    x = torch.randn(3, 2, 8)
    result = check(
        RoPENeoxPositionIdsFwdOp(16), {"x": x, "positions": torch.zeros(3, dtype=torch.int64)}
    )
    assert torch.equal(result, x)


def test_a_rotation_is_relative():
    # <rotate(q, m), rotate(k, n)> depends on m - n alone.
    op = RoPENeoxPositionIdsFwdOp(131072)
    q, k = torch.randn(1, 1, 64).double(), torch.randn(1, 1, 64).double()

    def product(m, n):
        return float((op(q, torch.tensor([m])) * op(k, torch.tensor([n]))).sum())

    assert product(5, 3) == pytest.approx(product(100_005, 100_003), rel=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_pairs(dtype):
    x = torch.randn(4, 2, 8).to(dtype)
    x[0, 0, 1], x[1, 1, 6], x[2, 0, 3], x[3] = math.nan, math.inf, -math.inf, -0.0
    op = RoPENeoxPositionIdsFwdOp(64)
    result = check(op, {"x": x, "positions": torch.tensor([1, 2, 3, 4])})
    assert int((~result.isfinite()).sum()) == 6, "each spoils the two of its pair"


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    x, positions = torch.randn(4, 3, 6).to(dtype), torch.tensor([3, 0, 60, 7])
    for rotary in (None, 4):
        op = RoPENeoxPositionIdsFwdOp(64, rotary_dim=rotary)
        for _, view in strided(x):
            for _, index in strided(positions):
                check(op, {"x": view, "positions": index})
        check(op, {"x": x[:1].expand(4, 3, 6), "positions": positions[1:2].expand(4)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: RoPENeoxPositionIdsFwdOp(),
        lambda: RoPENeoxPositionIdsFwdOp(0),
        lambda: RoPENeoxPositionIdsFwdOp(-1),
        lambda: RoPENeoxPositionIdsFwdOp(2**31 + 1),
        lambda: RoPENeoxPositionIdsFwdOp(1.5),
        lambda: RoPENeoxPositionIdsFwdOp(16, 0.0),
        lambda: RoPENeoxPositionIdsFwdOp(16, -1.0),
        lambda: RoPENeoxPositionIdsFwdOp(16, math.inf),
        lambda: RoPENeoxPositionIdsFwdOp(16, math.nan),
    ],
)
def test_constructor_domain(make):
    with pytest.raises(CheckError):
        make()


@pytest.mark.parametrize(
    ("rotary", "shape"),
    [(3, (1, 1, 8)), (0, (1, 1, 8)), (10, (1, 1, 8)), (None, (1, 1, 7)), (None, (1, 1, 0))],
)
def test_rotary_dim_domain(rotary, shape):
    with pytest.raises(CheckError, match="rotary_dim") as caught:
        RoPENeoxPositionIdsFwdOp(16, rotary_dim=rotary)(torch.randn(shape), torch.tensor([1]))
    assert caught.value.argument == "rotary_dim"


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool])
def test_positions_are_int32_or_int64(dtype):
    with pytest.raises(CheckError, match="'positions'.*dtype int32, int64"):
        RoPENeoxPositionIdsFwdOp(16)(torch.randn(2, 1, 4), torch.ones(2, dtype=dtype))
