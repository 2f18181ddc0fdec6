"""``sharding`` of an entry: along which dims a call may be spread over ranks, and in which inputs it
is linear."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.expr import DTYPES, Expr, ExpressionError, parse

if TYPE_CHECKING:
    from tileops.engine.manifest.document import Located
    from tileops.engine.manifest.entry import Entry

__all__ = ["WORDS", "ShardingRule", "read_sharding", "share_sharding"]

WORDS = ("shard", "replicate", "sum")
_KEY = re.compile(r"\s*([A-Za-z]\w*)\s*(?:\[\s*([A-Za-z]\w*)\s*\])?\s*")


@dataclass(frozen=True)
class ShardingRule:
    """What holds of ``names``: dims that are sharded together, or inputs that are partial together.

    ``at``: the parameter that picks axes of a splice (``S[dim]``). ``word``: an expression of one of
    ``WORDS``.
    """

    key: str
    names: tuple[str, ...]
    at: str | None
    word: Expr

    def value(self, env: Mapping[str, Any], passed: frozenset[str]) -> str:
        """The word that holds under ``env``."""
        word: str = self.word.evaluate({**env, **{word: word for word in WORDS}}, passed)
        return word

    @property
    def conditions(self) -> list[Expr]:
        """What chooses between words."""
        tests = [node.test for node in ast.walk(self.word.tree) if isinstance(node, ast.IfExp)]
        return [Expr(ast.unparse(test)) for test in tests]


def read_sharding(
    fail: Callable[[Located, str], NoReturn], node: Located | None
) -> tuple[ShardingRule, ...]:
    """The rules of an entry; raises through ``fail``."""
    rules = []
    for key, child in (node.value if node else {}).items():
        try:
            rules.append(_rule(key, child.value))
        except ExpressionError as error:
            fail(child, f"sharding.{key}: {error}")
    return tuple(rules)


def _rule(key: str, text: object) -> ShardingRule:
    names, at = [], None
    for part in key.split(","):
        match = _KEY.fullmatch(part)
        if match is None:
            raise ExpressionError(
                f"{key!r} is no dim, <splice>[<param>], or list of dims or inputs"
            )
        names.append(match[1])
        at = match[2] or at
    if at is not None and len(names) > 1:
        raise ExpressionError(f"{key!r}: <splice>[<param>] stands alone")
    word = parse(text)
    for leaf in _leaves(word.tree):
        if not isinstance(leaf, ast.Name) or leaf.id not in WORDS:
            shown = ast.unparse(leaf)
            raise ExpressionError(f"{shown!r} is none of {', '.join(WORDS)}")
    return ShardingRule(key, tuple(names), at, word)


def share_sharding(entries: dict[str, Entry]) -> None:
    """What is said of an op holds of its gradient, unless that says it itself."""
    for entry in list(entries.values()):
        backward = entries.get(entry.backward or "")
        if backward is None or backward.sharding or not entry.sharding:
            continue
        known = {n for i in backward.inputs for n in i.shape.names} | set(backward.dims)
        known |= backward.shape_params | set(backward.dtypes) | set(DTYPES)
        for condition in (c for rule in entry.sharding for c in rule.conditions):
            unknown = sorted(condition.names - known)
            if unknown:
                raise ManifestError(backward.where, backward.name, (
                    f"sharding: it has none, and that of {entry.name} asks for '{unknown[0]}', "
                    "which it does not know"))  # fmt: skip
        object.__setattr__(backward, "sharding", entry.sharding)


def _leaves(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.IfExp):
        return [*_leaves(node.body), *_leaves(node.orelse)]
    return [node]
