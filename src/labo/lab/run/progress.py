"""What a run shows while it works: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ..errors import printable

if TYPE_CHECKING:
    from typing_extensions import Self

Advance = Callable[[int], None]  # adds to the work done

_QUIET_SECONDS = 60.0  # without a terminal, long work is reported once in so many seconds
_shown: list[_Bars] = []  # innermost last


def notice(text: str) -> None:
    """Print a line that is no result."""
    print(f"labo: {printable(text)}", file=sys.stderr)


@contextmanager
def track(title: str, total: int | None) -> Iterator[Advance]:
    """Progress of one part of the work, on the display in use; without one it is not shown."""
    if not _shown:
        yield lambda done: None
        return
    with _shown[-1].bar(title, total) as advance:
        yield advance


class _Bars:
    """Bars on a console; while they are entered, :func:`track` adds to them."""

    def __init__(self, console: Console, *, transient: bool) -> None:
        self.console = console
        # What must always be seen comes first, and the text is cut at the end of the line.
        self.progress = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            expand=True,
            disable=not console.is_terminal or console.quiet,
            transient=transient,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        _shown.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _shown.remove(self)
        self.progress.stop()

    def say(self, text: str) -> None:
        self.console.print(printable(text), markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int | None) -> Iterator[Advance]:
        """A bar for one part of the work."""
        task = self.progress.add_task(printable(title), total=total)
        done, said = 0, time.monotonic()

        def advance(number: int) -> None:
            nonlocal done, said
            done += number
            self.progress.advance(task, number)
            if not self.console.is_terminal and time.monotonic() - said > _QUIET_SECONDS:
                said = time.monotonic()
                self.say(f"{title}: {done}{'' if total is None else f' of {total}'}")

        try:
            yield advance
        finally:
            self.progress.remove_task(task)


class Display(_Bars):
    """Progress of a run of known length; a silent one is for all processes but the first."""

    def __init__(self, total: int, *, silent: bool, console: Console | None = None) -> None:
        super().__init__(console or Console(quiet=silent, highlight=False), transient=False)
        self.task = self.progress.add_task("", total=total)
        self.valid = ""
        self.samples, self.began = 0, time.perf_counter()

    def advance(self, step: int, samples: int = 0) -> None:
        """Show that so many steps are done; the last of them had so many samples."""
        self.samples += samples
        self.progress.update(self.task, completed=step)

    def logged(self, step: int, epoch: int, loss: float) -> None:
        """Show the loss, and the speed since the line before."""
        now = time.perf_counter()
        text = f"epoch {epoch}  loss {loss:.4f}  {self.samples / (now - self.began):.0f}/s"
        self.samples, self.began = 0, now
        self.progress.update(self.task, description=f"{text}  {self.valid}")
        if not self.console.is_terminal:
            self.say(f"step {step}  {text}")

    def evaluated(
        self, step: int, metrics: Mapping[str, float], selected_by: str, selected: bool
    ) -> None:
        """Show the scores, and whether they are the best so far."""
        self.valid = f"{selected_by} {metrics[selected_by]:.4f}"
        scores = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.say(f"step {step}  valid  {scores}{'  best' if selected else ''}")
        self.began = time.perf_counter()


class ProgressBars(_Bars):
    """Bars on standard error that go away when they are done."""

    def __init__(self, *, silent: bool = False) -> None:
        super().__init__(Console(stderr=True, quiet=silent, highlight=False), transient=True)
