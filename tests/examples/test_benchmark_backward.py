"""The benchmark of gradients does what it says, on a few elements and without a card."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import backward


@pytest.mark.parametrize("case", backward.CASES, ids=lambda case: f"{case.name}-{case.sizes[0]}")
def test_every_case_is_right(case):
    works = {"torch": case.torch, "tileops": case.tileops(*case.tiny)}
    inputs, incoming = backward.drawn(case, case.tiny, "cpu", torch.float32)
    found = backward.errors(works, inputs, incoming)
    assert found["tileops"] < 1e-5


def test_a_wrong_gradient_stops_it():
    case = backward.CASES[0]
    works = {"torch": case.torch, "wrong": lambda x, w: case.torch(x, w) * 1.001}
    with pytest.raises(SystemExit, match="wrong is wrong"):
        backward.errors(works, *backward.drawn(case, case.tiny, "cpu", torch.float32))


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    out = tmp_path / "backward.json"
    backward.main(
        ["RMSNorm", "GEMM", "--device", "cpu", "--tiny", "--rounds", "2", "--out", str(out)]
    )
    results = json.loads(out.read_text())["results"]
    assert [result["op"] for result in results] == ["RMSNorm", "RMSNorm", "GEMM"]
    for result in results:
        assert {"tileops", "torch", "inductor"} <= set(result["step_us"])
        assert result["best_rival"] in result["step_us"]
        assert result["tileops_over_best_rival"] > 0
