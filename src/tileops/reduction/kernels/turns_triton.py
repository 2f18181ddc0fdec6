"""Programs of one launch that wait for others: device code.

A program waits only for programs of lower numbers. A card starts programs in the order of their
numbers, so what one waits for runs or has run, and no launch waits for ever, whatever else is on the
card. ``words`` are int64, and zero before the launch: ``clear`` leaves them so.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def clear(words, count, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Set ``count`` words to zero."""
    if DEPENDENT:
        gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + place, tl.zeros([BLOCK], tl.int64), mask=place < count)


@triton.jit
def announce(word, number):
    """Add ``number`` to a word, after all that this program has written."""
    tl.debug_barrier()  # all threads have written
    tl.atomic_add(word, number, sem="release")


@triton.jit
def await_bits(word, bits):
    """Wait until a word has all of ``bits``; then read what was written before they were announced."""
    while tl.atomic_add(word, tl.zeros([], tl.int64), sem="acquire") & bits != bits:
        pass


@triton.jit
def await_count(word, count):
    """Wait until a word is ``count``; then read what was written before that was announced."""
    while tl.atomic_add(word, tl.zeros([], tl.int64), sem="acquire") < count:
        pass
