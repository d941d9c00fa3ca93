"""Probe chunks: run a little of a prompt first, see which experts it uses, then choose its home.

A home may change only while no token of the request has been drawn; the new home computes the prompt again from its
start, so nothing but time and traffic depends on the choice.
"""

from __future__ import annotations

import torch

from epmoe.engine.scheduler import Chunk
from placement.plan import Plan


class ProbeScores:
    """Counts, for the chunks under probe, how many (token, layer) rows each rank could serve for itself.

    An observer of routing (see ``model.decoder``): rows of other chunks are not looked at.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._holds_LEW = torch.from_numpy(plan.copy_slot_LEW >= 0).to(device)
        self._spans: list[tuple[int, int, int]] = []  # (request id, first row, end)
        self._score: dict[int, torch.Tensor] = {}

    def expect(self, chunks: list[Chunk]) -> None:
        """Say which chunks come next, in the order of their rows."""
        self._spans, row = [], 0
        for chunk in chunks:
            if chunk.request.probe:
                self._spans.append((chunk.request.id, row, row + chunk.count))
            row += chunk.count

    def __call__(self, moe_layer: int, expert_TK: torch.Tensor, first_row: int) -> None:
        for number, start, stop in self._spans:
            span_TK = expert_TK[max(start - first_row, 0) : max(stop - first_row, 0)]
            rows_W = self._holds_LEW[moe_layer][span_TK.long()].any(1).sum(0)
            self._score[number] = self._score.get(number, 0) + rows_W

    def take(self, number: int) -> torch.Tensor:
        """The score of each rank, int64 ``[W]``, on the host; forgotten here."""
        return self._score.pop(number).cpu()

    def forget(self, number: int) -> None:
        self._score.pop(number, None)
