"""The conventions that calls of an op keep under ``torch.compile``, but for two that have modules of
their own: strides (``test_strides.py``) and CUDA graph capture (``tests/gpu/test_cuda_graph.py``)."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compile_contract import CASES
from tests.contract.fresh import fresh, run_fresh
from tests.contract.strides import fake_of, layout_of, meta_of, own_outputs

X = torch.arange(32.0).view(4, 8) - 11.0


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)).float()


def graphs() -> int:
    """Graphs that Dynamo has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})


# ---- 1. one instance, one graph ------------------------------------------------------------------


@fresh
def test_equal_instances_share_one_graph():
    from tileops.norm import LayerNormFwdOp

    torch._dynamo.config.error_on_recompile = True
    run = compiled(_call)
    # Spelled differently, equal once normalised.
    for op in (
        LayerNormFwdOp((8,), 1.0), LayerNormFwdOp(8, 1), LayerNormFwdOp([8], 1.0),
        LayerNormFwdOp(torch.Size([8]), eps=1), LayerNormFwdOp(normalized_shape=8, eps=1.0),
    ):  # fmt: skip
        run(op, X)
    assert graphs() == 1
    torch._dynamo.config.error_on_recompile = False
    for op in (LayerNormFwdOp(8), LayerNormFwdOp(8, 1e-5), LayerNormFwdOp(8, target=None)):
        run(op, X)
    assert graphs() == 2


@fresh
def test_instances_that_differ_never_share():
    from tileops.norm import RMSNormFwdOp

    run = compiled(_call)
    ops = [RMSNormFwdOp(8, eps) for eps in (1e-6, 10.0, None)]
    ops.append(RMSNormFwdOp(8, 1e-6, target="builtin"))
    for _ in range(2):
        for op, eps in zip(ops, (1e-6, 10.0, 2.0**-23, 1e-6), strict=True):
            torch.testing.assert_close(run(op, X), rms(X, eps), rtol=1e-6, atol=1e-6)
    assert graphs() == 4


def _call(op: Any, x: torch.Tensor) -> torch.Tensor:
    return op(x)


def _as_argument(make: Any) -> Any:
    op = make()
    return lambda x: compiled(_call)(op, x)


def _as_closure(make: Any) -> Any:
    op = make()
    return compiled(lambda x: op(x))


class _Module(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


WAYS = {
    "torch.compile(op)": lambda make: compiled(make()),
    "argument": _as_argument,
    "closure": _as_closure,
    "module": lambda make: compiled(_Module(make())),
}


@pytest.mark.parametrize("way", WAYS)
@fresh
def test_a_loop_that_makes_ops_anew_does_not_recompile(way):
    from tileops.norm import RMSNormFwdOp

    torch._dynamo.config.error_on_recompile = True
    for _ in range(20):
        result = WAYS[way](lambda: RMSNormFwdOp((8,), 1e-6))(X)
        torch.testing.assert_close(result, rms(X, 1e-6), rtol=1e-6, atol=1e-6)
        gc.collect()
    assert graphs() == 1


@fresh
def test_64_instances_in_one_function():
    from tileops.norm import RMSNormFwdOp

    ops = [RMSNormFwdOp(8, 0.01 * (i + 1)) for i in range(64)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for op in ops:
            x = op(x)
        return x

    expected = X
    for op in ops:
        expected = rms(expected, op.eps)
    for function in (chain, torch.nn.Sequential(*map(_Module, ops))):
        torch.testing.assert_close(compiled(function)(X), expected, rtol=1e-4, atol=1e-5)
    assert graphs() == 2


@fresh
def test_a_dozen_ops_compiled_one_by_one():
    from tileops.norm import LayerNormFwdOp, RMSNormFwdOp

    ops = [cls(8, 0.1 * (i + 1)) for i in range(6) for cls in (RMSNormFwdOp, LayerNormFwdOp)]
    for op in ops:
        run = op.compile(backend="aot_eager", fullgraph=True)
        centred = X - X.mean(-1, keepdim=True) if isinstance(op, LayerNormFwdOp) else X
        torch.testing.assert_close(run(X), rms(centred, op.eps), rtol=1e-6, atol=1e-6)
    assert graphs() == 12
    # Compiled by themselves, ops of any class share a frame, and with it torch's limit for one.
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    assert limit == 8
    for op in ops[:limit]:
        compiled(op)(X)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        compiled(ops[limit])(X)


@fresh
def test_an_op_made_inside_compiled_code_breaks_the_graph_and_works():
    from tileops.norm import RMSNormFwdOp

    def function(x: torch.Tensor) -> torch.Tensor:
        return RMSNormFwdOp(8, 1e-6)(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(function)(X)
    result = torch.compile(function, backend="aot_eager")(X)
    torch.testing.assert_close(result, rms(X, 1e-6), rtol=1e-6, atol=1e-6)


def _inductor_cache(cache: str) -> tuple[int, int]:
    """Hits and misses of Inductor's cache on disk when a model with two ops is compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    from tileops.elementwise import SiLUFwdOp
    from tileops.norm import RMSNormFwdOp

    norm, silu = RMSNormFwdOp(8), SiLUFwdOp()
    torch.compile(lambda x: silu(norm(x)), fullgraph=True)(X)
    counters = torch._dynamo.utils.counters
    names = ("autograd_cache_hit", "autograd_cache_miss")
    return tuple(counters["aot_autograd"][name] for name in names)


def test_a_new_process_finds_the_compiled_code_of_the_last(tmp_path):
    assert run_fresh(_inductor_cache, cache=str(tmp_path)) == (0, 1)
    assert run_fresh(_inductor_cache, cache=str(tmp_path)) == (1, 0)


def _export(path: str) -> list[list[float]]:
    from tileops.norm import RMSNormFwdOp

    program = torch.export.export(_Module(RMSNormFwdOp(8, 0.5)), (X,))
    names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert names == ["tileops.norm_rms_norm_fwd.default"], names
    torch.export.save(program, path)
    return rms(X, 0.5).tolist()


def _load(path: str) -> list[list[float]]:
    import tileops.norm.rms_norm  # noqa: F401  (defines the operator, makes no op)

    return torch.export.load(path).module()(X).tolist()


def test_an_exported_program_makes_its_ops_again(tmp_path):
    path = str(tmp_path / "norm.pt2")
    expected, result = run_fresh(_export, path=path), run_fresh(_load, path=path)
    torch.testing.assert_close(torch.tensor(result), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@fresh
def test_a_gradient_that_does_not_flow_is_refused_at_backward_and_not_before(backend):
    from tileops.engine.errors import BackwardError
    from tileops.norm import BatchNormFwdOp

    op, mean, var = BatchNormFwdOp(), torch.rand(8, requires_grad=True), torch.rand(8) + 0.1

    def normal(x, mean, var):
        return op(x, mean, var)[0]

    result = (normal if backend == "eager" else compiled(normal, backend=backend))(X, mean, var)
    assert result.requires_grad
    torch.testing.assert_close(result.detach(), (X - mean.detach()) / (var + 1e-5).sqrt())
    match = "BatchNormFwdOp declares no backward for argument 'running_mean'"
    with pytest.raises(BackwardError, match=match):
        result.sum().backward()
    assert mean.grad is None


# ---- 3. meta and fake tensors --------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@fresh
def test_meta_and_fake_tensors_return_at_the_fake(name):
    from tileops.engine.record import build_count

    call = CASES[name].make(6)
    mode = FakeTensorMode()
    inputs = {"meta": meta_of(call.inputs), "fake": fake_of(mode, call.inputs)}
    promised = {}
    for kind, tensors in inputs.items():
        call.inputs = tensors
        before = {n: layout_of(t) for n, t in tensors.items() if t is not None}
        for function in [call.op, compiled(call.op)] if kind == "meta" else [call.op]:
            with mode if kind == "fake" else torch.no_grad():
                result = call.run(function)
                promised[kind] = own_outputs(call, result)
            results = result if isinstance(result, tuple) else (result,)
            for value in results:
                assert value is None or value.device.type == ("meta" if kind == "meta" else "cpu")
            assert {n: layout_of(t) for n, t in tensors.items() if t is not None} == before
    assert build_count() == 0
    real = CASES[name].make(6)
    assert promised["meta"] == promised["fake"] == own_outputs(real, real.run())
    assert build_count() == 1


# ---- 5. devices, targets, failed builds ----------------------------------------------------------


@fresh
def test_another_device_rebuilds_where_the_build_depends_on_it():
    from tileops.backend import DeviceFacts, register_device_facts
    from tileops.engine.record import build_count
    from tileops.norm import RMSNormFwdOp

    op = RMSNormFwdOp(8, 1e-6)
    run = compiled(lambda x: op(x))
    torch._dynamo.config.error_on_recompile = True
    seen = []
    # One machine has one CPU, so its index stands for the card: what makes a build another one.
    for index in (0, 1, 1, 0, 2):
        register_device_facts("cpu", lambda device, i=index: DeviceFacts("cpu", i))
        for call in (op, run):
            torch.testing.assert_close(call(X), rms(X, 1e-6), rtol=1e-6, atol=1e-6)
        seen.append(build_count())
    assert seen == [1, 2, 2, 2, 3]
    assert graphs() == 1


@fresh
def test_a_foreign_build_is_one_for_each_device_type_and_index():
    from dataclasses import replace

    from tileops.backend import register_kernel_builder
    from tileops.engine.plan import call_spec, external
    from tileops.engine.targets import Decision
    from tileops.norm import RMSNormFwdOp

    devices = []

    def build_kernel(x: Any, weight: Any, **params: Any) -> Any:
        devices.append(str(x.device))
        return lambda x, weight: x

    register_kernel_builder("foreign", "RMSNormFwdOp", build_kernel)
    op = RMSNormFwdOp(8, target="foreign")
    call, _ = call_spec(op, (X, None), None)
    for name in ("cpu", "cuda:0", "cuda:1", "cuda:0", "cpu"):
        there = replace(call.spec("x"), device=torch.device(name))
        moved = replace(call, inputs={"x": there, "weight": None})
        external(op, moved, Decision("foreign", "op"))
    assert devices == ["cpu", "cuda:0", "cuda:1"]


def _foreign(behaviour: list[str]) -> list[str]:
    """Register target ``foreign``, whose builds do as the list says; gives the log of its builds."""
    from tileops.backend import register_kernel_builder

    log: list[str] = []

    def build_kernel(*specs: Any, eps: float, **params: Any) -> Any:
        log.append(behaviour[min(len(log), len(behaviour) - 1)])
        if log[-1] == "fail":
            raise RuntimeError("the compiler crashed")
        return lambda x, weight: rms(x, eps) + 1.0

    register_kernel_builder("foreign", "RMSNormFwdOp", build_kernel)
    return log


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@fresh
def test_an_explicit_target_holds_in_the_first_compiled_call(backend):
    import tileops
    from tileops.norm import RMSNormFwdOp

    log = _foreign(["serve"])
    op = RMSNormFwdOp(8, 1e-6, target="foreign")
    with tileops.use_target("builtin"):
        result = compiled(op, backend=backend)(X)
    torch.testing.assert_close(result, rms(X, 1e-6) + 1.0)
    assert (op.serving_target, op.last_call.decided_by) == ("foreign", "op")
    assert log == ["serve"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@fresh
def test_a_failed_build_pins_nothing(backend):
    import tileops
    from tileops.engine.errors import KernelBuildError
    from tileops.norm import RMSNormFwdOp

    log = _foreign(["fail", "fail", "serve"])
    torch._dynamo.config.error_on_recompile = True
    op = RMSNormFwdOp(8, 1e-6)
    run = compiled(lambda x: op(x), backend=backend)
    with tileops.use_target("foreign"):
        for _ in range(2):
            with pytest.raises(KernelBuildError, match=r"'foreign'.*the compiler crashed"):
                run(X)
            assert op.last_call is None
    # Decided afresh: by another target, then by the same one, which has recovered.
    torch.testing.assert_close(run(X), rms(X, 1e-6), rtol=1e-6, atol=1e-6)
    assert op.serving_target == "builtin"
    with tileops.use_target("foreign"):
        torch.testing.assert_close(run(X), rms(X, 1e-6) + 1.0)
    assert log == ["fail", "fail", "serve"]
    assert graphs() == 1


@pytest.mark.parametrize("serves", [("RMSNormFwdOp", "RMSNormBwdOp"), ("RMSNormFwdOp",)])
@fresh
def test_a_target_serves_the_gradients_that_it_has(serves):
    """Of the call, wherever its backward runs; what it has no builder of is left to the next in order."""
    import tileops
    from tileops.backend import register_kernel_builder
    from tileops.norm import RMSNormFwdOp

    def forward(*specs: Any, eps: float, **params: Any) -> Any:
        return lambda x, weight: rms(x, eps)

    def backward(*specs: Any, **params: Any) -> Any:
        return lambda grad, x, weight: (torch.full_like(x, 7.0), None)

    register_kernel_builder("foreign", "RMSNormFwdOp", forward)
    if "RMSNormBwdOp" in serves:
        register_kernel_builder("foreign", "RMSNormBwdOp", backward)
    x = X.clone().requires_grad_()
    (meant,) = torch.autograd.grad(rms(x, 1e-6).sum(), x)
    expected = torch.full_like(X, 7.0) if "RMSNormBwdOp" in serves else meant
    in_context, named = RMSNormFwdOp(8, 1e-6), RMSNormFwdOp(8, 1e-6, target="foreign")
    with tileops.use_target("foreign"):
        by_context = in_context(x)
    for result, op in ((by_context, in_context), (named(x), named)):
        assert op.serving_target == "foreign"
        found = [None]
        thread = threading.Thread(
            target=lambda r=result, f=found: f.append(torch.autograd.grad(r.sum(), x)[0])
        )  # as autograd's own for a card, which sees no context
        thread.start()
        thread.join()
        torch.testing.assert_close(found[-1], expected, rtol=1e-5, atol=1e-5)


@fresh
def test_a_failed_build_in_tree_pins_nothing():
    from tileops.authoring import Entry, Kernel
    from tileops.engine import plan
    from tileops.engine.errors import KernelBuildError
    from tileops.norm import RMSNormFwdOp

    crashes = [MemoryError("out of registers")]

    def build() -> Any:
        if crashes:
            raise crashes.pop()
        return lambda x, weight: rms(x, 1e-6)

    class Flaky(Kernel):
        name = "flaky"
        devices = ("cpu",)

        @classmethod
        def entry_for(cls, call: Any) -> Entry:
            return Entry(("flaky",), build)

    plan.in_tree_kernels = lambda cls, device_type: [Flaky]
    op = RMSNormFwdOp(8, 1e-6)
    run = compiled(op)
    with pytest.raises(
        KernelBuildError, match=r"'builtin' failed to build flaky.*out of registers"
    ):
        run(X)
    assert op.last_call is None
    torch.testing.assert_close(run(X), rms(X, 1e-6))
    assert graphs() == 1
