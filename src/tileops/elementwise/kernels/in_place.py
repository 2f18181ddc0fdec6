"""Activations that write their input, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from tileops.authoring import CallSpec, Entry, Kernel

__all__ = ["InPlace"]

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ReLUFwdOp": F.relu, "LeakyReLUFwdOp": F.leaky_relu, "ELUFwdOp": F.elu, "SELUFwdOp": F.selu,
    "HardtanhFwdOp": F.hardtanh, "HardsigmoidFwdOp": F.hardsigmoid, "HardswishFwdOp": F.hardswish,
    "SiLUFwdOp": F.silu, "MishFwdOp": F.mish,
}  # fmt: skip
"""torch's functions, which take the ops' parameters by their names."""


class InPlace(Kernel):
    """torch's function where it writes: the decomposition makes a tensor that is copied back."""

    name = "aten_in_place"
    devices = ("cpu",)
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return None if call.written else "nothing is written"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        function = partial(FUNCTIONS[call.op], **vars(call.params))

        def run(x: torch.Tensor) -> None:
            function(x)

        return Entry((cls.name, call.key), lambda: run)
