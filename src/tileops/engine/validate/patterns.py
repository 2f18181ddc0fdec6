"""What an entry's pattern may say: holes are of the op."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from tileops.engine.manifest.entry import Entry
from tileops.engine.pattern import (
    Bounded,
    Call,
    Half,
    Mask,
    Named,
    Number,
    Pattern,
    Product,
    Sum,
    Tensor,
    Term,
)

__all__ = ["check_pattern"]


def check_pattern(entry: Entry, package: str, fault: Callable[..., None]) -> None:
    """Report a pattern that is not there, and holes that are neither inputs nor params of the op."""
    place = f"{package}.patterns"
    try:
        pattern = getattr(importlib.import_module(place), str(entry.pattern), None)
    except ImportError as error:
        fault(f"pattern: {place} cannot be imported: {error}")
        return
    if not isinstance(pattern, Pattern):
        fault(f"pattern: {place} has no Pattern named '{entry.pattern}'")
        return
    if pattern.absent:
        return
    accepted = {
        Tensor: [item.name for item in entry.inputs],
        Number: [param.name for param in entry.params],
        Named: [output.name for output in entry.outputs],
    }
    for name in pattern.beside:
        if name not in accepted[Named]:
            fault(f"pattern: output '{name}' is none of the op's: {', '.join(accepted[Named])}")
    terms = [*pattern.meanings, *(term for given in pattern.beside.values() for term in given)]
    for hole in dict.fromkeys(hole for term in terms for hole in _holes(term)):
        known = accepted[type(hole)]
        if hole.name not in known:
            kind = type(hole).__name__.lower()
            fault(f"pattern: {kind} '{hole.name}' is none of the op's: {', '.join(known)}")


def _holes(term: Any) -> Iterator[Tensor | Number | Named]:
    if isinstance(term, Tensor | Number):
        yield term
    elif isinstance(term, Named):
        yield term
        yield from _holes(term.term)
    elif isinstance(term, Half):
        yield term.tensor
        yield from _holes(term.layout)
    elif isinstance(term, Term):
        for part in _parts(term):
            yield from _holes(part)


def _parts(term: Term) -> list[Any]:
    if isinstance(term, Bounded):
        return [term.term]
    if isinstance(term, Mask):
        return [term.scores]
    if isinstance(term, Product):
        return [t for t, _ in term.factors]
    if isinstance(term, Sum):
        return [*(t for t, _ in term.terms), term.constant]
    assert isinstance(term, Call)
    return [*term.arguments, *(value for _, value in term.attributes)]
