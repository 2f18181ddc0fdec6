"""Matrix product."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class GEMMFwdOp(Op):
    """``d = op(a) @ op(b)``.

    ``a``: ``[M, K]`` (``[K, M]`` with ``trans_a``); ``b``: ``[N, K]`` with ``trans_b`` (the layout of
    ``torch.nn.Linear.weight``), else ``[K, N]``; ``d``: ``[M, N]`` of their dtype. Accumulates in
    float32 (float64 for float64); float32 products are exact float32 unless
    ``torch.backends.cuda.matmul`` allows TF32. API: ``torch.mm``.
    """

    kernel = KernelInterface(cuda=("gemm:CublasGEMM", "gemm:TritonGEMM"))

    @staticmethod
    def decomposition(
        a: torch.Tensor, b: torch.Tensor, *, trans_a: bool, trans_b: bool
    ) -> torch.Tensor:
        return torch.mm(a.t() if trans_a else a, b.t() if trans_b else b)
