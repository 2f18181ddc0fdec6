"""Dropout by a documented generator: one seed gives one mask, on every device."""

from __future__ import annotations

import torch

from tileops.authoring import CheckError, KernelInterface, Op
from tileops.lib.watching import recorded

_LOW = 0xFFFFFFFF


def philox(
    seed: int | torch.Tensor, counter: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four words of Philox-4x32-10 at each ``counter`` under the key ``seed``, all in int64 (Salmon et
    al., Parallel Random Numbers, 2011)."""
    c0, c1 = counter & _LOW, counter >> 32
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # 64 bits hold the product of two 32-bit words; its sign bit is one of them. In place, since new
        # memory costs the CPU as much as the arithmetic.
        p0, p2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c1.bitwise_xor_(p2 >> 32).bitwise_and_(_LOW).bitwise_xor_(k0)
        c3.bitwise_xor_(p0 >> 32).bitwise_and_(_LOW).bitwise_xor_(k1)
        c0, c1, c2, c3 = c1, p2.bitwise_and_(_LOW), c3, p0.bitwise_and_(_LOW)
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def drawn_seed(device: torch.device) -> torch.Tensor:
    """One by torch's generator of the device."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def dropped(
    input: torch.Tensor, p: float, seed: int | torch.Tensor, first: int = 0
) -> torch.Tensor:
    """Dropout of elements of which ``input`` begins with number ``first``, a multiple of 4."""
    count, wide = input.numel(), torch.promote_types(input.dtype, torch.float32)
    counter = torch.arange(-(-count // 4), dtype=torch.int64, device=input.device) + first // 4
    kept = torch.stack([word >= round(p * 2**32) for word in philox(seed, counter)], -1)
    factor = kept.flatten()[:count].view(input.shape).to(wide) * (1 / (1 - p) if p < 1 else 0.0)
    return (input.to(wide) * factor).to(input.dtype)


class DropoutFwdOp(Op):
    """``input`` ``[*S]`` times ``1 / (1 - p)`` with probability ``1 - p``, else times 0, if ``training``.

    Element ``i`` of ``input``, read row by row, is kept where word ``i`` of Philox-4x32-10 under the key
    ``seed`` is at least ``p * 2**32``: a seed gives the same mask in every call, for every dtype, on every
    device. Without one each call takes a seed from torch's generator of the device, which
    ``torch.manual_seed`` governs; such a call has no gradient. With ``inplace`` the call writes ``input``
    and returns it; else it returns a new tensor, also where nothing is dropped: no op returns its input.
    API: ``torch.nn.functional.dropout``.
    """

    kernel = KernelInterface(
        cuda=("dropout:Dropout",), cpu=("dropout_cpu:Dropout", "dropout_cpu:CompiledDropout")
    )
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
        if seed is not None:
            return dropped(input, p, seed)
        if recorded(input):
            accepted = (
                "a seed where a gradient is needed: without one every call draws another mask"
            )
            raise CheckError("DropoutFwdOp", "seed", "None", accepted)
        return dropped(input, p, drawn_seed(input.device))
