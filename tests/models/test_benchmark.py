"""The benchmark of whole models does what it says, on small ones and without a card."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import model_cases, models


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def case_of(name: str, device: str = "cpu") -> model_cases.Case:
    return next(c for c in model_cases.cases(device, tiny=True) if c.name == name)


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    out = tmp_path / "models.json"
    models.main(["SmolLM2, decode", "--tiny", "--rounds", "2", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["left_out"] == []
    (result,) = report["results"]
    assert result["case"] == "SmolLM2, decode"
    for name in ("eager", "inductor", "tileops"):
        row = result[name]
        assert min(row["ms"], row["ratio"], row["peak_mib"], row["first_call_s"]) >= 0
        assert row["error"] < 1e-4
    assert result["inductor"]["ratio"] == 1.0
    assert result["tileops"]["rewritten"]["inlined"] == 8  # products of one row


def test_a_run_that_is_out_of_time_says_what_it_left_out(tmp_path):
    out = tmp_path / "models.json"
    models.main(["--tiny", "--seconds", "-1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["results"] == []
    assert report["left_out"] == [c.name for c in model_cases.cases("cpu", tiny=True)]


def test_a_wrong_model_stops_it(monkeypatch):
    case = case_of("SmolLM2, prefill")

    def wrong(run, **_):
        return lambda **given: (run(**given)[0] * 1.01,)

    monkeypatch.setattr(torch, "compile", wrong)
    with torch.no_grad(), pytest.raises(SystemExit, match="inductor is wrong by 0.01"):
        models._contenders(case)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_layers_made_of_ops_are_the_layers(train):
    """What the card's run times as ``ops``, in bfloat16 as there."""
    model = model_cases._layers(2, "cpu", tiny=True)
    plain, step, ops = model_cases._hidden(model, 16, train)
    with torch.set_grad_enabled(train):
        error = models._off(step(ops), step(plain))
    assert error < models.ERROR[torch.bfloat16]


@pytest.mark.slow
def test_decoding_repeats_one_step():
    """The cache does not fill up while it is timed."""
    model, step, _ = model_cases._decode(model_cases._layers(1, "cpu", tiny=True), 2, 16)
    with torch.no_grad():
        first = step(model).clone()
        assert first.shape == (2, 1, 48)
        assert torch.equal(step(model), first)
