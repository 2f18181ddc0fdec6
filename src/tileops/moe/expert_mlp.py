"""The MLP of routed experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tileops.authoring import Op
from tileops.moe.grouped_gemm import MoEGroupedGEMMFwdOp
from tileops.moe.layouts import fill_metadata


class MoEExpertMLPFwdOp(Op):
    """``down(activation(gate_up(x)))`` for each row's expert: two grouped matrix products.

    ``expert_input``: ``[P, H]``, or ``[E, max_m, H]`` for a masked layout; ``w_gate_up``: ``[E, 2*F, H]``;
    ``w_down``: ``[E, H, F]``; ``layout_metadata`` as for ``MoEGroupedGEMMFwdOp``; biases ``[E, 2*F]`` and
    ``[E, H]`` or None. The output has the shape and dtype of ``expert_input``, or is ``out``. A
    composition: it has no operator of its own.
    """

    gate_up: MoEGroupedGEMMFwdOp
    down: MoEGroupedGEMMFwdOp

    def setup(self) -> None:
        params = self._params
        self.settle(
            gate_up=MoEGroupedGEMMFwdOp(
                params["layout"], activation=params["activation"], target=self.target
            ),
            down=MoEGroupedGEMMFwdOp(params["layout"], target=self.target),
        )

    def forward(
        self,
        expert_input: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        layout_metadata: torch.Tensor,
        *,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.gate_up(expert_input, w_gate_up, layout_metadata, bias=b_gate_up)
        result: torch.Tensor = self.down(hidden, w_down, layout_metadata, bias=b_down, out=out)
        return result

    def fill_workload(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """A valid division of the rows, for tests and benchmarks."""
        fill_metadata(
            self._params["layout"],
            inputs["layout_metadata"],
            inputs["expert_input"].shape[0],
            inputs["w_down"].shape[0],
        )
