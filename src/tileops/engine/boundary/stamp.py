"""What is written beside an op's parameters in a graph: where its class is, and a stamp of its entry.

What compilers and exporters keep holds a node's result types and shapes, what it writes, and in a
joint graph how its gradient is called; none of that is in the text of the node. So the node's key ends
in a digest of it: ``tileops.norm.rms_norm.RMSNormFwdOp(normalized_shape=(8,), eps=0.1) @1f0c9a7e+55d2b1c3``
(see ``docs/export.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

from tileops.engine.boundary.compiled_calls import WRITTEN
from tileops.engine.boundary.schema import schema_of
from tileops.engine.manifest.catalog import load_family
from tileops.engine.manifest.derive import derived_backward
from tileops.engine.manifest.entry import Entry

__all__ = ["fault_in", "operator_key", "split_key"]

CONVENTION = 1
"""Counts what nodes of one schema and entry have meant, such as that own outputs are contiguous."""


def operator_key(cls: Any, text: str) -> str:
    """The key in a node for the op that ``text`` spells."""
    stamp = cls.__dict__.get("_stamp")
    if stamp is None:  # computed once for a class, when its first op is made
        stamp = cls._stamp = _stamp_of(cls.entry)
    return f"{cls.__module__}.{text} @{stamp}"


def split_key(key: str) -> tuple[str, str, str]:
    """Module, spelled op and stamp of a key; '' for what is not there."""
    spelled, at, stamp = key.rpartition(" @")
    if not at:
        spelled, stamp = key, ""
    name, bracket, params = spelled.partition("(")
    module, _, name = name.rpartition(".")
    return module, f"{name}{bracket}{params}", stamp


def fault_in(cls: Any, stamp: str) -> str:
    """Why a node with ``stamp`` does not mean the class as it is now, '' where it does.

    The gradient does not count: what has it in a graph has the nodes of the gradient too. Nor does
    what compiled code kept on disk calls.
    """
    own = operator_key(cls, "").rpartition("@")[2]
    if stamp.partition("+")[0] == own.partition("+")[0]:
        return ""
    return (
        f"it was compiled or exported for another definition of {cls.__name__} "
        f"({stamp or 'no stamp'}; here {own}), whose inputs, outputs, parameters or effects differ: "
        f"export it again, or load it with the version of its package that it was made with"
    )


def _stamp_of(entry: Entry) -> str:
    backward = _backward(entry)
    others = () if backward is None else _facts(backward)
    return f"{_digest(_facts(entry))}+{_digest([*WRITTEN, *others])}"


def _backward(entry: Entry) -> Entry | None:
    if entry.backward is not None:
        return load_family(entry.path).get(entry.backward)
    derived = derived_backward(entry)
    return None if derived is None else derived[0]


def _digest(facts: Iterable[Any]) -> str:
    return sha256(repr([CONVENTION, *facts]).encode()).hexdigest()[:8]


def _facts(entry: Entry) -> Iterator[Any]:
    """All that code round a node takes for granted. Not here: which dtypes and values are accepted,
    rules and layouts, which every call checks; defaults, since keys hold every parameter; the
    decomposition and the target, which stay inside the node."""
    for branch in entry.branches:
        yield branch.suffix, schema_of(entry, branch)
    for param in entry.params:
        yield param.name, param.type.text
    for name, expr in entry.dims.items():
        yield name, expr.text
    for item in entry.inputs:
        yield item.name, _text(item.dtype), item.shape.text, _text(item.mutated)
    for output in entry.outputs:
        yield output.name, output.dtype.text, output.shape.text, _text(output.nullable)
        yield output.buffer, output.is_input


def _text(expr: Any) -> str:
    return "" if expr is None else expr.text
