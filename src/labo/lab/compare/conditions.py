"""Under which conditions each run was trained.

Two training times are compared only if they were measured under the same conditions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..run import files
from .launch import Share
from .plan import PlannedRun


def _file_of(run: PlannedRun) -> Path:
    return run.path.parent / "conditions.json"


def conditions_of(run: PlannedRun) -> list[dict[str, Any]]:
    file = _file_of(run)
    if not file.exists():
        return []
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")).get(
        run.path.name, []
    )
    return found


def note_conditions(run: PlannedRun, share: Share) -> None:
    file, now = _file_of(run), share.conditions()
    noted = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known = noted.setdefault(run.path.name, [])
    if now not in known:
        known.append(now)
    files.write_json(file, noted)
