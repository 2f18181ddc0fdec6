"""Choosing the kernel of a slot, with the reason why each other one was refused."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from tileops.engine.errors import AmbiguousKernelError, NoKernelError
from tileops.engine.kernel import CallSpec, Kernel

__all__ = ["Selection", "claimants", "load_kernel", "select"]


@dataclass(frozen=True)
class Selection:
    """The kernel that serves and ``(kernel, reason)`` for each that refused."""

    kernel: type[Kernel]
    refused: tuple[tuple[str, str], ...]


def load_kernel(package: str, name: str) -> type[Kernel]:
    """The class ``module:Class`` of a family's ``kernels`` package. Raises ``ImportError``."""
    module_name, _, class_name = name.partition(":")
    module = importlib.import_module(f"{package}.kernels.{module_name}")
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Kernel)):
        raise ImportError(f"{module.__name__} has no Kernel class {class_name!r}")
    return found


def claimants(
    call: CallSpec, kernels: list[type[Kernel]]
) -> tuple[list[type[Kernel]], list[tuple[str, str]]]:
    """The kernels that take the call, and the reasons of the others."""
    taking, refused = [], []
    for kernel in kernels:
        reason: str | None
        if call.device.type not in kernel.devices and kernel.devices != ("*",):
            reason = f"it is for {', '.join(kernel.devices)}, not {call.device.type}"
        elif call.device.type == "cuda" and call.device.arch < kernel.arch:
            reason = f"it needs compute capability {kernel.arch}, this card has {call.device.arch}"
        else:
            reason = kernel.refuses(call)
        if reason is None:
            taking.append(kernel)
        else:
            refused.append((kernel.name, reason))
    return taking, refused


def select(call: CallSpec, kernels: list[type[Kernel]]) -> Selection:
    """The one kernel that serves ``call``; the order of ``kernels`` decides nothing.

    Raises ``NoKernelError`` or ``AmbiguousKernelError``.
    """
    taking, refused = claimants(call, kernels)
    special = [kernel for kernel in taking if not kernel.general]
    if len(special) > 1:
        costs = [(kernel.cost(call), kernel) for kernel in special]
        if any(cost is None for cost, _ in costs):
            raise AmbiguousKernelError(call.op, str(call), sorted(k.name for k in special))
        best = min(cost for cost, _ in costs if cost is not None)
        winners = [kernel for cost, kernel in costs if cost == best]
        if len(winners) > 1:
            raise AmbiguousKernelError(call.op, str(call), sorted(k.name for k in winners))
        refused += [
            (kernel.name, f"declared cost {cost:.3g} µs, above {best:.3g} µs of {winners[0].name}")
            for cost, kernel in costs
            if kernel is not winners[0]
        ]
        special = winners
    behind = [kernel for kernel in taking if kernel.general]
    general = [kernel for kernel in behind if not kernel.last_resort] or behind
    if special:
        refused += [(k.name, "a specialised kernel takes this call") for k in behind]
        return Selection(special[0], tuple(refused))
    if len(general) > 1:
        raise AmbiguousKernelError(call.op, str(call), sorted(k.name for k in general))
    if not general:
        raise NoKernelError(call.op, str(call), refused)
    refused += [(k.name, "the general kernel takes this call") for k in behind if k not in general]
    return Selection(general[0], tuple(refused))
