"""The comparison of runs as tables, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..tables import Cell, Column, Row, Table, filled, to_markdown
from .groups import Group
from .task import find_analysis


def as_text(
    documents: Sequence[Mapping[str, Any]],
    comparison: Mapping[str, Any],
    left_out: Sequence[str] = (),
) -> str:
    """Verdicts, tables and notes of the documents of runs and of their comparison."""
    verdicts = "".join(
        f"{document['name']}: {split['verdict']}\n"
        for document in documents
        if (split := document["splits"].get(comparison["split"]))
    )
    tables = []
    for group in comparison["groups"]:
        kind = find_analysis(group["task"])
        tables.append(_methods(group, comparison["split"]))
        if group["differences"]:
            named = {f"{d['method']} - {d['reference']}": d for d in group["differences"]}
            tables.append(_difference_table("differences", kind.headline, named))
        tables += kind.group_tables(group)
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
                    name: Cell(measure["mean"], measure["std"])
                    for name, measure in method["measures"].items()
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
    differences = {
        f"{name}: {difference.variant} - {difference.reference}": vars(difference)
        for name, group in groups.items()
        for difference in group.differences
    }
    if not differences:
        return None
    return _difference_table(caption, next(iter(groups.values())).kind.headline, differences)


def difference_notes(differences: Iterable[Mapping[str, Any]]) -> list[str]:
    """How the numbers of differences were computed; each has the keys of ``Difference``."""
    differences = list(differences)
    notes = []
    smallest = [d["smallest_p"] for d in differences if d["smallest_p"] is not None]
    if smallest:
        seeds = max(len(d["seeds"]) for d in differences)
        notes.append(
            "in parentheses: 95 % interval over seeds; p: exact paired test over seeds, at least "
            f"{min(smallest):.3g} with {seeds} seeds"
        )
    if any(d["p_bootstrap"] is not None for d in differences):
        notes.append("p examples: paired bootstrap over examples, of the mean over seeds")
    return notes


def _difference_table(
    caption: str, headline: Column, differences: Mapping[str, Mapping[str, Any]]
) -> Table:
    rows = [
        Row(
            label,
            {
                "seeds": Cell(len(difference["seeds"])),
                "mean": Cell(difference["mean"], interval=difference["interval"]),
                "p": Cell(difference["p"]),
                "p_bootstrap": Cell(difference["p_bootstrap"]),
            },
        )
        for label, difference in differences.items()
    ]
    columns = [
        Column("seeds", "seeds", digits=0),
        replace(headline, key="mean", heading=f"Δ {headline.heading}", signed=True, better=0),
        Column("p", "p", digits=4),
        Column("p_bootstrap", "p examples", digits=3),
    ]
    notes = difference_notes(differences.values())
    return Table(caption, filled(columns, rows), rows, notes=notes)
