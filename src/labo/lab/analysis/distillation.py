"""The scores of students by the method of their teacher.

A teacher trained with label smoothing can teach worse (Müller et al. 2019), but not always (Shen et
al. 2021), and less so at low temperatures (Chandrasegaran et al. 2022). So it is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .groups import Member
from .reading import Run, find_teacher
from .task import find_analysis


def students(runs: Iterable[Run], split: str = "test") -> list[dict[str, Any]]:
    """One row per run that has a ``method.teacher``.

    Args:
        runs: any runs.
        split: of the scores.

    Returns:
        Rows of student, teacher, method, teacher_method (None if the teacher is not found), task,
        metric, student_score, teacher_score and seed.
    """
    runs = list(runs)
    rows = []
    for run in runs:
        if not run.method.get("teacher"):
            continue
        found = find_teacher(run, runs)
        teacher = found if found is not None and found.recipe else None
        rows.append(
            {
                "student": run.name,
                "teacher": Path(str(run.method["teacher"])).name,
                "method": run.method["name"],
                "teacher_method": None if teacher is None else teacher.method["name"],
                "task": run.task,
                "metric": find_analysis(run.task).headline.key,
                "student_score": Member(run).score(split),
                "teacher_score": None if teacher is None else Member(teacher).score(split),
                "seed": run.seed,
            }
        )
    return rows


def by_teacher(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The rows of :func:`students` that have a score, by (method, method of the teacher).

    Example:
        >>> row = {"method": "kd", "teacher_method": "ls", "student_score": 0.97}
        >>> list(by_teacher([row, row | {"student_score": None}]))
        [('kd', 'ls')]
        >>> len(by_teacher([row, row])["kd", "ls"])
        2
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["student_score"] is not None:
            key = (row["method"], row["teacher_method"] or "unknown")
            found.setdefault(key, []).append(row)
    return found
