"""Rotary embedding by tables, in plain PyTorch, becomes an op; how matching works is in
``test_substitution.py``."""

from __future__ import annotations

import pytest
import torch

import tileops
from tests.fusion.test_substitution_patterns import near_miss
from tests.oracle_rope import by_tables
from tests.rewriting import rewritten
from tests.substituting import ONLY, grads_agree, held
from tileops.backend import register_kernel_builder

OP = "RoPETablesFwdOp"
DTYPES = [torch.float32, torch.bfloat16]


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def llama(x, cos, sin):
    """As ``transformers`` writes it."""
    return (x * cos) + (rotate_half(x) * sin)


def reordered(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return (sin * torch.cat([second * -1, first], -1) + cos.float() * x).to(x.dtype)


def gpt_j(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


def unbound(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack((-second, first), -1).reshape(x.shape) * sin


def gpt_oss(x, cos, sin):
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def sliced(x, cos, sin):
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    parts = (cos * first - second * sin, sin * first + cos * second)
    return torch.cat(parts, -1).type_as(x)


def by_turns(x, cos, sin):
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


def pairs(x, cos, sin):
    both = x.view(*x.shape[:-1], -1, 2)
    first, second = both[..., 0], both[..., 1]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).view(x.shape)


SPELLINGS = {
    "llama": (llama, "neox", 1),
    "reordered": (reordered, "neox", 1),
    "gpt-j": (gpt_j, "interleaved", 1),
    "unbound": (unbound, "interleaved", 1),
    "gpt-oss": (gpt_oss, "neox", 2),
    "sliced": (sliced, "neox", 2),
    "by turns": (by_turns, "interleaved", 2),
    "pairs": (pairs, "interleaved", 2),
}
"""The function, its layout, and for how many entries one of the tables is."""


def drawn(shape, tables, dtype=torch.float32):
    return torch.randn(shape).to(dtype), *(torch.randn(tables).to(dtype) for _ in "cs")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, dtype, seed):
    function, layout, entries = SPELLINGS[name]
    x, cos, sin = drawn((2, 5, 3, 8), (2, 5, 1, 8 // entries), dtype)
    seen = held(
        function, (x, cos, sin), lambda x, cos, sin: by_tables(x, cos, sin, layout), "pointwise"
    )
    assert seen.substituted() == [f"{OP}(rope_layout='{layout}')"], seen.report
    grads_agree(lambda x: function(x, cos, sin), (x,), lambda x: by_tables(x, cos, sin, layout))


@pytest.mark.parametrize("name", ["llama", "by turns"])
def test_tables_in_float32(name, seed):
    """As OLMo 2 keeps them; those that were only cast are given as they are."""
    function, layout, entries = SPELLINGS[name]
    x, cos, sin = drawn((2, 5, 3, 8), (2, 5, 1, 8 // entries))
    x = x.bfloat16()
    for tables in ((cos, sin), (cos.bfloat16(), sin.bfloat16())):
        seen = held(
            lambda x, cos, sin: function(x, cos.float(), sin.float()).to(x.dtype),
            (x, *tables),
            lambda x, cos, sin: by_tables(x, cos, sin, layout),
            "pointwise",
        )
        assert len(seen.substituted()) == 1, seen.report
        (node,) = [n for n in seen.graphs[0].graph.nodes if "rope_tables" in str(n.target)]
        assert node.args[1].meta["example_value"].dtype is tables[0].dtype


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    ("batch", "length", "heads"), [(2, 5, 3), (1, 5, 3), (2, 1, 3), (2, 5, 1), (1, 1, 1)]
)
def test_heads_before_or_after_positions_in_memory(batch, length, heads, heads_first):
    """The op gets its inputs in the order of memory: nothing is copied, and strides stay."""
    x, cos, sin = drawn((batch, length, heads * 8), (1, length, 8))

    def function(x, cos, sin):
        x = x.view(batch, length, heads, 8)
        x = x.transpose(1, 2) if heads_first else x
        dim = 1 if heads_first else 2
        return llama(x, cos.unsqueeze(dim), sin.unsqueeze(dim))

    def meaning(x, cos, sin):
        x = x.view(batch, length, heads, 8)
        x = by_tables(x, cos[:, :, None], sin[:, :, None], "neox")
        return x.transpose(1, 2) if heads_first else x

    seen = held(function, (x, cos, sin), meaning, "pointwise")
    assert len(seen.substituted()) == 1, seen.report
    assert not [t for t in seen.targets() if "clone" in t or "contiguous" in t]


def test_tables_of_fewer_dims_and_of_other_batches():
    for lead, tables in (((2, 3, 5), (5,)), ((7,), (7,)), ((2, 3, 5), (2, 1, 5)), ((5,), ())):
        seen = held(
            llama,
            drawn((*lead, 6), (*tables, 6)),
            lambda x, cos, sin: by_tables(x, cos, sin, "neox"),
            "pointwise",
        )
        assert len(seen.substituted()) == 1, (lead, tables)
    x, cos, sin = drawn((2, 5, 3 * 8), (5, 8))
    seen = held(
        lambda x, cos, sin: llama(x.view(2, 5, 3, 8).transpose(1, 2), cos, sin),
        (x, cos, sin),
        lambda x, cos, sin: by_tables(x.view(2, 5, 3, 8).transpose(1, 2), cos, sin, "neox"),
        "pointwise",
    )
    assert len(seen.substituted()) == 1


def test_queries_keys_and_part_of_a_head():
    """Of a head of 12 entries 8 turn; queries and keys share their tables."""

    def function(q, k, cos, sin):
        turned = [llama(t[..., :8], cos, sin) for t in (q, k)]
        return torch.cat((turned[0], q[..., 8:]), -1), torch.cat((turned[1], k[..., 8:]), -1)

    def meaning(q, k, cos, sin):
        return tuple(
            torch.cat((by_tables(t[..., :8], cos, sin, "neox"), t[..., 8:].double()), -1)
            for t in (q, k)
        )

    q, cos, sin = drawn((2, 3, 5, 12), (5, 8))
    seen = held(function, (q, q[:, :1] * 2, cos, sin), meaning, "pointwise")
    assert len(seen.substituted()) == 2, seen.report


def test_any_length():
    run, seen = rewritten(llama, "always", ONLY)
    for length in (7, 4, 5):
        given = drawn((2, 3, length, 8), (1, 1, length, 8))
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 2)
        torch.testing.assert_close(run(*given), llama(*given))
    assert len(seen.graphs) == 1
    assert len(seen.substituted()) == 1


def test_what_is_no_rotation_stays_and_says_why():
    q, cos, sin = drawn((2, 3, 5, 8), (2, 1, 5, 8))
    half = (q, cos[..., :4].clone(), sin[..., :4].clone())

    def joined(parts):
        return lambda q, c, s: torch.cat(parts(*q.chunk(2, -1), c, s), -1)

    expected = [
        (lambda q, c, s: q * c + rotate_half(q + 1) * s, "x is add in one place"),
        (lambda q, c, s: llama(q, c.double(), s).float(), "mul is float64 where the op"),
        (lambda q, c, s: llama(q.bfloat16(), c, s.bfloat16()).bfloat16(), "'sin': given dtype"),
        (lambda q, c, s: llama(q[:, :1], c.expand(2, 3, 5, 8), s), "x has shape [2, 1, 5, 8]"),
        (lambda q, c, s: llama(q, c[..., :1], s[..., :1]), "tables have D entries, or D / 2"),
        (lambda q, c, s: llama(q, c[0, 0, 0, 0], s[0, 0, 0, 0]), "given shape []"),
    ]
    for function, reason in expected:
        assert reason in near_miss(function, q, cos, sin)[OP]
    for parts in (
        lambda a, b, c, s: (a * c - b * s, b * s + a * s),
        lambda a, b, c, s: (a * c - b * s, b * s + a * c),
    ):
        assert "cos is l_c_ in one place" in near_miss(joined(parts), *half)[OP]
    for function in (
        lambda q, c, s: q * c - rotate_half(q) * s,
        lambda q, c, s: q * c + torch.cat((q[..., 4:], -q[..., :4]), -1) * s,
        lambda q, c, s: q * c + torch.cat((-q[..., 2:], q[..., :2]), -1) * s,
        lambda q, c, s: (
            q * c + torch.cat((-q[:, :, :, 4:], q[:, :, :, :4]), 0).view(2, 3, 5, 8) * s
        ),
        lambda q, c, s: q * c + torch.stack((-q[0, ..., 1::2], q[0, ..., ::2]), -1).flatten(-2) * s,
        lambda q, c, s: (
            q * c + torch.cat((-q[:, [2, 0, 1], :, 4:], q[:, [2, 0, 1], :, :4]), -1) * s
        ),
        lambda q, c, s: q * c + torch.cat((-(q + 1)[..., 4:], q[..., :4]), -1) * s,
        lambda q, c, s: q * c + torch.cat((-q[..., 4:], (q + 1)[..., :4]), -1) * s,
        lambda q, c, s: (
            q[..., :4, :] * c[..., :4, :]
            + torch.cat((-q[:, :, 2:4], q[:, :, :2]), 2) * s[..., :4, :]
        ),
    ):
        assert near_miss(function, q, cos, sin) == {}
    assert near_miss(joined(lambda a, b, c, s: (a * c + b * s, b * c + a * s)), *half) == {}


def test_tables_that_ask_for_a_gradient_and_what_is_written_between():
    x, cos, sin = drawn((2, 3, 8), (3, 8))
    run, seen = rewritten(llama, "always", ONLY)
    run(x, cos.requires_grad_(), sin)
    assert seen.near_misses() == {OP: "the op has no gradient for cos, which asks for one"}
    cos = cos.detach()

    def function(x, cos, sin):
        x, cos = x + 0, cos + 0
        first = x * cos
        cos.add_(1)
        return first + rotate_half(x) * sin, cos

    run, seen = rewritten(function, "always", ONLY)
    torch.testing.assert_close(run(x, cos, sin), function(x, cos, sin))
    assert "cos is written in between" in seen.near_misses()[OP]


def test_placement():
    """A pointwise op in tree is no faster than what Inductor writes; that of a target is taken."""
    x, cos, sin = drawn((2, 3, 8), (3, 8))
    for policy in (None, "never"):
        run, seen = rewritten(llama, policy)
        torch.testing.assert_close(run(x, cos, sin), llama(x, cos, sin))
        assert set(seen.declined()) == {OP}
        assert not seen.substituted()
    register_kernel_builder(
        "rotation_test", OP, lambda *specs, **params: lambda x, *tables: torch.full_like(x, 7.0)
    )
    with tileops.use_target("rotation_test"):
        run, _ = rewritten(llama)
        assert (run(x, cos, sin) == 7).all()
