"""Makes a kernel's call from tensors or bare shapes, and runs or builds a kernel for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tileops.authoring import CallSpec, DeviceFacts, Entry, Kernel, TensorSpec

__all__ = ["builds_of", "call_of", "chosen", "misaligned", "poison", "run_entry", "shapes"]

CUDA = torch.device("cuda", 0)


def call_of(
    op: str,
    inputs: Mapping[str, torch.Tensor | TensorSpec | None],
    outputs: Mapping[str, TensorSpec],
    *,
    params: Mapping[str, Any] = {},
    written: Iterable[str] = (),
    arch: tuple[int, int] = (8, 0),
    multiprocessors: int = 132,
) -> CallSpec:
    """A call on a CUDA device; the specs of its tensors stay on the device that they are on."""
    specs = {
        name: TensorSpec.of(given) if isinstance(given, torch.Tensor) else given
        for name, given in inputs.items()
    }
    shared = {(8, 0): 163 << 10, (8, 6): 99 << 10}.get(arch, 227 << 10)
    facts = DeviceFacts("cuda", 0, arch, "test", multiprocessors, shared)
    return CallSpec(
        op, SimpleNamespace(**params), {}, specs, dict(outputs), facts, frozenset(written)
    )


def shapes(
    device: torch.device = CUDA, /, **given: tuple[tuple[int, ...], torch.dtype] | None
) -> dict[str, TensorSpec | None]:
    """Contiguous specs by name, from ``name=(shape, dtype)``."""
    return {
        name: None if spec is None else TensorSpec.contiguous_of(spec[0], spec[1], device)
        for name, spec in given.items()
    }


def chosen(call: CallSpec, *kernels: type[Kernel]) -> type[Kernel]:
    """The one of ``kernels`` that serves ``call``; fails where two specialised ones claim it."""
    taking = [kernel for kernel in kernels if kernel.refuses(call) is None]
    special = [kernel for kernel in taking if not kernel.general]
    assert len(special) <= 1, special
    (served,) = special or taking
    return served


def run_entry(entry: Entry, call: CallSpec, *tensors: torch.Tensor | None) -> Any:
    """Build, bind and run."""
    artifact = entry.build()
    return (entry.bind(artifact, call) if entry.bind else artifact)(*tensors)


def builds_of(entry: Entry) -> list[Any]:
    """The Triton builds of an entry: the build thunk itself, or the arguments of a partial."""
    from tileops.lib.launch import TritonBuild

    parts = [entry.build, *getattr(entry.build, "args", ())]
    return [part for part in parts if isinstance(part, TritonBuild)]


@contextmanager
def poison() -> Iterator[None]:
    """Within it, memory from ``torch.empty`` and ``torch.empty_like`` holds NaN, or 85 where
    integers are asked for.
    """
    plain = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def filled(make: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

        return empty

    for name, make in plain.items():
        setattr(torch, name, filled(make))
    try:
        yield
    finally:
        for name, make in plain.items():
            setattr(torch, name, make)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, at an address that is not a multiple of 16."""
    storage = tensor.new_empty(tensor.numel() + 1)
    moved = storage[1:].view(tensor.shape)
    moved.copy_(tensor)
    assert moved.data_ptr() % 16 or not moved.numel()
    return moved
