"""Forward mode: a call whose inputs carry tangents is its decomposition, which torch differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tileops.engine.boundary.instances import resolve
from tileops.engine.boundary.schema import returned_of
from tileops.engine.errors import TransformError
from tileops.engine.manifest.entry import Branch

__all__ = ["carrying"]


def carrying(cls: Any, branch: Branch) -> Callable[..., Any]:
    """What the Autograd kernel of an operator asks within a level of forward mode: the results, with
    tangents; ``NotImplemented`` where no input has one."""
    returned = returned_of(cls.entry, branch)
    written = [*branch.writes, *(["out"] if branch.out else [])]
    count = len(cls.entry.inputs)

    def carry(*args: Any) -> Any:
        tensors = [t for t in args[:-1] if t is not None]
        if not any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            return NotImplemented
        if written or cls.decomposition is None:
            why = f" through a call that writes '{written[0]}'" if written else ""
            raise TransformError(
                cls.__name__,
                f"forward-mode differentiation{why}",
                "pass primals, or detach the input",
            )
        op = resolve(cls, args[-1]).op
        results = cls.decomposition(*args[:count], **op._params)
        results = results if isinstance(results, tuple) else (results,)
        own = tuple(_own(results[n], tensors) for n in returned)
        return own[0] if len(own) == 1 else own

    return carry


def _own(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """An op returns a contiguous tensor of its own, whatever its decomposition does."""
    if result._is_view() or any(result is tensor for tensor in inputs):
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()
