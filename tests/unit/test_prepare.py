"""Kernels from shapes alone, on a machine that has no GPU, and on one that believes that it has."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch

import tileops
from tests import fake_card
from tests.op_packages import MANIFEST, MODULE, swap
from tileops import CheckError, spec
from tileops.authoring import TensorSpec
from tileops.backend import register_kernel_builder
from tileops.elementwise import AlibiFwdOp
from tileops.engine import record
from tileops.engine.cache import shelves
from tileops.engine.errors import KernelBuildError
from tileops.engine.manifest.catalog import families, load_family
from tileops.engine.places import KNOWN, place_of
from tileops.engine.prepare import Prepared, request_for
from tileops.engine.settings import settings
from tileops.engine.workloads import workload_inputs
from tileops.gemm import GEMMFwdOp
from tileops.moe import MoEExpertMLPFwdOp
from tileops.norm import FusedAddRMSNormFwdOp, RMSNormFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

HALF = torch.float16
H200 = "cuda:sm_90"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield shelves.shelves().own
    settings.cache_clear()


def norm(n=256):
    return RMSNormFwdOp(normalized_shape=(n,))


def half(*shape):
    return spec(*shape, dtype=HALF)


def test_a_kernel_is_compiled_once_and_found_ever_after(cache):
    before = record.compile_count()
    first = norm().prepare(half(8, 256), half(256), device=H200)
    assert (first.compiled, first.found, first.device) == (1, 0, "cuda:sm_90:132")
    (kernel,) = first.kernels
    assert kernel.kernel == "triton_many_short_rows"
    assert kernel.function == "tileops.norm.kernels.rows_triton:normalize_rows"
    assert (kernel.arch, kernel.origin, kernel.stack) == ("sm_90", "made", 0)
    assert 0 < kernel.registers <= 255
    assert [row.key for row in cache.rows()] == [kernel.key]
    # More rows, the same machine code.
    again = norm().prepare(half(8000, 256), half(256), device=H200)
    assert (again.compiled, again.found) == (0, 1)
    assert again.keys == first.keys
    assert record.compile_count() == before + 1
    assert str(again).endswith(f"cuda:sm_90:132: 0 compiled, 1 found in {again.seconds:.2f} s")
    elsewhere = norm().prepare(half(8, 256), half(256), device="cuda:sm_80")
    assert elsewhere.keys.isdisjoint(first.keys)


def test_tensors_count_by_shape(cache):
    key = norm().prepare(half(8, 256), half(256), device=H200).keys
    real = torch.empty(8, 256, dtype=HALF), torch.empty(256, dtype=HALF)
    for x, weight in (real, [t.to("meta") for t in real], [real[0].mT.contiguous().mT, real[1]]):
        assert norm().prepare(x, weight=weight, device=H200).keys == key
    # What changes the code changes the kernel: alignment, an omitted input, dtype.
    storage = torch.empty(8 * 256 + 1, dtype=HALF)
    others = [
        norm().prepare(storage[1:].view(8, 256), half(256), device=H200),
        norm().prepare(replace(half(8, 256), aligned=False), half(256), device=H200),
        norm().prepare(half(8, 256), device=H200),
        norm().prepare(spec(8, 256), spec(256), device=H200),
    ]
    assert others[0].keys == others[1].keys
    assert len({*(one.keys for one in others), key}) == 4


def test_what_the_call_would_refuse_is_refused(cache):
    with pytest.raises(CheckError, match=r"argument 'x': given shape \[8, 255\]"):
        norm().prepare(half(8, 255), half(256), device=H200)
    with pytest.raises(CheckError, match="'x': given None|argument 'x'"):
        norm().prepare(device=H200)
    with pytest.raises(CheckError, match="argument 'scale'.*inputs x, weight"):
        norm().prepare(half(8, 256), scale=half(256), device=H200)
    with pytest.raises(CheckError, match="positional 3"):
        norm().prepare(half(8, 256), half(256), half(256), device=H200)
    with pytest.raises(CheckError, match="argument 'out'.*no such buffer"):
        norm().prepare(half(8, 256), out=half(8, 256), device=H200)
    with pytest.raises(CheckError, match="given tuple; accepted: a TensorSpec"):
        norm().prepare((8, 256), half(256), device=H200)
    assert cache.rows() == []


def test_kernels_of_several_parts(cache):
    made = GEMMFwdOp().prepare(half(16, 4096), half(4096, 4096), device=H200)
    assert [k.function.partition(":")[2] for k in made.kernels] == ["gemm", "add_parts"]
    # Fewer multiprocessors need not be shared out: one kernel.
    few = GEMMFwdOp().prepare(half(16, 4096), half(4096, 4096), device="cuda:sm_90:8")
    assert [k.function.partition(":")[2] for k in few.kernels] == ["gemm"]
    assert few.device == "cuda:sm_90:8"


def test_tables_are_not_made_where_the_card_is_not(cache):
    op = RoPENeoxPositionIdsFwdOp(max_position=4096)
    made = op.prepare(half(16, 8, 128), spec(16, dtype=torch.int64), device=H200)
    assert [k.function.partition(":")[2] for k in made.kernels] == ["rotate"]


def test_what_has_nothing_to_compile_says_so(cache):
    (kernel,) = GEMMFwdOp().prepare(half(4096, 4096), half(4096, 4096), device=H200).kernels
    assert (kernel.kernel, kernel.key, kernel.note) == (
        "cublas", None, "nothing to compile: torch's own kernels",
    )  # fmt: skip
    (kernel,) = norm().prepare(spec(8, 256), spec(256), device="cpu").kernels
    assert kernel.kernel in ("decomposition", "inductor")
    for device in (None, "cpu"):
        (kernel,) = AlibiFwdOp(num_heads=8, seq_len=16, device=device).prepare(device="cpu").kernels
        assert kernel.note == "nothing to compile: torch's own kernels"
    assert cache.rows() == []


def test_an_op_that_takes_no_tensors(cache):
    alone = AlibiFwdOp(num_heads=8, seq_len=16).prepare(device=H200)
    (kernel,) = alone.kernels
    assert (kernel.kernel, kernel.origin, kernel.stack) == ("triton_alibi", "made", 0)
    assert [row.key for row in cache.rows()] == [kernel.key]
    # The op's own device need not be here either, and another's is where its call will be.
    for device, expected in (("cuda", alone.keys), ("cpu", frozenset())):
        op = AlibiFwdOp(num_heads=8, seq_len=16, device=device)
        assert op.prepare(device=H200).keys == expected

        def function(x, op=op):
            return x + op()

        assert tileops.prepare(function, spec(16, 16), device=H200, progress=False).keys == expected


def test_a_foreign_target_is_named(cache):
    built = []

    def build_kernel(*specs, **params):
        built.append(specs)
        return lambda x, weight: x

    register_kernel_builder("prepared_target", "RMSNormFwdOp", build_kernel)
    op = RMSNormFwdOp(normalized_shape=(256,), target="prepared_target")
    (kernel,) = op.prepare(half(8, 256), half(256), device=H200).kernels
    assert kernel.note == "target 'prepared_target' builds it at the first call"
    assert not built
    (kernel,) = op.prepare(spec(8, 256), spec(256), device="cpu").kernels
    assert kernel.note == "target 'prepared_target' builds it"
    assert len(built) == 1


def test_a_kernel_that_does_not_compile(cache, monkeypatch):
    from tileops.lib.launch import TritonBuild

    def fail(self, arch):
        raise RuntimeError("no room")

    monkeypatch.setattr(TritonBuild, "compile_for", fail)
    with pytest.raises(KernelBuildError, match=r"RMSNormFwdOp.*triton_many_short_rows.*no room"):
        norm().prepare(half(8, 256), half(256), device=H200)
    assert cache.rows() == []
    assert list(cache.path.iterdir()) == []


def test_code_of_an_edited_text_is_used_and_not_kept(cache, monkeypatch):
    from tileops.lib import machine_code

    monkeypatch.setattr(machine_code, "still", lambda fn: False)
    (kernel,) = norm(96).prepare(half(8, 96), device=H200).kernels
    assert (kernel.origin, kernel.registers > 0) == ("made", True)
    assert cache.rows() == []


def test_a_build_that_needs_data(cache, monkeypatch):
    from tileops.norm.kernels import rows

    def entry_for(call):
        return rows.Entry(("reads",), lambda: torch.ones(3, device="cuda:0").sum().item())

    monkeypatch.setattr(rows.ManyShortRows, "entry_for", entry_for)
    with pytest.raises(KernelBuildError, match="its build cannot run without data"):
        norm().prepare(half(8, 256), device=H200)


def test_places():
    assert place_of("cuda:sm_90a").facts == place_of(H200).facts
    assert place_of("cuda:sm_90:114").facts.multiprocessors == 114
    assert place_of("cuda:sm_100").facts.arch == (10, 0)
    assert not place_of(H200).present
    assert str(place_of("cpu")) == "cpu"
    for (major, minor), (_, _, shared) in KNOWN.items():
        assert place_of(f"cuda:sm_{major}{minor}").facts.shared_memory == shared
    with pytest.raises(ValueError, match=r"'cuda:sm_70': known architectures are cuda:sm_80"):
        place_of("cuda:sm_70")


def test_a_public_spec():
    assert spec(2, 3, dtype=HALF) == TensorSpec((2, 3), HALF, torch.device("meta"), (3, 1))
    assert not spec(2, aligned=False).aligned


# ---- whole functions -------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Ops, torch's own layers, a buffer, and a branch on a shape."""

    def __init__(self, width=256):
        super().__init__()
        self.norm, self.add = norm(width), FusedAddRMSNormFwdOp()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=HALF))
        self.up = torch.nn.Linear(width, 2 * width, dtype=HALF)
        self.register_buffer("scale", torch.ones(width, dtype=HALF))

    def forward(self, x, residual=None):
        y = self.norm(x, self.weight) * self.scale
        if residual is not None:
            y, residual = self.add(y, residual, self.weight)
        return self.up(y)


def test_a_module_is_traced_without_data(cache, capfd):
    block = Block()
    made = tileops.prepare(block, half(4, 256), residual=half(4, 256), device=H200)
    assert isinstance(made, Prepared)
    assert {k.op.partition("(")[0] for k in made.kernels} == {
        "RMSNormFwdOp",
        "FusedAddRMSNormFwdOp",
    }
    assert made.compiled == 2
    assert len(cache.rows()) == 2
    error = capfd.readouterr().err
    assert error.startswith("tileops: 2 kernels compiled in ")
    compiled = torch.compile(block)
    again = tileops.prepare(compiled, half(4, 256), residual=half(4, 256), device=H200)
    assert (again.compiled, again.keys) == (0, made.keys)
    assert capfd.readouterr().err == ""
    # What was prepared is what a call of that op uses.
    alone = norm().prepare(half(4, 256), half(256), device=H200)
    assert alone.keys < made.keys


def test_a_composition_is_prepared_stage_by_stage(cache):
    (workload, *_) = MoEExpertMLPFwdOp.entry.workloads
    made = workload_inputs(MoEExpertMLPFwdOp, workload, device="meta")
    prepared = made.op.prepare(**made.inputs, device=H200)
    assert {k.op.partition("(")[0] for k in prepared.kernels} == {"MoEGroupedGEMMFwdOp"}
    out = made.inputs["expert_input"]
    assert made.op.prepare(**made.inputs, out=out, device=H200).kernels == prepared.kernels


def test_a_call_that_is_made_twice_is_prepared_once(cache):
    made = tileops.prepare(lambda x: norm()(norm()(x)), half(4, 256), device=H200, progress=False)
    assert len(made.kernels) == 1


def test_inputs_that_stay_on_the_host(cache, package, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    manifest = package(swap(MANIFEST, "table: {dtype", "table: {device: cpu, dtype"), MODULE)
    cls = importlib.import_module(f"{manifest.parent.name}.ops").ScaleFwdOp
    op, table = cls(mode="b"), spec(8, dtype=torch.int64)
    alone = op.prepare(spec(4, 8), None, table, device=H200)
    traced = tileops.prepare(lambda x, t: op(x, None, t), spec(4, 8), table, device=H200)
    assert [k.kernel for k in alone.kernels] == ["decomposition"]
    assert traced.kernels == alone.kernels


def test_workers_compile_in_parallel(cache):
    sizes = [32 * n for n in range(1, 10)]

    def many(x):
        for size in sizes:
            norm(size)(x[:, :size].contiguous())

    before = record.compile_count()
    made = tileops.prepare(many, half(4, 512), device=H200, jobs=2, progress=False)
    assert made.compiled == len(sizes)
    assert record.compile_count() == before  # other processes did it
    assert len(cache.rows()) == len(sizes)
    assert all(k.registers for k in made.kernels)
    again = tileops.prepare(many, half(4, 512), device=H200, progress=False)
    assert (again.compiled, again.found) == (0, len(sizes))


def test_a_worker_that_dies_is_an_error(cache, monkeypatch):
    from tileops.engine import workers

    monkeypatch.setattr(workers, "LEAST", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")

    def two(x):
        for size in (32, 64, 96, 128):
            norm(size)(x[:, :size].contiguous())

    with pytest.raises(KernelBuildError, match="a compiling process ended with status 1"):
        tileops.prepare(two, half(4, 128), device=H200, jobs=2, progress=False)


def test_a_bar_on_a_terminal(cache, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tileops.prepare(norm(96), half(4, 96), device=H200)
    shown = capfd.readouterr().err
    assert "\rtileops: [........................] 0/1 kernels" in shown
    assert "[########################] 1/1 kernels" in shown


def test_every_workload_in_tree_is_understood(cache):
    """Which kernels, and under which names, is known of each without a GPU; nothing is compiled."""
    count = 0
    for name, path in families().items():
        for entry in load_family(path).values():
            if entry.status != "implemented" or not entry.has_boundary:
                continue
            cls = getattr(importlib.import_module(f"tileops.{name}"), entry.name)
            for workload in entry.workloads:
                made = workload_inputs(cls, workload, device="meta")
                request = request_for(made.op._state, (), made.inputs, None, place_of(H200))
                assert request.builds or request.note
                keys = {build.key_for((9, 0)) for build in request.builds}
                assert len(keys) == len(request.builds)
                count += len(keys)
    assert count > 20
    assert cache.rows() == []


# ---- with a card that is not there -------------------------------------------------------------------

PREPARE = """
from dataclasses import replace
from tests.fake_card import believe, block_triton, launches
{block}
import torch, tileops
from tileops.norm import RMSNormFwdOp
from tileops.engine import record
from tileops.engine.build import is_built
from tileops.engine.plan import build_artifact, call_spec, resolve_entry
from tileops.engine.places import place_of
believe({capturing})
op = RMSNormFwdOp(normalized_shape=(256,))
with tileops.recording() as events:
    {prepare}
x, w = torch.randn(8, 256, dtype=torch.float16), torch.ones(256, dtype=torch.float16)
call = replace(call_spec(op, (x, w), None)[0], device=place_of().facts)
assert call.device.name == "fake H200", call.device
selection, entry = resolve_entry(op, call)
run = entry.bind(build_artifact(call, selection.kernel.name, entry), call)
before = launches()
run(x, w)
origins = sorted(set(e.data["origin"] for e in events if e.kind == "loaded"))
print(launches() - before, record.compile_count(), origins)
"""
SPECS = "tileops.spec(8, 256, dtype=torch.float16), tileops.spec(256, dtype=torch.float16)"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not fake_card.available:
        pytest.skip("needs a C compiler")
    return fake_card.build_fake(tmp_path_factory.mktemp("fake"))


def child(library, cache, **parts):
    given = {"block": "", "capturing": False, "prepare": f"op.prepare({SPECS})", **parts}
    done = fake_card.run_child(PREPARE.format(**given), library, TILEOPS_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_card_that_is_here_is_loaded_too(library, tmp_path):
    assert child(library, tmp_path) == "1 1 ['disk']"  # compiled, kept, loaded from there
    # Another process: nothing is compiled, and Triton is not even imported.
    assert child(library, tmp_path, block="block_triton()") == "1 0 ['disk']"
    # Prepared, then captured without a warm-up call: all that building could need is there.
    inside = "; import torch; torch.cuda.is_current_stream_capturing = lambda: True"
    prepare = f"op.prepare({SPECS}){inside}"
    assert child(library, tmp_path, block="block_triton()", prepare=prepare) == "1 0 ['disk']"


def test_a_capture_without_preparation_is_refused(library, tmp_path):
    code = PREPARE.format(block="", capturing=True, prepare="pass")
    done = fake_card.run_child(code, library, TILEOPS_CACHE_DIR=str(tmp_path))
    assert "ColdCaptureError: RMSNormFwdOp" in done.stderr
    assert "op.prepare(...)" in done.stderr


WITHOUT_TRITON = """
import sys
from dataclasses import replace
from tests.fake_card import believe
sys.modules["triton"] = None  # any import of it raises ModuleNotFoundError
import torch
from tileops.engine import plan
from tileops.engine.places import place_of
from tileops.engine.targets import Decision
from tileops.norm import RMSNormFwdOp
believe()
op = RMSNormFwdOp(normalized_shape=(256,), eps=1e-5)
x, w = torch.randn(8, 256), torch.randn(256)
call = replace(plan.call_spec(op, (x, w), None)[0], device=place_of().facts)
run, made = plan._builtin(op, call, Decision("builtin", "default"), op._state, (x, w))
torch.testing.assert_close(run(x, w), torch.nn.functional.rms_norm(x, (256,), w, 1e-5))
print(made.kernel, made.refused[0])
"""


def test_without_triton_and_without_the_code_the_decomposition_serves(library, tmp_path):
    done = fake_card.run_child(WITHOUT_TRITON, library, TILEOPS_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("decomposition ('triton_"), done.stdout
    assert "Triton is not installed" in done.stdout


@pytest.mark.parametrize(
    "device", ["sm_90", "cuda:sm_90:0", "cuda:sm_090", "cuda:cuda:sm_90", "nothing", "cuda:7"]
)
def test_devices_that_are_none(device):
    with pytest.raises(ValueError, match="cuda:sm_90"):
        place_of(device)


def test_what_a_function_makes_on_a_card_that_is_not_here(cache):
    def function(x):
        return norm()(x + torch.ones(256, dtype=HALF, device="cuda"))

    prepared = tileops.prepare(function, half(8, 256), device=H200, progress=False)
    assert [kernel.origin for kernel in prepared.kernels] == ["made"]


def test_a_branch_on_data_says_what_to_do(cache):
    def function(x):
        return norm()(x) if x.sum().item() > 0 else x

    with pytest.raises(RuntimeError) as caught:
        tileops.prepare(function, half(8, 256), device=H200, progress=False)
    assert any("prepare its parts" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((8,), "f16", TypeError), ((1.5,), HALF, TypeError), ((True,), HALF, TypeError),
        ((-1,), HALF, ValueError), ((2**62,), HALF, ValueError), ((2**64, 4), HALF, ValueError),
    ],
)  # fmt: skip
def test_specs_that_are_none(shape, dtype, error):
    with pytest.raises(error, match="spec: "):
        spec(*shape, dtype=dtype)


def test_fewer_than_one_job(cache):
    with pytest.raises(ValueError, match="jobs=0"):
        norm().prepare(half(8, 256), half(256), device=H200, jobs=0)
