"""Whether an eager call may skip the dispatcher: one function, one list of reasons.

Each check was seen to catch a case that the others miss. Where a torch release lacks one, the
answer is no: the operator is always right, only slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad

__all__ = ["NAMES", "QUIET", "QUIET_BELOW", "direct", "keys_below_autograd"]

QUIET = (
    "not (_dispatch() or _function() or _fw._current_level >= 0 or _compiler._is_compiling_flag)"
)
"""What of ``direct`` a guard on tensors does not see, as an expression over ``NAMES``: the rest is in
the dispatcher's thread state, which the guard compares."""
QUIET_BELOW = "not (_dispatch() or _fw._current_level >= 0)"
"""The same where the dispatcher has been entered: function modes and tracers of Python have been."""
NAMES: dict[str, Any] = {}


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


def _build() -> Callable[[], bool]:
    try:
        functorch: Any = torch._C._are_functorch_transforms_active
        dispatch: Any = torch._C._len_torch_dispatch_stack
        function: Any = torch._C._len_torch_function_stack
        tracing: Any = torch._C._is_tracing
        included: Any = torch._C._dispatch_tls_is_dispatch_key_included
        pre_dispatch: Any = torch._C.DispatchKey.PreDispatch
        compiler: Any = torch.compiler
        autocast: Any = torch._C._is_any_autocast_enabled
        compiler._is_compiling_flag  # noqa: B018  (is_compiling() is a call more)
        _forward_ad._current_level  # noqa: B018
    except AttributeError:
        return lambda: False
    forward_ad: Any = _forward_ad

    NAMES.update(_dispatch=dispatch, _function=function, _fw=forward_ad, _compiler=compiler)

    def direct() -> bool:
        return not (
            dispatch()  # FakeTensorMode, make_fx, FlopCounterMode, user modes
            or function()  # torch function modes, set_default_device
            or functorch()  # grad, vmap, jvp, functionalize
            or forward_ad._current_level >= 0  # dual tensors carry tangents invisibly
            or tracing()  # torch.jit.trace
            or compiler._is_compiling_flag  # non-strict export
            or included(pre_dispatch)  # pre-dispatch make_fx keeps its mode elsewhere
            or autocast()  # would cast what a body hands to torch
        )

    return direct


direct = _build()
if not NAMES:
    QUIET = QUIET_BELOW = "False"
"""True where no mode, transform or tracer watches: the body may be called without the dispatcher."""
