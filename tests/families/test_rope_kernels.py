"""Rotary kernels: numerics in Triton's interpreter against float64, and what the compiler says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, poison, run_entry, shapes
from tests.oracle_rope import RATES
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
    from tileops.rope.kernels.rotate import Rotate

    call = rope_call(x, positions, multiprocessors=multiprocessors, **params)
    with poison():
        return run_entry(Rotate.candidates(call)[candidate], call, x, positions)


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
        ((19, 1, 64), 40),  # few heads: several tokens in a tile
        ((23, 3, 32), None),
        ((37, 4, 32), 20),  # whose heads share sines
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


# ---- whole sequences -------------------------------------------------------------------------------


def sequence_call(x, op, input_layout, gradient=False, **facts):
    real = isinstance(x, torch.Tensor)
    shape, dtype = (tuple(x.shape), x.dtype) if real else x
    specs = shapes(x.device if real else torch.device("cuda", 0), x=(shape, dtype))
    name, params = op
    params = {"input_layout": input_layout, **params, **({"wants_x": True} if gradient else {})}
    turned, result = ("grad_output", "grad_x") if gradient else ("x", "output")
    inputs, outputs = {turned: x if real else specs["x"]}, {result: specs["x"]}
    return call_of(
        f"{name}{'Bwd' if gradient else 'Fwd'}Op", inputs, outputs, params=params, **facts
    )


NEOX = ("RoPE", {"rope_layout": "neox", "base": 10000.0})
INTERLEAVED = ("RoPE", {"rope_layout": "interleaved", "base": 500000.0})
LLAMA31 = (
    "RoPELlama31",
    {
        "base": 10000.0,
        "scaling_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 64,
    },
)
YARN = (
    "YaRN",
    {
        "base": 10000.0,
        "scaling_factor": 16.0,
        "original_max_position": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attn_factor": 1.0,
    },
)
LONG = ("LongRoPE", {
    "base": 10000.0, "rescale_factors": (1.0, 1.5, 3.0, 64.0), "max_position": 131072,
    "original_max_position": 4096})  # fmt: skip


@interpreted
def run_sequence(x, op, input_layout, gradient, candidate=0, **facts):
    from tileops.rope.kernels import rotate

    call = sequence_call(x, op, input_layout, gradient, **facts)
    kernel = rotate.Rotate
    assert kernel.refuses(call) is None
    with poison():
        return run_entry(kernel.candidates(call)[candidate], call, x)


def sequence64(x, op, input_layout, gradient):
    name, params = op
    params = SimpleNamespace(**params)
    rates, scale = RATES[name](params, x.shape[-1])
    places = torch.arange(x.shape[0 if input_layout == "1d" else 1], dtype=torch.float64)
    turns = places[:, None] * torch.tensor(rates, dtype=torch.float64) * (-1 if gradient else 1)
    if input_layout == "2d":
        turns = turns[:, None]
    interleaved = getattr(params, "rope_layout", "neox") == "interleaved"
    half, values = x.shape[-1] // 2, x.double()
    places = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    )
    left, right = (values[..., place] for place in places)
    result = torch.empty_like(values)
    result[..., places[0]] = scale * (left * turns.cos() - right * turns.sin())
    result[..., places[1]] = scale * (right * turns.cos() + left * turns.sin())
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [NEOX, INTERLEAVED], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    "shape",
    [
        (0, 8),
        (1, 2),
        (61, 24),  # neither half is a power of two, nor do rows fill a tile
        (130, 64),
        (2, 5, 3, 16),
        (3, 70, 1, 6),  # few heads: a tile holds several sequences
        (2, 41, 3, 64),  # rows of a tile end within a token
        (1, 5, 8, 128),  # fewer rows than a tile could hold
        (2, 0, 3, 8),
        (1, 2, 19, 128),
    ],
    ids=str,
)
def test_sequences(shape, op, dtype):
    x, layout = torch.randn(shape).to(dtype), "1d" if len(shape) == 2 else "2d"
    check(run_sequence(x, op, layout, False), sequence64(x, op, layout, False))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("op", [NEOX, INTERLEAVED, LLAMA31, YARN, LONG], ids=lambda op: op[0])
@pytest.mark.parametrize("shape", [(300, 8), (1, 31, 2, 8)], ids=str)
def test_spectra(shape, op, gradient):
    x, layout = torch.randn(shape), "1d" if len(shape) == 2 else "2d"
    check(run_sequence(x, op, layout, gradient), sequence64(x, op, layout, gradient))


@pytest.mark.parametrize("op", [NEOX, INTERLEAVED], ids=["neox", "interleaved"])
@pytest.mark.parametrize("candidate", range(3))
def test_candidates_for_sequences(candidate, op):
    for shape in ((40, 128), (1, 3, 40, 128)):
        x, layout = torch.randn(shape), "1d" if len(shape) == 2 else "2d"
        check(run_sequence(x, op, layout, False, candidate), sequence64(x, op, layout, False))


def test_what_the_table_decides_is_not_in_the_machine_code():
    from tileops.rope.kernels import rotate

    def machine_code(op, layout="2d", gradient=False, length=4096):
        call = sequence_call(((1, length, 32, 128), torch.bfloat16), op, layout, gradient)
        return builds_of(rotate.Rotate.entry_for(call))[0].identity

    one = machine_code(NEOX)
    assert {machine_code(YARN), machine_code(LLAMA31), machine_code(NEOX, gradient=True)} == {one}
    assert machine_code(NEOX, length=17) == one
    assert machine_code(INTERLEAVED) != one


def test_rates_that_are_not_finite_are_refused():
    from tileops.rope.kernels.rotate import Rotate

    op = ("LongRoPE", {**LONG[1], "rescale_factors": (0.0, 1.0)})
    call = sequence_call(((7, 4), torch.float32), op, "1d")
    assert "finite" in str(Rotate.refuses(call))


# ---- heads, candidates, compilation ------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_heads_in_one_program_or_several(multiprocessors):
    x, positions = torch.randn(4, 37, 64), torch.arange(4) * 1001
    check(run_rope(x, positions, multiprocessors=multiprocessors), rope64(x, positions))


@pytest.mark.parametrize("candidate", range(3))
def test_candidates(candidate):
    x, positions = torch.randn(2, 40, 128), torch.tensor([77, 4095])
    check(run_rope(x, positions, candidate), rope64(x, positions))


def test_batch_size_is_not_in_the_identity():
    from tileops.rope.kernels.rotate import Rotate

    def identity(tokens, base=1e4):
        call = rope_call(((tokens, 32, 128), torch.bfloat16), torch.int32, base=base)
        return Rotate.entry_for(call).identity

    assert identity(1) == identity(8192)
    assert identity(1) != identity(1, 5e5)


def compiles(shape, dtype, index, rotary, arch):
    from tileops.rope.kernels.rotate import Rotate

    call = rope_call((shape, dtype), index, rotary_dim=rotary, arch=arch)
    for entry in Rotate.candidates(call):
        (build,) = builds_of(entry)
        assert_fits(build, arch)
    return builds_of(Rotate.entry_for(call))[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_to_wide_accesses(arch):
    code = sass(compiles((32, 32, 128), torch.bfloat16, torch.int32, None, arch), arch)
    assert "LDG.E.128" in code
    assert "STG.E.128" in code


def compiles_sequence(shape, dtype, op, arch, candidates=1):
    from tileops.rope.kernels.rotate import Rotate

    call = sequence_call((shape, dtype), op, "1d" if len(shape) == 2 else "2d", arch=arch)
    builds = [builds_of(entry)[0] for entry in Rotate.candidates(call)[:candidates]]
    for build in builds:
        assert_fits(build, arch)
    return builds[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", [NEOX, INTERLEAVED], ids=["neox", "interleaved"])
@pytest.mark.parametrize("shape", [(8192, 128), (1, 4096, 32, 128)], ids=str)
def test_sequences_compile_to_wide_accesses(shape, op, arch):
    code = sass(compiles_sequence(shape, torch.bfloat16, op, arch), arch)
    assert "LDG.E.128" in code
    assert "STG.E.128" in code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("op", [NEOX, INTERLEAVED], ids=["neox", "interleaved"])
@pytest.mark.parametrize("shape", [(2048, 64), (2, 2048, 16, 64), (1, 8192, 32, 96)], ids=str)
def test_sequences_compile(shape, op, dtype, arch):
    compiles_sequence(shape, dtype, op, arch, 3)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "rotary"), [(128, None), (96, 40), (576, 512), (7, 6), (64, 64)])
def test_compiles(width, rotary, dtype, arch):
    compiles((32, 32, width), dtype, torch.int64, rotary, arch)
