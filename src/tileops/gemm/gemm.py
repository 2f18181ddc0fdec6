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

    kernel = KernelInterface(
        cuda=("gemm:CublasGEMM", "gemm:TritonGEMM"), cpu=("on_cpu:OneDNNProduct",)
    )

    @staticmethod
    def decomposition(
        a: torch.Tensor, b: torch.Tensor, *, trans_a: bool, trans_b: bool
    ) -> torch.Tensor:
        return torch.mm(a.t() if trans_a else a, b.t() if trans_b else b)


class GEMMBwdOp(Op):
    """The gradients of ``GEMMFwdOp``: ``grad_d`` ``[M, N]`` times the other operand, transposed so that
    each lies as its operand does: without transposes ``grad_a = grad_d @ b.T`` and
    ``grad_b = a.T @ grad_d``. Each accumulates as the forward product does."""

    kernel = KernelInterface(cuda=("gemm_backward:TwoProducts",))

    @staticmethod
    def decomposition(
        grad_d: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        trans_a: bool,
        trans_b: bool,
        wants_a: bool,
        wants_b: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        left, right = a.t() if trans_a else a, b.t() if trans_b else b
        grad_a = grad_b = None
        if wants_a:
            grad_a = torch.mm(right, grad_d.t()) if trans_a else torch.mm(grad_d, right.t())
        if wants_b:
            grad_b = torch.mm(grad_d.t(), left) if trans_b else torch.mm(left.t(), grad_d)
        return grad_a, grad_b
