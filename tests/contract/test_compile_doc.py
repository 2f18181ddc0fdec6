"""docs/compile.md and docs/internals/boundary.md: each named test exists, the Python runs, and what is
shown is what the code says and the benchmark measured.

``python -m tests.contract.test_compile_doc`` writes generated text and figures anew.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.contract.fresh import ROOT, clean_environment, run_fresh
from tests.docs_blocks import blocks

GUIDE = ROOT / "docs" / "compile.md"
BOUNDARY = ROOT / "docs" / "internals" / "boundary.md"
EXAMPLE = "f = torch.compile(lambda x, w: op(x, w), fullgraph=True)"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def shown(name: str) -> str:
    """What the guide shows of a file: all of a generated one, of others a part."""
    if name.startswith("tileops_generated/"):
        code = (
            f"import linecache, tileops.norm.rms_norm; print(*linecache.getlines({name!r}), sep='')"
        )
        return run(code).stdout.rstrip("\n") + "\n"
    text = (ROOT / name).read_text()
    places = [0]
    for part in PARTS[name]:
        places.append(text.index(part, places[-1]) if part else len(text))
    return text[places[-2] : places[-1]]


PARTS = {
    "src/tileops/norm/manifest.yaml": ("RMSNormFwdOp:", "    params:", "    rules:"),
    "src/tileops/norm/rms_norm.py": ("class RMSNormFwdOp", "    kernel = ", ""),
}
"""Where the shown part lies: after the first text, from the second to the third."""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, with a file to take its source from, and caches that
    nobody used."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "example.py")
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False,
            env=clean_environment(folder, **environment), cwd=folder, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def example(path: Path) -> str:
    """The block with the example in it."""
    (found,) = [
        text
        for text in re.findall(
            r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL
        )
        if EXAMPLE in text
    ]
    return found


def graphs_of_the_example() -> list[str]:
    """The body of each graph's ``forward`` that torch prints for the README's example, with the stamp
    in its keys left out: it is another whenever the entry is."""
    printed = run(example(ROOT / "README.md"), TORCH_LOGS="graph_code").stderr
    lines = re.findall(r"^.*\[__graph_code\] ?(.*)$", printed, re.MULTILINE)
    text = re.sub(r"\) @[0-9a-f]{8}(\+[0-9a-f]{8})?'", ") @...'", "\n".join(lines))
    graphs = text.split("TRACED GRAPH")[1:]
    bodies = [graph[graph.index("):\n", graph.index("def forward")) + 3 :] for graph in graphs]
    return [textwrap.dedent(body).strip() + "\n" for body in bodies]


# ---- the tests ---------------------------------------------------------------------------------------


def test_every_named_test_exists():
    named = NAMED.findall(GUIDE.read_text() + BOUNDARY.read_text())
    assert len(named) > 30
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (path, name)


def test_every_statement_of_the_tables_and_lists_names_a_test():
    text = GUIDE.read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| (?!guarantee|---)", line)]
    numbered = re.findall(r"^\d\. \*\*.*?(?=^\d\. |^\S)", text, re.MULTILINE | re.DOTALL)
    assert len(rows) >= 8
    assert len(numbered) == 5
    for statement in (*rows, *numbered):
        assert NAMED.search(statement), statement


def test_the_python_blocks_run_in_order():
    script = [
        block.text
        for block in blocks("compile.md")
        if block.language == "python" and not block.file
    ]
    assert len(script) == 4
    run("\n".join(script))


def test_the_example_is_the_readme_s():
    assert example(GUIDE) == example(ROOT / "README.md")


def test_the_example_is_one_graph_with_one_node():
    (graph,) = graphs_of_the_example()
    assert re.findall(r"torch\.ops\.[\w.]+", graph) == [
        "torch.ops.tileops.norm_rms_norm_fwd.default"
    ]
    assignments = [line for line in graph.splitlines() if re.match(r"\w+(: .*)? = (?!L_)", line)]
    assert len(assignments) == 1, "a second node"
    (printed,) = [block.text for block in blocks("compile.md") if block.language == "text"]
    assert printed == graph


SHOWN = [block for block in blocks("compile.md") if block.file]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.file)
def test_what_is_shown_is_what_the_code_says(block):
    assert block.text == shown(block.file)


def test_the_whole_way_from_entry_to_generated_code_is_shown():
    assert [block.file for block in SHOWN] == [
        "src/tileops/norm/manifest.yaml",
        "src/tileops/norm/rms_norm.py",
        "tileops_generated/norm/rms_norm_fwd_op_signature.py",
        "tileops_generated/norm/norm_rms_norm_fwd_boundary.py",
    ]


def measured() -> dict[str, str]:
    from benchmarks.boundary import markdown

    return markdown(json.loads((ROOT / "benchmarks/results/boundary_cpu.json").read_text()))


def test_the_figures_of_the_boundary_page_are_the_measured_ones():
    page = BOUNDARY.read_text()
    for table in run_fresh(measured).values():
        assert table in page
    assert "python -m benchmarks.boundary --out benchmarks/results/boundary_cpu.json" in page


def write() -> None:
    """Put the text and the figures of today into the pages."""
    page = BOUNDARY.read_text()
    for table in run_fresh(measured).values():
        head = re.escape(table.partition("\n")[0])
        page = re.sub(rf"^{head}\n(?:\|.*\n)*", lambda m, t=table: t, page, flags=re.MULTILINE)
    BOUNDARY.write_text(page)
    lines = GUIDE.read_text().splitlines(keepends=True)
    (graph,) = graphs_of_the_example()
    for block in reversed(blocks("compile.md")):
        if block.file or block.language == "text":
            end = block.line + block.text.count("\n")
            lines[block.line : end] = [shown(block.file) if block.file else graph]
    GUIDE.write_text("".join(lines))


if __name__ == "__main__":
    write()
