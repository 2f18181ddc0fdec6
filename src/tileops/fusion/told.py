"""What the graph alone tells of a tensor: a mask is often made of positions only, by ``arange`` and
comparisons, ``tril`` or ``triu``. Then each of its elements is known."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from tileops.fusion.graph import Memory, canonical, value_of
from tileops.fusion.heads import swapped
from tileops.fusion.positions import (
    WHOLE,
    Affine,
    Choice,
    Size,
    Value,
    as_affine,
    as_choice,
    combined,
    constant,
    known,
    moved,
    negated,
    rounded,
    simplified,
    trimmed,
)
from tileops.fusion.reading import argument, equal_shapes

__all__ = ["Told"]


class Told:
    """The values of a graph's nodes that it tells. Made of the graph as it was captured."""

    def __init__(self, graph: Graph, memory: Memory) -> None:
        self._graph, self._memory = graph, memory
        self._values: dict[Node, Value] | None = None

    def of(self, given: Any) -> Value | None:
        """The value of an argument, None where the graph does not tell it."""
        if self._values is None:
            self._values = {}
            for node in self._graph.nodes:
                if node.op in ("call_function", "call_method"):
                    found = self._read(node)
                    if found is not None and not self._memory.written(node):
                        self._values[node] = found
        value = value_of(given)
        if isinstance(given, Node) and isinstance(value, torch.Tensor):
            return self._values.get(given)
        if isinstance(value, bool | float):
            return constant(value)
        return Affine(value) if isinstance(value, int | torch.SymInt) else None

    def number(self, given: Any) -> Any:
        """The one number that an argument is everywhere, or None."""
        found = as_choice(self.of(given))
        return found.inside if found is not None and not found.conditions else None

    def _read(self, node: Node) -> Value | None:
        value = value_of(node)
        reader = _READERS.get(canonical(node) or "")
        if reader is None or not isinstance(value, torch.Tensor):
            return None
        if any(
            isinstance(value_of(n), torch.Tensor) and n not in (self._values or {})
            for n in node.all_input_nodes
        ) and not _creates(node):
            return None
        shape, found = tuple(value.shape), reader(self, node)
        if isinstance(found, Affine):
            if value.dtype in WHOLE:
                return trimmed(found, shape)
            found = as_choice(found)
        if found is None:
            return None
        inside, outside = (rounded(n, value.dtype) for n in (found.inside, found.outside))
        if inside is None or outside is None:
            return None
        conditions = tuple(trimmed(c, shape) for c in found.conditions)
        return simplified(Choice(conditions, inside, outside), shape)


# ---- tensors that are made of nothing ------------------------------------------------------------


def _creates(node: Node) -> bool:
    """Whether the values of the tensors that a node is given do not matter."""
    return (canonical(node) or "").startswith("new_") or (canonical(node) or "").endswith("_like")


def _filled(number: Any) -> Callable[[Told, Node], Value | None]:
    return lambda told, node: constant(number)


def _full(place: int, *names: str) -> Callable[[Told, Node], Value | None]:
    return lambda told, node: told.of(argument(node, place, *names))


def _arange(told: Told, node: Node) -> Value | None:
    given = [value_of(a) for a in node.args]
    if set(node.kwargs) & {"start", "end", "step", "out"}:
        return None
    if not 1 <= len(given) <= 3 or not all(isinstance(g, int | torch.SymInt) for g in given):
        return None
    start = given[0] if len(given) > 1 else 0
    return Affine(start, {-1: given[2] if len(given) == 3 else 1})


# ---- element by element --------------------------------------------------------------------------


def _pair(told: Told, node: Node) -> tuple[Value | None, Value | None]:
    return told.of(argument(node, 0, "input", "self")), told.of(argument(node, 1, "other"))


def _arithmetic(
    function: Callable[[Any, Any], Any],
    affine: Callable[[Affine, Affine], Affine | None] | None = None,
) -> Callable[[Told, Node], Value | None]:
    def read(told: Told, node: Node) -> Value | None:
        if set(node.kwargs) - {"input", "other"}:
            return None  # alpha, rounding_mode
        one, other = _pair(told, node)
        if affine is not None and not value_of(node).dtype.is_floating_point:
            a, b = as_affine(one), as_affine(other)
            if a is not None and b is not None:
                return affine(a, b)
        return combined(function, one, other)

    return read


def _times(one: Affine, other: Affine) -> Affine | None:
    if one.steps and other.steps:
        return None
    constant, steps = (one, other) if not one.steps else (other, one)
    return Affine(0).plus(steps, constant.start)


def _compared(
    function: Callable[[Any, Any], bool], conditions: Callable[[Affine], tuple[Affine, ...]]
) -> Callable[[Told, Node], Value | None]:
    """``conditions`` of the difference; for ``!=`` those under which it does not hold."""

    def read(told: Told, node: Node) -> Value | None:
        one, other = _pair(told, node)
        a, b = as_affine(one), as_affine(other)
        if a is None or b is None:
            return combined(function, one, other)
        unequal = function is operator.ne
        return Choice(conditions(a.plus(b, -1)), not unequal, unequal)

    return read


def _both(d: Affine) -> tuple[Affine, ...]:
    return d, Affine(0).plus(d, -1)


def _inverted(told: Told, node: Node) -> Value | None:
    if value_of(node).dtype is not torch.bool:
        return None
    return combined(lambda x, _: not x, told.of(argument(node, 0, "input", "self")), constant(0))


def _negative(told: Told, node: Node) -> Value | None:
    found = told.of(argument(node, 0, "input", "self"))
    if isinstance(found, Affine):
        return Affine(0).plus(found, -1)
    return combined(lambda x, _: -x, found, constant(0))


def _same(told: Told, node: Node) -> Value | None:
    return told.of(argument(node, 0, "input", "self"))


def _where(told: Told, node: Node) -> Value | None:
    if len(node.args) != 3:
        return None
    choice, one, other = (told.of(a) for a in node.args)
    first, second = as_choice(one), as_choice(other)
    if first is not None and not first.conditions:
        return combined(lambda p, x: first.inside if p else x, choice, second)
    if second is not None and not second.conditions:
        return combined(lambda p, x: x if p else second.inside, choice, first)
    return None


def _masked_fill(told: Told, node: Node) -> Value | None:
    number = told.number(argument(node, 2, "value"))
    if number is None:
        return None
    hidden = told.of(argument(node, 1, "mask"))
    return combined(
        lambda p, x: number if p else x, hidden, told.of(argument(node, 0, "input", "self"))
    )


def _triangle(upper: bool) -> Callable[[Told, Node], Value | None]:
    def read(told: Told, node: Node) -> Value | None:
        diagonal = value_of(argument(node, 1, "diagonal", default=0))
        if not isinstance(diagonal, int | torch.SymInt):
            return None
        # Of the upper one j - i - diagonal >= 0, of the lower i - j + diagonal >= 0.
        sign = 1 if upper else -1
        kept = Choice((Affine(-sign * diagonal, {-1: sign, -2: -sign}),), True, False)
        return combined(lambda p, x: x if p else 0, kept, _same(told, node))

    return read


# ---- dims ----------------------------------------------------------------------------------------


def _renamed(places: Mapping[int, int]) -> Callable[[Affine], Affine | None]:
    def move(value: Affine) -> Affine | None:
        if not all(d in places for d in value.steps):
            return None
        return replace(value, steps={places[d]: step for d, step in value.steps.items()})

    return move


def _reshaped(told: Told, node: Node) -> Value | None:
    """Dims of size 1 come and go; the others stay in order."""
    source = argument(node, 0, "input", "self")
    old, new = tuple(value_of(source).shape), tuple(value_of(node).shape)
    wide = [
        [d - len(shape) for d, size in enumerate(shape) if not known(size == 1)]
        for shape in (old, new)
    ]
    if not equal_shapes([old[d] for d in wide[0]], [new[d] for d in wide[1]]):
        return None
    return moved(told.of(source), _renamed(dict(zip(*wide, strict=True))))


def _permuted(told: Told, node: Node) -> Value | None:
    swap = swapped(node)
    if swap is None:
        return None
    source, order = swap
    rank = len(order)
    places = {d - rank: place - rank for place, d in enumerate(order)}
    return moved(told.of(source), _renamed(places))


def _taken(told: Told, node: Node) -> Value | None:
    """``x[...]`` by slices, numbers and None; or by a tensor for each dim."""
    source: Any = node.args[0]
    given: Any = node.args[1]
    if not isinstance(value_of(source), torch.Tensor):
        return None
    value, index = told.of(source), list(given) if isinstance(given, tuple) else [given]
    rank, result = value_of(source).dim(), value_of(node).dim()
    if told.number(source) is not None:
        return value
    if all(isinstance(value_of(i), torch.Tensor) for i in index):
        return _gathered(told, value, index) if len(index) == rank else None
    starts: dict[int, Size] = {}
    steps: dict[int, tuple[int, Size]] = {}
    old = new = 0
    for item in _spelled(index, rank):
        if item is not None:
            d = old - rank
            start, step = _begins(item, value_of(source).shape[old])
            if start is None:
                return None
            starts[d] = start
            if isinstance(item, slice):
                steps[d] = new - result, step
            old += 1
        new += item is None or isinstance(item, slice)

    def move(a: Affine) -> Affine:
        total = a.start
        for d, step in a.steps.items():
            total = total + step * starts[d]
        left = {steps[d][0]: step * steps[d][1] for d, step in a.steps.items() if d in steps}
        return Affine(total, left)

    return moved(value, move)


def _spelled(index: list[Any], rank: int) -> list[Any]:
    """With a slice for each dim that ``...`` or nothing stands for."""
    missing = [slice(None)] * (rank - sum(1 for i in index if i is not None and i is not ...))
    place = index.index(...) if ... in index else len(index)
    return [*index[:place], *missing, *index[place + 1 :]]


def _begins(item: Any, size: Size) -> tuple[Size | None, Size]:
    """Where a slice or a number begins, None where that is not known, and its step."""
    cut = isinstance(item, slice)
    start = value_of((item.start or 0) if cut else item)
    step = value_of((item.step or 1) if cut else 1)
    if not all(isinstance(n, int | torch.SymInt) and n is not True for n in (start, step)):
        return None, step
    if known(start < 0):
        start = start + size
    return (start if known(start >= 0) else None), step


def _gathered(told: Told, value: Value | None, index: list[Any]) -> Value | None:
    places = [as_affine(told.of(i)) for i in index]
    for place, item in zip(places, index, strict=True):
        least = None if place is None else place.least(tuple(value_of(item).shape))
        if least is None or not known(least >= 0):
            return None

    def move(a: Affine) -> Affine:
        total = Affine(a.start)
        for d, step in a.steps.items():
            place = places[d]
            assert place is not None
            total = total.plus(place, step)
        return total

    return moved(value, move)


def _differences(told: Told, node: Node) -> Value | None:
    """``torch.diff`` of what grows evenly; before its first entry stands ``prepend``."""
    source, before = argument(node, 0, "input", "self"), argument(node, 3, "prepend")
    if argument(node, 1, "n", default=1) != 1 or argument(node, 4, "append") is not None:
        return None
    value, rank = as_affine(told.of(source)), value_of(source).dim()
    if value is None:
        return None
    d = argument(node, 2, "dim", default=-1) % rank - rank
    step = value.steps.get(d, 0)
    if before is not None:
        first = as_affine(told.of(before))
        if first is None or not known(value_of(before).shape[d] == 1):
            return None
        at_first = Affine(value.start, {k: s for k, s in value.steps.items() if k != d})
        apart = at_first.plus(first, -1)
        if apart.steps or not known(apart.start == step):
            return None
    return Affine(step)


def _running_sum(told: Told, node: Node) -> Value | None:
    source = argument(node, 0, "input", "self")
    number = told.number(source)
    if number is None or float(number) != int(number):
        return None
    rank = value_of(source).dim()
    d = argument(node, 1, "dim") % rank - rank
    return Affine(int(number), {d: int(number)} if number else {})


def _reader_of_truth(function: Callable[[Any, Any], Any]) -> Callable[[Told, Node], Value | None]:
    def read(told: Told, node: Node) -> Value | None:
        if value_of(node).dtype is not torch.bool:
            return None
        return combined(function, *_pair(told, node))

    return read


_AND, _OR = (_reader_of_truth(f) for f in (lambda a, b: a and b, lambda a, b: a or b))
_READERS: Mapping[str, Callable[[Told, Node], Value | None]] = {
    "add": _arithmetic(operator.add, lambda a, b: a.plus(b)),
    "and": _AND,
    "arange": _arange,
    "bitwise_and": _AND,
    "bitwise_not": _inverted,
    "bitwise_or": _OR,
    "clone": _same,
    "contiguous": _same,
    "cumsum": _running_sum,
    "detach": _same,
    "diff": _differences,
    "eq": _compared(operator.eq, _both),
    "expand": _same,
    "expand_as": _same,
    "full": _full(1, "fill_value"),
    "full_like": _full(1, "fill_value"),
    "getattr": _permuted,
    "ge": _compared(operator.ge, lambda d: (d,)),
    "getitem": _taken,
    "gt": _compared(operator.gt, lambda d: (Affine(-1).plus(d),)),
    "invert": _inverted,
    "le": _compared(operator.le, lambda d: (Affine(0).plus(d, -1),)),
    "logical_and": _AND,
    "logical_not": _inverted,
    "logical_or": _OR,
    "lt": _compared(operator.lt, lambda d: (negated(d),)),
    "masked_fill": _masked_fill,
    "mul": _arithmetic(operator.mul, _times),
    "ne": _compared(operator.ne, _both),
    "neg": _negative,
    "new_full": _full(2, "fill_value"),
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "ones": _filled(1),
    "ones_like": _filled(1),
    "or": _OR,
    "permute": _permuted,
    "reshape": _reshaped,
    "rsub": _arithmetic(lambda a, b: b - a, lambda a, b: b.plus(a, -1)),
    "scalar_tensor": _full(0, "s"),
    "squeeze": _reshaped,
    "sub": _arithmetic(operator.sub, lambda a, b: a.plus(b, -1)),
    "t": _permuted,
    "tensor": _full(0, "data"),
    "to": _same,
    "transpose": _permuted,
    "tril": _triangle(upper=False),
    "triu": _triangle(upper=True),
    "unsqueeze": _reshaped,
    "where": _where,
    "zeros": _filled(0),
    "zeros_like": _filled(0),
}
