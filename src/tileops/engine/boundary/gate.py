"""Whether a call may skip the dispatcher: one list of reasons why not.

Each was seen to catch a case that the others miss. Where a torch release lacks what one asks, the
answer is always no: the operator is right in any case, only slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad

__all__ = ["NAMES", "QUIET", "QUIET_BELOW", "direct", "keys_below_autograd"]


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
            "_vmap_mode": torch._C._dispatch_key_parse("VmapMode"),
            "_autocast": torch._C._is_any_autocast_enabled,
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
    "_included(_vmap_mode)",  # the vmap of torch.autograd.grad(is_grads_batched=True)
    "_autocast()",  # would cast what a body hands to torch
)


def _none_of(reasons: tuple[str, ...]) -> str:
    return f"not ({' or '.join(reasons)})" if NAMES else "False"


QUIET_BELOW = _none_of(_BELOW)
"""Where the dispatcher has been entered, and a guard holds: see ``hot``."""
QUIET = _none_of((*_BELOW, *_ABOVE))
"""Where a guard holds: it compares the dispatcher's thread state."""
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
