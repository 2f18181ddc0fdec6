"""Hugging Face model classes with small random configurations, unmodified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.pretrained import transformers

__all__ = ["ZOO", "Kind"]

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "use_cache": False}


@dataclass(frozen=True)
class Kind:
    """``model`` and ``config``: names of classes of ``transformers``."""

    model: str
    config: str
    sizes: dict[str, Any]
    output: str = "logits"
    more: dict[str, Any] = field(default_factory=dict)

    def make(self, dtype: torch.dtype = torch.float32) -> Any:
        """The model with random weights, in ``eval`` mode. Two layers, so that what one layer leaves to
        the next is seen."""
        module = transformers()
        config = getattr(module, self.config)(**self.sizes, **self.more)
        if dtype is not torch.float32 and "num_local_experts" in self.more:
            # All experts are asked: which ones are is a choice that another rounding would change.
            config.num_experts_per_tok = config.num_local_experts
        model = getattr(module, self.model)(config)
        # As large as trained weights: with the initial 0.02 a wrong attention would hardly be seen.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.to(dtype).eval()

    def run(self, called: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
        """What the model says of ``ids``; BERT is told which are padding, as its users do."""
        mask = {} if self.output == "logits" else {"attention_mask": (ids != 0).long()}
        result: torch.Tensor = called(input_ids=ids, **mask)[self.output]
        return result


def ids(batch: int, length: int) -> torch.Tensor:
    """Random tokens; the last of the first text is padding to those that look."""
    drawn = torch.randint(1, VOCAB, (batch, length))
    drawn[0, -1] = 0
    return drawn


ZOO = {
    "llama": Kind("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": Kind("Qwen3ForCausalLM", "Qwen3Config", DECODER, more={"head_dim": 12}),
    "gemma": Kind("GemmaForCausalLM", "GemmaConfig", DECODER, more={"head_dim": 12}),
    "mistral": Kind(
        "MistralForCausalLM", "MistralConfig", DECODER, more={"head_dim": 12, "sliding_window": 5}
    ),
    "mixtral": Kind(
        "MixtralForCausalLM",
        "MixtralConfig",
        DECODER,
        more={"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bert": Kind("BertModel", "BertConfig", SIZES, "last_hidden_state"),
}
