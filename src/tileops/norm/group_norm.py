"""Normalisation of groups of channels, and of each channel of each instance."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, KernelInterface, Op
from tileops.norm.normal import by_statistics, group_norm

KERNELS = ("rows:RegisterRow", "rows:StreamedRow", "rows:ManyShortRows")


class GroupNormFwdOp(Op):
    """``y = (input - mean) / sqrt(var + eps) * weight + bias``, with the mean and biased variance of
    each of ``num_groups`` groups of adjacent channels in each instance.

    ``input``: ``[B, C, *L]``; ``weight``, ``bias``: ``[C]`` or None. API:
    ``torch.nn.functional.group_norm``.
    """

    kernel = KernelInterface(cuda=KERNELS)

    @staticmethod
    def decomposition(
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        num_groups: int,
        eps: float,
    ) -> torch.Tensor:
        return group_norm(input, num_groups, weight, bias, eps)


def _by_groups(call: CallSpec) -> str | None:
    alone = call.params.use_input_stats and call.inputs["running_mean"] is None
    return "ATen's group norm is faster" if alone else None


class InstanceNormFwdOp(Op):
    """``y = (input - mean) / sqrt(var + eps) * weight + bias`` for each channel of each instance.

    ``input``: ``[B, C, *L]``; ``weight``, ``bias``: ``[C]`` or None. With ``use_input_stats`` mean and
    biased variance are those over ``L``, and ``running_mean``/``running_var`` (float32 ``[C]``), where
    passed, are written: ``(1 - momentum) * running + momentum * batch``, where ``batch`` is the mean
    over instances, of the unbiased variance. Without it the running statistics are used. API:
    ``torch.nn.functional.instance_norm``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17,
        compiled_unless=_by_groups,
        cuda=(*KERNELS, "channels:SplitChannels"),
    )

    @staticmethod
    def decomposition(
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        use_input_stats: bool,
        momentum: float,
        eps: float,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        channels = input.shape[1]
        if use_input_stats:
            if running_mean is None or running_var is None:
                return group_norm(input, max(channels, 1), weight, bias, eps)
            # In float32, as the statistics: of halves ATen keeps them as halves on CUDA, which is
            # beyond a result's own rounding wherever that is close to 0.
            values = input.to(torch.promote_types(input.dtype, torch.float32))
            factors = None if weight is None else weight.to(values.dtype)
            terms = None if bias is None else bias.to(values.dtype)
            output = torch.group_norm(values, max(channels, 1), factors, terms, eps)
            var, mean = torch.var_mean(values.float(), list(range(2, input.ndim)), correction=1)
            return (
                output.to(input.dtype),
                running_mean * (1 - momentum) + mean.mean(0) * momentum,
                running_var * (1 - momentum) + var.mean(0) * momentum,
            )
        assert running_mean is not None
        assert running_var is not None
        return by_statistics(input, running_mean, running_var, weight, bias, eps)
