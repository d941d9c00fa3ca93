"""Where things lie in a rank's exchange buffer: one lane's regions, at the same byte offsets on every rank.

Kernels reach every rank's buffer, their own included, through a table of base addresses (int64 ``[W]``, from
``comm.open_buffers``), so that W ranks on W devices, W processes on one device and W virtual ranks in one launch run
the same code.  Letters: W ranks, T_cap most tokens of a rank, K choices, D hidden size.

======== ==================================================================================================
region   contents
======== ==================================================================================================
state    int64 ``[STATE]``, this rank's own words: see ``STATE`` below
sent     int64 ``[3, W]``, this rank's own counts by peer: rows sent, those of them at the last signal, pairs
signal   int64 ``[3, W]``: word [d, w] is rank w's last signal, ``epoch << 32 | bound << 16 | rows``;
         d = dispatch, combine, header
header   int32 ``[W, 4]`` (copy): rows and pairs that rank w sends, and where its home puts its answers: the first of
         its rows among w's, the first of its pairs
slot     int32 ``[W, bound, K]``: local slot of each choice of each row received, -1 = elsewhere or no row
token    int32 ``[W, bound]``: home token of each row
weight   float32 ``[W, bound, K]``: routing weights (reduce mode)
rows     ``[W, bound, D]``: rows received, as sent; the sender picks its own position
returned ``[bound, J, D]``: the experts' answers; J = K in exact mode, W in reduce mode
======== ==================================================================================================

``bound`` <= T_cap is the step's agreed bound on any rank's tokens: regions keep their place, rows lie dense in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

DISPATCH, COMBINE, HEADER = 0, 1, 2
ALIGN = 256
MOST_TOKENS = (1 << 16) - 1  # a signal counts in 16 bits
# Words of ``state``: for each d the epochs sent and waited for and the programs that are done; then single words: a
# wait failed, the step, tokens dispatched so far, positions written so far.
SENT, WAITED, DONE = 0, 3, 6
FAILED, STEP, TOKENS, POSITIONS = 9, 10, 11, 12
STATE = 16


@dataclass(frozen=True)
class Layout:
    """Sizes of one lane's buffer; offsets in bytes, each a multiple of 256."""

    world: int
    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    reduce: bool
    sent_bytes: int = 0
    """Bytes of a row on its way to the experts; 0: as the model's rows."""

    def __post_init__(self):
        assert self.tokens <= MOST_TOKENS, f"{self.tokens} tokens of a lane, signals count up to {MOST_TOKENS}"
        if not self.sent_bytes:
            object.__setattr__(self, "sent_bytes", self.row_bytes)
        for size in (self.row_bytes, self.sent_bytes):
            assert size % 16 == 0, f"rows of {size} bytes do not move 16 bytes at a time"

    @property
    def answers(self) -> int:
        """J: rows that may return for one token."""
        return self.world if self.reduce else self.top_k

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @cached_property
    def sizes(self) -> dict[str, int]:
        rows = self.world * self.tokens
        return {
            "state": STATE * 8,
            "sent": 3 * self.world * 8,
            "signal": 3 * self.world * 8,
            "header": self.world * 4 * 4,
            "slot": rows * self.top_k * 4,
            "token": rows * 4,
            "weight": rows * self.top_k * 4 if self.reduce else 0,
            "rows": rows * self.sent_bytes,
            "returned": self.tokens * self.answers * self.row_bytes,
        }

    @cached_property
    def starts(self) -> dict[str, int]:
        starts, start = {}, 0
        for name, size in self.sizes.items():
            starts[name] = start
            start += size + -size % ALIGN
        return starts

    def at(self, region: str) -> int:
        """Byte offset of a region."""
        return self.starts[region]

    @property
    def for_signals(self) -> tuple[int, int, int]:
        """Byte offsets of what the end of a send kernel counts in and signals through: state, sent, signal."""
        return self.at("state"), self.at("sent"), self.at("signal")

    @cached_property
    def total(self) -> int:
        """Bytes of one lane's buffer."""
        return sum(size + -size % ALIGN for size in self.sizes.values())

    def view(self, buffer: torch.Tensor, region: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A dense tensor at the start of a region of ``buffer`` (uint8 ``[total]``)."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        assert count <= self.sizes[region], f"{shape} of {dtype} is more than the {region} region holds"
        start = self.at(region)
        return buffer[start : start + count].view(dtype).view(shape)
