"""The gradients of a product with an epilogue: one kernel back through the epilogue, then two products."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run, TensorSpec
from tileops.gemm.kernels.epilogue import row_blocks
from tileops.gemm.kernels.gemm_backward import TwoProducts
from tileops.lib.launch import Launcher, TritonBuild, pointer_to

__all__ = ["ThroughProducts"]

DEVICE = f"{__name__.removesuffix('_backward')}_triton:gradient"


class ThroughProducts(Kernel):
    """Every call but float64. What is not wanted is not computed; a preactivation that was not kept is
    computed by ``torch.mm``."""

    name = "through_products"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return "float64: it computes in float32" if call.spec("a").dtype is torch.float64 else None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        products = _products(call)
        inner = TwoProducts.entry_for(products) if products else None
        build = _gradient(call)
        return Entry(
            ("through", build and build.identity, inner and inner.identity),
            lambda: (build and build(), inner and inner.build()),
            functools.partial(_bind, inner and inner.bind),
        )


def _plain(call: CallSpec) -> bool:
    """``grad_d`` is already the gradient of the product."""
    params = call.params
    return (
        params.activation is None
        and params.scale == 1.0
        and call.spec("grad_d").dtype is call.spec("a").dtype
    )


def _wanted(call: CallSpec) -> bool:
    """Anything behind the epilogue is wanted."""
    bias = call.params.wants_bias and call.inputs["bias"] is not None
    return bool(call.params.wants_a or call.params.wants_b or bias)


def _grad_spec(call: CallSpec) -> TensorSpec:
    """Of the gradient of the product."""
    shape, like = call.spec("grad_d").shape, call.spec("a")
    return TensorSpec.contiguous_of(shape, like.dtype, like.device)


def _products(call: CallSpec) -> CallSpec | None:
    """The call of ``GEMMBwdOp`` for it; None where no product is wanted."""
    params = call.params
    if not (params.wants_a or params.wants_b):
        return None
    names = ("trans_a", "trans_b", "wants_a", "wants_b")
    return CallSpec(
        "GEMMBwdOp",
        SimpleNamespace(**{name: getattr(params, name) for name in names}),
        {},
        {"grad_d": _grad_spec(call), "a": call.spec("a"), "b": call.spec("b")},
        {name: call.outputs[name] for name in ("grad_a", "grad_b")},
        call.device,
    )


def _gradient(call: CallSpec) -> TritonBuild | None:
    """The build of the kernel back through the epilogue; None where it has nothing to do."""
    if _plain(call) or not _wanted(call):
        return None
    activation, own = call.params.activation, call.spec("a").dtype
    kept, bias = call.inputs["preactivation"], call.inputs["bias"]
    tensors: dict[str, torch.dtype | None] = {
        "grad_kept": own if call.inputs["grad_preactivation"] else None,
        "inner": own if activation else None,
        "bias": own if activation and kept is None and bias is not None else None,
    }
    columns = call.spec("grad_d").shape[1]
    block, _ = row_blocks(columns)
    return TritonBuild(
        DEVICE,
        signature=(
            ("grad_d", pointer_to(call.spec("grad_d").dtype)),
            *((name, pointer_to(dtype)) for name, dtype in tensors.items() if dtype),
            ("grad", pointer_to(own)),
            ("scale", "fp32"),
            ("N", "i32"),
            ("blocks", "i32"),
        ),
        constexprs=(
            *((name, None) for name, dtype in tensors.items() if not dtype),
            ("BLOCK", block),
            ("ACTIVATION", activation),
            ("NARROW", own.itemsize == 2),
        ),
        num_warps=8 if block >= 2048 else 4,
        aligned=("grad", *(["N"] if columns % 16 == 0 else [])),
    )


def _bind(products_bind: Any, artifacts: tuple[Any, Any], call: CallSpec) -> Run:
    launcher, products = artifacts
    forward = _products(call)
    if forward is not None:
        products = products_bind(products, forward)
    back = _through(launcher, call) if launcher is not None else None
    sums = call.params.wants_bias and call.inputs["bias"] is not None
    wants_residual, own = call.params.wants_residual, call.spec("a").dtype

    def run(
        grad_d: torch.Tensor,
        grad_kept: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        grad = grad_d if back is None else back(grad_d, grad_kept, a, b, bias, kept)
        grad_a, grad_b = (None, None) if products is None else products(grad, a, b)
        grad_bias = grad.sum(0) if sums else None
        return grad_a, grad_b, grad_bias, grad_d.to(own, copy=True) if wants_residual else None

    return run


def _through(launcher: Launcher, call: CallSpec) -> Any:
    """``back(grad_d, grad_kept, a, b, bias, kept)``: the gradient of the product."""
    params, launch = call.params, launcher.on(call.device.index)
    rows, columns = call.spec("grad_d").shape
    spec, (_, blocks) = _grad_spec(call), row_blocks(columns)
    activation, scale = params.activation is not None, float(params.scale)
    trans_a, trans_b = bool(params.trans_a), bool(params.trans_b)

    def back(
        grad_d: torch.Tensor,
        grad_kept: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        grad = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        if rows and columns:
            given = [grad_d] if grad_kept is None else [grad_d, grad_kept]
            if activation and kept is not None:
                given.append(kept)
            elif activation:
                given.append(torch.mm(a.t() if trans_a else a, b.t() if trans_b else b))
                given += [] if bias is None else [bias]
            launch(rows * blocks, 1, 1, *given, grad, scale, columns, blocks)
        return grad

    return back
