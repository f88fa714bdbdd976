"""Ctrl-C and SIGTERM end a command in the same way: as a ``KeyboardInterrupt``.

A training loop can put it off until a step is complete, so that it can save a checkpoint first. A
second signal is never put off.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], None]


@contextmanager
def _handled(handler: _Handler, *signals: signal.Signals) -> Iterator[None]:
    """Within, these signals call ``handler``, unless the process was started to ignore them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {}
    for number in signals:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within, SIGTERM raises ``KeyboardInterrupt``, as Ctrl-C does."""
    with _handled(_interrupt, signal.SIGTERM):
        yield


class Interruptions:
    """Ctrl-C and SIGTERM while a loop is at work.

    Example:
        >>> interruptions = Interruptions()
        >>> with interruptions.handled():
        ...     with interruptions.deferred():
        ...         signal.raise_signal(signal.SIGTERM)
        ...         print(interruptions.requested)
        True
    """

    def __init__(self) -> None:
        self.requested = False  # whether a signal came and was put off
        self._deferring = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within, the signals come here."""
        with _handled(self._receive, signal.SIGINT, signal.SIGTERM):
            yield

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self._deferring:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, the first signal only sets ``requested``."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
