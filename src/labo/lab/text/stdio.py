"""Lines from a stream of bytes to another, as commands read stdin and write stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import BinaryIO

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

_LINES_AT_ONCE = 2000  # enough to batch by length, few enough to see output soon

Notice = Callable[[str], object]
Answer = Callable[[Sequence[str], int, Callable[[int], object]], str]
"""(lines, number of the first one, advance) -> what to write for them, line ends included."""


def answer_lines(source: BinaryIO, target: BinaryIO, start: Callable[[Notice], Answer]) -> None:
    """Read lines, answer them, write; a reader that goes away ends it quietly.

    Lines end with a line feed, with or without a carriage return before it. Bytes that are not
    UTF-8 are read as U+FFFD, with a notice on stderr. A terminal is answered line by line.

    Args:
        source: where to read.
        target: where to write.
        start: called once with a function that shows a notice; returns what answers.
    """
    with Progress(
        TextColumn("{task.completed} lines"),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False, soft_wrap=True),
        disable=not _show(target),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None)

        def notice(text: str) -> None:
            progress.console.print(f"labo: {text}", markup=False)

        answer = start(notice)
        lines = _lines(source, notice)
        first = 1
        while chunk := list(islice(lines, 1 if source.isatty() else _LINES_AT_ONCE)):
            output = answer(chunk, first, lambda done: progress.advance(task, done))
            try:
                target.write(output.encode())
                target.flush()
            except BrokenPipeError:
                _forget(target)
                return
            first += len(chunk)


def _lines(source: BinaryIO, notice: Notice) -> Iterator[str]:
    """The lines of a stream as they come, without their ends."""
    for number, line in enumerate(iter(source.readline, b""), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            notice(f"line {number}: byte {byte:#04x} is not UTF-8, it is read as U+FFFD")
            text = line.decode(errors="replace")
        yield text.removesuffix("\n").removesuffix("\r")


def _show(target: BinaryIO) -> bool:
    """Whether progress is to be seen: on a terminal that the translations do not go to."""
    return sys.stderr.isatty() and not target.isatty()


def _forget(target: BinaryIO) -> None:
    """Let Python flush a closed pipe at its end without complaint."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target.fileno())
    os.close(nowhere)
