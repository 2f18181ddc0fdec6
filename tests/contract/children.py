"""Runs test bodies in fresh processes that see distributions installed by pip.

Discovery of plugins, registrations and the once-only warnings belong to a process; and a plugin
must be found as a user's is. So a test body is a function of a test module, and runs in a process
of its own.

The build backend, hatchling, must be in the environment (``scripts/setup.sh`` puts it there):
nothing is fetched.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.contract.fresh import ROOT, run_fresh

__all__ = [
    "BACKENDS", "BROKEN", "CPU", "EPS", "LIGER", "close", "control", "in_child", "install",
    "refused", "rms", "search_path", "warned",
]  # fmt: skip

CPU = ROOT / "tests" / "dist_cpu_target"
BROKEN = ROOT / "tests" / "dist_broken_target"
LIGER = ROOT / "examples" / "target_liger"


@functools.cache
def install(project: Path) -> Path:
    """The folder into which pip installed ``project``, for a module search path."""
    folder = Path(tempfile.mkdtemp(prefix="tileops-site-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    done = subprocess.run([*command, str(project)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"pip could not install {project} (is hatchling in this environment?)\n{done.stderr}"
    )
    return folder


def search_path(*installed: Path) -> str:
    """``PYTHONPATH`` with the folders of installed projects in front."""
    folders = [str(install(project)) for project in installed]
    return os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))


def in_child(
    body: Callable[..., Any],
    *arguments: Any,
    installed: tuple[Path, ...] = (CPU,),
    env: Mapping[str, str] = {},
) -> Any:
    """What ``body(*arguments)`` returns in a fresh process that sees ``installed`` projects.

    Raises ``AssertionError`` with the traceback of that process.
    """
    folders = [str(install(project)) for project in installed]
    env = {**env, "PYTHONPATH": search_path(*installed)}
    return run_fresh(_body, env=env, folders=folders, body=body, arguments=arguments)


def _body(folders: list[str], body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    sys.path[:0] = folders  # as PYTHONPATH does for an interpreter that starts
    return body(*arguments)


# ---- what the bodies of several modules need ----------------------------------------------------

BACKENDS = ["aot_eager", "inductor"]
EPS = 1e-6


def rms() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The class, its inputs and the result: made by nobody's kernel, but by PyTorch in float64."""
    from tileops.norm import RMSNormFwdOp

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator)
    weight = torch.randn(8, generator=generator)
    expected = F.rms_norm(x.double(), (8,), weight.double(), EPS).float()
    return RMSNormFwdOp, x, weight, expected


def control() -> Any:
    import tileops

    tileops.registered_targets()
    from tileops_target_testcpu import control

    return control


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def refused(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """The message with which ``call`` raises ``kind``, and its notes."""
    with pytest.raises(kind) as caught:
        call()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of tileops within the block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(w.message) for w in caught if str(w.message).startswith("tileops")]
