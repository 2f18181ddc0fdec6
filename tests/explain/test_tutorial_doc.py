"""docs/tutorial.md: each command runs, prints what the page says, and says what the text claims.

``python -m tests.explain.test_tutorial_doc`` writes today's outputs into the page.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import torch

from tests.contract.fresh import ROOT, clean_environment
from tests.explain import pages

PAGE = ROOT / "docs" / "tutorial.md"
COMMANDS = pages.scripts(PAGE)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    return list(pages.run(COMMANDS).values())


def counts(text: str) -> tuple[int, int, int, int]:
    """Of a summary: graphs, breaks, recompilations, kernel launches."""
    found = re.search(r"(\d+) graphs?, (\d+) breaks?, (\d+) recompilations?, (\d+) kernel", text)
    assert found, text
    return tuple(map(int, found.groups()))


def test_the_steps_are_the_classes_of_the_example():
    from examples import slow_model

    named = [re.search(r"slow_model\.py:(\w+)", each.code) for each in COMMANDS]
    steps = list(dict.fromkeys(each[1] for each in named if each))
    classes = [type(getattr(slow_model, name)) for name in steps]
    assert classes == list(reversed(slow_model.Pure.__mro__[: len(steps)]))


def test_each_step_computes_the_same():
    from examples import slow_model as example

    x = torch.randn(2, 5, 256)
    with torch.no_grad():
        expected = example.slow(x.clone())
        for block in (example.unwatched, example.uncounted, example.one_table, example.pure):
            torch.testing.assert_close(block(x.clone()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_the_page_shows_what_its_commands_print(number, printed):
    pages.skip_where_outputs_differ(COMMANDS[number])
    assert printed[number] == COMMANDS[number].output


@pytest.mark.slow
def test_what_the_text_says(printed):
    """The claims, on any release of torch."""
    first, whole, counted, uncounted, lengths, one_table, pure, opaque, fused, timed = printed
    assert counts(first)[:2] == (3, 2)
    assert "exit status 1" in first
    assert counts(whole)[:2] == (1, 0)
    assert "exit status" not in whole
    assert [counts(text)[2] for text in (counted, uncounted)] == [2, 1]
    assert "self.calls" in counted
    assert "self.tables" in uncounted
    assert [counts(text)[2] for text in (lengths, one_table, pure)] == [3, 0, 0]
    assert all("copied back to an input" in text for text in printed[:6])
    assert "copied back" not in pure
    assert (counts(opaque)[3], counts(fused)[3]) == (12, 11)
    assert fused.count("fused into") == 3
    moved = [
        float(re.search(r"([\d.]+) MiB read and written", text)[1]) for text in (opaque, fused)
    ]
    assert moved[0] - moved[1] == pytest.approx(2, abs=0.2)
    assert [int(n) for n in re.findall(r"(\d+) recompilations", timed)][1] == 0


@pytest.mark.slow
def test_the_first_command_in_a_process_of_its_own(tmp_path):
    words = shlex.split(COMMANDS[0].code.replace("\\\n", " "))
    done = subprocess.run(
        [sys.executable, "-m", *words], env=clean_environment(str(tmp_path)), cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert counts(done.stdout)[:2] == (3, 2)


if __name__ == "__main__":
    pages.write(PAGE)
