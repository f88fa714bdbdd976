"""Many ``labo`` commands, several at a time, each a process of its own with its share of the cores.

A command that fails is reported and does not stop the others. An interruption is passed on to the
commands under way, which then can be continued. Two launches never work in the same folder: a lock
is held by the launch and by every process it started, even if the launch itself is killed.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..errors import RequestError, printable
from ..run.files import append
from ..run.interrupt import terminated_as_interrupted

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # between an interruption and the end of what does not heed it


@dataclass(frozen=True)
class Job:
    """A command, and its place in the table that shows them all.

    Attributes:
        name: what it is called in messages.
        row: where it is shown, together with ``column``.
        arguments: of ``labo``.
        log: the file that takes its output.
        finished: whether its work is done; asked before it is started.
        status: what to show of it while it works and afterwards.
        after: the name of the job it needs; without that one it cannot start.
        starting: called when it is started.
    """

    name: str
    row: str
    column: str
    arguments: tuple[str, ...]
    log: Path
    finished: Callable[[], bool]
    status: Callable[[], str]
    after: str | None = None
    starting: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Failure:
    """A job that failed, and its last words."""

    job: str
    reason: str

    def __str__(self) -> str:
        return f"{self.job}: {self.reason}"


@dataclass(frozen=True)
class Share:
    """How many jobs run at once, and with how many threads each."""

    jobs: int
    threads: int

    @classmethod
    def of_machine(cls, work: int, jobs: int | None = None) -> Share:
        """The share for so many jobs: one per GPU, or one per core, unless told otherwise."""
        if jobs is not None and jobs < 1:
            raise RequestError(f"--jobs {jobs}: at least one job must run")
        cores = core_count()
        at_once = min(
            jobs or len(_gpus()) or (1 if torch.accelerator.is_available() else cores), work
        )
        return cls(max(at_once, 1), max(cores // max(at_once, 1), 1))

    def conditions(self) -> dict[str, Any]:
        """What must be equal for two times to be compared."""
        return {
            "machine": platform.node(),
            "torch": str(torch.__version__),
            "jobs": self.jobs,
            "threads": self.threads,
        }


def core_count() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return chosen.split(",")[:count] if chosen else [str(number) for number in range(count)]


def run_jobs(jobs: Sequence[Job], share: Share, lock: int | None = None) -> list[Failure]:
    """Run those that are not finished, in their order.

    Args:
        jobs: what is to be done; a job stands behind the one it needs.
        share: of the machine.
        lock: what ``held`` gave.

    Returns:
        Those that failed.
    """
    return _Launch(jobs, share, lock).run()


class _Launch:
    """Jobs under way."""

    def __init__(self, jobs: Sequence[Job], share: Share, lock: int | None) -> None:
        self.jobs, self.share, self.lock = jobs, share, lock
        self.finished = {job.name for job in jobs if job.finished()}
        self.waiting = [job for job in jobs if job.name not in self.finished]
        self.running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}  # by their slot
        self.failures: dict[str, Failure] = {}
        self.console = Console(highlight=False, soft_wrap=True)

    def run(self) -> list[Failure]:
        if not self.waiting:
            return []
        with terminated_as_interrupted():
            try:
                if self.console.is_terminal:
                    with Live(
                        get_renderable=self.board, console=self.console, refresh_per_second=2
                    ):
                        self.work_off()
                else:
                    self.work_off()
            finally:
                self.stop()
        return list(self.failures.values())

    def work_off(self) -> None:
        while self.waiting or self.running:
            for slot in range(self.share.jobs):
                if slot not in self.running and (job := self.next_job()) is not None:
                    self.start(job, slot)
            time.sleep(_POLL_SECONDS)
            for slot, (job, process) in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[slot]
                    self.end(job, process.returncode)

    def next_job(self) -> Job | None:
        """The first that can start; those that never can are given up."""
        for job in list(self.waiting):
            if job.after is None or job.after in self.finished:
                self.waiting.remove(job)
                return job
            if job.after in self.failures:
                self.waiting.remove(job)
                self.fail(job, f"not started, for it needs {job.after}, which failed")
        return None

    def start(self, job: Job, slot: int) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.starting()
        threads = str(self.share.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if gpus := _gpus():
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        with append(job.log) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "labo", *job.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us, to be passed on once
                pass_fds=() if self.lock is None else (self.lock,),
            )
        self.running[slot] = job, process
        self.say(f"{job.name}: started")

    def end(self, job: Job, status: int) -> None:
        if status == 0:
            self.finished.add(job.name)
            self.say(f"{job.name}: {job.status()}  ({self.count()})")
        else:
            killed = f"ended by signal {-status}" if status < 0 else ""
            self.fail(job, killed or last_line(job.log) or f"ended with status {status}")

    def fail(self, job: Job, reason: str) -> None:
        self.failures[job.name] = Failure(job.name, reason)
        self.say(f"{job.name}: failed: {reason}")

    def say(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(printable(text), markup=False)

    def stop(self) -> None:
        """End what is still running: as Ctrl-C would, then by force."""
        processes = [process for _, process in self.running.values()]
        try:
            for process in processes:
                process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACE_SECONDS
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        finally:  # even if interrupted once more
            for process in processes:
                process.kill()
                process.wait()

    # ------------------------------------------------------------------ what is shown

    def under_way(self) -> list[Job]:
        """The running jobs; the list is a copy, for the thread that shows them."""
        return [job for job, _ in list(self.running.values())]

    def count(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{len(self.finished)} of {len(self.jobs)} done{failed}"

    def board(self) -> Table:
        """The jobs, row by row; if there are too many, the rows where something happens."""
        rows: dict[str, dict[str, str]] = {}
        active = {job.row for job in self.under_way()}
        active |= {job.row for job in self.jobs if job.name in self.failures}
        room = self.console.height - 4
        crowded = len({job.row for job in self.jobs}) > room
        columns = list(dict.fromkeys(job.column for job in self.jobs))
        for job in self.jobs:
            if not crowded or job.row in active:
                rows.setdefault(job.row, {})[job.column] = self.shown(job)
        table = Table("", *columns, box=None, caption=self.count(), caption_justify="left")
        for row, cells in list(rows.items())[:room]:
            table.add_row(row, *(cells.get(column, "") for column in columns))
        return table

    def shown(self, job: Job) -> str:
        if job.name in self.failures:
            return "[red]failed[/red]"
        if job.name in self.finished:
            return f"[green]{job.status()}[/green]"
        if job in self.under_way():
            return job.status()
        return "[dim]waiting[/dim]"


def last_line(log: Path) -> str:
    """The last words in a log."""
    lines = [
        line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line
    ]
    return lines[-1].removeprefix("labo: ") if lines else ""
