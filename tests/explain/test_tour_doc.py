"""docs/tour.md: each script runs, and prints what the page says.

``python -m tests.explain.test_tour_doc`` writes today's outputs into the page.
"""

from __future__ import annotations

import re

import pytest

from tests.contract.fresh import ROOT
from tests.explain import pages

PAGE = ROOT / "docs" / "tour.md"
SCRIPTS = pages.scripts(PAGE)


def test_every_python_block_is_a_script_with_an_output():
    assert PAGE.read_text().count("```python\n") == len(SCRIPTS)
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS)
    assert all(script.output for script in SCRIPTS)


def test_functions_are_of_ten_lines():
    for script in SCRIPTS:
        for body in re.findall(r"^def f\(.*\n(?:    .*\n)+", script.code, re.MULTILINE):
            assert body.count("\n") <= 10, script.name


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return pages.run(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_page_shows_what_its_scripts_print(script, printed):
    pages.skip_where_outputs_differ(script)
    assert printed[script.name] == script.output


@pytest.mark.slow
def test_what_the_text_says_of_the_outputs(printed):
    """Facts that hold on any release, written from the text."""
    assert printed["backend.py"].count("call_function") == 3
    assert "unrolled 3 times" in printed["loop.py"]
    assert "4 graphs, 2 breaks" in printed["breaks.py"]
    assert "print" in printed["fullgraph.py"]
    assert printed["guards.py"].count("instead of 0/0") == 4
    assert printed["dispatch.py"].index("AutogradCPU kernel") < printed["dispatch.py"].index(
        "CPU kernel,"
    )
    assert printed["inplace.py"].count("copy_: ") == 1
    assert "recompute sigmoid" in printed["joint.py"]
    assert "tl.store" in printed["on_gpu.py"]
    assert "fx_graph miss" in printed["cache.py"]
    assert "fx_graph hit" in printed["cache.py"]
    assert "template, cpp" in printed["autotune.py"]
    assert printed["cudagraphs.py"].count("CUDA graphs: skipped") == 2
    assert "tileops.norm_rms_norm_bwd" in printed["op.py"]
    assert printed["op_again.py"].count("1 graph, 0 breaks, 0 recompilations") == 2
    assert "fx_graph hit" in printed["op_again.py"]


if __name__ == "__main__":
    pages.write(PAGE)
