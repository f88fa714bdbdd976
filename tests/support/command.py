"""The ``labo`` command, in this process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from labo import cli


class Ended(NamedTuple):
    """The exit status of a command, and what it has printed."""

    status: int
    out: str
    err: str


def status(*arguments: object) -> int:
    """Run a command to its end; its exit status."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def labo(capsys: Any, *arguments: object) -> Ended:
    """Run a command to its end."""
    return Ended(status(*arguments), *capsys.readouterr())
