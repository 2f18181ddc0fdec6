"""Symbolic sizes: one graph serves every batch, and a growing sequence compiles twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compile_contract import CASES, Call
from tests.contract.fresh import fresh

FIRST = 7
"""The batch that is compiled: like no other size of any case, so that torch does not take two sizes
for one."""


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Symbols:
    """A backend that keeps the shape environment, with its guards, and the graph's inputs."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend = backend
        self.environment: Any = None
        self.free: set[Any] = set()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                self.environment = value.fake_mode.shape_env
                for size in value.shape:
                    if isinstance(size, torch.SymInt):
                        self.free |= size.node.expr.free_symbols
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


def varying(name: str) -> set[tuple[str, int]]:
    """The (input, dim) pairs of a case whose size follows the batch."""
    one, other = CASES[name].make(FIRST), CASES[name].make(FIRST + 1)
    return {
        (key, dim)
        for key, tensor in one.inputs.items()
        if tensor is not None
        for dim, size in enumerate(tensor.shape)
        if size != other.inputs[key].shape[dim]
    }


def takes(name: str, batch: int) -> bool:
    """Whether the entry's rules allow a batch that small."""
    from tileops import CheckError

    try:
        call = CASES[name].make(batch)
        call.check(call.run())
    except CheckError:
        return False
    return True


ONE_BLOCK = ("fp8_by_blocks",)
"""A size of the result is the batch over 128, rounded up: torch makes one graph for 1 and one for more."""

MARKS: dict[str, Callable[[torch.Tensor, int], None]] = {
    "mark_dynamic": torch._dynamo.mark_dynamic,
    "mark_unbacked": torch._dynamo.decorators.mark_unbacked,
    "dynamic=True": lambda tensor, dim: None,
}


def guards_on_the_batch(symbols: Symbols, batch_symbols: set[Any]) -> list[str]:
    """Guards that say more of a batch size than that two inputs have the same one."""
    import sympy

    found = []
    for guard in symbols.environment.guards:
        touched = guard.expr.free_symbols & batch_symbols
        equal = isinstance(guard.expr, sympy.Eq) and all(
            side.free_symbols & batch_symbols for side in guard.expr.args
        )
        if touched and not equal:
            found.append(str(guard.expr))
    return found


@pytest.mark.parametrize("name", CASES)
@fresh
def test_one_graph_serves_every_batch(name):
    free = varying(name)
    assert free
    batches = list(range(2, 41))
    for mode, mark in MARKS.items():
        torch._dynamo.reset()
        torch._dynamo.config.error_on_recompile = True
        before = graphs()
        symbols = Symbols()
        run: Any = None
        # An unbacked size is guarded by nothing, so the same graph serves the sizes 0 and 1.
        small = [n for n in (0, 1) if mode == "mark_unbacked" and takes(name, n)]
        for batch in [FIRST, *small, *batches]:
            call = CASES[name].make(batch)
            for key, dim in free:
                mark(call.inputs[key], dim)
            if run is None:
                options = {"dynamic": True} if mode == "dynamic=True" else {}
                run = torch.compile(call.op, backend=symbols, fullgraph=True, **options)
            call.check(call.run(run))
        assert graphs() - before == 1, mode
        batch_symbols = batch_symbols_of(call, symbols, free)
        assert batch_symbols or mode == "mark_unbacked"
        guards = guards_on_the_batch(symbols, batch_symbols)
        assert [g for g in guards if name not in ONE_BLOCK or "//128" not in g] == [], mode


def batch_symbols_of(call: Call, symbols: Symbols, free: set[tuple[str, int]]) -> set[Any]:
    """The symbols that stand for the sizes in ``free``."""
    environment = symbols.environment
    found = set()
    for symbol, sources in environment.var_to_sources.items():
        for source in sources:
            if source_of(source, call) in free:
                found.add(symbol)
    return found


def source_of(source: Any, call: Call) -> tuple[str, int] | None:
    """Which input and dim a size came from: its source reads ``args[1].size()[0]`` or the like."""
    import re

    names = [item.name for item in call.op.entry.positional_inputs]
    match = re.search(r"(?:args'?\]?\[(\d+)\]|\['(\w+)'\])\.size\(\)\[(\d+)\]", source.name)
    if match is None:
        return None
    position, keyword, dim = match.groups()
    return (names[int(position)] if position else keyword), int(dim)


# ---- decoding ------------------------------------------------------------------------------------

STEPS = 64
HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 8, 4


def _attention_step(attention: Any) -> Callable[[int, Any], None]:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [t.double().transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2)

    q = torch.randn(2, 1, HEADS, SIZE)
    # One place more than is used: torch itself compiles once more for a slice that is all of a tensor.
    k, v = torch.randn(2, 2, STEPS + 1, KV_HEADS, SIZE)

    def step(length: int, run: Any) -> None:
        result = run(attention, q, k[:, :length], v[:, :length])
        expected = reference(q, k[:, :length], v[:, :length])
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)

    return step


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@fresh
def test_attention_over_a_growing_sequence_compiles_twice(backend):
    from tileops.attention import GQADenseFwdOp

    step = _attention_step(GQADenseFwdOp(is_causal=True))
    run = torch.compile(lambda op, *tensors: op(*tensors), backend=backend, fullgraph=True)
    for length in range(1, STEPS + 1):
        step(length, run)
    assert graphs() <= 2


@fresh
def test_a_growing_sequence_builds_each_kernel_once():
    from tileops.attention import GQADenseFwdOp
    from tileops.engine.record import build_count

    op, kernels = GQADenseFwdOp(is_causal=True), set()
    step = _attention_step(op)
    for length in range(1, STEPS + 1):
        step(length, lambda op, *tensors: op(*tensors))
        kernels.add(op.last_call.kernel)
    assert build_count() == len(
        kernels
    )  # a length may be the first for which another kernel serves


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@fresh
def test_64_decode_steps_compile_twice(backend):
    """Rotate, write to the paged cache, attend over all that is in it."""
    from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
    from tileops.rope import RoPENeoxPositionIdsFwdOp

    rope = RoPENeoxPositionIdsFwdOp(max_position=STEPS)
    write, attention = PagedKVCacheWriteFwdOp(), GQADenseFwdOp(is_causal=True)
    caches = torch.zeros(2, STEPS // PAGE, PAGE, KV_HEADS, SIZE)

    def step(q, k, v, position, cached):
        q, k = rope(q, position), rope(k, position)
        write(k, v, caches[0], caches[1], position)
        keys, values = (cache.flatten(0, 1)[cached][None] for cache in caches)
        return attention(q[None], keys, values)[0]

    run = torch.compile(step, backend=backend, fullgraph=True)
    q, k, v = (torch.randn(STEPS, 1, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    for index in range(STEPS):
        position = torch.tensor([index])
        result = run(q[index], k[index], v[index], position, torch.arange(index + 1))
        expected = _decoded(q[: index + 1, 0], k[: index + 1, 0], v[: index + 1, 0])
        torch.testing.assert_close(result[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert graphs() <= 2


def _decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What the last query attends to, from all tokens at once, in float64."""
    angles = torch.arange(len(q)).double()[:, None]
    angles = angles * 10000.0 ** (torch.arange(SIZE // 2).double() * (-2.0 / SIZE))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().chunk(2, -1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), -1)

    keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (rotate(k), v.double()))
    scores = torch.einsum("hd,shd->hs", rotate(q)[-1], keys) * SIZE**-0.5
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values)
