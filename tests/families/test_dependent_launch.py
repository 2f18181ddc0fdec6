"""Kernels that may be launched before the stream's previous one has ended touch nothing before they wait,
and let the next one be launched early only where their programs are few.

The interpreter runs one kernel at a time. Here the previous one is what ``wait`` does: it writes the
inputs, which hold something else until then."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_calls import run_entry
from tests.op_kernels import cuda_call, entry_of
from tests.oracle import exact
from tests.triton_interpreter import interpreted
from tileops.backend.tolerances import compare
from tileops.elementwise import (
    AddFwdOp,
    ClampTensorFwdOp,
    GELUAndMulBwdOp,
    ReLUFwdOp,
    SiLUAndMulFwdOp,
)
from tileops.norm import FusedQKNormRoPEFwdOp
from tileops.rope import RoPEFwdOp, RoPENeoxPositionIdsFwdOp, RoPETablesFwdOp

HEADS = (1, 8, 4, 32)


def normal(*shape):
    return torch.randn(shape).half()


def integers(*shape):
    return torch.randint(0, 1000, shape)


CASES = {
    "few": lambda: (ReLUFwdOp(), 132, {"input": normal(40, 32)}),
    "many": lambda: (AddFwdOp(), 0, {"input": normal(1300), "other": normal(1300)}),
    "rows": lambda: (AddFwdOp(), 132, {"input": normal(30, 64), "other": normal(30, 1)}),
    "three": lambda: (ClampTensorFwdOp(), 132, {n: normal(64) for n in ("input", "min", "max")}),
    "gated": lambda: (SiLUAndMulFwdOp(), 132, {"input": normal(5, 64)}),
    "gated backward": lambda: (
        GELUAndMulBwdOp(), 132, {"grad_output": normal(5, 32), "input": normal(5, 64)}
    ),
    "sequences": lambda: (RoPEFwdOp(input_layout="2d"), 132, {"x": normal(*HEADS)}),
    "one sequence": lambda: (RoPEFwdOp(), 132, {"x": normal(30, 32)}),
    "positions": lambda: (
        RoPENeoxPositionIdsFwdOp(max_position=1000), 132, {"x": normal(8, 40, 64), "positions": integers(8)}
    ),
    "tables": lambda: (
        RoPETablesFwdOp(), 132, {"x": normal(*HEADS), "cos": normal(8, 1, 32), "sin": normal(8, 1, 32)}
    ),
    "queries and keys": lambda: (
        FusedQKNormRoPEFwdOp(num_heads=4, num_kv_heads=2, eps=1e-6), 132,
        {"qkv": normal(6, 8 * 32), "q_weight": normal(32), "k_weight": normal(32),
         "cos_sin_cache": normal(1000, 32), "positions": integers(6)},
    ),
}  # fmt: skip


@interpreted
def run_after_waiting(op, multiprocessors, inputs):
    from tileops.lib import dependent_triton

    before = {
        n: torch.full_like(t, 1 if t.dtype is torch.int64 else 7.0) for n, t in inputs.items()
    }
    call = cuda_call(op, before, (9, 0), multiprocessors)
    waited, released = [], []

    def wait():
        if not waited:
            for name, given in before.items():
                given.copy_(inputs[name])
        waited.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dependent_triton, "gdc_wait", wait)
        patch.setattr(dependent_triton, "gdc_launch_dependents", lambda: released.append(1))
        result = run_entry(entry_of(call, op), call, *before.values())
    return result, before, len(waited), len(released)


@pytest.mark.parametrize("case", CASES)
def test_waits_before_it_reads_and_releases(case):
    op, multiprocessors, inputs = CASES[case]()
    outputs, written = exact(op, {name: given.clone() for name, given in inputs.items()})
    result, after, waited, released = run_after_waiting(op, multiprocessors, inputs)
    ((result, wanted),) = [(after[name], wanted) for name, wanted in written.items()] or [
        (result, outputs[0])
    ]
    found = compare(result, wanted, op.entry.kind)
    assert waited
    assert released == (waited if multiprocessors else 0)
    assert found.ok, found.text
