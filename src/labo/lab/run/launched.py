"""What a command knows of the engine that started it (:mod:`labo.lab.compare.engines`).

The engine sets one variable of the environment: how many commands it has at work at once on this
machine. It holds the other end of the command's standard input and never writes to it. A command
that was started in this way

- ends as after SIGTERM when its engine is gone, however that ended: a run saves a checkpoint;
- waits a while for a run directory that is in use: the command before it may be about to end.
"""

from __future__ import annotations

import os
import signal
import threading

JOBS = "LABO_JOBS"
_PATIENCE = 60.0


def jobs_at_once() -> int | None:
    """How many commands the engine has at work on this machine; None without an engine."""
    number = os.environ.get(JOBS, "")
    return int(number) if number.isdecimal() else None


def patience() -> float:
    """For how many seconds to wait for a run directory that is in use."""
    return 0.0 if jobs_at_once() is None else _PATIENCE


def end_with_engine() -> None:
    """If an engine started this process, send it SIGTERM as soon as the engine is gone."""
    if jobs_at_once() is not None:
        threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
