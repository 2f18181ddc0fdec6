"""Whether autograd looks on."""

from __future__ import annotations

import torch


def recorded(*tensors: torch.Tensor) -> bool:
    """Whether what is made of these tensors will be differentiated. A decomposition may else take a
    function of ATen that has no derivative, or a worse one."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
