"""The guarded plans of a repeated call: taken where nothing changed, left where anything did."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.backend import (
    default_target,
    register_kernel_builder,
    set_default_target,
    use_target,
)
from tileops.elementwise import AddFwdOp
from tileops.engine.errors import CheckError
from tileops.engine.settings import settings
from tileops.norm import RMSNormFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

EPS = 1e-5
_keys = iter(range(1, 10**6))


def _outside_torch(*specs, **params):
    """A kernel that no mode, transform or autograd of torch sees into."""

    def kernel(x, weight):
        values, scale = x.detach().numpy().astype("f8"), weight.detach().numpy().astype("f8")
        rms = (np.square(values).mean(-1, keepdims=True) + params["eps"]) ** 0.5
        return torch.from_numpy((values / rms * scale).astype("f4"))

    return kernel


register_kernel_builder("outside_torch", "RMSNormFwdOp", _outside_torch)


def warm(width=48, rows=4, target=None):
    """An op whose plan is behind a guard, and its inputs. Its key is its own: equal ops share plans."""
    op = RMSNormFwdOp(normalized_shape=(width,), eps=EPS + next(_keys) * 1e-9, target=target)
    x, weight = torch.randn(rows, width), torch.randn(width)
    for _ in range(3):
        op(x, weight)
    assert len(op._state.hots) == 1
    return op, x, weight


def expected(x, weight, eps=EPS):
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps).to(x.dtype)


def close(result, x, weight):
    torch.testing.assert_close(result, expected(x, weight), rtol=2e-2, atol=2e-2)


def test_a_repeated_call_asks_the_guard_alone(monkeypatch):
    op, x, weight = warm()
    monkeypatch.setattr(op._state, "plans", None)  # any other way would fail
    fresh = torch.randn_like(x)
    close(op(fresh, weight), fresh, weight)


def test_so_does_compiled_code(monkeypatch):
    op, x, weight = warm()
    call = torch.compile(lambda x, weight: op(x, weight), fullgraph=True)
    for _ in range(3):
        close(call(x, weight), x, weight)
    monkeypatch.setattr(op._state, "plans", None)
    close(call(x, weight), x, weight)


CHANGES = {
    "dtype": lambda x, w: (x.half(), w.half()),
    "rows": lambda x, w: (x[:3].clone(), w),
    "rank": lambda x, w: (x[None].clone(), w),
    "strides": lambda x, w: (x.t().contiguous().t(), w),
    "alignment": lambda x, w: (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), w),
    "lazy negation": lambda x, w: (torch._neg_view(x), w),
    "a parameter": lambda x, w: (x, torch.nn.Parameter(w, requires_grad=False)),
    "an inference tensor": lambda x, w: (_inference(x), w),
}


def _inference(x):
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_in_a_tensor(change):
    op, x, weight = warm()
    for _ in range(3):
        given = CHANGES[change](torch.randn_like(x), weight)
        close(op(*given), given[0].resolve_neg(), given[1])
    close(op(x, weight), x, weight)


def test_what_a_kernel_is_told_of_alignment():
    op, x, weight = warm()
    moved = CHANGES["alignment"](x, weight)[0]
    assert moved.data_ptr() % 16
    for given in (moved, x, moved):
        for _ in range(3):
            op(given, weight)
        assert op.last_call.call.spec("x").aligned == (given is x)


def test_shapes_that_do_not_fit_are_still_refused():
    op, x, weight = warm()
    with pytest.raises(CheckError):
        op(torch.randn(4, 47), weight)
    with pytest.raises(CheckError):
        op(x, weight[:-1])
    for odd in (None, 3, [x], "x", torch.nested.nested_tensor([x, x]), x.to_sparse()):
        with pytest.raises(CheckError):
            op(odd, weight)
    close(op(x, weight), x, weight)


def test_a_fake_mode_is_seen():
    op, x, weight = warm(target="outside_torch")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(op(x, weight)) is FakeTensor
        assert type(torch.ops.tileops.norm_rms_norm_fwd(x, weight, op._instance_key)) is FakeTensor


def test_a_dispatch_mode_is_seen():
    op, x, weight = warm(target="outside_torch")
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        op(x, weight)
    assert any("rms_norm_fwd" in name for name in seen)
    with FlopCounterMode(display=False):
        close(op(x, weight), x, weight)


def test_a_function_mode_is_seen():
    op, x, weight = warm(target="outside_torch")
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        op(x, weight)
    assert any("rms_norm_fwd" in str(function) for function in seen)


def test_a_transform_is_seen():
    op, x, weight = warm(target="outside_torch")
    many = torch.randn(3, 4, 48)
    result = torch.func.vmap(lambda one: op(one, weight))(many)
    torch.testing.assert_close(result, expected(many, weight), rtol=1e-3, atol=1e-3)


def test_a_tangent_is_seen():
    op, x, weight = warm(target="outside_torch")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        try:
            result = op(dual, weight)
        except Exception as error:  # refused by name, or carried: never dropped
            assert "RMSNormFwdOp" in str(error)
        else:
            assert forward_ad.unpack_dual(result).tangent is not None


def test_a_gradient_is_seen_and_no_grad_is():
    op, x, weight = warm(target="outside_torch")
    leaf = torch.nn.Parameter(weight)
    for _ in range(4):
        with torch.no_grad():
            assert not op(x, leaf).requires_grad
    assert op(x, leaf).requires_grad
    with torch.inference_mode():
        assert op(x, leaf).is_inference()


def test_autocast_is_seen_and_the_result_is_the_same():
    op, x, weight = warm()
    plain = op(x, weight)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(x, weight).equal(plain)


def test_a_target_registered_later_and_one_of_the_context():
    op, x, weight = warm()
    register_kernel_builder(
        "hottest", "RMSNormFwdOp", lambda *s, **p: lambda x, w: torch.ones_like(x)
    )
    for _ in range(3):
        close(op(x, weight), x, weight)
        with use_target("hottest"):
            assert op(x, weight).eq(1).all()
    assert op.last_call.target == "hottest"
    close(op(x, weight), x, weight)
    assert op.last_call.target == "builtin"


def test_a_process_default_set_later():
    op, x, weight = warm()
    register_kernel_builder(
        "hottest", "RMSNormFwdOp", lambda *s, **p: lambda x, w: torch.ones_like(x)
    )
    for _ in range(3):
        close(op(x, weight), x, weight)
    before = default_target()
    set_default_target("hottest")
    try:
        assert op(x, weight).eq(1).all()
    finally:
        set_default_target(before)
    close(op(x, weight), x, weight)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 6])
def test_whose_kernel_failed_is_said_at_every_call(fails_at):
    calls = []

    def build_kernel(*specs, **params):
        def kernel(x, weight):
            calls.append(1)
            if len(calls) == fails_at:
                raise RuntimeError("the device was lost")
            return x.clone()

        return kernel

    target = f"fails_at_{fails_at}"
    register_kernel_builder(target, "RMSNormFwdOp", build_kernel)
    op, x, weight = (
        RMSNormFwdOp(normalized_shape=(8,), target=target),
        torch.randn(2, 8),
        torch.ones(8),
    )
    for _ in range(fails_at - 1):
        op(x, weight)
    with pytest.raises(RuntimeError, match="device was lost") as caught:
        op(x, weight)
    assert [target in note for note in caught.value.__notes__] == [True]
    assert op(x, weight).equal(x)  # it stays usable


def test_a_nested_tensor_given_to_the_operator_itself():
    op, x, weight = warm()
    operator = torch.ops.tileops.norm_rms_norm_fwd.default
    operator(x, weight, op._instance_key)
    nested = torch.nested.nested_tensor([x, x])
    for given in ((nested, weight), (x, nested)):
        with pytest.raises(CheckError, match="nested"), torch.no_grad():
            operator(*given, op._instance_key)


def test_tuning_drops_the_guards():
    op, x, weight = warm()
    op.request_tune()
    assert not op._state.hots and not op._state.plans
    close(op(x, weight), x, weight)


def test_guards_are_few_and_each_shape_is_found_again():
    op, _, weight = warm()
    shapes = [torch.randn(rows, 48) for rows in range(1, 9)]
    for _ in range(4):
        for x in shapes:
            close(op(x, weight), x, weight)
        assert len(op._state.hots) <= 4
    assert len(op._state.plans) <= 9 <= settings().plan_limit


def test_one_tensor_twice_and_then_two():
    op = AddFwdOp(alpha=next(_keys))
    x, y = torch.randn(5), torch.randn(5)
    for other in (x, x, x, y, y, y, x):
        torch.testing.assert_close(op(x, other), x + op.alpha * other)
    assert len(op._state.hots) == 1


def test_without_the_class_in_torch(monkeypatch):
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    op = AddFwdOp(alpha=next(_keys))
    x, y = torch.randn(5), torch.randn(5)
    for _ in range(4):
        torch.testing.assert_close(op(x, y), x + op.alpha * y)
    assert op._state.hots == ()


# ---- calls that grow ---------------------------------------------------------------------------------


def growing_plans(op):
    return len(op._state.plans)


def test_growing_calls_share_a_plan_and_its_guard():
    op = RoPENeoxPositionIdsFwdOp(max_position=1000 + next(_keys))
    for tokens in (*range(1, 30), 0, 7):
        x = torch.randn(tokens, 2, 8)
        positions = torch.arange(tokens)
        angle = positions.double()[:, None] / 10000 ** (torch.arange(4).double() / 4)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :4].double(), x[..., 4:].double()
        wanted = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        torch.testing.assert_close(op(x, positions), wanted.float(), rtol=1e-5, atol=1e-5)
        call = op.last_call.call
        assert call.spec("x").shape == (tokens, 2, 8) == call.spec("output").shape
        assert call.dims["N"] == tokens
    assert growing_plans(op) == 1


def test_sizes_that_grow_apart_are_refused():
    op = RoPENeoxPositionIdsFwdOp(max_position=1000 + next(_keys))
    for tokens in range(2, 6):
        op(torch.randn(tokens, 2, 8), torch.arange(tokens))
    assert op._state.hots[0].grown
    with pytest.raises(CheckError, match="positions"):
        op(torch.randn(5, 2, 8), torch.arange(6))
    with pytest.raises(CheckError):
        op(torch.randn(5, 2, 7), torch.arange(5))


def test_a_rule_about_what_grows_holds_on():
    op = GQADenseFwdOp(is_causal=True, pos_encoding_mode="rope", rotary_dim=8,
                       sm_scale=1 + next(_keys) * 1e-6)  # fmt: skip
    q, tables = torch.randn(1, 1, 2, 8), torch.ones(90, 4)

    def call(keys):
        k, v = torch.randn(1, keys, 1, 8), torch.randn(1, keys, 1, 8)
        return op(q, k, v, rope_cos=tables, rope_sin=tables.clone())

    for keys in range(70, 91):
        call(keys)
    assert op._state.hots[0].grown
    with pytest.raises(CheckError, match="row for each position"):
        call(91)


def test_a_region_ends():
    op = GQADenseFwdOp(is_causal=True, window_size_left=70, sm_scale=1 + next(_keys) * 1e-6)
    q = torch.randn(1, 1, 2, 8)
    for keys in range(60, 80):
        k, v = torch.randn(1, keys, 1, 8), torch.randn(1, keys, 1, 8)
        seen = slice(max(keys - 71, 0), None)
        scores = torch.einsum("bqhd,bkgd->bhqk", q.double(), k[:, seen].double()) * op.sm_scale
        wanted = torch.einsum("bhqk,bkgd->bqhd", scores.softmax(-1), v[:, seen].double())
        torch.testing.assert_close(op(q, k, v), wanted.float(), rtol=1e-4, atol=1e-4)
    assert growing_plans(op) <= 4 + 2 + 2  # below 64 keys each number has its own


def test_a_strided_cache_grows_too():
    op = GQADenseFwdOp(is_causal=True, sm_scale=1 + next(_keys) * 1e-6)
    cache, q = torch.randn(2, 200, 1, 8), torch.randn(2, 1, 2, 8)
    for keys in range(100, 120):
        k, v = cache[:, :keys], cache[:, -keys:]  # not contiguous: two batches
        wanted = op(q, k.contiguous(), v.contiguous())
        torch.testing.assert_close(op(q, k, v), wanted, rtol=1e-5, atol=1e-5)
    assert any(hot.grown for hot in op._state.hots)


def test_writes_grow_from_nothing_and_still_see_an_overlap():
    op = PagedKVCacheWriteFwdOp()
    caches = [torch.zeros(4, 16, 1, 8) for _ in range(2)]
    for tokens in (0, 1, 2, 3, 0, 5):
        new = torch.randn(tokens, 1, 8)
        op(new, new.clone(), *caches, torch.arange(tokens))
        torch.testing.assert_close(caches[0].view(-1, 1, 8)[:tokens], new)
    assert op._state.hots[0].grown
    part = caches[0].view(-1, 1, 8)[:6]
    with pytest.raises(CheckError, match="memory shared"):
        op(part, torch.randn(6, 1, 8), *caches, torch.arange(6))


# ---- many ops ----------------------------------------------------------------------------------------


def many_norms():
    return [RMSNormFwdOp(normalized_shape=(16,), eps=EPS + n * 1e-7) for n in range(64)]


def test_64_ops_in_one_frame():
    ops, x, weight = many_norms(), torch.randn(3, 16), torch.randn(16)

    def chain(x):
        for op in ops:
            x = op(x, weight)
        return x

    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled = torch.compile(chain, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), chain(x))


def test_64_ops_compiled_one_by_one():
    x, weight = torch.randn(3, 16), torch.randn(16)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for op in many_norms():
            torch.testing.assert_close(
                op.compile(fullgraph=True, backend="eager")(x, weight), op(x, weight)
            )


def test_guards_of_a_model_of_32_layers():
    """At most three more for an op than for ``F.rms_norm``."""

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16), requires_grad=False)

        def forward(self, x):
            return F.rms_norm(x, (16,), self.weight, EPS)

    class WithOp(Plain):
        def __init__(self):
            super().__init__()
            self.op = RMSNormFwdOp(normalized_shape=(16,), eps=EPS)

        def forward(self, x):
            return self.op(x, self.weight)

    def guards(layer):
        kept = []

        def count(entries):
            kept.append(len(entries))
            return [True] * len(entries)

        torch._dynamo.reset()
        model = torch.nn.Sequential(*(layer() for _ in range(32)))
        torch.compile(model, backend="eager", fullgraph=True, options={"guard_filter_fn": count})(
            torch.randn(2, 16)
        )
        (number,) = kept
        return number

    plain, ours = guards(Plain), guards(WithOp)
    assert ours - plain <= 3 * 32, (plain, ours)
