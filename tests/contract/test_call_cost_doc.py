"""docs/internals/call-cost.md shows the figures that were measured.

``python -m tests.contract.test_call_cost_doc`` writes them anew.
"""

from __future__ import annotations

import json

from tests.contract.fresh import ROOT

PAGE = ROOT / "docs" / "internals" / "call-cost.md"
RESULT = ROOT / "benchmarks" / "results" / "host_nvidia_h200.json"
BEGIN = "<!-- figures: python -m tests.contract.test_call_cost_doc -->\n"
END = "<!-- end of figures -->\n"


def figures() -> str:
    """The tables of the measured file, in Markdown."""
    report = json.loads(RESULT.read_text())
    lines = []
    for title in ("cuda: one call", "cuda: stages", "cpu: op layer"):
        lines += [f"| {title} | min, ns | median, ns |", "| --- | --- | --- |"]
        lines += [
            f"| {name.replace('|', ' or ')} | {row['min']:.0f} | {row['median']:.0f} |"
            for name, row in report["tables"][title].items()
        ]
        lines.append("")
    lines += ["| ratio | |", "| --- | --- |"]
    lines += [f"| {name} | {value:.3f} |" for name, value in report["ratios"].items()]
    return "\n".join(lines) + "\n"


def test_the_page_shows_what_was_measured():
    text = PAGE.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert shown == figures()


def test_the_figures_keep_what_the_page_promises():
    """Of the committed file, not of this machine: a page may not praise what was not measured."""
    ratios = json.loads(RESULT.read_text())["ratios"]
    assert ratios["cuda: tileops op / floor: empty_like + ctypes cuLaunchKernel"] <= 1.3
    assert ratios["cuda: tileops op / F.rms_norm"] < 1
    assert ratios["cuda: compiled op / compiled bare operator"] <= 1.15
    assert all(value <= 1.3 for name, value in ratios.items() if "growing" in name)


def write() -> None:
    """Put the figures into the page."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:begin] + figures() + text[end:])


if __name__ == "__main__":
    write()
