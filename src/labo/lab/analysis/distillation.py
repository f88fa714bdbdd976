"""The scores of students by the method of their teacher.

A teacher trained with label smoothing can teach worse (Müller et al. 2019), but not always (Shen et
al. 2021), and less so at low temperatures (Chandrasegaran et al. 2022). So it is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..tables import Cell, Column, Row, Table
from .groups import Member, mean_cell
from .reading import Run, find_teacher


def students(runs: Iterable[Run], split: str = "test") -> list[dict[str, Any]]:
    """One row per run that has a teacher, as :mod:`labo.lab.analysis.run` describes it."""
    runs = list(runs)
    rows = []
    for run in runs:
        if not run.method.get("teacher"):
            continue
        found = find_teacher(run, runs)
        teacher = found if found is not None and found.recipe else None
        rows.append(
            {
                "method": run.method["name"],
                "teacher_method": None if teacher is None else teacher.method["name"],
                "task": run.task,
                "student_score": Member(run).score(split),
                "teacher_score": None if teacher is None else Member(teacher).score(split),
            }
        )
    return rows


def student_table(rows: Iterable[Mapping[str, Any]], score: Column) -> Table:
    """The rows of :func:`students` of a task that have a score, by method and method of the
    teacher.

    Example:
        >>> row = {"method": "kd", "teacher_method": "ls", "student_score": 0.97}
        >>> row |= {"teacher_score": None}
        >>> table = student_table([row, row], Column("accuracy", "accuracy"))
        >>> [(row.label, row.cells["runs"].value) for row in table.rows]
        [('kd from ls', 2)]
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["student_score"] is not None:
            label = f"{row['method']} from {row['teacher_method'] or 'unknown'}"
            found.setdefault(label, []).append(row)
    scores = [
        replace(score, key=f"{side}_score", heading=f"{side} {score.heading}")
        for side in ("teacher", "student")
    ]
    body = []
    for label, taught in found.items():
        cells = {"runs": Cell(len(taught))}
        for column in scores:
            values = (row[column.key] for row in taught)
            cells[column.key] = mean_cell(value for value in values if value is not None)
        body.append(Row(label, cells))
    columns = [Column("runs", "runs", digits=0), *scores]
    return Table("students by the method of their teacher", columns, body, corner="student")
