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


def labo(capsys: Any, *arguments: object) -> Ended:
    """Run a command to its end."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return Ended(end.value.code, *capsys.readouterr())
