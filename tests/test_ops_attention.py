"""Paged attention against float64 loops, on caches whose every unwritten place is NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import attention_reference

from epmoe.ops.attention import AttentionBatch, paged_attention, write_kv

NAN = float("nan")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
SHAPES = [(4, 4, 16), (4, 2, 24), (8, 1, 32)]  # query heads, key heads, head size


class Sequences:
    """Sequences in a shared cache: blocks in random order, NaN wherever no token was written."""

    def __init__(self, lens: list[int], shape, dtype: torch.dtype, block_size: int = 16, seed: int = 0) -> None:
        self.heads, self.kv_heads, self.dim = shape
        self.block_size, self.dtype = block_size, dtype
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        counts = [-(-length // block_size) for length in lens]
        blocks = iter(rng.permutation(sum(counts) + 3).tolist())
        self.blocks = [[next(blocks) for _ in range(count)] for count in counts]
        self.cache = torch.full((2, self.kv_heads, sum(counts) + 3, block_size, self.dim), NAN, dtype=dtype)
        self.q, self.k, self.v = (
            [torch.randn(length, heads, self.dim).to(dtype) for length in lens]
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )

    def step(self, spans: list[tuple[int, int, int]], *, tiled: bool = False) -> list[torch.Tensor]:
        """Run tokens ``start .. stop`` of sequences ``n`` as one batch: their keys are written, then all attend."""
        q, k, v = (
            torch.cat([rows[n][a:b] for n, a, b in spans] or [torch.empty(0, heads, self.dim, dtype=self.dtype)])
            for rows, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        size = self.block_size
        slots = [self.blocks[n][p // size] * size + p % size for n, a, b in spans for p in range(a, b)]
        width = max((len(self.blocks[n]) for n, _, _ in spans), default=0)
        table = [self.blocks[n] + [0] * (width - len(self.blocks[n])) for n, _, _ in spans]
        batch = AttentionBatch(
            query_lens=[b - a for _, a, b in spans],
            kv_lens=[b for _, _, b in spans],
            block_table_NP=torch.tensor(table, dtype=torch.int32).view(len(spans), width),
            position_T=torch.tensor([p for _, a, b in spans for p in range(a, b)], dtype=torch.int64),
            slot_T=torch.tensor(slots, dtype=torch.int64),
            block_size=size,
        )
        write_kv(self.cache, k, v, batch.slot_T)
        out = paged_attention(q, self.cache, batch, self.dim**-0.5, tiled=tiled)
        assert out.shape == q.shape and out.dtype == self.dtype
        return list(out.split(batch.query_lens))

    def expected(self, n: int, start: int, stop: int) -> torch.Tensor:
        return attention_reference(self.q[n][start:stop], self.k[n][:stop], self.v[n][:stop], self.dim**-0.5)

    def require_right(self, outs: list[torch.Tensor], spans: list[tuple[int, int, int]]) -> None:
        for out, span in zip(outs, spans):
            want = self.expected(*span)
            assert (out.double() - want).abs().max() <= BOUND[self.dtype] * want.abs().max(), span


@pytest.mark.parametrize("tiled", [False, True], ids=["ordinary", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_batch_of_every_length(shape, dtype, tiled):
    lens = [1, 2, 15, 16, 17, 33, 63, 64, 65, 70, 130]
    sequences = Sequences(lens, shape, dtype)
    prompts = [(n, 0, max(1, length - 2)) for n, length in enumerate(lens)]
    sequences.require_right(sequences.step(prompts, tiled=tiled), prompts)
    rest = [(n, stop, lens[n]) for n, _, stop in prompts if stop < lens[n]]
    mixed = [(n, a, a + 1) if n % 2 else (n, a, b) for n, a, b in rest]  # decodes and chunks of two
    sequences.require_right(sequences.step(mixed, tiled=tiled), mixed)
    decodes = [(n, lens[n] - 1, lens[n]) for n, _, _ in mixed if n % 2]
    sequences.require_right(sequences.step(decodes[::-1], tiled=tiled), decodes[::-1])


@pytest.mark.parametrize("tiled", [False, True], ids=["ordinary", "tiled"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_every_context_length_around_blocks_and_tiles(block_size, tiled):
    for length in (1, 2, 3, 4, 5, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129):
        sequences = Sequences([length], (4, 2, 16), torch.float32, block_size, seed=length)
        if length > 1:
            sequences.step([(0, 0, length - 1)], tiled=tiled)
        decode = [(0, length - 1, length)]
        sequences.require_right(sequences.step(decode, tiled=tiled), decode)


@pytest.mark.parametrize("tiled", [False, True], ids=["ordinary", "tiled"])
def test_no_tokens(tiled):
    sequences = Sequences([3], (4, 2, 16), torch.float32)
    assert all(out.numel() == 0 for out in sequences.step([], tiled=tiled))
    assert sequences.cache.isnan().all()


def whole_sequences(lens: list[int], dtype: torch.dtype, size: int, together: bool) -> list[torch.Tensor]:
    """Tiled outputs of every position, prompts in chunks of ``size``, one sequence at a time or all in each step."""
    sequences = Sequences(lens, (4, 2, 24), dtype, block_size=8)
    outs = [[] for _ in lens]
    groups = [list(range(len(lens)))] if together else [[n] for n in range(len(lens))]
    for group in groups:
        for start in range(0, max(lens[n] for n in group), size):
            spans = [(n, start, min(start + size, lens[n])) for n in group if start < lens[n]]
            for (n, _, _), out in zip(spans, sequences.step(spans, tiled=True)):
                outs[n].append(out)
    return [torch.cat(parts) for parts in outs]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tiled_bits_do_not_depend_on_batch_or_chunks(dtype, threads):
    lens = [1, 5, 16, 40, 70, 131]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yardstick = whole_sequences(lens, dtype, 1000, together=False)
        for size in (1, 7, 16, 64, 1000):
            for together in (False, True):
                for n, out in enumerate(whole_sequences(lens, dtype, size, together)):
                    assert torch.equal(out, yardstick[n]), f"chunks of {size}, together {together}, sequence {n}"
    finally:
        torch.set_num_threads(before)


def test_writes_touch_their_slots_only():
    sequences = Sequences([5, 9], (4, 2, 16), torch.float32, block_size=4)
    sequences.step([(0, 0, 5), (1, 0, 3)])
    written = {sequences.blocks[0][p // 4] * 4 + p % 4: (0, p) for p in range(5)}
    written |= {sequences.blocks[1][p // 4] * 4 + p % 4: (1, p) for p in range(3)}
    for slot in range(sequences.cache.shape[2] * 4):
        at = sequences.cache[:, :, slot // 4, slot % 4]
        if slot in written:
            n, p = written[slot]
            assert torch.equal(at[0], sequences.k[n][p]) and torch.equal(at[1], sequences.v[n][p])
        else:
            assert at.isnan().all()
