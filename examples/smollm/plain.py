"""The same model in plain PyTorch: what ``--compare`` times, and the tests' second opinion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.smollm.weights import Weights


class PlainModel:
    """Llama in plain PyTorch; weights and caches are those of ``examples.smollm.model``."""

    def __init__(self, weights: Weights, capacity: int) -> None:
        config = self.config = weights.config
        self.weights = weights
        self.capacity = capacity
        like = weights.embedding
        shape = (1, config.kv_heads, capacity, config.head_dim)
        self.keys = [like.new_zeros(shape) for _ in weights.layers]
        self.values = [like.new_zeros(shape) for _ in weights.layers]

    def prefill(self, tokens: Tensor, context: Tensor, every: bool = False) -> Tensor:
        """Logits [1, vocab] after ``tokens`` [S], or [S, vocab] after each of them."""
        return self._run(tokens, context, context, every)

    def decode(self, token: Tensor, context: Tensor) -> Tensor:
        """Logits [1, vocab] after ``token`` [1], the last of a text of ``len(context)`` tokens."""
        return self._run(token, context[-1:], context, every=True)

    def _run(self, tokens: Tensor, positions: Tensor, context: Tensor, every: bool) -> Tensor:
        config, size = self.config, (self.config.hidden,)
        cosine, sine = self._angles(positions)
        length = context.shape[0]
        x = F.embedding(tokens, self.weights.embedding)
        for layer, keys, values in zip(self.weights.layers, self.keys, self.values, strict=True):
            normed = F.rms_norm(x, size, layer.attn_norm, config.norm_eps)
            heads = F.linear(normed, layer.qkv).view(1, tokens.shape[0], -1, config.head_dim)
            query, key, value = heads.transpose(1, 2).split(
                [config.heads, config.kv_heads, config.kv_heads], dim=1
            )
            keys.index_copy_(2, positions, _rotate(key, cosine, sine))
            values.index_copy_(2, positions, value)
            mixed = F.scaled_dot_product_attention(
                _rotate(query, cosine, sine),
                keys[:, :, :length],
                values[:, :, :length],
                # A single token sees the whole context; a prompt is its own context.
                is_causal=positions is context,
                enable_gqa=True,
            )
            x = x + F.linear(mixed.transpose(1, 2).reshape(tokens.shape[0], -1), layer.out)
            normed = F.rms_norm(x, size, layer.ffn_norm, config.norm_eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        if not every:
            x = x[-1:]
        return F.linear(
            F.rms_norm(x, size, self.weights.norm, config.norm_eps), self.weights.embedding
        )

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [N, D/2] each, of the angles at ``positions`` [N]."""
        exponents = torch.arange(0, self.config.head_dim, 2, device=positions.device)
        frequencies = self.config.rope_base ** (-exponents.float() / self.config.head_dim)
        angles = positions.float()[:, None] * frequencies
        dtype = self.weights.embedding.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """NeoX-style RoPE of ``x`` [1, heads, N, D]: row i turns with row i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
