"""Torch's attention with a mask that is data, on key heads that are repeated for their queries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tileops
from tests.rewriting import rewritten
from tileops.backend.tolerances import compare
from tileops.fusion import grouped

ATTENTION = "scaled_dot_product_attention"


def heads(number, length, *, batch=2, width=16, dtype=torch.float32):
    return torch.randn(batch, number, length, width).to(dtype)


def by_expand(x):
    batch, number, length, width = x.shape
    return x[:, :, None].expand(batch, number, 3, length, width).reshape(batch, -1, length, width)


def by_interleave(x):
    return x.repeat_interleave(3, dim=1)


def visible(queries, keys, batch=2):
    """Each query sees some key."""
    mask = torch.rand(batch, 1, queries, keys) > 0.3
    mask[..., 0] = True
    return mask


def meaning(q, k, v, mask):
    """In float64, a direct formula."""
    q, k, v = q.double(), *(t.double().repeat_interleave(3, 1) for t in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def attention(repeat):
    def function(q, k, v, mask):
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=mask)

    return function


def names(seen):
    return {target.rpartition(".")[2].split(" ")[0] for target in seen.targets()}


@pytest.mark.parametrize("repeat", [by_expand, by_interleave])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 19])
def test_heads_are_given_as_they_are(repeat, dtype, queries):
    q, mask = heads(6, queries, dtype=dtype), visible(queries, 19)
    k, v = heads(2, 19, dtype=dtype), heads(2, 19, dtype=dtype)
    run, seen = rewritten(attention(repeat))
    result = run(q, k, v, mask)
    (call,) = seen.substituted()
    assert "enable_gqa=True" in call
    assert not {"expand", "repeat_interleave"} & names(seen)
    found = compare(result, meaning(q, k, v, mask), "template")
    assert found.ok, found.text
    (where,) = [data["stacks"] for data in seen.report.of("substituted")]
    assert any(f"def {repeat.__name__}" not in s and repeat.__name__ in s for s in where)


def test_in_training_and_at_any_length():
    run, seen = rewritten(attention(by_expand), dynamic=True)
    for length in (19, 23, 31):
        given = [t.requires_grad_() for t in (heads(6, length), heads(2, length), heads(2, length))]
        mask = visible(length, length)
        exact = [t.detach().double().requires_grad_() for t in given]
        weight = torch.randn(2, 6, length, 16)
        ours = torch.autograd.grad(run(*given, mask), given, weight)
        theirs = torch.autograd.grad(meaning(*exact, mask), exact, weight.double())
        for one, other in zip(ours, theirs, strict=True):
            assert (one.double() - other).norm() <= 1e-5 * other.norm()
    assert len(seen.graphs) == len(seen.substituted()) == 1


def test_a_cache_that_is_written_before():
    """One step of decoding, as ``transformers`` does it with a cache of fixed length."""

    def step(q, new, place, keys, values, mask):
        keys.index_copy_(2, place, new)
        values.index_copy_(2, place, new + 1)
        return F.scaled_dot_product_attention(q, by_expand(keys), by_expand(values), attn_mask=mask)

    q, new, place = heads(6, 1), heads(2, 1), torch.tensor([7])
    keys, values, mask = heads(2, 19), heads(2, 19), visible(1, 19)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys[:, :, 7], wanted_values[:, :, 7] = new[:, :, 0], new[:, :, 0] + 1
    run, seen = rewritten(step)
    result = run(q, new, place, keys, values, mask)
    assert len(seen.substituted()) == 1
    assert torch.equal(keys, wanted_keys)
    found = compare(result, meaning(q, wanted_keys, wanted_values, mask), "template")
    assert found.ok, found.text


def written_between(q, k, v, mask):
    keys, values = by_expand(k), by_expand(v)
    k.mul_(2)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def stopped_between(q, k, v, mask):
    with torch.no_grad():
        keys = by_expand(k)
    return F.scaled_dot_product_attention(q, keys, by_expand(v), attn_mask=mask)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(written_between, "is written in between"), (stopped_between, "stops the gradient")],
)
def test_what_stays_with_a_reason(function, reason):
    q, k, v, mask = heads(6, 19), heads(2, 19), heads(2, 19), visible(19, 19)
    if function is stopped_between:
        q, k, v = (t.requires_grad_() for t in (q, k, v))
    before = k.detach().clone()
    run, seen = rewritten(function)
    result = run(q, k, v, mask)
    assert reason in seen.declined()[ATTENTION]
    assert not seen.substituted()
    found = compare(
        result.detach(), meaning(*(t.detach() for t in (q, before, v)), mask), "template"
    )
    assert found.ok, found.text


def only_keys(q, k, v, mask):
    return F.scaled_dot_product_attention(q, by_expand(k), v, attn_mask=mask)


def repeated_by_tiles(q, k, v, mask):
    """Heads in turns, not each several times in a row."""
    return F.scaled_dot_product_attention(
        q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1), attn_mask=mask
    )


def repeated_positions(q, k, v, mask):
    keys, values = (t.repeat_interleave(3, dim=2) for t in (by_interleave(k), by_interleave(v)))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.repeat(1, 1, 1, 3))


def groups_of_two_sizes(q, k, v, mask):
    values = v[:, :1].repeat_interleave(6, dim=1)
    return F.scaled_dot_product_attention(q, by_interleave(k), values, attn_mask=mask)


@pytest.mark.parametrize(
    "function", [only_keys, repeated_by_tiles, repeated_positions, groups_of_two_sizes]
)
def test_other_arrangements_are_not_touched(function):
    q, k, mask = heads(6, 19), heads(2, 19), visible(19, 19)
    v = heads(6 if function is only_keys else 2, 19)
    run, seen = rewritten(function)
    torch.testing.assert_close(run(q, k, v, mask), function(q, k, v, mask))
    assert not seen.substituted()


def test_where_no_kernel_reads_groups(monkeypatch):
    monkeypatch.setattr(grouped, "takes_groups", lambda *_: False)
    given = heads(6, 5), heads(2, 19), heads(2, 19), visible(5, 19)
    run, seen = rewritten(attention(by_expand))
    torch.testing.assert_close(run(*given), attention(by_expand)(*given))
    assert "no kernel" in seen.declined()[ATTENTION]


def test_policies():
    given = heads(6, 1), heads(2, 19), heads(2, 19), visible(1, 19)
    run, seen = rewritten(attention(by_expand), policy="never")
    run(*given)
    assert seen.declined()[ATTENTION].startswith("policy never")
    with torch.autocast("cpu", torch.bfloat16):
        run, seen = rewritten(attention(by_expand))
        run(*given)
    assert not seen.substituted()


def test_through_the_compiler():
    q, k, v, mask = heads(6, 5), heads(2, 19), heads(2, 19), visible(5, 19)
    with tileops.recording() as events:
        result = torch.compile(attention(by_expand), backend="tileops")(q, k, v, mask)
    assert [event.kind for event in events if event.data.get("op") == ATTENTION] == ["substituted"]
    found = compare(result, meaning(q, k, v, mask), "template")
    assert found.ok, found.text
