"""Which device function of ``expressions_triton.py`` is the meaning of an op."""

from __future__ import annotations

from tileops.authoring import CallSpec
from tileops.lib.launch import DeviceFunction

__all__ = ["CAREFUL", "care_of", "expression_of"]

CAREFUL = frozenset({
    "cos", "div", "elu", "erf", "exp", "expm1", "gelu_none", "gelu_tanh", "log", "log1p", "mish", "pow",
    "reciprocal", "selu", "sigmoid", "silu", "sin", "softplus", "sqrt", "tanh",
})  # fmt: skip
"""Expressions that take fewer instructions where 11 bits are enough, and so have a last argument that
says whether they are. Exact in float32, they would take longer than their memory."""


def care_of(expression: DeviceFunction, narrow: bool) -> tuple[bool, ...]:
    """What an expression is given after its numbers."""
    return (narrow,) if expression.fn.rpartition(":")[2] in CAREFUL else ()


def expression_of(call: CallSpec, *, without: str = "FwdOp", more: str = "") -> DeviceFunction:
    """The function named as the op's class, in small letters and ``without`` that ending, then what
    its parameters choose by a word, and the optional inputs that are given where one is not:
    ``GELUFwdOp(approximate="tanh")`` is ``gelu_tanh``, ``ClampTensorFwdOp`` of a ``min`` alone
    ``clamptensor_min``."""
    parts = [call.op.removesuffix(without).lower()]
    parts += [value for value in vars(call.params).values() if isinstance(value, str)]
    if None in call.inputs.values():
        parts += [name for name, spec in list(call.inputs.items())[1:] if spec is not None]
    return DeviceFunction(f"{__name__}_triton:{'_'.join([*parts, *([more] if more else [])])}")
