"""What generated checks call: comparing sizes, real or symbolic, and saying what is wrong."""

from __future__ import annotations

from typing import Any

import torch

from tileops.engine.errors import CheckError
from tileops.engine.manifest.expr import DTYPES, FUNCTIONS, broadcast
from tileops.engine.signature.literal import dtype_name

__all__ = ["DTYPE_VALUES", "HELPERS", "fail_rule", "holds", "must_be_tensor", "refuse"]

_library = torch.library.Library("tileops", "FRAGMENT")
_library.define("refuse_call(str op, str argument, str given, str accepted) -> ()")


def _raise(op: str, argument: str, given: str, accepted: str) -> None:
    raise CheckError(op, argument, given, accepted)


_library.impl("refuse_call", _raise, "CompositeExplicitAutograd")
torch.library.register_fake("tileops::refuse_call", _raise, lib=_library)


def refuse(op: str, argument: str, given: str, accepted: str) -> None:
    """Raise ``CheckError``. What Dynamo traces cannot raise it with its own message, so there an
    operator does, at the same moment as every other check of a traced call."""
    if torch.compiler.is_dynamo_compiling():
        torch.ops.tileops.refuse_call(op, argument, given, accepted)
    raise CheckError(op, argument, given, accepted)


def _same(a: Any, b: Any) -> bool:
    result = a == b  # not `is` first: under Dynamo that would leave a node in the graph
    return result if isinstance(result, bool) else holds(result)


def _same_sizes(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def holds(condition: Any) -> bool:
    """Truth of a condition that may be symbolic: an unbacked one becomes a runtime assertion."""
    if isinstance(condition, bool):
        return condition
    if isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import expect_true

        return bool(expect_true(condition))
    return bool(condition)


def _broadcast(*shapes: Any) -> tuple[Any, ...]:
    """The manifest's ``bcast``. Sizes that only the run knows are taken to be equal, under a runtime
    assertion, as torch's own operators take them."""
    try:
        return broadcast(*shapes)
    except RuntimeError:  # torch's GuardOnDataDependentSymNode
        return tuple(torch.broadcast_shapes(*shapes))


def _size_list(tensor: torch.Tensor) -> str:
    return f"shape {list(tensor.shape)}"


def _fail_shape(op: str, name: str, tensor: torch.Tensor, pattern: str, /, **known: Any) -> None:
    values = ", ".join(
        f"{key}={list(value) if isinstance(value, tuple | torch.Size) else value}"
        for key, value in known.items()
        if value is not None
    )
    accepted = f"shape {pattern}" + (f" with {values}" if values else "")
    refuse(op, name, _size_list(tensor), accepted)


def _fail_dtype(op: str, name: str, tensor: torch.Tensor, accepted: Any, why: str = "") -> None:
    names = ", ".join(sorted(dtype_name(dtype) for dtype in accepted))
    refuse(op, name, f"dtype {dtype_name(tensor.dtype)}", f"dtype {names}{why}")


def fail_rule(op: str, argument: str, message: str, /, **values: Any) -> None:
    shown = ", ".join(
        f"{key}={dtype_name(value) if isinstance(value, torch.dtype) else value}"
        for key, value in values.items()
    )
    refuse(op, argument, shown or "this call", message)


def must_be_tensor(op: str, name: str, value: Any, optional: bool) -> None:
    given = "nothing" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
    refuse(op, name, given, "a torch.Tensor" + (" or None" if optional else ""))


def _writable(tensor: torch.Tensor) -> bool:
    return not any(
        stride == 0 and isinstance(size, int) and size > 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def refuse_absent(op: str, name: str, condition: str) -> None:
    """For an input that a condition asks for."""
    refuse(op, name, "nothing", f"a torch.Tensor, because {condition}")


def refuse_present(op: str, name: str, condition: str) -> None:
    """For an input that a condition rules out."""
    refuse(op, name, "a tensor", f"None, because not: {condition}")


HELPERS = {
    "_same": _same,
    "_same_sizes": _same_sizes,
    "_holds": holds,
    "_fail": refuse,
    "_fail_shape": _fail_shape,
    "_fail_dtype": _fail_dtype,
    "_fail_rule": fail_rule,
    "_must_be_tensor": must_be_tensor,
    "_refuse_absent": refuse_absent,
    "_refuse_present": refuse_present,
    "_writable": _writable,
    "_Tensor": torch.Tensor,
    "_strided": torch.strided,
    **{f"_f_{name}": function for name, function in FUNCTIONS.items()},
    "_f_bcast": _broadcast,
    **{f"_dt_{name}": getattr(torch, name) for name in DTYPES},
}


DTYPE_VALUES = {name: getattr(torch, name) for name in DTYPES}
