"""In which dtypes the steps of a match may be; see ``proof``."""

from __future__ import annotations

import torch
from torch.fx import Node

from tileops.engine.pattern import NoMatchError
from tileops.fusion.graph import canonical, value_of
from tileops.fusion.matching import Binding
from tileops.fusion.reading import equal_shapes, holds, transparent

__all__ = ["JOINS", "REDUCTIONS", "WIDENED", "check_dtypes", "check_float32", "short"]

REDUCTIONS = ("mean", "std", "sum", "var", "var_mean")
JOINS = ("cat", "stack")
WIDENED = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes all of whose numbers an op that computes in float32 takes as they are."""
_SUMS = ("add", "rsub", "sub")
_EXACT = ("abs", "amax", "getitem", "max")
"""What rounds nothing, whatever its dtype."""


def short(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def check_dtypes(root: Node, region: set[Node], b: Binding, named: set[Node]) -> None:
    """Of the steps of a result in its inputs' dtype. Raises ``NoMatchError``."""
    dtype = value_of(root).dtype
    wide = dtype if holds(dtype, torch.float32) else torch.float32
    # What hides a score or adds 0 to it rounds nothing.
    hiding = {step for seen in b.masks.values() for step in seen.steps}
    exact = _before_means(region, named) | {
        node
        for node in region - named - _last_sums(root, region)
        if (canonical(node) in _SUMS and node not in hiding)
        or (b.dims and _is_reduced(node, root, b.dims))
    }
    for node in sorted(region):
        given = value_of(node)
        if not isinstance(given, torch.Tensor) or not given.dtype.is_floating_point:
            continue
        accepted = (dtype,) if node in named else (wide,) if node in exact else (dtype, wide)
        if given.dtype not in accepted:
            there = f"{node.name} is {short(given.dtype)}"
            raise NoMatchError(f"{there} where the op computes in {short(accepted[-1])}")


def check_float32(region: set[Node]) -> None:
    """Of the steps of a result in another dtype: only what is exact may be in one that is narrower."""
    for node in sorted(region):
        given = value_of(node)
        if not isinstance(given, torch.Tensor) or not given.dtype.is_floating_point:
            continue
        exact = canonical(node) in _EXACT or (canonical(node) != "to" and transparent(node))
        if given.dtype is not torch.float32 and not (exact and given.dtype in WIDENED):
            raise NoMatchError(
                f"{node.name} is {short(given.dtype)} where the op computes in float32"
            )


def _is_reduced(node: Node, root: Node, dims: int) -> bool:
    value = value_of(node)
    full = tuple(value_of(root).shape)
    return isinstance(value, torch.Tensor) and not equal_shapes(value.shape, full)


def _before_means(region: set[Node], named: set[Node]) -> set[Node]:
    """Means and all that goes into them."""
    found: set[Node] = set()
    waiting = [node for node in region if canonical(node) in REDUCTIONS]
    while waiting:
        node = waiting.pop()
        if node in region and node not in found and node not in named:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _last_sums(root: Node, region: set[Node]) -> set[Node]:
    """The sums of which the result is made, after which no other step comes."""
    found: set[Node] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        ends = canonical(node) in (*_SUMS, *JOINS, "reshape") or transparent(node)
        if node in region and ends:
            found.add(node)
            waiting += node.all_input_nodes
    return found
