"""Requests under way on a session: what the ranks send reaches its completion, whoever waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from epmoe.engine.request import SamplingParams
from launch.completion import Completion
from launch.session import Session
from placement.errors import UserError


@dataclass(frozen=True)
class Gain:
    """New tokens of a request; ``ended``: its ranks are done with it."""

    id: int
    completion: Completion
    tokens: int
    ended: bool


class Requests:
    """Completions by request id.  Any thread may call any method; one at a time reads from the ranks for all.

    With ``keep_lengths`` the length of every request is kept after its end (see :meth:`lengths`).
    """

    def __init__(self, session: Session, keep_lengths: bool = False) -> None:
        self.session = session
        self._live: dict[int, Completion] = {}
        self._lengths: dict[int, int] = {}
        self._keep_lengths = keep_lengths
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._aborts: deque[int] = deque()
        self._closed, self._why = False, ""

    def submit(self, completion: Completion, params: SamplingParams) -> int:
        """Send a request; its id."""
        with self._alone():
            self._require_open()
            number = self.session.add(completion.prompt_token_ids, params.to_dict(), completion.index)
            self._live[number] = completion
        return number

    def abort(self, number: int) -> None:
        """Ask the ranks to end a request; nothing happens if they have."""
        self._aborts.append(number)
        self._send_aborts()

    def advance(self) -> list[Gain]:
        """Hand out what has come, after a short wait at most.

        Raises:
            RankFailure: a rank failed; all are ended then.
        """
        with self._alone():
            self._require_open()
            return [gain for event in self.session.events() if (gain := self._take(event)) is not None]

    def stop(self) -> None:
        """Abort what is under way and let the ranks report and end."""
        self._aborts.extend(list(self._live))
        self._send_aborts()
        with self._alone():
            self.session.stop()

    def close(self, why: str = "") -> None:
        """End the ranks at once; whoever still waits, or comes later, is told ``why``."""
        with self._alone():
            self._closed, self._why = True, self._why or why
            self.session.close()

    def lengths(self) -> dict[int, int]:
        """Tokens of each request that its user's result accounts for (see :attr:`Completion.run_tokens`)."""
        return {**self._lengths, **{number: completion.run_tokens for number, completion in self._live.items()}}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Threads take turns: one that reads in a loop cannot keep the others out."""
        with self._turn:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()
            self._send_aborts()

    def _send_aborts(self) -> None:
        """Never waits: a forgotten stream may be collected, and abort, while its own thread holds the lock.

        Whoever holds the lock comes here once it is free.
        """
        while self._aborts and self._lock.acquire(blocking=False):
            try:
                number = self._aborts.popleft() if self._aborts else None
                if number in self._live and not self._closed:
                    self.session.abort(number)
            finally:
                self._lock.release()

    def _require_open(self) -> None:
        if self._closed:
            why = f" ({self._why})" if self._why else ""
            raise UserError(f"the ranks have been ended{why}; open a new LLM")

    def _take(self, event) -> Gain | None:
        completion = self._live.get(event.id)
        if completion is None:
            return None
        before = len(completion.token_ids)
        if completion.take(event.token_ids, event.finish_reason, event.extra):
            self.session.abort(event.id)
        ended = event.finish_reason is not None
        if ended:
            del self._live[event.id]
            if self._keep_lengths:
                self._lengths[event.id] = completion.run_tokens
        return Gain(event.id, completion, len(completion.token_ids) - before, ended)
