"""Dropout by a documented generator: one seed gives one mask, on every device."""

from __future__ import annotations

import torch

from tileops.authoring import CheckError, KernelInterface, Op

_LOW = 0xFFFFFFFF


def philox_words(seed: int | torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """The first ``count`` words of Philox-4x32-10 as int64: word ``i`` is number ``i % 4`` of the counter
    ``i // 4``, under the key ``seed`` (Salmon et al., Parallel Random Numbers, 2011)."""
    counter = torch.arange(-(-count // 4), dtype=torch.int64, device=device)
    c0, c1 = counter & _LOW, counter >> 32
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # 64 bits hold the product of two 32-bit words; its sign bit is one of them.
        p0, p2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p2 >> 32) & _LOW) ^ c1 ^ k0, p2 & _LOW
        c2, c3 = ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return torch.stack((c0, c1, c2, c3), -1).flatten()[:count]


class DropoutFwdOp(Op):
    """``input`` ``[*S]`` times ``1 / (1 - p)`` with probability ``1 - p``, else times 0, if ``training``.

    Element ``i`` of ``input``, read row by row, is kept where word ``i`` of Philox-4x32-10 under the key
    ``seed`` is at least ``p * 2**32``: a seed gives the same mask in every call, for every dtype, on every
    device. Without one each call takes a seed from torch's generator of the device, which
    ``torch.manual_seed`` governs; such a call has no gradient. With ``inplace`` the call writes ``input``
    and returns it. API: ``torch.nn.functional.dropout``.
    """

    kernel = KernelInterface(cuda=("dropout:Dropout",))
    random = True
    p: float
    training: bool
    seed: int | None

    @property
    def draws(self) -> bool:
        """Not with a seed, nor where nothing is dropped."""
        return self.training and self.p > 0 and self.seed is None

    @staticmethod
    def decomposition(
        input: torch.Tensor, p: float, training: bool, *, inplace: bool, seed: int | None
    ) -> torch.Tensor:
        if not training or p == 0:
            return input.clone()
        key: int | torch.Tensor
        if seed is not None:
            key = seed
        elif input.requires_grad and torch.is_grad_enabled():
            accepted = (
                "a seed where a gradient is needed: without one every call draws another mask"
            )
            raise CheckError("DropoutFwdOp", "seed", "None", accepted)
        else:
            key = torch.randint(2**63 - 1, (), dtype=torch.int64, device=input.device)
        words = philox_words(key, input.numel(), input.device).view(input.shape)
        wide = torch.promote_types(input.dtype, torch.float32)
        kept = (words >= round(p * 2**32)).to(wide)
        return (input.to(wide) * (kept * (1 / (1 - p) if p < 1 else 0.0))).to(input.dtype)
