"""BatchNorm by running statistics on the CPU."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Kernel

__all__ = ["EvaluatedHalves"]


class EvaluatedHalves(Kernel):
    """ATen's own: ``input * scale + (bias - mean * scale)`` in float32.

    That loses digits where the mean is large beside the deviation, but those alone in which halves,
    which are at least 2**-11 of their size apart, do not differ. Of float32 it would lose real ones.
    """

    name = "aten_batch_norm"
    devices = ("cpu",)
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.params.training:
            return "ATen's statistics of halves are sums one after the other"
        if call.spec("input").dtype is torch.float32:
            return "ATen's kernel subtracts the mean after it multiplied"
        if not call.spec("input").numel:
            return "ATen's kernel refuses what is empty"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        eps = call.params.eps

        def run(
            x: torch.Tensor,
            mean: torch.Tensor,
            var: torch.Tensor,
            weight: torch.Tensor | None,
            bias: torch.Tensor | None,
        ) -> tuple[torch.Tensor | None, ...]:
            return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False), None, None

        return Entry((cls.name, call.key), lambda: run)
