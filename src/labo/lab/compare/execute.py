"""Carry out comparisons: train what is missing, select, evaluate what is selected.

Runs that are finished are not run again, runs that were interrupted are continued.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tables import Table, write_table
from ..tasks import find_task
from . import launch
from .conditions import note_conditions
from .plan import Comparison, PlannedRun
from .table import tabulate


def compare(comparison: Comparison, jobs: int | None = None) -> tuple[Table, list[launch.Failure]]:
    """Carry a comparison out, and write ``table.md``, ``.tex``, ``.csv`` and ``.json``.

    Returns:
        The table, and the runs that failed, which it lacks.
    """
    failures = carry_out([comparison], comparison.out, jobs)
    table = tabulate(comparison)
    write_table(table, comparison.out / "table")
    return table, failures


def carry_out(
    comparisons: Sequence[Comparison], root: Path, jobs: int | None = None
) -> list[launch.Failure]:
    """Train what is missing, select, and score what is selected.

    Args:
        comparisons: their folders lie in ``root``.
        root: the folder to hold while at work.
        jobs: how many runs at once; by default one per GPU, or one per core.

    Returns:
        The runs that failed; the others are done.
    """
    # By their folders: a point of a grid may also be a row of its own.
    runs = list({run.path: run for c in comparisons for run in c.runs}.values())
    share = launch.Share.of_machine(len(runs), jobs)
    for comparison in comparisons:
        if any(not run.directory.finished for run in comparison.runs):
            recipe = comparison.runs[0].recipe
            find_task(recipe.task)(recipe)  # whether its data are there; and made once, if made
    with launch.held(root) as lock:
        failures = launch.run_jobs([_training(run, root, share) for run in runs], share, lock)
        chosen = {run.path: run for comparison in comparisons for run in comparison.selected()}
        scoring = [_scoring(run, root) for run in chosen.values()]
        failures += launch.run_jobs(scoring, share, lock)
    return failures


def _training(run: PlannedRun, root: Path, share: launch.Share) -> launch.Job:
    after = None if run.teacher is None else _name(run.teacher, root)
    return launch.Job(
        name=_name(run.path, root),
        row=_name(run.path, root).removesuffix(f"-s{run.seed}"),
        column=f"seed {run.seed}",
        arguments=("train", *run.arguments, "--no-test", "--out", str(run.path)),
        log=_log(run),
        finished=lambda: run.directory.finished,
        status=lambda: _training_status(run),
        after=after,
        starting=lambda: note_conditions(run, share),
    )


def _scoring(run: PlannedRun, root: Path) -> launch.Job:
    records = [run.directory.records / f"{split}.jsonl" for split in ("valid", "test")]

    def scored() -> bool:
        return "test" in run.directory.results() and all(map(Path.exists, records))

    return launch.Job(
        name=f"{_name(run.path, root)} on test",
        row=_name(run.path, root).removesuffix(f"-s{run.seed}"),
        column=f"seed {run.seed}",
        arguments=("evaluate", str(run.path)),
        log=_log(run),
        finished=scored,
        status=lambda: "scored" if scored() else "scoring",
    )


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _log(run: PlannedRun) -> Path:
    return run.path.parent / "logs" / f"{run.path.name}.log"


def _training_status(run: PlannedRun) -> str:
    """How far a run is, and its last validation score."""
    metric = run.recipe.train.select
    if (results := run.results()) is not None:
        found = results.get("valid", {}).get(metric)
        score = "finished" if found is None else f"valid {metric} {found:.4f}"
        return f"{score} in {results.get('seconds') or 0:.0f} s"
    place, score, epochs = "starting", "", run.recipe.train.epochs
    for line in _newest_lines(run.directory.metrics_file):
        if "epoch" in line:
            place = f"epoch {line['epoch']}" + (f"/{epochs}" if epochs else "")
        if metric in line.get("valid", {}):
            score = f"  {line['valid'][metric]:.4f}"
    return place + score


def _newest_lines(path: Path, size: int = 1 << 14) -> list[dict[str, Any]]:
    """The metrics in the last bytes of a file; lines that are cut off there are left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(path.stat().st_size - size, 0)
        file.seek(start)
        lines = file.read().split(b"\n")
    return [json.loads(line) for line in lines[1 if start else 0 : -1]]
