"""No op returns an input or a view of one unless its entry writes it, and writes mean one thing.

A call whose written tensor shares memory with another argument is refused; a compiled graph refuses
it alike, or computes what the call means on copies. It never gives a third result.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.cases import distinct_classes, op_classes, workload_call
from tests.oracle import call, check, exact, same_bits
from tileops import CheckError
from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.elementwise import AddFwdOp, GELUFwdOp, MulFwdOp, SiLUAndMulFwdOp, SiLUFwdOp
from tileops.gemm import GEMMFwdOp
from tileops.moe import (
    ContiguousLayoutSpec,
    MaskedLayoutSpec,
    MoEGroupedGEMMFwdOp,
    MoEPostPermuteFwdOp,
)
from tileops.norm import BatchNormFwdOp, FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

CALLED = sorted(name for name, cls in distinct_classes().items() if cls.entry.inputs)
TIGHT = ContiguousLayoutSpec.tight_per_row()


# ---- results of their own ------------------------------------------------------------------------


def assert_apart(op, inputs, function=None):
    """Change every result, then every input: neither is seen in the other."""
    results = (function or call)(op, inputs)
    results = results if isinstance(results, tuple) else (results,)
    results = [r for r in results if r is not None and all(r is not t for t in inputs.values())]
    kept = {n: t.clone() for n, t in inputs.items() if t is not None}
    for result in results:
        assert not result._is_view(), f"{op!r}: a view cannot be written where gradients are on"
        held = result.untyped_storage().nbytes()
        assert held == result.nbytes or not result.numel(), f"{op!r}: a result keeps {held} bytes"
        copy = result.clone()
        for other in results:
            if other is not result:
                other.fill_(3)
        assert same_bits(result, copy), f"{op!r}: two results share memory"
        result.fill_(2)
    for name, tensor in kept.items():
        assert same_bits(inputs[name], tensor), f"{op!r}: a result shares memory with {name}"


@pytest.mark.parametrize("name", CALLED)
def test_results_are_their_own(name, seed):
    for workload in op_classes()[name].entry.workloads:
        made = workload_call(name, workload, seed, 4096)
        assert_apart(made.op, dict(made.inputs))


ONES, X = torch.ones(3, 4), torch.arange(12.0).view(3, 4)
EMPTY = torch.empty(0, 4)
IDENTITIES = {
    "multiplied by one": (MulFwdOp(), {"input": X, "other": ONES}),
    "multiplied by a scalar one": (MulFwdOp(), {"input": X, "other": torch.ones(())}),
    "zero added": (AddFwdOp(), {"input": X, "other": torch.zeros(4)}),
    "alpha 0": (AddFwdOp(alpha=0), {"input": X, "other": X}),
    "alpha 0.0": (AddFwdOp(alpha=0.0), {"input": X, "other": X}),
    "false added": (AddFwdOp(), {"input": X > 3, "other": X > 99}),
    "nothing added": (AddFwdOp(), {"input": EMPTY, "other": EMPTY}),
    "softmax of one": (SoftmaxFwdOp(1), {"x": torch.ones(3, 1)}),
    "softmax of a scalar": (SoftmaxFwdOp(), {"x": torch.tensor(1.0)}),
    "softmax of nothing": (SoftmaxFwdOp(0), {"x": EMPTY}),
    "softmax in its own dtype": (SoftmaxFwdOp(0, dtype=torch.float32), {"x": torch.ones(1, 4)}),
    "silu of nothing": (SiLUFwdOp(), {"input": EMPTY}),
    "silu of zero": (SiLUFwdOp(), {"input": torch.zeros(2)}),
    "gelu of nothing": (GELUFwdOp(), {"input": EMPTY}),
    "silu_and_mul of nothing": (SiLUAndMulFwdOp(), {"input": EMPTY}),
    "silu_and_mul of no columns": (SiLUAndMulFwdOp(), {"input": torch.empty(3, 0)}),
    "rotated by nothing": (
        RoPENeoxPositionIdsFwdOp(9),
        {"x": torch.randn(2, 1, 4), "positions": torch.zeros(2, dtype=torch.int64)},
    ),
    "rotated in part": (
        RoPENeoxPositionIdsFwdOp(9, rotary_dim=2),
        {"x": torch.randn(2, 1, 8), "positions": torch.zeros(2, dtype=torch.int64)},
    ),
    "no head rotated": (
        RoPENeoxPositionIdsFwdOp(9),
        {"x": torch.randn(2, 0, 4), "positions": torch.zeros(2, dtype=torch.int64)},
    ),
    "no sum": (GEMMFwdOp(), {"a": torch.empty(3, 0), "b": torch.empty(4, 0)}),
    "identity matrix": (GEMMFwdOp(), {"a": X, "b": torch.eye(4)}),
    "no rows": (GEMMFwdOp(), {"a": EMPTY, "b": torch.eye(4)}),
    "normalised nothing": (RMSNormFwdOp(4), {"x": EMPTY, "weight": torch.ones(4)}),
    "layer-normalised nothing": (LayerNormFwdOp(4), {"input": EMPTY}),
    "residual of zeros": (
        FusedAddRMSNormFwdOp(),
        {"input": X.clone(), "residual": torch.zeros(3, 4), "weight": torch.ones(4)},
    ),
    "unit statistics": (
        BatchNormFwdOp(eps=0.0),
        {"input": X.clone(), "running_mean": torch.zeros(4), "running_var": torch.ones(4)},
    ),
    "one key": (GQADenseFwdOp(), dict.fromkeys("qkv", torch.randn(1, 1, 1, 4))),
    "no queries": (
        GQADenseFwdOp(),
        {"q": torch.empty(1, 0, 1, 4), **dict.fromkeys("kv", torch.randn(1, 3, 1, 4))},
    ),
    "one expert, weight 1": (
        MoEPostPermuteFwdOp(TIGHT),
        {
            "expert_output": X.clone(),
            "topk_weights": torch.ones(3, 1),
            "inverse_indices": torch.arange(3, dtype=torch.int32),
        },
    ),
    "one expert, identity": (
        MoEGroupedGEMMFwdOp(TIGHT),
        {"a": X.clone(), "b": torch.eye(4)[None], "layout_metadata": torch.zeros(3).int()},
    ),
    "no rows for experts": (
        MoEGroupedGEMMFwdOp(TIGHT),
        {"a": EMPTY, "b": torch.eye(4)[None], "layout_metadata": torch.zeros(0).int()},
    ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_call_that_changes_nothing_still_gives_a_new_tensor(name):
    op, inputs = IDENTITIES[name]
    inputs = {n: t.clone() for n, t in inputs.items()}
    check(op, inputs)
    assert_apart(op, inputs)
    assert_apart(op, inputs, lambda op, given: op._call_boundary(**_whole(op, given)))
    torch._dynamo.reset()
    assert_apart(op, inputs, torch.compile(lambda op, given: call(op, given), backend="aot_eager"))


def _whole(op, inputs):
    return {item.name: inputs.get(item.name) for item in op.entry.inputs}


@pytest.mark.parametrize("name", CALLED)
def test_one_tensor_for_every_input_of_its_kind(name, seed):
    """``op(x, x)``: inputs of equal shape and dtype that are the very same tensor."""
    made = workload_call(name, op_classes()[name].entry.workloads[0], seed, 128)
    inputs, first = dict(made.inputs), {}
    written = {i.name for i in made.op.entry.inputs if i.mutated is not None}
    for item, tensor in inputs.items():
        if tensor is not None and item not in written:
            inputs[item] = first.setdefault((tensor.shape, tensor.dtype), tensor)
    check(made.op, inputs)


# ---- writes --------------------------------------------------------------------------------------

SILU, ADD = SiLUFwdOp(inplace=True), AddFwdOp()
MASKED = MaskedLayoutSpec(4)
MOE, CACHE, BATCH = MoEGroupedGEMMFwdOp(MASKED), PagedKVCacheWriteFwdOp(), BatchNormFwdOp(True)
WEIGHTS = torch.randn(2, 4, 4)
COUNTS = torch.tensor([1, 4], dtype=torch.int32)
SLOTS = torch.tensor([3, 0])
NEW_K, NEW_V = torch.randn(2, 1, 4), torch.randn(2, 1, 4)


def moe(a):
    return exact(MOE, {"a": a, "b": WEIGHTS, "layout_metadata": COUNTS})[0][0].float()


def silu_(x):
    return F.silu(x, inplace=True)


def write(cache_k, cache_v):
    inputs = {"k": NEW_K, "v": NEW_V, "k_cache": cache_k, "v_cache": cache_v, "slot_mapping": SLOTS}
    for name, value in exact(CACHE, inputs)[1].items():
        inputs[name].copy_(value)


def halves():
    base = torch.randn(8, 4)
    return base, base[:4], base[4:]


def overlapping():
    base = torch.randn(6, 4)
    return base, base[:4], base[2:]


def square():
    return (torch.randn(4, 4),)


RIGHT = {
    "a clone is written": (square, lambda x: (SILU(x.clone()), x + 0), lambda x: (F.silu(x), x)),
    "the result is the input": (square, lambda x: x + SILU(x), lambda x: 2 * silu_(x)),
    "a clone beside its source": (
        square,
        lambda x: (lambda y: ADD(SILU(y), x))(x.clone()),
        lambda x: F.silu(x) + x,
    ),
    "twice": (square, lambda x: SILU(SILU(x)), lambda x: silu_(silu_(x))),
    "a row": (square, lambda x: SILU(x[1]) + x, lambda x: silu_(x[1]) + x),
    "columns": (square, lambda x: SILU(x[:, 1:3]).sum() + x, lambda x: silu_(x[:, 1:3]).sum() + x),
    "transposed": (square, lambda x: SILU(x.t()) + x, lambda x: silu_(x.t()) + x),
    "reshaped": (square, lambda x: SILU(x.view(2, 8)).sum() + x, lambda x: silu_(x).sum() + x),
    "one of two views": (
        halves,
        lambda c, a, b: SILU(a) + b + c[2:6],
        lambda c, a, b: silu_(a) + b + c[2:6],
    ),
    "both views": (
        halves,
        lambda c, a, b: SILU(a) + SILU(b) + c[2:6],
        lambda c, a, b: silu_(a) + silu_(b) + c[2:6],
    ),
    "one of two overlapping views": (
        overlapping,
        lambda c, a, b: SILU(a) + b,
        lambda c, a, b: silu_(a) + b,
    ),
    "read before and after": (
        square,
        lambda x: (x * 2, SILU(x), x * 3),
        lambda x: (x * 2, silu_(x), x * 3),
    ),
    "a temporary": (square, lambda x: SILU(x * 2) + x, lambda x: F.silu(x * 2) + x),
    "out": (
        lambda: (torch.randn(2, 4, 4), torch.empty(2, 4, 4)),
        lambda a, o: (MOE(a, WEIGHTS, COUNTS, out=o), o + a),
        lambda a, o: (o.copy_(moe(a)), o + a),
    ),
    "out beside a in one base": (
        lambda: (lambda b: (b, b[:2], b[2:]))(torch.randn(4, 4, 4)),
        lambda c, a, o: (MOE(a, WEIGHTS, COUNTS, out=o) + a, c.sum()),
        lambda c, a, o: (o.copy_(moe(a)) + a, c.sum()),
    ),
    "caches": (
        lambda: (torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4)),
        lambda a, b: (CACHE(NEW_K, NEW_V, a, b, SLOTS), a * 2, b.sum())[1:],
        lambda a, b: (write(a, b), a * 2, b.sum())[1:],
    ),
    "caches of one base": (
        lambda: (torch.randn(2, 2, 2, 1, 4),),
        lambda c: (CACHE(NEW_K, NEW_V, c[0], c[1], SLOTS), c.sum(0))[1],
        lambda c: (write(c[0], c[1]), c.sum(0))[1],
    ),
    "keys for values": (
        lambda: (torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4), NEW_K.clone()),
        lambda a, b, k: (CACHE(k, k, a, b, SLOTS), a + b)[1],
        lambda a, b, k: (
            a.view(4, 1, 4).index_copy_(0, SLOTS, k),
            b.view(4, 1, 4).index_copy_(0, SLOTS, k),
            a + b,
        )[2],
    ),
    "running statistics": (
        lambda: (torch.randn(5, 3), torch.zeros(3), torch.ones(3)),
        lambda x, m, v: (BATCH(x, m, v)[0], m + v),
        lambda x, m, v: (F.batch_norm(x, m, v, training=True), m + v),
    ),
    "running statistics of one base": (
        lambda: (torch.randn(5, 3), torch.ones(2, 3)),
        lambda x, s: (BATCH(x, s[0], s[1])[0], s * 1),
        lambda x, s: (F.batch_norm(x, s[0], s[1], training=True), s * 1),
    ),
}

REFUSED = {
    "out is a": (
        lambda: (lambda t: (t, t))(torch.randn(2, 4, 4)),
        lambda a, o: MOE(a, WEIGHTS, COUNTS, out=o),
        lambda a, o: o.copy_(moe(a)),
    ),
    "out is a, in the graph": (
        lambda: (torch.randn(2, 4, 4),),
        lambda a: MOE(a, WEIGHTS, COUNTS, out=a),
        lambda a: a.copy_(moe(a)),
    ),
    "out is a view of a": (
        lambda: (torch.randn(4, 2, 4),),
        lambda a: MOE(a.view(2, 4, 4), WEIGHTS, COUNTS, out=a.view(2, 4, 4)),
        lambda a: a.view(2, 4, 4).copy_(moe(a.view(2, 4, 4))),
    ),
    "out overlaps a": (
        lambda: (lambda b: (b, b[:2], b[1:]))(torch.randn(3, 4, 4)),
        lambda c, a, o: MOE(a, WEIGHTS, COUNTS, out=o),
        lambda c, a, o: o.copy_(moe(a.clone())),
    ),
    "out is a temporary that is read": (
        lambda: (torch.randn(2, 4, 4),),
        lambda a: (lambda t: MOE(t, WEIGHTS, COUNTS, out=t))(a * 2),
        lambda a: moe(a * 2),
    ),
    "the new keys are in the cache": (
        lambda: (torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4)),
        lambda a, b: (CACHE(a[0], NEW_V, a, b, SLOTS), a + b)[1],
        lambda a, b: (
            a.view(4, 1, 4).index_copy_(0, SLOTS, a[0].clone()),
            b.view(4, 1, 4).index_copy_(0, SLOTS, NEW_V),
            a + b,
        )[2],
    ),
    "the running variance is the weight": (
        lambda: (torch.randn(5, 3), torch.zeros(3), torch.ones(3)),
        lambda x, m, v: BATCH(x, m, v, v)[0],
        lambda x, m, v: F.batch_norm(x, m, v, v.clone(), training=True),
    ),
}

ALWAYS_REFUSED = {
    "one cache for keys and values": (
        lambda: (torch.randn(2, 2, 1, 4),),
        lambda c: CACHE(NEW_K, NEW_V, c, c, SLOTS),
    ),
    "one tensor for both statistics": (
        lambda: (torch.randn(5, 3), torch.ones(3)),
        lambda x, m: BATCH(x, m, m)[0],
    ),
    "a broadcast tensor": (
        lambda: (torch.randn(4, 1),),
        lambda x: SILU(x.expand(4, 4)),
    ),
}


def both(make, seed):
    """The same tensors twice, with the same sharing of memory."""
    torch.manual_seed(seed)
    first = make()
    torch.manual_seed(seed)
    return first, make()


def agree(case, ours, theirs, given, wanted):
    flat = lambda r: r if isinstance(r, tuple) else (r,)  # noqa: E731
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m: f"{case}: result: {m}")
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m: f"{case}: input: {m}")


BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.slow),
]


def compiled(function, backend):
    torch._dynamo.reset()
    if backend == "eager":
        return function
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", RIGHT)
def test_a_write_is_seen_where_it_must_be(case, backend, seed):
    make, function, reference = RIGHT[case]
    given, wanted = both(make, seed)
    result = compiled(function, backend)(*given)
    agree(case, result, reference(*wanted), given, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", REFUSED)
def test_shared_memory_is_refused_or_right(case, backend, seed):
    make, function, reference = REFUSED[case]
    given, wanted = both(make, seed)
    before = [t.clone() for t in given]
    try:
        result = compiled(function, backend)(*given)
    except CheckError as error:
        assert "memory shared with argument" in str(error)
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "refused first"
        return
    assert backend != "eager", "an eager call refuses"
    agree(case, result, reference(*wanted), given, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ALWAYS_REFUSED)
def test_two_writes_to_one_place_are_refused(case, backend, seed):
    make, function = ALWAYS_REFUSED[case]
    with pytest.raises(
        Exception, match=r"memory shared with argument|it overlaps itself"
    ) as caught:
        compiled(function, backend)(*make())
    assert backend != "eager" or caught.type is CheckError


@pytest.mark.parametrize(
    "case", ["a clone beside its source", "one of two views", "out", "caches of one base"]
)
def test_inductor_in_the_first_tier(case, seed):
    make, function, reference = RIGHT[case]
    given, wanted = both(make, seed)
    agree(case, compiled(function, "inductor")(*given), reference(*wanted), given, wanted)


@pytest.mark.parametrize("case", ["out is a, in the graph", "out is a temporary that is read"])
def test_inductor_refuses_in_the_first_tier(case, seed):
    test_shared_memory_is_refused_or_right(case, "inductor", seed)


# ---- random programs -----------------------------------------------------------------------------

VIEWS = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[:3],
    lambda x: x[2:],
    lambda x: x[:, 1::2],
    lambda x: x[1],
    lambda x: x.view(-1)[5:20],
    lambda x: x.view(3, -1)[1],
]


def program(steps, silu, add, mul):
    def run(x):
        total = x.sum() * 0
        for view, kind in steps:
            part = VIEWS[view](x)
            if kind == 0:
                total = total + silu(part).sum()
            elif kind == 1:
                total = total + add(part, part).sum()
            else:
                x = mul(x, x)
                total = total + VIEWS[view](x).sum()
        return total, x

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", range(8))
def test_random_programs_of_views_and_writes(turn, backend, seed):
    draw = random.Random(seed + turn)
    steps = [(draw.randrange(len(VIEWS)), draw.choice([0, 0, 1, 2])) for _ in range(5)]
    ours = program(steps, SILU, ADD, MulFwdOp())
    theirs = program(steps, silu_, torch.add, torch.mul)
    x = torch.randn(6, 6)
    y = x.clone()
    agree(str(steps), compiled(ours, backend)(x), theirs(y), (x,), (y,))
