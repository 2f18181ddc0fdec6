"""The last few plans of an op behind a guard in C++: what a repeated call costs.

Reading the facts of a tensor one by one in Python takes 0.5 µs a tensor. Torch's own
``TensorGuards`` compares dtype, device, sizes, strides, ``requires_grad``, lazy conj and neg bits and
the dispatcher's thread state (transforms, tracers, autocast, inference mode) of all of them in
0.15 µs. A call that no guard knows takes the slow way, which is always right; where a torch release
lacks the class, every call does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tileops.engine.boundary.growth import Growth
from tileops.engine.boundary.instances import OpState
from tileops.engine.manifest.entry import Entry

__all__ = ["ABSENT", "Hot", "HotLines", "hot_lines", "keep_hot"]

KEPT = 4
"""Plans behind guards: a miss costs some 0.1 µs each."""
_NEVER: Any = object()


class _Absent(torch.Tensor):
    """A class of its own, so that no guard takes what is absent for a tensor."""

    # Else each attribute costs 3 µs.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


with _disable_current_modes():  # under a FakeTensorMode, say, the first import of a family may be
    ABSENT = tuple(_Absent() for _ in range(64))
"""``ABSENT[n]`` stands for argument ``n`` in a guard where it is absent."""


@dataclass(frozen=True, eq=False, slots=True)
class Hot:
    """One plan and what must hold for it: ``check`` of the tensors, and what they do not tell."""

    check: Callable[..., bool]
    epoch: int
    context: str | None
    grads: bool
    """A tensor requires grad: the plan serves while gradients are off."""
    grown: bool
    """Sizes along the growing dims are free: ``Growth.sizes`` must agree as well."""
    run: Callable[..., Any]
    plan: Any


def keep_hot(state: OpState, plan: Any, arguments: tuple[Any, ...], growth: Growth | None) -> None:
    """Put ``plan``, which has just been found for ``arguments``, behind a guard."""
    tensors = [ABSENT[n] if value is None else value for n, value in enumerate(arguments)]
    if plan.hot is _NEVER or any(tensor.data_ptr() & 15 for tensor in tensors):
        return
    if len(set(map(id, tensors))) < len(tensors):
        return  # a guard takes no tensor twice
    if plan.hot is None or plan.hot in state.hots:  # there, but for another state of the thread
        plan.hot = _guard(plan, tensors, None if plan.exact else growth)
        if plan.hot is _NEVER:
            return
    state.hots = (plan.hot, *(hot for hot in state.hots[: KEPT - 1]))


def _guard(plan: Any, tensors: list[torch.Tensor], growth: Growth | None) -> Any:
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    if growth is not None:
        for n, places in enumerate(growth.places):
            for axis in places if tensors[n] is not ABSENT[n] else ():
                sizes[n][axis] = None
                strides[n][:axis] = [None] * axis  # what is contiguous stays so: `sizes` sees to it
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        )
        if guards.check(*tensors) is not True:
            return _NEVER
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return _NEVER
    grads = any(tensor.requires_grad for tensor in tensors)
    return Hot(
        guards.check, plan.epoch, plan.context, grads, growth is not None, plan.trusted, plan
    )


class HotLines(NamedTuple):
    """Source that runs the plan whose guard takes a call, and goes on after it where none does."""

    absent: list[str]
    """What stands in a guard for an argument that is absent."""
    choose: list[str]
    """``_hots``: the guards that may be asked."""
    run: list[str]

    @property
    def all(self) -> list[str]:
        return [*self.absent, *self.choose, *self.run]


def hot_lines(entry: Entry, names: list[str], growing: bool, give: str = "return r") -> HotLines:
    """For calls of ``entry``, over ``_shared``; ``give`` returns the plan's result ``r``."""
    optional = {i.name for i in entry.inputs if i.optional} | {"out"}
    buffers = [*names, *(["out"] if entry.has_out else [])]
    passed = ", ".join(buffers)
    absent = [n for n in buffers if n in optional]
    guarded = [f"_or_{n}" if n in absent else n for n in buffers]
    addresses = " | ".join(f"{n}.data_ptr()" for n in guarded)
    tests = [f"hot.check({', '.join(guarded)})", "hot.epoch == _epoch.now",
             "hot.context == _context()", "not (hot.grads and _grad_enabled())",
             f"not ({addresses}) & 15"]  # fmt: skip
    # The guard ends the process where a tensor has no strides; of those that are no subclass only
    # the nested one comes to that.
    nested = " or ".join(f"{n}.is_nested" for n in guarded)
    choose = [
        f"try: _hots = () if {nested} else _shared.hots",
        "except AttributeError: _hots = ()",  # not all are tensors
    ]
    run = ["for hot in _hots:", f"    if {' and '.join(tests)}:"]
    if growing:
        run += [
            "        if hot.grown:",
            f"            sizes = _growth.sizes(_shared.op, hot.plan, {passed})",
            "            if sizes is None: continue",
            "            _shared.sizes = sizes",
        ]
    run += [
        "        _shared.last = hot.plan",
        f"        try: r = hot.run({passed})",
        "        except Exception as error: raise hot.plan.blamed(error)",
        f"        {give}",
    ]
    given = [f"_or_{n} = _ABSENT[{buffers.index(n)}] if {n} is None else {n}" for n in absent]
    return HotLines(given, choose, run)
