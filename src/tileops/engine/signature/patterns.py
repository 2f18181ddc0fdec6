"""What the elements of a shape pattern are, and sums of their widths."""

from __future__ import annotations

import ast

__all__ = ["is_call", "multiple_of", "sum_of"]


def is_call(element: ast.expr) -> bool:
    """Whether it is ``*bcast(...)`` or the like."""
    return isinstance(element, ast.Starred) and isinstance(element.value, ast.Call)


def sum_of(parts: list[str]) -> str:
    """The source of a sum, its ones counted."""
    number = sum(1 for part in parts if part == "1")
    words = [part for part in parts if part != "1"]
    if number or not words:
        words.append(str(number))
    return " + ".join(words) if len(words) == 1 else f"({' + '.join(words)})"


def multiple_of(node: ast.expr) -> tuple[str | None, str]:
    """``2*N`` or ``N*2`` as ('N', '2')."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for name, factor in ((node.left, node.right), (node.right, node.left)):
            if isinstance(name, ast.Name) and isinstance(factor, ast.Constant):
                return name.id, repr(factor.value)
    return None, ""
