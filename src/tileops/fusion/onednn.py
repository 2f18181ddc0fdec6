"""oneDNN's product as one call of compiled code.

Inductor has that operator for weights that it may rearrange once, and refuses it for others. So the graph
holds one of ours, which Inductor is told to write as a call of oneDNN's: no Python stands between, as it
would for the node of an op, whose code a large product drives out of the caches each time.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from tileops.fusion.graph import Edit, value_of
from tileops.gemm.kernels import on_cpu
from tileops.gemm.kernels.on_cpu import FUSED, SWAPPED

__all__ = ["FUSED", "emit", "linear", "swaps"]

aten = torch.ops.aten
_library = torch.library.Library("tileops", "FRAGMENT")
_library.define(
    "onednn_linear(Tensor x, Tensor weight, Tensor? bias, str word, str way) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides),
)


def _shaped(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, word: str, way: str
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("onednn_linear", on_cpu.linear, "CPU")
torch.library.register_fake("tileops::onednn_linear", _shaped, lib=_library)


@cache
def linear() -> torch._ops.OpOverload:
    """``activation(x @ weight.T + bias)``, the activation by oneDNN's two words; known to Inductor."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    found: torch._ops.OpOverload = torch.ops.tileops.onednn_linear.default
    call = fallback_handler(torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False)

    def lower(x: Any, weight: Any, bias: Any, word: str, way: str) -> Any:
        return call(x, weight, bias, word, [], way)

    register_lowering(found, type_promotion_kind=None)(lower)
    return found


def swaps(x: torch.Tensor) -> bool:
    """Whether a product of the rows of ``x`` is computed in the other order."""
    return all(type(n) is int for n in x.shape[:-1]) and math.prod(x.shape[:-1]) in SWAPPED


def emit(edit: Edit, x: Node, weight: Node, bias: Node | None, activation: str | None) -> Node:
    """The product of ``x``, ``[*B, K]``, by ``weight``, ``[N, K]``, before an edit's anchor."""
    words = ("none", "") if activation is None else FUSED[activation]
    if not swaps(value_of(x)):
        return edit.call(linear(), x, weight, bias, *words)
    # The other order is transposed and without bias, which Inductor makes one loop of.
    *shape, depth = value_of(x).shape
    rows = edit.call(aten.reshape.default, x, [-1, depth]) if len(shape) > 1 else x
    d = edit.call(aten.t.default, edit.call(linear(), weight, rows, None, *words))
    if bias is not None:
        d = edit.call(aten.add.Tensor, d, bias)
    d = edit.call(aten.contiguous.default, d)
    wide = [*shape, value_of(weight).shape[0]]
    return edit.call(aten.reshape.default, d, wide) if len(shape) > 1 else d
