"""Every CUDA kernel on a card, through the public ops, against float64 references.

The grids name the code paths: rows below, at and above each region's limit, prime and tiny sizes,
no elements, misaligned and strided views. Outputs are poisoned by filling freed memory with NaN.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.elementwise import SiLUAndMulFwdOp, SiLUFwdOp
from tileops.gemm import GEMMFwdOp
from tileops.norm import FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32]
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 1e-12}
"""Largest error relative to the largest reference value: two units in the last place of the output
for the halves (one for rounding, one for an intermediate), 16 for float32 sums."""


@pytest.fixture(autouse=True)
def _poison() -> None:
    torch.manual_seed(torch.seed() % 2**31)
    # What torch.empty hands out next is what was freed last.
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    junk += [torch.full((1 << n,), float("nan"), device="cuda") for n in range(4, 20)]
    del junk


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def check(result: torch.Tensor, wanted: torch.Tensor, scale: float = 1.0) -> None:
    assert result.shape == wanted.shape
    assert result.is_contiguous()
    if not wanted.numel():
        return
    error = (result.double() - wanted).abs().max().item()
    most = wanted.abs().max().item()
    assert error <= BOUND[result.dtype] * scale * max(most, 1e-6), (
        error,
        most,
        torch.initial_seed(),
    )


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
    x = x.double()
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    y = x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return y if weight is None else y * weight.double()


ROWS = [1, 2, 7, 64, 127, 128, 576, 1000, 1024, 1025, 4096, 4099, 8192, 16384, 16385, 32768, 32771,
        65536, 131072, 262144]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", ROWS)
def test_rms_norm(length: int, dtype: torch.dtype) -> None:
    for count in (1, 3, 133, 1000) if length <= 8192 else (1, 5, 140):
        x, w = draw(count, length, dtype=dtype) * 3, draw(length, dtype=dtype)
        for weight, eps in ((w, 1e-6), (None, None)):
            op = RMSNormFwdOp(length, eps)
            check(op(x, weight), rms(x, weight, eps))
            assert op.last_call is not None and op.last_call.kernel.startswith("triton")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", ROWS)
def test_fused_add_rms_norm(length: int, dtype: torch.dtype) -> None:
    for count in (1, 3, 133):
        x, r, w = draw(count, length, dtype=dtype), draw(count, length, dtype=dtype), draw(length, dtype=dtype)  # fmt: skip
        y, total = FusedAddRMSNormFwdOp(1e-5)(x, r, w)
        assert torch.equal(total, x + r)
        check(y, rms(x + r, w, 1e-5))


def test_rms_norm_batch_invariance() -> None:
    for length in (100, 576, 4096, 32768, 131072):
        x = draw(300, length, dtype=torch.bfloat16)
        op = RMSNormFwdOp(length)
        whole = op(x)
        for begin, end in ((0, 1), (17, 18), (5, 50), (299, 300)):
            assert torch.equal(op(x[begin:end].clone()), whole[begin:end]), length


def test_rms_norm_views_and_specials() -> None:
    op = RMSNormFwdOp(64, 1e-6)
    base = draw(129, 65)
    for x in (base[:128, :64], base[1:, 1:], base[::2, :64], draw(64, 128).t()):
        check(op(x), rms(x, None, 1e-6))
    flat = draw(64 * 8 + 1, dtype=torch.float16)[1:].view(8, 64)  # not 16-byte aligned
    check(op(flat), rms(flat, None, 1e-6))
    x = draw(4, 64)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    y = op(x)
    assert y[0].isfinite().all() and y[3].isfinite().all()
    assert y[1].isnan().all() and y[2, 5].isnan()
    assert op(draw(0, 64)).shape == (0, 64)
    assert RMSNormFwdOp(0)(draw(4, 0)).shape == (4, 0)
    assert op(draw(4, 64).double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 2, 31, 1000, 4097, 1 << 20, (1 << 20) + 3])
def test_silu(size: int, dtype: torch.dtype) -> None:
    x = draw(size, dtype=dtype) * 4
    wanted = x.double() * torch.sigmoid(x.double())
    check(SiLUFwdOp()(x), wanted)
    same = x.clone()
    assert SiLUFwdOp(inplace=True)(same) is same
    check(same, wanted)
    if size > 2:
        shifted = torch.cat((x[:1], x))[1:]
        check(SiLUFwdOp()(shifted), wanted)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "rows, n", [(1, 1), (3, 7), (0, 8), (5, 0), (32, 1536), (1000, 14336), (7, 4099)]
)
def test_silu_and_mul(rows: int, n: int, dtype: torch.dtype) -> None:
    x = draw(rows, 2 * n, dtype=dtype)
    gate, up = x[:, :n].double(), x[:, n:].double()
    check(SiLUAndMulFwdOp()(x), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape, dim", [
    ((4, 128256), -1), ((1, 262144), -1), ((3, 1), 1), ((1000, 64), 1), ((64, 512, 64), 1),
    ((500, 7), 0), ((5, 3, 4099), -1), ((2, 40000, 3), 1), ((0, 5), 1), ((2, 3, 4, 5), 2), ((300, 32768), 1),
])  # fmt: skip
def test_softmax(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype) * 5
    for wide in (None, torch.float32):
        check(SoftmaxFwdOp(dim, dtype=wide)(x), torch.softmax(x.double(), dim), 4.0)
    if x.numel():
        x.select(dim, 0).fill_(float("-inf"))
        check(
            SoftmaxFwdOp(dim)(x).nan_to_num(0.0),
            torch.softmax(x.double(), dim).nan_to_num(0.0),
            4.0,
        )
        x.fill_(float("-inf"))
        assert SoftmaxFwdOp(dim)(x).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary", [None, 2, 64])
@pytest.mark.parametrize("n, h, d", [(1, 1, 64), (32, 32, 128), (1001, 3, 80), (0, 4, 64)])
def test_rope(n: int, h: int, d: int, rotary: int | None, dtype: torch.dtype) -> None:
    x = draw(n, h, d, dtype=dtype)
    for kind in (torch.int32, torch.int64):
        places = torch.randint(0, 131072, (n,), device="cuda", dtype=kind)
        y = RoPENeoxPositionIdsFwdOp(131072, 500000.0, rotary)(x, places)
        size = rotary or d
        wide = x.double()
        rates = 500000.0 ** (-torch.arange(0, size, 2, device="cuda", dtype=torch.float64) / size)
        turn = torch.polar(torch.ones(n, size // 2, device="cuda", dtype=torch.float64),
                           places.double()[:, None] * rates)[:, None]  # fmt: skip
        pair = torch.complex(wide[..., : size // 2], wide[..., size // 2 : size]) * turn
        check(y, torch.cat((pair.real, pair.imag, wide[..., size:]), -1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 4096, 4096), (17, 33, 65), (128, 2112, 7168),
                                     (300, 500, 129), (0, 4, 4), (4, 0, 4), (4, 4, 0)])  # fmt: skip
def test_gemm(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    for trans_a in (False, True):
        for trans_b in (False, True):
            a = draw(*((k, m) if trans_a else (m, k)), dtype=dtype)
            b = draw(*((n, k) if trans_b else (k, n)), dtype=dtype)
            wanted = (a.t() if trans_a else a).double() @ (b.t() if trans_b else b).double()
            op = GEMMFwdOp(trans_a, trans_b)
            check(op(a, b), wanted, 4.0)


def test_gemm_triton_candidates() -> None:
    """Each tile of the Triton kernel, whichever one the cost rule would choose."""
    from tileops.engine.plan import call_spec, in_tree_kernels

    for m, n, k in ((1, 4096, 4096), (65, 129, 257), (512, 512, 512)):
        for dtype in FLOATS:
            a, b = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype)
            op = GEMMFwdOp()
            call, _ = call_spec(op, (a, b), None)
            for kernel in in_tree_kernels(GEMMFwdOp, "cuda"):
                if kernel.name == "triton_gemm" and kernel.refuses(call) is None:
                    for entry in kernel.candidates(call):
                        built = entry.build()
                        run = entry.bind(built, call) if entry.bind else built
                        check(run(a, b), a.double() @ b.double().t(), 4.0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("b, s_q, s_kv, h, h_kv, d", [
    (2, 1, 4096, 32, 8, 128), (1, 128, 128, 8, 8, 64), (1, 100, 333, 6, 2, 64), (2, 17, 17, 4, 1, 80),
])  # fmt: skip
def test_gqa_dense(
    b: int, s_q: int, s_kv: int, h: int, h_kv: int, d: int, dtype: torch.dtype
) -> None:
    q, k, v = draw(b, s_q, h, d, dtype=dtype), draw(b, s_kv, h_kv, d, dtype=dtype), draw(b, s_kv, h_kv, d, dtype=dtype)  # fmt: skip
    place = torch.arange(s_q, device="cuda")[:, None] + s_kv - s_q
    other = torch.arange(s_kv, device="cuda")[None]
    for causal, left, softcap in (
        (False, -1, None),
        (True, -1, None),
        (True, 50, None),
        (True, -1, 20.0),
    ):
        scores = (
            torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(h // h_kv, 2))
            * d**-0.5
        )
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = (other <= place) if causal else torch.ones_like(other <= place)
        if left >= 0:
            seen = seen & (other >= place - left)
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        wanted = torch.einsum(
            "bhqk,bkhd->bqhd", weights, v.double().repeat_interleave(h // h_kv, 2)
        )
        op = GQADenseFwdOp(is_causal=causal, window_size_left=left, softcap=softcap)
        check(op(q, k, v), wanted, 2.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_paged_kv_cache_write(dtype: torch.dtype) -> None:
    for n, heads, d, pages, size in ((64, 8, 128, 4096, 16), (3, 1, 7, 5, 3), (0, 2, 64, 4, 16)):
        k, v = draw(n, heads, d, dtype=dtype), draw(n, heads, d, dtype=dtype)
        slots = torch.randperm(pages * size, device="cuda")[:n]
        if n:
            slots[0] = -1
        caches = [draw(pages, size, heads, d, dtype=dtype) for _ in range(2)]
        wanted = [c.clone().view(-1, heads, d) for c in caches]
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted[0][slot], wanted[1][slot] = k[row], v[row]
        assert PagedKVCacheWriteFwdOp()(k, v, *caches, slots) is None
        for cache, want in zip(caches, wanted, strict=True):
            assert torch.equal(cache.view(-1, heads, d), want)
    small = [torch.zeros(4, 4, 2, 16, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2)]
    k, v = draw(3, 2, 16, dtype=dtype) * 1000, draw(3, 2, 16, dtype=dtype)
    scale = torch.tensor([0.5], device="cuda")
    slots = torch.tensor([5, -1, 0], device="cuda")
    PagedKVCacheWriteFwdOp()(k, v, *small, slots, scale, scale)
    for cache, new in zip(small, (k, v), strict=True):
        stored = (new.float() / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(cache.view(-1, 2, 16)[5].float(), stored[0])
        assert torch.equal(cache.view(-1, 2, 16)[0].float(), stored[2])
        assert cache.view(-1, 2, 16)[1:5].float().abs().max() == 0


def test_decomposition_serves_what_has_no_kernel() -> None:
    x, w = draw(8, 64).double(), draw(64).double()
    op = LayerNormFwdOp(64)
    check(op(x, w), F.layer_norm(x.double(), (64,), w.double()))
    assert op.last_call is not None and op.last_call.kernel == "decomposition"


def test_offsets_beyond_two_gi_elements() -> None:
    """Last rows of a tensor of more than 2^31 elements."""
    x = torch.zeros((1 << 31) // 4096 + 2, 4096, device="cuda", dtype=torch.float16)
    x[-2:] = draw(2, 4096, dtype=torch.float16)
    y = RMSNormFwdOp(4096, 1e-6)(x)
    check(y[-2:].contiguous(), rms(x[-2:], None, 1e-6))
    z = SiLUFwdOp()(x)
    check(z[-2:].contiguous(), F.silu(x[-2:].double()))
    del y, z
    s = SoftmaxFwdOp(-1)(x)
    check(s[-2:].contiguous(), torch.softmax(x[-2:].double(), -1), 4.0)


def test_side_stream_and_compiled() -> None:
    x, w = draw(256, 4096, dtype=torch.float16), draw(4096, dtype=torch.float16)
    op = RMSNormFwdOp(4096, 1e-6)
    wanted = rms(x, w, 1e-6)
    stream = torch.cuda.Stream()
    slow = draw(4096, 4096)
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow * 1e-2
        late = x + 0 * slow[:256].to(x.dtype).nan_to_num(0.0, 0.0, 0.0)
        y = op(late, w)
    stream.synchronize()
    check(y, wanted)
    compiled = torch.compile(lambda x, w: op(x, w) * 2, fullgraph=True)
    check(compiled(x, w), wanted * 2)
