"""Layer normalisation and its gradient."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import layer_norm


class LayerNormFwdOp(Op):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias`` over the last ``len(normalized_shape)``
    dims, with the biased variance.

    ``input``: ``[*B, *normalized_shape]``; ``weight``, ``bias``: ``normalized_shape`` or None; the
    output has the shape and dtype of ``input``. API: ``torch.nn.functional.layer_norm``.
    """

    kernel = KernelInterface(cuda=("rows:RegisterRow", "rows:StreamedRow", "rows:ManyShortRows"))

    @staticmethod
    def decomposition(
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        normalized_shape: tuple[int, ...],
        eps: float,
    ) -> torch.Tensor:
        return layer_norm(input, normalized_shape, weight, bias, eps)


class LayerNormBwdOp(Op):
    """The gradients of ``LayerNormFwdOp``: ``(grad_input, grad_weight, grad_bias)``, None where not
    wanted.

    With ``r = 1 / sqrt(var + eps)``, ``n = (input - mean) r`` and ``h = grad_output weight``:
    ``grad_input = r (h - mean(h) - n mean(h n))``; ``grad_weight`` and ``grad_bias`` are the sums over
    rows of ``grad_output n`` and ``grad_output``. Shapes and dtypes are the forward's; sums are in
    float32 (float64 for float64).
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("rows_backward:HeldRows", "rows_backward:LongRows")
    )

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        normalized_shape: tuple[int, ...],
        eps: float,
        wants_input: bool,
        wants_weight: bool,
        wants_bias: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        wide = torch.promote_types(input.dtype, torch.float32)
        values, scale = input.to(wide), None if weight is None else weight.to(wide)
        _, mean, rstd = torch.native_layer_norm(values, normalized_shape, None, None, eps)
        wanted = (wants_input, wants_weight and weight is not None, wants_bias)
        bias = grad_output.new_empty(normalized_shape, dtype=wide)
        found = torch.ops.aten.native_layer_norm_backward(
            grad_output.to(wide), values, normalized_shape, mean, rstd, scale, bias, wanted
        )
        return tuple(
            gradient.to(input.dtype) if is_wanted else None
            for gradient, is_wanted in zip(found, wanted, strict=True)
        )
