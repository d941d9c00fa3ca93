"""Producer of specialised_gemm.py: which tile comes next, and the loads of its operands."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Gluon's names differ between Triton 3.6 and 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
gather_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def count_tiles(schedule, L, slot_rows, COLS: gl.constexpr):
    """Tiles of the whole product, and how many of them lie side by side in one block of pairs."""
    n_tiles = (slot_rows + COLS - 1) // COLS
    return gl.load(schedule[1] + L) * n_tiles, n_tiles


@gluon.jit
def locate(tile, n_tiles, schedule, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Tile number -> slot, first pair, end of the block's pairs, column block (as in grouped_gemm.py).

    Within a column the blocks of a group take turns, from one round of the grid to the next: else, as numbers of SMs
    and blocks have common factors, some SMs would get all the last blocks, which are the short or the tall ones.
    """
    offset_ptr, block_offset_ptr, block_slot_ptr = schedule
    slot = gl.load(block_slot_ptr + tile // n_tiles)
    block = gl.load(block_offset_ptr + slot)
    blocks = gl.load(block_offset_ptr + slot + 1) - block
    local = tile - block * n_tiles
    group = local // (GROUP * n_tiles)
    height = gl.minimum(blocks - group * GROUP, GROUP)
    local -= group * GROUP * n_tiles
    column = local // height
    turn = ((block + group * GROUP) * n_tiles + column * height) // gl.num_programs(0)
    mine = group * GROUP + (local % height + turn) % height
    first = gl.load(offset_ptr + slot) + mine * ROWS
    stop = gl.where(mine == blocks - 1, gl.load(offset_ptr + slot + 1), first + ROWS)
    return slot, first, stop, column


@gluon.jit
def _rows(a, row_ptr, first, stop, width, ROWS: gl.constexpr, DEPTH: gl.constexpr):
    """Pointers to the hidden rows of a block's pairs; a thread has 16 bytes of every 16th row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    pair = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.load(row_ptr + pair, mask=pair < stop, other=0)
    return a + row.to(gl.int64)[:, None] * width + k[None, :], (pair < stop)[:, None], k[None, :]


@gluon.jit
def _gather(a, w_desc, row_ptr, bufs, barriers, step, at_tile, width, TAIL: gl.constexpr):
    """A tile of the first GEMM: weights by TMA, rows by four warps; rows beyond the block's pairs are zeros."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    full, empty = barriers
    first, stop, weight_row = at_tile
    STAGES: gl.constexpr = a_bufs.shape[0]
    ROWS: gl.constexpr = a_bufs.shape[1]
    COLS: gl.constexpr = w_bufs.shape[1]
    DEPTH: gl.constexpr = w_bufs.shape[2]
    ptrs, live, k = _rows(a, row_ptr, first, stop, width, ROWS, DEPTH)
    few = stop - first <= TAIL
    tail = few | (stop - first > ROWS)
    if TAIL > 0:
        t_ptrs, t_live, t_k = _rows(a, row_ptr, first + gl.where(few, 0, ROWS), stop, width, TAIL, DEPTH)
    for at in range(0, width, DEPTH):
        s = step % STAGES
        mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), COLS * DEPTH * 2)
        tma_load(w_desc, [weight_row, at], full.index(s), w_bufs.index(s))
        if TAIL == 0:
            gather_load(a_bufs.index(s), ptrs, mask=live & (at + k < width))
        else:
            if not few:
                gather_load(a_bufs.index(s), ptrs, mask=live & (at + k < width))
            if tail:
                gather_load(t_bufs.index(s), t_ptrs, mask=t_live & (at + t_k < width))
            t_ptrs += DEPTH
        async_copy.mbarrier_arrive(full.index(s), increment_count=False)
        ptrs += DEPTH
        step += 1
    return step


@gluon.jit
def _fetch(a, t_desc, w_desc, bufs, barriers, step, at_tile, width, TAIL: gl.constexpr):
    """A tile of the second GEMM, all by TMA: rows beyond the block's pairs are the next block's, or garbage."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    full, empty = barriers
    first, stop, weight_row = at_tile
    STAGES: gl.constexpr = a_bufs.shape[0]
    ROWS: gl.constexpr = a_bufs.shape[1]
    COLS: gl.constexpr = w_bufs.shape[1]
    DEPTH: gl.constexpr = w_bufs.shape[2]
    few = stop - first <= TAIL
    more = stop - first > ROWS
    whole = (stop - first > TAIL) & (stop - first <= ROWS)
    for at in range(0, width, DEPTH):
        s = step % STAGES
        mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
        if TAIL == 0:
            mbarrier.expect(full.index(s), (COLS + ROWS) * DEPTH * 2)
            tma_load(a, [first, at], full.index(s), a_bufs.index(s))
        else:
            # One of the three; how many bytes to expect must be a constant.
            mbarrier.expect(full.index(s), (COLS + TAIL) * DEPTH * 2, pred=few)
            mbarrier.expect(full.index(s), (COLS + ROWS) * DEPTH * 2, pred=whole)
            mbarrier.expect(full.index(s), (COLS + ROWS + TAIL) * DEPTH * 2, pred=more)
            tma_load(t_desc, [first + gl.where(few, 0, ROWS), at], full.index(s), t_bufs.index(s), pred=few | more)
            tma_load(a, [first, at], full.index(s), a_bufs.index(s), pred=whole | more)
        tma_load(w_desc, [weight_row, at], full.index(s), w_bufs.index(s))
        step += 1
    return step


@gluon.jit
def load(
    a,
    t_desc,
    w_desc,
    row_ptr,
    bufs,
    barriers,
    schedule,
    sizes,
    GATHERED: gl.constexpr,
    GROUP: gl.constexpr,
    TAIL: gl.constexpr,
):
    """Fills the buffers, tile after tile."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    L, slot_rows, width, out_width = sizes
    tiles, n_tiles = count_tiles(schedule, L, slot_rows, w_bufs.shape[1])
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = locate(tile, n_tiles, schedule, a_bufs.shape[1], GROUP)
        at_tile = (first, stop, slot * slot_rows + n * w_bufs.shape[1])
        if GATHERED:
            step = _gather(a, w_desc, row_ptr, bufs, barriers, step, at_tile, width, TAIL)
        else:
            step = _fetch(a, t_desc, w_desc, bufs, barriers, step, at_tile, width, TAIL)
