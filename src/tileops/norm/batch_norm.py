"""Batch normalisation and its gradient."""

from __future__ import annotations

import math

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import by_statistics


class BatchNormFwdOp(Op):
    """Normalises each channel of ``input`` ``[B, C, *L]``; returns ``(output, save_mean,
    save_invstd)``.

    Training uses the batch's own mean and biased variance, returns them as float32 ``[C]`` (the
    variance as ``1 / sqrt(var + eps)``) and writes ``running_mean``/``running_var`` where passed:
    ``(1 - momentum) * running + momentum * batch`` with the unbiased variance. Evaluation uses the
    running statistics and returns None for both. ``weight``, ``bias``: float32 ``[C]`` or None. API:
    ``torch.nn.functional.batch_norm``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("channels:HeldChannels", "channels:SplitChannels")
    )

    @staticmethod
    def decomposition(
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        training: bool,
        momentum: float,
        eps: float,
    ) -> tuple[torch.Tensor | None, ...]:
        mean, var = running_mean, running_var
        if training:
            dims = [0, *range(2, input.ndim)]
            var, mean = torch.var_mean(input.float(), dims, correction=0)
        assert mean is not None
        assert var is not None
        output = by_statistics(input, mean, var, weight, bias, eps)
        if not training:
            return output, None, None
        invstd = torch.rsqrt(var + eps)
        if running_mean is None or running_var is None:
            return output, mean, invstd
        count = input.numel() // input.shape[1] if input.shape[1] else 2
        unbiased = var * (count / (count - 1))
        return (
            output,
            mean,
            invstd,
            running_mean.lerp(mean, momentum),
            running_var.lerp(unbiased, momentum),
        )


class BatchNormBwdOp(Op):
    """The gradients of a training ``BatchNormFwdOp``: ``(dinput, dweight, dbias)``.

    ``doutput``, ``input``, ``dinput``: ``[B, C, *L]``; the rest is float32 ``[C]``. With
    ``n = (input - save_mean) save_invstd``: ``dbias`` and ``dweight`` are the sums of ``doutput`` and
    ``doutput n`` over all but the channels; ``dinput = weight save_invstd (doutput - mean(doutput) -
    n mean(doutput n))``. API: ``torch.ops.aten.native_batch_norm_backward`` in training.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17,
        cuda=("channels:HeldChannelGradients", "channels:SplitChannelGradients"),
    )

    @staticmethod
    def decomposition(
        doutput: torch.Tensor,
        input: torch.Tensor,
        save_mean: torch.Tensor,
        save_invstd: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Formulas: ATen's own backward divides by zero where there are no elements, and ends the process.
        channel = [1, -1] + [1] * (input.ndim - 2)
        dims = [0, *range(2, input.ndim)]
        invstd = save_invstd.view(channel)
        normal = (input.float() - save_mean.view(channel)) * invstd
        grads = doutput.float()
        dbias, dweight = grads.sum(dims), (grads * normal).sum(dims)
        count = max(math.prod(input.shape[2:]) * input.shape[0], 1)
        scale = invstd if weight is None else invstd * weight.view(channel)
        centred = grads - (dbias / count).view(channel) - normal * (dweight / count).view(channel)
        return (centred * scale).to(input.dtype), dweight, dbias
