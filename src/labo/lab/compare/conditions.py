"""Under which conditions each run was trained.

Two training times are compared only if they were measured under the same conditions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import RootModel

from ..errors import RequestError
from ..run import files
from .launch import Share
from .plan import PlannedRun


class _Conditions(RootModel[dict[str, list[dict[str, Any]]]]):
    """The content of ``conditions.json``: run -> the different conditions of its starts."""


def _file_of(run: PlannedRun) -> Path:
    return run.path.parent / "conditions.json"


def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The noted conditions. A file that cannot be read is as good as none: times do not compare."""
    if not file.exists():
        return {}
    try:
        return dict(files.read_json(file, _Conditions).root)
    except RequestError as error:
        print(f"labo: {error}; training times noted there are not compared", file=sys.stderr)
        return {}


def conditions_of(run: PlannedRun) -> list[dict[str, Any]]:
    return _read(_file_of(run)).get(run.path.name, [])


def note_conditions(run: PlannedRun, share: Share) -> None:
    file, now = _file_of(run), share.conditions()
    noted = _read(file)
    known = noted.setdefault(run.path.name, [])
    if now not in known:
        known.append(now)
    files.write_json(file, noted)
