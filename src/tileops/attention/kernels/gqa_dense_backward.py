"""The gradients of dense attention by those of torch's library kernels.

The output is computed again as the forward's kernel computes it, by the same function, whose gradient
torch knows. The call of the backward op has the forward's names, so the forward's kernel takes it or
refuses it as it is.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch

from tileops.attention.kernels.gqa_dense import SDPA, SDPAOnCPU
from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.pulling import pulled

__all__ = ["SDPAGradient", "SDPAGradientOnCPU"]

INPUTS = ("q", "k", "v")


class SDPAGradient(Kernel):
    """Of what torch's attention serves on CUDA."""

    name = "sdpa_gradient"
    forward: ClassVar[type[Kernel]] = SDPA

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return cls.forward.refuses(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        entry = cls.forward.entry_for(call)
        bind = functools.partial(_bind, entry)
        return Entry((*entry.identity, "gradient"), entry.build, bind)


class SDPAGradientOnCPU(SDPAGradient):
    """Of what it serves on the CPU."""

    devices = ("cpu",)
    forward = SDPAOnCPU


def _bind(forward: Entry, artifact: Any, call: CallSpec) -> Run:
    run = artifact if forward.bind is None else forward.bind(artifact, call)
    wanted = tuple(bool(getattr(call.params, f"wants_{name}")) for name in INPUTS)
    if call.spec("q").numel == 0:
        return _nothing(call, wanted)

    def gradient(
        grad_o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        return (*pulled(run, (q, k, v), wanted, grad_o), None)

    return gradient


def _nothing(call: CallSpec, wanted: tuple[bool, ...]) -> Run:
    """No query has elements."""
    shapes = [call.spec(n).shape if wish else None for n, wish in zip(INPUTS, wanted, strict=True)]

    def gradient(grad_o: torch.Tensor, *_: torch.Tensor | None) -> tuple[Any, ...]:
        zeros = [None if shape is None else grad_o.new_zeros(shape) for shape in shapes]
        return (*zeros, None)

    return gradient
