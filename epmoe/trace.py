"""Counts and records what the routers choose, off the hot path: only real tokens, bounded in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from epmoe.ops.expert_counts import count_experts
from placement.plan import MoEShape
from placement.trace import id_dtype

if TYPE_CHECKING:
    from epmoe.engine.request import Request
    from epmoe.engine.scheduler import Chunk

Observe = Callable[[torch.Tensor, int], None]  # choices [L, T, K], -1 on padding rows; their first row in the step


def observe_all(observers: list[Observe]) -> Observe:
    """One observer that hands a lane's choices to all of them."""

    def observe(expert_LTK: torch.Tensor, first_row: int) -> None:
        for each in observers:
            each(expert_LTK, first_row)

    return observe


class ExpertLoads:
    """(token, choice) pairs per (MoE layer, expert) on this home rank, counted on the device.

    ``active_L``: experts that were chosen at all, summed over the lanes that were run.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.load_LE = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        self.active_L = torch.zeros(num_layers, dtype=torch.int64, device=device)

    def __call__(self, expert_LTK: torch.Tensor, first_row: int) -> None:
        count_experts(expert_LTK, self.load_LE, self.active_L)

    def saved(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.load_LE.clone(), self.active_L.clone()

    def restore(self, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Take back what was counted since ``saved()``."""
        self.load_LE.copy_(saved[0])
        self.active_L.copy_(saved[1])


@dataclass
class _Sequence:
    """What is held of one request: its first ``count`` positions, as columns ``start .. stop`` of pieces, in order."""

    request: Request
    count: int = 0
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # (piece, start, stop)


class RoutingRecorder:
    """The experts that the tokens of this rank's requests chose, each (request, position) once.

    As an observer it copies a lane's choices into one buffer on the device.  :meth:`keep`, once the step is
    launched, takes the columns of new positions and starts their copy to the host; a position that is computed again
    after a preemption chooses as before and is left out.  Once ``limit`` tokens are held it stops: the sequences then
    under way end there, later ones are not recorded.  Prefix reuse must be off: reused positions run no router.
    """

    def __init__(self, shape: MoEShape, max_batch_tokens: int, limit: int, device: torch.device) -> None:
        assert shape.num_experts <= 1 << 15, f"{shape.num_experts} experts do not fit int16"
        self._dtype = id_dtype(shape.num_experts)
        held = torch.uint8 if self._dtype is np.uint8 else torch.int16
        size = (shape.num_layers, max_batch_tokens, shape.top_k)
        self._step_LTK = torch.empty(size, dtype=held, device=device)
        self._pieces: list[torch.Tensor] = []  # [L, columns, K] on the host, pinned where they come from a GPU
        self._sequences: dict[int, _Sequence] = {}  # by request id, in order of first computation
        self._room = limit

    @property
    def full(self) -> bool:
        return self._room == 0

    def __call__(self, expert_LTK: torch.Tensor, first_row: int) -> None:
        self._step_LTK[:, first_row : first_row + expert_LTK.shape[1]].copy_(expert_LTK)

    def keep(self, chunks: list[Chunk]) -> None:
        """Hold on to the new positions of the step just launched with ``chunks``."""
        if self.full:
            return
        columns, column, width = [], 0, 0
        for chunk in chunks:
            sequence = self._sequences.get(chunk.request.id) or _Sequence(chunk.request)
            assert chunk.start <= sequence.count, f"request {chunk.request.id}: {sequence.count} to {chunk.start} lack"
            new = min(chunk.start + chunk.count - sequence.count, self._room)
            if new > 0:
                first = column + sequence.count - chunk.start
                columns.append(self._step_LTK[:, first : first + new])
                sequence.spans.append((len(self._pieces), width, width + new))
                sequence.count += new
                self._sequences[chunk.request.id] = sequence
                self._room -= new
                width += new
            column += chunk.count
        if columns:
            self._pieces.append(_to_host(torch.cat(columns, 1)))

    def forget(self, number: int) -> None:
        """Leave out a request that another rank computes from its start; its columns still count against the limit."""
        self._sequences.pop(number, None)

    def sequences(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(request id, token ids uint32 ``[T]``, expert ids ``[T, L, K]``) of each request; waits for the device.

        T is at most prompt + output - 1: the last drawn token is not run, or only in a step that no longer counted.
        """
        if self._step_LTK.is_cuda:
            torch.cuda.synchronize(self._step_LTK.device)
        for number, sequence in self._sequences.items():
            request = sequence.request
            count = min(sequence.count, max(len(request.prompt), request.known - 1))
            held_LTK = torch.cat([self._pieces[piece][:, start:stop] for piece, start, stop in sequence.spans], 1)
            ids_TLK = held_LTK[:, :count].transpose(0, 1).contiguous().numpy().astype(self._dtype, copy=False)
            yield number, np.array(request.tokens(0, count), np.uint32), ids_TLK


def _to_host(piece: torch.Tensor) -> torch.Tensor:
    if not piece.is_cuda:
        return piece
    host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
    return host.copy_(piece, non_blocking=True)
