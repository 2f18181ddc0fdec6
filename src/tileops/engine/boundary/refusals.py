"""What no operator lets pass: superfluous arguments, gradients, writes to what
requires grad, odd layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileops.engine.errors import BackwardError, CheckError
from tileops.engine.manifest.entry import Entry
from tileops.engine.signature.runtime import refuse

__all__ = [
    "refuse_superfluous", "refuse_without_storage", "refuse_written_grad", "refusing_rules",
]  # fmt: skip


def refuse_superfluous(self: Any, extra: tuple[Any, ...], unknown: dict[str, Any]) -> None:
    """Arguments that the call has no place for."""
    entry: Entry = type(self).entry
    accepted = ", ".join(i.name for i in entry.inputs) + (", out" if entry.has_out else "")
    if extra:
        count = len(entry.positional_inputs)
        refuse(
            entry.name,
            f"positional {count + 1}",
            type(extra[0]).__name__,
            f"{count} positional arguments, of {accepted or 'none'}",
        )
    name = next(iter(unknown))
    given = type(unknown[name]).__name__
    refuse(entry.name, name, given, f"arguments {accepted}" if accepted else "no arguments")


def refuse_without_storage(cls: Any, given: dict[str, Any]) -> None:
    """Sparse, MKL-DNN and nested tensors have no strides or data pointer to make a plan by."""
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise CheckError(cls.__name__, name, kind, "a strided tensor")


def refuse_written_grad(cls: Any, written: dict[str, Any], given: dict[str, Any]) -> None:
    """A write is not differentiable: refuse a written tensor in the graph, and a gradient that
    would end in one."""
    for name, tensor in written.items():
        if tensor.requires_grad:
            raise CheckError(
                cls.__name__,
                name,
                "a tensor that requires grad",
                "one that does not: it is written",
            )
    if not cls.entry.outputs or set(written) & {"out"}:
        for name, tensor in given.items():
            if tensor is not None and tensor.requires_grad:
                raise BackwardError(cls.__name__) from CheckError(
                    cls.__name__, name, "a tensor that requires grad", "one that does not"
                )


_library = torch.library.Library("tileops", "FRAGMENT")
_library.define(
    "refuse_backward(Tensor grad, SymInt[] size, ScalarType dtype, str op, str argument) -> Tensor"
)


def _refuse_backward(
    grad: torch.Tensor, size: Any, dtype: torch.dtype, op: str, argument: str
) -> torch.Tensor:
    raise BackwardError(op, argument)


def _fake_backward(
    grad: torch.Tensor, size: Any, dtype: torch.dtype, op: str, argument: str
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=grad.device)


_library.impl("refuse_backward", _refuse_backward, "CompositeExplicitAutograd")
torch.library.register_fake("tileops::refuse_backward", _fake_backward, lib=_library)


def refusing_rules(cls: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``setup_context`` and ``backward`` of an ``autograd.Function`` that refuses at backward, not
    before: the refusal is an operator, so that a graph with a backward can be compiled, and raises
    only if that backward runs."""

    names = [item.name for item in cls.entry.inputs]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.facts = [
            (t.shape, t.dtype) if isinstance(t, torch.Tensor) and t.requires_grad else None
            for t in inputs
        ]

    def backward(ctx: Any, *grads: Any) -> Any:
        refuse = torch.ops.tileops.refuse_backward.default
        arrived = next(grad for grad in grads if grad is not None)
        return tuple(
            None if facts is None else refuse(arrived, *facts, cls.__name__, names[n])
            for n, facts in enumerate(ctx.facts)
        )

    return setup_context, backward
