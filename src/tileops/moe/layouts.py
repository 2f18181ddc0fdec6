"""How rows of routed tokens lie in memory: small literals that are parameters of the MoE ops."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

import torch

from tileops.authoring import CheckError, literal_type


@literal_type
@dataclass(frozen=True)
class ContiguousLayoutSpec:
    """Rows ``[P, ...]``, those of one expert side by side, experts in order.

    ``metadata_kind="physical_psum"``: int32 ``[E]``, where entry ``e`` is one past the last row of
    expert ``e``; its first row is the end of expert ``e - 1``, rounded up to ``alignment``.
    ``"per_row"``: int32 ``[P]``, each row's expert, -1 for padding. ``packing`` is ``"tight"`` exactly
    when ``alignment`` is 1. Raises ``CheckError``.
    """

    packing: str
    metadata_kind: str
    alignment: int = 1

    masked: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.packing not in ("tight", "aligned"):
            raise CheckError(name, "packing", repr(self.packing), "'tight' or 'aligned'")
        if self.metadata_kind not in ("physical_psum", "per_row"):
            raise CheckError(
                name, "metadata_kind", repr(self.metadata_kind), "'physical_psum' or 'per_row'"
            )
        if (
            isinstance(self.alignment, bool)
            or not isinstance(self.alignment, int)
            or self.alignment < 1
        ):
            raise CheckError(name, "alignment", repr(self.alignment), "a positive int")
        if (self.packing == "tight") != (self.alignment == 1):
            raise CheckError(
                name, "alignment", repr(self.alignment), "1 for 'tight' packing, more for 'aligned'"
            )

    @classmethod
    def tight_physical_psum(cls) -> ContiguousLayoutSpec:
        """No padding, ends per expert."""
        return cls("tight", "physical_psum")

    @classmethod
    def tight_per_row(cls) -> ContiguousLayoutSpec:
        """No padding, an expert per row."""
        return cls("tight", "per_row")

    @classmethod
    def aligned_per_row(cls, alignment: int) -> ContiguousLayoutSpec:
        """Each expert begins at a multiple of ``alignment``; an expert per row."""
        return cls("aligned", "per_row", alignment)

    @classmethod
    def aligned_physical_psum(cls, alignment: int) -> ContiguousLayoutSpec:
        """Each expert begins at a multiple of ``alignment``; ends per expert."""
        return cls("aligned", "physical_psum", alignment)


@literal_type
@dataclass(frozen=True)
class MaskedLayoutSpec:
    """Rows ``[E, max_m, ...]``; metadata int32 ``[E]`` holds how many rows of each expert count."""

    max_m: int

    masked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.max_m, bool) or not isinstance(self.max_m, int) or self.max_m < 1:
            raise CheckError(type(self).__name__, "max_m", repr(self.max_m), "a positive int")


@literal_type
@dataclass(frozen=True)
class RoutingEpilogueSpec:
    """What is applied to the weighted sum of a token's experts."""

    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        value = self.routed_scaling_factor
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise CheckError(
                type(self).__name__, "routed_scaling_factor", repr(value), "a finite number"
            )
        object.__setattr__(self, "routed_scaling_factor", float(value))


def fill_metadata(
    layout: ContiguousLayoutSpec | MaskedLayoutSpec,
    metadata: torch.Tensor,
    rows: int,
    experts: int,
) -> None:
    """Write a valid division of ``rows`` among ``experts`` into ``metadata``, some experts empty.

    A masked layout's counts are independent, and stay.
    """
    if isinstance(layout, MaskedLayoutSpec):
        return
    draw = random.Random(rows * 1009 + experts)
    unit = layout.alignment
    borders = sorted(draw.randint(0, rows // unit) for _ in range(experts - 1))
    ends: list[int] = []
    owners, begin = [-1] * rows, 0
    for expert, border in enumerate([*borders, rows // unit]):
        # The last unit of an expert may be partly padding.
        end = max(begin, border * unit - draw.randrange(unit))
        owners[begin:end] = [expert] * (end - begin)
        ends.append(end if end > begin else (ends[-1] if ends else 0))
        begin = max(begin, border * unit)
    values = owners if layout.metadata_kind == "per_row" else ends
    metadata.copy_(torch.tensor(values, dtype=metadata.dtype))
