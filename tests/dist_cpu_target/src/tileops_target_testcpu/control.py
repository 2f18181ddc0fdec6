"""What the test target does next (``behaviour``), and what it did."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

__all__ = ["behaviour", "build_seconds", "builds", "count", "runs", "specs", "spoil"]

behaviour = "serve"
"""``serve``; at build ``fail_build``, ``decline``, ``build_nothing``; at run ``fail_run``, ``mark``
(adds 1, so that a result tells who made it) or a name in ``WRONG``."""
build_seconds = 0.0
"""How long a build takes: long enough, and threads meet in it."""

builds: Counter[str] = Counter()
runs: Counter[str] = Counter()
specs: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

_lock = threading.Lock()
_kept: dict[tuple[int, ...], torch.Tensor] = {}


def count(counter: Counter[str], op: str) -> None:
    with _lock:
        counter[op] += 1


def _strided(result: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(*result.shape, 2, dtype=result.dtype)
    wide[..., 0] = result
    return wide[..., 0]


def _keep(result: torch.Tensor) -> torch.Tensor:
    return _kept.setdefault(tuple(result.shape), result).copy_(result)


WRONG = {
    # what the engine refuses at the first call
    "wrong_shape": lambda result, inputs: result[..., :-1].contiguous(),
    "wrong_dtype": lambda result, inputs: result.double(),
    "input": lambda result, inputs: inputs[0].view(-1)[: result.numel()].view(result.shape),
    "view": lambda result, inputs: inputs[0].view(-1)[-result.numel() :].view(result.shape),
    "strided": lambda result, inputs: _strided(result),
    "two_outputs": lambda result, inputs: (result, result),
    "none": lambda result, inputs: None,
    "no_tensor": lambda result, inputs: result.tolist(),
    # what only the conformance kit sees
    "imprecise": lambda result, inputs: result * 1.05,
    "writes_input": lambda result, inputs: (inputs[0].zero_(), result)[1],
    "kept_buffer": lambda result, inputs: _keep(result),
    "random": lambda result, inputs: result + torch.randn_like(result) * 0.001,
}


def spoil(result: torch.Tensor, inputs: tuple[Any, ...]) -> Any:
    """``result`` as the behaviour wants it."""
    if behaviour == "fail_run":
        raise RuntimeError("the test device was lost")
    if behaviour == "mark":
        return result + 1
    return WRONG[behaviour](result, inputs) if behaviour in WRONG else result
