"""Matrix product with what is done to each element of its result."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tileops.authoring import KernelInterface, Op

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _inner(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, result: torch.dtype
) -> torch.Tensor:
    """``left @ right + bias`` in float32 or wider. The product of halves is rounded to the wider of their
    and the result's dtype, as eager steps round."""
    own = torch.promote_types(left.dtype, result)
    if own is left.dtype and own.itemsize > 2:
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    wide = torch.promote_types(own, torch.float32)
    inner = torch.mm(left.to(own), right.to(own)).to(wide)
    return inner if bias is None else inner + bias.to(wide)


class GEMMEpilogueFwdOp(Op):
    """``d = scale * activation(op(a) @ op(b) + bias) + residual``, rounded to ``out_dtype``.

    ``a``: ``[M, K]`` (``[K, M]`` with ``trans_a``); ``b``: ``[N, K]`` with ``trans_b`` (the layout of
    ``torch.nn.Linear.weight``), else ``[K, N]``; ``bias``: ``[N]`` or None; ``residual``: ``[M, N]`` or
    None; all of one dtype, which is also that of ``d``, ``[M, N]``, where ``out_dtype`` is None.
    ``activation``: ``relu``, ``gelu`` (``x * Φ(x)``), ``gelu_tanh`` (its approximation by tanh), ``silu``
    or None. Computed in float32 (float64 for float64); a library's product may be rounded to the wider
    of both dtypes in between.

    ``keeps_preactivation`` also returns ``op(a) @ op(b) + bias`` in the inputs' dtype. The gradient takes
    it as autograd takes it of the plain functions; without it the gradient computes the product again:
    a matrix less in memory, a product more in time.
    """

    kernel = KernelInterface(
        cuda=(
            "epilogue:CublasEpilogue",
            "epilogue:CublasThenFinish",
            "epilogue:PersistentEpilogue",
            "epilogue:TritonEpilogue",
        ),
        cpu=("on_cpu:OneDNNEpilogue", "on_cpu:MKLEpilogue"),
    )

    @staticmethod
    def decomposition(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        *,
        trans_a: bool,
        trans_b: bool,
        activation: str | None,
        scale: float,
        out_dtype: torch.dtype | None,
        keeps_preactivation: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = a.dtype if out_dtype is None else out_dtype
        inner = _inner(a.t() if trans_a else a, b if not trans_b else b.t(), bias, dtype)
        values = ACTIVATIONS[activation](inner)
        if scale != 1.0:
            values = values * scale
        if residual is not None:
            values = values + residual.to(values.dtype)
        return values.to(dtype), inner.to(a.dtype) if keeps_preactivation else None


class GEMMEpilogueBwdOp(Op):
    """The gradients of ``GEMMEpilogueFwdOp`` for ``grad_d`` and ``grad_preactivation``, ``[M, N]``.

    With ``g = scale * activation'(preactivation) * grad_d + grad_preactivation``, rounded to the inputs'
    dtype, ``grad_a`` and ``grad_b`` are those of the product for ``g``, ``grad_bias`` is the sum of the
    rows of ``g`` and ``grad_residual`` is ``grad_d`` itself. ``preactivation`` is computed again where it
    is None.
    """

    kernel = KernelInterface(cuda=("epilogue_backward:ThroughProducts",))

    @staticmethod
    def decomposition(
        grad_d: torch.Tensor,
        grad_preactivation: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        preactivation: torch.Tensor | None,
        *,
        trans_a: bool,
        trans_b: bool,
        activation: str | None,
        scale: float,
        out_dtype: torch.dtype | None,
        wants_a: bool,
        wants_b: bool,
        wants_bias: bool,
        wants_residual: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        left, right = a.t() if trans_a else a, b.t() if trans_b else b
        inner = preactivation
        if inner is None and activation is not None:
            inner = _inner(left, right, bias, grad_d.dtype)
        wide = torch.promote_types(a.dtype, torch.float32)
        grad = grad_d.to(wide) * scale
        if inner is not None:
            grad = _through(activation, grad, inner.to(wide))
        if grad_preactivation is not None:
            grad = grad + grad_preactivation.to(wide)
        narrow = grad.to(a.dtype)
        grad_a = grad_b = grad_bias = None
        if wants_a:
            grad_a = torch.mm(right, narrow.t()) if trans_a else torch.mm(narrow, right.t())
        if wants_b:
            grad_b = torch.mm(narrow.t(), left) if trans_b else torch.mm(left.t(), narrow)
        if wants_bias and bias is not None:
            grad_bias = grad.sum(0).to(a.dtype)
        return grad_a, grad_b, grad_bias, grad_d.to(a.dtype) if wants_residual else None


def _through(activation: str | None, grad: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """The gradient before the activation."""
    aten = torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(grad, inner, 0)
    if activation == "silu":
        gate = torch.sigmoid(inner)  # aten's silu_backward has no derivative
        return grad * gate * (1 + inner * (1 - gate))
    return aten.gelu_backward(
        grad, inner, approximate="tanh" if activation == "gelu_tanh" else "none"
    )
