"""Bringing the experts' rows back to their tokens."""

from __future__ import annotations

import torch

from tileops.authoring import Op
from tileops.moe.layouts import ContiguousLayoutSpec, MaskedLayoutSpec, RoutingEpilogueSpec


class MoEPostPermuteFwdOp(Op):
    """``output[t] = scale * sum_k topk_weights[t, k] * rows[inverse_indices[t*K + k]]``.

    ``expert_output`` (the rows): ``[P, H]``, or ``[E, max_m, H]`` for a masked layout; ``topk_weights``:
    float32 ``[T, K]``; ``inverse_indices``: int32 ``[T*K]``; ``scale`` is ``epilogue``'s
    ``routed_scaling_factor`` (1 without). Accumulates in float32; the output ``[T, H]`` is of
    ``out_dtype`` (the rows' dtype when None), or is ``out``. API: vLLM's ``moe_unpermute``.
    """

    @staticmethod
    def decomposition(
        expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        inverse_indices: torch.Tensor,
        *,
        layout: ContiguousLayoutSpec | MaskedLayoutSpec,
        epilogue: RoutingEpilogueSpec | None,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        rows = expert_output.flatten(0, -2)
        tokens, chosen = topk_weights.shape
        taken = rows[inverse_indices.long()].float().view(tokens, chosen, rows.shape[-1])
        result = (taken * topk_weights[..., None]).sum(1)
        if epilogue is not None:
            result = result * epilogue.routed_scaling_factor
        return result.to(expert_output.dtype if out_dtype is None else out_dtype)
