"""Lines from a stream of bytes to another, as commands read stdin and write stdout."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, BinaryIO

from ..errors import printable_on
from ..run.progress import Advance, ProgressBars, notice

_MORE_SECONDS = 0.05  # that lines from a pipe are waited for before those at hand are answered
_LINES_AT_ONCE = 2000  # enough to batch by length, few enough to see output soon

Notice = Callable[[str], object]
Answer = Callable[[Sequence[str], int, Advance], Iterable[str]]
"""(lines, number of the first one, advance) -> the lines to write for them."""


def answer_lines(source: BinaryIO, target: BinaryIO, answer: Answer) -> None:
    """Read lines, answer them, write; a reader that goes away ends it quietly.

    Lines end with a line feed, with or without a carriage return before it. Bytes that are not
    UTF-8 are read as U+FFFD, with a notice on stderr. Lines from a pipe or a terminal are answered
    as they come. A terminal gets control characters escaped.
    """
    silent = not sys.stderr.isatty() or target.isatty()  # progress is not shown among the output
    with ProgressBars(silent=silent) as bars, bars.bar("lines", None) as advance:
        first = 1
        for chunk in _chunks(source):
            output = "".join(f"{line}\n" for line in answer(chunk, first, advance))
            try:
                target.write(printable_on(target, output).encode())
                target.flush()
            except BrokenPipeError:
                # Let Python flush a closed pipe at its end without complaint.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, target.fileno())
                os.close(nowhere)
                return
            first += len(chunk)


def _chunks(source: BinaryIO) -> Iterator[list[str]]:
    """The lines of a stream without their ends, some at a time."""
    number = 0
    for raw in _raw_chunks(source):
        chunk = []
        for line in raw:
            number += 1
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                notice(f"line {number}: byte {byte:#04x} is not UTF-8, it is read as U+FFFD")
                text = line.decode(errors="replace")
            chunk.append(text.removesuffix("\n").removesuffix("\r"))
        yield chunk


def _raw_chunks(source: BinaryIO) -> Iterator[list[bytes]]:
    """From a file as many lines as are worth a batch; otherwise those that have come."""
    try:
        is_live = not stat.S_ISREG(os.fstat(source.fileno()).st_mode)
    except (OSError, ValueError):  # in memory
        is_live = False
    if not is_live:
        while chunk := list(islice(iter(source.readline, b""), _LINES_AT_ONCE)):
            yield chunk
        return
    descriptor, lines, rest = source.fileno(), list[bytes](), b""
    while data := os.read(descriptor, 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        lines += whole
        while len(lines) >= _LINES_AT_ONCE:
            yield lines[:_LINES_AT_ONCE]
            lines = lines[_LINES_AT_ONCE:]
        if lines and not select.select([descriptor], [], [], _MORE_SECONDS)[0]:
            yield lines
            lines = []
    if rest:
        lines.append(rest)
    if lines:
        yield lines


def json_line(record: Mapping[str, Any] | None) -> str:
    """A record as a line, without its end."""
    return json.dumps(record, ensure_ascii=False)


def write_records(records: Iterable[Mapping[str, Any]], target: BinaryIO) -> None:
    """A line of JSON for each record."""
    for record in records:
        target.write(printable_on(target, json_line(record) + "\n").encode())
    target.flush()
