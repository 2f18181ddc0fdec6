"""A target on the CPU that does as ``control`` says, and counts what it did.

``TESTCPU_FAIL_AT_LOAD=<text>`` makes the import raise (``exit`` ends the process),
``TESTCPU_DETECT=1`` makes the target claim the CPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tileops.backend import OpNotAvailableError, Target, TensorSpec
from tileops_target_testcpu import control

__all__ = ["NAME", "control", "target"]

NAME = "testcpu"

if reason := os.environ.get("TESTCPU_FAIL_AT_LOAD"):
    raise SystemExit(3) if reason == "exit" else RuntimeError(reason)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float | None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    weight = None if weight is None else weight.to(wide)
    return F.rms_norm(x.to(wide), normalized_shape, weight, eps).to(x.dtype)


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    gate, up = input.to(torch.promote_types(input.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(input.dtype)


class Kernel:
    """A built kernel: not a function, neither picklable nor copyable, as real ones are."""

    def __init__(self, op: str, compute: Callable[..., torch.Tensor], params: dict[str, Any]):
        self.op, self.compute, self.params = op, compute, params
        self.handle = threading.Lock()

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        control.count(control.runs, self.op)
        return control.spoil(self.compute(*inputs, **self.params), inputs)


class Builder:
    """``build_kernel`` of one op. Unhashable and unpicklable, because nothing forbids it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, op: str, compute: Callable[..., torch.Tensor]):
        self.op, self.compute = op, compute
        self.handle = threading.Lock()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Builder)

    def __call__(self, *specs: TensorSpec | None, **params: Any) -> Callable[..., Any]:
        control.count(control.builds, self.op)
        control.specs.append((self.op, specs, params))
        time.sleep(control.build_seconds)
        match control.behaviour:
            case "fail_build":
                raise RuntimeError("the test compiler crashed")
            case "decline":
                raise OpNotAvailableError(self.op, NAME, "told to decline")
            case "build_nothing":
                return None  # type: ignore[return-value]
        return Kernel(self.op, self.compute, params)


def target() -> Target:
    return Target(
        NAME,
        {
            "RMSNormFwdOp": Builder("RMSNormFwdOp", rms_norm),
            "SiLUAndMulFwdOp": Builder("SiLUAndMulFwdOp", silu_and_mul),
        },
        claims=(lambda device: device.type == "cpu") if os.environ.get("TESTCPU_DETECT") else None,
    )
