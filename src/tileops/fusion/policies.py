"""What the caller, or an op's entry, wants of fusion."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.fx import Node
from torch.fx.traceback import annotate

__all__ = ["POLICIES", "check_policy", "policy", "policy_of"]

POLICIES = ("never", "always", "auto")
_KEY = "tileops.fusion"


def check_policy(value: object) -> str:
    """The policy itself. Raises ``ValueError``."""
    if value not in POLICIES:
        raise ValueError(f"fusion policy {value!r}; accepted: {', '.join(POLICIES)}")
    return str(value)


def policy(wanted: str) -> contextlib.AbstractContextManager[Any]:
    """``with tileops.fusion.policy("never"): ...`` inside compiled code: the ops called there keep their
    own kernels (``never``), are inlined wherever that is possible (``always``), or as the cost rule
    says (``auto``). Over what the op's entry and the backend's options say. Eager code ignores it.

    Raises ``ValueError`` for another word.
    """
    return annotate({_KEY: check_policy(wanted)})


def policy_of(node: Node, entry_policy: str, option: str | None) -> tuple[str, str]:
    """The policy for a call of an op, and whose word it is."""
    said = (node.meta.get("custom") or {}).get(_KEY)
    if said is not None:
        return said, "call"
    if option is not None:
        return option, "options"
    return entry_policy, "entry"
