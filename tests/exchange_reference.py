"""What dispatch, experts and combine mean: plain loops over ranks, tokens and choices, for every exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

ExpertOf = Callable[[int, torch.Tensor], torch.Tensor]  # (global slot, row in model dtype) -> row in float32


class Row(NamedTuple):
    """A row that an expert rank receives: its home, its token there, and the local slot of each choice or -1."""

    home: int
    token: int
    local_K: list[int]


def received_rows(slots_W: list[torch.Tensor], rank: int, slots_per_rank: int) -> list[Row]:
    """The rows that ``rank`` receives, given every home's slots ``[T, K]``: in (home, token) order, once each."""
    rows = []
    for home, slot_TK in enumerate(slots_W):
        for token, slots in enumerate(slot_TK.tolist()):
            local = [slot % slots_per_rank if slot >= 0 and slot // slots_per_rank == rank else -1 for slot in slots]
            if max(local, default=-1) >= 0:
                rows.append(Row(home, token, local))
    return rows


def exchange_exact(x_TD, slot_TK, weight_TK, expert: ExpertOf, add_TD=None) -> torch.Tensor:
    """Each (token, choice) is one row, rounded; the home multiplies and adds in choice order, and rounds once."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    for t in range(slot_TK.shape[0]):
        for k in range(slot_TK.shape[1]):
            slot = int(slot_TK[t, k])
            if slot >= 0:
                y_TD[t] += weight_TK[t, k] * expert(slot, x_TD[t]).to(x_TD.dtype).float()
    return _finish(y_TD, x_TD.dtype, add_TD)


def exchange_reduce(x_TD, slot_TK, weight_TK, expert: ExpertOf, stride: int, add_TD=None) -> torch.Tensor:
    """Each (token, rank) is one row: the rank's weighted sum in choice order, rounded; the home adds in rank order.

    Args:
        stride: global slots per rank.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    for t in range(slot_TK.shape[0]):
        slots = slot_TK[t].tolist()
        for rank in sorted({slot // stride for slot in slots if slot >= 0}):
            part_D = torch.zeros(x_TD.shape[1], dtype=torch.float32)
            for k, slot in enumerate(slots):
                if slot >= 0 and slot // stride == rank:
                    part_D += weight_TK[t, k] * expert(slot, x_TD[t]).to(x_TD.dtype).float()
            y_TD[t] += part_D.to(x_TD.dtype).float()
    return _finish(y_TD, x_TD.dtype, add_TD)


def _finish(y_TD: torch.Tensor, dtype: torch.dtype, add_TD: torch.Tensor | None) -> torch.Tensor:
    return y_TD.to(dtype) if add_TD is None else y_TD.to(dtype) + add_TD
