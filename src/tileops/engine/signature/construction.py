"""The rules of an entry that its constructor checks: those about parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tileops.engine.manifest.entry import Entry, Rule
from tileops.engine.manifest.expr import DTYPES
from tileops.engine.signature.runtime import DTYPE_VALUES, fail_rule

__all__ = ["make_constructor_check", "settled_at_construction"]


def settled_at_construction(entry: Entry, rule: Rule) -> bool:
    """Whether a rule is about parameters alone."""
    return rule.require.names <= entry.shape_params | set(DTYPES) and not rule.require.presence


def make_constructor_check(entry: Entry) -> Callable[[dict[str, Any]], None]:
    """Checks the rules that only concern parameters; raises ``CheckError``."""
    rules = [rule for rule in entry.rules if settled_at_construction(entry, rule)]

    def check(params: dict[str, Any]) -> None:
        env = {**DTYPE_VALUES, **params}
        for rule in rules:
            if not rule.require.evaluate(env):
                shown = {name: params[name] for name in sorted(rule.require.names - set(DTYPES))}
                blame = rule.argument or next(iter(shown), "the constructor")
                fail_rule(entry.name, blame, rule.message, **shown)

    return check
