"""Device code: a kernel that may be launched before the stream's previous one has ended, built with
``launch.overlapping``. Before it waits it must neither read what a kernel wrote nor write anything."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["begin", "release", "wait"]


@triton.jit
def begin(DEPENDENT: tl.constexpr, resident):
    """Wait; then release if programs, of which so many are ``resident`` at once (``launch.resident``), are
    done in two rounds. In more of them it cost an H200 up to 15 %."""
    wait(DEPENDENT)
    if DEPENDENT:
        if tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) <= 2 * resident:
            gdc_launch_dependents()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """The stream's next kernel may be launched once all programs have come here; it waits in turn."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until the stream's previous kernel has ended."""
    if DEPENDENT:
        gdc_wait()
