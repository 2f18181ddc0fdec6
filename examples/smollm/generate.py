"""Running a model token by token, eagerly or as two compiled graphs, with timing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor

from tileops.reduction import SoftmaxFwdOp

_softmax = SoftmaxFwdOp(dim=-1)


class Model(Protocol):
    """What ``TileopsModel`` and ``PlainModel`` have in common."""

    capacity: int

    def prefill(self, tokens: Tensor, context: Tensor, every: bool = False) -> Tensor: ...
    def decode(self, token: Tensor, context: Tensor) -> Tensor: ...


class CountingBackend:
    """Inductor, keeping of each graph it is given the number of nodes by operator."""

    def __init__(self) -> None:
        self.graphs: list[Counter[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        calls = (n for n in graph.graph.nodes if n.op.startswith("call_"))
        self.graphs.append(Counter(_name(node.target) for node in calls))
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)


def _name(target: Any) -> str:
    """``tileops::gemm_fwd`` for an operator, ``torch.view`` and the like for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name())
    return f"torch.{target if isinstance(target, str) else target.__name__}"


class Runner:
    """A model's two entry points, compiled (``graphs`` then tells what was) or as they are."""

    def __init__(self, model: Model, *, compiled: bool, device: torch.device | str = "cpu") -> None:
        self.model = model
        self.compiled = compiled
        self.device = device
        # A full cache is a contiguous tensor where a slice of it may not be, which would take a
        # graph of its own: so a text stops one short of it.
        self.limit = model.capacity - 1
        self.backends = {"prefill": CountingBackend(), "decode": CountingBackend()}
        self._prefill, self._decode = model.prefill, model.decode
        if compiled:
            self._prefill = torch.compile(
                model.prefill, backend=self.backends["prefill"], fullgraph=True
            )
            self._decode = torch.compile(
                model.decode, backend=self.backends["decode"], fullgraph=True
            )
        self._positions = torch.arange(model.capacity, device=device)

    def prefill(self, tokens: Sequence[int], *, every: bool = False) -> Tensor:
        """Start a text of two tokens or more: logits [1, vocab] after it; ``every``: after each."""
        text = self._dynamic(torch.tensor(tokens, device=self.device))
        with torch.no_grad():
            return self._prefill(text, self._context(len(tokens)), every)

    def decode(self, token: int, length: int) -> Tensor:
        """Logits [1, vocab] after ``token``, which makes the text ``length`` tokens long."""
        last = torch.tensor([token], device=self.device)
        with torch.no_grad():
            return self._decode(last, self._context(length))

    def _context(self, length: int) -> Tensor:
        return self._dynamic(self._positions[:length])

    def _dynamic(self, values: Tensor) -> Tensor:
        """Ask for a graph that serves any length from 2 to ``limit``."""
        if self.compiled:
            torch._dynamo.mark_dynamic(values, 0, min=2, max=self.limit)
        return values


def sampler(temperature: float, seed: int) -> Callable[[Tensor], int]:
    """A function from logits [1, vocab] to the next token; temperature 0 takes the likeliest."""
    if temperature == 0:
        return lambda logits: int(logits.argmax())
    # Drawn on the host, so that a seed means the same text on every device.
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> int:
        chances = _softmax(logits.float() / temperature)
        return int(torch.multinomial(chances[0].cpu(), 1, generator=generator))

    return draw


@dataclass
class Timing:
    """Seconds and tokens of one answer; the compile seconds are those of each first call."""

    prompt: int = 0
    compile_prefill: float = 0.0
    compile_decode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    steps: int = 0

    @property
    def prefill_rate(self) -> float:
        return self.prompt / self.prefill if self.prefill else 0.0

    @property
    def decode_rate(self) -> float:
        return self.steps / self.decode if self.decode else 0.0


@dataclass
class Progress:
    """One line that says what is going on, and afterwards how long it took."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Print ``what ...``, then the seconds that the body took."""
        print(f"{what} ...", end="", file=self.stream, flush=True)
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            print(file=self.stream, flush=True)
            raise
        print(f" {time.perf_counter() - start:.1f} s", file=self.stream, flush=True)


def warm_up(runner: Runner, prompt: Sequence[int], progress: Progress, label: str = "") -> Timing:
    """Call both entry points once, so that what follows is timed without compilation.

    Harmless: a call writes the cache slots of its own tokens only, with the same values again.
    """
    timing = Timing(prompt=len(prompt))
    verb = "compiling" if runner.compiled else "warming up"
    with progress.step(f"{verb} {label}prefill"):
        start = time.perf_counter()
        token = int(runner.prefill(prompt).argmax())
        timing.compile_prefill = time.perf_counter() - start
    with progress.step(f"{verb} {label}decode"):
        start = time.perf_counter()
        int(runner.decode(token, len(prompt) + 1).argmax())
        timing.compile_decode = time.perf_counter() - start
    return timing


def answer(
    runner: Runner,
    prompt: Sequence[int],
    timing: Timing,
    *,
    end: int,
    max_tokens: int,
    choose: Callable[[Tensor], int],
) -> Iterator[int]:
    """Tokens of the answer to ``prompt`` as they come, without the ``end`` token.

    Only the model's work and the choice of a token are timed, not what the caller does between.
    """
    start = time.perf_counter()
    token = choose(runner.prefill(prompt))
    timing.prefill = time.perf_counter() - start
    for length in range(len(prompt) + 1, len(prompt) + max_tokens + 1):
        if token == end:
            return
        yield token
        if length == len(prompt) + max_tokens:
            return
        start = time.perf_counter()
        token = choose(runner.decode(token, length))
        timing.decode += time.perf_counter() - start
        timing.steps += 1
