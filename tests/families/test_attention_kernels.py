"""Attention kernels: numerics against float64, and what the compiler says.

The paged cache write runs in Triton's interpreter. Torch's attention runs on the CPU; what only a
CUDA device does (FlashAttention's windows) is checked for its schema here, and on a card by
`benchmarks/ops.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, misaligned, run_entry, shapes
from tests.triton_interpreter import interpreted

# ------------------------------------------------------------------------------ dense attention

PARAMS = {
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "sm_scale": None,
    "softcap": None,
    "pos_encoding_mode": "none",
    "rotary_dim": None,
    "rope_layout": "neox",
    "out_dtype": None,
}
NAMES = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "rope_cos", "rope_sin", "sinks")


def gqa_call(q, k, device_type="cpu", given=(), **params):
    from dataclasses import replace

    inputs = dict.fromkeys(NAMES)
    inputs |= {"q": q, "k": k, "v": k}
    inputs |= dict.fromkeys(given, torch.empty(1))
    shape, dtype = tuple(q.shape), q.dtype
    call = call_of(
        "GQADenseFwdOp", inputs, shapes(q.device, o=(shape, dtype)), params=PARAMS | params
    )
    return replace(call, device=replace(call.device, type=device_type))


def run_sdpa(q, k, v, **params):
    from tileops.attention.kernels.gqa_dense import SDPA

    call = gqa_call(q, k, **params)
    assert SDPA.refuses(call) is None
    return run_entry(SDPA.entry_for(call), call, q, k, v, *[None] * 6)


def attention64(q, k, v, is_causal=False, window_size_left=-1, window_size_right=-1, sm_scale=None):
    _, queries, heads, width = q.shape
    keys = k.shape[1]
    k, v = (t.double().repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * (sm_scale or width**-0.5)
    place = torch.arange(queries)[:, None] + keys - queries
    other = torch.arange(keys)[None, :]
    right = 0 if is_causal else window_size_right
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if window_size_left >= 0:
        hidden |= other < place - window_size_left
    if right >= 0:
        hidden |= other > place + right
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def check_attention(q, k, v, **params):
    actual = run_sdpa(q, k, v, **params)
    assert actual.is_contiguous()
    assert actual.shape == q.shape
    # Weights of 16-bit types are rounded to the type before they meet the values.
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}[q.dtype]
    expected = attention64(q, k, v, **params).to(q.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def operands(batch, queries, keys, heads, kv_heads, width, dtype=torch.float32):
    q = torch.randn(batch, queries, heads, width).to(dtype)
    k, v = (torch.randn(batch, keys, kv_heads, width).to(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "size",
    [
        (2, 1, 17, 6, 2, 16),  # one query: heads become queries
        (1, 1, 1, 4, 4, 8),
        (2, 13, 13, 6, 3, 16),  # as many queries as keys
        (2, 5, 19, 4, 1, 32),  # fewer: aligned to the last
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(size, causal, dtype):
    check_attention(*operands(*size, dtype), is_causal=causal)


@pytest.mark.parametrize("left", [-1, 0, 3, 100])
@pytest.mark.parametrize("right", [-1, 0, 2, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 7, 19, 31])
def test_windows(queries, causal, left, right):
    if causal and queries > 19:
        pytest.skip("causal attention has no more queries than keys")
    params = {"is_causal": causal, "window_size_left": left, "window_size_right": right}
    check_attention(*operands(1, queries, 19, 4, 2, 8), **params)


def test_blocks_of_queries(monkeypatch):
    from tileops.attention.kernels import gqa_dense

    monkeypatch.setattr(gqa_dense, "BLOCK", 4)
    for queries, keys in ((13, 29), (29, 13)):
        given = operands(2, queries, keys, 4, 2, 8)
        check_attention(*given, window_size_left=5, window_size_right=1)
        check_attention(*given, window_size_left=2)
        check_attention(*given, window_size_right=3)


def test_scale_and_nothing():
    given = operands(1, 5, 9, 2, 2, 8)
    check_attention(*given, sm_scale=0.7)
    for size in ((0, 3, 3, 2, 2, 8), (2, 0, 3, 2, 2, 8), (2, 3, 3, 0, 2, 8), (2, 3, 3, 2, 2, 0)):
        q, k, v = operands(*size)
        assert run_sdpa(q, k, v).shape == q.shape


def test_what_torch_cannot_do_is_refused_with_the_reason():
    from tileops.attention.kernels.gqa_dense import SDPA

    q, k, _ = operands(1, 5, 9, 2, 2, 8)
    for word, params in {
        "softcap": {"softcap": 3.0},
        "rope": {"pos_encoding_mode": "rope"},
        "sinks": {"given": ["sinks"]},
        "float8": {"given": ["q_scale"]},
    }.items():
        assert word in SDPA.refuses(gqa_call(q, k, **params))
    assert "no key" in SDPA.refuses(gqa_call(k, q, "cuda", window_size_right=0))
    assert SDPA.refuses(gqa_call(k, q, "cpu", window_size_right=0)) is None


@pytest.mark.parametrize(
    ("size", "dtype", "params", "way"),
    [
        ((2, 1, 64, 8, 2, 64), torch.bfloat16, {"is_causal": True}, "_one_query"),
        ((2, 64, 64, 8, 2, 64), torch.bfloat16, {"is_causal": True}, "_plain"),
        ((2, 8, 64, 8, 2, 64), torch.bfloat16, {}, "_plain"),
        ((2, 8, 64, 8, 2, 64), torch.bfloat16, {"is_causal": True}, "_flash"),
        ((2, 64, 64, 8, 2, 64), torch.float16, {"window_size_left": 3}, "_flash"),
        ((2, 8, 64, 8, 2, 64), torch.float32, {"is_causal": True}, "_blocks"),
        ((2, 8, 64, 8, 2, 20), torch.float16, {"is_causal": True}, "_blocks"),
        ((2, 8, 64, 8, 2, 264), torch.float16, {"is_causal": True}, "_blocks"),
    ],
)
def test_ways_on_cuda(size, dtype, params, way):
    from tileops.attention.kernels.gqa_dense import SDPA

    q, k, _ = operands(*size, dtype)
    call = gqa_call(q, k, "cuda", **params)
    assert SDPA.refuses(call) is None
    entry = SDPA.entry_for(call)
    assert entry.bind(entry.build(), call).__qualname__.startswith(way + ".")


@pytest.mark.parametrize("params", [{"is_causal": True}, {"window_size_left": 3}])
def test_flash_attention_takes_our_arguments(params):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tileops.attention.kernels.gqa_dense import SDPA

    with FakeTensorMode():
        q = torch.empty(2, 8, 8, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
    real = (
        torch.empty(2, 8, 8, 64, dtype=torch.bfloat16),
        torch.empty(2, 64, 2, 64, dtype=torch.bfloat16),
    )
    call = gqa_call(*real, "cuda", sm_scale=0.5, **params)
    entry = SDPA.entry_for(call)
    found = entry.bind(entry.build(), call)(q, k, k)
    assert found.shape == q.shape
    assert found.is_contiguous()


# ---------------------------------------------------------------------------- paged cache write


def write_call(k, k_cache, slots, scale, **facts):
    names = ("k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale")
    given = (k, k, k_cache, k_cache, slots, scale, scale)
    written = ("k_cache", "v_cache")
    inputs = dict(zip(names, given, strict=True))
    return call_of("PagedKVCacheWriteFwdOp", inputs, {}, written=written, **facts)


@interpreted
def run_write(k, v, k_cache, v_cache, slots, k_scale=None, v_scale=None):
    from tileops.attention.kernels.paged_kv_cache_write import PagedKVCacheWrite

    call = write_call(k, k_cache, slots, k_scale)
    entry = PagedKVCacheWrite.entry_for(call)
    result = run_entry(entry, call, k, v, k_cache, v_cache, slots, k_scale, v_scale)
    assert result is None
    return k_cache, v_cache


def written(cache, new, slots):
    rows = cache.clone().flatten(0, 1)
    for place, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot] = new[place]
    return rows.view(cache.shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "pages", "page"),
    [
        (0, 2, 8, 3, 4),
        (3, 0, 8, 3, 4),
        (0, 2, 8, 0, 4),
        (1, 1, 1, 1, 1),
        (7, 3, 5, 4, 4),  # rows of no even length, several to a program
        (5, 8, 128, 2, 16),  # a row is a tile
        (3, 8, 192, 2, 16),  # a row is more than a tile
    ],
)
def test_write(tokens, heads, width, pages, page, dtype):
    k, v = (torch.randn(tokens, heads, width).to(dtype) for _ in range(2))
    caches = [torch.randn(pages, page, heads, width).to(dtype) for _ in range(2)]
    slots = torch.randperm(pages * page)[:tokens]
    if tokens > 2:
        slots[1] = -1
    k_cache, v_cache = run_write(k, v, *caches, slots)
    assert torch.equal(k_cache, written(caches[0], k, slots))
    assert torch.equal(v_cache, written(caches[1], v, slots))


def test_a_slot_past_the_end_is_not_written():
    k, caches = torch.randn(2, 1, 4), [torch.zeros(2, 2, 1, 4) for _ in range(2)]
    k_cache, _ = run_write(k, k, *caches, torch.tensor([4, 1 << 40]))
    assert torch.equal(k_cache, caches[0])


def float8(x, scale):
    """Nearest float8_e4m3fn of the float32 quotient, saturated, as bytes."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float8_cache(dtype):
    tokens, heads, width = 5, 2, 24
    k, v = ((torch.randn(tokens, heads, width) * 100).to(dtype) for _ in range(2))
    caches = [torch.zeros(3, 4, heads, width).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.tensor([3, 0, -1, 11, 7])
    scales = torch.tensor([0.37]), torch.tensor([1.9])
    k_cache, v_cache = run_write(k, v, *caches, slots, *scales)
    for cache, new, scale in ((k_cache, k, scales[0]), (v_cache, v, scales[1])):
        zero = torch.zeros(3, 4, heads, width, dtype=torch.uint8)
        assert torch.equal(cache.view(torch.uint8), written(zero, float8(new, scale), slots))


def test_float8_of_every_float16_number():
    every = torch.arange(65536).to(torch.uint16).view(torch.float16)
    k = every.view(64, 8, 128)
    for scale in (1.0, 1 / 128, 100.0):
        caches = [torch.zeros(4, 16, 8, 128).to(torch.float8_e4m3fn) for _ in range(2)]
        given = torch.tensor([scale])
        k_cache, _ = run_write(k, k, *caches, torch.arange(64), given, given)
        actual, expected = k_cache.view(torch.uint8).flatten(), float8(every, scale)
        number = ~every.isnan()
        assert torch.equal(actual[number], expected[number])
        assert (actual[~number] & 0x7F == 0x7F).all()


def test_misaligned_caches_are_another_build():
    from tileops.attention.kernels.paged_kv_cache_write import PagedKVCacheWrite

    k, cache = torch.zeros(2, 1, 8), misaligned(torch.zeros(2, 2, 1, 8))
    (build,) = builds_of(PagedKVCacheWrite.entry_for(write_call(k, cache, k, None)))
    assert build.aligned == ("k", "v")


def write_builds(heads, width, dtype, cache, arch):
    from tileops.attention.kernels.paged_kv_cache_write import PagedKVCacheWrite

    scaled = cache is torch.float8_e4m3fn
    specs = shapes(
        k=((64, heads, width), dtype),
        cache=((4096, 16, heads, width), cache),
        slots=((64,), torch.int64),
        scale=((1,), torch.float32) if scaled else None,
    )
    call = write_call(specs["k"], specs["cache"], specs["slots"], specs["scale"], arch=arch)
    return builds_of(PagedKVCacheWrite.entry_for(call))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_write_compiles_to_wide_accesses(cache, arch):
    (build,) = write_builds(8, 128, torch.bfloat16, cache, arch)
    assert assert_fits(build, arch).registers <= 64
    code = sass(build, arch)
    assert "LDG.E.128" in code
    assert ("STG.E.64" if cache is torch.float8_e4m3fn else "STG.E.128") in code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float8_e4m3fn),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (3, 5), (8, 192)])
def test_write_compiles(heads, width, dtype, cache, arch):
    for build in write_builds(heads, width, dtype, cache, arch):
        assert_fits(build, arch)
