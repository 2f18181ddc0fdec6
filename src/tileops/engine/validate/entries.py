"""What can be said about an entry without its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tileops.engine.errors import CheckError
from tileops.engine.manifest.derive import faults_of_backward
from tileops.engine.manifest.entry import MISSING, Entry
from tileops.engine.op import Op
from tileops.engine.signature.generate import signature_source
from tileops.engine.signature.params import normalise
from tileops.engine.validate.report import Report

__all__ = ["check_entry"]


def check_entry(entry: Entry, known: Mapping[str, Entry] | None, report: Report) -> bool:
    """Params, dtype variables, contents and the ops it names. Without ``known``, not the last.

    Whether its params are in order, so that an op can be made.
    """

    def fault(problem: str, *path: Any) -> None:
        report.add(entry.path, entry.line_of(*path), entry.name, problem)

    before = len(report.faults)
    _params(entry, fault)
    made = len(report.faults) == before
    _dtypes(entry, fault)
    if known is not None:
        for stage, name in entry.composition.items():
            _named(entry, known, fault, f"composition.{stage}", name, "composition", stage)
        if entry.backward is not None:
            _named(entry, known, fault, "backward", entry.backward, "backward")
            _backward(entry, known, fault)
    signature_source(entry)  # raises where a shape cannot be solved
    return made


def _params(entry: Entry, fault: Any) -> None:
    for param in entry.params:
        path = ("signature", "params", param.name)
        if hasattr(Op, param.name):
            fault(f"params.{param.name}: every op has an attribute of this name", *path)
        if param.default is MISSING:
            continue
        try:
            normalise(entry.name, param, param.default)
        except CheckError as error:
            fault(f"params.{param.name}.default: given {error.given}; accepted: {error.accepted}",
                  *path, "default")  # fmt: skip


def _dtypes(entry: Entry, fault: Any) -> None:
    bound = {name for item in entry.inputs if item.dtype is not None for name in item.dtype.names}
    used = {name for output in entry.outputs for name in output.dtype.names}
    used |= {name for rule in entry.rules for name in rule.require.names}
    for name in entry.dtypes:
        if name not in bound:
            why = "is never bound: no input's dtype names it" if name in used else "is not used"
            fault(f"dtypes.{name}: {why}", "signature", "dtypes", name)
    for item in entry.inputs:
        if item.content is None:
            continue
        text = item.dtype.text if item.dtype is not None else ""
        accepted = item.dtypes or entry.dtypes.get(text, ())
        for dtype in accepted:
            if dtype == "bool" or dtype.startswith(("float", "bfloat")):
                problem = f"is for integers, and {item.name} may be {dtype}"
                fault(f"inputs.{item.name}.content: {problem}",
                      "signature", "inputs", item.name, "content")  # fmt: skip


def _backward(entry: Entry, known: Mapping[str, Entry], fault: Any) -> None:
    other = known.get(str(entry.backward))
    for problem in [] if other is None else faults_of_backward(entry, other):
        fault(f"backward: {entry.backward}: {problem}", "backward")


def _named(
    entry: Entry, known: Mapping[str, Entry], fault: Any, label: str, name: str, *path: str
) -> None:
    other = known.get(name)
    if other is None:
        fault(f"{label}: no entry is named '{name}'", *path)
    elif entry.status == "implemented" and other.status != "implemented":
        fault(f"{label}: '{name}' is {other.status}", *path)
