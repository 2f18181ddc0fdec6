"""The gradients of what a kernel computes by functions that torch differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["pulled"]


def pulled(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    grad: torch.Tensor,
) -> tuple[Any, ...]:
    """The gradients of ``function(*inputs)`` for ``grad``, contiguous, None for an input not ``wanted``.

    By torch's autograd, wherever the dispatcher is and whatever mode the caller is in.
    """
    # Leaving inference mode also goes back above the dispatcher's autograd, where a kernel may be below.
    with torch.inference_mode(False), torch.enable_grad():
        # Of what inference mode made, autograd saves copies alone.
        inputs = [t.clone() if t.is_inference() else t.detach() for t in inputs]
        grad = grad.clone() if grad.is_inference() else grad
        leaves = [t.requires_grad_() for t, wish in zip(inputs, wanted, strict=True) if wish]
        found = iter(torch.autograd.grad(function(*inputs), leaves, grad))
    # A view made under no_grad could not be written later where gradients are on; .data is none.
    return tuple(next(found).contiguous().data if wish else None for wish in wanted)
