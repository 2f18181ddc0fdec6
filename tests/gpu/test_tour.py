"""docs/tour.md on a real card: the scripts that stand on a described one elsewhere print the same
kernels, and what no description can show happens."""

from __future__ import annotations

import re

import pytest
import torch

import tileops
from tests.contract.fresh import ROOT
from tests.explain import pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
SCRIPTS = [each for each in pages.scripts(ROOT / "docs" / "tour.md") if "on_a_card" in each.code]


def kernels(text: str) -> list[str]:
    """What each kernel is, in order: its kind and language."""
    kinds = "pointwise|reduction|template|extern|tileops"
    return re.findall(rf"^ {{4}}\S+\s+((?:{kinds})(?:, \w+)?):", text, re.MULTILINE)


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return pages.run(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_described_card_gets_what_a_real_one_gets(script, printed):
    assert kernels(printed[script.name]) == kernels(script.output)
    if pages.release() == pages.RELEASE:

        def code(text):
            return re.findall(r"^    tmp.*$", text, re.MULTILINE)

        assert code(printed[script.name]) == code(script.output)


def test_a_graph_without_a_cpu_tensor_is_recorded():
    """The page can only show how one is skipped."""

    def f(x):
        return torch.relu(x) + 1

    report = tileops.explain(f, torch.ones(4096, device="cuda"), mode="reduce-overhead")
    (only,) = report.compilations
    assert only.cuda_graphs is not None
    assert only.cuda_graphs.used is not False
    assert only.cuda_graphs.reason is None
