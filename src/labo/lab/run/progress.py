"""What a run shows while it works: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def notice(text: str) -> None:
    """Print a line that is no result."""
    print(f"labo: {text}", file=sys.stderr)


class Display:
    """Progress of a run of known length; a silent one is for all processes but the first."""

    def __init__(self, total: int, *, silent: bool) -> None:
        self.console = Console(quiet=silent, highlight=False, soft_wrap=True)
        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=total)
        self.valid = ""
        self.samples, self.began = 0, time.perf_counter()

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def advance(self, step: int, samples: int = 0) -> None:
        """Show that so many steps are done; the last of them had so many samples."""
        self.samples += samples
        self.bar.update(self.task, completed=step)

    def logged(self, step: int, epoch: int, loss: float) -> None:
        """Show the loss, and the speed since the line before."""
        now = time.perf_counter()
        text = f"epoch {epoch}  loss {loss:.4f}  {self.samples / (now - self.began):.0f}/s"
        self.samples, self.began = 0, now
        self.bar.update(self.task, description=f"{text}  {self.valid}")
        if not self.console.is_terminal:
            self.say(f"step {step}  {text}")

    def evaluated(self, step: int, metrics: Mapping[str, float], best: bool) -> None:
        """Show the scores, and whether they are the best so far."""
        self.valid = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.say(f"step {step}  valid  {self.valid}{'  best' if best else ''}")
        self.began = time.perf_counter()


class ProgressBars:
    """Progress bars on standard error, if that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def bar(self, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar for one piece of work. It yields a function that adds to the work done."""
        task = self._progress.add_task(title, total=total)
        yield lambda done: self._progress.advance(task, done)
        self._progress.remove_task(task)
