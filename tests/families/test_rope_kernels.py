"""Rotary kernels: numerics in Triton's interpreter against float64, and what the compiler says."""

from __future__ import annotations

import math

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, poison, run_entry, shapes
from tests.triton_interpreter import interpreted

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Of inputs below about 4: one rounding to the dtype; float32 sine and cosine are within 1.2e-7.
TOLERANCE = {
    torch.float16: {"rtol": 2**-10, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-6},
    torch.float32: {"rtol": 1e-6, "atol": 2e-6},
}


def rope_call(
    x, positions, max_position=131072, base=10000.0, rotary_dim=None, gradient=False, **facts
):
    real = isinstance(x, torch.Tensor)
    shape, dtype = (tuple(x.shape), x.dtype) if real else x
    device = x.device if real else torch.device("cuda", 0)
    specs = shapes(device, x=(shape, dtype), output=(shape, dtype))
    if not real:
        x, positions = specs["x"], shapes(p=((shape[0],), positions))["p"]
    params = {"max_position": max_position, "base": base, "rotary_dim": rotary_dim}
    if gradient:
        inputs, outputs = {"grad_output": x, "positions": positions}, {"grad_x": specs["output"]}
        params["wants_x"] = True
        return call_of("RoPENeoxPositionIdsBwdOp", inputs, outputs, params=params, **facts)
    inputs, outputs = {"x": x, "positions": positions}, {"output": specs["output"]}
    return call_of("RoPENeoxPositionIdsFwdOp", inputs, outputs, params=params, **facts)


@interpreted
def run_rope(x, positions, candidate=0, multiprocessors=132, **params):
    from tileops.rope.kernels.rotate import Plain

    call = rope_call(x, positions, multiprocessors=multiprocessors, **params)
    with poison():
        return run_entry(Plain.candidates(call)[candidate], call, x, positions)


def rope64(x, positions, base=10000.0, rotary_dim=None):
    rotary = rotary_dim or x.shape[-1]
    power = torch.arange(rotary // 2, dtype=torch.float64) * (-2.0 / rotary)
    angle = positions.double()[:, None, None] * base**power
    left, right, tail = x.double().split([rotary // 2, rotary // 2, x.shape[-1] - rotary], -1)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine, tail], -1)


def check(actual, expected):
    torch.testing.assert_close(actual, expected.to(actual.dtype), **TOLERANCE[actual.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("shape", "rotary"),
    [
        ((0, 2, 8), None),
        ((2, 0, 8), None),
        ((1, 1, 2), None),
        ((3, 5, 128), None),  # heads do not fill a tile
        ((2, 19, 64), 64),  # several tiles of heads
        ((2, 3, 96), 40),  # neither half nor tail is a power of two
        ((2, 3, 7), 6),
        ((2, 3, 576), 512),
        ((19, 1, 64), 40),  # one head: several tokens in a tile
    ],
)
def test_rope(shape, rotary, index, dtype):
    x = torch.randn(shape).to(dtype)
    positions = torch.randint(0, 131072, shape[:1]).to(index)
    before = x.clone()
    check(run_rope(x, positions, rotary_dim=rotary), rope64(x, positions, rotary_dim=rotary))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("shape", "rotary"), [((3, 5, 96), 40), ((5, 1, 64), None), ((0, 2, 8), None)]
)
def test_the_gradient_turns_back(shape, rotary):
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    positions, grad = torch.randint(0, 131072, shape[:1]), torch.randn(shape)
    (expected,) = torch.autograd.grad(
        rope64(x, positions, rotary_dim=rotary), x, grad.double(), allow_unused=True
    )
    check(run_rope(grad, positions, rotary_dim=rotary, gradient=True), expected)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1.0, 0.5, 1e-3])
def test_angles_are_exact_at_any_position(base):
    # Rates of a base below 1 grow to 1 / base: at 2^24 turns of 1000 radians the angle in float64, the
    # oracle's own, is off by as much as the tolerance.
    last = 2**24 + 1 if base > 0.01 else 2**17 + 1
    positions = torch.tensor([0, 1, 2, 3, 1000, 65535, 131071, last])
    x = torch.randn(len(positions), 1, 128)
    check(run_rope(x, positions, base=base), rope64(x, positions, base))


def test_every_eighth_of_a_turn():
    # One feature pair of one radian each position: positions near multiples of an eighth of a turn.
    near = [k * math.pi / 4 for k in range(0, 4000, 61)]
    positions = torch.tensor(sorted({max(round(a) + d, 0) for a in near for d in (-1, 0, 1)}))
    x = torch.randn(len(positions), 1, 2)
    check(run_rope(x, positions), rope64(x, positions))


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_heads_in_one_program_or_several(multiprocessors):
    x, positions = torch.randn(4, 37, 64), torch.arange(4) * 1001
    check(run_rope(x, positions, multiprocessors=multiprocessors), rope64(x, positions))


@pytest.mark.parametrize("candidate", range(3))
def test_candidates(candidate):
    x, positions = torch.randn(2, 40, 128), torch.tensor([77, 4095])
    check(run_rope(x, positions, candidate), rope64(x, positions))


def test_batch_size_is_not_in_the_identity():
    from tileops.rope.kernels.rotate import Plain

    def identity(tokens, base=1e4):
        call = rope_call(((tokens, 32, 128), torch.bfloat16), torch.int32, base=base)
        return Plain.entry_for(call).identity

    assert identity(1) == identity(8192)
    assert identity(1) != identity(1, 5e5)


def compiles(shape, dtype, index, rotary, arch):
    from tileops.rope.kernels.rotate import Plain

    call = rope_call((shape, dtype), index, rotary_dim=rotary, arch=arch)
    for entry in Plain.candidates(call):
        (build,) = builds_of(entry)
        assert_fits(build, arch)
    return builds_of(Plain.entry_for(call))[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_to_wide_accesses(arch):
    code = sass(compiles((32, 32, 128), torch.bfloat16, torch.int32, None, arch), arch)
    assert "LDG.E.128" in code
    assert "STG.E.128" in code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "rotary"), [(128, None), (96, 40), (576, 512), (7, 6), (64, 64)])
def test_compiles(width, rotary, dtype, arch):
    compiles((32, 32, width), dtype, torch.int64, rotary, arch)
