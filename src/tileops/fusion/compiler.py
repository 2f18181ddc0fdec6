"""The backend: what ``torch.compile(model, backend="tileops")`` calls with each graph of Dynamo's."""

from __future__ import annotations

import copy
import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

import tileops
from tileops.engine import targets
from tileops.engine.op import Op
from tileops.fusion.placement import served_in_tree
from tileops.fusion.policies import check_policy
from tileops.fusion.report import keep
from tileops.fusion.rewrite import Rewrite, begin

__all__ = ["backend"]

OPTION = "tileops.fusion"
"""The one option that is ours; all others are Inductor's."""
OWN_PRODUCTS = ("max_autotune", "max_autotune_gemm", "freezing")
"""Inductor's options, given or implied by the mode or set for all, under which it has products of its own:
it times templates, or rearranges weights once."""
PASSES = (
    "substitution:substitute",
    "grouped:group",
    "placement:place",
    "epilogues:take",
    "products:unroll",
    "placement:conclude",
)
"""In order; each takes the ``Rewrite``."""


def backend(
    module: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: rewrite it, then hand it to Inductor.

    ``mode`` and ``options`` are Inductor's, as ``torch.compile`` takes them, and
    ``options={"tileops.fusion": "never" | "always" | "auto"}``. Raises ``ValueError`` for another policy
    or option of this library and ``RuntimeError``, Inductor's, for an option or a mode that it does not
    know.
    """
    own = dict(options or {})
    policy = own.pop(OPTION, None)
    if unknown := [name for name in own if name.startswith("tileops.")]:
        raise ValueError(f"option {unknown[0]!r}; accepted: {OPTION}, and Inductor's own")
    inductor = torch._TorchCompileInductorWrapper(mode, own, None)
    from torch._inductor import config

    asked = (n for n in OWN_PRODUCTS if inductor.config.get(n, getattr(config, n)))
    rewrite = begin(module, None if policy is None else check_policy(policy), next(asked, ""))
    if rewrite is None:
        return inductor(module, example_inputs)
    captured = GraphModule(module, copy.deepcopy(module.graph))
    for name in PASSES:
        place, _, function = name.partition(":")
        getattr(importlib.import_module(f"tileops.fusion.{place}"), function)(rewrite)
    keep(rewrite.report)
    module.graph.lint()
    module.recompile()
    # Code kept on disk is of this version of the passes, whatever else is in its key.
    tag = f"{torch.compiler.config.cache_key_tag}tileops-{tileops.__version__}"
    with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        compiled = inductor(module, example_inputs)
    return _following(compiled, captured, rewrite) if rewrite.inlined else compiled


def reset() -> None:
    """What ``torch._dynamo.reset`` calls: lets go of recorded CUDA graphs, as Inductor's backend does."""
    recorded = sys.modules.get("torch._inductor.cudagraph_trees")
    if recorded is not None:
        recorded.reset_cudagraph_trees()


backend.reset = reset  # type: ignore[attr-defined]


def _following(
    compiled: Callable[..., Any], captured: GraphModule, rewrite: Rewrite
) -> Callable[..., Any]:
    """``compiled`` as long as in-tree kernels would serve the ops that it holds as code. Where a target
    would serve one by now, the graph as it was captured, whose ops ask for their target at each call.
    """
    ops: dict[tuple[str, str | None, torch.device], Op] = {
        (type(op).__name__, op.target, device): op for op, device in rewrite.inlined
    }
    decided: dict[tuple[int, str | None], bool] = {}
    lock = threading.Lock()

    def in_tree(facts: tuple[int, str | None]) -> bool:
        with lock:
            if len(decided) > 64:
                decided.clear()
            decided[facts] = not any(served_in_tree(op, key[2]) for key, op in ops.items())
        return decided[facts]

    def call(*args: Any) -> Any:
        facts = (targets.epoch.now, targets.context_target())
        known = decided.get(facts)
        if in_tree(facts) if known is None else known:
            return compiled(*args)
        return captured(*args)

    return call
