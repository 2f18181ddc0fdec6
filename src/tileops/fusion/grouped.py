"""Torch's attention on key heads that are repeated for their queries: it is given them as they are.

The mask stays whatever it is, so nothing of what is computed changes, only what is copied before.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from tileops.fusion.cost import takes_groups
from tileops.fusion.graph import Edit, canonical, value_of
from tileops.fusion.heads import between, unspread
from tileops.fusion.policies import policy_of
from tileops.fusion.reading import argument, equal_shapes
from tileops.fusion.rewrite import Rewrite

__all__ = ["group"]

NAME = "scaled_dot_product_attention"
HEADS = 1


def group(rewrite: Rewrite) -> None:
    """Let torch's attention read grouped heads where its kernel takes them uncopied."""
    if rewrite.autocast:
        return  # it casts what attention is given
    for node in list(rewrite.graph.nodes):
        if canonical(node) != NAME:
            continue
        repeated = _repeated(node)
        if repeated is None:
            continue
        said, by = policy_of(node, "auto", rewrite.policy)
        reason = f"policy never, by {by}" if said == "never" else _group(rewrite, node, repeated)
        if reason:
            rewrite.report.add("declined", node, NAME, reason=reason)


def _repeated(node: Node) -> tuple[Node, Node, Node, Node] | None:
    """What ``node`` is given as keys and values, and what they repeat, where it repeats their heads."""
    given = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    fakes = [value_of(one) for one in given]
    if not all(isinstance(fake, FakeTensor) and fake.dim() == 4 for fake in fakes):
        return None
    keys, values = unspread(given[1]), unspread(given[2])
    if keys is None or values is None or {keys[1], values[1]} != {HEADS}:
        return None
    if not equal_shapes(value_of(keys[0]).shape[:3], value_of(values[0]).shape[:3]):
        return None
    return given[1], given[2], keys[0], values[0]


def _group(rewrite: Rewrite, node: Node, repeated: tuple[Node, Node, Node, Node]) -> str:
    """'' where it is done, else why not."""
    query, mask = argument(node, 0, "query"), argument(node, 3, "attn_mask")
    dropout = argument(node, 4, "dropout_p", default=0.0)
    causal, scale = argument(node, 5, "is_causal", default=False), argument(node, 6, "scale")
    keys, values = repeated[2:]
    steps = {node}
    for wide, source in zip(repeated[:2], (keys, values), strict=True):
        own = between(source, wide)
        if any(rewrite.memory.written(source, start=step, end=node) for step in own):
            return f"{source.name} is written in between"
        asks = value_of(source).requires_grad == value_of(wide).requires_grad
        if not asks or not rewrite.modes.one({*own, node}):
            return f"{wide.name} stops the gradient"
        steps |= own
    q, k, v = map(value_of, (query, keys, values))
    if not takes_groups(q, k, v, value_of(mask), dropout, causal):
        return "no kernel of torch's attention reads grouped heads here"
    edit = Edit(rewrite.graph, node, rewrite.mode)
    given = {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal, "scale": scale}
    function = torch.nn.functional.scaled_dot_product_attention
    call = edit.call(function, query, keys, values, **given, enable_gqa=True)
    problem = edit.replace({node: call})
    if problem:
        return problem
    rewrite.report.substituted(
        call, NAME, f"torch.nn.functional.{NAME}(..., enable_gqa=True)", steps
    )
    edit.erase_unused(steps)
    return ""
