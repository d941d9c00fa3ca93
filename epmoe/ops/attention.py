"""Attention over a paged KV cache, for any mix of prefill chunks and decodes.

Layout of one layer (KVH key heads, ``H = G * KVH`` query heads)::

    cache_HBSd   [2, KVH, blocks, block_size, d]     keys, values; one head's block is contiguous
    q_THd        [T, H, d]   tokens of all sequences, concatenated in batch order

Worked example: block_size 4; sequence 0 has 6 cached tokens and asks for its last 2 (query_lens[0] = 2, kv_lens[0] = 6)
with blocks (7, 2): head h finds its keys at cache[0, h, 7, 0:4] and cache[0, h, 2, 0:2]; its queries stand at positions
4 and 5 and see keys 0..4 and 0..5.

A step's batch is an `AttentionBatch`, made of lengths and tensors of that step, or, for decode steps replayed from a
CUDA graph, a `DecodeBatch` (`ops.decode_batch`), whose tensors stay in place and are refilled between replays::

    batch = decode_batch(DecodeShape(sequences=64, max_kv_len=4096, block_size=16, kv_heads=4, group=8), device)
    batch.fill(kv_lens, blocks)     # one asynchronous copy; then capture once, and replay after every later fill

Both have `position_T`, `slot_T`, `block_table_NP`, `block_size` and `work`, which is all that a model and the kernels
read.  A padding sequence has slot -1, position 0 and an attention output of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from epmoe.ops.attention_kernels import paged_attention_triton
from epmoe.ops.attention_work import Heads, Work, eager_work
from epmoe.ops.linear import TILE_ROWS

TILE_KEYS = 64


@dataclass(frozen=True)
class Group:
    """n sequences of Q queries each that the CPU computes together, keys padded to S (whole blocks).

    Args:
        row_nQ: int64, rows of the queries among the step's tokens.
        block_nP: int64, cache blocks of each sequence; past its end its first block stands in (finite, and masked).
        stale: int64, those of the n * S gathered keys that nothing may have been written to.
        position_nQ: int64, position of each query.
    """

    row_nQ: torch.Tensor
    block_nP: torch.Tensor
    stale: torch.Tensor
    position_nQ: torch.Tensor
    block_size: int

    def gather(self, cache_HBSd: torch.Tensor) -> torch.Tensor:
        """Keys and values ``[2, KVH, n, S, d]``; what is stale is zero, since memory never written may hold NaN."""
        sides, heads, _, _, d = cache_HBSd.shape
        n, blocks = self.block_nP.shape
        picked = cache_HBSd.flatten(0, 1).flatten(2).index_select(1, self.block_nP.flatten())
        filled = picked.view(sides, heads, -1, d).index_fill_(2, self.stale, 0)
        return filled.view(sides, heads, n, blocks * self.block_size, d)

    @cached_property
    def hidden_nQS(self) -> torch.Tensor:
        """float32, minus infinity where a query may not look, else 0."""
        keys_S = torch.arange(self.block_nP.shape[1] * self.block_size)
        hidden = torch.zeros((*self.position_nQ.shape, len(keys_S)))
        return hidden.masked_fill_(keys_S > self.position_nQ[..., None], -torch.inf)


@dataclass(frozen=True)
class AttentionBatch:
    """Where each token of a step reads and writes. N sequences, T tokens, P the width of the block table.

    Args:
        query_lens: tokens of each sequence in this step (host ints, at least 1 each).
        kv_lens: cached tokens of each sequence once this step's are written (host ints).
        block_table_NP: int32 ``[N, P]`` cache blocks of each sequence; entries past its length are never read.
        position_T: int64 position of each token in its sequence.
        slot_T: int64 ``block * block_size + offset`` where each token's key and value go.
    """

    query_lens: list[int]
    kv_lens: list[int]
    block_table_NP: torch.Tensor
    position_T: torch.Tensor
    slot_T: torch.Tensor
    block_size: int

    def work(self, kv_heads: int, group: int, fixed: bool, latent: bool = False) -> list[Work]:
        """The kernel launches of a layer, for ``group`` query heads per key head; made once a step and kept."""
        key = Heads(kv_heads, group, fixed, latent)
        if key not in self._work:
            self._work[key] = eager_work(self.query_lens, self.kv_lens, key, self.block_table_NP.device)
        return self._work[key]

    @cached_property
    def _work(self) -> dict:
        return {}

    @cached_property
    def groups(self) -> list[Group]:
        """A prompt chunk stands alone; decodes whose lengths are within a factor of two go together."""
        members: dict[object, list[tuple[int, int]]] = {}
        start = 0
        for n, (q_len, kv_len) in enumerate(zip(self.query_lens, self.kv_lens)):
            key = max(6, kv_len.bit_length()) if q_len == 1 else ("chunk", n)
            members.setdefault(key, []).append((n, start))
            start += q_len
        return [self._group(sequences) for sequences in members.values()]

    def _group(self, sequences: list[tuple[int, int]]) -> Group:
        numbers, starts = zip(*sequences)
        kv_len_n = torch.tensor([self.kv_lens[n] for n in numbers])
        query_Q = torch.arange(self.query_lens[numbers[0]])
        used_n = -(-kv_len_n // self.block_size)
        block_nP = self.block_table_NP[list(numbers), : int(used_n.max())].long()
        inside = torch.arange(block_nP.shape[1]) < used_n[:, None]
        key_nS = torch.arange(block_nP.shape[1] * self.block_size).expand(len(numbers), -1)
        # The first block of a sequence stands in past its end: if even that is not full, all of it is stale there.
        written_n = torch.where(used_n > 1, used_n * self.block_size, key_nS.shape[1])
        stale_nS = (key_nS >= kv_len_n[:, None]) & (key_nS < written_n[:, None])
        return Group(
            row_nQ=torch.tensor(starts)[:, None] + query_Q,
            block_nP=block_nP.where(inside, block_nP[:, :1]),
            stale=stale_nS.flatten().nonzero().flatten(),
            position_nQ=kv_len_n[:, None] - len(query_Q) + query_Q,
            block_size=self.block_size,
        )


def write_kv(cache_HBSd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, slot_T: torch.Tensor) -> None:
    """Store this step's keys and values in their slots."""
    flat = cache_HBSd.flatten(2, 3)
    flat[0].index_copy_(1, slot_T, k_THd.transpose(0, 1))
    flat[1].index_copy_(1, slot_T, v_THd.transpose(0, 1))


def paged_attention(
    q_THd: torch.Tensor, cache_HBSd: torch.Tensor, batch: AttentionBatch, scale: float, *, tiled: bool = False
) -> torch.Tensor:
    """Causal attention of this step's queries over their sequences' cached keys: ``[T, H, d]``.

    Args:
        tiled: fixed tiles (on CPU 16 rows x 64 keys) from position 0 with a float32 online softmax, so that a query's
            bits do not depend on the batch or on how its prompt was cut into chunks.
    """
    attend = paged_attention_triton if q_THd.is_cuda else paged_attention_ref
    return attend(q_THd, cache_HBSd, batch, scale, tiled)


def paged_attention_ref(
    q_THd: torch.Tensor, cache_HBSd: torch.Tensor, batch: AttentionBatch, scale: float, tiled: bool = False
) -> torch.Tensor:
    """`paged_attention` in torch, the path on CPU."""
    out_THd = torch.empty_like(q_THd)
    for group in batch.groups:
        k, v = group.gather(cache_HBSd)
        attend_group(q_THd, (k, v), out_THd, group, (scale, tiled))
    return out_THd


def attend_group(q_THd, kv_HnSd: tuple[torch.Tensor, torch.Tensor], out_THd, group: Group, rule: tuple) -> None:
    """Write the group's rows of ``out_THd``; ``rule``: scale, and whether tiled."""
    k, v = kv_HnSd
    n, Q = group.row_nQ.shape
    row_Q = group.row_nQ.flatten()
    # Query heads of one key head become rows, so that keys are never repeated in memory: [KVH, n, G * Q, d].
    q = q_THd[row_Q].view(n, Q, len(k), -1, k.shape[-1]).permute(2, 0, 3, 1, 4).flatten(2, 3)
    scale, tiled = rule
    rows = (_attend_tiled if tiled else _attend)(q, k, v, group, scale)
    rows = rows.view(len(k), n, -1, Q, v.shape[-1]).permute(1, 3, 0, 2, 4)
    out_THd[row_Q] = rows.reshape(n * Q, -1, v.shape[-1])


def _attend(q_HnRd, k_HnSd, v_HnSd, group: Group, scale: float) -> torch.Tensor:
    n, Q = group.row_nQ.shape
    folded = q_HnRd.shape[2] // Q
    if Q > 1:
        mask = group.hidden_nQS.to(q_HnRd.dtype).repeat(1, folded, 1)[None].expand(len(q_HnRd), -1, -1, -1)
        return functional.scaled_dot_product_attention(q_HnRd, k_HnSd, v_HnSd, attn_mask=mask, scale=scale)
    score = torch.matmul(q_HnRd, k_HnSd.transpose(2, 3)).float()
    weight = score.mul_(scale).add_(group.hidden_nQS).softmax(-1)
    return torch.matmul(weight.to(v_HnSd.dtype), v_HnSd)


def _attend_tiled(q_HnRd, k_HnSd, v_HnSd, group: Group, scale: float) -> torch.Tensor:
    """Online softmax (Milakov & Gimelshein 2018) over key tiles in order; a tile a row cannot see changes no bit."""
    H, n, R, d = q_HnRd.shape
    S, Q = k_HnSd.shape[2], group.row_nQ.shape[1]
    tiles, pad_rows, pad_keys = -(-R // TILE_ROWS), -R % TILE_ROWS, -S % TILE_KEYS
    q = functional.pad(q_HnRd.float(), (0, 0, 0, pad_rows)).reshape(-1, TILE_ROWS, d)
    k, v = (functional.pad(x.float(), (0, 0, 0, pad_keys)).flatten(0, 1) for x in (k_HnSd, v_HnSd))
    position = group.position_nQ.repeat(1, R // Q)  # of each row; rows are (folded head, query)
    position = functional.pad(position, (0, pad_rows)).expand(H, -1, -1).reshape(-1, TILE_ROWS, 1)

    peak = q.new_full((len(q), TILE_ROWS, 1), -torch.inf)
    total = torch.zeros_like(peak)
    acc = q.new_zeros(len(q), TILE_ROWS, v.shape[-1])
    for start in range(0, S + pad_keys, TILE_KEYS):
        k_tile, v_tile = (x[:, start : start + TILE_KEYS].repeat_interleave(tiles, 0) for x in (k, v))
        score = torch.bmm(q, k_tile.transpose(1, 2)) * scale
        score = score.masked_fill(torch.arange(start, start + TILE_KEYS) > position, -torch.inf)
        new_peak = torch.maximum(peak, score.amax(-1, keepdim=True))
        keep = torch.exp(peak - new_peak)
        weight = torch.exp(score - new_peak)
        total = total * keep + weight.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weight, v_tile)
        peak = new_peak
    return (acc / total).view(H, n, tiles * TILE_ROWS, -1)[:, :, :R].to(q_HnRd.dtype)
