"""Which device function of ``expressions_triton.py`` is the meaning of an op."""

from __future__ import annotations

from tileops.authoring import CallSpec
from tileops.lib.launch import DeviceFunction

__all__ = ["CAREFUL", "USUAL", "care_of", "expression_of", "usual_of"]

CAREFUL = frozenset({
    "div", "elu", "erf", "exp", "expm1", "gelu_none", "gelu_tanh", "log", "log1p", "mish", "pow",
    "reciprocal", "selu", "sigmoid", "silu", "softplus", "sqrt", "tanh",
})  # fmt: skip
"""Expressions that take fewer instructions where 11 bits are enough, and so have a last argument that
says whether they are. Exact in float32, they would take longer than their memory."""


USUAL = frozenset({"remainder"})
"""Expressions beside which stands one that takes fewer instructions and holds for all but a few numbers:
``usual_remainder``."""
USUAL_NARROW = USUAL | {"cos", "sin"}
"""The same where 11 bits are enough."""


def usual_of(expression: DeviceFunction, narrow: bool) -> DeviceFunction | None:
    """What does for an expression nearly everywhere."""
    module, _, name = expression.fn.rpartition(":")
    known = name in (USUAL_NARROW if narrow else USUAL)
    return DeviceFunction(f"{module}:usual_{name}") if known else None


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
