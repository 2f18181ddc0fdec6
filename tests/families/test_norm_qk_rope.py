"""Fused QK norm and RoPE: the op on the CPU, and its kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits
from tests.kernel_calls import builds_of, call_of, run_entry, shapes
from tests.oracle import check, exact
from tests.triton_interpreter import interpreted
from tileops import CheckError
from tileops.backend.tolerances import compare
from tileops.norm import FusedQKNormRoPEFwdOp

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def made(tokens, size, turned, heads=3, kv=2, layout="neox", dtype=torch.float32, angles=None):
    angles = angles or dtype
    inputs = {
        "qkv": torch.randn(tokens, (heads + 2 * kv) * size).to(dtype),
        "q_weight": torch.randn(size).to(dtype),
        "k_weight": torch.randn(size).to(dtype),
        "cos_sin_cache": torch.randn(50, turned).to(angles),
        "positions": torch.randint(0, 50, (tokens,)),
    }
    return FusedQKNormRoPEFwdOp(heads, kv, rope_layout=layout), inputs


def kernel():
    from tileops.norm.kernels.fused_qk_norm_rope import FusedQKNormRoPE

    return FusedQKNormRoPE


def call_for(op, inputs, **facts):
    dims = {
        "N": inputs["qkv"].shape[0],
        "W": inputs["qkv"].shape[1],
        "D": inputs["q_weight"].shape[0],
        "P": inputs["cos_sin_cache"].shape[0],
        "R": inputs["cos_sin_cache"].shape[1],
    }
    call = call_of(type(op).__name__, inputs, {}, params=op._params, written=("qkv",), **facts)
    object.__setattr__(call, "dims", dims)
    return call


@interpreted
def run_kernel(params, inputs):
    from tileops.norm import FusedQKNormRoPEFwdOp

    call = call_for(FusedQKNormRoPEFwdOp(**params), inputs)
    assert run_entry(kernel().entry_for(call), call, *inputs.values()) is None
    return inputs["qkv"]


SIZES = [(3, 8, 8), (5, 12, 6), (2, 128, 128), (3, 64, 2), (1, 37, 36), (0, 8, 4), (2, 2, 2)]


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize(("tokens", "size", "turned"), SIZES)
def test_op(tokens, size, turned, layout):
    for dtype, angles in (
        (torch.float32, None),
        (torch.bfloat16, torch.float32),
        (torch.float64, None),
    ):
        check(*made(tokens, size, turned, layout=layout, dtype=dtype, angles=angles))


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize(("tokens", "size", "turned"), SIZES)
def test_kernel(tokens, size, turned, layout):
    dtype = FLOATS[size % 3]
    op, inputs = made(tokens, size, turned, layout=layout, dtype=dtype, angles=FLOATS[turned % 3])
    _, written = exact(op, inputs)
    wanted = written["qkv"]
    if dtype is torch.bfloat16:  # the interpreter truncates where a card rounds
        wanted = torch.cat((wanted[:, : 5 * size] * (1 - 2.0**-9), wanted[:, 5 * size :]), 1)
    values = inputs["qkv"][:, 5 * size :].clone()
    result = run_kernel(op._params, inputs)
    found = compare(result, wanted, "reduction")
    assert found.ok, found.text
    assert torch.equal(result[:, 5 * size :], values)


def test_a_position_outside_reads_nothing():
    op, inputs = made(2, 8, 8)
    inputs["positions"] = torch.tensor([50, -1])
    assert not run_kernel(op._params, inputs)[:, :40].any()


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("qkv", lambda i: i | {"qkv": i["qkv"][:, :-1].contiguous()}),
        ("cos_sin_cache", lambda i: i | {"cos_sin_cache": torch.randn(50, 10)}),
        ("cos_sin_cache", lambda i: i | {"cos_sin_cache": torch.randn(50, 3)}),
        ("positions", lambda i: i | {"positions": torch.zeros(4, dtype=torch.int64)}),
        ("qkv", lambda i: i | {"qkv": i["qkv"].t().contiguous().t()}),
    ],
)
def test_domain(argument, change):
    op, inputs = made(3, 8, 8)
    with pytest.raises(CheckError) as caught:
        op(*change(inputs).values())
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("arch", "turned", "layout"),
    [
        (ARCHITECTURES[0], 128, "neox"),
        (ARCHITECTURES[1], 64, "interleaved"),
        (ARCHITECTURES[2], 128, "neox"),
    ],
)
def test_fits(arch, turned, layout):
    half = torch.bfloat16
    inputs = shapes(
        qkv=((64, 6144), half),
        q_weight=((128,), half),
        k_weight=((128,), half),
        cos_sin_cache=((40960, turned), half),
        positions=((64,), torch.int64),
    )
    call = call_for(FusedQKNormRoPEFwdOp(32, 8, rope_layout=layout), inputs, arch=arch)
    for build in builds_of(kernel().entry_for(call)):
        assert_fits(build, arch)
