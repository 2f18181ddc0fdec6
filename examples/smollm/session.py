"""One run of the command line: what it loads once, and what it prints."""

from __future__ import annotations

import torch

from examples.smollm import weights
from examples.smollm.errors import ExampleError
from examples.smollm.generate import Progress, Runner, Timing, answer, sampler, warm_up
from examples.smollm.model import TileopsModel
from examples.smollm.plain import PlainModel
from examples.smollm.tokenizer import Tokenizer
from examples.smollm.verify import Reference, sample, verify

CAPACITY = 2048  # Tokens that the cache holds, unless prompt and answer need more.
COMPARED = 64  # Tokens that each contender of --compare generates, whatever it says.


class Session:
    """A prompt, and the weights and tokenizer to answer it with."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, prompt: str, max_tokens: int
    ) -> None:
        self.device = device
        self.max_tokens = max_tokens
        self.progress = Progress()
        self.path = weights.find_file()
        with self.progress.step("loading the tokenizer"):
            reader = weights.open_file(self.path)
            self.tokenizer = Tokenizer(reader)
        self.prompt = self.tokenizer.chat(prompt)
        # One more than the text: see Runner.limit.
        needed = len(self.prompt) + max_tokens + 1
        most = weights.read_config(reader).max_position
        if needed > most:
            raise ExampleError(
                f"the prompt's {len(self.prompt)} tokens and --max-tokens {max_tokens} do not "
                f"fit the model's {most}"
            )
        self.capacity = max(needed, CAPACITY)
        with self.progress.step("loading weights"):
            self.weights = weights.load(self.path, device=device, dtype=dtype)

    def answer(self, compiled: bool, temperature: float, seed: int) -> None:
        """Stream the answer, then print the graphs that it ran through and its speed."""
        model = TileopsModel(self.weights, self.capacity)
        self.runner = Runner(model, compiled=compiled, device=self.device)
        self.timing = warm_up(self.runner, self.prompt, self.progress)
        tokens = answer(
            self.runner,
            self.prompt,
            self.timing,
            end=self.tokenizer.end,
            max_tokens=self.max_tokens,
            choose=sampler(temperature, seed),
        )
        for piece in self.tokenizer.stream(tokens):
            print(piece, end="", flush=True)
        print("\n")
        print_graphs(self.runner)
        print(f"prefill: {self.timing.prompt} tokens, {self.timing.prefill_rate:.1f} tokens/s")
        print(f"decode: {self.timing.steps} tokens, {self.timing.decode_rate:.1f} tokens/s")

    def verify(self) -> bool:
        """Compare with ``transformers``, print the numbers, and tell whether they hold."""
        with self.progress.step("loading the reference (transformers)"):
            reference = Reference(self.path)
        with self.progress.step("comparing"):
            report = verify(self.runner, reference, sample(self.tokenizer))
        print(report)
        return report.passed

    def compare(self) -> None:
        """Time the same prompt through tileops and plain PyTorch, each eager and compiled."""
        contenders: list[tuple[str, Runner, Timing]] = []
        for name, model in (
            ("tileops", TileopsModel(self.weights, self.capacity)),
            ("plain PyTorch", PlainModel(self.weights, self.capacity)),
        ):
            for compiled in (False, True):
                label = f"{name} {'compiled' if compiled else 'eager'}"
                if compiled and name == "tileops" and self.runner.compiled:
                    # It is there already, and a second one would find Inductor's cache warm.
                    runner, first = self.runner, self.timing
                else:
                    runner = Runner(model, compiled=compiled, device=self.device)
                    first = warm_up(runner, self.prompt, self.progress, f"{label} ")
                contenders.append((label, runner, first))
        with self.progress.step("timing"):
            # Forwards, then backwards, so that a machine that slows down favours nobody.
            for _, runner, first in contenders + contenders[::-1]:
                self._time(runner, first)
        print(f"\n{'':24}{'compile s':^20}{'tokens/s':^20}")
        print(f"{'':24}{'prefill':>10}{'decode':>10}{'prefill':>10}{'decode':>10}")
        for label, runner, timing in contenders:
            seconds = (timing.compile_prefill, timing.compile_decode)
            cells = [f"{s:.1f}" if runner.compiled else "-" for s in seconds]
            cells += [f"{rate:.1f}" for rate in (timing.prefill_rate, timing.decode_rate)]
            print(f"{label:24}" + "".join(f"{cell:>10}" for cell in cells))

    def _time(self, runner: Runner, best: Timing) -> None:
        """Time a fixed number of tokens, past the answer's end if need be, into ``best``."""
        timing = Timing(len(self.prompt))
        tokens = answer(
            runner, self.prompt, timing, end=-1, max_tokens=COMPARED, choose=sampler(0, 0)
        )
        for _ in tokens:
            pass
        if best.steps != timing.steps or timing.decode < best.decode:
            best.decode, best.steps = timing.decode, timing.steps
        best.prefill = min(timing.prefill, best.prefill or timing.prefill)


def print_graphs(runner: Runner) -> None:
    """The operators of the compiled graphs, each with its number of nodes."""
    if not runner.compiled:
        print("no graph: the operators were called one by one")
    for phase, backend in runner.backends.items():
        for nodes in backend.graphs:
            ours = {name: count for name, count in nodes.items() if name.startswith("tileops::")}
            print(
                f"{phase} graph: {sum(nodes.values())} nodes, {sum(ours.values())} of them tileops"
            )
            for name, count in sorted(nodes.items(), key=lambda x: (x[0] not in ours, -x[1])):
                print(f"{count:6} {name}")
