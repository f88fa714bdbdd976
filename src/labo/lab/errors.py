"""The two ways a command ends early. The message is one line: what, and where."""

from __future__ import annotations

from typing import IO, Any

_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Text for a terminal: control characters but line feeds and tabs are escaped."""
    return text.translate(_CONTROLS)


def printable_on(stream: IO[Any], text: str) -> str:
    """The text as it is for a file or a pipe, :func:`printable` for a terminal."""
    return printable(text) if stream.isatty() else text


class LabError(Exception):
    """The work failed."""

    status = 1


class RequestError(LabError):
    """The request was wrong: a bad recipe, a missing file. Nothing has been touched."""

    status = 2


class DataError(RequestError):
    """Data that cannot be used: what is wrong, where, and what would be right, in one line."""

    def __init__(self, message: str) -> None:
        # A library below may have had several lines to say.
        super().__init__(" ".join(message.splitlines()))
