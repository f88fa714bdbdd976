"""Many jobs on an engine: which are started, what is shown of them, and which failed.

A job that fails is reported and does not stop the others. An interruption is passed on to the jobs
under way, which then can be continued.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..errors import printable
from ..run.interrupt import terminated_as_interrupted
from . import engines
from .engines import Engine, Job, Report
from .setup import Setup


@dataclass(frozen=True)
class Failure:
    """A job that failed, and its last words."""

    job: str
    reason: str

    def __str__(self) -> str:
        return f"{self.job}: {self.reason}"


class Launch:
    """About ``work`` jobs on one engine, which is opened for the first and stopped at the end."""

    def __init__(self, setup: Setup, work: int, folder: Path) -> None:
        self.setup, self.work, self.folder = setup, work, folder
        self.engine: Engine | None = None
        self.failures: dict[str, Failure] = {}  # by job, which is not started again
        self.jobs: Sequence[Job] = ()
        self.finished: set[str] = set()
        self.running: dict[str, Job] = {}
        # An engine may put another file in the place of sys.stdout.
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End what is still running."""
        if self.engine is not None:
            self.engine.stop()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs that are neither finished nor failed; the failures are noted."""
        self.jobs = jobs
        self.finished = {job.name for job in jobs if job.finished()}
        waiting = [j for j in jobs if j.name not in self.finished and j.name not in self.failures]
        if not waiting:
            return
        if self.engine is None:
            self.engine = self.setup.open(self.work, self.folder)
        shown: Any = nullcontext()
        if self.console.is_terminal:
            look: dict[str, Any] = {"refresh_per_second": 2, "redirect_stdout": False}
            shown = Live(get_renderable=self.board, console=self.console, **look)
        with terminated_as_interrupted(), shown:
            self.work_off(self.engine, waiting)

    def work_off(self, engine: Engine, waiting: list[Job]) -> None:
        """Submit each job when the one it needs is finished, until all have ended."""
        pending = 0
        while waiting or pending:
            for job in list(waiting):
                if job.after in self.failures:
                    self.fail(job, f"not started, for it needs {job.after}, which failed")
                elif job.after is None or job.after in self.finished:
                    job.log.parent.mkdir(parents=True, exist_ok=True)
                    engine.submit(job)
                    pending += 1
                else:
                    continue
                waiting.remove(job)
            for report in engine.poll() if pending else ():
                self.take(report)
                pending -= report.event == "ended"
            time.sleep(engines.POLL_SECONDS)

    def take(self, report: Report) -> None:
        """Note and say what became of a job."""
        job, status = report.job, report.status
        if report.event == "started":
            self.running[job.name] = job
            self.say(f"{job.name}: started")
            return
        self.running.pop(job.name, None)
        if status == 0:
            self.finished.add(job.name)
            self.say(f"{job.name}: {job.status()}  ({self.count()})")
        else:
            killed = f"ended by signal {-status}" if status < 0 else ""
            said = report.reason or killed or last_line(job.log)
            self.fail(job, said or f"ended with status {status}")

    def fail(self, job: Job, reason: str) -> None:
        self.failures[job.name] = Failure(job.name, reason)
        self.say(f"{job.name}: failed: {reason}")

    def say(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(printable(text), markup=False)

    # ------------------------------------------------------------------ what is shown

    def count(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{len(self.finished)} of {len(self.jobs)} done{failed}"

    def board(self) -> Table:
        """The jobs, row by row; if there are too many, the rows where something happens."""
        rows: dict[str, dict[str, str]] = {}
        active = {job.row for job in list(self.running.values())}  # a copy: a thread shows them
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
        if job.name in self.running:
            return job.status()
        return "[dim]waiting[/dim]"


def last_line(log: Path) -> str:
    """The last words in a log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line]
    return lines[-1].removeprefix("labo: ") if lines else ""
