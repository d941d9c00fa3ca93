"""What the kernels that put rows into the peers' memory share: which ranks a launch is, and how it moves rows.

C programs a rank (grid ranks x C, rank = program id // C).  A put is bound by latency, not by instructions: rows move
in tiles of several rows, 16 bytes a thread, all loads of a tile ahead of its stores.  (Reading rows a tile ahead,
through shared memory by Triton's ``num_stages`` or in registers, was slower: measured on H200.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from epmoe.ops.p2p_layout import Layout

MAX_BLOCK = 4096  # 4-byte words of a row that move at once


@dataclass(frozen=True)
class PutOptions:
    """How a put runs: programs per rank, wide rows of a tile, rows of a tile that are summed, warps (0: from the row's
    width).

    A link idles until the first tile is read, so tiles are small: 588 rows of 14 KB take 29 us between two H200s, 32
    in tiles of 8 rows."""

    programs: int = 16
    rows: int = 4
    summed: int = 6
    warps: int = 0

    def moved(self, wide: bool) -> int:
        """Rows of a tile; of rows of up to 8 KB twice as many."""
        return self.rows if wide else 2 * self.rows


USUAL = PutOptions()


@dataclass(frozen=True)
class Ranks:
    """The ranks of one launch: ``first`` .. ``first + number - 1``; inputs of several ranks lie behind one another."""

    table_W: torch.Tensor
    order_VW: torch.Tensor
    """int32: in which order each launched rank visits its peers; at most 63 ranks."""
    first: int
    number: int


@dataclass(frozen=True)
class Outgoing:
    """Tokens on their way to the experts.

    Attributes:
        x_TD: rows as they are sent, ``[V * T, D]`` in the model dtype or ``[V * T, sent_bytes]`` uint8.
        slot_TK: int32 global slots or -1; a rank has ``slots_per_rank`` of them.
        weight_TK: float32; travels in reduce mode.
        bound: positions written at each rank, >= T, the same on all ranks.
    """

    x_TD: torch.Tensor
    slot_TK: torch.Tensor
    weight_TK: torch.Tensor
    bound: int
    slots_per_rank: int

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows in 4-byte words, slots and weights, dense; without rows the last stride may be anything."""
        words = self.x_TD.contiguous().view(-1).view(torch.int32)
        return words, self.slot_TK.contiguous(), self.weight_TK.contiguous()


def peer_order(world: int, first: int, number: int) -> torch.Tensor:
    """int32 ``[number, W]``: each launched rank visits its peers from its right neighbour on, itself last."""
    rank_V1 = torch.arange(first, first + number, dtype=torch.int32)[:, None]
    return (rank_V1 + 1 + torch.arange(world, dtype=torch.int32)) % world


def virtual_ranks(layout: Layout, device: torch.device) -> tuple[torch.Tensor, Ranks]:
    """All W ranks in this process, for tests and benches: zeroed buffers uint8 ``[W, total]`` and their `Ranks`."""
    buffer_WB = torch.zeros((layout.world, layout.total), dtype=torch.uint8, device=device)
    table_W = torch.tensor([buffer.data_ptr() for buffer in buffer_WB], dtype=torch.int64, device=device)
    return buffer_WB, Ranks(table_W, peer_order(layout.world, 0, layout.world).to(device), 0, layout.world)


def tile(words: int, options: PutOptions) -> tuple[int, int, int]:
    """Columns, warps and rows of a tile: narrow rows get more rows, so that as many bytes are under way."""
    block = min(triton.next_power_of_2(words), MAX_BLOCK)
    unroll = options.moved(block == MAX_BLOCK) * (MAX_BLOCK // max(block, 512))
    warps = options.warps or max(4, min(16, block * unroll // 2048))
    return block, warps, unroll
