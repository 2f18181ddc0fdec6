"""What each op means, written a second time, and the one way to hold an op to it.

``EXACT[class](op, **inputs)`` gives the outputs, then the new values of written inputs by name, in
float64 (integers exactly). Every meaning here is written from the op's reference, slowly and
plainly; none is the op's decomposition. ``check`` calls an op on memory that is poisoned with NaN
and compares it within ``tileops.backend.tolerances``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests import (
    oracle_attention,
    oracle_elementwise,
    oracle_gemm,
    oracle_norm,
    oracle_quantization,
    oracle_reduction,
    oracle_rope,
)
from tileops.backend.tolerances import compare
from tileops.engine.plan import in_tree_kernels
from tileops.engine.select import claimants

__all__ = ["EXACT", "call", "check", "exact", "nearer", "poisoned", "same_bits", "strided"]

Outputs = tuple[torch.Tensor | None, ...]
Meaning = tuple[Outputs, dict[str, torch.Tensor]]


# ---- moe --------------------------------------------------------------------------------------


def _owners(layout: Any, metadata: torch.Tensor, rows: int) -> list[int]:
    """The expert of each row, -1 where none."""
    if layout.metadata_kind == "per_row":
        return metadata.tolist()
    owners, end = [-1] * rows, 0
    for expert, stop in enumerate(metadata.tolist()):
        start = math.ceil(end / layout.alignment) * layout.alignment
        for row in range(start, stop):
            owners[row] = expert
        end = stop
    return owners


def _activated(values: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Of one row ``[2*N]``."""
    if activation is None:
        return values
    if activation == "swigluoai":
        gate, up = values[0::2], values[1::2]
        gate, up = torch.minimum(gate, gate.new_tensor(7.0)), torch.clamp(up, -7.0, 7.0)
        return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    gate, up = values.chunk(2)
    return (
        oracle_elementwise.silu64(gate)
        if activation == "silu_and_mul"
        else oracle_elementwise.gelu64(gate)
    ) * up


def _grouped(
    layout: Any,
    activation: str | None,
    a: torch.Tensor,
    b: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    width = b.shape[1] if activation is None else b.shape[1] // 2
    rows = a.double().reshape(-1, a.shape[-1])
    if layout.masked:
        counts = metadata.tolist()
        owners = [
            e if r < counts[e] else -1 for e in range(len(counts)) for r in range(layout.max_m)
        ]
    else:
        owners = _owners(layout, metadata, len(rows))
    result = torch.zeros(len(rows), width, dtype=torch.float64)
    for r, expert in enumerate(owners):
        if expert >= 0:
            values = (b[expert].double() * rows[r]).sum(1)
            if bias is not None:
                values = values + bias[expert].double()
            result[r] = _activated(values, activation)
    return result.view(*a.shape[:-1], width)


def grouped_gemm(
    op: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    layout_metadata: torch.Tensor,
    bias: torch.Tensor | None,
) -> Meaning:
    return (_grouped(op.layout, op.activation, a, b, layout_metadata, bias),), {}


def expert_mlp(
    op: Any,
    expert_input: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    layout_metadata: torch.Tensor,
    b_gate_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
) -> Meaning:
    hidden = _grouped(op.layout, op.activation, expert_input, w_gate_up, layout_metadata, b_gate_up)
    return (_grouped(op.layout, None, hidden, w_down, layout_metadata, b_down),), {}


def post_permute(
    op: Any, expert_output: torch.Tensor, topk_weights: torch.Tensor, inverse_indices: torch.Tensor
) -> Meaning:
    rows = expert_output.double().reshape(-1, expert_output.shape[-1])
    tokens, chosen = topk_weights.shape
    scale = 1.0 if op.epilogue is None else op.epilogue.routed_scaling_factor
    result = torch.zeros(tokens, rows.shape[1], dtype=torch.float64)
    for t in range(tokens):
        for n in range(chosen):
            row = rows[int(inverse_indices[t * chosen + n])]
            result[t] += scale * topk_weights[t, n].double() * row
    return (result,), {}


EXACT: dict[str, Callable[..., Meaning]] = {
    **oracle_attention.EXACT,
    **oracle_elementwise.EXACT,
    **oracle_gemm.EXACT,
    **oracle_norm.EXACT,
    **oracle_quantization.EXACT,
    **oracle_reduction.EXACT,
    **oracle_rope.EXACT,
    "MoEExpertMLPFwdOp": expert_mlp,
    "MoEGroupedGEMMFwdOp": grouped_gemm,
    "MoEPostPermuteFwdOp": post_permute,
}


def exact(op: Any, inputs: dict[str, torch.Tensor | None]) -> Meaning:
    """The meaning of a call, its inputs untouched; absent inputs may be left out."""
    whole = {item.name: inputs.get(item.name) for item in op.entry.inputs}
    assert set(inputs) <= set(whole), set(inputs) - set(whole)
    return EXACT[type(op).__name__](op, **whole)


# ---- holding an op to it --------------------------------------------------------------------

_M_PERTURB = -6
_FREE_ZEROS_HAND_OUT_ONES = 0x100
"""glibc fills what it hands out with the complement of the lowest byte: 0xff, a NaN in every float
dtype and -1 in every integer one. It is 0x100, not 0, because 0 means off."""


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within it fresh memory holds NaN (or -1), whoever asks for it: torch's kernels too."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    on = mallopt is not None and mallopt(_M_PERTURB, _FREE_ZEROS_HAND_OUT_ONES)
    try:
        if on:
            # Now and then a small block comes from a cache that fills nothing.
            assert any(torch.empty(999).isnan().all() for _ in range(9)), "memory is not poisoned"
        yield
    finally:
        if on:
            mallopt(_M_PERTURB, 0)


def call(op: Any, inputs: dict[str, torch.Tensor | None], **more: Any) -> Any:
    """Call ``op`` with inputs by name, each the way its entry wants it."""
    items = op.entry.inputs
    args = [inputs.get(item.name) for item in items if not item.kw_only]
    while args and args[-1] is None:
        args.pop()
    named = {i.name: inputs[i.name] for i in items if i.kw_only and inputs.get(i.name) is not None}
    return op(*args, **named, **more)


def _copies(inputs: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """The same values at the same strides, in memory of their own."""
    return {name: None if t is None else _copy(t) for name, t in inputs.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    own = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.untyped_storage().clone()
    return own.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaNs and signed zeros compare as they are."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach()
    )
    return plain.flatten().view(torch.uint8)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def nearer(
    result: torch.Tensor, exact: torch.Tensor, allowance: torch.Tensor | float
) -> torch.Tensor:
    """``result`` less that part of its error, ``allowance`` at most, which the caller derives."""
    off = result.double() - exact
    left = torch.where(off.abs() > allowance, off - off.sign() * allowance, 0.0)
    return torch.where(off.isfinite(), (exact + left).to(result.dtype), result)


def check(
    op: Any,
    inputs: dict[str, torch.Tensor | None],
    *,
    out: torch.Tensor | None = None,
    both_paths: bool = True,
) -> Any:
    """Call ``op`` and hold result, written and unwritten tensors to the op's meaning.

    With ``both_paths`` the operator, as the dispatcher and a compiled graph reach it, must give the
    same bits as the direct call, and every other kernel that takes the call must be right too.
    Returns what the op returned.
    """
    before, twin = _copies(inputs), _copies(inputs)
    more = {} if out is None else {"out": out}
    with poisoned():
        result = call(op, inputs, **more)
    outputs, written = exact(op, before)
    roundings = _roundings(op, before)
    results = result if isinstance(result, tuple) else (result,) if outputs else ()
    assert outputs or result is None, result
    assert len(results) == len(outputs), results
    kind = op.entry.kind
    for n, (declared, given, wanted) in enumerate(
        zip(op.entry.outputs, results, outputs, strict=True)
    ):
        label = f"{op!r}: {declared.name}"
        if wanted is None:
            assert given is None, label
            continue
        held = given if roundings is None else nearer(given, wanted, roundings[n])
        _check_output(label, op, held, wanted, kind)
        if declared.is_input in written:
            assert given is inputs[str(declared.is_input)], label
        elif out is not None:
            assert given is out, label
        else:
            _check_own(label, given, inputs, results)
    for name, tensor in inputs.items():
        if name in written:
            assert tensor is not None
            found = compare(tensor, written[name], kind)
            assert found.ok, f"{op!r}: written {name}: {found.text}"
        else:
            assert same_bits(tensor, before[name]), f"{op!r}: {name} was changed"
    if both_paths and op.entry.has_boundary:
        _check_operator(op, twin, out, results, {n: inputs[n] for n in written})
        _check_other_kernels(op, before, out, (outputs, written))
    return result


def _roundings(op: Any, inputs: dict[str, torch.Tensor | None]) -> Any:
    """For each output what the kernel that served may be off by beyond its tolerance; None: nothing."""
    name = type(op).__name__
    derived = oracle_reduction.ROUNDING.get(name) or oracle_gemm.ROUNDING.get(name)
    last = op.last_call  # a composition has none
    if derived is None and last is not None and last.kernel != "decomposition":
        derived = oracle_attention.ROUNDING.get(name)
    if derived is None:
        return None
    return derived(op, **{item.name: inputs.get(item.name) for item in op.entry.inputs})


def _check_other_kernels(
    op: Any, inputs: dict[str, torch.Tensor | None], out: torch.Tensor | None, meaning: Meaning
) -> None:
    last = op.last_call
    kernels, _ = claimants(last.call, in_tree_kernels(type(op), "cpu"))
    for kernel in kernels:
        if kernel.name == last.kernel:
            continue
        entry = kernel.entry_for(last.call)
        artifact = entry.build()
        run = artifact if entry.bind is None else entry.bind(artifact, last.call)
        whole = {item.name: inputs.get(item.name) for item in op.entry.inputs}
        given = {n: None if t is None else t.clone().contiguous() for n, t in whole.items()}
        with poisoned():
            buffer = (
                [] if not op.entry.has_out else [None if out is None else torch.empty_like(out)]
            )
            result = run(*given.values(), *buffer)
        label = f"{op!r} by {kernel.name}: "
        results = (
            (*buffer,) if out is not None else result if isinstance(result, tuple) else (result,)
        )
        for declared, one, wanted in zip(op.entry.outputs, results, meaning[0], strict=False):
            if wanted is not None and declared.is_input not in meaning[1]:
                assert one is not None, label
                _check_output(label + declared.name, op, one, wanted, op.entry.kind)
        for name, wanted in meaning[1].items():
            tensor = given[name]
            assert tensor is not None
            found = compare(tensor, wanted, op.entry.kind)
            assert found.ok, f"{label}written {name}: {found.text}"


def _check_output(
    label: str, op: Any, given: torch.Tensor, wanted: torch.Tensor, kind: str
) -> None:
    assert isinstance(given, torch.Tensor), label
    assert given.shape == wanted.shape, (label, given.shape, wanted.shape)
    found = compare(given, wanted, kind)
    if not found.ok and wanted.ndim:
        # Rows of padding say nothing about the size of the sums in the others.
        full = (wanted != 0).any(-1)
        found = compare(given[full], wanted[full], kind) if not given[~full].any() else found
    assert found.ok, f"{label} ({given.dtype}): {found.text}"


def _check_own(
    label: str, given: torch.Tensor, inputs: dict[str, torch.Tensor | None], results: Any
) -> None:
    """An op's own output is contiguous and shares memory with nothing."""
    assert given.is_contiguous(), label
    assert not given.requires_grad, label
    if not given.numel():
        assert all(given is not t for t in inputs.values()), label
        return
    others = [t for t in (*inputs.values(), *results) if t is not None and t is not given]
    for other in others:
        shared = other.numel() and (
            other.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        )
        assert not shared, f"{label} shares memory with an input or another output"


def _check_operator(
    op: Any,
    inputs: dict[str, torch.Tensor | None],
    out: torch.Tensor | None,
    results: tuple[Any, ...],
    written: dict[str, torch.Tensor | None],
) -> None:
    whole = {item.name: inputs.get(item.name) for item in op.entry.inputs}
    more = {} if out is None else {"out": torch.full_like(out, 7)}
    again = op._call_boundary(**whole, **more)
    both = again if isinstance(again, tuple) else (again,) if results else ()
    for one, other in zip(results, both, strict=True):
        assert same_bits(one, other), f"{op!r}: the operator gives other bits than the direct call"
    for name, tensor in written.items():
        assert same_bits(tensor, inputs[name]), f"{op!r}: the operator writes other bits to {name}"


def strided(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values at other addresses and strides, none of them overlapping itself."""
    flat = tensor.new_empty(tensor.numel() + 1)
    yield "misaligned", flat[1:].view(tensor.shape).copy_(tensor)
    if tensor.ndim:
        spread = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] * 2))
        yield "every other", spread[..., ::2].copy_(tensor)
        offset = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 3))
        yield "inner part", offset[..., 1 : tensor.shape[-1] + 1].copy_(tensor)
    if tensor.ndim > 1:
        yield "transposed", tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if tensor.ndim > 2:
        yield "middle", tensor.transpose(0, 1).contiguous().transpose(0, 1)
