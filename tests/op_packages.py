"""Small packages of ops outside the tree, for the validator to look at.

``# here`` in a text marks the line that a fault must name.
"""

from __future__ import annotations

from pathlib import Path

from tileops.engine.validate import Report, check

__all__ = ["MANIFEST", "MODULE", "assert_faults", "marked", "swap"]

MANIFEST = """\
ScaleFwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    dtypes: {T: [float16, float32]}
    params:
      factor: {type: float, default: 2.0}
      mode: {type: "enum(a,b)", default: a, kw_only: true}
    inputs:
      x: {dtype: T, shape: "[*B, N]"}
      bias: {dtype: T, shape: "[N]", optional: true}
      table: {dtype: [int32, int64], shape: "[N]", optional: "mode == 'b'"}
    outputs:
      y: {dtype: T, shape: "[*B, N]"}
  workloads:
    - {label: one, dims: {B: [4], N: 8}, passed: [bias], dtypes: {T: float32}}
    - {label: two, dims: {B: [], N: 8}, params: {mode: b}, dtypes: {T: float16, table: int64}}
  cost:
    flops: "2 * prod(B) * N"
"""

MODULE = '''\
"""Ops of a test."""

import torch

from tileops.authoring import Kernel, KernelInterface, Op


class ScaleFwdOp(Op):
    """``factor * x + bias``."""

    @staticmethod
    def decomposition(x, bias, table, *, factor, mode):
        return x * factor if bias is None else x * factor + bias
'''


def swap(text: str, *pairs: str) -> str:
    """``text`` with the first of each pair, which it holds once, replaced by the second."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text


def assert_faults(manifest: Path, *problems: str, entry: str = "ScaleFwdOp") -> Report:
    """The report holds these faults and no other, all at the marked line."""
    report = check(manifests=[manifest])
    found = [fault.problem for fault in report.faults]
    assert found == list(problems), found
    marked = [
        (str(path), number)
        for path in sorted(manifest.parent.rglob("*"))
        if path.suffix in (".py", ".yaml")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# here" in line
    ]
    assert {(fault.file, fault.line) for fault in report.faults} == set(marked)
    assert {fault.entry for fault in report.faults} == {entry}
    return report


def marked(text: str) -> int:
    (line,) = [n for n, t in enumerate(text.splitlines(), 1) if "# here" in t]
    return line
