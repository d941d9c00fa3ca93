"""Ctrl-C and SIGTERM: the first asks the run to drain, the second ends it."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The run was told to end at once."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Drain:
    """While entered, the first signal is kept in ``signal`` for whoever drains; a second one raises ``Stopped``.

    Before :meth:`arm` there is nothing to drain, and the first signal raises.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._armed = False
        self._before: dict[int, object] = {}

    def arm(self) -> None:
        self._armed = True

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._armed and not self.signal:
            self.signal = number
            return
        for each in SIGNALS:  # what follows is clean-up, which ends by itself
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    def __enter__(self) -> Drain:
        self._before = {each: signal.signal(each, self._take) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
