"""Whether a node of a graph means what a pattern says, and with which tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from tileops.engine.pattern import (
    Bounded,
    Call,
    Half,
    Mask,
    Named,
    Number,
    Product,
    Sum,
    Tensor,
    Term,
    call,
)
from tileops.fusion.extremes import amax_of, at_least, bounds_of, scaled_least
from tileops.fusion.graph import Memory, canonical, is_pointwise, value_of
from tileops.fusion.masks import Seen, hidden, masked
from tileops.fusion.primitives import entries_of, primitive
from tileops.fusion.reading import (
    Expr,
    Made,
    cast_of,
    factors,
    mean_of,
    number_of,
    origin,
    stripped,
    summands,
)
from tileops.fusion.told import Told

__all__ = ["Binding", "Matcher", "label"]

SPARE = 2
"""Summands beyond those of a meaning that are looked at, to say what is too much. Each layer of a model
adds to a stream: without a limit its last sum would be opened down to the first."""
DEEPEST = 16
"""How many products in a row are taken apart: a chain of them may be as long as a model."""
STEPS = 4000
"""What one attempt may cost before it is given up: products of many factors have many orders."""
CLOSE = 1e-6
"""How near two constants are that are written with different digits, such as sqrt(2 / pi)."""


@dataclass(frozen=True)
class Binding:
    """What holes stand for. ``score`` counts what has been recognised."""

    tensors: Mapping[str, tuple[Expr, ...]] = field(default_factory=dict)
    """Every node at which the hole was met: one value, but for casts."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, Expr] = field(default_factory=dict)
    masks: Mapping[str, Seen] = field(default_factory=dict)
    dims: int = 0
    score: int = 0


def label(expr: Expr) -> str:
    """How a report calls a value."""
    return expr.name if isinstance(expr, Node) else f"a step of {expr.name}"


def _with(b: Binding, name: str, value: Any) -> Binding:
    return replace(b, numbers={**b.numbers, name: value})


def _hiding(b: Binding, name: str, seen: Seen) -> Binding:
    return replace(b, masks={**b.masks, name: seen})


def _untold(mask: Any) -> str:
    named = label(mask) if isinstance(mask, Node) else mask
    return f"{named} is a mask, and the graph does not tell what it hides"


def _close(a: Any, b: Any) -> bool:
    return a is b or (a is not None and b is not None and math.isclose(a, b, rel_tol=CLOSE))


class Matcher:
    """Attempts at one term. ``loose``: dims and constants may be any, as for a hint. Where all fail,
    ``reason`` says what stood in the way of the one that came furthest."""

    def __init__(self, memory: Memory, told: Told, loose: bool = False) -> None:
        self.memory, self.told, self.loose = memory, told, loose
        self.reason, self.score = "", -1
        self._steps = 0

    def note(self, binding: Binding, reason: str) -> None:
        """A reason why an attempt ended."""
        if binding.score > self.score:
            self.reason, self.score = reason, binding.score

    def matches(self, term: Term, node: Node, known: Binding | None = None) -> Iterator[Binding]:
        """All readings of ``node`` as ``term``, with what is ``known`` of its holes."""
        self._steps = 0
        yield from self._match(term, node, known or Binding())

    # -- one term --------------------------------------------------------------------------------

    def _match(self, term: Term, expr: Any, b: Binding) -> Iterator[Binding]:
        self._steps += 1
        if self._steps > STEPS:
            return
        if isinstance(term, Number):
            yield from self._number(term, expr, b)
        elif not isinstance(expr, Node | Made):
            return
        elif isinstance(term, Tensor):
            yield from self._tensor(term.name, expr, b)
        elif (read := _READERS.get(type(term))) is not None:
            yield from read(self, term, expr, b)
        elif isinstance(term, Mask) and term.scores is not None:
            yield from self._masked(term.name, term.scores, expr, b)
        elif isinstance(term, Product):
            wanted = sorted(term.factors, key=lambda f: _rank(f[0]))
            yield from self._product(wanted, term.coefficient, [(expr, 1.0)], 0, b)
        elif isinstance(term, Sum):
            found = summands(expr)
            if found is not None:
                wanted = sorted(term.terms, key=lambda f: _rank(f[0]))
                yield from self._sum(wanted, term.constant, found[1], found[0], 0, b)

    def _number(self, term: Number, expr: Any, b: Binding) -> Iterator[Binding]:
        known = None if isinstance(expr, Made) else number_of(expr)
        if known is None and expr is not None:
            self.note(b, f"{term.name} is {label(expr)}, not a number that is known")
        elif term.name not in b.numbers:
            yield replace(_with(b, term.name, known), score=b.score + 1)
        elif _close(b.numbers[term.name], known):
            yield b

    def _tensor(self, name: str, expr: Expr, b: Binding) -> Iterator[Binding]:
        if isinstance(expr, Made) or not isinstance(value_of(expr), torch.Tensor):
            return
        met = b.tensors.get(name, ())
        if met and not self.same(met[0], expr):
            self._differs(name, met[0], expr, b)
            return
        tensors = {**b.tensors, name: (*met, expr)}
        yield replace(b, tensors=tensors, score=b.score + (0 if met else 1))

    def _named(self, term: Named, expr: Expr, b: Binding) -> Iterator[Binding]:
        met = b.named.get(term.name)
        if met is None:
            step = origin(expr)
            yield from self._match(term.term, step, replace(b, named={**b.named, term.name: step}))
        elif self.same(met, expr):
            yield b
        else:
            self._differs(term.name, met, expr, b)

    def _differs(self, name: str, one: Expr, other: Expr, b: Binding) -> None:
        places = f"{label(origin(one))} in one place and {label(origin(other))} in another"
        self.note(replace(b, score=b.score + 1), f"{name} is {places}")

    def _half(self, term: Half, expr: Expr, b: Binding) -> Iterator[Binding]:
        found = entries_of(expr)
        if found is not None and found[1] is term.second:
            source, _, layout = found
            name = term.layout.name if term.layout is not None else ""
            if b.numbers.get(name, layout if name else "neox") == layout:
                known = _with(b, name, layout) if name else b
                yield from self._tensor(term.tensor.name, source, known)
                return
        what = f"the {'second' if term.second else 'first'} half of {term.tensor.name}'s last dim"
        self.note(b, f"{label(origin(expr))} is not {what}")

    def _masked(self, name: str, scores: Term, expr: Expr, b: Binding) -> Iterator[Binding]:
        """Scores with any number of masks on them."""
        yield from self._match(scores, expr, b if name in b.masks else _hiding(b, name, Seen()))
        for rest, seen, mask in hidden(self.told, expr):
            both = None if seen is None else seen.but(b.masks.get(name, Seen()))
            if both is not None:
                yield from self._masked(name, scores, rest, _hiding(b, name, both))
            elif next(self._masked(name, scores, rest, b), None) is not None:
                self.note(replace(b, score=b.score + 2), _untold(mask))

    def _bounded(self, term: Bounded, expr: Expr, b: Binding) -> Iterator[Binding]:
        while (found := bounds_of(expr)) is not None:
            step, (expr, *given) = expr, found
            low, high = (None if bound is None else number_of(bound) for bound in given)
            if (low, high).count(None) > given.count(None):
                self.note(b, f"the bounds of {label(step)} are not numbers that are known")
                return
            if (low is not None and low > term.low) or (high is not None and high < term.high):
                between = f"{term.low:g} and {term.high:g}"
                self.note(b, f"{label(step)} is bounded closer than by {between}")
                return
        yield from self._match(term.term, expr, b)

    # -- sums and products -----------------------------------------------------------------------

    def _product(
        self,
        wanted: Factors,
        coefficient: float,
        have: list[tuple[Expr, float]],
        start: int,
        b: Binding,
        depth: int = 0,
    ) -> Iterator[Binding]:
        """``wanted`` in the factors ``have``, of which those from ``start`` on may be taken apart."""
        self._steps += 1
        if self._steps > STEPS:
            return
        if not wanted or isinstance(wanted[0][0], Number):
            yield from self._end(wanted, coefficient, have, b)
            return
        (term, power), rest = wanted[0], wanted[1:]
        for i, (expr, exponent) in enumerate(have):
            if exponent == power:
                left = have[:i] + have[i + 1 :]
                for found in self._match(term, expr, b):
                    yield from self._product(
                        rest, coefficient, left, min(start, len(left)), found, depth
                    )
        if power == 1 and isinstance(term, Call):
            for factor, more, found in self._defined(term, b):
                spelled = sorted([*more, *rest], key=lambda f: _rank(f[0]))
                yield from self._product(spelled, coefficient * factor, have, start, found, depth)
        for i in range(start, len(have) if depth < DEEPEST else start):
            parts = _apart(*have[i])
            if parts is not None:
                opened = self._merged(have[:i] + have[i + 1 :], parts[1])
                yield from self._product(wanted, coefficient / parts[0], opened, i, b, depth + 1)
        if not have:
            self.note(b, f"nothing stands for {_word(term)}")
        elif len(have) == 1 and b.score:
            self.note(b, f"{label(stripped(have[0][0]))} stands where the op has {_word(term)}")

    def _end(
        self, wanted: Factors, coefficient: float, have: list[tuple[Expr, float]], b: Binding
    ) -> Iterator[Binding]:
        """Of a product all of whose factors are found, but for a number that may be any."""
        if have:
            self.note(replace(b, score=b.score + 2), f"{label(have[0][0])} is a factor too many")
        elif wanted:
            yield _with(b, _word(wanted[0][0]), 1 / coefficient)
        elif _close(coefficient, 1.0):
            yield b
        else:
            excess = f"it is {1 / coefficient:g} times what the op computes"
            self.note(replace(b, score=b.score + 2), excess)

    def _defined(self, term: Call, b: Binding) -> Iterator[tuple[float, Factors, Binding]]:
        """A primitive as people write it out: a coefficient, factors and what attributes it then has."""
        for attributes, definition in _DEFINITIONS.get(term.name, ()):
            meant = definition(term.arguments[0])
            assert isinstance(meant, Product)
            for found in self._attributes(term, attributes, b):
                yield meant.coefficient, list(meant.factors), found

    def _merged(
        self, have: list[tuple[Expr, float]], more: list[tuple[Expr, float]]
    ) -> list[tuple[Expr, float]]:
        result = list(have)
        for expr, power in more:
            place = next((i for i, (e, _) in enumerate(result) if self.same(e, expr)), None)
            if place is None or result[place][1] * power < 0:
                result.append((expr, power))
            else:
                result.append((expr, result.pop(place)[1] + power))
        return result

    def _sum(
        self,
        wanted: list[tuple[Term, float]],
        constant: float | Number,
        have: list[tuple[Expr, float]],
        known: Any,
        start: int,
        b: Binding,
    ) -> Iterator[Binding]:
        self._steps += 1
        if self._steps > STEPS:
            return
        if not wanted:
            yield from self._constant(constant, have, known, b)
            return
        (term, coefficient), rest = wanted[0], wanted[1:]
        for i, (expr, given) in enumerate(have):
            left = have[:i] + have[i + 1 :]
            if given == coefficient:
                scaled = term
            elif isinstance(term, Product):
                scaled = replace(term, coefficient=term.coefficient * coefficient / given)
            else:
                continue
            for found in self._match(scaled, expr, b):
                yield from self._sum(rest, constant, left, known, min(start, len(left)), found)
        for i in range(start, len(have)):
            parts = summands(have[i][0])
            if parts is None:
                continue
            sign = have[i][1]
            opened = have[:i] + have[i + 1 :] + [(e, c * sign) for e, c in parts[1]]
            if len(opened) > len(wanted) + SPARE:
                continue
            more = parts[0] if known == 0 and sign == 1 else (known or 0) + (parts[0] or 0) * sign
            yield from self._sum(wanted, constant, opened, more, i, b)
        if not have:
            self.note(b, f"nothing stands for {_word(term)}")

    def _constant(
        self, constant: float | Number, have: list[tuple[Expr, float]], known: Any, b: Binding
    ) -> Iterator[Binding]:
        if isinstance(constant, Number):
            if self.loose:
                yield b
            elif have:
                self.note(b, f"{constant.name} is {label(have[0][0])}, not a number that is known")
            else:
                yield from self._number(constant, known, b)
        elif have:
            self.note(b, f"{label(have[0][0])} is added")
        elif _close(constant, known):
            yield b

    # -- primitives ------------------------------------------------------------------------------

    def _call(self, term: Call, expr: Expr, b: Binding) -> Iterator[Binding]:
        if term.name in _REDUCING:
            reduced = _REDUCING[term.name](expr)
            if reduced is not None:
                yield from self._reduced(term, *reduced, b)
            return
        if term.name == "maximum":
            pair = at_least(expr)
            if pair is not None:
                yield from self._all(term.arguments, pair, replace(b, score=b.score + 1))
            return
        step = primitive(expr)
        if step is not None and step[0] == term.name and len(step[1]) >= len(term.arguments):
            for found in self._attributes(term, step[2], replace(b, score=b.score + 1)):
                yield from self._all(term.arguments, step[1], found)

    def _attributes(self, term: Call, given: Mapping[str, Any], b: Binding) -> Iterator[Binding]:
        for name, value in term.attributes:
            if isinstance(value, Number):
                b = _with(b, value.name, given.get(name))
            elif isinstance(value, Mask):
                seen = masked(self.told, given.get(name))
                if seen is None:
                    self.note(b, _untold(given.get(name)))
                    return
                b = _hiding(b, value.name, seen)
            elif not self.loose and given.get(name) != value:
                self.note(b, f"{name} of {term.name} is {given.get(name)!r}, not {value!r}")
                return
        yield b

    def _all(
        self, terms: tuple[Term, ...], given: tuple[Any, ...], b: Binding
    ) -> Iterator[Binding]:
        if not terms:
            yield b
            return
        for found in self._match(terms[0], given[0], b):
            yield from self._all(terms[1:], given[1:], found)

    def _reduced(
        self, term: Call, of: Expr, dims: tuple[int, ...] | int, b: Binding
    ) -> Iterator[Binding]:
        for found in self._match(term.arguments[0], of, b):
            if self.loose:
                yield found
            elif not isinstance(dims, int):
                self.note(found, f"the {term.name} is over dims {dims}, not over the last")
            elif found.dims not in (0, dims):
                self.note(found, f"one {term.name} is over {found.dims} dims, another over {dims}")
            else:
                yield replace(found, dims=dims, score=found.score + 1)

    # -- equality --------------------------------------------------------------------------------

    def same(self, one: Any, other: Any, depth: int = 6) -> bool:
        """Whether two arguments have one value: one node, or equal pure steps on memory that the graph
        never writes."""
        if one is other:
            return True
        if isinstance(one, Node) and isinstance(other, Node):
            if not self._steady(one) or not self._steady(other):
                return False
            one, other = origin(one), origin(other)
            if one is other:
                return True
        if isinstance(one, tuple | list) and isinstance(other, tuple | list):
            return len(one) == len(other) and all(
                self.same(a, b, depth) for a, b in zip(one, other, strict=True)
            )
        if not isinstance(one, Node) or not isinstance(other, Node):
            return type(one) is type(other) and bool(one == other)
        name = canonical(one)
        return (
            depth > 0
            and name is not None
            and name == canonical(other)
            and one.target == other.target
            and (is_pointwise(one) or name in _PURE)
            and name != "dropout"
            and one.kwargs.keys() == other.kwargs.keys()
            and not any(
                self.memory.written(n) for n in (*one.all_input_nodes, *other.all_input_nodes)
            )
            and all(self.same(one.kwargs[k], other.kwargs[k], depth - 1) for k in one.kwargs)
            and self.same(one.args, other.args, depth - 1)
        )

    def _steady(self, expr: Expr) -> bool:
        """Whether a value is for good what it was before its casts."""
        while isinstance(expr, Node) and (source := cast_of(expr)) is not None:
            if self.memory.written(expr) or self.memory.written(source):
                return False
            expr = source
        return True


_READERS: Mapping[type[Term], Callable[..., Iterator[Binding]]] = {
    Bounded: Matcher._bounded,
    Call: Matcher._call,
    Half: Matcher._half,
    Named: Matcher._named,
}
_REDUCING = {"mean": mean_of, "amax": amax_of}
_PURE = frozenset(
    {"chunk", "expand", "getitem", "mT", "narrow", "permute", "reshape", "split", "split_with_sizes",
     "squeeze", "t", "transpose", "unbind", "unsqueeze"}
)  # fmt: skip


Factors = list[tuple[Term, float]]
Definition = tuple[Mapping[str, Any], Callable[[Term], Term]]


def _by_tanh(x: Term) -> Term:
    cubic = (x + x**3 * 0.044715) * math.sqrt(2 / math.pi)
    return x * (call("tanh", cubic) + 1.0) * 0.5


_DEFINITIONS: Mapping[str, tuple[Definition, ...]] = {
    "gelu": (
        ({"approximate": "none"}, lambda x: x * (call("erf", x * 2**-0.5) + 1.0) * 0.5),
        ({"approximate": "tanh"}, _by_tanh),
    ),
    "sigmoid": (({}, lambda x: (call("exp", -x) + 1.0) ** -1.0),),
}
"""Primitives of torch as people write them out, by the attributes that they then have."""


def _apart(expr: Expr, exponent: float) -> tuple[float, list[tuple[Expr, float]]] | None:
    """A coefficient and the factors of ``expr ** exponent``.

    ``(a b) ** 0.5`` is not ``a ** 0.5 b ** 0.5`` where both are negative, nor ``(a ** 2) ** 0.5`` ``a``.
    """
    parts = factors(expr) or scaled_least(expr)
    if parts is None:
        return None
    coefficient, found = parts
    if exponent % 1 and (len(found) > 1 or found[0][1] % 2 == 0 or coefficient < 0):
        return None
    return coefficient**exponent, [(e, p * exponent) for e, p in found]


def _rank(term: Term) -> int:
    """The most telling first; holes, which anything fills, last."""
    if isinstance(term, Number):
        return 5
    if isinstance(term, Tensor):
        return 3 if term.over == "all" else 4
    return {Named: 2, Half: 2}.get(type(term), 1)


def _word(term: Term) -> str:
    if isinstance(term, Tensor | Number | Named | Mask):
        return term.name
    if isinstance(term, Call):
        return term.name
    return term.tensor.name if isinstance(term, Half) else type(term).__name__.lower()
