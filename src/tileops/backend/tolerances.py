"""How far a kernel's result may lie from the exact one; the one table, with its derivation.

The exact result is the op's meaning in float64 on the very inputs that the kernel got, so what is
bounded is the kernel's own rounding, not that of its inputs. An element may be off by

    relative * |exact| + of_rms * rms(exact) + absolute

where the three terms stand for three sources of error and ``u`` is the unit roundoff of the
result's dtype, half the distance from 1 to the next number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Comparison", "Tolerance", "compare", "tolerance"]

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
"""``u``: a dtype with p significant bits has u = 2**-p."""

ROUNDINGS = 4
"""Multiples of u in ``relative`` for dtypes narrower than float32, whose kernels compute in
float32: one u for the result, two for intermediate values that a kernel may hold in the narrow
dtype (such as silu(gate) before it is multiplied), and one for products of these errors and
float32's own."""

WIDE_ROUNDINGS = 64
"""Multiples of u in ``relative`` for float32 and float64, whose kernels compute in the dtype
itself: a tree sum of 2**20 terms of one sign is off by at most 20 u; exp of an argument of size 16
by 16 u (its argument's rounding) and 2 u; quotient, root and result by 1 u each. Rounded up to a
power of 2. float32 means float32: TF32 has u = 2**-11 and fails."""

CANCELLATION = 256
"""Multiples of the accumulator's u in ``of_rms``: a sum whose terms cancel is off by much of
itself, but by little of the sums around it. Adding n random terms one after the other is off by
about u * sqrt(n) / 2.4 of the sums' rms: 5 standard deviations at n = 2**14 are 267 u, and tree or
blocked sums lie far below. The accumulator is float32 for narrower dtypes, else the dtype itself.
"""

TEMPLATE_CANCELLATION = 4
"""Multiples of the result's u in ``of_rms`` for kind ``template``: attention and GEMM chains round
an operand of a sum (the probabilities, the activations) to the narrow dtype. Roundings are uniform
in [-u, u], so the sum is off by u / sqrt(3) of its rms: 5.5 standard deviations, the largest of
10**7 elements, are 3.2 u."""

SMALLEST = {
    torch.float64: 2.0**-1022,
    torch.float32: 2.0**-126,
    torch.bfloat16: 2.0**-126,
    torch.float16: 2.0**-24,
    torch.float8_e4m3fn: 2.0**-9,
    torch.float8_e5m2: 2.0**-16,
}
"""``absolute``: where u no longer bounds the rounding. Kernels may flush float32, and with it
bfloat16, below the smallest normal number to 0; float16 and float8 are made with their subnormals,
which are this far apart."""


@dataclass(frozen=True)
class Tolerance:
    """The three coefficients of the bound above."""

    relative: float
    of_rms: float
    absolute: float


def tolerance(dtype: torch.dtype, kind: str) -> Tolerance:
    """The bound for a result of ``dtype`` of an op of that kind. Integers and bools are exact."""
    if not dtype.is_floating_point:
        return Tolerance(0.0, 0.0, 0.0)
    u = UNIT_ROUNDOFF[dtype]
    accumulator = min(u, UNIT_ROUNDOFF[torch.float32])
    relative = (WIDE_ROUNDINGS if u == accumulator else ROUNDINGS) * u
    of_rms = CANCELLATION * accumulator
    if kind == "template":
        of_rms = max(of_rms, TEMPLATE_CANCELLATION * u)
    return Tolerance(relative, of_rms, SMALLEST[dtype])


@dataclass(frozen=True)
class Comparison:
    """``worst``: the largest error in units of its bound, infinite for a wrong NaN or infinity;
    ``text`` names the worst element."""

    worst: float
    text: str

    @property
    def ok(self) -> bool:
        """Whether every element is within its bound."""
        return self.worst <= 1.0


def compare(actual: torch.Tensor, exact: torch.Tensor, kind: str) -> Comparison:
    """Compare a result with the exact one, in float64 and of the same shape, where that one lies."""
    if actual.shape != exact.shape:
        return Comparison(float("inf"), f"shape {list(actual.shape)}, not {list(exact.shape)}")
    if not actual.numel():
        return Comparison(0.0, "no elements")
    if not actual.dtype.is_floating_point:
        given, wanted = actual.to(exact.device), exact.to(actual.dtype)
        return _worst(_infinite(given != wanted), given, wanted)
    bound = tolerance(actual.dtype, kind)
    given, wanted = actual.to(exact.device).double(), exact.double()
    if actual.dtype is torch.float8_e4m3fn:  # it has no infinity: kernels saturate
        wanted = wanted.clamp(-448.0, 448.0)
    # Where the dtype has no finite number for the exact result, the rounded one is the right one.
    rounded = wanted.to(actual.dtype).double()
    finite = wanted.isfinite() & rounded.isfinite()
    rms = wanted[finite].square().mean().sqrt() if finite.any() else wanted.new_zeros(())
    limit = bound.relative * wanted.abs() + bound.of_rms * rms + bound.absolute
    same = (given == rounded) | (given.isnan() & rounded.isnan())
    error = torch.where(finite, (given - wanted).abs() / limit, _infinite(~same))
    return _worst(torch.where(error.isnan(), _infinite(error.isnan()), error), given, wanted)


def _infinite(where: torch.Tensor) -> torch.Tensor:
    """Infinity there, 0 elsewhere."""
    return torch.zeros_like(where, dtype=torch.float64).masked_fill(where, float("inf"))


def _worst(error: torch.Tensor, given: torch.Tensor, wanted: torch.Tensor) -> Comparison:
    flat = int(error.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape)]
    worst = float(error.flatten()[flat])
    wrong = int((error > 1).sum())
    values = (given.flatten()[flat].item(), wanted.flatten()[flat].item())
    text = f"{values[0]:.6g} at {place}, exactly {values[1]:.6g}"
    if wrong:
        text += f": {worst:.3g} times its tolerance; {wrong} of {error.numel()} elements are beyond"
    return Comparison(worst, text)
