"""The language in which a family says which plain PyTorch means one of its ops: terms with holes.

A ``Term`` is arithmetic over holes and primitives, written with Python's operators. It stands for every
spelling of what it means: factors and summands in any order, powers as products, quotients or roots,
casts where the dtypes allow them. ``tileops.fusion`` reads a graph against it; nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "Bounded", "Call", "Found", "Half", "Mask", "Named", "NoMatchError", "Number", "Pattern", "Plain",
    "Product", "Sum", "Tensor", "Term", "amax", "at_least", "bounded", "call", "half", "mask", "mean",
    "named", "number", "tensor",
]  # fmt: skip


class NoMatchError(Exception):
    """What was found is not the op after all; the message is the reason in the report of a near miss. It
    goes no further."""


class Term:
    """Arithmetic with other terms and numbers."""

    def __mul__(self, other: Term | float) -> Term:
        """A number that is a hole is a factor of its own: it takes what numbers the graph multiplies by."""
        if isinstance(other, int | float):
            mine = _factors(self)
            return Product(mine.factors, mine.coefficient * other)
        one, two = _factors(self), _factors(other)
        powers = dict(one.factors)
        for term, power in two.factors:
            powers[term] = powers.get(term, 0.0) + power
        return Product(tuple(powers.items()), one.coefficient * two.coefficient)

    __rmul__ = __mul__

    def __pow__(self, power: float) -> Term:
        mine = _factors(self)
        return Product(
            tuple((t, p * power) for t, p in mine.factors), float(mine.coefficient**power)
        )

    def __truediv__(self, other: Term | float) -> Term:
        return self * (1.0 / other if isinstance(other, int | float) else other**-1.0)

    def __neg__(self) -> Term:
        return self * -1.0

    def __add__(self, other: Term | float) -> Term:
        return _sum(self, other, 1.0)

    __radd__ = __add__

    def __sub__(self, other: Term | float) -> Term:
        return _sum(self, other, -1.0)


@dataclass(frozen=True)
class Tensor(Term):
    """A hole for a tensor. ``over``: ``all`` dims of the result, the ``last`` ones (those that a
    reduction goes over), or ``any`` shape. ``layout``: how the op's dims lie in what is found.
    ``grouped``: the op's dim of which each entry may be found several times in a row. ``wide``: of the
    dtype of the result, or float32 where that is narrower."""

    name: str
    over: str = "all"
    layout: tuple[int, ...] = ()
    grouped: int | None = None
    wide: bool = False


@dataclass(frozen=True)
class Number(Term):
    """A hole for a number that the graph knows."""

    name: str


@dataclass(frozen=True)
class Mask(Term):
    """``scores``, of which a mask hides some or none. As an attribute of a call: the mask itself. It is
    found where the graph tells what it hides."""

    name: str
    scores: Term | None = None


@dataclass(frozen=True)
class Named(Term):
    """A step that the op returns too, or rounds to the dtype of its result."""

    name: str
    term: Term


@dataclass(frozen=True)
class Bounded(Term):
    """What lies between two numbers, and which a graph may therefore bound by these or wider ones."""

    term: Term
    low: float
    high: float


@dataclass(frozen=True)
class Half(Term):
    """The first or second half of a tensor along its last dim; with ``layout``, the first or second entry
    of each pair: as halves (``neox``) or side by side (``interleaved``)."""

    tensor: Tensor
    second: bool
    layout: Number | None = None


@dataclass(frozen=True)
class Product(Term):
    """``coefficient`` times its factors, each to a power."""

    factors: tuple[tuple[Term, float], ...]
    coefficient: float = 1.0


@dataclass(frozen=True)
class Sum(Term):
    """Its summands, each with a coefficient, and a constant."""

    terms: tuple[tuple[Term, float], ...]
    constant: float | Number = 0.0


@dataclass(frozen=True)
class Call(Term):
    """A primitive by its canonical name; ``attributes``: what else it must have been given."""

    name: str
    arguments: tuple[Term, ...]
    attributes: tuple[tuple[str, Any], ...] = ()


class Found(Protocol):
    """What a match knows."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """By hole."""

    @property
    def dims(self) -> int:
        """How many of the last dims its reductions go over."""

    def shape(self, name: str) -> tuple[Any, ...]:
        """Of the tensor in a hole, as the op gets it."""

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two sizes are known to be equal."""

    def at_most(self, one: Any, other: Any) -> bool:
        """Whether a size is known to be no larger than another."""

    def mask(self, name: str) -> tuple[Any, Any]:
        """Row ``i`` sees column ``j`` where ``first <= j - i <= last``; None: no limit."""


def _params(found: Found) -> dict[str, Any]:
    return dict(found.numbers)


@dataclass(frozen=True)
class Plain:
    """A call of a function of ``torch.nn.functional``: with the tensors in ``holes`` as they are found, and
    named arguments. ``grouped``: the one that says that dim 1 of some has fewer entries than of others."""

    function: str
    holes: tuple[str, ...]
    named: Mapping[str, Any]
    grouped: str


@dataclass(frozen=True)
class Pattern:
    """What plain PyTorch means the op whose entry names this pattern.

    Holes for tensors have the names of the op's inputs, holes for numbers those of its params.
    """

    meanings: tuple[Term, ...]
    """The fullest first: where inputs are optional, one with and one without."""
    hint: Term | tuple[Term, ...]
    """What shows that the op may be meant, or any of several. Where it is found and no meaning holds, the
    report says why."""
    calls: tuple[str, ...] = ()
    """Functions of torch that hold the hint in themselves, such as ``rms_norm``."""
    params: Callable[[Found], Mapping[str, Any]] = _params
    """The op's params; raises ``NoMatchError``."""
    outputs: tuple[str, ...] = ()
    """Named steps that the op's further outputs stand for."""
    beside: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)
    """What further outputs mean that need be no steps on the way to the first, for each of ``meanings``:
    any nodes, or none, stand for them."""
    result: str = ""
    """The dtype to which the meaning is cast, where the op's first output is no float of its inputs' dtype.
    All steps before are then in float32, but for what is exact in any dtype."""
    layout: tuple[int, ...] = ()
    """How the dims of what is found lie in the op's first output."""
    leading: bool = False
    """The op takes all dims but the last in any order, the same for its inputs, which broadcast. It is
    given them in the order that they have in memory."""
    no_gain: str = ""
    """Why the op's own kernels are no faster than what it would replace: then only a target is."""
    plain: Callable[[Found], Plain] | None = None
    """The function of torch that serves as well as the op's own kernels: it takes the op's place where no
    target serves the op. Raises ``NoMatchError`` for what it does not mean."""
    absent: str = ""
    """Why no op has this meaning, where none has: it is reported as a near miss of the nearest one."""


def tensor(
    name: str,
    over: str = "all",
    layout: tuple[int, ...] = (),
    grouped: int | None = None,
    wide: bool = False,
) -> Tensor:
    """A hole for a tensor."""
    return Tensor(name, over, layout, grouped, wide)


def mask(name: str, scores: Term | None = None) -> Mask:
    """Scores of which a mask may hide some, or an argument that is such a mask."""
    return Mask(name, scores)


def number(name: str) -> Number:
    """A hole for a number."""
    return Number(name)


def named(name: str, term: Term) -> Named:
    """A step with a name."""
    return Named(name, term)


def half(of: Tensor, second: bool = False, layout: Number | None = None) -> Half:
    """A half of a tensor, or one entry of each pair of its last dim."""
    return Half(of, second, layout)


def call(name: str, *arguments: Term, **attributes: Any) -> Call:
    """A primitive."""
    return Call(name, arguments, tuple(sorted(attributes.items())))


def bounded(term: Term, low: float, high: float) -> Bounded:
    """A term between two numbers."""
    return Bounded(term, low, high)


def amax(of: Term) -> Call:
    """The largest over the last dims, which may be kept as dims of size 1."""
    return Call("amax", (of,))


def at_least(term: Term, least: Number) -> Call:
    """A term, or a number where that is larger."""
    return Call("maximum", (term, least))


def mean(of: Term) -> Call:
    """The mean over the last dims, kept as dims of size 1."""
    return Call("mean", (of,))


def _factors(term: Term) -> Product:
    return term if isinstance(term, Product) else Product(((term, 1.0),))


def _sum(one: Term, other: Term | float, sign: float) -> Term:
    mine = one if isinstance(one, Sum) else Sum(((one, 1.0),))
    if isinstance(other, int | float):
        assert not isinstance(mine.constant, Number)
        return Sum(mine.terms, mine.constant + sign * other)
    if isinstance(other, Number):
        assert mine.constant == 0.0
        assert sign == 1.0
        return Sum(mine.terms, other)
    more = other if isinstance(other, Sum) else Sum(((other, 1.0),))
    assert not isinstance(more.constant, Number)
    assert not isinstance(mine.constant, Number)
    added = tuple((term, sign * c) for term, c in more.terms)
    return Sum((*mine.terms, *added), mine.constant + sign * more.constant)
