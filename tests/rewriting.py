"""Running a function through the passes of ``tileops.fusion`` without the compiler behind them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tileops.fusion.compiler import PASSES
from tileops.fusion.report import Report
from tileops.fusion.rewrite import begin

__all__ = ["Seen", "rewritten"]


@dataclass
class Seen:
    """The graphs after the passes, and what these report, in the order of compilation."""

    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    @property
    def report(self) -> Report:
        (only,) = self.reports
        return only

    def inlined(self) -> list[str]:
        """The classes that became their decomposition."""
        return [data["op"] for report in self.reports for data in report.of("inlined")]

    def declined(self) -> dict[str, str]:
        """Class to reason."""
        return {d["op"]: d["reason"] for report in self.reports for d in report.of("declined")}

    def substituted(self) -> list[str]:
        """The ops that plain PyTorch became."""
        return [data["call"] for report in self.reports for data in report.of("substituted")]

    def near_misses(self) -> dict[str, str]:
        """Class to reason."""
        return {d["op"]: d["reason"] for report in self.reports for d in report.of("near miss")}

    def targets(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes]


def rewritten(
    function: Callable[..., Any],
    policy: str | None = None,
    passes: tuple[str, ...] = PASSES,
    **more: Any,
) -> tuple[Callable[..., Any], Seen]:
    """``function`` with its graphs rewritten and then run as they stand; ``more`` is for
    ``torch.compile``."""
    seen = Seen()

    def run(module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        rewrite = begin(module, policy)
        if rewrite is not None:
            for name in passes:
                place, _, called = name.partition(":")
                getattr(importlib.import_module(f"tileops.fusion.{place}"), called)(rewrite)
            seen.reports.append(rewrite.report)
        module.graph.lint()
        module.recompile()
        seen.graphs.append(module)
        return module

    torch._dynamo.reset()
    return torch.compile(function, backend=run, fullgraph=True, **more), seen
