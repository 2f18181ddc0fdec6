"""What ``torch.autocast`` does to a call: which floating inputs are cast, and to what.

The rule of an entry is what it says (``autocast:``), else what follows from it: a backward op has
``none``, since autograd asks for the dtypes of the forward; a ``template`` is a matrix product or
attention, hence ``low``; where torch runs the reference in one of them it is that; else ``widest``.

Only inputs are cast whose dtype is a variable of the entry, and only float16, bfloat16 and float32
ones, to a dtype that the variable may be. As in torch, a call that writes is left alone, and so is
one whose op was given a dtype by a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tileops.engine.boundary.instances import resolve
from tileops.engine.manifest.entry import Branch, Entry

__all__ = ["FLOAT32", "autocast_rule", "autocasts", "cast_inputs", "give_autocast"]

FLOAT32 = frozenset(
    f"torch.{name}"
    for name in (
        "acos", "asin", "cosh", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
        "linalg.matrix_norm", "linalg.vector_norm", "log", "log10", "log1p", "log2", "logsumexp",
        "nn.functional.cosine_similarity", "nn.functional.group_norm", "nn.functional.layer_norm",
        "nn.functional.log_softmax", "nn.functional.rms_norm", "nn.functional.softmax",
        "nn.functional.softmin", "nn.functional.softplus", "norm", "pow", "prod", "reciprocal",
        "renorm", "rsqrt", "sinh", "sum", "tan",
    )
)  # fmt: skip
"""References that torch runs in float32 under CUDA's autocast. Ours follow it on every device."""
LOW = frozenset({"torch.nn.functional.prelu"})
"""Those that it runs in the low dtype though they are no template."""

_DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
"""Where an operator has a kernel for autocast, beside the backend that names itself."""
_ELIGIBLE = (torch.float16, torch.bfloat16, torch.float32)


def autocast_rule(entry: Entry) -> str:
    """``low`` (the dtype of the autocast context), ``float32``, ``widest`` (of the inputs that share
    a dtype variable) or ``none``."""
    if entry.name.endswith("BwdOp"):
        return "none"
    if entry.autocast is not None:
        return entry.autocast
    if entry.kind == "template" or entry.reference in LOW:
        return "low"
    return "float32" if entry.reference in FLOAT32 else "widest"


def autocasts(entry: Entry) -> bool:
    """Whether autocast can change a call: where nothing is shared there is nothing to widen."""
    rule, variables = autocast_rule(entry), list(_variables(entry).values())
    if rule == "widest":
        return any(variables.count(variable) > 1 for variable in variables)
    return rule != "none" and bool(variables)


def _variables(entry: Entry) -> dict[int, str]:
    """The dtype variable of each input that has one which may be floating."""
    found = {}
    for index, item in enumerate(entry.inputs):
        names = item.dtype.names & set(entry.dtypes) if item.dtype is not None else frozenset()
        for name in names:
            if any("float" in dtype for dtype in entry.dtypes[name]):
                found[index] = name
    return found


def cast_inputs(op: Any, inputs: Sequence[Any], device_type: str) -> tuple[Any, ...]:
    """The inputs of a call of ``op`` as autocast on ``device_type`` hands them on."""
    entry: Entry = type(op).entry
    for param in entry.params:
        of_dtype = any(kind == "dtype" for kind, _ in param.type.alternatives)
        if of_dtype and op._params[param.name] is not None:
            return tuple(inputs)
    rule, variables, given = autocast_rule(entry), _variables(entry), list(inputs)
    for variable, accepted in entry.dtypes.items():
        places = [
            index
            for index, name in variables.items()
            if name == variable and _eligible(given[index], device_type)
        ]
        wanted = None
        if rule == "low":
            wanted = torch.get_autocast_dtype(device_type)
        elif rule == "float32":
            wanted = torch.float32
        elif places:
            wanted = given[places[0]].dtype
            for index in places:
                wanted = torch.promote_types(wanted, given[index].dtype)
        if wanted is not None and str(wanted).removeprefix("torch.") in accepted:
            for index in places:
                given[index] = given[index].to(wanted)
    return tuple(given)


def _eligible(tensor: Any, device_type: str) -> bool:
    return tensor is not None and tensor.device.type == device_type and tensor.dtype in _ELIGIBLE


def give_autocast(cls: Any, branch: Branch, overload: Any, library: Any, name: str) -> None:
    """Register the autocast kernels of one operator, where its rule asks for any."""
    if branch.writes or branch.out or not autocasts(cls.entry):
        return
    members = torch._C.DispatchKey.__members__
    for device_type, key in {
        **_DEVICES,
        torch._C._get_privateuse1_backend_name(): "AutocastPrivateUse1",
    }.items():
        if key in members:
            library.impl(name, _kernel(cls, overload, device_type, members[key]), key)


def _kernel(cls: Any, overload: Any, device_type: str, key: Any) -> Callable[..., Any]:
    off = torch._C.DispatchKeySet(key)

    def cast(*args: Any) -> Any:
        given = cast_inputs(resolve(cls, args[-1]).op, args[:-1], device_type)
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*given, args[-1])

    return cast
