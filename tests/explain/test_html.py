"""The page of a report: it is well formed and alone, has every fact, and escapes what it is given."""

from __future__ import annotations

import html.parser
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import tileops
from tests.explain import golden, reports
from tests.explain.test_golden import fresh, line_of  # noqa: F401
from tileops.cli import main
from tileops.explain.model import OpNode, Report
from tileops.explain.views import html as view

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Reader(html.parser.HTMLParser):
    """Holds a page to the nesting of its elements, and keeps what tests ask about."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def all(self, name: str) -> list[str]:
        return [value for _, attrs in self.elements if (value := attrs.get(name)) is not None]


@pytest.mark.parametrize("make", [Report, reports.small, reports.hostile, lambda: reports.long(50)])
def test_well_formed_and_alone(make):
    page = view.render(make())
    read = Reader(page)
    ids = read.all("id")
    assert [each for each, times in Counter(ids).items() if times > 1] == []
    assert {each.removeprefix("#") for each in read.all("href")} <= set(ids)
    assert all(each.startswith("#") for each in read.all("href"))
    assert read.all("src") == []
    styles = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    assert "url(" not in styles and "@import" not in styles
    for name in ("aria-labelledby", "aria-controls"):
        assert set(read.all(name)) <= set(ids)


def test_a_term_stands_before_what_is_said_of_it():
    tags = [
        tag
        for tag, _ in Reader(view.render(reports.filled(Report))).elements
        if tag in ("dt", "dd")
    ]
    assert tags == ["dt", "dd"] * (len(tags) // 2)


def test_headings_nest():
    for report in (reports.small(), reports.filled(Report)):
        levels = [
            int(tag[1])
            for tag, _ in Reader(view.render(report)).elements
            if re.fullmatch(r"h\d", tag)
        ]
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


# Shown where the report is about its line, or where it says something new.
HIDDEN = re.compile(
    r"Line\.(text|function)»$|Line\.file»$|Node\.(args|opcode|target|device|inputs|stride)»$|Group\.(nodes|parts)»$"
    r"|Break\.crossing Node|Node\.line|Compilation\.ops OpNode\.fused_into»$"
)


def test_every_field_is_shown():
    """What is added to the model is not forgotten here."""
    seen = []
    report = reports.filled(Report, text=lambda path: seen.append(f"«{path}»") or f"«{path}»")
    page = html.unescape(view.render(report))
    missing = {each for each in seen if each not in page and not HIDDEN.search(each)}
    assert missing == set()


def test_hostile_text_stays_text():
    page = view.render(reports.hostile())
    read = Reader(page)
    assert page.count("<script") == page.count("</script") == 1
    assert not any(tag == "img" for tag, _ in read.elements)
    assert not any(name.startswith("on") for _, attrs in read.elements for name in attrs)
    assert reports.HOSTILE in read.text
    assert "49" not in read.text.replace(reports.HOSTILE, "")


def test_line_leads_to_node_and_kernel_and_back():
    read = Reader(view.render(reports.small()))
    hrefs = Counter(read.all("href"))
    for anchor in ("#l0-5", "#n0-0-1", "#n0-1-1", "#k0-0-0", "#b0-0", "#g0-0"):
        assert hrefs[anchor], anchor


def test_unknown_is_said():
    report = reports.small()
    one = report.compilations[0]
    one.loops = one.inlined = one.inductor[0].unfused = one.inductor[0].candidates = None
    kernel = one.inductor[0].kernels[0]
    kernel.nodes = kernel.groups = kernel.time_us = None
    words = " ".join(Reader(view.render(report)).text.split())
    for said in ("Loops that were unrolled:", "Functions that were inlined:", "computes", "time of a launch",
                 "Fusion groups", "Neighbours that stayed apart", "Autotuning:", "Python between graphs"):  # fmt: skip
        assert re.search(f"{said} ?unknown", words), said
    known = reports.small()
    for one in known.compilations:
        one.loops = one.inlined = []
    assert "unrolled: unknown" not in " ".join(Reader(view.render(known)).text.split())


def test_an_op_leads_to_the_kernel_that_took_it():
    report = reports.small()
    op = reports.filled(OpNode)
    op.fused_into = "cpp_fused_mul_0, cpp_fused_mul"
    report.compilations[0].ops = [op]
    page = view.Page(report)
    assert [each for each in page.fused(0, op) if each[1]] == [("cpp_fused_mul_0", "k0-0-0")]
    assert 'href="#k0-0-0">cpp_fused_mul_0</a>, cpp_fused_mul<' in view.render(report)


def test_kernels_of_a_node_without_a_line():
    report = reports.small()
    one = report.compilations[0]
    one.normalisation.graphs[0].nodes[1].line = None
    one.inductor[0].kernels *= 2
    read = Reader(view.render(report))
    assert "and 1 more" in read.text
    assert "#None" not in read.all("href")


def test_long_stretches_are_folded():
    report = reports.small()
    report.sources = {reports.FILE: reports.SOURCE + "\n" * 90}
    page = view.Page(report)
    rows = page.listing(reports.FILE)
    folded = [row for row in rows if row.folded]
    assert [(row.folded[0][0], row.folded[-1][0]) for row in folded] == [(12, 97)]
    assert [row.number for row in rows if row.about] == [5, 6, 7]
    assert [row.number for row in rows] == list(range(1, 13))


def test_dispatch_table_groups_keys():
    entry = tileops.explain.model.DispatchEntry
    keys = [
        entry("CPU", "kernel", "a"),
        entry("CUDA", "kernel", "a"),
        entry("Meta", "fallthrough", None),
    ]
    table = view.Page.table(tileops.explain.model.Dispatch("aten.add", keys, None))
    assert table == [("kernel", "a", ["CPU", "CUDA"]), ("fallthrough", None, ["Meta"])]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(83.04, "83.0 s"), (1.5, "1.5 s"), (0.9996, "1000 ms"), (0.24, "240 ms"),
     (0.00123, "1.2 ms"), (3.5e-6, "3.5 µs"), (0.0, "0.0 µs")],
)  # fmt: skip
def test_seconds(seconds, words):
    assert view._seconds(seconds) == words


def test_facts_of_a_real_report(tmp_path):
    report = tileops.explain(golden.prints, torch.randn(4, 4), backend="aot_eager")
    report.to_html(tmp_path / "page.html")
    read = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    words = " ".join(read.text.split())
    number = line_of(golden.prints, "print(")
    assert f"golden.py:{number}" in words
    assert 'print("between")' in words
    assert report.breaks[0].advice in words
    assert re.search(r"\bgraphs ?2 break ?1 recompilations ?0\b", words)
    assert "The inference graph" in words


def test_command_line_writes_the_page(tmp_path, capsys):
    written = tmp_path / "page.html"
    given = ["--input", "4x4", "--backend", "eager", "--html", str(written)]
    assert main(["explain", f"{golden.__file__}:whole", *given]) == 0
    assert "torch.relu" in Reader(written.read_text(encoding="utf-8")).text
    assert "1 graph, 0 breaks" in capsys.readouterr().out


# ---- colours -------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_contrast():
    """4.5 is what WCAG's level AA asks of text."""
    style = Path(view.__file__).with_name("page").joinpath("page.css").read_text()
    pairs = {
        m[1]: (m[2], m[3])
        for m in re.finditer(r"--(\w[\w-]*): light-dark\((#\w{6}), (#\w{6})\)", style)
    }
    grounds = {"paper": "ink soft accent attend", "raised": "ink soft accent attend keyword string number",
               "wash": "ink soft accent", "attend-wash": "ink soft accent attend"}  # fmt: skip
    for ground, inks in grounds.items():
        for theme in (0, 1):
            for ink in inks.split():
                light, dark = sorted(
                    (luminance(pairs[ink][theme]), luminance(pairs[ground][theme]))
                )[::-1]
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground, theme)
