"""How many elements one program has, for every elementwise kernel."""

from __future__ import annotations

from tileops.authoring import CallSpec, Entry, Kernel

__all__ = ["BYTES", "FEW", "Tile", "Tiled", "not_filling"]

Tile = tuple[int, int]
"""Elements, and warps."""

BYTES = 2048
"""Of the widest tensor in one program of 4 warps, a 16-byte vector for each thread: the fastest of 2 to
16 KiB for SiLU on an H200."""
FEW: Tile = (512, 8)
"""Two elements for each thread."""
RESIDENT = 2048
"""Threads of one multiprocessor."""


def not_filling(call: CallSpec) -> bool:
    """Whether all threads of a call can run at once, if each has two elements."""
    (output,) = call.outputs.values()
    elements, warps = FEW
    assert output is not None
    return output.numel * 32 * warps <= elements * RESIDENT * call.device.multiprocessors


class Tiled(Kernel):
    """A kernel whose machine code is made for tiles of some size."""

    few = FEW
    """Of a call that does not fill the card."""
    bytes = BYTES

    @classmethod
    def itemsize(cls, call: CallSpec) -> int:
        """Bytes of an element of the widest tensor as long as the output."""
        raise NotImplementedError(f"{cls.__name__} must define itemsize")

    @classmethod
    def tile(cls, call: CallSpec) -> Tile:
        """The size by default: a call that does not fill the card waits for the work of one thread, so
        there that is little."""
        if not_filling(call):
            return cls.few
        return cls.bytes // cls.itemsize(call), 4

    @classmethod
    def entry_of(cls, call: CallSpec, tile: Tile) -> Entry:
        """The entry for tiles of this size."""
        raise NotImplementedError(f"{cls.__name__} must define entry_of")

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls.entry_of(call, cls.tile(call))

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        one, default = cls.bytes // cls.itemsize(call), cls.tile(call)
        others = ((one, 4), (2 * one, 4), (2 * one, 8), (4 * one, 8), (one, 2), cls.few)
        tiles = [default, *(tile for tile in others if tile != default)]
        return [cls.entry_of(call, tile) for tile in tiles]
