"""Plain PyTorch that becomes an op: the matching, by the example of RMSNorm. What nearly is one stands in
``test_substitution_near_misses.py``, what each op is matched by in ``test_substitution_patterns.py``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tileops
from tests.rewriting import rewritten
from tests.substituting import ONLY, grads_agree, held
from tileops.backend import register_kernel_builder
from tileops.fusion import backend, cost, last_report, matching, policy

EPS = 1e-6


def rms(x, w=None, eps=EPS, dim=-1):
    """The meaning, in float64."""
    x = x.double()
    y = x / (x.square().mean(dim, keepdim=True) + eps).sqrt()
    return y if w is None else y * w.double()


def llama(x, w):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return w * x.to(dtype)


SPELLINGS = {
    "llama": llama,
    "torch": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    "weight after": lambda x, w: w * torch.rms_norm(x, (x.shape[-1],), eps=EPS),
    "quotient": lambda x, w: (
        x.float() / torch.sqrt(EPS + (x.float() * x.float()).sum(-1, keepdim=True) / x.shape[-1])
    ).type_as(x) * w[None],
    "reciprocal": lambda x, w: (
        (x.float() * w.float()) * (1 / (x.float() ** 2).mean((-1,), True).add(EPS).sqrt())
    ).to(x.dtype),
    "power": lambda x, w: torch.mul(
        (torch.square(x.float()).mean(-1)[..., None] + EPS) ** -0.5 * x.float(), w.float()
    ).to(x.dtype),
    "unsqueezed": lambda x, w: (
        x.float() * w.float() * torch.pow(x.float().square().mean(dim=-1) + EPS, -0.5).unsqueeze(-1)
    ).to(x.dtype),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_rms_norm(name, dtype, seed):
    x, w = torch.randn(3, 5, 17).to(dtype), torch.randn(17).to(dtype)
    seen = held(SPELLINGS[name], (x, w), rms, "reduction")
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(17,), eps=1e-06)"], seen.report
    assert not seen.near_misses()


def test_the_module_and_no_weight():
    module = torch.nn.RMSNorm(8)
    eps = torch.finfo(torch.float32).eps
    seen = held(module, (torch.randn(3, 8),), lambda x: rms(x, eps=eps), "reduction")
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(8,), eps=None)"]
    seen = held(lambda x: F.rms_norm(x, (5, 8), None, EPS), (torch.randn(3, 5, 8),),
                lambda x: rms(x, dim=(-2, -1)), "reduction")  # fmt: skip
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(5, 8), eps=1e-06)"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemma_is_the_op_in_float32_between_its_casts(dtype):
    """``1 + weight`` is not rounded to bfloat16, so nothing narrower than what is written would do."""

    def gemma(x, w):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        return (y * (1.0 + w.float())).type_as(x)

    x, w = torch.randn(4, 16).to(dtype), torch.randn(16).to(dtype)
    seen = held(gemma, (x, w), lambda x, w: rms(x, 1 + w.double()), "reduction")
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(16,), eps=1e-06)"]


def test_a_weight_wider_than_the_rows_stays_outside():
    x, w = torch.randn(4, 16).bfloat16(), torch.randn(16)
    seen = held(llama, (x, w), lambda x, w: rms(x).bfloat16().double() * w.double(), "reduction",
                of_rms=2**-8)  # fmt: skip
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(16,), eps=1e-06)"]


def test_what_is_made_outside_may_be_a_product_itself():
    """Of factors that are not to be mistaken for those of the norm, and with a square beside it."""

    def function(x, w):
        y = x * 3 * w
        z = y.square()
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * w * w, z

    x, w = torch.randn(4, 8), torch.randn(8)
    run, seen = rewritten(function, "always", ONLY)
    for given, wanted in zip(run(x, w), function(x, w), strict=True):
        torch.testing.assert_close(given, wanted)
    assert len(seen.substituted()) == 1


def random_spelling(draw):
    """Some way to write it: ``draw(n)`` chooses among n."""

    def square(x):
        return [lambda: x * x, lambda: x**2, lambda: x.pow(2), lambda: torch.square(x)][draw(4)]()

    def mean(x):
        n = x.shape[-1]
        return [
            lambda: x.mean(-1, keepdim=True), lambda: x.mean(-1).unsqueeze(-1), lambda: x.sum(-1, True) / n,
            lambda: x.mean(x.dim() - 1)[..., None], lambda: (1 / n) * torch.sum(x, -1, keepdim=True),
        ][draw(5)]()  # fmt: skip

    def times(*factors):
        order = list(factors)
        while len(order) > 1:
            a, b = order.pop(draw(len(order))), order.pop(draw(len(order)))
            order.append(a * b)
        return order[0]

    def function(x, w):
        wide = x.float()
        s = mean(square(wide))
        s = [lambda: s + EPS, lambda: EPS + s, lambda: s.add(EPS)][draw(3)]()
        r = [
            lambda: torch.rsqrt(s),
            lambda: 1 / s.sqrt(),
            lambda: s**-0.5,
            lambda: s.sqrt().reciprocal(),
        ]
        if draw(4):
            return times(wide, r[draw(4)](), w.float()).to(x.dtype)
        return (wide / s.sqrt() * w).to(x.dtype)

    return function


def test_random_spellings(seed):
    for _ in range(12):
        choices = torch.randint(60, (40,)).tolist()
        x, w = torch.randn(2, 4, 6).bfloat16(), torch.randn(6).bfloat16()

        def spelled(x, w, choices=choices):
            rest = iter(choices)
            return random_spelling(lambda n: next(rest) % n)(x, w)

        seen = held(spelled, (x, w), rms, "reduction")
        assert len(seen.substituted()) == 1, (choices, seen.report)


# ---- round it -----------------------------------------------------------------------------------


def test_other_users_of_a_step_keep_it():
    """Under ``always``; by itself a step is not computed twice."""

    def function(x, w):
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return n * w, n.sin()

    x, w = torch.randn(4, 8), torch.randn(8)
    run, seen = rewritten(function, "always", ONLY)
    for given, wanted in zip(run(x, w), function(x, w), strict=True):
        torch.testing.assert_close(given, wanted)
    assert len(seen.substituted()) == 1
    run, seen = rewritten(function, passes=ONLY)
    run(x, w)
    assert seen.declined()["RMSNormFwdOp"].endswith("is used beyond it and would be computed twice")


def test_what_is_written_afterwards_stays_in_order():
    def function(x, w):
        x = x + 0
        y = llama(x, w)
        x.mul_(2)
        y[0].add_(1)
        return y, x, llama(x, w)

    x, w = torch.randn(4, 8), torch.randn(8)
    for passes in (ONLY, None):
        run, seen = rewritten(function, "always", *([passes] if passes else []))
        for given, wanted in zip(run(x, w), function(x, w), strict=True):
            torch.testing.assert_close(given, wanted)
        assert len(seen.substituted()) == 2


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_serves_all_sizes(dynamic):
    module = torch.nn.RMSNorm(16)
    run, seen = rewritten(lambda x: module(x) * x.shape[1], "always", ONLY, dynamic=dynamic)
    for batch, length in ((3, 5), (4, 7), (6, 11), (5, 13)):
        x = torch.randn(batch, length, 16)
        torch.testing.assert_close(run(x), module(x) * length)
    assert len(seen.graphs) == (1 if dynamic else 2)
    assert len(seen.substituted()) == len(seen.graphs)


def test_a_last_dim_that_may_change_is_none():
    def function(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    run, seen = rewritten(function, "always", ONLY, dynamic=True)
    for size in (5, 7):
        x = torch.randn(3, size)
        torch.testing.assert_close(run(x), function(x))
    assert seen.near_misses()["RMSNormFwdOp"].startswith("normalized_shape is not fixed")
    assert len(seen.graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype):
    x, w = torch.randn(5, 16).to(dtype), torch.randn(16).to(dtype)
    for passes in (ONLY, None):
        grads_agree(llama, (x, w), rms, passes)


# ---- whether it is worth it ---------------------------------------------------------------------


def test_policies_and_the_rule(monkeypatch):
    x, w = torch.randn(4, 8), torch.randn(8)

    def found(option, function=lambda x: llama(x, w)):
        run, seen = rewritten(function, option, ONLY)
        torch.testing.assert_close(run(x), llama(x, w))
        return seen.declined().get("RMSNormFwdOp")

    def said(x):
        with policy("never"):
            return llama(x, w)

    assert found("always") is None
    assert found("never") == "policy never, by options"
    assert found("always", said) == "policy never, by call"
    assert found(None) == "on cpu its own kernel is no faster than Inductor's code"
    monkeypatch.setitem(cost.ADVANTAGE, "cpu", {"reduction": 0.1})
    assert found(None) is None


def test_a_target_serves_what_is_matched():
    def build(*specs, **params):
        return lambda x, weight: torch.full_like(x, 7.0)

    register_kernel_builder("substitution_test", "RMSNormFwdOp", build)
    x, w = torch.randn(4, 8), torch.randn(8)
    with tileops.use_target("substitution_test"):
        run, seen = rewritten(lambda x: llama(x, w) * 2)
        assert (run(x) == 14).all()
    assert len(seen.substituted()) == 1
    assert not seen.inlined()


def test_events_go_to_recordings_with_the_users_place():
    x, w = torch.randn(4, 8), torch.randn(8)
    run, seen = rewritten(lambda x: llama(x, w), "always", ONLY)
    with tileops.recording() as events:
        run(x)
    (event,) = (e for e in events if e.kind == "substituted")
    assert event.data["op"] == "RMSNormFwdOp"
    assert event.data["steps"] == 7
    lines = {stack.rstrip().splitlines()[-1].strip() for stack in event.data["stacks"]}
    assert len(lines) > 1, lines  # llama's norm is written on several lines
    assert "test_substitution.py" in str(seen.report)


def test_on_the_cpu_the_graph_stays_as_it_was_captured():
    x, w = torch.randn(4, 8), torch.randn(8)

    def function(x):
        y = llama(x, w)
        return F.silu(y[..., :4]) * y[..., 4:] + F.layer_norm(x, (8,))[..., :4]

    graphs = []
    for passes in ((), ONLY):
        run, seen = rewritten(function, passes=passes)
        run(x)
        graphs.append(str(seen.graphs[0].graph))
    assert graphs[0] == graphs[1]
    assert len(seen.declined()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_through_inductor(dtype):
    """Loss and gradients against float64; other sizes without another compilation than for dynamic ones."""

    def step(x, r, w, m):
        total = x + r
        gate, up = F.linear(llama(total, w), m).chunk(2, -1)
        return (F.silu(gate) * up + total).float().square().mean()

    def meaning(x, r, w, m):
        gate, up = F.linear(rms(x + r, w), m).chunk(2, -1)
        return (F.silu(gate) * up + x + r).square().mean()

    torch._dynamo.reset()
    count = 0

    def counting(module, inputs):
        nonlocal count
        count += 1
        return backend(module, inputs, options={"tileops.fusion": "always"})

    run = torch.compile(step, backend=counting, fullgraph=True)
    w, m = torch.randn(16), torch.randn(32, 16) / 4
    for rows in (3, 5, 8, 13):
        given = [
            t.to(dtype).requires_grad_()
            for t in (torch.randn(rows, 16), torch.randn(rows, 16), w, m)
        ]
        found = torch.autograd.grad(run(*given), given)
        exact = [t.detach().double().requires_grad_() for t in given]
        wanted = torch.autograd.grad(meaning(*exact), exact)
        rtol = 1e-4 if dtype is torch.float32 else 5e-2
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours.double() - theirs).norm() <= rtol * theirs.norm()
    assert count == 2
    assert [d["op"] for d in last_report().of("substituted")] == [
        "FusedAddRMSNormFwdOp",
        "SiLUAndMulFwdOp",
    ]


def test_substituted_code_is_plain_pytorch_again_for_a_target_that_comes_later():
    """Code that was not written with ops need not give way."""

    def build(*specs, **params):
        return lambda x, weight: torch.full_like(x, 7.0)

    register_kernel_builder("substitution_later", "RMSNormFwdOp", build)
    torch._dynamo.reset()
    x, w = torch.randn(4, 8), torch.randn(8)
    run = torch.compile(
        lambda x: llama(x, w) * 2, backend=backend, options={"tileops.fusion": "always"}
    )
    expected = llama(x, w) * 2
    torch.testing.assert_close(run(x), expected)
    assert [d["op"] for d in last_report().of("inlined")] == ["RMSNormFwdOp"]
    with tileops.use_target("substitution_later"):
        torch.testing.assert_close(run(x), expected)


def test_its_work_grows_with_the_layers_and_no_faster(monkeypatch):
    """A stream of residual sums is one sum of as many terms as there are layers."""
    steps = [0]
    real = matching.Matcher._match

    def counted(self, *args):
        steps[0] += 1
        return real(self, *args)

    monkeypatch.setattr(matching.Matcher, "_match", counted)
    w, found = torch.randn(8), []
    for layers in (8, 32):

        def model(x, layers=layers):
            for _ in range(layers):
                x = x + torch.sin(llama(x, w))
            return x

        steps[0] = 0
        rewritten(model)[0](torch.randn(4, 8))
        found.append(steps[0])
    assert found[1] < 5 * found[0], found
