"""Device code of ``gemm.py``."""

import triton
import triton.language as tl


@triton.jit
def gemm(
    a,
    b,
    d,
    M,
    N,
    K,
    steps_each,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Tiles go in groups of GROUP tile rows, column by column.
    program = tl.program_id(0)
    tile_rows = tl.cdiv(M, ROWS)
    in_group = GROUP * tl.cdiv(N, COLUMNS)
    first = program // in_group * GROUP
    height = tl.minimum(tile_rows - first, GROUP)
    first_row = (first + program % in_group % height).to(tl.int64) * ROWS
    first_column = (program % in_group // height).to(tl.int64) * COLUMNS
    part = tl.program_id(1)
    begin = part * steps_each
    end = tl.minimum(begin + steps_each, tl.cdiv(K, DEPTH))

    # Where a tile begins is a 64-bit scalar; 32 bits address its inside.
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    along_a, along_b = tl.arange(0, DEPTH)[None, :], tl.arange(0, DEPTH)[:, None]
    start = begin.to(tl.int64) * DEPTH
    if TRANS_A:
        a += start * M + first_row
        in_a = along_a * M + row
        step_a = M.to(tl.int64) * DEPTH
    else:
        a += first_row * K + start
        in_a = row * K + along_a
        step_a = DEPTH
    if TRANS_B:
        b += first_column * K + start
        in_b = column * K + along_b
        step_b = DEPTH
    else:
        b += start * N + first_column
        in_b = along_b * N + column
        step_b = N.to(tl.int64) * DEPTH
    row_inside, column_inside = row < M - first_row, column < N - first_column

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(begin, end):
        if EVEN_K:
            left = tl.load(a + in_a, mask=row_inside, other=0.0)
            right = tl.load(b + in_b, mask=column_inside, other=0.0)
        else:
            rest = K - step * DEPTH
            left = tl.load(a + in_a, mask=row_inside & (along_a < rest), other=0.0)
            right = tl.load(b + in_b, mask=column_inside & (along_b < rest), other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        a += step_a
        b += step_b
    # Parts lie behind each other; a single part is the result itself.
    d += (part.to(tl.int64) * M + first_row) * N + first_column
    tl.store(d + (row * N + column), total.to(d.dtype.element_ty), mask=row_inside & column_inside)


@triton.jit
def add_parts(parts, d, count, number, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(number):
        total += tl.load(parts + place, mask=inside, other=0.0)
        parts += count
    tl.store(d + place, total, mask=inside)
