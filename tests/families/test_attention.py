"""The attention family on the CPU against loops over queries in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.cases import workload_call, workload_cases
from tests.oracle import check, exact, poisoned, strided
from tileops import CheckError
from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("name", "workload"), workload_cases("attention"))
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed, most=1024)
    check(made.op, dict(made.inputs))


# ---- GQADense ----------------------------------------------------------------------------------


def qkv(batch=2, s_q=3, s_kv=5, heads=4, kv_heads=2, size=8, dtype=torch.float32):
    return {
        "q": torch.randn(batch, s_q, heads, size).to(dtype),
        "k": torch.randn(batch, s_kv, kv_heads, size).to(dtype),
        "v": torch.randn(batch, s_kv, kv_heads, size).to(dtype),
    }


def tables(places, columns, dtype=torch.float32):
    angles = torch.arange(places)[:, None] * torch.rand(columns)[None]
    return {"rope_cos": angles.cos().to(dtype), "rope_sin": angles.sin().to(dtype)}


SIZES = [
    {},
    {"s_q": 1, "s_kv": 1, "heads": 1, "kv_heads": 1, "batch": 1, "size": 1},
    {"s_q": 1, "s_kv": 7},
    {"s_q": 7, "s_kv": 7, "heads": 3, "kv_heads": 3},
    {"s_q": 5, "s_kv": 13, "heads": 6, "kv_heads": 1, "size": 5},
    {"s_q": 2, "s_kv": 3, "heads": 8, "kv_heads": 4, "size": 64},
    # From 16 keys on torch's kernel serves; the decomposition is checked beside it.
    {"s_q": 1, "s_kv": 19, "batch": 1},
    {"s_q": 17, "s_kv": 17, "batch": 1, "heads": 2, "kv_heads": 1},
    {"s_q": 3, "s_kv": 37, "batch": 1, "heads": 3, "kv_heads": 1, "size": 7},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_gqa(sizes, causal, dtype):
    check(GQADenseFwdOp(is_causal=causal), qkv(**sizes, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"s_q": 0}, {"heads": 0, "kv_heads": 1}, {"size": 0}]
)
def test_empty(sizes, dtype):
    check(GQADenseFwdOp(), qkv(**sizes, dtype=dtype))


@pytest.mark.parametrize("s_q", [1, 4, 7])
@pytest.mark.parametrize("left", [-1, 0, 1, 3, 100])
@pytest.mark.parametrize("right", [-1, 0, 2, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(s_q, left, right, causal):
    op = GQADenseFwdOp(is_causal=causal, window_size_left=left, window_size_right=right)
    check(op, qkv(batch=1, s_q=s_q, s_kv=7, heads=2, kv_heads=1))


@pytest.mark.parametrize("s_q", [1, 3, 20])
@pytest.mark.parametrize("left", [-1, 15, 17])
@pytest.mark.parametrize("right", [-1, 0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_over_more_keys(s_q, left, right, causal):
    op = GQADenseFwdOp(is_causal=causal, window_size_left=left, window_size_right=right)
    check(op, qkv(batch=1, s_q=s_q, s_kv=20, heads=2, kv_heads=1))
    assert op.last_call.kernel == "sdpa"


@pytest.mark.parametrize(
    "params",
    [{}, {"is_causal": True}, {"window_size_left": 20}, {"softcap": 5.0, "window_size_left": 2}],
)
def test_a_growing_sequence_of_one_query(params):
    op = GQADenseFwdOp(**params)
    for keys in [*range(1, 90, 8), 64, 65, 63, 22, 21, 20, 3, 1]:
        check(op, qkv(batch=1, s_q=1, s_kv=keys, heads=2, kv_heads=1))


def test_masks_align_to_the_last_query_and_key():
    made = qkv(batch=1, s_q=2, s_kv=5, heads=1, kv_heads=1)
    whole = GQADenseFwdOp(is_causal=True)(**made)
    for i, seen in ((0, 4), (1, 5)):
        part = {"q": made["q"][:, i : i + 1], "k": made["k"][:, :seen], "v": made["v"][:, :seen]}
        torch.testing.assert_close(GQADenseFwdOp()(**part), whole[:, i : i + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("right", [-1, 0, 1])
def test_more_queries_than_keys(right, dtype):
    # The first queries stand before every key.
    made = qkv(s_q=6, s_kv=2, dtype=dtype)
    check(GQADenseFwdOp(window_size_right=right), made)
    if right == 0:
        assert not GQADenseFwdOp(window_size_right=0)(**made)[:, :4].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [{}, {"softcap": 3.0}, {"sm_scale": 0.3}])
def test_a_query_that_sees_nothing_gives_0(special, dtype):
    op = GQADenseFwdOp(window_size_right=0, **special)
    made = qkv(s_q=4, s_kv=2, dtype=dtype)
    for passed in ({}, {"sinks": torch.randn(4)}):
        result = check(op, {**made, **passed})
        assert not result[:, :2].any()
        assert result[:, 2:].abs().min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(softcap, causal, dtype):
    made = qkv(s_q=4, s_kv=6, dtype=dtype)
    made["q"] = made["q"] * 4
    check(GQADenseFwdOp(is_causal=causal, softcap=softcap), made)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_sinks(causal, dtype):
    made = {**qkv(s_q=4, s_kv=6, dtype=dtype), "sinks": torch.randn(4) * 3}
    op = GQADenseFwdOp(is_causal=causal)
    check(op, made)
    made["sinks"] = torch.full((4,), -math.inf)  # adds nothing
    torch.testing.assert_close(
        check(op, made).float(), op(made["q"], made["k"], made["v"]).float(), rtol=1e-2, atol=1e-2
    )
    made["sinks"] = torch.full((4,), 1e4)  # takes everything
    assert not check(op, made).any()


@pytest.mark.parametrize("scale", [None, 1.0, 0.01, 10.0])
def test_scale(scale):
    check(GQADenseFwdOp(sm_scale=scale), qkv())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [None, 2, 6, 8])
@pytest.mark.parametrize("s_q", [1, 3, 5])
def test_rope(layout, rotary, s_q, dtype):
    op = GQADenseFwdOp(
        is_causal=True, pos_encoding_mode="rope", rotary_dim=rotary, rope_layout=layout
    )
    columns = (rotary or 8) // 2
    made = qkv(batch=1, s_q=s_q, s_kv=5, dtype=dtype)
    check(op, {**made, **tables(5, columns, dtype)})
    check(op, {**made, **tables(9, columns, dtype)})


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"is_causal": True},
        {"window_size_left": 1, "softcap": 5.0},
        {"pos_encoding_mode": "rope", "rope_layout": "interleaved"},
    ],
)
def test_float8(params, out_dtype):
    op = GQADenseFwdOp(out_dtype=out_dtype, **params)
    made = qkv(s_q=3, s_kv=5, dtype=FLOAT8)
    scales = {f"{n}_scale": torch.rand(2, 2) + 0.5 for n in "qkv"}
    rope = tables(6, 4, out_dtype) if "pos_encoding_mode" in params else {}
    result = check(op, {**made, **scales, **rope})
    assert result.dtype is out_dtype
    check(op, {**made, **scales, **rope, "sinks": torch.randn(4)})


def test_float8_scales_are_by_key_head():
    made = qkv(batch=1, s_q=1, s_kv=1, heads=4, kv_heads=2, dtype=FLOAT8)
    ones = torch.ones(1, 2)
    scaled = GQADenseFwdOp(out_dtype=torch.float32)(
        **made, q_scale=ones, k_scale=ones, v_scale=torch.tensor([[1.0, 2.0]])
    )
    plain = GQADenseFwdOp(out_dtype=torch.float32)(**made, q_scale=ones, k_scale=ones, v_scale=ones)
    assert torch.equal(scaled[:, :, :2], plain[:, :, :2])
    assert torch.equal(scaled[:, :, 2:], plain[:, :, 2:] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gqa_strides(dtype):
    made = qkv(batch=2, s_q=3, s_kv=4, dtype=dtype)
    for name in made:
        for _, view in strided(made[name]):
            check(GQADenseFwdOp(is_causal=True), {**made, name: view})
    spread = {n: t[:1].expand(2, -1, -1, -1) for n, t in made.items()}
    check(GQADenseFwdOp(softcap=5.0), spread)
    packed = torch.randn(2, 3, 3, 4, 8).to(dtype)  # q, k and v of one projection
    q, k, v = packed.unbind(2)
    check(GQADenseFwdOp(is_causal=True), {"q": q, "k": k, "v": v})


@pytest.mark.parametrize("keys", [1, 4, 15, 16, 17, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_not_hidden(dtype, keys):
    for causal, window in ((False, -1), (True, -1), (True, 1)):
        op = GQADenseFwdOp(is_causal=causal, window_size_left=window)
        made = qkv(batch=1, s_q=keys, s_kv=keys, heads=2, kv_heads=2, dtype=dtype)
        made["q"][0, keys // 2, 0, 0] = math.nan
        result = check(op, made)
        assert result[0, keys // 2, 0].isnan().all()
        assert int(result.isnan().sum()) == 8
        check(op, {**made, "k": torch.full_like(made["k"], math.nan)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_heads_and_rows(dtype):
    made = qkv(batch=1, s_q=4, s_kv=4, heads=2, kv_heads=2, dtype=dtype)
    made["v"][0, 2, 1, 3] = math.inf
    result = GQADenseFwdOp(is_causal=True)(**made)
    assert result[0, 2:, 1, 3].isinf().all()
    # A key that is masked has weight 0; 0 * inf may be NaN in its own column, and nowhere else.
    result[:, :, 1, 3] = 0
    assert result.isfinite().all()


def test_large_scores_do_not_overflow():
    made = qkv(dtype=torch.float32)
    made["q"] *= 1e4
    check(GQADenseFwdOp(), made)
    check(GQADenseFwdOp(softcap=30.0), made)


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_agrees_with_torch(causal):
    made = qkv(s_q=5, s_kv=5)
    (ours,), _ = exact(GQADenseFwdOp(is_causal=causal), made)
    theirs = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in made.values()), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(ours.float(), theirs.transpose(1, 2))


def refused(op, made, argument):
    with pytest.raises(CheckError) as caught:
        op(**made)
    assert caught.value.op == "GQADenseFwdOp"
    assert caught.value.argument == argument, str(caught.value)


def test_gqa_call_domain():
    made, ones = qkv(), torch.ones(2, 2)
    scales = {"q_scale": ones, "k_scale": ones, "v_scale": ones}
    refused(GQADenseFwdOp(is_causal=True), qkv(s_q=4, s_kv=3), "q")
    refused(GQADenseFwdOp(), qkv(heads=4, kv_heads=3), "k")
    refused(GQADenseFwdOp(), qkv(heads=4, kv_heads=0), "k")
    refused(GQADenseFwdOp(), qkv(s_kv=0), "k")
    refused(GQADenseFwdOp(), {**made, "v": torch.randn(2, 6, 2, 8)}, "v")
    refused(GQADenseFwdOp(), {**made, **scales}, "q_scale")
    refused(GQADenseFwdOp(), {**made, "q_scale": ones}, "k_scale")
    refused(GQADenseFwdOp(), qkv(dtype=FLOAT8), "q_scale")
    refused(GQADenseFwdOp(), {**qkv(dtype=FLOAT8), **scales}, "out_dtype")
    refused(GQADenseFwdOp(out_dtype=torch.float16), made, "out_dtype")
    refused(GQADenseFwdOp(), {**made, "sinks": torch.randn(2)}, "sinks")
    refused(GQADenseFwdOp(), {**made, "sinks": torch.randn(4).half()}, "sinks")
    refused(GQADenseFwdOp(), {**made, **tables(5, 4)}, "rope_cos")
    rope = GQADenseFwdOp(pos_encoding_mode="rope")
    refused(rope, made, "rope_cos")
    refused(rope, {**made, **tables(4, 4)}, "rope_cos")
    refused(rope, {**made, **tables(5, 3)}, "rope_cos")
    refused(rope, {**made, **tables(5, 4, torch.float16)}, "rope_cos")
    refused(rope, {**qkv(s_q=6, s_kv=5), **tables(6, 4)}, "q")
    refused(
        GQADenseFwdOp(pos_encoding_mode="rope", rotary_dim=16), {**made, **tables(5, 8)}, "rope_cos"
    )


@pytest.mark.parametrize(
    "params",
    [
        {"window_size_left": -2},
        {"window_size_right": -2},
        {"window_size_left": 1.0},
        {"sm_scale": 0.0},
        {"sm_scale": -1.0},
        {"sm_scale": math.inf},
        {"sm_scale": math.nan},
        {"softcap": 0.0},
        {"softcap": math.inf},
        {"softcap": math.nan},
        {"rotary_dim": 4},
        {"rotary_dim": 3, "pos_encoding_mode": "rope"},
        {"rotary_dim": 0, "pos_encoding_mode": "rope"},
        {"pos_encoding_mode": "alibi"},
        {"rope_layout": "gptj"},
        {"out_dtype": torch.float64},
        {"is_causal": 1},
    ],
)
def test_gqa_constructor_domain(params):
    with pytest.raises(CheckError):
        GQADenseFwdOp(**params)


# ---- PagedKVCacheWrite ---------------------------------------------------------------------------


def cache_call(
    rows=6, pages=3, page=4, heads=2, size=5, dtype=torch.float32, cache=None, scales=None
):
    cache = dtype if cache is None else cache
    made = {
        "k": torch.randn(rows, heads, size).to(dtype),
        "v": torch.randn(rows, heads, size).to(dtype),
        "k_cache": torch.randn(pages, page, heads, size).to(cache),
        "v_cache": torch.randn(pages, page, heads, size).to(cache),
        "slot_mapping": torch.randperm(max(pages * page, rows))[:rows] % max(pages * page, 1),
    }
    if cache is FLOAT8:
        made["k_scale"], made["v_scale"] = scales or (torch.tensor([0.5]), torch.tensor([2.0]))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"rows": 1, "pages": 1, "page": 1, "heads": 1, "size": 1},
        {"rows": 12},
        {"rows": 0},
        {"heads": 0},
        {"size": 0},
        {"rows": 0, "pages": 0},
        {"rows": 37, "pages": 11, "page": 7},
    ],
)
def test_cache_write(sizes, float8, dtype):
    check(
        PagedKVCacheWriteFwdOp(), cache_call(**sizes, dtype=dtype, cache=FLOAT8 if float8 else None)
    )


@pytest.mark.parametrize("skipped", [[0], [5], [0, 1, 2], list(range(6))])
def test_rows_of_slot_minus_1_are_skipped(skipped):
    for cache in (None, FLOAT8):
        made = cache_call(cache=cache)
        made["slot_mapping"][skipped] = -1
        check(PagedKVCacheWriteFwdOp(), made)


def test_every_row_skipped_of_an_empty_cache():
    made = cache_call(rows=3, pages=0)
    made["slot_mapping"].fill_(-1)
    check(PagedKVCacheWriteFwdOp(), made)


def test_cache_write_copies_bits():
    made = cache_call(rows=2, size=4)
    made["k"][0, 0] = torch.tensor([math.nan, math.inf, -0.0, 1e-45])
    check(PagedKVCacheWriteFwdOp(), made)
    slot = int(made["slot_mapping"][0])
    stored = made["k_cache"].view(-1, 2, 4)[slot, 0]
    assert torch.equal(stored.view(torch.int32), made["k"][0, 0].view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_saturates_and_rounds_to_nearest(dtype):
    top = torch.finfo(FLOAT8).max
    values = torch.tensor(
        [0.0, 1.0, top, top + 1, 1e4, -1e4, 6e4, -6e4, 0.3, -0.3, 17.0, 19.0, 1e-3, 3e-4]
    )
    made = cache_call(rows=1, heads=1, size=len(values), dtype=dtype, cache=FLOAT8)
    made["k"], made["v"] = values.view(1, 1, -1).to(dtype), -values.view(1, 1, -1).to(dtype)
    PagedKVCacheWriteFwdOp()(**made)
    slot = int(made["slot_mapping"][0])
    for name, sign in (("k", 1), ("v", -1)):
        scale = float(made[f"{name}_scale"])
        stored = made[f"{name}_cache"].view(-1, len(values))[slot].double()
        for given, found in zip(
            made[name].flatten().double().tolist(), stored.tolist(), strict=True
        ):
            exactly = max(-top, min(top, given / scale))
            # Half a step of 3 mantissa bits, or half the subnormals' step of 2**-9.
            assert abs(found - exactly) <= max(abs(exactly) * 2**-4, 2**-10) * (1 + 2**-20), (
                given,
                found,
            )
        assert stored.abs().max() == top, sign


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_float8_of_special_values(special):
    made = cache_call(rows=1, heads=1, size=2, cache=FLOAT8)
    made["k"][0, 0, 0] = special
    PagedKVCacheWriteFwdOp()(**made)
    stored = made["k_cache"].view(-1, 2)[int(made["slot_mapping"][0])].float()
    top = torch.finfo(FLOAT8).max
    assert stored[0].isnan() if math.isnan(special) else stored[0] == math.copysign(top, special)
    assert stored[1].isfinite()


def test_two_rows_of_one_slot():
    made = cache_call(rows=2)
    made["slot_mapping"][:] = 5
    PagedKVCacheWriteFwdOp()(**made)
    for name in "kv":
        stored = made[f"{name}_cache"].view(-1, 2, 5)[5]
        assert any(torch.equal(stored, made[name][n]) for n in range(2))


def test_cache_write_returns_none_and_counts_as_writes():
    made = cache_call()
    versions = [made[n]._version for n in ("k_cache", "v_cache", "k")]
    assert PagedKVCacheWriteFwdOp()(**made) is None
    assert made["k_cache"]._version > versions[0]
    assert made["v_cache"]._version > versions[1]
    assert made["k"]._version == versions[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write_strides(dtype):
    made = cache_call(dtype=dtype)
    for name in ("k", "v", "slot_mapping"):
        for _, view in strided(made[name]):
            check(PagedKVCacheWriteFwdOp(), {**cache_call(dtype=dtype), name: view})
    one = {n: torch.randn(1, 1, 1, 2).to(dtype)[..., ::2] for n in ("k_cache", "v_cache")}
    row = {n: torch.randn(1, 1, 2).to(dtype)[..., ::2] for n in "kv"}  # contiguous, of stride 2
    check(PagedKVCacheWriteFwdOp(), {**one, **row, "slot_mapping": torch.zeros(1).long()})
    whole = torch.randn(2, 3, 4, 2, 5).to(dtype)  # caches of one allocation
    check(PagedKVCacheWriteFwdOp(), {**made, "k_cache": whole[0], "v_cache": whole[1]})
    with poisoned():
        odd = torch.empty(3 * 4 * 2 * 5 + 1, dtype=dtype)[1:].view(3, 4, 2, 5).zero_()
    check(PagedKVCacheWriteFwdOp(), {**made, "k_cache": odd})


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda m: m.update(k_cache=torch.randn(3, 4, 5, 2).transpose(2, 3)), "k_cache"),
        (lambda m: m.update(v_cache=torch.randn(3, 4, 2, 10)[..., ::2]), "v_cache"),
        (lambda m: m.update(v_cache=torch.randn(3, 5, 2, 5)), "v_cache"),
        (lambda m: m.update(k_cache=m["k_cache"].half(), v_cache=m["v_cache"].half()), "k_cache"),
        (lambda m: m.update(v_cache=m["v_cache"].half()), "v_cache"),
        (lambda m: m.update(v=torch.randn(7, 2, 5)), "v"),
        (lambda m: m.update(slot_mapping=m["slot_mapping"].int()), "slot_mapping"),
        (lambda m: m.update(slot_mapping=m["slot_mapping"][:5]), "slot_mapping"),
        (lambda m: m.update(k_scale=torch.ones(1)), "v_scale"),
        (lambda m: m.update(k_scale=torch.ones(1), v_scale=torch.ones(1)), "k_scale"),
        (
            lambda m: m.update(k_cache=torch.randn(3, 0, 2, 5), v_cache=torch.randn(3, 0, 2, 5)),
            "k_cache",
        ),
        (
            lambda m: m.update(k_cache=m["k_cache"].to(FLOAT8), v_cache=m["v_cache"].to(FLOAT8)),
            "k_scale",
        ),
        (lambda m: m.update(v_cache=m["k_cache"]), "k_cache"),
        (lambda m: m.update(k=m["k_cache"].view(12, 2, 5)[:6]), "k_cache"),
    ],
)
def test_cache_write_domain(change, argument):
    made = cache_call()
    change(made)
    before = made["k_cache"].clone()
    with pytest.raises(CheckError) as caught:
        PagedKVCacheWriteFwdOp()(**made)
    assert caught.value.argument == argument, str(caught.value)
    assert torch.equal(made["k_cache"].float(), before.float()), "refused before any work"
