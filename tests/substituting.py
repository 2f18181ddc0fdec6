"""Holding what a pattern replaces to its meaning: values, gradients, with the op as a node and inlined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.rewriting import Seen, rewritten
from tileops.backend.tolerances import compare

__all__ = ["ONLY", "grads_agree", "held"]

ONLY = ("substitution:substitute",)
"""The passes, without those that inline afterwards."""
Function = Callable[..., Any]


def held(
    function: Function,
    inputs: tuple[torch.Tensor, ...],
    meaning: Function,
    kind: str,
    of_rms: float = 0.0,
) -> Seen:
    """``function`` through the passes, its ops as nodes and as code, within the tolerance table of
    ``meaning`` in float64; ``of_rms`` more where steps outside the op round. What the first run saw."""
    exact = meaning(*inputs)
    seens = []
    for passes in ({"passes": ONLY}, {}):
        run, seen = rewritten(function, "always", **passes)
        result = run(*(t.clone() for t in inputs))
        wanted = exact if isinstance(exact, tuple) else (exact,)
        given = result if isinstance(result, tuple) else (result,)
        for one, other in zip(given, wanted, strict=True):
            if of_rms:
                error = (one.double() - other).norm() / other.norm()
                assert error <= of_rms, f"{float(error)}"
            else:
                found = compare(one, other, kind)
                assert found.ok, found.text
        seens.append(seen)
    assert seens[0].substituted() == seens[1].substituted()
    return seens[0]


def grads_agree(
    function: Function,
    inputs: tuple[torch.Tensor, ...],
    meaning: Function,
    passes: tuple[str, ...] | None = None,
) -> None:
    """Gradients of a weighted sum of the results, against the same in float64."""
    given = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    run, seen = rewritten(function, "always", **({"passes": passes} if passes else {}))
    results, wanted = run(*given), meaning(*exact)
    results = results if isinstance(results, tuple) else (results,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    weights = [torch.randn(r.shape, dtype=r.dtype) for r in results]
    found = torch.autograd.grad(results, [t for t in given if t.requires_grad], weights)
    sought = torch.autograd.grad(
        wanted, [t for t in exact if t.requires_grad], [w.double() for w in weights]
    )
    assert seen.substituted()
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[inputs[0].dtype]
    for ours, theirs in zip(found, sought, strict=True):
        assert (ours.double() - theirs).norm() <= rtol * theirs.norm()
