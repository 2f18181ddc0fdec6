"""The Liger target: installed by pip, loaded lazily, declining what Liger does not serve."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.contract.children import LIGER, in_child, refused, rms, search_path, warned

CUDA = torch.device("cuda", 0)


LOADS = """
import sys, tileops
print(tileops.registered_targets(), "liger_kernel" in sys.modules, "triton" in sys.modules)
import torch
print(torch.cuda.is_initialized())
"""


def test_loading_it_imports_no_compiler():
    """In an interpreter of its own: the process that others are forked from has Triton."""
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        env={**os.environ, "PYTHONPATH": search_path(LIGER)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["('builtin', 'liger') False False", "False"], done


def _declines() -> dict[str, str]:
    import tileops_target_liger as liger

    from tileops.backend import OpNotAvailableError, TensorSpec

    def spec(*shape: int, dtype: torch.dtype = torch.float16, device: torch.device = CUDA):
        return TensorSpec.contiguous_of(shape, dtype, device)

    def norm(x, weight, normalized_shape=(8,), eps=1e-6):
        return lambda: liger.build_rms_norm(
            x, weight, normalized_shape=normalized_shape, eps=eps
        )  # fmt: skip

    def silu(x):
        return lambda: liger.build_silu_and_mul(x)

    cpu, f64 = torch.device("cpu"), torch.float64
    calls = {
        "norm device": norm(spec(4, 8, device=cpu), spec(8, device=cpu)),
        "norm dims": norm(spec(4, 2, 4), spec(2, 4), (2, 4)),
        "norm weight": norm(spec(4, 8), None),
        "norm eps": norm(spec(4, 8), spec(8), eps=None),
        "norm dtype": norm(spec(4, 8, dtype=f64), spec(8, dtype=f64)),
        "norm row": norm(spec(4, 65537), spec(65537), (65537,)),
        "silu device": silu(spec(4, 16, device=cpu)),
        "silu dtype": silu(spec(4, 16, dtype=f64)),
        "silu row": silu(spec(4, 2 * 65537)),
    }
    return {name: refused(OpNotAvailableError, call) for name, call in calls.items()}


def test_what_it_declines():
    texts = in_child(_declines, installed=(LIGER,))
    for name, part in {
        "norm device": "not cpu",
        "norm dims": "not (2, 4)",
        "norm weight": "a weight",
        "norm eps": "eps",
        "norm dtype": "torch.float64",
        "norm row": "65537",
        "silu device": "not cpu",
        "silu dtype": "torch.float64",
        "silu row": "65537",
    }.items():
        assert part in texts[name]
        assert "target 'liger' does not serve this call" in texts[name]


def _empties_need_no_kernel() -> None:
    import tileops_target_liger as liger

    from tileops.backend import TensorSpec

    def spec(*shape: int) -> TensorSpec:
        return TensorSpec.contiguous_of(shape, torch.float16, CUDA)

    norm = liger.build_rms_norm(spec(0, 8), spec(8), normalized_shape=(8,), eps=1e-6)
    assert norm(torch.ones(0, 8), torch.ones(8)).shape == (0, 8)
    silu = liger.build_silu_and_mul(spec(4, 0))
    assert silu(torch.ones(4, 0, dtype=torch.float16)).shape == (4, 0)
    assert "liger_kernel" not in sys.modules


def test_empty_tensors_need_no_kernel():
    in_child(_empties_need_no_kernel, installed=(LIGER,))


def _on_the_cpu() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    text = refused(tileops.OpNotAvailableError, lambda: RMSNormFwdOp(8, 1e-6, target="liger")(x))
    assert "it needs a weight" in text
    op = RMSNormFwdOp(8, 1e-6)
    with tileops.use_target("liger"), warned() as texts:
        torch.testing.assert_close(op(x, weight), expected)
    assert op.serving_target == "builtin"
    assert len(texts) == 1
    assert "it serves cuda devices, not cpu" in texts[0]


def test_on_the_cpu_builtin_serves():
    in_child(_on_the_cpu, installed=(LIGER,))


def _on_a_card() -> tuple[bool, str]:
    from tileops.backend.testkit import check_target

    report = check_target("liger", device="cuda")
    return report.ok, str(report)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_on_a_card_it_conforms():
    ok, text = in_child(_on_a_card, installed=(LIGER,))
    print(text)
    assert ok, text
