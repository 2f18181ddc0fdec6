"""The generated check of a signature that a test writes, called with tensors by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.manifests import entry_of
from tileops.engine.errors import CheckError
from tileops.engine.signature.generate import make_signature
from tileops.engine.signature.params import bind_params

__all__ = ["Check", "zeros"]


class Check:
    """The check of one signature, called with tensors by name."""

    def __init__(self, folder, signature: str):
        self.entry = entry_of(folder, signature)
        self.function = make_signature(self.entry)

    def __call__(self, given: dict, out=None, **params):
        op = SimpleNamespace(**bind_params(self.entry, (), params))
        inputs = [given.get(item.name) for item in self.entry.inputs]
        return self.function(op, *inputs, out)

    def dims(self, given: dict, **params):
        return self(given, **params)[1]

    def shapes(self, given: dict, **params):
        return [None if o is None else tuple(o[0]) for o in self(given, **params)[0]]

    def refusal(self, given: dict, out=None, **params) -> CheckError:
        with pytest.raises(CheckError) as caught:
            self(given, out, **params)
        assert caught.value.op == "ThingFwdOp"
        return caught.value


def zeros(*shape: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
