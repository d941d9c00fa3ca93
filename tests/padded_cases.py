"""The kernels of ops/padded_rows.py and ops/padded_answers.py against their twins, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch

from epmoe.ops.padded_answers import pack_answers_ref
from epmoe.ops.padded_rows import BlockLayout, pack_rows_ref

LAYOUT = BlockLayout(3, 7, 21, 3, 20, torch.float32, 5, False)
LAYOUTS = [
    LAYOUT,
    replace(LAYOUT, reduce=True, answers=7),
    replace(LAYOUT, rows=3, answers=4),
    replace(LAYOUT, world=2, rows=300, answers=300, top_k=1, hidden=2050, dtype=torch.bfloat16),
    replace(LAYOUT, world=8, rows=1, answers=1, top_k=8, slots_per_rank=2, reduce=True, dtype=torch.bfloat16),
]


def routed(layout: BlockLayout, tokens: int, device: str):
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layout.hidden, generator=random).to(layout.dtype)
    slots = layout.world * layout.slots_per_rank
    slot = torch.rand(tokens, slots, generator=random).argsort(1)[:, : layout.top_k].int()
    slot[torch.rand(slot.shape, generator=random) < 0.2] = -1
    return x.to(device), slot.to(device), torch.rand(tokens, layout.top_k, generator=random).to(device)


def check_pack_rows(kernel, layout: BlockLayout, tokens: int, device: str) -> None:
    args = routed(layout, tokens, device)
    blocks = [torch.full((layout.world, layout.block_rows, layout.hidden), 7.0, dtype=layout.dtype) for _ in range(2)]
    blocks = [block.to(device) for block in blocks]
    want, got = pack_rows_ref(*args, layout, blocks[0]), kernel(*args, layout, blocks[1])
    for name in vars(want):
        assert torch.equal(getattr(want, name), getattr(got, name)), f"{name} of {tokens} tokens, {layout}"
    (words, slots, weights), (k_words, k_slots, k_weights) = (layout.header(block) for block in blocks)
    assert torch.equal(words[:, :2], k_words[:, :2]) and torch.equal(slots, k_slots), f"header of {layout}"
    for rank, rows in enumerate(want.count_5W[0].clamp(max=layout.rows).tolist()):
        span = slice(layout.header_rows, layout.header_rows + rows)
        assert torch.equal(blocks[0][rank, span], blocks[1][rank, span]), f"rows for rank {rank} of {layout}"
        if weights is not None:
            count = rows * layout.top_k
            assert torch.equal(weights[rank, :count], k_weights[rank, :count])


def check_pack_answers(kernel, layout: BlockLayout, device: str) -> None:
    """Positions at random, -1 for some; only places that hold an answer are compared."""
    random = torch.Generator().manual_seed(layout.rows)
    shape = (layout.world * layout.block_rows, layout.top_k)
    here = torch.rand(shape, generator=random) < 0.4
    pos = torch.where(here, torch.randperm(here.numel(), generator=random).view(shape), -1).int().to(device)
    out = torch.randn(here.numel(), layout.hidden, generator=random).to(layout.dtype).to(device)
    blocks = torch.zeros((2, layout.world, layout.answers, layout.hidden), dtype=layout.dtype, device=device)
    pack_answers_ref(out, pos, layout, blocks[0])
    kernel(out, pos, layout, blocks[1])
    counts = (pos.view(layout.world, -1) >= 0).sum(1).clamp(max=layout.answers).tolist()
    for rank, count in enumerate(counts):
        assert torch.equal(blocks[0, rank, :count], blocks[1, rank, :count])
