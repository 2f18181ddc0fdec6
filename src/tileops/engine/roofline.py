"""Operations and bytes of a call, from the entry's cost and signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tileops.engine.kernel import CallSpec, TensorSpec
from tileops.engine.manifest.entry import Entry

__all__ = ["Roofline", "cost_terms", "roofline_of"]


@dataclass(frozen=True)
class Roofline:
    """Floating-point operations, and bytes read and written, each byte once."""

    flops: int
    read_bytes: int
    write_bytes: int


def _nbytes(spec: TensorSpec | None) -> int:
    return 0 if spec is None else spec.numel * spec.dtype.itemsize


def roofline_of(entry: Entry, call: CallSpec) -> Roofline:
    """The cost of ``call``; bytes default to every input read and every output written once."""
    return Roofline(*map(int, cost_terms(entry, call).values()))


def cost_terms(entry: Entry, call: CallSpec) -> dict[str, Any]:
    """``flops``, ``read_bytes``, ``write_bytes`` of ``call`` just as the expressions give them."""
    import torch

    from tileops.engine.manifest.expr import DTYPES

    inputs = {f"nbytes_{name}": _nbytes(spec) for name, spec in call.inputs.items()}
    outputs = {f"nbytes_{name}": _nbytes(spec) for name, spec in call.outputs.items()}
    env: dict[str, Any] = {
        **{name: getattr(torch, name) for name in DTYPES},
        **call.dims,
        **vars(call.params),
        **inputs,
        **outputs,
    }
    passed = frozenset(name for name, spec in call.inputs.items() if spec is not None)
    cost = entry.cost
    read = cost.read_bytes.evaluate(env, passed) if cost.read_bytes else sum(inputs.values())
    write = cost.write_bytes.evaluate(env, passed) if cost.write_bytes else sum(outputs.values())
    return {"flops": cost.flops.evaluate(env, passed), "read_bytes": read, "write_bytes": write}
