"""Liger's kernels as a target of tileops, on CUDA.

Loading this module imports neither Triton nor Liger and touches no device: a process that never
asks for the target pays nothing for it. Liger is imported by the first build.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileops.backend import OpNotAvailableError, Target, TensorSpec

__all__ = ["NAME", "build_rms_norm", "build_silu_and_mul", "target"]

NAME = "liger"
LONGEST_ROW = 65536
"""Liger holds a row in one block of at most this many elements, and raises beyond."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Kernel = Callable[..., torch.Tensor]


def _accept(op: str, spec: TensorSpec, row: int) -> None:
    """Decline what no kernel of Liger serves."""
    if spec.device.type != "cuda":
        raise OpNotAvailableError(op, NAME, f"it serves cuda devices, not {spec.device.type}")
    if spec.dtype not in DTYPES:
        raise OpNotAvailableError(op, NAME, f"it computes in float32, too coarse for {spec.dtype}")
    if row > LONGEST_ROW:
        raise OpNotAvailableError(op, NAME, f"rows of {row} elements, more than {LONGEST_ROW}")


def build_rms_norm(
    x: TensorSpec,
    weight: TensorSpec | None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float | None,
) -> Kernel:
    """``RMSNormFwdOp`` over the last dimension, with a weight and an explicit ``eps``."""
    op = "RMSNormFwdOp"
    if len(normalized_shape) != 1:
        raise OpNotAvailableError(op, NAME, f"it normalises one dimension, not {normalized_shape}")
    if weight is None:
        raise OpNotAvailableError(op, NAME, "it needs a weight")
    if eps is None:
        raise OpNotAvailableError(op, NAME, "it needs a number for eps")
    _accept(op, x, normalized_shape[0])
    if not x.numel:
        return lambda x, weight: torch.empty_like(x)  # rows of no elements have no block size

    from liger_kernel.ops.rms_norm import rms_norm_forward

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Casting mode "gemma" computes all of it in float32 and rounds once, as F.rms_norm does
        # ("llama" rounds before the weight). An offset of 0 leaves the weight as it is.
        return rms_norm_forward(x, weight, eps, 0.0, "gemma", None)[0]

    return run


def build_silu_and_mul(gate_up: TensorSpec) -> Kernel:
    """``SiLUAndMulFwdOp``: ``[M, 2 * N]``, gate then up, to ``[M, N]``."""
    rows, width = gate_up.shape
    _accept("SiLUAndMulFwdOp", gate_up, width // 2)
    if not gate_up.numel:
        return lambda gate_up: gate_up.new_empty(rows, width // 2)

    # Not swiglu_forward(gate, up): it takes the row stride of its contiguous output for that of
    # its inputs too, and would read two halves of one tensor from the wrong places.
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return lambda gate_up: swiglu_fused_gate_up_forward(gate_up)[1]


def target() -> Target:
    """What the entry point ``liger`` of group ``tileops.backends`` names."""
    return Target(NAME, {"RMSNormFwdOp": build_rms_norm, "SiLUAndMulFwdOp": build_silu_and_mul})
