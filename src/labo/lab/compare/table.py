"""The table of a comparison, from the results of its runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..analysis import reading, significance
from ..tables import Cell, Column, Row, Table
from .conditions import conditions_of
from .plan import BASE, SMOOTHING, Choice, Comparison, PlannedRun, headline_of

# How a metric is shown: heading, scale, digits. Others are in CSV and JSON only.
_SHOWN: dict[str, tuple[str, float, int]] = {
    "bleu": ("BLEU", 1, 2),
    "chrf": ("chrF", 1, 2),
    "accuracy": ("accuracy %", 100, 2),
    "nll": ("NLL", 1, 3),
    "ece": ("ECE %", 100, 2),
}


def tabulate(comparison: Comparison) -> Table:
    """The table of a comparison, from the results of its selected runs on the test split."""
    rows = scored_rows(comparison)
    metrics = dict.fromkeys(  # in their order
        name for row in rows.values() for found in row.results.values() for name in found["test"]
    )
    headline = headline_of(metrics) if metrics else None
    rivals = [rival for rival in (BASE, SMOOTHING) if rival in rows]
    several = f"mean ± standard deviation over {comparison.seeds} seeds"
    return Table(
        caption=f"{comparison.name}: test split, {several if comparison.seeds > 1 else '1 seed'}",
        columns=_columns(headline, metrics, rivals),
        rows=[
            Row(line.label(label), _cells(label, line, rows, metrics, headline, rivals))
            for label, line in rows.items()
        ],
        notes=_notes(comparison, rows, headline, rivals),
    )


@dataclass(frozen=True)
class Scored:
    """What a row of the table rests on: the scored runs, and their results by seed."""

    choice: Choice
    results: Mapping[int, Mapping[str, Any]]

    def label(self, name: str) -> str:
        return f"{name} ({self.choice.point})" if self.choice.point else name

    def run(self, seed: int) -> PlannedRun:
        return next(run for run in self.choice.runs if run.seed == seed)

    def test(self, metric: str) -> dict[int, float]:
        """Seed -> a score on the test split."""
        return {seed: results["test"][metric] for seed, results in self.results.items()}

    def shared_seeds(self, other: Scored) -> list[int]:
        return [seed for seed in self.results if seed in other.results]


def scored_rows(comparison: Comparison) -> dict[str, Scored]:
    """For each row the selected runs that were scored on the test split."""
    rows = {}
    for label, choice in comparison.choices().items():
        found = {run.seed: run.directory.results() for run in choice.runs}
        rows[label] = Scored(choice, {s: r for s, r in found.items() if "test" in r})
    return rows


def _cells(
    label: str,
    line: Scored,
    rows: Mapping[str, Scored],
    metrics: Iterable[str],
    headline: str | None,
    rivals: Sequence[str],
) -> dict[str, Cell]:
    cells = {metric: spread_of(line.test(metric).values()) for metric in metrics}
    cells["runs"] = Cell(len(line.results))
    for name in ("seconds", "peak_memory"):
        found = [results[name] for results in line.results.values() if name in results]
        cells[name] = spread_of(found)
    for rival in rivals:
        if rival != label and headline is not None:
            cells |= _difference(line, rows[rival], rival, headline)
    if BASE in rows:
        cells |= cost(line, rows[BASE])
    return cells


def spread_of(values: Iterable[float]) -> Cell:
    """The mean of some numbers, and their standard deviation if there are several.

    Example:
        >>> spread_of([1.0, 2.0, 3.0])
        Cell(value=2.0, spread=1.0, paper=None)
    """
    numbers = list(values)
    return Cell(*significance.mean_std(numbers)) if numbers else Cell()


def _difference(line: Scored, rival: Scored, name: str, metric: str) -> dict[str, Cell]:
    """How far a row is above another one, seed by seed, and how likely that is chance."""
    seeds = line.shared_seeds(rival)
    if not seeds:
        return {}
    ours, theirs = line.test(metric), rival.test(metric)
    found = significance.paired_difference(
        [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    )
    cells = {f"delta_{name}": Cell(found["mean"]), f"p_{name}": Cell(found["p"])}
    if metric == "bleu":
        drawn = [_bootstrap(line.run(seed), rival.run(seed)) for seed in seeds]
        cells |= {
            f"p_{name}": Cell(statistics.median(drawn)),
            f"p_seeds_{name}": Cell(found["p"]),
        }
    return cells


def _bootstrap(ours: PlannedRun, theirs: PlannedRun) -> float:
    """The p-value of sacrebleu's paired bootstrap over the test sentences of two runs."""
    one, other = (
        reading.read_translations(reading.read_run(run.path), "test") for run in (ours, theirs)
    )
    signature = ours.directory.results().get("sacrebleu", {}).get("bleu")
    _, p = significance.paired_bootstrap_bleu(
        one.hypotheses, other.hypotheses, one.references, signature
    )
    return p


def cost(line: Scored, base: Scored) -> dict[str, Cell]:
    """Time per step and memory against the base run of the same seed, where they compare."""
    times, memory = [], []
    for seed in line.shared_seeds(base):
        ours, theirs = line.results[seed], base.results[seed]
        conditions = conditions_of(line.run(seed))
        if len(conditions) == 1 and conditions == conditions_of(base.run(seed)):
            pace = ours["seconds"] / ours["steps"]
            times.append(pace / (theirs["seconds"] / theirs["steps"]))
        if "peak_memory" in ours and "peak_memory" in theirs:
            memory.append(ours["peak_memory"] - theirs["peak_memory"])
    return {"time": spread_of(times), "memory": spread_of(memory)}


def _columns(headline: str | None, metrics: Iterable[str], rivals: Sequence[str]) -> list[Column]:
    columns = [Column("runs", "runs", digits=0)]
    if headline is not None:
        columns.append(_metric_column(headline))
        shown = replace(columns[-1], signed=True)
        for rival in rivals:
            columns += [
                replace(shown, key=f"delta_{rival}", heading=f"Δ {rival}"),
                Column(f"p_{rival}", "p", digits=3),
            ]
            if headline == "bleu":
                columns.append(Column(f"p_seeds_{rival}", "p over seeds", printed=False))
    columns += [_metric_column(metric) for metric in metrics if metric != headline]
    if BASE in rivals:
        columns += [
            Column("time", "time", suffix="x"),
            Column("memory", "memory MB", digits=0, scale=1e-6, signed=True),
        ]
    columns += [Column(name, name, printed=False) for name in ("seconds", "peak_memory")]
    return columns


def _metric_column(metric: str) -> Column:
    heading, scale, digits = _SHOWN.get(metric, (metric, 1, 3))
    return Column(metric, heading, digits=digits, scale=scale, printed=metric in _SHOWN)


def _notes(
    comparison: Comparison, rows: Mapping[str, Scored], headline: str | None, rivals: Sequence[str]
) -> list[str]:
    """What a reader of the table must know."""
    notes = []
    for label, line in rows.items():
        if line.choice.point:
            notes.append(f"{label}: {_selection(line.choice, headline)}")
        if len(line.results) < comparison.seeds:
            notes.append(f"{label}: {len(line.results)} of {comparison.seeds} runs are finished")
    if rivals and headline == "bleu":
        notes.append("p: sacrebleu's paired bootstrap over the test sentences, median of the seeds")
    elif rivals and comparison.seeds > 1:
        least = significance.sign_flip_test([1.0] * comparison.seeds)[1]
        notes.append(
            f"p: exact paired test over seeds, two-sided; {comparison.seeds} seeds can give no "
            f"less than {least:.3g}"
        )
    if BASE in rows:
        kinds = {json.dumps(c) for run in comparison.runs for c in conditions_of(run)}
        for text in sorted(kinds):
            found = json.loads(text)
            notes.append(
                f"time: seconds per training step over those of {BASE} with the same seed; "
                f"{found['jobs']} runs at once, {found['threads']} thread(s) each; by the clock, "
                "so that other work on the machine distorts it"
            )
        if len(kinds) > 1:
            notes.append("time: only runs made under the same conditions are compared")
        notes.append(f"memory: largest resident size of a run less that of {BASE}")
    return notes


def _selection(choice: Choice, headline: str | None) -> str:
    """Which point of a grid was selected, from what, and whether the scores could tell."""
    tried = ", ".join(f"{point}: {score:.4f}" for point, score in choice.scores.items())
    best = choice.scores[choice.point]
    equal = [point for point, score in choice.scores.items() if score == best]
    tied = f"; tied with {', '.join(equal[1:])}, the first is taken" if len(equal) > 1 else ""
    return f"{choice.point} selected by validation {headline} ({tried}){tied}"
