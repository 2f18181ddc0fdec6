"""The works that ``benchmarks/models.py`` times: models, their inputs and one step of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import pretrained

__all__ = ["Case", "Step", "cases"]

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """One step of one model. ``make()`` gives the module, what is done with it (compiled or not), and
    another module that computes the same by tileops ops, where there is one."""

    name: str
    tokens: int
    dtype: torch.dtype
    make: Callable[[], tuple[Any, Step, Any]]
    mode: str | None = None
    """``torch.compile``'s."""

    @property
    def trains(self) -> bool:
        return "forward+backward" in self.name


def cases(device: str, tiny: bool) -> Iterator[Case]:
    """In the order of importance, as a run may end before its last."""
    if device == "cpu":
        yield from _real(tiny)
    else:
        yield from _llama3(device, tiny)


# ---- real weights, on the CPU --------------------------------------------------------------------


def _real(tiny: bool) -> Iterator[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    length, context = (8, 16) if tiny else (256, 256)
    batch, words = (2, 5) if tiny else (8, 64)
    yield Case("MiniLM, sentences", batch * words, f32, lambda: _sentences(tiny, batch, words))
    yield Case("MiniLM, one sentence", 16, f32, lambda: _sentences(tiny, 1, 16))
    yield Case("SmolLM2, prefill", length, f32, lambda: _prefill(_smollm2(tiny), length))
    yield Case("SmolLM2, decode", 1, f32, lambda: _decode(_smollm2(tiny), 1, context))
    narrow = "MiniLM, sentences in halves"
    yield Case(narrow, batch * words, bf16, lambda: _sentences(tiny, batch, words, bf16))


def _smollm2(tiny: bool) -> Any:
    if not tiny:
        return pretrained.smollm2()
    module = pretrained.transformers()
    config = module.LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return module.LlamaForCausalLM(config).eval()


def _sentences(
    tiny: bool, batch: int, words: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, Step, Any]:
    if tiny:
        module = pretrained.transformers()
        config = module.BertConfig(
            vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=1,
            num_attention_heads=4,
        )  # fmt: skip
        model = module.BertModel(config).eval()
    else:
        model, _ = pretrained.minilm()
    model = model.to(dtype)
    ids = torch.randint(1, model.config.vocab_size, (batch, words))
    mask = torch.ones_like(ids)
    mask[0, -1:] = 0  # the shortest sentence is padded
    return model, lambda run: run(input_ids=ids, attention_mask=mask)[0], None


# ---- decoders ------------------------------------------------------------------------------------


def _prefill(model: Any, length: int) -> tuple[Any, Step, Any]:
    ids = torch.randint(0, model.config.vocab_size, (1, length))
    return model, lambda run: run(input_ids=ids, use_cache=False, logits_to_keep=1)[0], None


def _decode(model: Any, batch: int, context: int) -> tuple[Any, Step, Any]:
    """One token more for each of ``batch`` texts, whose keys and values fill half of ``context`` slots."""
    module = pretrained.transformers()
    place = next(model.parameters())
    vocab, half = model.config.vocab_size, context // 2
    cache = module.StaticCache(config=model.config, max_cache_len=context)
    past = torch.randint(0, vocab, (batch, half), device=place.device)
    token = torch.randint(0, vocab, (batch, 1), device=place.device)
    with torch.no_grad():
        model(input_ids=past, past_key_values=cache, use_cache=True)
    # The cache counts its tokens; each step is to write the same slot.
    counts = [layer.cumulative_length for layer in cache.layers]
    position = torch.full((batch, 1), half, device=place.device)

    def step(run: Any) -> Any:
        for count in counts:
            count.fill_(half)
        given = {"input_ids": token, "position_ids": position}
        return run(**given, past_key_values=cache, use_cache=True)[0]

    return model, step, None


# ---- Llama 3 8B, one layer or four, on a card ----------------------------------------------------


def _llama3(device: str, tiny: bool) -> Iterator[Case]:
    bf16 = torch.bfloat16
    length, batch, context = (16, 2, 16) if tiny else (4096, 64, 1024)
    for mode, graphs in ((None, ""), ("reduce-overhead", ", CUDA graphs")):
        for layers in (1, 4):

            def named(what: str, layers: int = layers, graphs: str = graphs) -> str:
                return f"Llama 3 8B x{layers}, {what}{graphs}"

            def prefill(layers: int = layers) -> tuple[Any, Step, Any]:
                return _hidden(_layers(layers, device, tiny), length, False)

            def decode(layers: int = layers) -> tuple[Any, Step, Any]:
                return _decode(_layers(layers, device, tiny), batch, context)

            def train(layers: int = layers) -> tuple[Any, Step, Any]:
                return _hidden(_layers(layers, device, tiny), length, True)

            yield Case(named("prefill"), length, bf16, prefill, mode)
            yield Case(named("decode"), batch, bf16, decode, mode)
            if mode is None:
                yield Case(named("forward+backward"), length, bf16, train)


def _layers(layers: int, device: str, tiny: bool) -> Any:
    """Layers of Llama 3 8B with random weights, and a vocabulary of no weight."""
    module = pretrained.transformers()
    sizes = (48, 80, 4, 2) if tiny else (4096, 14336, 32, 8)
    config = module.LlamaConfig(
        vocab_size=128, hidden_size=sizes[0], intermediate_size=sizes[1],
        num_attention_heads=sizes[2], num_key_value_heads=sizes[3], num_hidden_layers=layers,
        rms_norm_eps=1e-5, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with torch.device(device):
        model = module.LlamaModel(config).eval()
    for (
        weight
    ) in model.parameters():  # the rates of the rotation stay float32, as when weights are loaded
        weight.data = weight.data.to(torch.bfloat16)
    return model


def _hidden(model: Any, length: int, train: bool) -> tuple[Any, Step, Any]:
    """A text as hidden states; ``train``: with the gradients of all weights and of the text."""
    place = next(model.parameters())
    hidden = model.config.hidden_size
    x = torch.randn(1, length, hidden, device=place.device, dtype=place.dtype, requires_grad=train)
    back = torch.randn_like(x, requires_grad=False)
    weights = [p for n, p in model.named_parameters() if "embed_tokens" not in n]

    def step(run: Any) -> Any:
        result = run(inputs_embeds=x, use_cache=False)[0]
        return torch.autograd.grad(result, [x, *weights], back) if train else result

    return model, step, _Ops(model)


class _Ops(torch.nn.Module):
    """The weights of a ``LlamaModel``, computed with by ops; called as it is, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        from tileops.attention import GQADenseFwdOp
        from tileops.elementwise import SiLUAndMulFwdOp
        from tileops.gemm import GEMMFwdOp
        from tileops.norm import FusedAddRMSNormFwdOp, RMSNormFwdOp
        from tileops.rope import RoPENeoxPositionIdsFwdOp

        config = self.config = model.config
        self.model = model
        self.size = config.hidden_size // config.num_attention_heads
        self.norm = RMSNormFwdOp((config.hidden_size,), config.rms_norm_eps)
        self.add_norm = FusedAddRMSNormFwdOp(config.rms_norm_eps)
        self.rope = RoPENeoxPositionIdsFwdOp(
            config.max_position_embeddings, config.rope_parameters["rope_theta"]
        )
        self.gemm, self.silu_and_mul = GEMMFwdOp(), SiLUAndMulFwdOp()
        self.attention = GQADenseFwdOp(is_causal=True)

    def forward(self, inputs_embeds: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
        assert not use_cache
        residual, x = inputs_embeds[0], None
        places = torch.arange(residual.shape[0], device=residual.device)
        for layer in self.model.layers:
            if x is None:
                normal = self.norm(residual, layer.input_layernorm.weight)
            else:
                normal, residual = self.add_norm(x, residual, layer.input_layernorm.weight)
            x = self._attend(layer.self_attn, normal, places)
            normal, residual = self.add_norm(x, residual, layer.post_attention_layernorm.weight)
            mlp = layer.mlp
            both = torch.cat(
                [self.gemm(normal, mlp.gate_proj.weight), self.gemm(normal, mlp.up_proj.weight)], -1
            )
            x = self.gemm(self.silu_and_mul(both), mlp.down_proj.weight)
        return (self.add_norm(x, residual, self.model.norm.weight)[0][None],)

    def _attend(self, part: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.gemm(x, weight.weight).view(x.shape[0], -1, self.size)
            for weight in (part.q_proj, part.k_proj, part.v_proj)
        )
        seen = self.attention(self.rope(q, places)[None], self.rope(k, places)[None], v[None])
        return self.gemm(seen.view(x.shape[0], -1), part.o_proj.weight)
