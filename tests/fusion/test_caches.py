"""Compiled code that is kept on disk holds ops as code: it is found again, and only for what they are now.

Each run is a process of its own; all share one cache directory.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.fresh import run_fresh
from tests.contract.test_stale_artifacts import COUNT, X, write_package

pytestmark = pytest.mark.slow


def _run(
    root: str, cache: str, policy: str, target: bool, version: str
) -> tuple[Any, Any, int, list[str]]:
    """Result and gradient of compiled code round the op of the package in ``root``; hits of AOTAutograd's
    cache; the ops that were inlined."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    sys.path.insert(0, root)
    import tileops
    from tileops.backend import register_kernel_builder
    from tileops.fusion import backend, last_report

    if version:
        tileops.__version__ = version
    from scaling.scale import ScaleFwdOp

    op, context = ScaleFwdOp(), contextlib.nullcontext()
    if target:
        register_kernel_builder("later", "ScaleFwdOp", lambda *s, **p: lambda x, c: x * 100 + c)
        context = tileops.use_target("later")
    x = X.clone().requires_grad_()
    run = torch.compile(
        lambda x, c: op(x + 0, c) * 4, backend=backend, fullgraph=True,
        options={"tileops.fusion": policy},
    )  # fmt: skip
    with context:
        result = run(x, COUNT)
    (grad,) = torch.autograd.grad(result.sum(), x)
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return result.detach(), grad, hits, [d["op"] for d in last_report().of("inlined")]


def test_what_is_kept_is_of_the_op_the_policy_the_target_and_the_version(tmp_path):
    cache = str(tmp_path / "inductor")
    rows: list[tuple[str, dict[str, str], dict[str, Any], float, int, bool]] = [
        ("cold", {}, {}, 2, 0, True),
        ("warm", {}, {}, 2, 1, True),
        ("source", {"x * factor": "x * factor * 3"}, {}, 6, 0, True),
        ("policy", {}, {"policy": "never"}, 2, 0, False),
        # The op is a node again, in which the target is decided: the code of "policy" is right.
        ("target", {}, {"target": True}, 100, 1, False),
        ("version", {}, {"version": "999"}, 2, 0, True),
        ("warm again", {}, {}, 2, 1, True),
    ]
    for name, edits, more, factor, hits, inlined in rows:
        root = tmp_path / name
        write_package(Path(root), edits)
        asked = {"policy": "always", "target": False, "version": "", **more}
        result, grad, found, ops = run_fresh(_run, root=str(root), cache=cache, **asked)
        torch.testing.assert_close(result, (X * factor + COUNT) * 4, rtol=0, atol=0, msg=name)
        if name != "target":  # whose gradient remains the op's own
            torch.testing.assert_close(
                grad, torch.full_like(X, 4.0 * factor), rtol=0, atol=0, msg=name
            )
        assert ops == (["ScaleFwdOp"] if inlined else []), name
        assert found == hits, name
