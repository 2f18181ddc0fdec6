"""The quantization family."""

from tileops._lazy import family_door

__getattr__, __dir__ = family_door(__name__, __path__[0])
