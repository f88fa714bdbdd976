"""The comparison of runs as tables, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..tables import Cell, Column, Row, Table, filled, to_markdown
from .distillation import student_table
from .groups import Difference, Group
from .task import find_analysis

SEEDS_NOTE = "in parentheses: 95 % interval over seeds; p: exact paired test over seeds"
EXAMPLES_NOTE = "p examples: paired bootstrap over examples, of the mean over seeds"


def as_text(
    documents: Sequence[Mapping[str, Any]],
    comparison: Mapping[str, Any],
    left_out: Sequence[str] = (),
) -> str:
    """Verdicts, tables and notes of the documents of runs and of their comparison."""
    verdicts = "".join(
        f"{document['name']}: {found['verdict']}\n"
        for document in documents
        if (found := document["splits"].get(comparison["split"]))
    )
    tables = []
    for group in comparison["groups"]:
        kind = find_analysis(group["task"])
        tables.append(_methods(group, comparison["split"]))
        if group["differences"]:
            found = {f"{d['method']} - {d['reference']}": d for d in group["differences"]}
            tables.append(_difference_table("differences", kind.headline, found))
        tables += kind.group_tables(group)
    for task in dict.fromkeys(row["task"] for row in comparison["distillation"]):
        rows = [row for row in comparison["distillation"] if row["task"] == task]
        tables.append(student_table(rows, find_analysis(task).headline))
    every = dict.fromkeys([*left_out, *_run_notes(documents), *comparison["notes"]])
    notes = "".join(f"note: {note}\n" for note in every)
    return "\n".join(filter(None, [verdicts, *map(to_markdown, tables), notes]))


def _run_notes(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The notes of all runs, each once, with the runs it is about."""
    about: dict[str, list[str]] = {}
    for document in documents:
        for note in document["notes"]:
            about.setdefault(note, []).append(document["name"])
    for note, names in about.items():
        yield note if len(names) == len(documents) else f"{', '.join(names)}: {note}"


def _methods(group: Mapping[str, Any], split: str) -> Table:
    rows = [
        Row(
            method["method"],
            {
                "runs": Cell(len(method["runs"])),
                **{
                    name: Cell(found["mean"], found["std"])
                    for name, found in method["measures"].items()
                },
            },
        )
        for method in group["methods"]
    ]
    columns = [Column("runs", "runs", digits=0), *find_analysis(group["task"]).measures]
    return Table(f"{split}, {group['examples']} examples", filled(columns, rows), rows)


# ------------------------------------------------------------------ differences


def difference_table(caption: str, groups: Mapping[str, Group]) -> Table | None:
    """The differences of groups with one headline metric; their names begin the rows."""
    found = {
        f"{name}: {difference.variant} - {difference.reference}": vars(difference)
        for name, group in groups.items()
        for difference in group.differences
    }
    if not found:
        return None
    return _difference_table(caption, next(iter(groups.values())).kind.headline, found)


def difference_notes(differences: Iterable[Difference]) -> list[str]:
    """How the numbers of differences were computed."""
    differences = list(differences)
    notes = []
    smallest = [found.smallest_p for found in differences if found.smallest_p is not None]
    if smallest:
        seeds = max(len(found.seeds) for found in differences)
        notes.append(f"{SEEDS_NOTE}, at least {min(smallest):.3g} with {seeds} seeds")
    if any(found.p_bootstrap is not None for found in differences):
        notes.append(EXAMPLES_NOTE)
    return notes


def _difference_table(
    caption: str, headline: Column, differences: Mapping[str, Mapping[str, Any]]
) -> Table:
    rows = [
        Row(
            label,
            {
                "seeds": Cell(len(found["seeds"])),
                "mean": Cell(found["mean"], interval=found["interval"]),
                **{key: Cell(found[key]) for key in ("p", "smallest_p", "p_bootstrap")},
            },
        )
        for label, found in differences.items()
    ]
    columns = [
        Column("seeds", "seeds", digits=0),
        replace(headline, key="mean", heading=f"Δ {headline.heading}", signed=True, better=0),
        Column("p", "p", digits=4),
        Column("smallest_p", "smallest p", digits=4),
        Column("p_bootstrap", "p examples", digits=3),
    ]
    shown = filled(columns, rows)
    keys = {column.key for column in shown}
    notes = [SEEDS_NOTE] if "p" in keys else []
    notes += [EXAMPLES_NOTE] if "p_bootstrap" in keys else []
    return Table(caption, shown, rows, notes=notes)
