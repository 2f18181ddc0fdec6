"""Devices by name: one that is here, or an NVIDIA architecture that need not be."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from tileops.engine import targets
from tileops.engine.kernel import DeviceFacts

__all__ = ["KNOWN", "Place", "place_of"]

KNOWN = {
    # Compute capability: a card of it, multiprocessors, bytes of shared memory a block may opt into.
    (8, 0): ("A100", 108, 166912),
    (8, 6): ("A40", 84, 101376),
    (8, 9): ("L40S", 142, 101376),
    (9, 0): ("H200", 132, 232448),
    (10, 0): ("B200", 148, 232448),
    (10, 3): ("B300", 148, 232448),
    (12, 0): ("RTX PRO 6000", 188, 101376),
}
_ARCH = re.compile(r"cuda:sm_([1-9]\d*)(\d)[a-z]?(?::([1-9]\d*))?")


@dataclass(frozen=True)
class Place:
    """A device as kernels see it, and whether this process can use it."""

    facts: DeviceFacts
    device: torch.device
    present: bool

    def __str__(self) -> str:
        if self.present:
            return str(self.device)
        return f"cuda:{self.facts.arch_name}:{self.facts.multiprocessors}"


def place_of(device: str | torch.device | None = None) -> Place:
    """The place that a name means.

    None: the current CUDA device, without one the CPU. ``cuda:sm_90``: a card of that architecture,
    here or not; ``cuda:sm_90:114``: one with 114 multiprocessors. Anything else is a torch device.
    Raises ``ValueError`` for an architecture of which nothing is known.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    match = _ARCH.fullmatch(device) if isinstance(device, str) else None
    if match:
        arch = (int(match[1]), int(match[2]))
        if arch not in KNOWN:
            known = ", ".join(f"cuda:sm_{major}{minor}" for major, minor in KNOWN)
            raise ValueError(f"device {device!r}: known architectures are {known}")
        name, multiprocessors, shared = KNOWN[arch]
        count = int(match[3] or multiprocessors)
        facts = DeviceFacts("cuda", 0, arch, name, count, shared)
        return Place(facts, torch.device("cuda", 0), False)
    advice = "a torch device that is here, or an architecture such as cuda:sm_90 or cuda:sm_90:132"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {device!r}: accepted is {advice}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count or (found.index or 0) >= count:
            raise ValueError(
                f"device {device!r}: there are {count} CUDA cards; accepted is {advice}"
            )
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
    return Place(targets.device_facts(found), found, True)
