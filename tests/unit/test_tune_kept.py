"""Choices of tuning: timed once, kept beside the kernels, used by other processes without timing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tileops
from tests.op_packages import MANIFEST
from tileops.engine import plan, tune
from tileops.engine.cache import folder, shelves
from tileops.engine.cache.entry import Stored
from tileops.engine.settings import settings

ROOT = Path(__file__).parents[2]
MODULE = '''\
"""An op with kernels that are not equally fast."""

from tileops.authoring import KernelInterface, Op


class ScaleFwdOp(Op):
    kernel = KernelInterface(cpu=("scale:Slow", "scale:Fast"))

    @staticmethod
    def decomposition(x, bias, table, *, factor, mode):
        return x * factor if bias is None else x * factor + bias
'''
KERNELS = """\
import time
from tileops.authoring import Entry, Kernel

CALLS = []


class Slow(Kernel):
    name, devices, seconds = "slow", ("cpu",), 0.002

    @classmethod
    def cost(cls, call):
        return 1.0 if cls.name == "slow" else 2.0

    @classmethod
    def entry_for(cls, call):
        def bind(_, call):
            factor = call.params.factor

            def run(x, bias, table):
                CALLS.append(cls.name)
                time.sleep(cls.seconds)
                return x * factor if bias is None else x * factor + bias

            return run

        return Entry((cls.name, IDENTITY), lambda: None, bind)


class Fast(Slow):
    name, seconds = "fast", 0.0


IDENTITY = 1
"""


@pytest.fixture
def op(package, tmp_path, monkeypatch):
    """An op on the CPU, of which the default kernel is the slow one, and an empty cache."""
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEOPS_CPU_KERNEL", "plain")
    monkeypatch.setattr(folder, "_warned", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    settings.cache_clear()
    manifest = package(MANIFEST, MODULE, scale=KERNELS)
    yield importlib.import_module(f"{manifest.parent.name}.ops").ScaleFwdOp()
    settings.cache_clear()


def kinds(events):
    return [event.kind for event in events if event.kind in ("tuned", "reused")]


def choices():
    return [row for row in shelves.shelves().own.rows() if row.kind == "choice"]


def call(op, x):
    with tileops.recording() as events:
        torch.testing.assert_close(op(x), x * 2)
    return kinds(events), op.last_call.kernel


def forget(op):
    op._state.forget()


def test_a_choice_is_timed_once_and_kept(op):
    x = torch.randn(4, 8)
    assert call(op, x) == ([], "slow")
    op.request_tune()
    assert call(op, x)[0] == ["tuned"]
    assert op.last_call.kernel != "slow"
    chosen = op.last_call.kernel
    (reason,) = (reason for name, reason in op.last_call.refused if name == "slow")
    assert (
        float(reason.removeprefix("tuned: ").split()[0]) >= 2000
    )  # µs: it sleeps as long, or longer
    assert call(op, x) == ([], chosen)
    assert len(choices()) == 1
    # Another process: plans are gone, the choice is not.
    forget(op)
    assert call(op, x) == (["reused"], chosen)
    # Other shapes, another choice.
    assert call(op, torch.randn(5, 8))[0] == ["tuned"]
    assert len(choices()) == 2


@pytest.mark.parametrize(
    ("word", "first", "again"), [("1", ["tuned"], ["reused"]), ("stored", [], []), ("0", [], [])]
)
def test_the_setting(op, monkeypatch, word, first, again):
    monkeypatch.setenv("TILEOPS_TUNE", word)
    settings.cache_clear()
    x = torch.randn(4, 8)
    assert call(op, x)[0] == first
    forget(op)
    assert call(op, x)[0] == again
    assert (op.last_call.kernel == "slow") == (first == [])


def test_stored_choices_are_used_and_nothing_is_timed(op, monkeypatch):
    x = torch.randn(4, 8)
    op.request_tune()
    op(x)
    chosen = op.last_call.kernel
    op._state.tune = False
    forget(op)
    assert call(op, x) == ([], "slow")  # nobody asks for tuning
    forget(op)
    monkeypatch.setenv("TILEOPS_TUNE", "stored")
    settings.cache_clear()
    assert call(op, x) == (["reused"], chosen)
    assert call(op, torch.randn(3, 8)) == ([], "slow")


def test_never_in_a_capture(op, monkeypatch):
    x = torch.randn(4, 8)
    op.request_tune()
    monkeypatch.setattr(plan, "_capturing", lambda call: True)
    monkeypatch.setattr(plan, "is_built", lambda identity: True)
    assert call(op, x) == ([], "slow")
    assert choices() == []


def test_a_choice_of_other_candidates_is_not_used(op):
    x = torch.randn(4, 8)
    op.request_tune()
    op(x)
    kernels = sys.modules[f"{type(op).kernel_package}.kernels.scale"]
    kernels.IDENTITY = 2
    forget(op)
    assert call(op, x)[0] == ["tuned"]
    assert len(choices()) == 2


@pytest.mark.parametrize(
    "facts", [{}, {"choice": "another kernel"}, {"choice": 7}, {"choice": None}]
)
def test_a_choice_that_means_nothing_is_made_again(op, facts):
    x = torch.randn(4, 8)
    op.request_tune()
    op(x)
    (row,) = choices()
    shelves.shelves().own.replace(Stored("choice", row.key, facts))
    forget(op)
    assert call(op, x)[0] == ["tuned"]
    forget(op)
    assert call(op, x)[0] == ["reused"]


def test_a_damaged_choice_is_made_again(op):
    x = torch.randn(4, 8)
    op.request_tune()
    op(x)
    (row,) = choices()
    path = shelves.shelves().own.path / f"{row.key}.choice"
    path.write_bytes(path.read_bytes()[:-3])
    forget(op)
    with pytest.warns(RuntimeWarning, match="checksum is wrong"):
        assert call(op, x)[0] == ["tuned"]
    forget(op)
    assert call(op, x)[0] == ["reused"]


def test_candidates_that_no_other_process_would_know(op, monkeypatch):
    """Their choice serves this process and is not kept."""
    kernels = sys.modules.get(f"{type(op).kernel_package}.kernels.scale")
    kernels = kernels or importlib.import_module(f"{type(op).kernel_package}.kernels.scale")
    kernels.IDENTITY = object()
    x = torch.randn(4, 8)
    op.request_tune()
    assert call(op, x)[0] == ["tuned"]
    assert choices() == []


def test_bundles_carry_choices(tmp_path, op, monkeypatch):
    from tileops.engine.cache.bundle import write_bundle

    x = torch.randn(4, 8)
    op.request_tune()
    op(x)
    own = shelves.shelves().own
    (row,) = choices()
    write_bundle(tmp_path / "b", [own.read(row.kind, row.key)])
    own.clear()
    monkeypatch.setattr(shelves, "_loaded", [])
    tileops.load_bundle(tmp_path / "b")
    forget(op)
    assert call(op, x)[0] == ["reused"]


CHILD = """
import sys, json, torch, tileops
sys.path.insert(0, sys.argv[1])
import importlib
op = importlib.import_module(sys.argv[2]).ScaleFwdOp()
with tileops.recording() as events:
    op(torch.ones(4, 8))
print(json.dumps([[e.kind for e in events if e.kind in ("tuned", "reused")], op.last_call.kernel]))
"""


def test_another_process_uses_it(op, tmp_path):
    name = type(op).__module__
    environment = {
        **os.environ,
        "TILEOPS_TUNE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    found = [
        json.loads(
            subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), name], env=environment,
                           capture_output=True, text=True, check=True).stdout
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [kind for kind, _ in found] == [["tuned"], ["reused"]]
    assert found[0][1] == found[1][1] != "slow"


def test_the_key_holds_the_call_and_the_card():
    from dataclasses import replace

    from tests.kernel_calls import call_of, shapes

    x = shapes(x=((4, 8), torch.float16))
    base = call_of("RMSNormFwdOp", x, x, arch=(9, 0))
    other = shapes(x=((5, 8), torch.float16))
    calls = [
        base,
        replace(base, key="RMSNormFwdOp()"),
        call_of("RMSNormFwdOp", other, other, arch=(9, 0)),
        call_of("RMSNormFwdOp", x, x, arch=(8, 0)),
        call_of("RMSNormFwdOp", x, x, arch=(9, 0), multiprocessors=114),
        call_of("RMSNormFwdOp", x, x, arch=(9, 0), written=("x",)),
        replace(base, device=replace(base.device, name="another card")),
    ]
    assert len({tune._key(one, ["a"]) for one in calls}) == len(calls)
    assert tune._key(base, ["a"]) != tune._key(base, ["b"])
