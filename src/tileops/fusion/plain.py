"""Functions of torch in the place of what is written out, where an op's own kernels would call the same."""

from __future__ import annotations

import torch
from torch.fx import Node

from tileops.engine.pattern import NoMatchError, Pattern
from tileops.fusion.cost import takes_groups, written_out_wins
from tileops.fusion.graph import Edit, canonical, value_of
from tileops.fusion.proof import Proof, permuted
from tileops.fusion.reading import equal_shapes

__all__ = ["plainly"]


def plainly(edit: Edit, pattern: Pattern, proof: Proof) -> tuple[Node, str] | str:
    """The call of the pattern's function, and how a report writes it; or why there is none."""
    assert pattern.plain is not None
    try:
        wanted = pattern.plain(proof.facts)
    except NoMatchError as error:
        return str(error)
    root = value_of(proof.root)
    masked = any(seen.masks for seen in proof.facts.masks.values())
    if canonical(proof.root) == wanted.function:
        if not masked:
            return pattern.no_gain
    else:
        reason = written_out_wins(root, proof.facts.shape("k")[1])
        if reason:
            return reason
    given = [_as_found(edit, pattern, proof, name, True) for name in wanted.holes]
    named = dict(wanted.named)
    q, k, v = map(value_of, given)
    if not takes_groups(q, k, v, causal=bool(named.get("is_causal"))):
        edit.undo()
        given = [_as_found(edit, pattern, proof, name, False) for name in wanted.holes]
    entries = [value_of(node).shape[1:2] for node in given]
    if not all(equal_shapes(entries[0], other) for other in entries[1:]):
        named[wanted.grouped] = True
    call = edit.call(getattr(torch.nn.functional, wanted.function), *given, **named)
    shown = ", ".join((*wanted.holes, *(f"{k}={v!r}" for k, v in named.items())))
    return call, f"torch.nn.functional.{wanted.function}({shown})"


def _as_found(edit: Edit, pattern: Pattern, proof: Proof, name: str, grouped: bool) -> Node:
    """The tensor in a hole, its dims in the order of the root's."""
    given = proof.inputs[name]
    order = tuple(given.layout[d] for d in pattern.layout)
    node = given.node if grouped or given.spread is None else given.spread
    return permuted(edit, node, order)
