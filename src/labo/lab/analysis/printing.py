"""The comparison of runs as tables, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..tables import Cell, Column, Row, Table, to_markdown
from ..translation.frequency import PARTS
from .distillation import by_teacher
from .significance import mean_std

_SCORES = {
    "accuracy": Column("accuracy", "accuracy %", scale=100),
    "bleu": Column("bleu", "BLEU"),
}
_IMAGES = (
    _SCORES["accuracy"],
    Column("nll", "NLL", digits=3),
    Column("ece", "ECE", digits=3),
    Column("ece_after", "ECE after T", digits=3),
    Column("temperature", "T", digits=3),
    Column("underconfidence", "underconfidence", digits=3, signed=True),
    Column("underconfidence_after", "after T", digits=3, signed=True),
    Column("confidence_on_errors", "confidence on errors", digits=3),
    Column("aurc", "AURC", digits=4),
    Column("excess_aurc", "excess AURC", digits=4),
)
_TRANSLATION = (
    _SCORES["bleu"],
    Column("nll", "NLL", digits=3),
    Column("forced_ece", "ECE forced", digits=3),
    Column("forced_ece_after", "after T", digits=3),
    Column("temperature", "T", digits=3),
    Column("decoded_ece", "ECE decoded", digits=3),
    Column("underconfidence", "underconfidence", digits=3, signed=True),
    Column("confidence_on_errors", "confidence on errors", digits=3),
    Column("decoded_aurc", "AURC decoded", digits=3),
    Column("length_ratio_1", "length, beam 1", digits=3),
    Column("length_ratio_5", "beam 5", digits=3),
    Column("length_ratio_20", "beam 20", digits=3),
)


def as_text(documents: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any]) -> str:
    """Verdicts, tables and notes, to be read.

    Args:
        documents: of :func:`labo.lab.analysis.run.analyze_run`.
        comparison: of :func:`labo.lab.analysis.run.analyze_runs`, of the same runs.
    """
    verdicts = "".join(
        f"{document['name']}: {found['verdict']}\n"
        for document in documents
        if (found := document["splits"].get(comparison["split"]))
    )
    tables = []
    for group in comparison["groups"]:
        tables.append(_methods(group, comparison["split"]))
        tables += [_differences(group)] if group["differences"] else []
        tables += [_frequency(group)] if group["frequency"] else []
    for metric in dict.fromkeys(row["metric"] for row in comparison["distillation"]):
        rows = [row for row in comparison["distillation"] if row["metric"] == metric]
        tables.append(_distillation(rows, _SCORES[metric]))
    notes = "".join(f"note: {note}\n" for note in [*_run_notes(documents), *comparison["notes"]])
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
    columns = _IMAGES if group["task"] == "image_classification" else _TRANSLATION
    shown = _filled([Column("runs", "runs", digits=0), *columns], rows)
    return Table(f"{split}, {group['examples']} examples", shown, rows)


def _filled(columns: Iterable[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns that have a number in some row."""
    return [
        column
        for column in columns
        if any(row.cells.get(column.key, Cell()).value is not None for row in rows)
    ]


def _differences(group: Mapping[str, Any]) -> Table:
    score = _SCORES[group["metric"]]
    columns = [
        Column("seeds", "seeds", digits=0),
        *(
            Column(key, heading, scale=score.scale, signed=True)
            for key, heading in {"mean": score.heading, "low": "from", "high": "to"}.items()
        ),
        Column("p", "p", digits=4),
        Column("smallest_p", "smallest p", digits=4),
        Column("bootstrap", "bootstrap p", digits=3),
    ]
    rows = []
    for found in group["differences"]:
        low, high = found["interval"] or (None, None)
        drawn = [draw["p"] for draw in found["bootstrap"] or ()]
        cells = {"seeds": Cell(len(found["seeds"])), "low": Cell(low), "high": Cell(high)}
        cells |= {key: Cell(found[key]) for key in ("mean", "p", "smallest_p")}
        cells |= {"bootstrap": Cell(max(drawn))} if drawn else {}
        rows.append(Row(found["method"], cells))
    shown = _filled(columns, rows)
    notes = []
    if any(column.key == "p" for column in shown):
        notes.append("from, to: 95 % interval over seeds; p: exact sign-flip test over seeds")
    if group["metric"] == "bleu":
        notes.append("bootstrap p: sacrebleu's, over sentences, of the seed where it is largest")
    return Table(f"difference to {group['baseline']}", shown, rows, notes=notes)


def _frequency(group: Mapping[str, Any]) -> Table:
    found = group["frequency"]
    columns = [Column(part, part, "BLEU") for part in PARTS]
    columns += [
        Column(f"delta_{part}", part, f"Δ {found['baseline']}", signed=True) for part in PARTS
    ]
    rows = [
        Row(
            row["method"],
            {
                **{part: Cell(row["bleu"][part]) for part in PARTS},
                **{f"delta_{part}": Cell((row["difference"] or {}).get(part)) for part in PARTS},
            },
        )
        for row in found["rows"]
    ]
    sizes = ", ".join(
        f"{part} {size} (mean count {found['mean_frequency'][part] or 0:.0f})"
        for part, size in found["sizes"].items()
    )
    notes = [f"{found['rule']} by token frequency: {sizes}"]
    if found["left_over"]:
        notes.append(f"{found['left_over']} sentences are left over")
    caption = "BLEU by frequency of the source tokens"
    return Table(caption, _filled(columns, rows), rows, notes=notes)


def _distillation(students: Iterable[Mapping[str, Any]], score: Column) -> Table:
    rows = []
    for (method, teacher), found in by_teacher(students).items():
        taught = [row["teacher_score"] for row in found if row["teacher_score"] is not None]
        cells = {
            "runs": Cell(len(found)),
            "student": Cell(*mean_std([row["student_score"] for row in found])),
            "teacher": Cell(*mean_std(taught)) if taught else Cell(),
        }
        rows.append(Row(f"{method} from {teacher}", cells))
    columns = [
        Column("runs", "runs", digits=0),
        Column("teacher", f"teacher {score.heading}", scale=score.scale),
        Column("student", f"student {score.heading}", scale=score.scale),
    ]
    return Table("what students learn from whom", columns, rows, corner="student")
