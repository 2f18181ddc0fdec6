"""Attention with masks of positions, and with heads as models arrange them: what it becomes, and when."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tileops
from tests.fusion.test_graph import captured
from tests.rewriting import rewritten
from tests.substituting import ONLY, grads_agree, held
from tileops.backend import DeviceFacts, register_kernel_builder
from tileops.backend.tolerances import compare
from tileops.fusion import cost
from tileops.fusion.cost import takes_groups, written_out_wins
from tileops.fusion.graph import Edit, difference, fake_mode_of, value_of
from tileops.fusion.substitution import _alike

OP, TORCH = "GQADenseFwdOp", "scaled_dot_product_attention"


def meaning(first=None, last=None):
    """Attention in float64, where query ``i`` sees key ``j`` if ``first <= j - i <= last``."""

    def attention(q, k, v):
        q, k, v = q.double(), k.double(), v.double()
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        apart = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        if first is not None:
            scores = scores.masked_fill(apart < first, -torch.inf)
        if last is not None:
            scores = scores.masked_fill(apart > last, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return attention


def heads(*shape, dtype=torch.float32):
    """``[B, H, S, D]`` of memory ``[B, S, H, D]``, as projections give them."""
    batch, number, length, width = shape
    return torch.randn(batch, length, number, width).to(dtype).transpose(1, 2)


def scored(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def by_positions(q, k, v):
    i, j = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    return torch.where(i[:, None] >= j[None, :], scored(q, k), -torch.inf).softmax(-1) @ v


def by_low_numbers(q, k, v):
    """As ``transformers`` writes it, with its mask in the inputs' dtype."""
    i, j = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    mask = torch.where(j <= i.view(1, 1, -1, 1), torch.zeros(()), torch.finfo(q.dtype).min).to(
        q.dtype
    )
    weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


def by_two_masks(q, k, v):
    i = torch.arange(q.shape[2])
    scores = scored(q, k).masked_fill(i > i[:, None] + 3, -torch.inf)
    return (torch.full((len(i), len(i)), -torch.inf).triu(1) + scores).softmax(-1) @ v


CAUSAL = {
    "triu, filled": lambda q, k, v: scored(q, k).masked_fill(
        torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v,
    "tril, filled": lambda q, k, v: scored(q, k).masked_fill(
        torch.tril(torch.ones(q.shape[2], k.shape[2])).view(1, 1, q.shape[2], -1) == 0, -1e9).softmax(-1) @ v,
    "tril, chosen": lambda q, k, v: torch.where(
        torch.ones_like(scored(q, k), dtype=torch.bool).tril(), scored(q, k), -torch.inf).softmax(-1) @ v,
    "triu, chosen": lambda q, k, v: torch.where(
        torch.ones(q.shape[2], k.shape[2]).triu(1) > 0, -torch.inf, scored(q, k)).softmax(-1) @ v,
    "triu, added": lambda q, k, v: (
        scored(q, k) + torch.full((q.shape[2], k.shape[2]), -torch.inf).triu(1)).softmax(-1) @ v,
    "one less it, added": lambda q, k, v: torch.softmax(
        (1.0 - torch.ones(q.shape[2], k.shape[2]).tril()) * -1e30 + scored(q, k), -1) @ v,
    "positions": by_positions,
    "low numbers": by_low_numbers,
    "two masks": by_two_masks,
    "torch, bool": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()),
    "torch, added": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.full((q.shape[2], k.shape[2]), -torch.inf, dtype=q.dtype).triu(1)),
}  # fmt: skip
NARROW = ("low numbers", "torch, bool", "torch, added")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in CAUSAL] + [(name, torch.bfloat16) for name in NARROW],
)
def test_a_causal_mask_is_the_ops(name, dtype):
    inputs = [heads(2, 3, 19, 16, dtype=dtype) for _ in "qkv"]
    seen = held(CAUSAL[name], inputs, meaning(last=0), "template")
    (op,) = seen.substituted()
    assert "is_causal=True, window_size_left=-1, window_size_right=-1" in op


def wide(function):
    """In float32 between casts."""

    def cast(q, k, v):
        return function(q.float(), k.float(), v.float()).to(q.dtype)

    return cast


@pytest.mark.parametrize("name", ["positions", "torch, bool"])
def test_casts_round_it_are_within_its_tolerance(name):
    inputs = [heads(2, 3, 19, 16, dtype=torch.bfloat16) for _ in "qkv"]
    seen = held(wide(CAUSAL[name]), inputs, meaning(last=0), "template")
    assert len(seen.substituted()) == 1
    assert not any(
        "float" in str(n.target) for n in seen.graphs[0].graph.nodes if n.op == "call_method"
    )


def windowed(first, last, shift=0):
    def function(q, k, v):
        i, j = torch.arange(q.shape[2])[:, None] + shift, torch.arange(k.shape[2])[None]
        seen = (j - i <= last) & (j > i - first)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return function


@pytest.mark.parametrize(
    ("queries", "keys", "function", "band", "params"),
    [
        (19, 19, windowed(5, 0), (-4, 0), "is_causal=True, window_size_left=4, window_size_right=-1"),
        (19, 19, windowed(5, 2), (-4, 2), "is_causal=False, window_size_left=4, window_size_right=2"),
        (7, 19, windowed(3, 0, 12), (10, 12), "is_causal=True, window_size_left=2, window_size_right=-1"),
        (1, 19, windowed(30, 0, 18), (None, None), "is_causal=False, window_size_left=-1"),
        (7, 19, lambda q, k, v: (scored(q, k) + torch.full((7, 19), -torch.inf).triu(13)).softmax(-1) @ v,
         (None, 12), "is_causal=True, window_size_left=-1"),
        (5, 9, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(1, 9).bool()),
         (None, None), "is_causal=False, window_size_left=-1"),
    ],
)  # fmt: skip
def test_windows_and_other_lengths(queries, keys, function, band, params):
    inputs = heads(2, 3, queries, 16), heads(2, 3, keys, 16), heads(2, 3, keys, 16)
    seen = held(function, inputs, meaning(*band), "template")
    assert params in seen.substituted()[0]


def repeat_kv(x, times):
    batch, number, length, width = x.shape
    x = x[:, :, None, :, :].expand(batch, number, times, length, width)
    return x.reshape(batch, number * times, length, width)


def before_the_swap(x, times):
    """Repeated while positions still come before heads."""
    batch, number, length, width = x.shape
    x = x.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, times, -1)
    return x.reshape(batch, length, number * times, width).transpose(1, 2)


REPEATED = {
    "expanded": repeat_kv,
    "interleaved": lambda x, times: x.repeat_interleave(times, dim=1),
    "before the swap": before_the_swap,
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_key_heads_are_groups(name):
    repeat, asked = REPEATED[name], []

    def build(q, k, *rest, **params):
        asked.append((q.shape, k.shape))
        return lambda q, *rest: torch.full_like(q, 7.0)

    q, k, v = heads(2, 6, 19, 16), heads(2, 2, 19, 16), heads(2, 2, 19, 16)

    def function(q, k, v):
        return by_low_numbers(q, repeat(k, 3), repeat(v, 3))

    held(function, (q, k, v), meaning(last=0), "template")
    register_kernel_builder("attention_groups", OP, build)
    with tileops.use_target("attention_groups"):
        run, _ = rewritten(function)
        assert (run(q, k, v) == 7).all()
    assert asked == [((2, 19, 6, 16), (2, 19, 2, 16))]


def tiled(x, times):
    batch, number, length, width = x.shape
    return (
        x.unsqueeze(1).expand(-1, times, -1, -1, -1).reshape(batch, times * number, length, width)
    )


@pytest.mark.parametrize("repeat", [tiled, lambda x, times: x.repeat(1, times, 1, 1)])
def test_heads_repeated_as_a_whole_are_none(repeat):
    """One set of heads after the other, of as many as there are sets: the op gets them as they are."""
    q, k, v = heads(2, 4, 19, 16), heads(2, 2, 19, 16), heads(2, 2, 19, 16)

    def spread(q, k, v):
        return meaning()(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    def function(q, k, v):
        return scored(q, repeat(k, 2)).softmax(-1) @ repeat(v, 2)

    held(function, (q, k, v), spread, "template")


def misses(function, *inputs):
    run, seen = rewritten(function, "always", ONLY)
    torch.testing.assert_close(run(*inputs), function(*inputs), rtol=0, atol=0, equal_nan=True)
    assert not seen.substituted()
    return seen.near_misses()[OP]


def test_masks_that_are_none_of_the_ops():
    q, k, mask = heads(2, 3, 6, 16), heads(2, 3, 9, 16), torch.rand(2, 1, 6, 6) > 0.5
    i = torch.arange(6)

    def written(q, m):
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        mask[:, 0] = m[0, 0, 0, 0]
        return F.scaled_dot_product_attention(q, q, q, mask)

    def filled(q, hidden, low=-torch.inf):
        return scored(q, q).masked_fill(hidden, low).softmax(-1) @ q

    def by_number(q):
        i = torch.arange(6)
        return filled(q, i > i[:, None], -1e4)

    def biased(q):
        seen = torch.ones(6, 6).tril() > 0
        return torch.softmax(scored(q, q) + torch.where(seen, 1.0, -torch.inf), -1) @ q

    def to_the_first(q, k):
        return F.scaled_dot_product_attention(q, k, k, torch.ones(6, 9, dtype=torch.bool).tril())

    def behind(q):
        i = torch.arange(6)
        return F.scaled_dot_product_attention(q, q, q, (i > i[:, None]) | (i[:, None] == 5))

    untold = "is a mask, and the graph does not tell what it hides"
    found = {
        f"l_m_ {untold}": misses(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), q, mask),
        f"or_ {untold}": misses(lambda q, m: filled(q, m | (i[:, None] < i)), q, mask),
        f"mask {untold}": misses(written, q, mask),
        f"gt {untold}": misses(by_number, q),
        f"where {untold}": misses(biased, q),
        "may hide all keys from a query": misses(
            lambda q: filled(q, torch.ones(6, 6).triu() > 0), q
        ),
        "counts from the first key": misses(to_the_first, q, k),
        f"or__1 {untold}": misses(behind, q),
    }
    for reason, said in found.items():
        assert reason.removeprefix("or__1 ") in said, (reason, said)


# ---- torch's function ------------------------------------------------------------------------------


def replaced(function, *inputs, **more):
    """What ``auto`` puts there, and the report of each graph."""
    run, seen = rewritten(function, **more)
    return run, run(*inputs), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torch_does_without_a_mask_of_positions(dtype):
    q, k = heads(2, 6, 19, 16, dtype=dtype), heads(2, 2, 19, 16, dtype=dtype)

    def function(q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
        return F.scaled_dot_product_attention(
            q, repeat_kv(k, 3), repeat_kv(v, 3), attn_mask=mask, scale=0.25
        )

    _, result, seen = replaced(function, q, k, k)
    assert seen.substituted() == [
        f"torch.nn.functional.{TORCH}(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)"
    ]
    assert not {"tril", "expand"} & {t.rsplit(".")[-1] for t in seen.targets()}
    found = compare(result, meaning(last=0)(q, k, k), "template")
    assert found.ok, found.text
    if dtype is torch.float32:
        given = [t.clone().requires_grad_() for t in (q, k, k)]
        run, _, seen = replaced(function, *given)
        assert seen.substituted()
        weight = torch.randn(result.shape)
        exact = [t.detach().double().requires_grad_() for t in given]
        ours = torch.autograd.grad(run(*given), given, weight)
        theirs = torch.autograd.grad(meaning(last=0)(*exact), exact, weight.double())
        for one, other in zip(ours, theirs, strict=True):
            assert (one.double() - other).norm() <= 1e-5 * other.norm()


def test_written_out_it_becomes_torchs_function_where_that_is_faster(monkeypatch):
    monkeypatch.setitem(cost.SCORES, ("cpu", torch.float32), (16 * 16, 24 * 24))
    q, k, v = heads(2, 6, 16, 16), heads(2, 2, 16, 16), heads(2, 2, 16, 16)

    def function(q, k, v):
        return by_low_numbers(q, repeat_kv(k, 3), repeat_kv(v, 3))

    _, result, seen = replaced(function, q, k, v)
    assert seen.substituted() == [
        f"torch.nn.functional.{TORCH}(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)"
    ]
    found = compare(result, meaning(last=0)(q, k, v), "template")
    assert found.ok, found.text
    _, _, seen = replaced(function, *(t[:, :, 1:] for t in (q, k, v)))
    assert "faster for fewer than 256 scores a head, here 225" in seen.declined()[OP]
    _, _, seen = replaced(function, q.clone().requires_grad_(), k, v)
    assert "faster for fewer than 576 scores a head, here 256" in seen.declined()[OP]
    _, _, seen = replaced(function, q, k, v, policy="never")
    assert seen.declined()[OP] == "policy never, by options"
    _, _, seen = replaced(function, *(t.half() for t in (q, k, v)))
    assert "not seen to be faster on cpu in torch.float16" in seen.declined()[OP]

    def with_weights(q, k, v):
        weights = scored(q, k).softmax(-1)
        return weights @ v, weights

    _, _, seen = replaced(with_weights, q, q, q)
    assert "used beyond it and would be computed twice" in seen.declined()[OP]
    grads_agree(by_positions, (q, q * 2, q + 1), meaning(last=0), ONLY)


def test_what_torch_has_not_stays():
    q, k = heads(2, 3, 16, 16), heads(2, 3, 20, 16)
    for function, inputs, reason in (
        (windowed(5, 0), (q, q, q), "no such window"),
        (windowed(99, 4), (q, k, k), "no such window"),
        (F.scaled_dot_product_attention, (q, k, k), "which Inductor puts there itself"),
    ):
        _, result, seen = replaced(function, *inputs)
        torch.testing.assert_close(result, function(*inputs))
        assert not seen.substituted()
        assert reason in seen.declined()[OP]


@pytest.mark.parametrize("policy", [None, "always"])
def test_one_graph_for_all_lengths(policy):
    def function(q, k, v):
        i = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None, None, None] <= i[:, None])

    run, seen = rewritten(function, policy, dynamic=True)
    for length in (5, 19, 8):
        q, k, v = (heads(2, 3, length, 16) for _ in "qkv")
        found = compare(run(q, k, v), meaning(last=0)(q, k, v), "template")
        assert found.ok, found.text
    assert len(seen.graphs) == len(seen.substituted()) == 1
    q, k, v = (heads(2, 3, 1, 16) for _ in "qkv")
    torch.testing.assert_close(run(q, k, v), v)


def test_the_rule_by_device(monkeypatch):
    """On CUDA by meta facts: no card is asked."""

    class Result:
        def __init__(self, dtype, shape, requires_grad=False):
            self.dtype, self.shape, self.requires_grad = dtype, shape, requires_grad
            self.device = torch.device("cuda")

    half, wide = (Result(dtype, (1, 8, 4096, 128)) for dtype in (torch.bfloat16, torch.float32))
    assert written_out_wins(half, 4096) == ""
    assert "float32" in written_out_wins(wide, 4096)
    assert "fewer than" in written_out_wins(Result(torch.bfloat16, (1, 8, 63, 128)), 64)
    for capability, taken in {(8, 0): True, (7, 5): False}.items():
        facts = DeviceFacts("cuda", 0, capability, "test", 108, 164 << 10)
        monkeypatch.setattr(cost, "device_facts", lambda device, facts=facts: facts)
        assert takes_groups(half, half, half) is taken
    monkeypatch.setattr(
        cost, "device_facts", lambda _: DeviceFacts("cuda", 0, (9, 0), "test", 132, 0)
    )
    other = Result(torch.bfloat16, (1, 8, 4096, 256))
    assert takes_groups(half, half, half)
    assert not takes_groups(wide, wide, wide)
    assert not takes_groups(other, other, other)
    assert not takes_groups(half, half, half, half)
    # What FlashAttention does not take is asked of torch where there is a card.
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
    monkeypatch.setattr(
        torch.backends.cuda, "can_use_cudnn_attention", lambda given: asked.append(given) or True
    )
    assert takes_groups(half, half, half, half, 0.5, True)
    assert asked == [(half, half, half, half, 0.5, True, True)]
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda given: False)
    assert not takes_groups(half, half, half, half)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert not takes_groups(half, half, half)


def test_what_a_card_is_asked_of_symbolic_sizes():
    module = captured(lambda x: x + 1, torch.randn(2, 3, 5, 16).transpose(1, 2), dynamic=True)
    (x,) = (v for n in module.graph.nodes if isinstance(v := value_of(n), torch.Tensor)
            and n.op == "placeholder")  # fmt: skip
    asked = cost._hinted(x)
    assert tuple(asked.shape) == (2, 5, 3, 16)
    assert asked.stride() == (240, 16, 80, 1)
    assert all(type(n) is int for n in asked.shape)
    assert asked.dtype is torch.float32


def test_what_replaces_a_result_lies_as_it_did():
    """Also where the function's kernel for another mask writes heads in another place."""

    def function(x, y):
        return x.transpose(1, 2) + 1, y * 2

    graph = captured(function, torch.randn(2, 5, 3, 4), torch.randn(2, 3, 5, 4)).graph
    output = next(node for node in graph.nodes if node.op == "output")
    old, new = output.args[0]
    for one, other in ((old, new), (new, old)):
        edit = Edit(graph, output, fake_mode_of(graph))
        made = _alike(edit, one, other, (0, 2, 1, 3))
        assert made is not other
        assert difference(value_of(one), value_of(made)) == ""
        assert _alike(edit, one, one, (0, 2, 1, 3)) is one


@pytest.mark.slow
def test_what_inductor_knows_itself():
    """A mask that is added to scores which a number divides, where q, k and v are contiguous."""

    def function(q, k, v, mask):
        return (scored(q, k) + mask).softmax(-1) @ v

    q, mask = torch.randn(2, 3, 16, 16), torch.randn(2, 1, 16, 16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        run = torch.compile(function, fullgraph=True)
        torch.testing.assert_close(run(q, q, q, mask), function(q, q, q, mask))
    assert torch._dynamo.utils.counters["inductor"]["fuse_attention"] == 1
