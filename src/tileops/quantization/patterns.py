"""What plain PyTorch means an op of this family.

The scale may be used or not, be there with its last dim or without, and its inverse multiply or itself
divide. A clamp after the division does nothing where it bounds by what the dtype holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tileops.authoring import pattern as p


def _quantisation(
    name: str, top: float, dtype: str, params: Callable[[p.Found], dict[str, Any]]
) -> p.Pattern:
    x = p.tensor(name)
    largest = p.amax(p.call("abs", x))
    least = p.at_least(largest, p.number("eps"))

    def numbers(divisor: p.Term) -> p.Term:
        quotient = p.bounded(x * divisor**-1.0 * top, -top, top)
        if dtype != "int8":
            return quotient
        return p.bounded(p.call("round", quotient, decimals=0), -top, top)

    return p.Pattern(
        meanings=(numbers(least), numbers(largest)),
        hint=largest,
        params=params,
        beside={"scale": (least * (1.0 / top), largest * (1.0 / top))},
        result=dtype,
    )


def _by_rows(found: p.Found) -> dict[str, Any]:
    if found.dims != 1:
        raise p.NoMatchError(f"it is over the last {found.dims} dims, the op over one")
    return _eps(found)


def _of_all(found: p.Found) -> dict[str, Any]:
    if found.dims != len(found.shape("x")):
        raise p.NoMatchError(f"it is over the last {found.dims} dims, the op over all")
    return _eps(found)


def _eps(found: p.Found) -> dict[str, Any]:
    return {"eps": found.numbers.get("eps", 0.0)}


INT8_ROWS = _quantisation("w", 127.0, "int8", _by_rows)
INT8_TENSOR = _quantisation("x", 127.0, "int8", _of_all)
FP8_ROWS = _quantisation("x", 448.0, "float8_e4m3fn", _by_rows)
