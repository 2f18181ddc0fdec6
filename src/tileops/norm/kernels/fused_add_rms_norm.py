"""Fused add and RMSNorm on CUDA: RMSNorm's three kernels, with a residual to add.

``residual_out`` is the sum in float32 rounded to the type of the input; ``output`` normalises that
rounded sum, as ``flashinfer.norm.fused_add_rmsnorm`` does.
"""

from tileops.norm.kernels.rms_norm import ManyShortRows, RegisterRow, StreamedRow

__all__ = ["ManyShortRows", "RegisterRow", "StreamedRow"]
