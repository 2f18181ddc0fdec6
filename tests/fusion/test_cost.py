"""The rule by which an op keeps its own kernel, at its borders."""

from __future__ import annotations

import pytest
import torch

from tests.rewriting import rewritten
from tileops.fusion import cost
from tileops.fusion.cost import Estimate
from tileops.norm import RMSNormFwdOp
from tileops.rope import RoPEFwdOp


def test_it_weighs_what_fusion_saves_against_the_kernels_advantage():
    advantage, overhead = cost.ADVANTAGE["cuda"]["reduction"], cost.OVERHEAD["cuda"]
    moved = 1 << 30
    needed = int(advantage * moved) - overhead
    assert needed > 0
    assert not Estimate(moved, 0, "cuda", "reduction").inlining_pays
    assert not Estimate(moved, needed - 1, "cuda", "reduction").inlining_pays
    assert Estimate(moved, needed + 1, "cuda", "reduction").inlining_pays
    assert Estimate(overhead, 0, "cuda", "reduction").inlining_pays  # the host is what it costs
    assert Estimate(moved, 0, "cpu", "reduction").inlining_pays


def test_what_neighbours_save(monkeypatch):
    """4096 bytes in and out: written and read less for a neighbour that has it alone, read less for one
    that shares it; nothing for a matrix product."""
    norm, x = RMSNormFwdOp(32), torch.randn(32, 32)

    def saved(function):
        run, seen = rewritten(function)
        run(x)
        (data,) = seen.report.of("inlined")
        return data["why"]

    assert saved(lambda x: norm(x)) == "fusion saves 0 of 8192 bytes"
    assert saved(lambda x: norm(x @ x) @ x) == "fusion saves 0 of 8192 bytes"
    assert saved(lambda x: norm(x) * 2) == "fusion saves 8192 of 8192 bytes"
    assert saved(lambda x: norm(x * 2) @ x) == "fusion saves 8192 of 8192 bytes"

    def shared(x):
        y = norm(x)
        return y * 2, y @ x

    assert saved(shared) == "fusion saves 4096 of 8192 bytes"
    monkeypatch.setitem(cost.ADVANTAGE, "cpu", {"reduction": 0.1})
    run, seen = rewritten(lambda x: norm(x @ x) @ x)
    run(x)
    assert seen.declined() == {
        "RMSNormFwdOp": "its own kernel is faster: fusion saves 0 of 8192 bytes"
    }


@pytest.mark.parametrize(("dtype", "stays"), [(torch.float32, True), (torch.float64, False)])
def test_steps_in_float64_keep_the_kernel_where_they_are_slow(monkeypatch, dtype, stays):
    norm, rope = RMSNormFwdOp(32), RoPEFwdOp(input_layout="1d")
    x = torch.randn(4, 32, dtype=dtype)
    if dtype is torch.float64:
        rope = RMSNormFwdOp(32, eps=0.5)
    monkeypatch.setattr(cost, "SLOW_IN_FLOAT64", ("cpu",))
    run, seen = rewritten(lambda x: rope(norm(x)) * 2)
    torch.testing.assert_close(run(x), rope(norm(x)) * 2)
    expected = "its own kernel is faster: its decomposition computes in float64"
    assert seen.declined() == ({"RoPEFwdOp": expected} if stays else {})
    assert "RMSNormFwdOp" in seen.inlined()
