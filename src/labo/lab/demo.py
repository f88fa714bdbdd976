"""``labo demo``: train base, label smoothing and LABO on digits and on phrases, and report.

Both data sets come with the installed packages; nothing is downloaded. Finished runs are not run
again, so the same command continues a demo that was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .analysis.task import find_analysis
from .compare.execute import carry_out
from .compare.launch import Failure
from .compare.plan import Comparison, plan
from .compare.setup import Setup
from .compare.table import tabulate
from .report import write_report
from .tables import Column, Table, to_markdown, write_table


@dataclass(frozen=True)
class DemoPart:
    """The runs of a recipe."""

    # Each with its own settings, selected on the validation split with seeds from 100 on
    # (docs/results.md has the command and the scores).
    methods: tuple[str, ...]
    seeds: int
    overrides: tuple[str, ...] = ()


# The longest runs are started first, so that all cores end together.
PARTS = {
    "cldr": DemoPart(
        (
            "base:optim.lr=3e-3",
            "ls:alpha=0.1:optim.lr=3e-3",
            "labo:tau=1.15:warmup_steps=700:optim.lr=3e-3",
        ),
        seeds=1,
        overrides=("train.epochs=2",),
    ),
    "digits": DemoPart(
        ("base:optim.lr=0.4", "ls:alpha=0.1:optim.lr=0.2", "labo:tau=1.5:optim.lr=0.2"), seeds=2
    ),
}


def comparisons(out: Path) -> list[Comparison]:
    """The runs of the demo."""
    return [
        plan(name, part.methods, part.seeds, out / name, overrides=part.overrides)
        for name, part in PARTS.items()
    ]


def demo(out: Path, setup: Setup | None = None) -> tuple[str, list[Failure]]:
    """Run the demo in a folder.

    Returns what to print (the tables, the path of the report, what to try next, and what the
    numbers say), and the runs that failed.
    """
    planned = comparisons(out)
    failures = carry_out(planned, out, setup)
    tables = [(comparison, tabulate(comparison)) for comparison in reversed(planned)]
    for comparison, table in tables:
        write_table(table, out / comparison.name)
    report = out / "report.html"
    write_report([run.path for comparison in planned for run in comparison.selected()], report)
    texts = [to_markdown(table) for _, table in tables]
    texts.append(
        f"The report, with all figures: {report}\n"
        "Next: labo compare digits --methods base,ls,kd,labo --seeds 5 --grid labo.tau=1.05,1.25\n"
    )
    return "\n".join([*texts, *_conclusions(tables)]), failures


def _conclusions(tables: Sequence[tuple[Comparison, Table]]) -> Iterator[str]:
    """A sentence each: what was compared, what differs, what cannot be told."""
    seeds = [f"{c.name} ({c.seeds} seed{'s' if c.seeds > 1 else ''})" for c, _ in tables]
    yield (
        f"Compared: cross entropy, label smoothing and LABO on {' and '.join(seeds)}, each method "
        "at its own settings, which the validation split selected with other seeds."
    )
    differing = [text for c, table in tables if (text := _spans(c, table))]
    if differing:
        yield f"Differs: {'; '.join(differing)}."
    most = max(comparison.seeds for comparison, _ in tables)
    yield (
        "Cannot be told: which method is better, because the exact test over paired seeds has no p "
        f"below {2 / 2**most:g} with {most} seeds, and none at all with one; docs/results.md has "
        "studies of five to ten seeds."
    )


def _spans(comparison: Comparison, table: Table) -> str:
    """The lowest and the highest headline and NLL, and whose they are."""
    kind = find_analysis(comparison.plain.task)
    columns = [kind.headline, *(column for column in kind.scores if column.key == "nll")]
    spans = [text for column in columns if (text := _span(column, table))]
    return f"{comparison.name}: {', '.join(spans)}" if spans else ""


def _span(column: Column, table: Table) -> str:
    scores = [
        (value, row.label)
        for row in table.rows
        if column.key in row.cells and (value := row.cells[column.key].value) is not None
    ]
    if len(scores) < 2:
        return ""
    (low, worst), (high, best) = min(scores), max(scores)
    return f"{column.heading} {column.shown(low)} ({worst}) to {column.shown(high)} ({best})"
