"""Products of one row by a matrix on the CPU, which decoding one token is made of.

Such a product reads its matrix once and does two operations with each element, so reading is what it
costs. As multiplication and sum it becomes a loop of Inductor's that all cores share; as a matrix
product it stays a library's call, which in float32 was seen to use one core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from tileops.fusion.cost import one_row_pays
from tileops.fusion.graph import Edit, canonical, value_of
from tileops.fusion.placement import Call, call_of, served_in_tree
from tileops.fusion.policies import policy_of
from tileops.fusion.rewrite import Rewrite

__all__ = ["OneRow", "one_row", "unroll"]

aten = torch.ops.aten
NAME = "product of one row"
"""What reports call a product in plain PyTorch."""


@dataclass(frozen=True)
class OneRow:
    """``row`` (K elements) by ``matrix``, [N, K] or as its transpose [K, N]; then ``bias``."""

    row: Node
    matrix: Node
    transposed: bool
    bias: Node | None = None
    call: Call | None = None
    """Of the op that means it, where it is written so."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return NAME if self.call is None else self.call.name


def one_row(node: Node) -> OneRow | None:
    """The product that a node computes, where its left operand is one row."""
    name, args = canonical(node), cast("tuple[Any, ...]", node.args)
    if name == "linear":
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **node.kwargs}
        found = OneRow(given["input"], given["weight"], False, given.get("bias"))
    elif name in ("mm", "matmul") and len(args) == 2 and not node.kwargs:
        found = OneRow(args[0], args[1], True)
    elif (call := call_of(node)) is not None and call.name == "GEMMFwdOp":
        a, b = call.arguments
        found = OneRow(a, b, not call.op._params["trans_b"], call=call)
    else:
        return None
    values = [value_of(found.row), value_of(found.matrix)]
    if not all(isinstance(n, Node) for n in (found.row, found.matrix)) or values[1].dim() != 2:
        return None
    inner = values[1].shape[0 if found.transposed else 1]
    return found if values[0].dim() and values[0].numel() == inner else None


def unroll(rewrite: Rewrite) -> None:
    """Write products of one row as multiplication and sum, where that is faster."""
    if rewrite.autocast:
        return  # it says in which dtype products are computed
    for node in list(rewrite.graph.nodes):
        product = one_row(node)
        if product is None or value_of(product.matrix).device.type != "cpu":
            continue
        said, by = policy_of(node, "auto", rewrite.policy)
        reason = f"policy never, by {by}" if said == "never" else _unable(product)
        if not reason and said == "auto":
            reason = one_row_pays(value_of(product.row).dtype, value_of(product.row).numel())
        reason = reason or _unroll(node, product, rewrite)
        if reason:
            rewrite.report.add("declined", node, product.name, reason=reason)


def _unable(product: OneRow) -> str:
    """Why a product cannot be unrolled, whatever is wanted."""
    matrix, row = value_of(product.matrix), value_of(product.row)
    given = [row, matrix] + ([] if product.bias is None else [value_of(product.bias)])
    if not matrix.dtype.is_floating_point or any(t.dtype is not matrix.dtype for t in given):
        return "its operands are not of one floating dtype"
    if any(type(size) is not int for size in matrix.shape):
        return "the matrix has a size that varies"
    if matrix.stride(0 if product.transposed else 1) != 1:
        return "rows of the matrix are not contiguous"
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "a gradient is asked for"
    call = product.call
    return "" if call is None else served_in_tree(call.op, call.device)


def _unroll(node: Node, product: OneRow, rewrite: Rewrite) -> str:
    out, matrix = value_of(node), value_of(product.matrix)
    wide = torch.promote_types(out.dtype, torch.float32)
    edit = Edit(rewrite.graph, node, rewrite.mode)

    def widened(value: Any) -> Any:
        return value if value_of(value).dtype is wide else edit.call(aten.to.dtype, value, wide)

    weights = product.matrix
    if product.transposed:
        weights = edit.call(aten.t.default, weights)
    flat = edit.call(aten.reshape.default, product.row, [1, value_of(weights).shape[1]])
    result = edit.call(aten.mul.Tensor, widened(flat), widened(weights))
    result = edit.call(aten.sum.dim_IntList, result, [-1])
    if product.bias is not None:
        result = edit.call(aten.add.Tensor, result, widened(product.bias))
    if out.dtype is not wide:
        result = edit.call(aten.to.dtype, result, out.dtype)
    result = edit.call(aten.reshape.default, result, list(out.shape))
    problem = edit.replace({node: result})
    if problem:
        return problem
    why = f"reads {matrix.numel() * matrix.dtype.itemsize} bytes on all cores"
    rewrite.report.add("inlined", node, product.name, why=why)
    if product.call is not None and node not in rewrite.substituted:
        rewrite.inlined.append((product.call.op, product.call.device))
    edit.erase_unused([node])
    return ""
