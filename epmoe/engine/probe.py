"""Probe chunks: run a little of a prompt first, see which experts it uses, then choose its home.

A home may change only while no token of the request has been drawn; the new home computes the prompt again from its
start, so nothing but time and traffic depends on the choice.
"""

from __future__ import annotations

import numpy as np
import torch

from epmoe.engine.scheduler import Chunk
from placement.homes import Affinity
from placement.plan import Plan


class ProbeScores:
    """Scores the ranks for the chunks under probe: the sum of a table over the experts that their tokens chose.

    The table is the plan's affinity (see ``placement.homes``), or else 1 where a rank holds a copy of the expert.  An
    observer of routing (see ``model.decoder``): rows of other chunks are not looked at.
    """

    def __init__(self, plan: Plan, affinity: Affinity | None, device: torch.device) -> None:
        table_LEW = plan.copy_slot_LEW >= 0 if affinity is None else affinity.expert_rank_LEW
        self._table_LEW = torch.from_numpy(table_LEW.astype(np.float32)).to(device)
        self._spans: list[tuple[int, int, int]] = []  # (request id, first row, end)
        self._score: dict[int, torch.Tensor] = {}

    def expect(self, chunks: list[Chunk]) -> None:
        """Say which chunks come next, in the order of their rows."""
        self._spans, row = [], 0
        for chunk in chunks:
            if chunk.request.probe:
                self._spans.append((chunk.request.id, row, row + chunk.count))
            row += chunk.count

    def __call__(self, expert_LTK: torch.Tensor, first_row: int) -> None:
        layer_L11 = torch.arange(len(expert_LTK), device=expert_LTK.device)[:, None, None]
        for number, start, stop in self._spans:
            span_LtK = expert_LTK[:, max(start - first_row, 0) : max(stop - first_row, 0)].long()
            score_W = self._table_LEW[layer_L11, span_LtK].sum((0, 1, 2))
            self._score[number] = self._score.get(number, 0) + score_W

    def take(self, number: int) -> torch.Tensor:
        """The score of each rank, float32 ``[W]``, on the host; forgotten here."""
        return self._score.pop(number).cpu()

    def forget(self, number: int) -> None:
        self._score.pop(number, None)

    def saved(self) -> dict[int, torch.Tensor]:
        return dict(self._score)

    def restore(self, saved: dict[int, torch.Tensor]) -> None:
        """Take back what was scored since ``saved()``."""
        self._score = dict(saved)
