"""Rotations of whole sequences on the CPU: RoPE, Llama 3.1, YaRN, LongRoPE, and their gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import check, same_bits, strided
from tests.oracle_rope import RATES
from tileops import CheckError, rope
from tileops.rope import LongRoPEFwdOp, RoPEBwdOp, RoPEFwdOp, RoPELlama31FwdOp, YaRNFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["neox", "interleaved"]
NAMES = ["RoPE", "RoPELlama31", "YaRN", "LongRoPE"]
SHORT = {"RoPELlama31": {"original_max_position": 64}, "YaRN": {"original_max_position": 64}}
"""Contexts so short that few positions tell the spectra apart."""


def both(name, **params):
    """The op and the op of its gradient."""
    return [
        getattr(rope, f"{name}{way}Op")(**SHORT.get(name, {}), **params) for way in ("Fwd", "Bwd")
    ]


def hold(op, x):
    return check(op, {op.entry.inputs[0].name: x})


SHAPES = [(1, 2), (0, 8), (37, 6), (9, 130), (2, 5, 3, 8), (1, 1, 1, 2), (0, 3, 2, 4), (2, 0, 2, 4),
          (2, 3, 0, 4), (3, 11, 1, 6)]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(name, shape):
    for op in both(name, input_layout="1d" if len(shape) == 2 else "2d"):
        hold(op, torch.randn(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_and_strides(layout, dtype):
    for op in both("RoPE", rope_layout=layout, input_layout="2d"):
        for _, view in strided(torch.randn(2, 5, 3, 8).to(dtype)):
            hold(op, view)
        hold(op, torch.randn(1, 1, 1, 1).to(dtype).expand(2, 5, 3, 8))
    for op in both("RoPE", rope_layout=layout):
        for _, view in strided(torch.randn(7, 6).to(dtype)):
            hold(op, view)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from(NAMES),
    st.one_of(
        st.tuples(st.integers(0, 40), st.integers(1, 20)),
        st.tuples(*(st.integers(0, 5) for _ in range(3)), st.integers(1, 9)),
    ),
    st.permutations(range(4)),
    st.sampled_from(DTYPES),
)
def test_any_shape_and_order_of_axes(name, shape, order, dtype):
    shape = (*shape[:-1], 2 * shape[-1])
    order = [axis for axis in order if axis < len(shape)]
    x = torch.randn([shape[axis] for axis in order]).to(dtype)
    x = x.permute([order.index(axis) for axis in range(len(shape))])
    assert x.shape == shape
    for op in both(name, input_layout="1d" if len(shape) == 2 else "2d"):
        hold(op, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles_are_exact_at_any_place(dtype):
    x = torch.zeros(2**17 + 3, 4, dtype=dtype)
    x[:, :2] = 1  # the output is the cosines, then the sines
    result = RoPEFwdOp()(x)
    bound = 2.0**-24 if dtype is torch.float32 else 2.0**-35
    for place in (0, 1, 1000, 65535, 65536, 131071, 131074):
        for i in range(2):
            angle = place * 10000.0 ** (-2 * i / 4)
            assert abs(float(result[place, i]) - math.cos(angle)) <= bound
            assert abs(float(result[place, 2 + i]) - math.sin(angle)) <= bound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_depends_on_its_place_alone(layout):
    x = torch.randn(2, 33, 3, 16, dtype=torch.bfloat16)
    op = RoPEFwdOp(layout, "2d")
    whole = op(x)
    for end in (1, 2, 17, 32):
        assert same_bits(op(x[:1, :end]), whole[:1, :end])
    assert same_bits(RoPEFwdOp(layout)(x[1, :, 2]), whole[1, :, 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_special_values_stay_in_their_pairs(layout, dtype):
    x = torch.randn(5, 8).to(dtype)
    x[1, 1], x[2, 6], x[3, 3], x[4] = math.nan, math.inf, -math.inf, -0.0
    result = hold(RoPEFwdOp(layout), x)
    assert int((~result.isfinite()).sum()) == 6, "each spoils the two of its pair"


def test_a_gradient_turns_back():
    x = torch.randn(3, 9, 2, 8, dtype=torch.float64)
    there = RoPEFwdOp("interleaved", "2d")(x)
    torch.testing.assert_close(RoPEBwdOp("interleaved", "2d")(there), x)


# ---- spectra -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        *(RoPEFwdOp(base=base) for base in (500000.0, 1.0, 2, 0.5, 1e-3)),
        *(
            RoPELlama31FwdOp(base=base, original_max_position=n)
            for base in (1e4, 5e5)
            for n in (8, 8192)
        ),
        RoPELlama31FwdOp(scaling_factor=0.5, low_freq_factor=0.25, high_freq_factor=32.0),
        RoPELlama31FwdOp(scaling_factor=math.inf, original_max_position=16),
        *(YaRNFwdOp(base=base, scaling_factor=by) for base in (1e4, 1e6) for by in (0.5, 1.0, 4.0)),
        YaRNFwdOp(original_max_position=1, attn_factor=0.5),
        YaRNFwdOp(beta_fast=1.0, beta_slow=32.0),
        YaRNFwdOp(beta_fast=1e-300, beta_slow=1e300),
        YaRNFwdOp(beta_fast=2.0, beta_slow=2.0, attn_factor=-1.0),
        YaRNFwdOp(base=0.5),
        LongRoPEFwdOp(rescale_factors=[1, 1.5, 2.5, 4, 8, 12, 30, 64.0]),
        LongRoPEFwdOp(max_position=131072),
        LongRoPEFwdOp(max_position=2, original_max_position=1024),
        LongRoPEFwdOp(rescale_factors=(0.5,) * 8, max_position=3, original_max_position=2),
    ],
    ids=repr,
)
def test_spectra(op):
    hold(op, torch.randn(300, 16))
    hold(op, torch.randn(40, 16, dtype=torch.float64))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda f: torch.tensor(f).bfloat16()])
def test_factors_as_list_or_tensor(kind):
    factors = [1.0, 1.5, 3.0, 64.0]
    op = LongRoPEFwdOp(rescale_factors=kind(factors))
    assert op == LongRoPEFwdOp(rescale_factors=factors)
    assert op.rescale_factors == tuple(factors)


PUBLISHED = {
    "RoPELlama31": ("llama3", RoPELlama31FwdOp(base=5e5), {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}),
    "YaRN": ("yarn", YaRNFwdOp(base=1e6, scaling_factor=4.0, original_max_position=32768), {
        "factor": 4.0, "original_max_position_embeddings": 32768}),
    "LongRoPE": ("longrope", LongRoPEFwdOp(
        rescale_factors=[1.0 + i / 8 for i in range(64)], max_position=131072), {
        "long_factor": [1.0 + i / 8 for i in range(64)], "short_factor": [1.0] * 64,
        "original_max_position_embeddings": 4096}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_oracle_agrees_with_published_code(name):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    kind, op, parameters = PUBLISHED[name]
    parameters = {"rope_type": kind, "rope_theta": op.base, **parameters}
    config = SimpleNamespace(
        rope_parameters=parameters, head_dim=128, max_position_embeddings=131072,
        hidden_size=128, num_attention_heads=1, standardize_rope_params=lambda: None,
    )  # fmt: skip
    theirs, scale = rope_utils.ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), seq_len=131072
    )
    rates, ours = RATES[name](op, 128)
    torch.testing.assert_close(torch.tensor(rates).float(), theirs, rtol=1e-5, atol=0)
    assert ours == pytest.approx(scale)


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: RoPEFwdOp("gpt"), "rope_layout"),
        (lambda: RoPEFwdOp(input_layout="3d"), "input_layout"),
        *(
            (lambda base=base: RoPEFwdOp(base=base), "base")
            for base in (0.0, -1.0, math.inf, math.nan)
        ),
        (lambda: RoPELlama31FwdOp(scaling_factor=0.0), "scaling_factor"),
        (lambda: RoPELlama31FwdOp(low_freq_factor=math.nan), "low_freq_factor"),
        (lambda: RoPELlama31FwdOp(high_freq_factor=0.0), "high_freq_factor"),
        (lambda: RoPELlama31FwdOp(low_freq_factor=4.0), "high_freq_factor"),
        (lambda: YaRNFwdOp(base=1.0), "base"),
        (lambda: YaRNFwdOp(scaling_factor=0.0), "scaling_factor"),
        (lambda: YaRNFwdOp(original_max_position=0), "original_max_position"),
        (lambda: YaRNFwdOp(beta_fast=math.inf), "beta_fast"),
        (lambda: YaRNFwdOp(beta_slow=-1.0), "beta_slow"),
        (lambda: LongRoPEFwdOp(max_position=0), "max_position"),
        (lambda: LongRoPEFwdOp(original_max_position=0), "original_max_position"),
        (lambda: LongRoPEFwdOp(original_max_position=1), "original_max_position"),
        (lambda: LongRoPEFwdOp(rescale_factors=[1.0, 2.0])(torch.randn(3, 6)), "rescale_factors"),
        (lambda: RoPEFwdOp()(torch.randn(3, 5)), "x"),
        (lambda: RoPEFwdOp()(torch.randn(3, 0)), "x"),
        (lambda: RoPEFwdOp()(torch.randn(1, 3, 2, 4)), "x"),
        (lambda: RoPEFwdOp(input_layout="2d")(torch.randn(3, 4)), "x"),
        (lambda: RoPEFwdOp()(torch.ones(3, 4, dtype=torch.int32)), "x"),
        (lambda: RoPEBwdOp(wants_x=False), "wants_x"),
    ],
)
def test_domain(make, argument):
    with pytest.raises(CheckError) as caught:
        make()
    assert caught.value.argument == argument


def test_rates_that_are_not_finite_give_nan():
    result = LongRoPEFwdOp(rescale_factors=[0.0, 1.0])(torch.ones(3, 4))
    assert result[:, 0::2].isnan().all()
    assert result[:, 1::2].isfinite().all()
