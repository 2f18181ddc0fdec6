"""RMS normalisation and rotary embedding of the heads of queries and keys, in place."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class FusedQKNormRoPEFwdOp(Op):
    """Writes the heads of queries and keys in ``qkv``; those of values stay.

    ``qkv``: ``[N, (num_heads + 2 * num_kv_heads) * D]``. Each head is RMS-normalised over ``D``, times
    ``q_weight`` or ``k_weight`` (``[D]``), then its first ``R`` elements are rotated by the angles of
    row ``positions[n]`` of ``cos_sin_cache`` ``[P, R]``: cosines, then sines. The pair of an element
    stands ``R / 2`` on (``neox``) or beside it (``interleaved``). Computed in float32 (float64 for
    float64), rounded once. API: ``vllm._custom_ops.fused_qk_norm_rope``.
    """

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("fused_qk_norm_rope:FusedQKNormRoPE",))

    @staticmethod
    def decomposition(
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        positions: torch.Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        rope_layout: str,
    ) -> tuple[torch.Tensor]:
        wide = torch.promote_types(qkv.dtype, torch.float32)
        tokens, size = qkv.shape[0], q_weight.shape[0]
        half = cos_sin_cache.shape[1] // 2
        heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, size)
        turned, values = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
        turned = turned.to(wide)
        turned = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + eps)
        queries, keys = turned.split((num_heads, num_kv_heads), 1)
        turned = torch.cat((queries * q_weight.to(wide), keys * k_weight.to(wide)), 1)
        angles = cos_sin_cache[positions].to(wide)[:, None]
        cosines, sines = angles.split((half, half), -1)
        rotated, rest = turned.split((2 * half, size - 2 * half), -1)
        if rope_layout == "neox":
            first, second = rotated.split((half, half), -1)
        else:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        pair = (first * cosines - second * sines, second * cosines + first * sines)
        rotated = (
            torch.cat(pair, -1) if rope_layout == "neox" else torch.stack(pair, -1).flatten(-2)
        )
        turned = torch.cat((rotated, rest), -1).to(qkv.dtype)
        return (torch.cat((turned, values), 1).view(qkv.shape),)
