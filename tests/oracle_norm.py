"""What the ops of the norm family mean; see ``oracle.py``.

The gradients are autograd's, of PyTorch's own functions in float64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["EXACT"]

Outputs = tuple[torch.Tensor | None, ...]
Meaning = tuple[Outputs, dict[str, torch.Tensor]]


def _rms(values: torch.Tensor, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    return values / ((values * values).mean(dims, keepdim=True) + eps).sqrt()


def rms_norm(op: Any, x: torch.Tensor, weight: torch.Tensor | None) -> Meaning:
    # Without eps: the epsilon of the dtype in which sums are formed.
    least = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
    dims = tuple(range(x.ndim - len(op.normalized_shape), x.ndim))
    result = _rms(x.double(), dims, least if op.eps is None else op.eps)
    return (result if weight is None else result * weight.double(),), {}


def layer_norm(
    op: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> Meaning:
    dims = tuple(range(input.ndim - len(op.normalized_shape), input.ndim))
    centred = input.double() - input.double().mean(dims, keepdim=True)
    result = centred / ((centred * centred).mean(dims, keepdim=True) + op.eps).sqrt()
    result = result if weight is None else result * weight.double()
    return (result if bias is None else result + bias.double(),), {}


def fused_add_rms_norm(
    op: Any, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> Meaning:
    # The sum is rounded before it is normalised: that rounding is part of the meaning.
    total = (input.double() + residual.double()).to(input.dtype).double()
    return (_rms(total, (-1,), op.eps) * weight.double(), total), {}


def batch_norm(
    op: Any,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Meaning:
    rows = input.double().transpose(0, 1).flatten(1)
    written: dict[str, torch.Tensor] = {}
    if op.training:
        mean = rows.mean(1)
        squares = ((rows - mean[:, None]) ** 2).sum(1)
        var = squares / rows.shape[1]
        if running_mean is not None and running_var is not None:
            unbiased, m = squares / (rows.shape[1] - 1), op.momentum
            written["running_mean"] = (1 - m) * running_mean.double() + m * mean
            written["running_var"] = (1 - m) * running_var.double() + m * unbiased
        saved: Outputs = (mean, 1 / (var + op.eps).sqrt())
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var, saved = running_mean.double(), running_var.double(), (None, None)
    channel = [1, -1] + [1] * (input.ndim - 2)
    result = input.double() - mean.view(channel)
    result = result / (var + op.eps).sqrt().view(channel)
    result = result if weight is None else result * weight.double().view(channel)
    result = result if bias is None else result + bias.double().view(channel)
    return (result, *saved), written


def _centred(values: torch.Tensor, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    values = values - values.mean(dims, keepdim=True)
    return values / ((values * values).mean(dims, keepdim=True) + eps).sqrt()


def ada_layer_norm(op: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> Meaning:
    return (_centred(x.double(), (-1,), op.eps) * scale.double() + shift.double(),), {}


def ada_layer_norm_zero(
    op: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, gate: torch.Tensor
) -> Meaning:
    ((modulated,), _) = ada_layer_norm(op, x, scale, shift)
    assert modulated is not None
    return (gate.double() * modulated,), {}


def fused_add_layer_norm(
    op: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Meaning:
    total = (x.double() + residual.double()).to(x.dtype).double()
    return (_centred(total, (-1,), op.eps) * weight.double() + bias.double(), total), {}


def fused_add_rms_norm_quant(
    op: Any, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> Meaning:
    total = (input.double() + residual.double()).to(input.dtype).double()
    values = _rms(total, (-1,), op.eps) * weight.double()
    largest = values.abs().amax(-1, keepdim=True)
    if op.scale_ub is not None:
        largest = torch.where(largest > op.scale_ub, op.scale_ub, largest)
    top, least = (127.0, 2.0**-23) if op.quant_dtype is torch.int8 else (448.0, 2.0**-9 / 448)
    scale = largest / top
    scale = torch.where(scale < least, least, scale)
    quotient = values / scale
    if op.quant_dtype is torch.int8:
        quotient = torch.where(quotient.isnan(), 0.0, quotient).round().clamp(-128, 127)
    else:
        quotient = quotient.clamp(-448, 448).to(op.quant_dtype).double()
    return (quotient, scale, total), {}


def group_norm(
    op: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> Meaning:
    channels = input.shape[1]
    size = channels // op.num_groups
    result = torch.empty_like(input, dtype=torch.float64)
    if not input.numel():
        return (result,), {}
    for b in range(input.shape[0]):
        for first in range(0, channels, size):
            group = input[b, first : first + size].double().flatten()
            result[b, first : first + size] = _centred(group, (0,), op.eps).view(
                input[b, first : first + size].shape
            )
    channel = [1, -1] + [1] * (input.ndim - 2)
    result = result if weight is None else result * weight.double().view(channel)
    return (result if bias is None else result + bias.double().view(channel),), {}


def instance_norm(
    op: Any,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Meaning:
    channel = [1, -1] + [1] * (input.ndim - 2)
    values = input.double()
    written: dict[str, torch.Tensor] = {}
    if op.use_input_stats:
        dims = tuple(range(2, input.ndim))
        result = _centred(values, dims, op.eps)
        if running_mean is not None and running_var is not None:
            m, count = op.momentum, values[0, 0].numel() if input.shape[0] * input.shape[1] else 2
            means = values.mean(dims, keepdim=True)
            unbiased = ((values - means) ** 2).sum(dims) / (count - 1)
            written["running_mean"] = (1 - m) * running_mean.double() + m * means.view(
                input.shape[:2]
            ).mean(0)
            written["running_var"] = (1 - m) * running_var.double() + m * unbiased.mean(0)
    else:
        assert running_mean is not None
        assert running_var is not None
        result = values - running_mean.double().view(channel)
        result = result / (running_var.double() + op.eps).sqrt().view(channel)
    result = result if weight is None else result * weight.double().view(channel)
    return (result if bias is None else result + bias.double().view(channel),), written


def fused_qk_norm_rope(
    op: Any,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
) -> Meaning:
    size, turned = q_weight.shape[0], cos_sin_cache.shape[1]
    half = turned // 2
    pair = torch.arange(half)
    p, q = (pair, pair + half) if op.rope_layout == "neox" else (2 * pair, 2 * pair + 1)
    result = qkv.double().clone()
    heads = result.view(qkv.shape[0], op.num_heads + 2 * op.num_kv_heads, size)
    for n, place in enumerate(positions.tolist()):
        angles = cos_sin_cache[place].double()
        for h in range(op.num_heads + op.num_kv_heads):
            weight = q_weight if h < op.num_heads else k_weight
            row = _rms(heads[n, h].clone(), (-1,), op.eps) * weight.double()
            heads[n, h] = row
            heads[n, h, p] = row[p] * angles[:half] - row[q] * angles[half:]
            heads[n, h, q] = row[q] * angles[:half] + row[p] * angles[half:]
    return (), {"qkv": result}


# ---- gradients ------------------------------------------------------------------------------


def _gradients(
    result: torch.Tensor, grad: torch.Tensor, leaves: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(result, wanted, grad.double()))
    return [None if leaf is None else next(found) for leaf in leaves]


def _leaf(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().double().requires_grad_()


def rms_norm_backward(
    op: Any, grad_output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None
) -> Meaning:
    least = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
    leaves = [_leaf(x), _leaf(weight)]
    with torch.enable_grad():
        eps = least if op.eps is None else op.eps
        result = F.rms_norm(leaves[0], op.normalized_shape, leaves[1], eps)
    grad_x, grad_weight = _gradients(result, grad_output, leaves)
    return (grad_x if op.wants_x else None, grad_weight if op.wants_weight else None), {}


def layer_norm_backward(
    op: Any, grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None
) -> Meaning:
    bias = input.new_zeros(op.normalized_shape)
    leaves = [_leaf(input), _leaf(weight), _leaf(bias)]
    with torch.enable_grad():
        result = F.layer_norm(leaves[0], op.normalized_shape, leaves[1], leaves[2], op.eps)
    found = _gradients(result, grad_output, leaves)
    wants = (op.wants_input, op.wants_weight, op.wants_bias)
    return tuple(g if w else None for g, w in zip(found, wants, strict=True)), {}


def fused_add_rms_norm_backward(
    op: Any,
    grad_output: torch.Tensor,
    grad_residual_out: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
) -> Meaning:
    total, scale = _leaf(residual_out), _leaf(weight)
    with torch.enable_grad():
        result = F.rms_norm(total, residual_out.shape[-1:], scale, op.eps)
    grad_total, grad_weight = _gradients(result, grad_output, [total, scale])
    assert grad_total is not None
    grad_total = grad_total + grad_residual_out.double()
    return (
        grad_total if op.wants_input or op.wants_residual else None,
        grad_weight if op.wants_weight else None,
    ), {}


def batch_norm_backward(
    op: Any,
    doutput: torch.Tensor,
    input: torch.Tensor,
    save_mean: torch.Tensor,
    save_invstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> Meaning:
    channel = [1, -1] + [1] * (input.ndim - 2)
    dims = [0, *range(2, input.ndim)]
    count = input.numel() // max(input.shape[1], 1)
    invstd = save_invstd.double().view(channel)
    normal = (input.double() - save_mean.double().view(channel)) * invstd
    grads = doutput.double()
    dbias, dweight = grads.sum(dims, keepdim=True), (grads * normal).sum(dims, keepdim=True)
    dinput = (grads - dbias / count - normal * dweight / count) * invstd if count else grads
    dinput = dinput if weight is None else dinput * weight.double().view(channel)
    return (dinput, dweight.flatten(), dbias.flatten()), {}


EXACT = {
    "AdaLayerNormFwdOp": ada_layer_norm,
    "AdaLayerNormZeroFwdOp": ada_layer_norm_zero,
    "BatchNormBwdOp": batch_norm_backward,
    "FusedAddLayerNormFwdOp": fused_add_layer_norm,
    "FusedAddRMSNormPerTokenQuantFwdOp": fused_add_rms_norm_quant,
    "FusedQKNormRoPEFwdOp": fused_qk_norm_rope,
    "GroupNormFwdOp": group_norm,
    "InstanceNormFwdOp": instance_norm,
    "BatchNormFwdOp": batch_norm,
    "FusedAddRMSNormBwdOp": fused_add_rms_norm_backward,
    "FusedAddRMSNormFwdOp": fused_add_rms_norm,
    "LayerNormBwdOp": layer_norm_backward,
    "LayerNormFwdOp": layer_norm,
    "RMSNormBwdOp": rms_norm_backward,
    "RMSNormFwdOp": rms_norm,
}
