"""Numbers and positions that are known for every element of a tensor, as arithmetic of its indices.

Sizes may be symbolic. Nothing here asks for a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = [
    "WHOLE", "Affine", "Choice", "Size", "Value", "as_affine", "as_choice", "combined", "constant", "known",
    "moved", "negated", "rounded", "simplified", "trimmed",
]  # fmt: skip

Size = Any
"""An int or a symbolic one."""
WHOLE = (torch.int32, torch.int64)
"""Dtypes that hold every position."""
_LARGEST = 2**31


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever they are."""
    return bool(statically_known_true(condition))


@dataclass(frozen=True)
class Affine:
    """Whole numbers: ``start``, and ``steps[d]`` for each index along dim ``d``, counted from -1."""

    start: Size
    steps: Mapping[int, Size] = field(default_factory=dict)

    def plus(self, other: Affine, times: Size = 1) -> Affine:
        steps = dict(self.steps)
        for d, step in other.steps.items():
            steps[d] = steps.get(d, 0) + times * step
        left = {d: step for d, step in steps.items() if not known(step == 0)}
        return Affine(self.start + times * other.start, left)

    def least(self, shape: tuple[Size, ...]) -> Size | None:
        """The smallest over a shape that is not empty; None where a step's sign is not known."""
        total = self.start
        for d, step in self.steps.items():
            if known(step <= 0):
                total = total + step * (shape[d] - 1)
            elif not known(step >= 0):
                return None
        return total


@dataclass(frozen=True)
class Choice:
    """One number where all ``conditions`` are 0 or more, or there are none; another elsewhere."""

    conditions: tuple[Affine, ...]
    inside: Any
    outside: Any

    def forms(self) -> Iterator[Choice]:
        """Itself, and turned round where that is one condition again."""
        yield self
        if len(self.conditions) == 1:
            yield Choice((negated(self.conditions[0]),), self.outside, self.inside)


Value = Affine | Choice


def constant(number: Any) -> Choice:
    return Choice((), number, number)


def negated(condition: Affine) -> Affine:
    """Of ``a >= 0``, which is ``-a - 1 >= 0``."""
    return Affine(-1).plus(condition, -1)


def as_choice(value: Value | None) -> Choice | None:
    if isinstance(value, Affine):
        return constant(value.start) if not value.steps and isinstance(value.start, int) else None
    return value


def as_affine(value: Value | None) -> Affine | None:
    if not isinstance(value, Choice):
        return value
    number = value.inside
    whole = not value.conditions and abs(number) < _LARGEST and number == int(number)
    return Affine(int(number)) if whole else None


def rounded(number: Any, dtype: torch.dtype) -> Any:
    """As a tensor of that dtype holds it; None for what is not known."""
    if dtype is torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return torch.tensor(float(number), dtype=torch.float64).to(dtype).item()
    return int(number) if dtype in WHOLE and abs(number) < _LARGEST else None


def trimmed(value: Affine, shape: tuple[Size, ...]) -> Affine:
    """Without the steps along dims of size 1."""
    steps = {d: s for d, s in value.steps.items() if not known(shape[d] == 1)}
    return replace(value, steps=steps)


def simplified(choice: Choice, shape: tuple[Size, ...]) -> Choice:
    """Without conditions that hold everywhere, and constant where one holds nowhere."""
    left: list[Affine] = []
    for condition in choice.conditions:
        least, most = condition.least(shape), negated(condition).least(shape)
        if least is not None and known(least >= 0):
            continue
        if most is not None and known(most >= 0):
            return constant(choice.outside)
        left.append(condition)
    if not left or choice.inside == choice.outside:
        return constant(choice.inside)
    return replace(choice, conditions=tuple(left))


def combined(
    function: Callable[[Any, Any], Any], one: Value | None, other: Value | None
) -> Choice | None:
    """A function of two numbers, element by element."""
    a, b = as_choice(one), as_choice(other)
    if a is None or b is None:
        return None
    if not a.conditions:
        return Choice(b.conditions, function(a.inside, b.inside), function(a.inside, b.outside))
    if not b.conditions:
        return Choice(a.conditions, function(a.inside, b.inside), function(a.outside, b.inside))
    for x in a.forms():
        for y in b.forms():
            rest = function(x.outside, y.outside)
            if rest == function(x.inside, y.outside) == function(x.outside, y.inside):
                return Choice((*x.conditions, *y.conditions), function(x.inside, y.inside), rest)
    return None


def moved(value: Value | None, move: Callable[[Affine], Affine | None]) -> Value | None:
    """A value whose dims ``move`` renames."""
    if value is None or isinstance(value, Affine):
        return None if value is None else move(value)
    conditions = [move(c) for c in value.conditions]
    if any(c is None for c in conditions):
        return None
    return replace(value, conditions=tuple(c for c in conditions if c is not None))
