"""The table of a comparison, from the results of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..analysis.groups import Group, Member, Variant, group_runs, mean_cell, paired_numbers
from ..analysis.printing import difference_notes
from ..analysis.reading import read_conditions, read_run
from ..analysis.task import find_analysis
from ..errors import RequestError
from ..tables import Cell, Column, Row, Table, filled
from .plan import BASE, Choice, Comparison, PlannedRun

SPLIT = "test"


@dataclass(frozen=True, eq=False)
class ComparedRow:
    """A row of the table: a requested method and the finished runs it is about.

    Variant and group are empty if no run is finished, or if all of them repeat runs of another row.
    """

    choice: Choice  # the runs that were selected
    variant: Variant  # what :func:`labo.lab.analysis.groups.group_runs` makes of them
    group: Group  # the group of the variant

    @property
    def scored(self) -> dict[int, Member]:
        """The runs with scores on the test split, by seed."""
        members = self.variant.members
        return {seed: member for seed, member in members.items() if SPLIT in member.results}

    def cell(self, metric: str) -> Cell:
        """Mean and standard deviation of a metric on the test split."""
        return self.variant.cell(lambda member: member.metric(SPLIT, metric))

    def time(self) -> Cell:
        """Seconds per step relative to base."""
        return mean_cell(self.group.step_times(self.variant))

    def memory(self) -> Cell:
        """Peak memory minus that of the base run of the same seed, in bytes."""
        base = self.group.first(BASE)
        if base is None:
            return Cell()
        paired = paired_numbers(self.variant, base, lambda m: m.results.get("peak_memory"))
        return mean_cell(paired.values())


NO_RUNS = ComparedRow(Choice("", (), {}), Variant("", {}, {}), Group("", SPLIT, ()))


def compared_rows(comparison: Comparison) -> tuple[dict[str, ComparedRow], list[Group]]:
    """The rows of a comparison by what was asked for, and the groups of their runs."""
    choices = comparison.choices()
    paths = dict.fromkeys(run.path for choice in choices.values() for run in choice.runs)
    runs = [read_run(path) for path in paths]
    groups = group_runs([Member(run) for run in runs if run.state.kind != "broken"], SPLIT)
    rows = {}
    for label, choice in choices.items():
        rows[label] = replace(NO_RUNS, choice=choice)
        chosen = {run.path for run in choice.runs}
        for group in groups:
            for variant in group.variants:
                if chosen & {member.run.path for member in variant.runs}:
                    rows[label] = ComparedRow(choice, variant, group)
    return rows, groups


def tabulate(comparison: Comparison) -> Table:
    """The table of a comparison, from the results of its selected runs on the test split."""
    compared, groups = compared_rows(comparison)
    kind = find_analysis(comparison.runs[0].recipe.task)
    metrics = dict.fromkeys(  # in order of appearance
        name
        for row in compared.values()
        for member in row.scored.values()
        for name in member.results[SPLIT]
    )
    rows, labels = [], {}
    for asked, row in compared.items():
        labels[asked] = row.variant.label or asked
        point = f" ({row.choice.point})" if row.choice.point else ""
        rows.append(Row(labels[asked] + point, _cells(row, metrics)))
    known = [kind.headline, *kind.scores]
    names = [column.key for column in known]
    scores = [column for column in known if column.key in metrics]
    scores += [Column(name, name, printed=False) for name in metrics if name not in names]
    differences = dict.fromkeys(c for group in groups for c in group.difference_columns())
    counts = [Column("runs", "runs", digits=0)]
    if comparison.grid:
        counts.append(Column("trials", "trials", digits=0))
    columns = [*counts, *scores[:1], *filled(differences, rows), *scores[1:]]
    if any(group.first(BASE) for group in groups):
        columns += [
            Column("time", "time", suffix="x"),
            Column("memory", "memory MB", digits=0, scale=1e-6, signed=True),
        ]
    columns += [Column(name, name, printed=False) for name in ("seconds", "peak_memory")]
    several = f"mean ± standard deviation over {comparison.seeds} seeds"
    return Table(
        caption=f"{comparison.name}: test split, {several if comparison.seeds > 1 else '1 seed'}",
        columns=columns,
        rows=rows,
        notes=list(dict.fromkeys(_notes(comparison, compared, labels, groups))),
    )


def _cells(row: ComparedRow, metrics: Iterable[str]) -> dict[str, Cell]:
    cells = {metric: row.cell(metric) for metric in metrics}
    cells["runs"] = Cell(len(row.scored))
    cells["trials"] = Cell(row.choice.trials)
    cells["seconds"] = row.variant.cell(lambda member: member.results.get("seconds"))
    cells["peak_memory"] = row.variant.cell(lambda member: member.results.get("peak_memory"))
    cells |= row.group.difference_cells(row.variant)
    return cells | {"time": row.time(), "memory": row.memory()}


def _notes(
    comparison: Comparison,
    rows: dict[str, ComparedRow],
    labels: dict[str, str],
    groups: Sequence[Group],
) -> list[str]:
    """What a reader of the table must know."""
    notes = []
    metric = find_analysis(comparison.runs[0].recipe.task).headline.key
    for asked, row in rows.items():
        if row.choice.point:
            notes.append(f"{labels[asked]}: {_selection(row.choice, metric, comparison)}")
            notes += [f"{labels[asked]}: {note}" for note in _edges(comparison, row.choice)]
        if len(row.scored) < comparison.seeds:
            finished = f"{len(row.scored)} of {comparison.seeds} runs are finished"
            notes.append(f"{labels[asked]}: {finished}")
    notes += [
        f"{run.path.name} is left out: {problem}"
        for run in comparison.runs
        if (problem := run.problem()) is not None
    ]
    for group in groups:
        notes += difference_notes(map(vars, group.differences))
        notes += group.notes
    if len(groups) > 1:
        names = " and ".join(", ".join(v.label for v in group.variants) for group in groups)
        notes.append(f"{names} were trained on different data and are not compared")
    if any(group.first(BASE) for group in groups):
        notes += _cost_notes(comparison.runs)
    return notes


def _edges(comparison: Comparison, choice: Choice) -> Iterable[str]:
    """Warnings about selected values that are the first or last of their grids."""
    run = choice.runs[0]
    for axis, (_, value) in zip(comparison.axes[run.variant.label], run.place, strict=True):
        if axis.is_edge(value):
            tried = f"{axis.numbers[0]:g} to {axis.numbers[-1]:g}"
            limit = comparison.limits.get(run.variant.label)
            hint = f"it cannot be extended ({limit})" if limit else "--extend tries more values"
            yield f"{axis.key}={value} is at the edge of its grid ({tried}): {hint}"


def _cost_notes(runs: Iterable[PlannedRun]) -> list[str]:
    try:
        known = [launch for run in runs for launch in read_conditions(run.path)]
    except RequestError:
        return []  # the group has a note about it
    kinds = {(launch.get("jobs") or 0, launch["threads"]) for launch in known}
    notes = [
        f"time: seconds per training step relative to {BASE} with the same seed; "
        f"{f'{jobs} run(s) at once, ' if jobs else ''}{threads} thread(s) each; wall-clock time, "
        "so other work on the machine distorts it"
        for jobs, threads in sorted(kinds)
    ]
    if any(launch != known[0] for launch in known):
        notes.append("time: only runs made under the same conditions are compared")
    return [*notes, f"memory: peak resident memory minus that of {BASE} with the same seed"]


def _selection(choice: Choice, metric: str, comparison: Comparison) -> str:
    """Which point of a grid was selected, from which, and whether the scores were tied."""
    shown, seeds = [], len(comparison.selecting)
    for point, scores in choice.scores.items():
        mean = f"{fmean(scores):.4f}" if scores else "no score"
        some = f" ({len(scores)} of {seeds} runs)" if 0 < len(scores) < seeds else ""
        shown.append(f"{point}: {mean}{some}")
    best = choice.scores[choice.point]
    equal = [
        point
        for point, scores in choice.scores.items()
        if len(scores) == len(best) and fmean(scores) == fmean(best)
    ]
    tied = f"; tied with {', '.join(equal[1:])}, the first is taken" if len(equal) > 1 else ""
    some = f"; by {seeds} of {comparison.seeds} seeds" if seeds < comparison.seeds else ""
    return f"{choice.point} selected by validation {metric} ({', '.join(shown)}){tied}{some}"
