"""`PromptBatch` in the attention kernels, for the interpreter's tests and the GPU's."""

from __future__ import annotations

import numpy as np
import torch
from attention_cases import LENS, Cache

from epmoe.engine.staging import buffer_bytes, views
from epmoe.ops.attention_kernels import paged_attention_triton
from epmoe.ops.prompt_batch import PromptBatch, PromptShape


def check_prompt_batch(heads, dtype, device, lens=LENS, block_size: int = 16) -> None:
    """One set of buffers through steps of prompts, of decodes, of both, and of nothing, against float64 loops."""
    H, KVH, _ = heads
    cache = Cache(lens, heads, dtype, device, block_size)
    prompts = [(n, 0, max(1, length - 3)) for n, length in enumerate(lens)]
    rest = [(n, stop, lens[n]) for n, _, stop in prompts if stop < lens[n]]
    mixed = [(n, b - 1, b) if n % 2 else (n, a, b) for n, a, b in rest]
    shape = PromptShape(sum(lens) + 5, len(lens) + 2, max(lens) + 40, block_size, KVH, H // KVH)
    batch, buffer = PromptBatch(shape, torch.device(device)), None
    for spans in (prompts, mixed, [(n, b - 1, b) for n, _, b in rest], [], mixed[::-1]):
        step = cache.batch(spans)
        count_N = np.array([b - a for _, a, b in spans], np.int64)
        lens_N3 = np.stack((count_N.cumsum() - count_N, count_N, np.array([b for *_, b in spans], np.int64)), 1)
        positions = step.position_T.cpu().numpy().astype(np.int64)
        arrays = batch.arrays(lens_N3, step.block_table_NP.cpu().numpy(), positions, positions + 7)
        if buffer is None:
            buffer = torch.zeros(buffer_bytes(arrays), dtype=torch.uint8, device=device)
            batch.take(views(buffer, arrays))
        for view, array in zip(views(buffer, arrays), arrays):
            view.copy_(torch.from_numpy(array))
        q = torch.zeros(shape.tokens, *cache.q[0].shape[1:], dtype=dtype, device=device)
        total = len(positions)
        if total:
            q[:total] = cache.queries(spans)
        out = paged_attention_triton(q, cache.cache, batch, cache.scale, False)
        if total:
            cache.require_right(out[:total], spans)
        assert batch.position_T[:total].tolist() == positions.tolist()
        assert batch.slot_T.tolist() == [p + 7 for p in positions] + [-1] * (shape.tokens - total)
