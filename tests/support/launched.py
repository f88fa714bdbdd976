"""Commands of a launch as forks of a server that has imported everything: milliseconds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lab_runs
from labo.lab.compare import engines


class Launcher:
    """Stands in for ``subprocess.Popen`` in ``labo.lab.compare.engines``.

    Attributes:
        started: the arguments of every command so far.
        kill: run -> when it is to be killed; see ``lab_runs``.
    """

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.kill: dict[str, lab_runs.Kill] = {}

    @classmethod
    def install(cls, monkeypatch: Any) -> Launcher:
        launcher = cls()
        monkeypatch.setattr(engines.subprocess, "Popen", launcher)
        monkeypatch.setattr(engines, "POLL_SECONDS", 0.01)
        return launcher

    def __call__(self, command: list[str], *, stdout: Any, env: Any, **options: Any) -> Forked:
        arguments = command[command.index("labo") + 1 :]
        self.started.append(arguments)
        kill = self.kill.get(_run(arguments))
        return Forked(arguments, Path(stdout.name), kill)

    def commands(self) -> list[str]:
        """What was started, in short: ``train base-s0``."""
        return [f"{arguments[0]} {_run(arguments)}" for arguments in self.started]


def _run(arguments: list[str]) -> str:
    return Path(arguments[-1]).name


class Forked:
    """A process with the part of ``Popen``'s face that a launch looks at."""

    def __init__(self, arguments: list[str], log: Path, kill: lab_runs.Kill | None) -> None:
        server = lab_runs._server
        self.process = server.Process(target=lab_runs.command, args=(arguments, log, {}, kill))
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.join()
