"""The conditions under which each run of a comparison was trained.

Training times are compared only if they were measured under the same conditions; see
:func:`labo.lab.analysis.groups.step_times`.
"""

from __future__ import annotations

import json

from ..analysis.reading import read_conditions
from ..errors import RequestError
from ..run import files
from .launch import Share
from .plan import PlannedRun


def note_conditions(run: PlannedRun, share: Share) -> None:
    """Add the conditions of a launch to ``conditions.json`` beside the run directory.

    A file that cannot be read is replaced. The times of the runs it was about are then not
    compared with others.
    """
    file, now = run.path.parent / "conditions.json", share.conditions()
    try:
        known = read_conditions(run.path)
        noted = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except RequestError:
        known, noted = [], {}
    if now not in known:
        files.write_json(file, {**noted, run.path.name: [*known, now]})
