"""The door for people who bring a target; see ``docs/write-a-target.md``."""

from __future__ import annotations

from tileops.engine.errors import (
    AmbiguousTargetError,
    BackendError,
    OpNotAvailableError,
    UnknownTargetError,
)
from tileops.engine.kernel import DeviceFacts, TensorSpec
from tileops.engine.targets import (
    BUILTIN,
    BuildKernel,
    KernelResult,
    ReadDeviceFacts,
    Target,
    default_target,
    load_failures,
    register_detector,
    register_device_facts,
    register_kernel_builder,
    registered_targets,
    set_default_target,
    use_target,
)

__all__ = [
    "BUILTIN",
    "AmbiguousTargetError",
    "BackendError",
    "BuildKernel",
    "DeviceFacts",
    "KernelResult",
    "OpNotAvailableError",
    "ReadDeviceFacts",
    "Target",
    "TensorSpec",
    "UnknownTargetError",
    "default_target",
    "load_failures",
    "register_detector",
    "register_device_facts",
    "register_kernel_builder",
    "registered_targets",
    "set_default_target",
    "use_target",
]
