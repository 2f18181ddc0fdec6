"""The conformance kit for targets: it passes a right one, and names the faults of a wrong one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.contract.children import CPU, control, in_child, search_path
from tileops.backend.tolerances import UNIT_ROUNDOFF, compare, tolerance

Row = tuple[str, str, str, str]


def _checked(behaviour: str, ops: list[str] | None) -> tuple[bool, str, list[Row]]:
    from tileops.backend.testkit import check_target

    control().behaviour = behaviour
    report = check_target("testcpu", ops, "cpu", scale_to=1 << 14)
    return report.ok, str(report), [(r.op, r.case, r.outcome, r.detail) for r in report.results]


def test_a_right_target_passes():
    ok, text, rows = in_child(_checked, "serve", None)
    print(text)
    assert ok, text
    assert {outcome for _, _, outcome, _ in rows} == {"pass"}
    assert f"target 'testcpu' on cpu: {len(rows)} passed, 0 declined, 0 failed" in text
    cases = {(op, case.rpartition(", ")[2]) for op, case, _, _ in rows}
    for case in [
        *("llama-8b-prefill", "llama-70b-prefill", "qk-norm", "long-row"),  # each workload
        *("B=0", "B=1", "B=131", "normalized_shape=1", "normalized_shape=131"),
        *("T=float16", "T=float32", "T=float64", "without weight"),
        *("strided", "unaligned", "built twice"),
    ]:
        assert ("RMSNormFwdOp", case) in cases
    assert ("SiLUAndMulFwdOp", "N=131") in cases


FAULTS = {
    "imprecise": "times its tolerance",
    "wrong_shape": "target 'testcpu': output 'output' is",
    "wrong_dtype": "target 'testcpu': output 'output' is",
    "input": "is an input or a view of it",
    "view": "is an input or a view of it",
    "strided": "with strides",
    "two_outputs": "returned 2 outputs, not 1",
    "none": "output 'output' is missing",
    "no_tensor": "is a list, no tensor",
    "writes_input": "the kernel wrote its input",
    "kept_buffer": "two calls returned the same memory",
    "fail_build": "RuntimeError: the test compiler crashed (a target declines a call by raising Op",
    "build_nothing": "not a callable",
    "fail_run": "RuntimeError: the test device was lost",
}


def _faulty() -> dict[str, tuple[bool, str, list[Row]]]:
    from tileops.backend import register_kernel_builder

    control()
    from tileops_target_testcpu import target

    op, reports = "SiLUAndMulFwdOp", {}
    for fault in FAULTS:
        register_kernel_builder("testcpu", op, target().builders[op])  # forgets what was built
        reports[fault] = _checked(fault, [op])
    return reports


@pytest.fixture(scope="module")
def faulty() -> Any:
    return in_child(_faulty)


@pytest.mark.parametrize("behaviour", FAULTS)
def test_a_wrong_target_fails(faulty, behaviour):
    ok, text, rows = faulty[behaviour]
    assert not ok, text
    row = next(row for row in rows if row[1] == "llama-8b-ffn-prefill")
    assert row[2] == "fail", text
    assert FAULTS[behaviour] in row[3]
    assert "\n  FAIL    llama-8b-ffn-prefill" in text


def test_a_target_may_decline_but_must_serve_something():
    ok, text, rows = in_child(_checked, "decline", ["SiLUAndMulFwdOp"])
    assert {row[2:] for row in rows} == {("decline", "told to decline")}
    assert not ok
    assert "SiLUAndMulFwdOp (served no case)" in text


def test_a_kernel_that_does_not_repeat_itself_is_told():
    _, text, rows = in_child(_checked, "random", ["SiLUAndMulFwdOp"])
    notes = {case.rpartition(", ")[2]: detail for _, case, _, detail in rows}
    assert "differs from run to run" in notes["built twice"], text


# ---- other targets, made on the spot -------------------------------------------------------------


def _made(op: str, fault: str) -> tuple[bool, str]:
    """The report of a target whose kernels are the op's own definition, with one fault."""
    from tileops.backend import OpNotAvailableError, register_kernel_builder
    from tileops.backend.testkit import check_target

    name, module = {
        "cache": ("PagedKVCacheWriteFwdOp", "tileops.attention"),
        "permute": ("MoEPostPermuteFwdOp", "tileops.moe"),
        "silu": ("SiLUAndMulFwdOp", "tileops.elementwise"),
        "typo": ("RMSNormFwd", "tileops.norm"),
        "composition": ("MoEExpertMLPFwdOp", "tileops.moe"),
    }[op]
    cls = getattr(importlib.import_module(module), name, None)
    builds = 0

    def build(*specs: Any, **params: Any) -> Any:
        nonlocal builds
        builds += 1
        kind = builds % 2  # of each two builds of "built twice", another
        if fault == "wrong name":
            raise OpNotAvailableError(name, "acme", "it is another's")
        if fault == "other error":
            raise NotImplementedError("float64")
        if fault == "decides anew" and kind:
            raise OpNotAvailableError(name, "made", "bad day")

        def run(*given: torch.Tensor | None) -> Any:
            if fault == "declines late":
                raise OpNotAvailableError(name, "made", "found out late")
            inputs = given[: len(specs)]
            out = given[len(specs)] if len(given) > len(specs) else None
            result = cls.decomposition(*inputs, **params)
            if fault == "builds anew" and kind:
                result = torch.nextafter(result, torch.zeros_like(result))
            if op == "cache":
                for cache, new in zip(inputs[2:4], result, strict=True):
                    if fault != "writes nothing":
                        cache.copy_(new)
                if fault == "writes more":
                    inputs[0].zero_()
                return None
            if out is None:
                return result
            if fault != "writes nothing":
                out.copy_(result)
            return out

        return run

    register_kernel_builder("made", name, build)
    report = check_target("made", None, "cpu", scale_to=1 << 14)
    return report.ok, str(report)


@pytest.mark.parametrize("op", ["cache", "permute", "silu"])
def test_writing_ops_pass(op):
    ok, text = in_child(_made, op, "")
    assert ok, text
    if op == "permute":
        assert ", out=" in text


@pytest.mark.parametrize(
    ("op", "fault", "shown"),
    [
        ("cache", "writes nothing", "written input 'k_cache': "),
        ("cache", "writes more", "the kernel wrote its input 'k'"),
        ("permute", "writes nothing", "output 'output': nan at"),
        ("silu", "wrong name", "declined with OpNotAvailableError('SiLUAndMulFwdOp', 'acme', ...)"),
        ("silu", "other error", "NotImplementedError: float64 (a target declines a call by"),
        ("silu", "declines late", "declined at run, not at build: found out late"),
        ("silu", "decides anew", "of two builds of one spec, one served and one declined"),
        ("silu", "builds anew", "two builds of one spec gave kernels with other results"),
        ("typo", "", "tileops has no op of this name"),
        ("composition", "", "a composition has no kernel"),
    ],
)
def test_faults_of_made_targets(op, fault, shown):
    ok, text = in_child(_made, op, fault)
    assert not ok
    failed = "\n".join(line for line in text.splitlines() if line.startswith("  FAIL"))
    assert shown in failed, text


def test_a_vendors_test_file(tmp_path):
    """``parametrize_target`` as a vendor uses it: one test per case, declined cases skipped."""
    (tmp_path / "test_vendor.py").write_text(
        "from tileops.backend.testkit import parametrize_target\n"
        "from tileops_target_testcpu import control\n\n\n"
        "@parametrize_target('testcpu', ['RMSNormFwdOp'], 'cpu', scale_to=1024)\n"
        "def test_cpu(case):\n"
        "    control.behaviour = 'decline' if 'float64' in case.name else 'serve'\n"
        "    control.behaviour = 'imprecise' if 'B=1' in case.name else control.behaviour\n"
        "    case.check()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search_path(CPU)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_cpu[RMSNormFwdOp-llama-8b-prefill, B=131]" in done.stdout
    assert "AssertionError: RMSNormFwdOp, llama-8b-prefill, B=1: output 'output'" in done.stdout
    assert "decline: told to decline" in done.stdout
    assert "2 failed" in done.stdout
    assert "1 skipped" in done.stdout


# ---- the table ----------------------------------------------------------------------------------

EXACT = torch.randn(1 << 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FLOATS = list(UNIT_ROUNDOFF)
KINDS = ["pointwise", "reduction", "template"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_rounded_result_passes_and_a_coarser_one_fails(dtype, kind):
    assert compare(EXACT.to(dtype), EXACT, kind).worst <= 1 / 2
    # One bit less and two roundings still pass in a narrow dtype; a few more bits lost do not.
    u = UNIT_ROUNDOFF[dtype]
    for lost, ok in ((2, True), (64 * 256, False)):
        off = compare((EXACT * (1 + lost * u)).to(dtype), EXACT, kind)
        assert off.ok is ok, (lost, off)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_means_float32(kind):
    mantissa = EXACT.float().view(torch.int32)
    tf32 = (mantissa & ~((1 << 13) - 1)).view(torch.float32)
    assert not compare(tf32, EXACT, kind).ok
    assert not compare(EXACT.float().double(), EXACT, kind).ok


def test_what_no_tolerance_excuses():
    exact = torch.tensor([1.0, float("nan"), float("inf"), 1e6], dtype=torch.float64)
    good = torch.tensor([1.0, float("nan"), float("inf"), float("inf")], dtype=torch.float16)
    assert compare(good, exact, "pointwise").ok  # 1e6 is beyond float16
    for place, value in ((0, "nan"), (1, "0"), (2, "-inf"), (2, "1"), (3, "1")):
        bad = good.clone()
        bad[place] = float(value)
        found = compare(bad, exact, "pointwise")
        assert found.worst == float("inf"), (place, value)
        assert f"at [{place}]" in found.text
    whole = torch.arange(4)
    assert compare(whole, whole, "pointwise").ok
    assert not compare(whole + (whole == 2), whole, "pointwise").ok
    assert tolerance(torch.int32, "template").relative == 0
    assert not compare(EXACT[:3], EXACT[:4], "pointwise").ok
    eighth = torch.tensor([448.0, -448.0]).to(torch.float8_e4m3fn)
    assert compare(eighth, torch.tensor([5000.0, -500.0]).double(), "pointwise").ok
