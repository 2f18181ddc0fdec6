"""One graph on its way to Inductor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from tileops.engine.op import Op
from tileops.fusion.graph import Memory, Modes, fake_mode_of
from tileops.fusion.report import Report
from tileops.fusion.told import Told

__all__ = ["Rewrite", "begin"]


@dataclass
class Rewrite:
    """What the passes share. They change ``graph`` through ``Edit`` and say so in ``report``."""

    module: GraphModule
    mode: FakeTensorMode
    memory: Memory
    """Of the graph as it was captured."""
    modes: Modes
    told: Told
    policy: str | None = None
    """What the backend's options say for all ops."""
    autocast: bool = False
    """Some of the graph runs under ``torch.autocast``, which changes what functions compute."""
    own_products: str = ""
    """The option by which Inductor has products of its own, which take epilogues too."""
    report: Report = field(default_factory=Report)
    inlined: list[tuple[Op, torch.device]] = field(default_factory=list)
    """Ops that the caller wrote and that have become code: it serves where in-tree kernels would."""
    templates: dict[Node, str] = field(default_factory=dict)
    """Calls of template ops before what follows them was looked at, with their classes' names."""
    substituted: set[Node] = field(default_factory=set)
    """Calls of ops where the caller wrote plain PyTorch: as code they are that again."""

    @property
    def graph(self) -> Graph:
        return self.module.graph


def begin(module: GraphModule, policy: str | None, own_products: str = "") -> Rewrite | None:
    """The rewrite of ``module``, in place; None where it holds no tensors."""
    mode = fake_mode_of(module.graph)
    if mode is None:
        return None
    autocast = torch._C._is_any_autocast_enabled() or any(
        node.target is torch.amp.autocast_mode._enter_autocast for node in module.graph.nodes
    )
    graph, memory = module.graph, Memory(module.graph)
    told = Told(graph, memory)
    return Rewrite(module, mode, memory, Modes(graph), told, policy, autocast, own_products)
