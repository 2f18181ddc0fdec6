"""The gradients of a matrix product: two products, each by the kernel that would serve it alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.gemm.kernels.gemm import CublasGEMM, TritonGEMM

__all__ = ["TwoProducts", "products"]

GRAD, A, B = range(3)
"""Places of the inputs."""

Product = tuple[int, int, CallSpec]
"""The places of both operands and the call of ``GEMMFwdOp``."""


class TwoProducts(Kernel):
    """Every call. A gradient that is not wanted costs nothing."""

    name = "two_products"
    general = True

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        entries = [None if one is None else _served(one[2]) for one in products(call)]
        identity = tuple(None if entry is None else entry.identity for entry in entries)
        return Entry(
            ("two products", *identity),
            lambda: tuple(None if entry is None else entry.build() for entry in entries),
            functools.partial(_bind, tuple(entry and entry.bind for entry in entries)),
        )


def products(call: CallSpec) -> tuple[Product | None, Product | None]:
    """The products that are ``grad_a`` and ``grad_b``; None for one that is not wanted."""
    trans_a, trans_b = bool(call.params.trans_a), bool(call.params.trans_b)
    grad_a = grad_b = None
    if call.params.wants_a:
        grad_a = (
            _product(call, "grad_a", B, GRAD, trans_b, True)
            if trans_a
            else _product(call, "grad_a", GRAD, B, False, not trans_b)
        )
    if call.params.wants_b:
        grad_b = (
            _product(call, "grad_b", GRAD, A, True, trans_a)
            if trans_b
            else _product(call, "grad_b", A, GRAD, not trans_a, False)
        )
    return grad_a, grad_b


def _product(
    call: CallSpec, output: str, left: int, right: int, trans_left: bool, trans_right: bool
) -> Product:
    specs = list(call.inputs.values())
    forward = CallSpec(
        "GEMMFwdOp",
        SimpleNamespace(trans_a=trans_left, trans_b=trans_right),
        {},
        {"a": specs[left], "b": specs[right]},
        {"d": call.outputs[output]},
        call.device,
    )
    return left, right, forward


def _served(call: CallSpec) -> Entry:
    taking = [kernel for kernel in (CublasGEMM, TritonGEMM) if kernel.refuses(call) is None]
    return min(taking, key=lambda kernel: kernel.cost(call)).entry_for(call)


def _bind(binds: tuple[Any, ...], artifacts: tuple[Any, ...], call: CallSpec) -> Run:
    runs: list[tuple[int, int, Run] | None] = []
    for one, bind, artifact in zip(products(call), binds, artifacts, strict=True):
        if one is None:
            runs.append(None)
        else:
            left, right, forward = one
            runs.append((left, right, bind(artifact, forward) if bind else artifact))

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(one and one[2](inputs[one[0]], inputs[one[1]]) for one in runs)

    return run
