"""SmolLM2, a Llama-type model, written from tileops operators.

Every computation is a tileops operator: the matrix products, the norms (fused with the residual
sum), RoPE, the cache writes, attention and the gated activation. Three things stay PyTorch, since
tileops has no operator for them: the embedding lookup, views and slices, and in ``generate`` the
choice of a token from its logits (argmax, or a draw from the chances that tileops' softmax gives).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from examples.smollm.weights import LayerWeights, Weights
from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.elementwise import SiLUAndMulFwdOp
from tileops.gemm import GEMMFwdOp
from tileops.norm import FusedAddRMSNormFwdOp, RMSNormFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

PAGE = 16  # Slots in a page of the cache.


class TileopsModel:
    """A model for one text at a time, with a key/value cache of ``capacity`` tokens.

    A call is told where it stands by ``context``, int64 [L]: the positions 0 to L-1 of the text so
    far. It is a tensor rather than a number because Dynamo makes a tensor's size a symbol on
    request, so that one graph serves every L.
    """

    def __init__(self, weights: Weights, capacity: int) -> None:
        config = self.config = weights.config
        self.weights = weights
        self.capacity = -(-capacity // PAGE) * PAGE
        self.gemm = GEMMFwdOp()
        self.norm = RMSNormFwdOp((config.hidden,), config.norm_eps)
        self.add_norm = FusedAddRMSNormFwdOp(config.norm_eps)
        self.rope = RoPENeoxPositionIdsFwdOp(config.max_position, config.rope_base)
        self.write = PagedKVCacheWriteFwdOp()
        self.attention = GQADenseFwdOp(is_causal=True)
        self.silu_and_mul = SiLUAndMulFwdOp()
        # One tensor a layer: a slice of a larger one would be copied when a graph writes it.
        shape = (self.capacity // PAGE, PAGE, config.kv_heads, config.head_dim)
        self.keys = [weights.embedding.new_zeros(shape) for _ in weights.layers]
        self.values = [weights.embedding.new_zeros(shape) for _ in weights.layers]

    def prefill(self, tokens: Tensor, context: Tensor, every: bool = False) -> Tensor:
        """Logits [1, vocab] after the text ``tokens`` (int64 [L]); ``every``: [L, vocab]."""
        return self._run(tokens, context, context, every)

    def decode(self, token: Tensor, context: Tensor) -> Tensor:
        """Logits [1, vocab] after ``token`` (int64 [1]), the last of a text of L tokens."""
        return self._run(token, context[-1:], context, every=True)

    def _run(self, tokens: Tensor, positions: Tensor, context: Tensor, every: bool) -> Tensor:
        """Logits after ``tokens`` [N] at ``positions`` [N], the last N places of ``context``."""
        length = context.shape[0]
        residual = F.embedding(tokens, self.weights.embedding)
        x: Tensor | None = None
        for layer, keys, values in zip(self.weights.layers, self.keys, self.values, strict=True):
            # Each sum of a residual belongs to the norm after it; the first norm has none before.
            if x is None:
                normed = self.norm(residual, layer.attn_norm)
            else:
                normed, residual = self.add_norm(x, residual, layer.attn_norm)
            x = self._attend(layer, normed, positions, length, keys, values)
            normed, residual = self.add_norm(x, residual, layer.ffn_norm)
            x = self.gemm(self.silu_and_mul(self.gemm(normed, layer.gate_up)), layer.down)
        assert x is not None, "a model has a layer at least"
        if not every:
            x, residual = x[-1:], residual[-1:]
        normed, _ = self.add_norm(x, residual, self.weights.norm)
        return self.gemm(normed, self.weights.embedding)

    def _attend(
        self,
        layer: LayerWeights,
        x: Tensor,
        positions: Tensor,
        length: int,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Write K and V of ``x`` [N, hidden] to the cache, then mix its first ``length`` slots."""
        config, count = self.config, x.shape[0]
        heads = self.gemm(x, layer.qkv).view(count, -1, config.head_dim)
        # Q and K lie side by side, so that one call turns both.
        turning = config.heads + config.kv_heads
        turned = self.rope(heads[:, :turning], positions)
        query, key, value = turned[:, : config.heads], turned[:, config.heads :], heads[:, turning:]
        # One text only, so its pages lie in order and a position is its own slot.
        self.write(key, value, keys, values, positions)
        mixed = self.attention(
            query.unsqueeze(0), self._seen(keys, length), self._seen(values, length)
        )
        return self.gemm(mixed.view(count, -1), layer.out)

    def _seen(self, cache: Tensor, length: int) -> Tensor:
        """The first ``length`` slots of a paged cache, as attention takes it: [1, L, H_kv, D]."""
        return cache.view(1, self.capacity, *cache.shape[2:])[:, :length]
