"""The tables of a report, and what is to be said in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..analysis.significance import mean_std, t_interval
from ..config import differing_keys
from ..tables import Cell, Column, Row, Table
from ..translation.frequency import PARTS
from .figures import view, views
from .gather import TRANSLATION, Entry, Group, Variant

Value = Callable[[Entry], Any]

REFERENCES = ("base", "ls")  # what every method is compared with

_EVEN = 0.5  # points by which confidence and accuracy may differ and still be called even


def _cell(variant: Variant, value: Value) -> Cell:
    """Mean and standard deviation over the seeds that have the number."""
    known = [number for entry in variant.entries if (number := value(entry)) is not None]
    return Cell(*mean_std(known)) if known else Cell()


def _differences(variant: Variant, reference: Variant | None, value: Value) -> list[float]:
    """The differences over the seeds that both have."""
    if reference is None or variant is reference:
        return []
    theirs = {entry.run.seed: value(entry) for entry in reference.entries}
    pairs = [(value(entry), theirs.get(entry.run.seed)) for entry in variant.entries]
    return [ours - other for ours, other in pairs if ours is not None and other is not None]


def _difference(variant: Variant, reference: Variant | None, value: Value) -> Cell:
    known = _differences(variant, reference, value)
    return Cell(*mean_std(known)) if known else Cell()


def _ratio(variant: Variant, reference: Variant | None, value: Value) -> Cell:
    if reference is None:
        return Cell()
    ours, base = _cell(variant, value).value, _cell(reference, value).value
    return Cell(ours / base) if ours is not None and base else Cell()


# ------------------------------------------------------------------ results


def results_table(group: Group) -> Table | None:
    """Every method's scores over its seeds; None if no run is finished."""
    finished = [v for v in group.variants if any(entry.results for entry in v.entries)]
    if not finished:
        return None
    reference = {name: _first(finished, name) for name in REFERENCES}
    if group.task == TRANSLATION:
        scores = [Column("bleu", "BLEU"), Column("chrf", "chrF"), Column("nll", "NLL", digits=3)]
        scores.append(Column("length_ratio", "length ratio", digits=3))
        scale = 1.0
    else:
        scores = [Column("accuracy", "accuracy, %", scale=100)]
        scores += [Column("nll", "NLL", digits=3), Column("ece", "ECE, %", scale=100)]
        scale = 100.0
    against = [
        Column(f"vs_{name}", f"against {name}", scale=scale, signed=True)
        for name, variant in reference.items()
        if variant and len(finished) > 1
    ]
    costs = [
        Column("time", "time", suffix="×"),
        Column("memory", "peak memory, MB", digits=0, scale=1e-6),
    ]

    def seconds(entry: Entry) -> Any:
        return entry.results.get("seconds")

    rows = []
    for variant in finished:
        cells = {column.key: _cell(variant, _score(group, column.key)) for column in scores}
        for name, other in reference.items():
            cells[f"vs_{name}"] = _difference(variant, other, _score(group, group.metric))
        cells["time"] = _ratio(variant, reference["base"], seconds)
        memory = _cell(variant, lambda entry: entry.results.get("peak_memory"))
        cells["memory"] = Cell(memory.value)
        rows.append(Row(variant.label, cells))
    columns = [scores[0], *against, *scores[1:], *costs]
    filled = [c for c in columns if any(row.cells[c.key].value is not None for row in rows)]
    return Table(f"Results on the {group.split} split of {group.title}", filled, rows)


def _score(group: Group, metric: str) -> Value:
    return lambda entry: entry.results.get(group.split, {}).get(metric)


def _first(variants: Sequence[Variant], name: str) -> Variant | None:
    return next((variant for variant in variants if variant.name == name), None)


def sure_differences(group: Group) -> set[tuple[str, str]]:
    """(label, column) of the differences in the table whose 95 % interval over seeds excludes 0."""
    sure = set()
    for name in REFERENCES:
        reference = _first(group.variants, name)
        for variant in group.variants:
            values = _differences(variant, reference, _score(group, group.metric))
            interval = t_interval(values) if values else None
            if interval and interval[0] * interval[1] > 0:
                sure.add((variant.label, f"vs_{name}"))
    return sure


def unfair(group: Group) -> str:
    """What besides method and seed differs between the runs; empty if nothing does."""
    first, *others = [entry.run.recipe for entry in group.entries]
    keys = {key for other in others for key in differing_keys(first, other)}
    keys = {key for key in keys if key != "seed" and key.split(".")[0] != "method"}
    return ", ".join(sorted(keys))


# ------------------------------------------------------------------ confidence


def confidence_table(group: Group) -> Table | None:
    """What each method claims and what it knows; None without records."""
    first, second = views(group)

    def of(way: str, key: str) -> Value:
        def value(entry: Entry) -> Any:
            shown = view(entry, group, way)
            return shown[key] if shown else None

        return value

    def temperature(entry: Entry) -> Any:
        found = (entry.split(group.split) or {}).get("temperature")
        return found["value"] if found else None

    columns: dict[Column, Value] = {
        Column("accuracy", "right, %", scale=100): of(first, "accuracy"),
        Column("confidence", "claimed, %", scale=100): of(first, "confidence"),
        Column("gap", "right − claimed", scale=100, signed=True): of(first, "underconfidence"),
        Column("ece", "ECE, %", scale=100): of(first, "ece"),
        Column("temperature", "temperature"): temperature,
        Column("ece_after", "ECE after temperature, %", scale=100): of(second, "ece"),
        Column("ece_own", "ECE own output, %", scale=100): of("decoded", "ece"),
    }
    rows = [
        Row(variant.label, {column.key: _cell(variant, value) for column, value in columns.items()})
        for variant in group.variants
    ]
    rows = [row for row in rows if row.cells["confidence"].value is not None]
    shown = [c for c in columns if any(row.cells[c.key].value is not None for row in rows)]
    caption = f"Confidence on the {group.split} split of {group.title}"
    return Table(caption, shown, rows) if rows else None


def under_confidence(group: Group) -> str:
    """Plain words on LABO's confidence, with its numbers; empty without records of it."""
    table = confidence_table(group)
    ours = {variant.label for variant in group.variants if variant.name == "labo"}
    rows = [row for row in (table.rows if table else ()) if row.label in ours]
    what = "reference tokens" if group.task == TRANSLATION else "images"
    said = [_plainly(row, what) for row in rows]
    if any((row.cells["gap"].value or 0) * 100 > _EVEN for row in rows):
        said.append(
            "LABO's objective asks for under-confidence: however sure the model, its label keeps "
            "mass on other classes, and the more, the larger τ."
        )
    return " ".join(said)


def _plainly(row: Row, what: str) -> str:
    numbers = {key: cell.value for key, cell in row.cells.items()}
    right, claimed, gap = (100 * (numbers[key] or 0) for key in ("accuracy", "confidence", "gap"))
    text = f"{row.label} is right on {right:.1f} % of the {what} and claims {claimed:.1f} %: "
    if gap > _EVEN:
        text += f"it is under-confident, by {gap:.1f} points."
    elif gap < -_EVEN:
        text += f"it is over-confident, by {-gap:.1f} points."
    else:
        text += "it is as sure as it is right."
    ece, after, temperature = (numbers[key] for key in ("ece", "ece_after", "temperature"))
    if ece is not None and after is not None and temperature is not None:
        text += (
            f" One temperature, {temperature:.2f}, fitted on the validation split, takes its "
            f"calibration error from {100 * ece:.1f} % to {100 * after:.1f} %."
        )
    return text


# ------------------------------------------------------------------ translation


def frequency_table(group: Group) -> Table | None:
    """BLEU of each method on sentences of frequent and of rare words; None without records."""

    def of(part: str) -> Value:
        def value(entry: Entry) -> Any:
            found = (entry.split(group.split) or {}).get("frequency")
            return found[part]["bleu"] if found else None

        return value

    columns = [Column(part, f"{part} frequent") for part in PARTS]
    rows = [
        Row(variant.label, {part: _cell(variant, of(part)) for part in PARTS})
        for variant in group.variants
    ]
    rows = [row for row in rows if any(cell.value is not None for cell in row.cells.values())]
    ls, labo = _first(group.variants, "ls"), _first(group.variants, "labo")
    if rows and ls and labo:
        cells = {part: _difference(labo, ls, of(part)) for part in PARTS}
        rows.append(Row(f"{labo.label} against {ls.label}", cells, ruled=True))
    return Table(f"BLEU by word frequency, {group.split} split", columns, rows) if rows else None
