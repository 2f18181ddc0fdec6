"""Inductor's way for an NVIDIA H200, on a machine without one.

Inductor asks the device for a few facts and otherwise works on shapes; here it is told the facts. Its
tensors are fake, generated kernels are not launched, and everything from the captured graph to the
Triton source is what a card of this description gets. Where there is a card, nothing is replaced.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["on_a_card"]

_FACTS = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, total_memory=141 << 30, L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10, gcnArchName="",
)  # fmt: skip


class _Unlaunched:
    """In the place of a compiled kernel."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        pass

    __call__ = run


@contextlib.contextmanager
def on_a_card() -> Iterator[None]:
    """Tensors made on ``cuda`` in the block are fake, unless a card is there."""
    import tileops.explain.session  # noqa: F401  (what it loads makes tensors that are not fake)

    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, value in _replaced().items():
            stack.enter_context(mock.patch(name, value, create=name.startswith("torch._C.")))
        stack.enter_context(_target())
        _forget_answers()
        stack.callback(_forget_answers)
        stack.enter_context(torch._subclasses.fake_tensor.FakeTensorMode())
        yield


def _replaced() -> dict[str, Any]:
    import torch._inductor.async_compile
    import torch._inductor.fx_passes.joint_graph

    interface = "torch._dynamo.device_interface.CudaInterface"
    facts = staticmethod(lambda device=None: _FACTS)

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    return {
        "torch.version.cuda": "13.0",
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_name": lambda device=None: _FACTS.name,
        "torch.cuda.get_device_properties": lambda device=None: _FACTS,
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch.cuda.get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda state, device=None: None,
        "torch.cuda.synchronize": lambda device=None: None,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
        "torch._C._cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "torch._C._cuda_getDevice": lambda: 0,
        "torch._C._cuda_setDevice": lambda device: None,
        "torch._C._cuda_getCurrentRawStream": lambda device: 0,
        "torch._C._dynamo.guards._empty_strided_cuda": empty_strided,
        # Where torch is built for cards it would ask the driver for its stream, and for a real tensor.
        "torch.accelerator.is_available": lambda: False,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch._subclasses.fake_tensor.init_gpu_context": lambda device: None,
        f"{interface}.get_device_properties": facts,
        f"{interface}.Worker.get_device_properties": facts,
        f"{interface}.get_compute_capability": staticmethod(lambda device=None: 90),
        "torch._inductor.async_compile.AsyncCompile.triton": lambda *a, **k: _Unlaunched(),
        "torch._inductor.async_compile.AsyncCompile.cpp_pybinding": lambda *a, **k: _Unlaunched(),
        # Patterns of attention are made by tracing real tensors.
        "torch._inductor.fx_passes.joint_graph.lazy_init": lambda *a: None,
    }


def _forget_answers() -> None:
    """Torch keeps what it once found out about the device."""
    from torch._inductor.codecache import CacheBase
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    for each in (*vars(_triton).values(), CacheBase.get_system, DeviceProperties.create):
        if hasattr(each, "cache_clear"):
            each.cache_clear()


@contextlib.contextmanager
def _target() -> Iterator[None]:
    """What Triton compiles for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    before = driver._active
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        driver._active = before
