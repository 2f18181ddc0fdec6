"""Device code of ``epilogue.py`` and ``epilogue_backward.py``."""

import triton
import triton.language as tl

from tileops.gemm.kernels.gemm_triton import activated, finish, finished


@triton.jit
def finish_rows(
    product,
    d,
    bias,
    residual,
    kept,
    scale,
    N,
    blocks,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """The epilogue of a product that lies in memory, ``BLOCK`` columns of a row each."""
    program = tl.program_id(0)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    place = (program // blocks).to(tl.int64) * N + column
    total = tl.load(product + place, mask=inside, other=0.0).to(tl.float32)
    finish(total, d, bias, residual, kept, scale, place, column, inside, inside,
           ACTIVATION, NARROW)  # fmt: skip


@triton.jit
def gradient(
    grad_d,
    grad_kept,
    inner,
    bias,
    grad,
    scale,
    N,
    blocks,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """``scale * activation'(inner + bias) * grad_d + grad_kept``, ``BLOCK`` columns of a row each."""
    program = tl.program_id(0)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    place = (program // blocks).to(tl.int64) * N + column
    result = tl.load(grad_d + place, mask=inside, other=0.0).to(tl.float32) * scale
    if inner is not None:
        value = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        _, slope = activated(value, ACTIVATION, NARROW)
        result *= slope
    if grad_kept is not None:
        result += tl.load(grad_kept + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad + place, result.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _put(values, d, residual, kept, bias, scale, row, column, N, COLUMNS: tl.constexpr,
         ACTIVATION: tl.constexpr, NARROW: tl.constexpr):  # fmt: skip
    """The epilogue of one part of a tile, by tensor descriptors."""
    added = None
    if bias is not None:
        place = column + tl.arange(0, COLUMNS)
        added = tl.load(bias + place, mask=place < N, other=0.0).to(tl.float32)[None, :]
    total, result = finished(values, added, scale, ACTIVATION, NARROW)
    if kept is not None:
        kept.store([row, column], total.to(kept.dtype))
    if residual is not None:
        result += residual.load([row, column]).to(tl.float32)
    d.store([row, column], result.to(d.dtype))


@triton.jit
def _corner(tile, tile_rows, tile_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            GROUP: tl.constexpr):  # fmt: skip
    """Where a tile begins. Tiles go in groups of GROUP tile rows, column by column."""
    in_group = GROUP * tile_columns
    first = tile // in_group * GROUP
    height = tl.minimum(tile_rows - first, GROUP)
    return (first + tile % in_group % height) * ROWS, (tile % in_group // height) * COLUMNS


@triton.jit
def persistent(
    a,
    b,
    d,
    bias,
    residual,
    kept,
    scale,
    M,
    N,
    K,
    programs,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Each program takes every ``programs``-th tile: while the last sums of one are finished, the loads
    of the next are under way. Tensors come as descriptors; beyond their edges are zeros, which add
    nothing, and nothing is written there. A tile is finished in ``PARTS`` parts, which need less shared
    memory."""
    tile_rows, tile_columns = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    steps = tl.cdiv(K, DEPTH)
    # Counted apart, so that no place waits through the loop for the end of its tile.
    finished_tile = tl.program_id(0) - programs
    for tile in tl.range(tl.program_id(0), tile_rows * tile_columns, programs, flatten=True):
        row, column = _corner(tile, tile_rows, tile_columns, ROWS, COLUMNS, GROUP)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(steps):
            at = step * DEPTH
            left = a.load([at, row]).T if TRANS_A else a.load([row, at])
            right = b.load([column, at]).T if TRANS_B else b.load([at, column])
            total = tl.dot(left, right, total)
        finished_tile += programs
        row, column = _corner(finished_tile, tile_rows, tile_columns, ROWS, COLUMNS, GROUP)
        if PARTS == 2:
            WIDTH: tl.constexpr = COLUMNS // 2
            halves = tl.permute(tl.reshape(total, [ROWS, 2, WIDTH]), [0, 2, 1])
            near, far = tl.split(halves)
            _put(near, d, residual, kept, bias, scale, row, column, N, WIDTH,
                 ACTIVATION, NARROW)  # fmt: skip
            _put(far, d, residual, kept, bias, scale, row, column + WIDTH, N, WIDTH,
                 ACTIVATION, NARROW)  # fmt: skip
        else:
            _put(total, d, residual, kept, bias, scale, row, column, N, COLUMNS,
                 ACTIVATION, NARROW)  # fmt: skip
