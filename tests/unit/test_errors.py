"""Errors go from process to process: a worker's failure is its caller's."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from tileops.engine import errors

CONTAINERS: dict[str, Any] = {
    "known": ["builtin"],
    "failures": {"other": "no such module"},
    "claims": ["one", "two"],
    "refused": [("kernel", "too long")],
    "names": ["one", "two"],
}


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_is_the_same_after_a_pickle(name):
    cls = getattr(errors, name)
    parameters = inspect.signature(cls.__init__).parameters
    words = [p for p in parameters if p not in ("self", "args", "kwargs")]
    error = cls(*(CONTAINERS.get(word, f"the {word}") for word in words))
    error.add_note("while a kernel was built")
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is cls
        assert str(other) == str(error)
        assert vars(other) == vars(error)
