"""Gated activations and their gradients: kernels in Triton's interpreter, and what the compiler says."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, misaligned
from tests.op_kernels import check_kernel, cuda_call, entry_of, prepared
from tileops.elementwise import (
    GELUAndMulBwdOp,
    GELUAndMulFwdOp,
    SiLUAndMulBwdOp,
    SiLUAndMulFwdOp,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FORWARD = [SiLUAndMulFwdOp(), GELUAndMulFwdOp(), GELUAndMulFwdOp(approximate="tanh")]
BACKWARD = [SiLUAndMulBwdOp(), GELUAndMulBwdOp(), GELUAndMulBwdOp(approximate="tanh")]
# Rows: none, empty, several to a tile (odd, prime, even), one to a tile, and several tiles to a row.
SHAPES = [(0, 8), (5, 0), (1, 1), (67, 13), (33, 96), (2, 2050)]


def inputs_of(op, shape, dtype):
    """Of an op of this family, for ``[*M, N]``."""
    x = (torch.randn(*shape[:-1], 2 * shape[-1]) * 2).to(dtype)
    backward = "grad_output" in {item.name for item in op.entry.inputs}
    return {"grad_output": torch.randn(shape).to(dtype), "input": x} if backward else {"input": x}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", [FORWARD[0], BACKWARD[0]], ids=str)
def test_shapes(op, shape):
    for dtype in DTYPES:
        check_kernel(op, inputs_of(op, shape, dtype))


@pytest.mark.parametrize("op", [*FORWARD, *BACKWARD], ids=str)
@pytest.mark.parametrize("shape", [(10,), (2, 3, 10), (2, 0, 10)])
def test_activations_with_any_leading_axes(op, shape):
    check_kernel(op, inputs_of(op, shape, torch.float32))


@pytest.mark.parametrize("op", [*FORWARD, *BACKWARD], ids=str)
def test_numbers_of_every_size(op):
    gate = torch.tensor([0.0, -0.0, 1e-7, 5.0, -5.0, 30.0, -30.0, 88.0, -88.0, -104.0, 3e4])
    x = torch.cat((gate, torch.linspace(-2, 2, len(gate))))
    inputs = {**inputs_of(op, gate.shape, torch.float32), "input": x}
    assert check_kernel(op, inputs).isfinite().all()
    inputs["input"][3] = torch.nan
    assert check_kernel(op, inputs)[3].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", BACKWARD[:2], ids=str)
def test_slopes_at_every_number_of_16_bits(op, dtype):
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    # Triton's interpreter converts the bfloat16 below 2**-126 wrongly.
    gate = gate[gate.isfinite() & (gate.abs() >= 2.0**-126)]
    # Those around the zero of GELU's slope by themselves: large ones allow errors beside them.
    for some in (gate, gate[(gate < 0) & (gate > -2)]):
        ones = torch.ones_like(some)
        check_kernel(op, {"grad_output": ones, "input": torch.cat((some, ones))})


@pytest.mark.parametrize("candidate", range(5))
@pytest.mark.parametrize("op", [FORWARD[0], BACKWARD[0]], ids=str)
def test_candidates(op, candidate):
    check_kernel(op, inputs_of(op, (7, 5008), torch.float16), candidate)


@pytest.mark.parametrize("op", [FORWARD[0], BACKWARD[0]], ids=str)
def test_what_decides_a_build(op):
    def build(inputs):
        (made,) = builds_of(entry_of(cuda_call(op, inputs), op))
        return made

    first = build(inputs_of(op, (3, 64), torch.float16))
    assert build(inputs_of(op, (77, 64), torch.float16)).identity == first.identity
    assert first.aligned == tuple(name for name, kind in first.signature if kind == "*fp16")
    odd = inputs_of(op, (3, 64), torch.float16)
    odd["input"] = misaligned(odd["input"])
    assert set(first.aligned) - set(build(odd).aligned) == {"input"}
    with pytest.raises(AssertionError, match="float64"):
        build(inputs_of(op, (3, 64), torch.float64))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", [FORWARD[0], BACKWARD[0]], ids=str)
def test_compiles_to_wide_accesses(op, arch):
    meta = {
        item.name: torch.empty(
            64, 28672 if item.name == "input" else 14336, dtype=torch.bfloat16, device="meta"
        )
        for item in op.entry.inputs
    }
    (build,) = builds_of(entry_of(cuda_call(op, meta, arch), op))
    # 64 registers or fewer: half the threads of a multiprocessor, which hide memory's latency.
    assert assert_fits(build, arch).registers <= 64
    code = sass(build, arch)
    assert code.count("LDG.E.128") == (2 if op in FORWARD else 3)
    assert code.count("STG.E.128") == (1 if op in FORWARD else 2)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", [FORWARD[0], FORWARD[1], BACKWARD[0], BACKWARD[1]], ids=str)
def test_compiles_every_workload(op, arch):
    for workload in op.entry.workloads:
        prepared(type(op), workload, arch)
