"""Comparing the model with an implementation that is not ours, from the same file.

The reference is the Llama of ``transformers``, which reads the same GGUF file by itself.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.smollm.errors import ExampleError, need, require
from examples.smollm.generate import Runner
from examples.smollm.tokenizer import Tokenizer

SAMPLE = Path(__file__).with_name("sample.txt")
PACKAGES = ("transformers", "accelerate")
TOKENS = 200
STEPS = 64
# Float32 sums in another order, through 30 layers, differ by some 1e-4 in logits of size 20;
# a wrong rotation, mask or weight differs by 1 or more.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Report:
    """Largest absolute differences of logits, and how many first greedy tokens agree."""

    text_difference: float
    step_difference: float
    agreeing: int
    steps: int

    @property
    def passed(self) -> bool:
        return max(self.text_difference, self.step_difference) <= TOLERANCE and (
            self.agreeing == self.steps
        )

    def __str__(self) -> str:
        return (
            f"largest difference of logits over {TOKENS} tokens of text: "
            f"{self.text_difference:.2e} (allowed {TOLERANCE:.0e})\n"
            f"largest difference over the {self.steps} steps after it:   "
            f"{self.step_difference:.2e} (allowed {TOLERANCE:.0e})\n"
            f"greedy tokens that agree: {self.agreeing} of {self.steps}\n"
            f"verification {'passed' if self.passed else 'FAILED'}"
        )


class Reference:
    """The Llama of ``transformers`` in float32 on the CPU, one text at a time."""

    def __init__(self, path: Path) -> None:
        # transformers loads a GGUF file only where accelerate is there.
        require(*PACKAGES)
        transformers = need("transformers")
        transformers.logging.set_verbosity_error()
        # Its notes and bars would break our progress line; what goes wrong is raised all the same.
        with contextlib.redirect_stderr(io.StringIO()):
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
            )
        self.model.eval()
        self._cache: Any = None

    def prefill(self, tokens: list[int]) -> Tensor:
        """Logits [S, vocab] after each of ``tokens``."""
        self._cache = None
        return self._step(tokens)

    def decode(self, token: int) -> Tensor:
        """Logits [1, vocab] after one token more."""
        return self._step([token])

    def _step(self, tokens: list[int]) -> Tensor:
        with torch.no_grad(), warnings.catch_warnings():
            # Its releases rename this argument with a warning; the old name works in all of them.
            warnings.simplefilter("ignore", FutureWarning)
            result = self.model(
                input_ids=torch.tensor([tokens]), past_key_values=self._cache, use_cache=True
            )
        self._cache = result.past_key_values
        logits: Tensor = result.logits[0]
        return logits


def sample(tokenizer: Tokenizer) -> list[int]:
    """The first 200 tokens of the text that comes with the example."""
    tokens = tokenizer.encode(SAMPLE.read_text(encoding="utf-8"))
    if len(tokens) < TOKENS:
        raise ExampleError(f"{SAMPLE.name} has only {len(tokens)} tokens")
    return tokens[:TOKENS]


def verify(runner: Runner, reference: Reference, tokens: list[int], steps: int = STEPS) -> Report:
    """Compare logits after each of ``tokens``, then those of ``steps`` greedy steps.

    Both models are fed the reference's token, so that one difference is counted once.
    """
    expected = reference.prefill(tokens)
    text_difference = _difference(runner.prefill(tokens, every=True), expected)
    # Again as the generator calls it: its graph computes the last row only.
    logits = runner.prefill(tokens)
    expected = expected[-1:]
    step_difference, agreeing, same = 0.0, 0, True
    for step in range(steps):
        step_difference = max(step_difference, _difference(logits, expected))
        token = int(expected.argmax())
        same = same and int(logits.argmax()) == token
        agreeing += same
        if step + 1 < steps:
            expected = reference.decode(token)
            logits = runner.decode(token, len(tokens) + step + 1)
    return Report(text_difference, step_difference, agreeing, steps)


def _difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float().cpu() - expected).abs().max())
