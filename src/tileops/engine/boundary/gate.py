"""Whether a call may skip the dispatcher: one list of reasons why not.

Each was seen to catch a case that the others miss. Where a torch release lacks what one asks, the
answer is always no: the operator is right in any case, only slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch.fx import traceback as _fx_traceback

__all__ = [
    "NAMES",
    "QUIET",
    "QUIET_BELOW",
    "QUIET_IN_CODE",
    "as_at_the_top",
    "direct",
    "keys_below_autograd",
    "living",
    "node_meta",
    "within_a_level",
]


def _names() -> dict[str, Any]:
    try:
        torch.compiler._is_compiling_flag  # noqa: B018  (is_compiling() is a call more)
        _forward_ad._current_level  # noqa: B018
        return {
            "_dispatch": torch._C._len_torch_dispatch_stack,
            "_function": torch._C._len_torch_function_stack,
            "_forward_ad": _forward_ad,
            "_compiler": torch.compiler,
            "_functorch": torch._C._are_functorch_transforms_active,
            "_tracing": torch._C._is_tracing,
            "_included": torch._C._dispatch_tls_is_dispatch_key_included,
            "_pre_dispatch": torch._C.DispatchKey.PreDispatch,
            # The enumeration has no name for it in Python, but the parser gives it.
            "_vmap": torch._C._parse_dispatch_key("VmapMode"),
            "_autocast": torch._C._is_any_autocast_enabled,
            "_profiled": torch._C._autograd._profiler_enabled,
        }
    except AttributeError:
        return {}


NAMES = _names()
"""What the expressions below ask."""

_BELOW = (
    "_dispatch()",  # FakeTensorMode, make_fx, FlopCounterMode, user modes
    "_forward_ad._current_level >= 0",  # dual tensors carry tangents invisibly
)
_ABOVE = (
    "_function()",  # torch function modes, set_default_device
    "_compiler._is_compiling_flag",  # non-strict export
)
_IN_THREAD_STATE = (
    "_functorch()",  # grad, vmap, jvp, functionalize
    "_tracing()",  # torch.jit.trace
    "_included(_pre_dispatch)",  # pre-dispatch make_fx keeps its mode elsewhere
    "_included(_vmap)",  # the older vmap, which autograd.grad(is_grads_batched=True) still uses
    "_autocast()",  # would cast what a body hands to torch
)


def _none_of(reasons: tuple[str, ...]) -> str:
    return f"not ({' or '.join(reasons)})" if NAMES else "False"


QUIET_BELOW = _none_of(_BELOW)
"""Where the dispatcher has been entered, and a guard holds: see ``hot``."""
QUIET = _none_of((*_BELOW, *_ABOVE))
"""Where a guard holds: it compares the dispatcher's thread state."""
QUIET_IN_CODE = _none_of((*_BELOW, *_ABOVE, "_profiled()"))
"""The same in compiled code, whose operators a profiler is to see."""
direct: Callable[[], bool] = eval(  # our own text
    f"lambda: {_none_of((*_BELOW, *_ABOVE, *_IN_THREAD_STATE))}", dict(NAMES)
)
"""True where no mode, transform or tracer watches: the body may be called without the dispatcher."""


# ---- going on in the dispatcher ----------------------------------------------------------------------

_KEY = torch._C.DispatchKey
# Without the two whose fallback is to go on to the next key, which a redispatch does not do.
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset.remove(_KEY.ADInplaceOrView).remove(
    _KEY.BackendSelect
)


def keys_below_autograd(arguments: tuple[Any, ...]) -> Any:
    """Where an Autograd kernel hands a call on to: what the dispatcher computes for these arguments in
    this thread, less autograd and all above. Asked for only where it is needed: the dispatcher would
    make a Python object of it at every call (1 µs on torch 2.11)."""
    keys = torch._C._dispatch_tls_local_include_set()
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            keys = keys | torch._C._dispatch_keys(argument)
    return (keys - torch._C._dispatch_tls_local_exclude_set()) & _BELOW_AUTOGRAD


# ---- where the dispatcher is ---------------------------------------------------------------------
# Where a torch release lacks what these ask, they change nothing: a transform of a gradient may then
# raise, and training keep more than it must.


@lru_cache(maxsize=1)
def _autocast_keys() -> Any:
    keys = torch._C.DispatchKeySet(_KEY.AutocastCPU)
    for name in vars(_KEY):
        if name.startswith("Autocast"):
            keys = keys | torch._C.DispatchKeySet(getattr(_KEY, name))
    return keys


def as_at_the_top() -> contextlib.AbstractContextManager[Any]:
    """Inside an operator the dispatcher has been passed, and a transform that began there would be
    passed by too: forget how far the dispatcher has come, but for autocast, which stays off."""
    try:
        excluded = torch._C._dispatch_tls_local_exclude_set() & _autocast_keys()
        guard: contextlib.AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set(), excluded
        )
    except AttributeError:
        return contextlib.nullcontext()
    return guard


def within_a_level() -> bool:
    """Whether a kernel of ours runs within a level of functorch, which lets no other be opened."""
    try:
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
        return excluded(_KEY.FuncTorchDynamicLayerFrontMode) and not excluded(
            _KEY.FuncTorchDynamicLayerBackMode
        )
    except AttributeError:
        return False


_unwrapped: Callable[[torch.Tensor], torch.Tensor] | None = getattr(
    getattr(torch._C, "_functorch", None), "unwrap_if_dead", None
)


def living(tensor: torch.Tensor) -> torch.Tensor:
    """What ``vjp`` saved outlives its level, as a wrapper that only the dispatcher sees through."""
    return tensor if _unwrapped is None else _unwrapped(tensor)


def node_meta() -> dict[str, Any] | None:
    """What a tracer of training gives the nodes that it makes; None where there is none."""
    try:
        return _fx_traceback.get_current_meta() if _fx_traceback.has_preserved_node_meta() else None
    except AttributeError:
        return None
