"""Whether an eager call may skip the dispatcher: one function, one list of reasons.

Each check was seen to catch a case that the others miss. Where a torch release lacks one, the
answer is no: the operator is always right, only slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad

__all__ = ["direct"]


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
"""True where no mode, transform or tracer watches: the body may be called without the dispatcher."""
