"""Fixtures of the unit tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from tests.op_packages import MANIFEST, MODULE

_numbers = itertools.count()


@pytest.fixture
def package(tmp_path) -> Callable[..., Path]:
    """``package(manifest, module, **kernel modules)`` writes a package; returns its manifest."""

    def write(manifest: str = MANIFEST, module: str | None = MODULE, **kernels: str) -> Path:
        folder = tmp_path / f"outside{next(_numbers)}"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "manifest.yaml").write_text(dedent(manifest))
        if module is not None:
            (folder / "ops.py").write_text(dedent(module))
        if kernels:
            (folder / "kernels").mkdir()
            (folder / "kernels" / "__init__.py").touch()
            for name, text in kernels.items():
                (folder / "kernels" / f"{name}.py").write_text(dedent(text))
        return folder / "manifest.yaml"

    return write
