"""The example model on a card: tokens/s of prefill and decode, beside plain PyTorch.

    PYTHONPATH=src:. python3 benchmarks/smollm.py --dtype bfloat16

Four contenders in one run: the model from tileops ops and the same model in plain PyTorch, each
eager and under ``torch.compile``. Wall time with a synchronisation after each prefill and each
decoded token (a token is needed before the next begins); contenders take turns, forwards and
backwards; medians. Also the example's own check against ``transformers``, in float32. JSON goes to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import facts, slug
from examples.smollm import weights
from examples.smollm.generate import Progress, Runner, warm_up
from examples.smollm.model import TileopsModel
from examples.smollm.plain import PlainModel
from examples.smollm.tokenizer import Tokenizer
from examples.smollm.verify import Reference, sample, verify

ROOT = Path(__file__).resolve().parents[1]
PREFILL = 2048
STEPS = 64
ROUNDS = 7


def _seconds(work: Any) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _measure(runners: dict[str, Runner], prompt: list[int]) -> dict[str, dict[str, float]]:
    """Median tokens/s of a prefill of ``prompt``, and of decode after its first 512 tokens."""
    prefill: dict[str, list[float]] = {name: [] for name in runners}
    decode: dict[str, list[float]] = {name: [] for name in runners}
    order = list(runners)
    for turn in range(ROUNDS):
        for name in order if turn % 2 == 0 else reversed(order):
            runner = runners[name]
            prefill[name].append(_seconds(lambda r=runner: r.prefill(prompt)))
            runner.prefill(prompt[:512])
            for step in range(STEPS):
                length = 513 + step
                decode[name].append(
                    _seconds(lambda r=runner, n=length: int(r.decode(prompt[n], n).argmax()))
                )
    return {
        name: {
            "prefill_tokens_per_s": round(len(prompt) / statistics.median(prefill[name]), 1),
            "decode_tokens_per_s": round(1 / statistics.median(decode[name]), 1),
        }
        for name in runners
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, progress = torch.device("cuda"), Progress()
    path = weights.find_file()
    tokenizer = Tokenizer(weights.open_file(path))
    text = sample(tokenizer)
    prompt = (text * (PREFILL // len(text) + 1))[:PREFILL]
    loaded = weights.load(path, device=device, dtype=getattr(torch, arguments.dtype))
    report: dict[str, Any] = {"facts": facts(arguments.commit), "dtype": arguments.dtype,
                              "prefill": PREFILL, "decode_context": 512, "steps": STEPS}  # fmt: skip
    runners, compile_s = {}, {}
    for kind, model in (("tileops", TileopsModel), ("plain", PlainModel)):
        for compiled in (False, True):
            name = f"{kind} {'compiled' if compiled else 'eager'}"
            runners[name] = Runner(model(loaded, PREFILL + STEPS), compiled=compiled, device=device)
            timing = warm_up(runners[name], prompt, progress, f"{name} ")
            compile_s[name] = [round(timing.compile_prefill, 1), round(timing.compile_decode, 1)]
    report["first_call_s"] = compile_s
    report["rates"] = _measure(runners, prompt)
    for name, rates in report["rates"].items():
        print(f"{name:18} {rates}  first calls {compile_s[name]} s", flush=True)
    if not arguments.no_verify:
        exact = weights.load(path, device=device, dtype=torch.float32)
        runner = Runner(TileopsModel(exact, 512), compiled=True, device=device)
        checked = verify(runner, Reference(path), text)
        print(checked)
        report["verify_float32"] = {"text": str(checked), "passed": checked.passed}
    card = slug(report["facts"]["card"])
    out = arguments.out or ROOT / "benchmarks" / "results" / f"smollm_{card}.json"
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
