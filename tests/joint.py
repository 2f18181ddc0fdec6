"""What AOTAutograd makes of a function: the joint graph, and what is kept between its two halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

__all__ = ["Joint", "compiled"]


@dataclass
class Joint:
    """``joint``, ``forward`` and ``backward`` graphs of the last function that was compiled."""

    joint: list[str] = field(default_factory=list)
    forward: Any = None
    backward: Any = None
    outputs: int = 0

    @property
    def saved(self) -> list[torch.Tensor]:
        """Fake tensors of what the forward keeps for the backward, and did not get as an input."""
        (output,) = (n for n in self.forward.graph.nodes if n.op == "output")
        kept = {
            n for n in output.args[0][self.outputs :] if n is not None and n.op != "placeholder"
        }
        shown = set(output.args[0][: self.outputs])
        values = [n.meta["val"] for n in kept - shown]
        return [value for value in values if isinstance(value, torch.Tensor)]

    @property
    def saved_bytes(self) -> int:
        """How much memory that is, storages counted once."""
        return sum(
            {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in self.saved}.values()
        )

    def count(self, name: str, of: str = "joint") -> int:
        """How many nodes call the operator ``tileops::<name>``."""
        if of == "joint":
            return self.joint.count(f"tileops.{name}.default")
        nodes = getattr(self, of).graph.nodes
        return sum(str(n.target) == f"tileops.{name}.default" for n in nodes)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], Joint]:
    """``function`` compiled as by Inductor up to its code, and what became of it once it is called."""
    seen = Joint()

    def partition(module: Any, inputs: Any, **more: Any) -> Any:
        seen.joint = [str(node.target) for node in module.graph.nodes]
        seen.outputs = more["num_fwd_outputs"]
        return min_cut_rematerialization_partition(module, inputs, compiler="inductor", **more)

    def keep(which: str) -> Callable[..., Any]:
        def compiler(module: Any, inputs: Any) -> Any:
            setattr(seen, which, module)
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=partition,
        decompositions=select_decomp_table,
    )
    return torch.compile(function, backend=backend, fullgraph=True), seen
