"""Carry out comparisons: train what is missing, select, evaluate what is selected.

Runs that are finished are not run again, runs that were interrupted are continued.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..analysis.collection import check_folder, claim_folder
from ..analysis.reading import newest_metrics
from ..command_options import validated
from ..errors import RequestError
from ..run.directory import RunDirectory
from ..run.lock import held
from ..tables import Table, write_table
from ..tasks import find_task
from .engines import Job
from .launch import Failure, Launch
from .plan import Comparison, PlannedRun, plan
from .setup import Setup
from .table import tabulate


def compare(
    recipe: str,
    methods: Sequence[str] = ("base", "ls", "labo"),
    seeds: int = 3,
    *,
    out: str | Path,
    jobs: int | None = None,
    setup: Setup | None = None,
    accept_data: bool = False,
    **request: Any,
) -> tuple[Table, list[Failure]]:
    """Train several methods with several seeds, and tabulate them, as ``labo compare`` does.

    Each run is a process of its own. Finished runs are reused, interrupted ones are continued.

    Args:
        recipe: a recipe file, or the name of a recipe of the package.
        methods: the rows, such as ``labo`` or ``labo:tau=1.05``.
        seeds: runs per method, with seeds from 0.
        out: the folder of the runs. The table is written there as ``table.md``, ``.tex``, ``.csv``
            and ``.json``.
        jobs: how many runs at once; by default one per GPU, or one per core.
        setup: the engine, instead of ``jobs``.
        accept_data: continue although the data of some runs have changed.
        **request: ``overrides``, ``teacher`` and the further fields of a request, such as ``grid``,
            as for :func:`labo.lab.compare.plan.plan`.

    Returns:
        The table, and the runs that failed, which it lacks.

    Raises:
        RequestError: the request is wrong, or ``out`` holds something else.
    """
    comparison = plan(recipe, methods, seeds, out, **request)
    return run_comparison(
        comparison, setup or validated(Setup, {"jobs": jobs}), accept_data=accept_data
    )


def run_comparison(
    comparison: Comparison, setup: Setup | None = None, *, accept_data: bool = False
) -> tuple[Table, list[Failure]]:
    """Carry out what was planned, and write the table; see :func:`compare`."""
    failures = carry_out([comparison], comparison.out, setup, accept_data=accept_data)
    table = tabulate(comparison)
    write_table(table, comparison.out / "table")
    return table, failures


def carry_out(
    comparisons: Sequence[Comparison],
    root: Path,
    setup: Setup | None = None,
    *,
    accept_data: bool = False,
) -> list[Failure]:
    """Train what is missing, select, train what the selection asks for, and score what is selected.

    The folders of the comparisons are in ``root``, which is owned meanwhile. The runs that the
    selection asks for are added to them. Returned are the runs that failed; the others are done.
    """
    setup = setup or Setup()
    setup.check()
    check_folder(root)
    if not accept_data:
        for comparison in comparisons:
            _check_data(comparison)
    launch = Launch(setup, len(_different(comparisons)), root)
    with held(root), closing(launch):
        claim_folder(root)
        more = True
        while more:
            launch.run(
                [_training(run, root, setup, accept_data) for run in _different(comparisons)]
            )
            more = sum(comparison.grow() for comparison in comparisons) > 0
        chosen = {run.path: run for comparison in comparisons for run in comparison.selected()}
        launch.run([_scoring(run, root, accept_data) for run in chosen.values()])
    return list(launch.failures.values())


def missing_commands(
    comparison: Comparison, setup: Setup | None = None, *, accept_data: bool = False
) -> list[str]:
    """The shell lines that train what is missing, each behind those it needs.

    If the results must first select, the lines that follow are printed when they are there.
    """
    while all(run.directory.finished for run in comparison.runs) and comparison.grow():
        pass
    setup, root = setup or Setup(), comparison.out
    jobs = [_training(run, root, setup, accept_data) for run in comparison.runs]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(setup.processes), "-m"]
    return [
        shlex.join([*(torchrun if job.processes > 1 else ()), "labo", *job.arguments])
        for job in _in_order(jobs)
        if not job.finished()
    ]


def _in_order(jobs: Sequence[Job]) -> list[Job]:
    """The jobs in their order, but each behind the one it needs."""
    named, ordered = {job.name: job for job in jobs}, dict[str, Job]()

    def add(job: Job) -> None:
        if job.after in named:
            add(named[job.after])
        ordered.setdefault(job.name, job)

    for job in jobs:
        add(job)
    return list(ordered.values())


def _different(comparisons: Iterable[Comparison]) -> list[PlannedRun]:
    """All runs, each once: a point of a grid may also be a row of its own."""
    return list({run.path: run for c in comparisons for run in c.runs}.values())


def _check_data(comparison: Comparison) -> None:
    """Refuse runs that were begun with other data than those of today, or than each other."""
    by_data: dict[str, list[PlannedRun]] = {}
    for run in comparison.runs:  # a grid may go over data, too
        key = json.dumps(run.recipe.as_document().get("data"), sort_keys=True)
        by_data.setdefault(key, []).append(run)
    for runs in by_data.values():
        begun = {run.path: run.directory.data for run in runs if run.directory.recipe_file.exists()}
        if not all(_is_scored(run) for run in runs):
            recipe = runs[0].recipe
            # Also whether the data are there; and they are made once, if they are made.
            fingerprint = find_task(recipe.task)(recipe).fingerprint
            for path in begun:
                RunDirectory(path).check_data(fingerprint)
        known = {path: data for path, data in begun.items() if data is not None}
        if len(set(known.values())) > 1:
            each = "; ".join(f"{path.name}: {data}" for path, data in known.items())
            raise RequestError(
                f"the runs in {comparison.out} were trained on different data ({each}); choose "
                "another --out, or pass --accept-data to labo compare"
            )


def _is_scored(run: PlannedRun) -> bool:
    records = [run.directory.records / f"{split}.jsonl" for split in ("valid", "test")]
    results = run.results()
    return results is not None and "test" in results and all(map(Path.exists, records))


def _training(run: PlannedRun, root: Path, setup: Setup, accept_data: bool = False) -> Job:
    return _job(
        run,
        root,
        ("train", *run.arguments, *_accepting(accept_data), "--no-test", "--out", str(run.path)),
        finished=lambda: run.directory.finished,
        status=lambda: _training_status(run),
        after=None if run.teacher is None else _name(run.teacher, root),
        processes=setup.processes,
    )


def _scoring(run: PlannedRun, root: Path, accept_data: bool = False) -> Job:
    return _job(
        run,
        root,
        ("evaluate", *_accepting(accept_data), str(run.path)),
        " on test",
        finished=lambda: _is_scored(run),
        status=lambda: "scored" if _is_scored(run) else "scoring",
    )


def _job(
    run: PlannedRun, root: Path, arguments: tuple[str, ...], work: str = "", **rest: Any
) -> Job:
    name = _name(run.path, root)
    log = run.path.parent / "logs" / f"{run.path.name}.log"
    row, column = name.removesuffix(f"-s{run.seed}"), f"seed {run.seed}"
    return Job(name + work, row, column, arguments, log, **rest)


def _accepting(accept_data: bool) -> tuple[str, ...]:
    return ("--accept-data",) if accept_data else ()


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _training_status(run: PlannedRun) -> str:
    """How far a run is, and its last validation score."""
    metric = run.recipe.train.select
    if (results := run.results()) is not None:
        value = results.get("valid", {}).get(metric)
        score = "finished" if value is None else f"valid {metric} {value:.4f}"
        return f"{score} in {results.get('seconds') or 0:.0f} s"
    metric = run.recipe.selected_by
    progress, score, epochs = "starting", "", run.recipe.train.epochs
    for line in newest_metrics(run.directory.metrics_file):
        if "epoch" in line:
            progress = f"epoch {line['epoch']}" + (f"/{epochs}" if epochs else "")
        scores = line.get("valid")
        if isinstance(scores, dict) and isinstance(scores.get(metric), float):
            score = f"  {scores[metric]:.4f}"
    return progress + score
