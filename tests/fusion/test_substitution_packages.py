"""Op classes of other distributions bring patterns; what is kept on disk is of the pattern as it is."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.fresh import run_fresh
from tests.contract.test_stale_artifacts import COUNT, X, write_package
from tileops.authoring import pattern as p
from tileops.engine.validate.patterns import check_pattern
from tileops.norm import RMSNormFwdOp, patterns

PATTERNS = """
from tileops.authoring import pattern as p

x, count, factor = p.tensor("x"), p.tensor("count", over="any"), p.number("factor")
meaning = p.call("round", x) * p.number("factor") + count
SCALE = p.Pattern(meanings=(meaning,), hint=meaning)
"""
NAMED = {"kind: pointwise": "kind: pointwise\n  pattern: SCALE"}


def _package(root: Path, patterns: str, edits: dict[str, str]) -> str:
    write_package(root, {**NAMED, **edits})
    (root / "scaling" / "patterns.py").write_text(patterns)
    return str(root)


def _run(root: str, cache: str, backward: bool = True) -> tuple[Any, int, list[str]]:
    """Compiled plain PyTorch; hits of AOTAutograd's cache; the ops that it became."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    sys.path.insert(0, root)
    import scaling.scale  # noqa: F401  (the class is what brings the pattern)

    from tileops.fusion import backend, last_report

    run = torch.compile(
        lambda x, c: (c + 2.5 * torch.round(x)) * 4, backend=backend, fullgraph=True,
        options={"tileops.fusion": "always"},
    )  # fmt: skip
    result = run(X, COUNT)
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return result, hits, [d["call"] for d in last_report().of("substituted")]


@pytest.mark.slow
def test_what_is_kept_is_of_the_pattern_as_it_is(tmp_path):
    """The op of this package multiplies what the pattern found by 10, so that it shows whether it ran."""
    cache, ten = str(tmp_path / "inductor"), {"x * factor": "x.round() * factor * 10"}
    other = PATTERNS.replace('p.call("round", x)', 'p.call("floor", x)')
    for name, text, hits, factor, ops in (
        ("cold", PATTERNS, 0, 25.0, ["ScaleFwdOp(factor=2.5)"]),
        ("warm", PATTERNS, 1, 25.0, ["ScaleFwdOp(factor=2.5)"]),
        ("changed", other, 0, 2.5, []),
        ("warm again", PATTERNS, 1, 25.0, ["ScaleFwdOp(factor=2.5)"]),
    ):
        root = _package(tmp_path / name, text, ten)
        result, found, substituted = run_fresh(_run, root=root, cache=cache)
        torch.testing.assert_close(result, (X * factor + COUNT) * 4, msg=name)
        assert substituted == ops, name
        assert found == hits, name


def test_a_pattern_is_held_to_the_op(monkeypatch):
    """As ``tileops check`` does."""
    faults: list[str] = []

    def check(name):
        entry = replace(RMSNormFwdOp.entry, pattern=name)
        faults.clear()
        check_pattern(entry, "tileops.norm", faults.append)
        return "; ".join(faults)

    assert check("RMS_NORM") == ""
    assert check("NOTHING") == "pattern: tileops.norm.patterns has no Pattern named 'NOTHING'"
    other = p.tensor("y") * p.number("gain") + p.named("total", p.tensor("x"))
    monkeypatch.setattr(patterns, "RMS_NORM", p.Pattern(meanings=(other,), hint=other))
    assert check("RMS_NORM").split("; ") == [
        "pattern: tensor 'y' is none of the op's: x, weight",
        "pattern: number 'gain' is none of the op's: normalized_shape, eps",
        "pattern: named 'total' is none of the op's: output",
    ]
