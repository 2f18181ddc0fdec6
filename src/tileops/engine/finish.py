"""What a call needs around its kernel: contiguous inputs, copy-back of strided written tensors, the
right device, version bumps, and the value the user gets. Decided once per plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileops.engine.errors import CheckError
from tileops.engine.kernel import CallSpec
from tileops.engine.manifest.entry import Branch

__all__ = ["finisher"]

Run = Callable[..., Any]


def finisher(
    op: Any, call: CallSpec, branch: Branch, arguments: tuple[Any, ...]
) -> Callable[[Run], Run]:
    """What gives a run all that a call of these arguments (inputs, then ``out`` where the op has it)
    needs."""
    entry = type(op).entry
    names = [*(i.name for i in entry.inputs), *(["out"] if entry.has_out else [])]
    written = [names.index(name) for name in branch.writes]
    odd = [n for n, t in enumerate(arguments) if t is not None and _is_odd(t)]
    gather = [n for n in odd if n not in written]
    copy_back = [n for n in odd if n in written]
    elsewhere = call.device.type == "cuda" and torch.cuda.device_count() > 1
    index = call.device.index

    def placed(run: Run) -> Run:
        if odd:
            run = _restrided(run, gather, copy_back)
        return _on_device(run, index) if elsewhere else run

    if branch.out:
        written.append(names.index("out"))
    if not written:
        return placed
    returned = next(
        (
            names.index("out" if output.buffer and branch.out else output.is_input)
            for output in entry.outputs
            if (output.buffer and branch.out) or output.is_input in branch.writes
        ),
        None,
    )
    growth = type(op)._growth
    growing = {n for n, places in enumerate(growth.places) if places} if growth else set()
    check = _overlaps(entry.name, names, arguments, written, growing)
    named = {n: names[n] for n in written}
    return lambda run: _writing(placed(run), check, entry.name, named, returned)


def _is_odd(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()


def _restrided(run: Run, gather: list[int], copy_back: list[int]) -> Run:
    def restrided(*args: Any) -> Any:
        values = list(args)
        for n in (*gather, *copy_back):
            values[n] = values[n].resolve_conj().resolve_neg().contiguous()
        result = run(*values)
        for n in copy_back:
            args[n].copy_(values[n])
        return result

    return restrided


def _on_device(run: Run, index: int) -> Run:
    current = torch._C._cuda_getDevice  # as torch.cuda.current_device, which first looks around

    def on_device(*args: Any) -> Any:
        if current() == index:
            return run(*args)
        with torch.cuda.device(index):
            return run(*args)

    return on_device


def _writing(
    run: Run,
    check: Callable[..., None] | None,
    op: str,
    written: dict[int, str],
    returned: int | None,
) -> Run:
    bump = torch.autograd.graph.increment_version
    inference = torch.is_inference_mode_enabled

    def writing(*args: Any) -> Any:
        # An inference tensor has no version.
        versioned = [args[n] for n in written if not args[n].is_inference()]
        if len(versioned) < len(written) and not inference():
            name = next(name for n, name in written.items() if args[n].is_inference())
            raise CheckError(op, name, "an inference tensor",
                             "a normal one outside inference mode, since it is written")  # fmt: skip
        if check is not None:
            check(args)
        try:
            result = run(*args)
        finally:  # a kernel that failed may have written some of it
            bump(versioned)
        return result if returned is None else args[returned]

    if len(written) > 1 or check is not None:
        return writing
    (place,) = written

    def writing_one(*args: Any) -> Any:
        """The same of one tensor that can overlap no other, in half the time."""
        tensor = args[place]
        if tensor.is_inference():
            return writing(*args)
        try:
            result = run(*args)
        finally:
            bump(tensor)
        return result if returned is None else args[returned]

    return writing_one


def _overlaps(
    op: str, names: list[str], arguments: tuple[Any, ...], written: list[int], growing: set[int]
) -> Callable[..., None] | None:
    """A check that each written tensor shares memory with no other argument: eager, functionalised
    and out-of-order kernels would each give another answer. None where there is no other."""
    present = [n for n, t in enumerate(arguments) if t is not None and (t.numel() or n in growing)]
    device = arguments[written[0]].device
    present = [n for n in present if arguments[n].device == device and device.type != "meta"]
    pairs = [(n, m) for n in written for m in present if n in present and m != n]
    if not pairs:
        return None
    # A contiguous tensor's extent is a fact of the plan; the strides of another are not.
    sizes = {n: arguments[n].nbytes for n in present
             if arguments[n].is_contiguous() and n not in growing}  # fmt: skip
    open_ended = [n for n in present if n not in sizes]

    def check(args: tuple[Any, ...]) -> None:
        begins = {n: args[n].data_ptr() for n in present}
        ends = {n: begins[n] + size for n, size in sizes.items()}
        for n in open_ended:
            ends[n] = begins[n] + (args[n].nbytes if args[n].is_contiguous() else _reach(args[n]))
        for n, m in pairs:
            if begins[m] < ends[n] and begins[n] < ends[m] and begins[m] < ends[m]:
                raise CheckError(
                    op, names[n], f"memory shared with argument '{names[m]}'",
                    "a written tensor that shares memory with no other argument",
                )  # fmt: skip

    return check


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to one past the last element of a tensor with any strides."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int((sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size())
