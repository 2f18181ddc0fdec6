"""Which keys a mask hides from a query, where the graph tells: a band of the scores is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tileops.fusion.graph import canonical, value_of
from tileops.fusion.positions import Affine, Choice, Size, as_choice, known
from tileops.fusion.reading import Expr, Made, argument, stripped, summands
from tileops.fusion.told import Told

__all__ = ["Seen", "hidden", "masked"]

LOW = -1e9
"""What is added to a score, or stands for it, to hide it: no more than this, or the lowest of a dtype that
does not reach so far. ``exp`` of it less any score that is seen is 0 in float64."""


@dataclass(frozen=True)
class Seen:
    """Row ``i`` sees column ``j`` where ``first <= j - i <= last``; None: no limit."""

    first: Size | None = None
    last: Size | None = None
    masks: frozenset[Node] = frozenset()
    """What tells it."""
    steps: frozenset[Node] = frozenset()
    """That put the masks on scores."""

    def but(self, other: Seen) -> Seen | None:
        """What both see, None where the limits cannot be compared."""
        limits: list[Size | None] = []
        for one, more, first in ((self.first, other.first, True), (self.last, other.last, False)):
            if one is None or more is None:
                limits.append(more if one is None else one)
            elif known(one <= more):
                limits.append(more if first else one)
            elif known(more <= one):
                limits.append(one if first else more)
            else:
                return None
        low, high = limits
        return Seen(low, high, self.masks | other.masks, self.steps | other.steps)


def masked(told: Told, mask: Any) -> Seen | None:
    """What a mask that is an argument lets see: True of a bool, 0 of one that is added."""
    if mask is None:
        return Seen()
    value = value_of(mask)
    if not isinstance(mask, Node) or not isinstance(value, torch.Tensor):
        return None
    found = as_choice(told.of(mask))
    if found is None:
        return None
    if value.dtype is torch.bool:
        return _band(found, mask)
    return _band(_of_added(found, value.dtype), mask)


def hidden(told: Told, expr: Expr) -> Iterator[tuple[Expr, Seen | None, Node]]:
    """Each way in which ``expr`` is scores with a mask: the scores, what is seen, and the mask."""
    expr = stripped(expr)
    if isinstance(expr, Made):
        return
    name = canonical(expr)
    if name in ("masked_fill", "where"):
        yield from _replaced(told, expr, name)
        return
    parts = summands(expr)
    if parts is None or parts[0] != 0 or len(parts[1]) != 2 or any(c != 1 for _, c in parts[1]):
        return
    for (mask, _), (scores, _) in (parts[1], parts[1][::-1]):
        if isinstance(mask, Node):
            yield scores, _on(masked(told, mask), expr), mask


def _replaced(told: Told, expr: Node, name: str) -> Iterator[tuple[Expr, Seen | None, Node]]:
    """Hidden scores are low numbers."""
    dtype = value_of(expr).dtype
    if not dtype.is_floating_point or (name == "where" and len(expr.args) != 3):
        return
    first, second, third = (
        argument(expr, n, *names) for n, names in enumerate((("input",), ("mask",), ("value",)))
    )
    if name == "masked_fill":
        ways = [(second, first, third, False)]
    else:
        ways = [(first, second, third, True), (first, third, second, False)]
    for mask, scores, low, shown in ways:
        number = told.number(low)
        if number is None or not isinstance(mask, Node) or not isinstance(scores, Node):
            continue
        found = as_choice(told.of(mask))
        if found is not None:
            found = Choice(
                found.conditions, bool(found.inside) is shown, bool(found.outside) is shown
            )
        yield scores, _on(_band(found if _hides(number, dtype) else None, mask), expr), mask


def _on(seen: Seen | None, step: Node) -> Seen | None:
    return None if seen is None else Seen(seen.first, seen.last, seen.masks, frozenset({step}))


def _hides(number: float, dtype: torch.dtype) -> bool:
    return number <= max(LOW, torch.finfo(dtype).min)


def _of_added(found: Choice, dtype: torch.dtype) -> Choice | None:
    """Where 0 is added and where enough to hide; None where other numbers are."""
    if not dtype.is_floating_point:
        return None
    values = [
        True if number == 0 else False if _hides(number, dtype) else None
        for number in (found.inside, found.outside)
    ]
    return None if None in values else Choice(found.conditions, *values)


def _band(found: Choice | None, mask: Node) -> Seen | None:
    if found is None:
        return None
    for form in found.forms():
        if form.inside and not (form.conditions and form.outside):
            return _limits(form.conditions, mask)
    return None


def _limits(conditions: tuple[Affine, ...], mask: Node) -> Seen | None:
    seen: Seen | None = Seen(masks=frozenset({mask}))
    for condition in conditions:
        row, column = (condition.steps.get(d, 0) for d in (-2, -1))
        if set(condition.steps) != {-1, -2} or seen is None:
            return None
        if known(row == 1) and known(column == -1):
            seen = seen.but(Seen(last=condition.start))
        elif known(row == -1) and known(column == 1):
            seen = seen.but(Seen(first=-condition.start))
        else:
            return None
    return seen
