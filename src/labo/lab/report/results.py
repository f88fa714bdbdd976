"""The tables that a report has for every task, and sentences about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..analysis.groups import Member, mean_cell
from ..tables import Cell, Column, Row, Table, filled
from .gather import ReportGroup

Value = Callable[[Member], float | None]

_EVEN = 0.5  # points between confidence and accuracy that count as no difference


def mean_table(
    caption: str, group: ReportGroup, columns: dict[Column, Value], key: str | None = None
) -> Table | None:
    """A row per variant of means over seeds; columns and rows without numbers are left out.

    ``columns`` says how the number of a run is found. A row must have a number in the column
    ``key``, or in any.
    """
    rows = [
        Row(v.label, {column.key: v.cell(value) for column, value in columns.items()})
        for v in group.shown
    ]
    needed = [column.key for column in columns] if key is None else [key]
    rows = [row for row in rows if any(row.cells[k].value is not None for k in needed)]
    return Table(caption, filled(columns, rows), rows) if rows else None


def results_table(group: ReportGroup) -> Table | None:
    """The scores of every method over its seeds; None if no run is finished."""
    split = group.split
    finished = [v for v in group.shown if any(m.run.results is not None for m in v.runs)]
    if not finished:
        return None
    headline, scores = group.kind.headline, group.kind.scores
    rows = []
    for variant in finished:
        cells = {headline.key: variant.cell(lambda member: member.score(split))}
        cells |= {c.key: variant.cell(_metric(split, c.key)) for c in scores}
        cells |= group.difference_cells(variant)
        cells["time"] = Cell(mean_cell(group.step_times(variant)).value)
        memory = variant.cell(lambda member: member.results.get("peak_memory"))
        cells["memory"] = Cell(memory.value)
        rows.append(Row(variant.label, cells))
    costs = [
        Column("time", "time", suffix="×"),
        Column("memory", "peak memory, MB", digits=0, scale=1e-6),
    ]
    columns = filled([headline, *group.difference_columns(), *scores, *costs], rows)
    return Table(f"Results on the {split} split of {group.title}", columns, rows)


def _metric(split: str, name: str) -> Value:
    return lambda member: member.metric(split, name)


# ------------------------------------------------------------------ confidence


def _number(document: Any, keys: Sequence[str]) -> float | None:
    """What is at these keys of nested documents; None where one of them is missing."""
    for key in keys:
        document = (document or {}).get(key)
    return document


def confidence_table(
    group: ReportGroup, views: tuple[str, str], further: Sequence[tuple[Column, str, str]] = ()
) -> Table | None:
    """Accuracy, confidence, calibration and ranking of each method; None without records.

    ``views`` are those of the predictions and of the predictions with a temperature. ``further``
    has more columns, each with its view and key.
    """
    first, second = views

    def at(*keys: str) -> Value:
        return lambda member: _number(member.split(group.split), keys)

    def percent(key: str, heading: str, **options: Any) -> Column:
        return Column(key, f"{heading} %", scale=100, **options)

    columns: dict[Column, Value] = {
        percent("accuracy", "accuracy", better=1): at("views", first, "accuracy"),
        percent("confidence", "confidence"): at("views", first, "confidence"),
        Column("gap", "accuracy − confidence", scale=100, signed=True): at(
            "views", first, "underconfidence"
        ),
        percent("ece", "ECE", better=-1): at("views", first, "ece"),
        Column("temperature", "temperature"): at("temperature"),
        percent("ece_after", "ECE after temperature", better=-1): at("views", second, "ece"),
        percent("aurc", "AURC", better=-1): at("views", first, "selective", "aurc"),
        percent("aurc_normalised", "AURC, normalised logits", better=-1): at("logit_norm", "aurc"),
        **{column: at("views", way, key) for column, way, key in further},
    }
    caption = f"Confidence on the {group.split} split of {group.title}"
    return mean_table(caption, group, columns, "confidence")


def confidence_text(group: ReportGroup, table: Table | None) -> str:
    """LABO's confidence in words, with its numbers; empty without records of it."""
    ours = {variant.label for variant in group.shown if variant.name == "labo"}
    rows = [row for row in (table.rows if table else ()) if row.label in ours]
    sentences = [_sentences(row, group.kind.unit) for row in rows]
    if any((row.cells["gap"].value or 0) * 100 > _EVEN for row in rows):
        sentences.append(
            "LABO's objective leads to underconfidence: its label always keeps mass on the other "
            "classes, and the more, the larger τ."
        )
    return " ".join(sentences)


def _sentences(row: Row, unit: str) -> str:
    numbers = {key: cell.value for key, cell in row.cells.items()}
    accuracy, confidence, gap = (
        100 * (numbers[key] or 0) for key in ("accuracy", "confidence", "gap")
    )
    text = (
        f"{row.label} is right on {accuracy:.1f} % of the {unit} with a mean confidence of "
        f"{confidence:.1f} %: it is "
    )
    if gap > _EVEN:
        text += f"underconfident by {gap:.1f} points."
    elif gap < -_EVEN:
        text += f"overconfident by {-gap:.1f} points."
    else:
        text += "neither under- nor overconfident."
    ece, after, temperature = (numbers[key] for key in ("ece", "ece_after", "temperature"))
    if ece is not None and after is not None and temperature is not None:
        text += (
            f" One temperature, {temperature:.2f}, fitted on the validation split, changes its "
            f"calibration error from {100 * ece:.1f} % to {100 * after:.1f} %."
        )
    return text
