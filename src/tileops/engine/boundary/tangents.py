"""Forward mode: a call whose inputs carry tangents is its decomposition, which torch differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from tileops.engine.boundary.instances import resolve
from tileops.engine.boundary.schema import returned_of
from tileops.engine.errors import TransformError
from tileops.engine.manifest.entry import Branch

__all__ = ["carrying", "tangent_of", "tangents_around"]


def carrying(cls: Any, branch: Branch) -> Callable[..., Any]:
    """What the Autograd kernel of an operator asks within a level of forward mode: the results, with
    tangents; ``NotImplemented`` where no input has one."""
    entry = cls.entry
    returned = returned_of(entry, branch)
    places = {item.name: n for n, item in enumerate(entry.inputs)}
    count = len(places)
    # What is returned by being written, and would have to carry a tangent.
    carried = ["out"] if branch.out else [o.is_input for o in entry.outputs]
    carried = [name for name in carried if name == "out" or name in branch.writes]

    def carry(*args: Any) -> Any:
        tensors = [t for t in args[:-1] if t is not None]
        if all(tangent_of(tensor) is None for tensor in tensors):
            return NotImplemented
        written = [n for n in branch.writes if tangent_of(args[places[n]]) is not None]
        for name in (*carried, *written):
            _refuse(cls, f" through a call that writes '{name}'")
        if cls.decomposition is None or not entry.outputs:
            _refuse(cls, "")
        op = resolve(cls, args[-1]).op
        try:
            results = cls.decomposition(*args[:count], **op._params)
        except NotImplementedError as error:  # some of ATen's functions have no such derivative
            raise TransformError(
                cls.__name__, f"forward-mode differentiation ({error})", "use reverse mode"
            ) from error
        results = results if isinstance(results, tuple) else (results,)
        for name, value in zip(branch.writes, results[len(entry.outputs) :], strict=True):
            args[places[name]].copy_(forward_ad.unpack_dual(value, level=0).primal)
        own = tuple(_own(results[n], tensors) for n in returned)
        return own[0] if len(own) == 1 else own

    return carry


def tangents_around() -> bool:
    """Whether there may be tangents. Compiled code enters levels of functorch that Python's own count of
    levels of forward mode does not see."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def tangent_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What forward mode carries along with ``tensor``."""
    # There is one level of tangents in torch, number 0.
    return forward_ad.unpack_dual(tensor, level=0).tangent


def _refuse(cls: Any, why: str) -> NoReturn:
    raise TransformError(
        cls.__name__, f"forward-mode differentiation{why}", "pass primals, or detach the input"
    )


def _own(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """An op returns a contiguous tensor of its own, whatever its decomposition does."""
    if result._is_view() or any(result is tensor for tensor in inputs):
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()
