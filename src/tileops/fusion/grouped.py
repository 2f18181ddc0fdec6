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


def _repeated(node: Node) -> tuple[Node, ...] | None:
    """What ``node`` is given as keys and values, and what they repeat, where it repeats their heads."""
    given = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    values = [value_of(one) for one in given]
    if not all(isinstance(v, FakeTensor) and v.dim() == 4 for v in values):
        return None
    found = [unspread(one) for one in given[1:]]
    if any(one is None or one[1] != HEADS for one in found):
        return None
    keys, values = (one[0] for one in found if one is not None)
    alike = equal_shapes(value_of(keys).shape[:3], value_of(values).shape[:3])
    return (*given[1:], keys, values) if alike else None


def _group(rewrite: Rewrite, node: Node, repeated: tuple[Node, ...]) -> str:
    """'' where it is done, else why not."""
    query, mask = argument(node, 0, "query"), argument(node, 3, "attn_mask")
    dropout = argument(node, 4, "dropout_p", default=0.0)
    causal, scale = argument(node, 5, "is_causal", default=False), argument(node, 6, "scale")
    for wide, source in zip(repeated[:2], repeated[2:], strict=True):
        steps = between(source, wide)
        if any(rewrite.memory.written(source, start=step, end=node) for step in steps):
            return f"{source.name} is written in between"
        asks = value_of(source).requires_grad == value_of(wide).requires_grad
        if not asks or not rewrite.modes.one({*steps, node}):
            return f"{wide.name} stops the gradient"
    keys, values = repeated[2:]
    if not takes_groups(*map(value_of, (query, keys, values, mask)), dropout, causal):
        return "no kernel of torch's attention reads grouped heads here"
    edit = Edit(rewrite.graph, node, rewrite.mode)
    given = {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal, "scale": scale}
    function = torch.nn.functional.scaled_dot_product_attention
    call = edit.call(function, query, keys, values, **given, enable_gqa=True)
    problem = edit.replace({node: call})
    if problem:
        return problem
    steps = {node, *between(keys, repeated[0]), *between(values, repeated[1])}
    stacks = dict.fromkeys(step.meta.get("stack_trace") or "" for step in sorted(steps))
    rewrite.report.add(
        "substituted",
        call,
        NAME,
        call=f"torch.nn.functional.{NAME}(..., enable_gqa=True)",
        steps=len(steps),
        stacks=[stack for stack in stacks if stack],
    )
    edit.erase_unused(steps)
    return ""
