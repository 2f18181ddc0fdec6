"""Functions with known answers. The answer stands with each, from what the code means."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tileops.elementwise import ReLUFwdOp


def whole(x):
    """No break: one graph of three operations."""
    return torch.relu(x * 2 + 1)


def prints(x):
    """One break, by ``print``; ``y`` and nothing else crosses it: 4 × 4 float32 are 64 bytes."""
    y = x * 2
    print("between")
    return y + 1


def three_breaks(x):
    """Three breaks of three kinds: ``print``, ``.item()``, and a function that torch may not see."""
    y = x * 2
    print("first")
    scale = (y + 1).sum().item()
    y = y * 3 + scale
    return hidden(y) + 1


@torch.compiler.disable
def hidden(y):
    return y - 1


def waits(x):
    """One break, by a builtin that torch cannot see into."""
    y = x * 2
    time.sleep(0)
    return y + 1


class Loud:
    def __call__(self, y):
        print("loud")
        return y


def breaks_below(x):
    """The break is in a callee that has no graph, and adds one graph here."""
    y = x * 2
    return Loud()(y) + 1


def breaks_at_once(x):
    """A break before all work: one graph, as without it."""
    print("first")
    return x * 2


def branches(x):
    """A branch on data: a break, and two graphs: before it and after it."""
    y = x * 2
    if y.sum() > 0:
        return y + 1
    return y - 1


def helper(x):
    return x * 2


def unrolls(x):
    """A loop that runs three times: three inlined calls, three multiplications."""
    for _ in range(3):
        x = helper(x)
    return x + 1


def loops(x):
    """Loops whose bodies begin with more than a line: six times, of which three skip; two times, with
    four inside; three; two."""
    for i in range(6):
        if i % 2:
            continue
        x = x + i
    for _ in range(2):
        for j in range(4):
            x = (lambda y: y * j)(x)
    for i in range(3):
        x = torch.add(
            x,
            i,
        )
    n = 0
    while n < 2:
        with torch.no_grad():
            x = x - 1
        n += 1
    return x


def scaled(x, factor):
    """Recompiled for another size, another dtype, another ``factor``."""
    return x * factor


def takes(x, given):
    """A version for each length and type of a list, and each dtype, slice and function."""
    if isinstance(given, list | tuple):
        return x * sum(given)
    if isinstance(given, torch.dtype):
        return x.to(given)
    if isinstance(given, slice):
        return x[given] + 1
    return x * given if isinstance(given, torch.Tensor) else given(x)


def fuses(x):
    """Pointwise work on the same data: one kernel."""
    return torch.relu(x * 2 + 1) * x


def interrupted(x, w):
    """A product between two pointwise operations: they cannot share a kernel."""
    return torch.relu(torch.relu(x * 2) @ w)


def joins(x, w):
    """Both halves are written where the product reads them."""
    return torch.cat([x[:, 4:] * 2, x[:, :4] + 1], 1) @ w


def writes_input(x):
    """The write to ``x`` must reach the caller: one copy remains."""
    x.add_(1)
    return x * 2


def writes_temporary(x):
    """The write to ``y`` is nobody's business: no copy."""
    y = x * 2
    y.add_(1)
    return y * 3


def decomposes(x, w, b):
    """``linear`` is no operator that Inductor lowers: a transposition and a product with addition."""
    return F.linear(x, w, b)


def recomputes(x):
    """Backward needs ``x`` and ``sin(x)``. Saving ``x`` alone is enough: ``sin`` is cheap to repeat."""
    return torch.cos(torch.sin(x))


def saves(x, w):
    """Backward of the product needs ``relu(x)``; it is dear enough in no case to repeat a product:
    ``exp`` of it needs its result, which is saved."""
    return torch.exp(x @ w)


def unrolls_and_prints(x):
    """A break after the loop makes torch trace the loop again; it still runs three times."""
    for _ in range(3):
        x = helper(x)
    print("after")
    return x + 1


def writes_parts(x):
    """Two writes to a temporary, by subscript and by operator: each has a functional form, no copy."""
    y = x * 2
    y[0] = 5
    y += x
    return y


def writes_slices(x):
    """Two writes to slices of a temporary, and one to the input by a flag, which leaves a copy."""
    y = x * 2
    y[1:] = 5
    y[::2, None] = 6
    F.relu(x, inplace=True)
    y += x
    return y


def names_operators(x):
    """Each is one operator of ATen, under another name: nothing is decomposed."""
    y = x // 3
    y = y % 2
    y = abs(y)
    y /= 2
    return ~(y > 0)


def changes_inputs(x, y):
    """No result: a kernel for each write to an input, and the library's sort."""
    x.mul_(2)
    y.copy_(torch.sort(y)[0])


def bounded(x, y):
    """``x`` has at most 64 rows here; the columns of ``y`` are a multiple of 4."""
    if x.shape[0] > 64:
        return x + 1
    if y.shape[1] % 4 == 0:
        return x * y.sum()
    return x


def masks(x):
    """Backward of ``relu`` needs where it was positive, which forward saves and backward may overwrite."""
    return (x * 2).relu().sum(-1)


def chooses(x):
    """Both branches are compiled, and one of them runs."""
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))


def passes_through_memory(x, w):
    """Each row of the second softmax needs all of the first, so a value goes through memory from kernel to
    kernel; what is on two sides of the product could be one kernel in no way."""
    y = x.softmax(0).softmax(1)
    return torch.relu(torch.relu(y * 2) @ w) + y


def keeps_several(x, w):
    """Backward needs values of three widths, of which some are cheap to make again."""
    y = torch.exp(x @ w)
    mask = y > 1
    z = torch.cos(torch.sin(x.half()).t())
    return torch.where(mask, y, y.bfloat16().sigmoid().float()).sum() + z.float().sum()


relu = ReLUFwdOp(inplace=True)


def written_by_an_op(x):
    """An op of this library writes to a temporary and to the input: each has a functional form, and the
    second leaves a copy."""
    y = x * 2
    relu(y)
    relu(x)
    return y + x


# fmt: off
def loops_on_one_line(x):
    """Five, three and two rounds on lines of their own; two generators; a loop over a list that another
    makes; one that ends early, one that never runs; a ``while`` that nobody can count."""
    for i in range(5): x = x * i  # noqa: E701
    parts = [x + i for i in range(3)]
    total = sum(part * 2 for part in parts[:2])
    pairs = {(i, j): a - b for i, a in enumerate(parts) for j, b in enumerate(parts[1:])}
    for i in [2 * k for k in range(4)]: x = x + i  # noqa: E701
    for i in range(9):
        if i == 6:
            break
    for i in range(0): x = x + i  # noqa: E701
    n = 0
    while n < 2: x, n = x + 1, n + 1  # noqa: E701
    return x, total, pairs[2, 1]
# fmt: on


def checkpointed(x, w):
    """The product and what follows are computed again, and each has this line."""
    h = checkpoint(lambda a: torch.relu(a @ w).sin(), x, use_reentrant=False)
    return h.sum()
