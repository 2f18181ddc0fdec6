"""The kernel cache on a card: a warm process compiles nothing and does not import Triton, a prepared op
is captured without a warm-up call, a choice of tuning is right and outlives its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

ROOT = Path(__file__).parents[2]
FIRST_CALL = """
import json, sys, torch
import tileops
from tileops.engine import record
from tileops.norm import RMSNormFwdOp
op = RMSNormFwdOp(normalized_shape=(4096,))
x, w = torch.randn(64, 4096, device="cuda").half(), torch.randn(4096, device="cuda").half()
with tileops.recording() as events:
    y = op(x, w)
    torch.cuda.synchronize()
triton = "triton" in sys.modules
wanted = torch.nn.functional.rms_norm(x.double(), (4096,), w.double(), torch.finfo(torch.float32).eps)
torch.testing.assert_close(y.double(), wanted, rtol=2e-3, atol=2e-3)
kinds = [event.kind for event in events if event.kind in ("tuned", "reused")]
print(json.dumps([record.compile_count(), triton, kinds]))
"""


def process(code: str, **environment: str) -> list:
    paths = os.pathsep.join([str(ROOT), *sys.path])
    whole = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing(tmp_path):
    cold = process(FIRST_CALL, TILEOPS_CACHE_DIR=str(tmp_path))
    assert cold == [1, True, []]
    assert process(FIRST_CALL, TILEOPS_CACHE_DIR=str(tmp_path)) == [0, False, []]
    bundle = tmp_path / "norm.bundle"
    code = f"import tileops; tileops.bundle({str(bundle)!r}); print('[]')"
    process(code, TILEOPS_CACHE_DIR=str(tmp_path))
    other = {"TILEOPS_CACHE_DIR": str(tmp_path / "other"), "TILEOPS_BUNDLE": str(bundle)}
    assert process(FIRST_CALL, **other) == [0, False, []]


def test_a_tuned_choice_is_used_by_the_next_process(tmp_path):
    tuning = {"TILEOPS_CACHE_DIR": str(tmp_path), "TILEOPS_TUNE": "1"}
    assert process(FIRST_CALL, **tuning)[2] == ["tuned"]
    assert process(FIRST_CALL, **tuning) == [0, False, ["reused"]]


PREPARED = """
import json, torch
import tileops
from tileops.engine import record
from tileops.gemm import GEMMFwdOp
from tileops.norm import FusedAddRMSNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp
half = lambda *shape: torch.randn(*shape, device="cuda").half()
x, w, r, b = half(16, 512), half(512), half(16, 512), half(256, 512)
norm, add, gemm, soft = RMSNormFwdOp((512,)), FusedAddRMSNormFwdOp(), GEMMFwdOp(), SoftmaxFwdOp(dim=-1)
torch.mm(half(2, 2), half(2, 2))  # cuBLAS makes its handle outside a capture

def step(x, w, r, b):
    y, total = add(norm(x, w), r, w)
    return soft(gemm(y, b))

specs = [tileops.spec(*t.shape, dtype=t.dtype) for t in (x, w, r, b)]
prepared = tileops.prepare(step, *specs, progress=False)
compiled = record.compile_count()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = step(x, w, r, b)
x.copy_(half(16, 512))
graph.replay()
torch.cuda.synchronize()
eps = torch.finfo(torch.float32).eps
n = torch.nn.functional.rms_norm(x.double(), (512,), w.double(), eps) + r.double()
n = torch.nn.functional.rms_norm(n, (512,), w.double(), eps)
torch.testing.assert_close(y.double(), torch.softmax(n @ b.double().T, -1), rtol=3e-2, atol=3e-2)
print(json.dumps([record.compile_count() - compiled, len(prepared.kernels) >= 4]))
"""


def test_prepared_ops_are_captured_without_a_warm_up(tmp_path):
    assert process(PREPARED, TILEOPS_CACHE_DIR=str(tmp_path)) == [0, True]


def test_known_cards_are_as_the_table_says():
    from tileops.engine.places import KNOWN, place_of

    facts = place_of().facts
    if facts.arch in KNOWN:
        assert KNOWN[facts.arch][2] == facts.shared_memory
