"""One matrix product per expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tileops.authoring import KernelInterface, Op
from tileops.moe.layouts import ContiguousLayoutSpec, MaskedLayoutSpec, fill_metadata


def activate(values: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The gated activation of ``[..., 2*N]``; ``[..., N]``.

    ``silu_and_mul``, ``gelu_and_mul``: gates first, then values. ``swigluoai``: gate and value
    alternate, ``clamp(g, max=7) * sigmoid(1.702 g) * (clamp(v, -7, 7) + 1)`` (gpt-oss).
    """
    if activation is None:
        return values
    if activation == "swigluoai":
        gate, up = values[..., 0::2].clamp(max=7.0), values[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    half = values.shape[-1] // 2
    gate, up = values[..., :half], values[..., half:]
    return (F.silu(gate) if activation == "silu_and_mul" else F.gelu(gate)) * up


class MoEGroupedGEMMFwdOp(Op):
    """Row ``r`` of the output is ``activation(a[r] @ b[e]ᵀ + bias[e])`` for the expert ``e`` of the row.

    ``a``: ``[P, K]``, or ``[E, max_m, K]`` for a masked layout; ``b``: ``[E, N, K]`` (``[E, 2*N, K]`` with
    an activation); ``layout_metadata`` says which rows belong to whom (see the layout classes);
    ``bias``: ``[E, N]`` (``[E, 2*N]``). A row of no expert gives 0. Computed in float32; the output,
    ``[P, N]`` or ``[E, max_m, N]``, is of ``out_dtype`` (``a``'s dtype when None), or is ``out``.
    """

    kernel = KernelInterface(cpu=("grouped_gemm:ExpertLoop",))

    @staticmethod
    def decomposition(
        a: torch.Tensor,
        b: torch.Tensor,
        layout_metadata: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        layout: ContiguousLayoutSpec | MaskedLayoutSpec,
        activation: str | None,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        dtype = a.dtype if out_dtype is None else out_dtype
        experts = b.shape[0]
        if layout.masked:
            values = a.float() @ b.float().transpose(1, 2)
            if bias is not None:
                values = values + bias.float()[:, None]
            rows = torch.arange(a.shape[1], device=a.device)
            counts = (rows[None] < layout_metadata[:, None])[..., None]
            return torch.where(counts, activate(values, activation), 0.0).to(dtype)
        owner = _row_owner(layout_metadata, a.shape[0], layout)
        width = b.shape[1]
        values = a.new_zeros((a.shape[0], width), dtype=torch.float32)
        for expert in range(experts):
            product = a.float() @ b[expert].float().t()
            if bias is not None:
                product = product + bias[expert].float()
            values = torch.where((owner == expert)[:, None], product, values)
        result = torch.where((owner >= 0)[:, None], activate(values, activation), 0.0)
        return result.to(dtype)

    def fill_workload(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """A valid division of the rows, for tests and benchmarks."""
        fill_metadata(
            self._params["layout"],
            inputs["layout_metadata"],
            inputs["a"].shape[0],
            inputs["b"].shape[0],
        )


def _row_owner(
    metadata: torch.Tensor, rows: int, layout: ContiguousLayoutSpec | MaskedLayoutSpec
) -> torch.Tensor:
    """The expert of each row of a contiguous layout, -1 where none."""
    assert isinstance(layout, ContiguousLayoutSpec)
    if layout.metadata_kind == "per_row":
        return metadata
    ends = metadata.to(torch.int64)
    previous = torch.cat((ends.new_zeros(1), ends[:-1]))
    starts = (previous + layout.alignment - 1) // layout.alignment * layout.alignment
    places = torch.arange(rows, device=metadata.device)[:, None]
    inside = (places >= starts) & (places < ends)
    return torch.where(inside.any(1), inside.to(torch.int32).argmax(1), -1)
