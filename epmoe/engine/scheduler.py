"""Which requests of this rank run in a step, and how many tokens of each.

First come, first served under a token budget: running requests in order of arrival (a request's prompt is cut into
chunks that leave room for every decode), then waiting ones.  When blocks run out the youngest request is preempted
and later recomputed; the oldest always advances, so nothing starves.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from epmoe.config import EngineConfig
from epmoe.engine.kv_cache import BlockPool
from epmoe.engine.request import Request
from epmoe.ops.draw import UNDRAWN


class Chunk(NamedTuple):
    """Tokens ``start .. start + count`` of a request run in a step; ``samples``: its next token is then drawn.

    A tuple, since a step makes one for each of hundreds of sequences.
    """

    request: Request
    start: int
    count: int
    samples: bool
    position: int  # of the token to be drawn, if it samples

    def cut(self, count: int) -> tuple[Chunk, Chunk]:
        """The first ``count`` tokens, which draw nothing, and the rest."""
        assert 0 < count < self.count, f"{count} of {self.count} tokens"
        rest = Chunk(self.request, self.start + count, self.count - count, self.samples, self.position)
        return Chunk(self.request, self.start, count, False, self.position), rest


class Scheduler:
    """The queues of one rank. ``running`` and ``waiting`` are in order of arrival (request id)."""

    def __init__(self, engine: EngineConfig, pool: BlockPool, eos_token_ids: tuple[int, ...]) -> None:
        self.engine, self.pool, self.eos = engine, pool, frozenset(eos_token_ids)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._rows = list(range(engine.max_requests - 1, -1, -1))

    # -- intake -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        assert 0 < len(request.prompt) < self.engine.max_model_len, f"prompt of {len(request.prompt)} tokens"
        request.longest = longest(len(request.prompt), request.params.max_tokens, self.engine)
        self.waiting.append(request)

    def abort(self, request_id: int) -> Request | None:
        """Drop a request, running or not; its blocks are free at once. ``None`` if it is not here (any more)."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == request_id:
                    self._finish(request, "abort")
                    return request
        return None

    def withdraw(self, request_id: int) -> None:
        """Take out a request that moves to another rank."""
        for queue in (self.running, self.waiting):
            for request in list(queue):
                if request.id == request_id:
                    self._remove(request)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def queued_tokens(self) -> int:
        """Tokens this rank has still to run: prompts not computed, and outputs at their longest."""
        return sum([r.longest - r.computed for queue in (self.running, self.waiting) for r in queue])

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """Choose the step's chunks, allocate their blocks and count their tokens as computed."""
        budget = self.engine.max_batch_tokens
        chunks: list[Chunk] = []
        wants = list(map(self._want, self.running))
        decodes = wants.count(1)
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            decodes -= wants[index] == 1
            count = min(wants[index], budget - decodes)
            if count > 0:
                need = self._missing_blocks(request, count)
                if need > 0 and self._make_room(request, need):
                    preempted = True
                    if request.row < 0:  # it was the youngest itself
                        break
                    decodes = wants[index + 1 : len(self.running)].count(1)  # the young end is gone
                chunks.append(self._take(request, count, need))
                budget -= count
            index += 1
        if not preempted:
            self._admit(chunks, budget)
        return chunks

    def commit(self, chunks: list[Chunk], tokens: list[int]) -> list[tuple[Request, int]]:
        """Take the drawn tokens (one per sampling chunk, in order); returns those that count, with their request.

        A request that ended after the step was launched gets nothing: its extra token is dropped.  One that drew
        `UNDRAWN` ends with the reason "error".
        """
        kept = []
        drawn = iter(tokens)
        for chunk in chunks:
            request = chunk.request
            if not chunk.samples:
                if request.finish_reason is None:
                    self.pool.publish(request)
                continue
            token = next(drawn)
            request.pending -= 1
            if request.finish_reason is not None:
                continue
            kept.append((request, token))
            if token == UNDRAWN:
                self._finish(request, "error")
                continue
            request.output.append(token)
            if request.blocks:
                self.pool.publish(request)
            if reason := self._stops(request, token):
                self._finish(request, reason)
        return kept

    # -- parts --------------------------------------------------------------------------------------------------

    def _want(self, request: Request) -> int:
        """Tokens the request could run now; 0 once its last token is on its way, or while its home is undecided."""
        total = len(request.prompt) + len(request.output) + request.pending
        return (request.probe or total) - request.computed if total < request.longest else 0

    def _missing_blocks(self, request: Request, count: int) -> int:
        return -(-(request.computed + count) // self.pool.block_size) - len(request.blocks)

    def _make_room(self, request: Request, need: int) -> bool:
        """Free ``need`` blocks by preempting from the young end; says whether anyone was."""
        preempted = False
        while need > self.pool.num_free and request.row >= 0:
            self._preempt(self.running[-1])
            preempted = True
        return preempted

    def _preempt(self, victim: Request) -> None:
        self._leave(victim)
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1

    def _take(self, request: Request, count: int, need: int) -> Chunk:
        if need > 0:
            request.blocks += self.pool.allocate(need)
        start, total = request.computed, len(request.prompt) + len(request.output) + request.pending
        request.computed = start + count
        samples = start + count == total
        request.pending += samples
        return Chunk(request, start, count, samples, total)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.engine.max_requests:
            request = self.waiting[0]
            if request.pending:  # preempted with a token still on the device: its id is known next step
                break
            prefix = [] if request.probe else self.pool.hold_prefix(request)  # a probe is there to be computed
            roomy = self.pool.blocks_for(request.total) - len(prefix) <= self.pool.num_free
            if not roomy or self._can_share_soon(request, len(prefix)):
                self.pool.release(prefix)
                break
            self.waiting.popleft()
            request.blocks = prefix
            request.computed = len(prefix) * self.pool.block_size
            request.row = self._rows.pop()
            self._insert(request)
            count = min(self._want(request), budget)
            chunks.append(self._take(request, count, self._missing_blocks(request, count)))
            budget -= count

    def _can_share_soon(self, request: Request, held: int) -> bool:
        """Whether a sample's next block is just being computed, by another sample of its prompt: it waits for that."""
        if not request.sample_index or held >= (request.known - 1) // self.pool.block_size:
            return False
        wanted = request.block_hashes[held : held + 1]
        return bool(wanted) and any(other.block_hashes[held : held + 1] == wanted for other in self.running)

    def _insert(self, request: Request) -> None:
        at = len(self.running)
        while at and self.running[at - 1].id > request.id:
            at -= 1
        self.running.insert(at, request)

    def _stops(self, request: Request, token: int) -> str | None:
        params = request.params
        if token in params.stop_token_ids or (token in self.eos and not params.ignore_eos):
            return "stop"
        return "length" if len(request.prompt) + len(request.output) >= request.longest else None

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._remove(request)

    def _remove(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Out of ``running``: blocks and device row are given back."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.published = [], 0
        self._rows.append(request.row)
        request.row = -1


def longest(prompt_tokens: int, max_tokens: int, engine: EngineConfig) -> int:
    """Tokens that a request may come to: ``max_tokens`` far beyond the model's length weighs no more than that."""
    return min(prompt_tokens + max_tokens, engine.max_model_len)


def split_lanes(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Cut a step in two lanes (see ``moe.overlap``) of about equal tokens, in order.

    The cut is between requests if one lies within an eighth (or half a token) of the middle; else the chunk in the
    middle is cut, and its earlier part (lane 0) writes its keys before the later part attends, in every layer.
    """
    total = sum(chunk.count for chunk in chunks)
    before = 0
    for n, chunk in enumerate(chunks):
        after = before + chunk.count
        if 2 * after >= total:
            over, under = 2 * after - total, total - 2 * before
            if chunk.count == 1 or min(over, under) <= max(1, total // 8):
                end = n + 1 if over <= under else n
                return chunks[:end], chunks[end:]
            early, late = chunk.cut(total // 2 - before)
            return [*chunks[:n], early], [late, *chunks[n + 1 :]]
        before = after
    return chunks, []


def split_at(chunks: list[Chunk], count: int) -> tuple[list[Chunk], list[Chunk]]:
    """The first ``count`` tokens of a step, and the rest, in order; a chunk on both sides is cut."""
    before = 0
    for n, chunk in enumerate(chunks):
        if before + chunk.count > count:
            if before == count:
                return chunks[:n], chunks[n:]
            early, late = chunk.cut(count - before)
            return [*chunks[:n], early], [late, *chunks[n + 1 :]]
        before += chunk.count
    return chunks, []


def most_in_lane(tokens: int) -> int:
    """The most tokens in one of the two lanes of a step of at most so many."""
    return (tokens + max(1, tokens // 8)) // 2
