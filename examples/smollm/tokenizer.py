"""The model's tokenizer, built from the vocabulary, merges and chat template of its GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from examples.smollm.errors import ExampleError, need

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL = 3  # GGUF's token type for tokens that stand for no text.


class Tokenizer:
    """Text to token ids and back; ``end`` is the id that ends an answer."""

    def __init__(self, reader: GGUFReader) -> None:
        tokenizers = need("tokenizers")

        def field(name: str) -> Any:
            entry = reader.get_field(f"tokenizer.{name}")
            if entry is None:
                raise ExampleError(f"the weights file has no entry tokenizer.{name}")
            return entry.contents()

        kind = (field("ggml.model"), field("ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ExampleError(f"the weights file has a tokenizer of an unknown kind: {kind}")
        tokens: list[str] = field("ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
        special = [
            t for t, kind in zip(tokens, field("ggml.token_type"), strict=True) if kind == CONTROL
        ]

        vocabulary = {token: index for index, token in enumerate(tokens)}
        self._inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
        # What GGUF calls "smollm": each digit alone, then GPT-2's splitting into words.
        self._inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self._inner.decoder = tokenizers.decoders.ByteLevel()
        self._inner.add_special_tokens(special)
        self._template: str = field("chat_template")
        self.end: int = field("ggml.eos_token_id")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, nothing added."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, without control tokens."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, prompt: str) -> list[int]:
        """Token ids of a conversation in which ``prompt`` waits for its answer."""
        # The template came with the weights, so it is run in the sandbox, as data.
        sandbox = need("jinja2.sandbox").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        messages = [{"role": "user", "content": prompt}]
        text = sandbox.from_string(self._template).render(
            messages=messages, add_generation_prompt=True
        )
        return self.encode(text)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Pieces of text as ``ids`` arrive; a character is held back until it is whole."""
        held: list[int] = []
        for index in ids:
            held.append(index)
            piece = self.decode(held)
            # One character can take several tokens, which decode to U+FFFD until the last is in.
            # No UTF-8 sequence is longer than four bytes, so a real U+FFFD is not held for ever.
            if not piece.endswith("\ufffd") or len(held) >= 8:
                held.clear()
                yield piece
        if held:
            yield self.decode(held)
