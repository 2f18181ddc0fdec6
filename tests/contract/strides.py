"""Layouts of inputs, and a checker of what an op does with them.

The stock checkers (``opcheck``, the fake-tensor cross-reference) compare strides only on CUDA; this one
compares them everywhere, for real, fake, meta and compiled calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compile_contract import Call, Tensors

__all__ = ["LAYOUTS", "arrange", "check_call", "fake_of", "layout_of", "meta_of"]


def _transposed(t: torch.Tensor) -> torch.Tensor | None:
    return t.mT.contiguous().mT if t.ndim >= 2 else None


def _sliced(t: torch.Tensor) -> torch.Tensor | None:
    if not t.ndim:
        return None
    gaps = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 3)
    gaps[..., ::2] = t
    return gaps[..., ::2]


def _expanded(t: torch.Tensor) -> torch.Tensor | None:
    return t[:1].clone().expand(t.shape) if t.ndim else None


def _offset(t: torch.Tensor) -> torch.Tensor:
    moved = t.new_full((t.numel() + 1,), 3)[1:].view(t.shape)
    return moved.copy_(t)


def _channels_last(t: torch.Tensor) -> torch.Tensor | None:
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.ndim >= 3 else None


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "transposed": _transposed,
    "sliced": _sliced,
    "expanded": _expanded,
    "offset": _offset,
    "channels_last": _channels_last,
}
"""Give a tensor in that layout, in memory of its own; None where a tensor cannot have it."""


def arrange(call: Call, layout: str) -> bool:
    """Put every input of ``call`` that may have it into ``layout``; whether any has."""
    needs = {item.name for item in call.op.entry.inputs if item.contiguous} | {"out"}
    changed = False
    for name, tensor in call.inputs.items():
        if tensor is None:
            continue
        kept = layout not in ("contiguous", "offset") and name in needs
        kept |= layout == "expanded" and name in call.written
        laid = None if kept else LAYOUTS[layout](tensor)
        changed |= laid is not None
        call.inputs[name] = LAYOUTS["contiguous"](tensor) if laid is None else laid
    return changed


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a caller can see of a tensor but its values and its device."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def fake_of(mode: FakeTensorMode, inputs: Tensors) -> Tensors:
    return {name: None if t is None else mode.from_tensor(t) for name, t in inputs.items()}


def meta_of(inputs: Tensors) -> Tensors:
    """The same layouts on the meta device."""
    return {
        name: None
        if t is None
        else t.new_empty(0, device="meta").set_(
            torch.UntypedStorage(t.untyped_storage().nbytes(), device="meta"),
            t.storage_offset(), t.shape, t.stride(),
        )
        for name, t in inputs.items()
    }  # fmt: skip


def _memory(inputs: Tensors) -> dict[str, torch.Tensor]:
    """The whole storage below each input, as a view: gaps and what lies before it included."""
    return {
        name: torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
        for name, t in inputs.items()
        if t is not None
    }


def check_call(call: Call, function: Callable[..., Any]) -> list[tuple[Any, ...] | None]:
    """Call ``function`` with the call's inputs; check the layouts of what it returns and that it
    writes what it should, in place, and no byte beside. Gives the outputs' layouts."""
    expected = call.written | {
        name: t.clone() for name, t in call.inputs.items() if t is not None and name not in call.written
    }  # fmt: skip
    before = {name: m.clone() for name, m in _memory(call.inputs).items()}
    seen = {n: (layout_of(t), t.data_ptr()) for n, t in call.inputs.items() if t is not None}
    result = call.run(function)
    call.check(result)
    after = _memory(call.inputs)
    for name, tensor in call.inputs.items():
        if tensor is None:
            continue
        assert (layout_of(tensor), tensor.data_ptr()) == seen[name], f"'{name}' was moved"
        if name not in call.written:
            assert torch.equal(tensor, expected[name]), f"'{name}' was written"
            assert torch.equal(after[name], before[name]), f"memory around '{name}' was written"
            continue
        # Beside the tensor nothing changes: put what it held back into a copy of the memory.
        restored = after[name].clone()
        where = restored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        old = before[name].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        where.copy_(old)
        assert torch.equal(restored, before[name]), f"memory around '{name}' was written"
    return own_outputs(call, result)


def own_outputs(call: Call, result: Any) -> list[tuple[Any, ...] | None]:
    """The layouts of the outputs, each of which is a contiguous tensor with memory of its own."""
    results = result if isinstance(result, tuple) else (result,) if call.returns else ()
    layouts: list[tuple[Any, ...] | None] = []
    for given, wanted in zip(results, call.returns, strict=True):
        if wanted is None:
            assert given is None
            layouts.append(None)
            continue
        layouts.append(layout_of(given))
        if isinstance(wanted, torch.Tensor):
            assert given.is_contiguous(), given.stride()
            assert given.storage_offset() == 0
            others = [t for t in (*call.inputs.values(), *results) if t is not None]
            shares = sum(
                t.untyped_storage()._cdata == given.untyped_storage()._cdata for t in others
            )
            assert shares == 1, "an output shares memory"
    return layouts
