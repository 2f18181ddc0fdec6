"""Arithmetic of two tensors that broadcast."""

from __future__ import annotations

import torch

from tileops.authoring import Op


class AddFwdOp(Op):
    """``input + alpha * other``, of one dtype, broadcast.

    ``input``: ``[*A]``, ``other``: ``[*B]``; the output is a new ``[*bcast(A, B)]``. Rounds once;
    integers wrap; bool adds as logical or. API: ``torch.add``.
    """

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor, *, alpha: float) -> torch.Tensor:
        narrow = input.dtype in (torch.float16, torch.bfloat16)
        if narrow and input.device.type == "cpu" and alpha not in (-1, 0, 1):
            # There torch rounds alpha * other to the dtype before it adds; elsewhere it does not.
            return torch.add(input.float(), other.float(), alpha=alpha).to(input.dtype)
        return torch.add(input, other, alpha=alpha)


class MulFwdOp(Op):
    """``input * other``, of one dtype, broadcast.

    ``input``: ``[*A]``, ``other``: ``[*B]``; the output is a new ``[*bcast(A, B)]``. API: ``torch.mul``.
    """

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.mul(input, other)
