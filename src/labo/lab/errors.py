"""The two ways a command ends early. The message is one line: what, and where."""

from __future__ import annotations


class LabError(Exception):
    """The work failed."""

    status = 1


class RequestError(LabError):
    """The request was wrong: a bad recipe, a missing file. Nothing has been touched."""

    status = 2
