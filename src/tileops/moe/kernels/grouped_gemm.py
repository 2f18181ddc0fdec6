"""The grouped matrix product on the CPU: each expert's rows once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tileops.authoring import CallSpec, Entry, Kernel, Run


def _rows_of(metadata: torch.Tensor, layout: Any, experts: int) -> list[Any]:
    """Per expert what selects its rows: a slice, or indices."""
    if layout.metadata_kind == "per_row":
        return [(metadata == e).nonzero()[:, 0] for e in range(experts)]
    rows, end = [], 0
    for stop in metadata.tolist():
        start = -(-end // layout.alignment) * layout.alignment
        rows.append(slice(start, max(start, stop)))
        end = stop
    return rows


def _bind(activate: Any, call: CallSpec) -> Run:
    params = call.params
    layout = params.layout
    spec = call.outputs["output"]
    assert spec is not None
    experts = call.dims["E"]

    def product(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        values = F.linear(a, weight, bias) if a.dtype == torch.float32 else F.linear(
            a.float(), weight.float(), None if bias is None else bias.float()
        )  # fmt: skip
        return activate(values, params.activation)

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        metadata: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        result = out.zero_() if out is not None else torch.zeros(spec.shape, dtype=spec.dtype)
        if layout.masked:
            for expert, count in enumerate(metadata.tolist()):
                if count > 0:
                    part = product(
                        a[expert, :count], b[expert], None if bias is None else bias[expert]
                    )
                    result[expert, :count] = part
        else:
            for expert, rows in enumerate(_rows_of(metadata, layout, experts)):
                taken = a[rows]
                if taken.shape[0]:
                    result[rows] = product(
                        taken, b[expert], None if bias is None else bias[expert]
                    ).to(result.dtype)
        return None if out is not None else result

    return run


class ExpertLoop(Kernel):
    """A loop over experts that reads the metadata on the host: one matrix product for each that
    has rows."""

    name = "expert_loop"
    devices = ("cpu",)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        def build() -> Any:
            from tileops.moe.grouped_gemm import activate

            return activate

        return Entry(("expert_loop", call.key), build, _bind)
