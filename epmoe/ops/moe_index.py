"""From choices to expert order: which row each expert's GEMM reads, and where each choice's result lies.

Example, 3 rows, K = 2, 2 local slots, -1 = the choice lives elsewhere::

    slot_RK   = [[1, -1], [0, 1], [1, 0]]
    offset_L1 = [0, 2, 5]                  slot 0 owns pairs 0..1, slot 1 owns pairs 2..4
    row_M     = [1, 2, 0, 1, 2, -]         row of each pair; the last entry is undefined
    pos_RK    = [[2, -1], [0, 3], [4, 1]]  pair of each choice
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MoEIndex:
    """Pairs (row, choice) sorted by local slot, stable in (row, choice) order; all int32 and on the device."""

    offset_L1: torch.Tensor
    """First pair of each slot; the last entry is the number of pairs."""
    row_M: torch.Tensor
    """Row of each pair, ``[R * K]``; undefined from ``offset_L1[L]`` on."""
    pos_RK: torch.Tensor
    """Pair of each choice, -1 where the choice has no local slot."""


def build_index_ref(slot_RK: torch.Tensor, num_slots: int) -> MoEIndex:
    """Index of ``slot_RK`` (int32 ``[R, K]``, local slot or -1); R = 0 is legal."""
    slot_N = slot_RK.reshape(-1)
    here_N = slot_N >= 0
    key_N = slot_N.where(here_N, num_slots).long()
    order_N = torch.argsort(key_N, stable=True)
    count_L = torch.bincount(key_N, minlength=num_slots + 1)[:num_slots]
    offset_L1 = torch.zeros(num_slots + 1, dtype=torch.int32, device=slot_RK.device)
    offset_L1[1:] = count_L.cumsum(0)
    pos_N = torch.empty_like(slot_N)
    pos_N[order_N] = torch.arange(slot_N.numel(), dtype=slot_N.dtype, device=slot_N.device)
    pos_N.masked_fill_(~here_N, -1)
    return MoEIndex(offset_L1, (order_N // max(slot_RK.shape[1], 1)).int(), pos_N.view(slot_RK.shape))


build_index = build_index_ref
