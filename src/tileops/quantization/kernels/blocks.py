"""Blocks of rows and columns quantised on CUDA."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher
from tileops.quantization.kernels.rows import EMPTY, Quantisation, bytes_of

__all__ = ["Blocks"]

DEVICE = f"{__name__}_triton"

BLOCK = 128
WARPS = {2: 8, 4: 16}
"""By the bytes of an element."""
STRIP = 32
"""Rows of a block that are read at a time where each element is read alone, and needs an address and a
mask: a whole block would not fit in registers."""
NARROW = 1 << 24
"""Columns up to which offsets within a block are 32-bit."""


class Blocks(Kernel):
    """One block to a program."""

    name = "triton_blocks"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        asked = Quantisation.of(call)
        if asked.x.numel == 0:
            return EMPTY
        columns = asked.x.shape[1]
        vector = asked.vector(columns)
        build = asked.build(
            f"{DEVICE}:quantise_blocks",
            (
                *(("x", None), ("q", None), ("scales", None), ("rows", "i64")),
                *(("groups", "i32" if columns <= NARROW else "i64"), ("eps", "fp32")),
            ),
            WARPS[asked.x.dtype.itemsize],
            BLOCK=BLOCK,
            STRIP=STRIP if vector == 1 else BLOCK,
            VECTOR=vector,
            **asked.numbers,
        )
        return Entry(build.identity, build, _bind)


def _bind(launcher: Launcher, call: CallSpec) -> Run:
    asked = Quantisation.of(call)
    launch, programs = launcher.on(call.device.index), asked.scales.numel
    rows, columns = asked.x.shape
    counts, (make, make_scales) = (rows, columns // asked.vector(columns)), asked.results()

    def run(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, scales = make(), make_scales()
        launch(programs, 1, 1, w, bytes_of(q), scales, *counts, asked.eps)
        return q, scales

    return run
