"""What integer inputs hold: checked only on request, since it reads the device."""

from __future__ import annotations

from typing import Any

from tileops.engine.errors import CheckError
from tileops.engine.kernel import CallSpec

__all__ = ["check_content"]


def check_content(op: Any, call: CallSpec, arguments: tuple[Any, ...]) -> None:
    """Raise ``CheckError`` where an index input holds a value outside the entry's bounds."""
    env = {**call.dims, **vars(call.params)}
    passed = frozenset(name for name, spec in call.inputs.items() if spec is not None)
    for item, tensor in zip(op.entry.inputs, arguments, strict=False):
        if item.content is None or tensor is None or not tensor.numel():
            continue
        low, high = int(tensor.min()), int(tensor.max())
        least = item.content.min.evaluate(env, passed) if item.content.min else low
        most = item.content.max.evaluate(env, passed) if item.content.max else high
        if low < least or high > most:
            raise CheckError(
                call.op, item.name, f"values from {low} to {high}", f"values from {least} to {most}"
            )
