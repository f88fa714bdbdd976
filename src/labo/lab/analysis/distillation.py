"""What a student learns from teachers that were trained with different methods.

A teacher trained with label smoothing is known to teach worse (Müller et al. 2019), not always
(Shen et al. 2021), and less so at low temperatures (Chandrasegaran et al. 2022): so it is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .reading import Run, read_run

METRICS = {"image_classification": "accuracy", "translation": "bleu"}


def find_teacher(student: Run, runs: Iterable[Run]) -> Run | None:
    """The run that ``method.teacher`` of a student names, wherever the runs were moved since.

    It is looked for among ``runs`` first, then where the recipe says, then beside the student.
    """
    named = Path(str(student.method["teacher"]))
    for run in runs:
        if run.name == named.name:
            return run
    for place in (named, student.path.parent / named.name):
        if (place / "recipe.yaml").is_file():
            return read_run(place)
    return None


def score(run: Run, split: str) -> float | None:
    """The score that a task is judged by, if the run is finished."""
    found = ((run.results or {}).get(split) or {}).get(METRICS[run.task])
    return None if found is None else float(found)


def students(runs: Iterable[Run], split: str = "test") -> list[dict[str, Any]]:
    """One row per run that was distilled from another.

    Args:
        runs: any runs; those without a ``method.teacher`` give no row.
        split: whose scores.

    Returns:
        Rows of student, teacher, method, teacher_method (None if the teacher is gone), metric,
        student_score, teacher_score and seed.
    """
    runs = list(runs)
    rows = []
    for run in runs:
        if not run.method.get("teacher"):
            continue
        teacher = find_teacher(run, runs)
        known = teacher is not None and teacher.recipe
        rows.append(
            {
                "student": run.name,
                "teacher": Path(str(run.method["teacher"])).name,
                "method": run.method["name"],
                "teacher_method": teacher.method["name"] if teacher and known else None,
                "metric": METRICS[run.task],
                "student_score": score(run, split),
                "teacher_score": score(teacher, split) if teacher and known else None,
                "seed": run.seed,
            }
        )
    return rows


def by_teacher(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The rows of :func:`students` by (method, method of the teacher), those with a score.

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
