"""Device code: a kernel that may be launched before the stream's previous one has ended, built with
``launch.overlapping``. Before it waits it must neither read what a kernel wrote nor write anything."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["begin", "release", "wait"]


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    release(DEPENDENT)
    wait(DEPENDENT)


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """From here on the stream's next kernel may be launched; it waits in turn."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until the stream's previous kernel has ended."""
    if DEPENDENT:
        gdc_wait()
