"""The two ways a command ends early. The message is one line: what, and where."""

from __future__ import annotations

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) != "\n"}


def printable(text: str) -> str:
    """Text for a terminal: control characters but the line feed are escaped."""
    return text.translate(_CONTROLS)


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
