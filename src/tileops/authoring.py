"""The door for people who write ops and kernels; see ``docs/write-an-op.md``."""

from __future__ import annotations

from tileops.engine import pattern
from tileops.engine.compiled import Compiled
from tileops.engine.errors import CheckError
from tileops.engine.kernel import (
    CallSpec,
    DeviceFacts,
    Entry,
    Kernel,
    KernelInterface,
    Run,
    TensorSpec,
)
from tileops.engine.op import Op
from tileops.engine.signature.literal import literal_type

SignatureCall = CallSpec
"""The facts of a call as its signature sees them: another name of ``CallSpec``."""

__all__ = [
    "CallSpec",
    "CheckError",
    "Compiled",
    "DeviceFacts",
    "Entry",
    "Kernel",
    "KernelInterface",
    "Op",
    "Run",
    "SignatureCall",
    "TensorSpec",
    "literal_type",
    "pattern",
]
