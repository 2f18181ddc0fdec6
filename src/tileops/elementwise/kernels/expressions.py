"""Which device function of ``expressions_triton.py`` is the meaning of an op."""

from __future__ import annotations

from tileops.authoring import CallSpec
from tileops.lib.launch import DeviceFunction

__all__ = ["expression_of"]


def expression_of(call: CallSpec, *, without: str = "FwdOp", more: str = "") -> DeviceFunction:
    """The function named as the op's class, in small letters and ``without`` that ending, then what
    its parameters choose by a word: ``GELUFwdOp(approximate="tanh")`` is ``gelu_tanh``."""
    chosen = [value for value in vars(call.params).values() if isinstance(value, str)]
    name = "_".join([call.op.removesuffix(without).lower(), *chosen, *([more] if more else [])])
    return DeviceFunction(f"{__name__}_triton:{name}")
