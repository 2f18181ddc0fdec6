"""Matrix products on the CPU: by oneDNN where MKL, which torch calls for them, takes longer.

oneDNN rearranges its second operand within a call. So where few rows meet a large matrix that one is the
first, and the product is that of the other order, transposed; weights are never kept rearranged.

The constants were measured on an AMD EPYC with AVX-512 (torch 2.13, one thread) by
``python -m benchmarks.cpu_products``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.gemm.epilogue import ACTIVATIONS
from tileops.gemm.kernels.gemm import sizes

__all__ = ["MKLEpilogue", "OneDNNEpilogue", "OneDNNProduct", "linear", "swapped"]

FASTER_ON = "AMD"
"""In the name of a processor's vendor. For Intel's own MKL was written; others were not measured."""
SWAPPED = (16, 32, 48)
"""Rows with which the other order is faster: registers of 16 float32 numbers are full, and rearranging the
large matrix would cost much of the time."""
LEAST_ROWS = 6
LEAST_COLUMNS = 128
LEAST = 1 << 24
"""Multiplications from which oneDNN is faster; a call of it costs 13 µs more than one of MKL."""
LARGE = 1 << 19
"""Elements of a matrix that no second cache holds. Few rows by such a one take MKL longest."""
LEAST_BY_LARGE = 1 << 22

FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
"""What oneDNN does to each element, by its own words. Its ReLU is none of them: it makes 0 of NaN."""
IN_PLACE: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "silu": lambda x: F.silu(x, inplace=True),
}


def refusal(call: CallSpec) -> str | None:
    """Why MKL serves a product, None where oneDNN is faster."""
    rows, columns, depth = sizes(call)
    dtype = call.spec("a").dtype
    if dtype is not torch.float32:
        return f"torch's own product serves {str(dtype)[6:]}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if FASTER_ON not in call.device.name:
        return f"MKL was not seen to be slower on {call.device.name or 'this processor'}"
    if call.params.trans_a or not call.params.trans_b:
        return "rows of an operand are not contiguous"
    if rows < LEAST_ROWS or columns < LEAST_COLUMNS:
        return f"{rows} rows and {columns} columns (at least {LEAST_ROWS} and {LEAST_COLUMNS})"
    work = rows * columns * depth
    least = LEAST if columns * depth < LARGE else LEAST_BY_LARGE
    return None if work >= least else f"{work} multiplications (at least {least})"


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, word: str, way: str
) -> torch.Tensor:
    """``x @ weight.T + bias``, and what oneDNN's two words say."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, weight, bias, word, [], way
    )
    return product


def swapped(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``a @ b.T + bias`` by the product of ``b`` and ``a``."""
    turned = linear(b, a, None, "none", "").t()
    if bias is None:
        return turned.contiguous()
    d = torch.empty(turned.shape, dtype=a.dtype, device=a.device)
    return torch.add(turned, bias, out=d)


def _product(call: CallSpec) -> Callable[..., torch.Tensor]:
    """oneDNN's function of ``a``, ``b`` and ``bias``."""
    if sizes(call)[0] in SWAPPED:
        return swapped
    return lambda a, b, bias: linear(a, b, bias, "none", "")


class OneDNNProduct(Kernel):
    """``a`` by the transpose of ``b``."""

    name = "onednn_product"
    devices = ("cpu",)

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return refusal(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        def bind(product: Callable[..., torch.Tensor], _: CallSpec) -> Run:
            return lambda a, b: product(a, b, None)

        return Entry(("onednn", sizes(call)[0] in SWAPPED), lambda: _product(call), bind)


class OneDNNEpilogue(Kernel):
    """The same, with bias and activation in it where oneDNN has them there."""

    name = "onednn_epilogue"
    devices = ("cpu",)

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return _mixed(call) or refusal(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        swapped, activation = sizes(call)[0] in SWAPPED, call.params.activation
        if swapped or activation not in FUSED or call.outputs["preactivation"] is not None:
            return Entry(("onednn", swapped), lambda: _product(call), _bind_steps)
        words = FUSED[activation]

        def build() -> Callable[..., torch.Tensor]:
            return lambda a, b, bias: linear(a, b, bias, *words)

        return Entry(("onednn", *words), build, _bind_fused)


class MKLEpilogue(Kernel):
    """torch's product, which is MKL's where it is built with that, and a kernel for each step after it."""

    name = "product_then_steps"
    devices = ("cpu",)
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.spec("a").dtype.itemsize == 2:
            return "steps in halves would round"
        return _mixed(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        trans_a, trans_b = bool(call.params.trans_a), bool(call.params.trans_b)

        def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            left, right = a.t() if trans_a else a, b.t() if trans_b else b
            return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)

        return Entry(("aten.addmm", trans_a, trans_b), lambda: product, _bind_steps)


def _mixed(call: CallSpec) -> str | None:
    mixed = call.spec("d").dtype is not call.spec("a").dtype
    return "the result is of another dtype" if mixed else None


def _bind_fused(product: Callable[..., torch.Tensor], call: CallSpec) -> Run:
    finish = _finisher(call)

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[Any, ...]:
        return finish(product(a, b, bias), residual), None

    return run


def _bind_steps(product: Callable[..., torch.Tensor], call: CallSpec) -> Run:
    activation, finish = call.params.activation, _finisher(call)
    keeps = call.outputs["preactivation"] is not None
    activate = ACTIVATIONS[activation]
    if not keeps:
        activate = IN_PLACE.get(activation, activate)

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[Any, ...]:
        inner = product(a, b, bias)
        return finish(activate(inner), residual), inner if keeps else None

    return run


def _finisher(call: CallSpec) -> Callable[..., torch.Tensor]:
    """Scales and adds, in place."""
    scale = call.params.scale

    def finish(d: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if scale != 1.0:
            d.mul_(scale)
        return d if residual is None else d.add_(residual)

    return finish
