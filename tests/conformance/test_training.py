"""Gradients in the situations of training: partial, repeated, recomputed, scaled, compiled."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.contract.fresh import clean_environment
from tests.joint import compiled
from tests.llama import Block
from tests.oracle import same_bits
from tileops.attention import GQADenseFwdOp
from tileops.elementwise import MishFwdOp, MulFwdOp, SiLUAndMulFwdOp, SiLUFwdOp
from tileops.engine.errors import BackwardError
from tileops.gemm import GEMMFwdOp
from tileops.norm import BatchNormFwdOp, FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def operators(*classes):
    return {one.overload for cls in classes for one in cls._boundary.operators}


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of this package that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tileops":
            self.seen.append(function.name().removeprefix("tileops::"))
        return function(*args, **(kwargs or {}))


# ---- what arrives ------------------------------------------------------------------------------


ARRIVING = {
    "expanded": lambda shape: torch.randn(()).expand(shape),
    "expanded rows": lambda shape: torch.randn(shape[-1]).expand(shape),
    "sliced": lambda shape: torch.randn(2 * shape[0], shape[1] + 3)[::2, 1:-2],
    "transposed": lambda shape: torch.randn(shape[::-1]).t(),
    "negated": lambda shape: torch._neg_view(torch.randn(shape)),
    "nan": lambda shape: torch.full(shape, torch.nan),
}


@pytest.mark.parametrize("way", ARRIVING)
def test_incoming_gradients(way):
    calls = (
        (RMSNormFwdOp(16), lambda x: F.rms_norm(x, (16,)), torch.randn(5, 16)),
        (SiLUAndMulFwdOp(), lambda x: F.silu(x[:, :7]) * x[:, 7:], torch.randn(5, 14)),
        (GEMMFwdOp(), lambda a, b: a @ b.t(), torch.randn(5, 3), torch.randn(7, 3)),
    )
    for op, reference, *inputs in calls:
        ours, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
        result = op(*ours)
        grad = ARRIVING[way](result.shape)
        before = grad.clone()
        result.backward(grad)
        reference(*theirs).backward(grad)
        assert same_bits(grad, before)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_gradient_of_one_output_alone(used):
    op = FusedAddRMSNormFwdOp(eps=1e-6)
    ours = [torch.randn(3, 8).requires_grad_(), torch.randn(3, 8).requires_grad_(),
            torch.randn(8).requires_grad_()]  # fmt: skip
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    results = op(*ours)
    total = theirs[0] + theirs[1]
    meant = (F.rms_norm(total, (8,), theirs[2], 1e-6), total)
    with Watching() as watch:
        sum(results[n].square().sum() for n in used).backward()
    sum(meant[n].square().sum() for n in used).backward()
    assert watch.seen == ["norm_fused_add_rms_norm_bwd"]
    for a, b in zip(ours, theirs, strict=True):
        close(a.grad, torch.zeros_like(b) if b.grad is None else b.grad)


def test_only_what_is_wanted_is_computed():
    """Where no gradient is asked for by ``requires_grad``, there is a branch that makes none."""
    op, inputs = LayerNormFwdOp(8), [torch.randn(3, 8), torch.randn(8), torch.randn(8)]
    names = [item.name for item in op.entry.inputs]
    for wanted in ([0], [1], [2], [1, 2], [0, 1, 2]):
        given = [t.clone().requires_grad_(n in wanted) for n, t in enumerate(inputs)]
        with Watching() as watch:
            op(*given).square().sum().backward()
        suffix = "".join(f"_without_grad_{names[n]}" for n in range(3) if n not in wanted)
        assert watch.seen == ["norm_layer_norm_fwd", f"norm_layer_norm_bwd{suffix}"]
        assert [n for n, t in enumerate(given) if t.grad is not None] == wanted


def test_a_derived_gradient_where_a_mode_looks_on():
    """Its own autograd begins where the dispatcher has been passed."""
    x, grad = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    (wanted,) = torch.autograd.grad(F.mish(x), x, grad)
    with Watching() as watch:
        MishFwdOp()(x).backward(grad)
    assert watch.seen == ["elementwise_mish_fwd", "elementwise_mish_bwd"]
    close(x.grad, wanted)


def test_an_input_used_twice_and_gradients_that_add_up():
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        MulFwdOp()(x, x).sum().backward()
    close(x.grad, 4 * x.detach())


def test_a_leaf_that_is_a_view_of_another():
    base = torch.randn(6, 8, requires_grad=True)
    RMSNormFwdOp(8)(base[::2]).square().sum().backward()
    other = base.detach().clone().requires_grad_()
    F.rms_norm(other[::2], (8,)).square().sum().backward()
    close(base.grad, other.grad)


def test_without_elements():
    x, weight = torch.randn(0, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    RMSNormFwdOp(8)(x, weight).sum().backward()
    assert x.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(8))


def test_a_saved_tensor_that_was_written():
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    result = RMSNormFwdOp(8)(x, weight)
    SiLUFwdOp(inplace=True)(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_hooks_and_graphs_that_stay():
    x, seen = torch.randn(3, 8, requires_grad=True), []
    result = RMSNormFwdOp(8)(x)
    result.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    result.sum().backward(retain_graph=True)
    once = x.grad.clone()
    result.sum().backward()
    assert len(seen) == 2
    assert torch.equal(x.grad, 2 * once)


def test_statistics_are_written_and_the_gradient_flows_past_them():
    x, weight = torch.randn(6, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    statistics = [torch.randn(3), torch.rand(3)]
    theirs = [t.detach().clone().requires_grad_() for t in (x, weight)]
    meant = [t.clone() for t in statistics]
    F.batch_norm(theirs[0], *meant, theirs[1], training=True).square().sum().backward()
    op = BatchNormFwdOp(training=True)
    for run in (op, compiled(lambda *args: op(*args))[0]):
        given = [t.clone() for t in statistics]
        x.grad = weight.grad = None
        run(x, *given, weight)[0].square().sum().backward()
        close(x.grad, theirs[0].grad)
        close(weight.grad, theirs[1].grad)
        for a, b in zip(given, meant, strict=True):
            close(a, b)


def test_what_has_no_gradient_says_so():
    op = GQADenseFwdOp(pos_encoding_mode="rope")
    q = torch.randn(1, 2, 2, 4, requires_grad=True)
    cos, sin = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2)
    result = op(q, q, q, rope_cos=cos, rope_sin=sin)
    with pytest.raises(BackwardError, match="GQADenseFwdOp.*argument 'rope_cos'"):
        result.sum().backward()


# ---- recomputing, scaling ------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """A norm, a product and a gate, of our ops or of PyTorch's."""

    def __init__(self, ours=True):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8) + 0.5)
        self.up = torch.nn.Parameter(torch.randn(12, 8) / 3)
        self.ops = (RMSNormFwdOp(8, eps=1e-5), GEMMFwdOp(), SiLUAndMulFwdOp()) if ours else None

    def forward(self, x):
        if self.ops is None:
            x = F.linear(F.rms_norm(x, (8,), self.weight, 1e-5), self.up)
            return F.silu(x[:, :6]) * x[:, 6:]
        norm, gemm, gate = self.ops
        return gate(gemm(norm(x, self.weight), self.up))


def gradients_of(run, module, x):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    run(module, x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


def pair():
    ours, theirs = Tiny(), Tiny(ours=False)
    theirs.load_state_dict(ours.state_dict())
    return ours, gradients_of(lambda module, x: module(x), theirs, X), theirs


X = torch.randn(5, 8)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    ours, wanted, _ = pair()
    with Watching() as watch:
        found = gradients_of(partial(checkpoint, use_reentrant=reentrant), ours, X)
    assert sum(name.endswith("_fwd") for name in watch.seen) in (5, 6), watch.seen
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


def policy_for(save, context, operator, *args, **kwargs):
    must = operator in save
    return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_selective_checkpointing_names_an_operator(way):
    ours, wanted, _ = pair()
    save = operators(GEMMFwdOp, RMSNormFwdOp)
    contexts = partial(create_selective_checkpoint_contexts, partial(policy_for, save))

    def run(module, x):
        return checkpoint(module, x, use_reentrant=False, context_fn=contexts)

    if way == "eager":
        with Watching() as watch:
            found = gradients_of(run, ours, X)
        counts = [watch.seen.count(n) for n in ("gemm_fwd", "norm_rms_norm_fwd")]
    else:
        torch._dynamo.reset()
        function, seen = compiled(lambda x: run(ours, x))
        found = gradients_of(lambda module, x: function(x), ours, X)
        counts = [1 + seen.count(n, "backward") for n in ("gemm_fwd", "norm_rms_norm_fwd")]
        assert seen.count("gemm_bwd") == 1
    assert counts == [1, 1]
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


def test_cheap_ops_are_recomputed_when_compiled():
    ours, wanted, _ = pair()
    torch._dynamo.reset()
    function, seen = compiled(ours)
    found = gradients_of(lambda module, x: function(x), ours, X)
    assert seen.count("norm_rms_norm_fwd", "backward") == 1, "kept"
    assert seen.count("gemm_fwd", "backward") == 0, "computed twice"
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_llama_block_keeps_no_more_than_plain_pytorch(dtype):
    kept, found, state = {}, {}, None
    x, positions = torch.randn(2, 64, 128, dtype=dtype), torch.arange(64).repeat(2)
    for ours in (True, False):
        torch._dynamo.reset()
        block = Block(128, 8, 2, 344, ours).to(dtype)
        state = state or block.state_dict()
        block.load_state_dict(state)
        function, seen = compiled(block)
        found[ours] = gradients_of(lambda module, x, f=function: f(x, positions), block, x)
        kept[ours] = seen.saved_bytes
    assert kept[True] <= 1.05 * kept[False], kept
    # Roundings on the way are each of the size of the gradient's rms times 2**-8.
    for a, b in zip(found[True], found[False], strict=True):
        assert (a - b).float().norm() <= (
            0.03 if dtype is torch.bfloat16 else 1e-5
        ) * b.float().norm()


def test_autocast_and_a_scaler():
    """As in a training loop: bfloat16 products by autocast, a scaled loss, unscaled gradients."""
    ours, _, theirs = pair()
    found = []
    for module in (ours, theirs):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16)
            if module is theirs
            else contextlib.nullcontext()
        ):
            loss = module(X).float().square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append([p.grad.clone() for p in module.parameters()])
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**10, "a gradient was not finite"
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()


def test_a_backward_under_autocast_is_as_one_without():
    ours = pair()[0]
    found = []
    for within in (True, False):
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ours(x).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within):  # as some do
            loss.backward()
        found.append(x.grad)
    assert same_bits(*found)


# ---- gradients of many at once, and of a traced backward ------------------------------------------


def batched_grads(op, reference, *inputs):
    """``is_grads_batched`` and ``jacobian(vectorize=True)`` take the vmap that is older than functorch."""
    inputs = [t.requires_grad_() for t in inputs]
    ours, theirs = op(*inputs), reference(*inputs)
    grads = torch.randn(3, *theirs.shape)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grads, is_grads_batched=True),
        torch.autograd.grad(theirs, inputs, grads, is_grads_batched=True),
        strict=True,
    ):
        close(a, b)
    jacobian = partial(torch.autograd.functional.jacobian, inputs=tuple(inputs))
    for a, b in zip(jacobian(op, vectorize=True), jacobian(reference), strict=True):
        close(a, b)


SMALL = {
    "rms_norm": (RMSNormFwdOp(6), lambda x, w: F.rms_norm(x, (6,), w), (3, 6), (6,)),
    "layer_norm": (
        LayerNormFwdOp(6),
        lambda x, *wb: F.layer_norm(x, (6,), *wb),
        (3, 6),
        (6,),
        (6,),
    ),
    "silu_and_mul": (SiLUAndMulFwdOp(), lambda x: F.silu(x[:, :3]) * x[:, 3:], (4, 6)),
    "gemm": (GEMMFwdOp(), lambda a, b: a @ b.t(), (3, 4), (2, 4)),
    "mul": (MulFwdOp(), torch.mul, (3, 4), (4,)),
    "silu": (SiLUFwdOp(), F.silu, (3, 4)),
}


@pytest.mark.parametrize("name", SMALL)
def test_batched_gradients(name):
    op, reference, *shapes = SMALL[name]
    batched_grads(op, reference, *(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_autograd(backend):
    """A backward that no one has run yet, alone and within a compiled step."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    norm, gate = RMSNormFwdOp(8, eps=2.0**-10), SiLUAndMulFwdOp()
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    grad = torch.randn(5, 4)
    normal = F.rms_norm(x, (8,), weight, 2.0**-10)
    meant = F.silu(F.silu(normal[:, :4]) * normal[:, 4:])
    wanted = torch.autograd.grad(meant, (x, weight), grad)

    def step():
        SiLUFwdOp()(gate(norm(x, weight))).backward(grad)

    def traced(graph):
        return torch.compile(graph, backend=backend, fullgraph=True)

    with compiled_autograd._enable(traced):
        step()
    for tensor, theirs in zip((x, weight), wanted, strict=True):
        close(tensor.grad, theirs)
        tensor.grad = None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend=backend)()
    for tensor, theirs in zip((x, weight), wanted, strict=True):
        close(tensor.grad, theirs)


# ---- compiled code ---------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_serves_every_batch(dynamic):
    ours = Tiny()
    _, _, theirs = pair()
    theirs.load_state_dict(ours.state_dict())
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(ours, backend=count, dynamic=dynamic or None, fullgraph=True)
    for batch in (3, 5, 7, 2):
        x = torch.randn(batch, 8)
        found = gradients_of(lambda module, x: run(x), ours, x)
        wanted = gradients_of(lambda module, x: module(x), theirs, x)
        for a, b in zip(found, wanted, strict=True):
            close(a, b)
    assert count.frame_count == (1 if dynamic else 2)


@pytest.mark.slow
def test_a_new_process_that_finds_compiled_code_has_the_backward(tmp_path):
    """The second finds the joint graph in Inductor's cache, and traces no backward itself."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=False,
            env=clean_environment(str(tmp_path)),
        )
        for _ in range(2)
    ]  # fmt: skip
    for run in runs:
        assert run.returncode == 0, run.stderr[-3000:]
    first, second = (run.stdout.split() for run in runs)
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("0", "1"), (first, second)


_PROCESS = """
import torch
from torch._dynamo.utils import counters
from tileops.norm import RMSNormFwdOp
torch.manual_seed(0)
op = RMSNormFwdOp(8)
x = torch.randn(3, 8, requires_grad=True)
run = torch.compile(lambda x, w: op(x.sin(), w), fullgraph=True)
run(x, torch.ones(8, requires_grad=True)).square().sum().backward()
print(x.grad.double().sum().item(), counters["aot_autograd"]["autograd_cache_hit"])
"""
