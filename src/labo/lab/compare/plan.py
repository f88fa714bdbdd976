"""One recipe, several methods, several seeds: the runs, the choice of hyper-parameters, the table.

Every run is trained without a look at the test split. Where a method has a grid, the point with the
best mean validation score over the seeds is selected; only the runs of selected points are then
scored on the test split, once. What is finished is not run again, what was interrupted is
continued: the run directories say which is which.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..analysis import reading, significance
from ..config import Recipe, load_recipe
from ..errors import RequestError
from ..methods import METHODS, method_name
from ..run import files as atomic
from ..run.directory import RunDirectory
from ..tables import Cell, Column, Row, Table, write_table
from ..tasks import find_task
from . import launch

BASE, SMOOTHING = "base", "ls"  # what a method is measured against
HEADLINES = ("bleu", "accuracy")  # higher is better


@dataclass(frozen=True)
class Variant:
    """A row of the table: a method, perhaps with hyper-parameters of its own.

    Attributes:
        label: as it was asked for, ``labo`` or ``labo:tau=1.05``.
        method: its name in ``METHODS``.
        settings: hyper-parameter -> value, as text.
    """

    label: str
    method: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Axis:
    """A grid's hyper-parameter: an override and its values; for one method, or for all."""

    key: str
    values: tuple[str, ...]
    method: str | None

    def applies_to(self, variant: Variant) -> bool:
        if self.method is None:
            return True
        return variant.method == self.method and self.key not in variant.settings


@dataclass(frozen=True)
class Run:
    """A run of a comparison.

    Attributes:
        variant: its row.
        point: its place in the grid of its row, such as ``tau=1.15``; empty without a grid.
        seed: its seed.
        path: its run directory.
        recipe: what it trains.
        arguments: the recipe's name and the overrides that make ``recipe`` of it.
        teacher: the run of this comparison that must be finished before.
    """

    variant: Variant
    point: str
    seed: int
    path: Path
    recipe: Recipe
    arguments: tuple[str, ...]
    teacher: Path | None = None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.path)

    def results(self) -> dict[str, Any] | None:
        """The content of ``results.json``, if the run is finished."""
        return self.directory.results() if self.directory.finished else None


@dataclass(frozen=True)
class Choice:
    """The runs that stand for a row.

    Attributes:
        point: the selected place in the grid; empty without a grid.
        runs: the finished runs of that place, by seed.
        scores: place -> mean validation score of its finished runs, for all places that have any.
    """

    point: str
    runs: tuple[Run, ...]
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """The runs of a table, seed by seed, so that methods take turns and their times compare."""

    name: str
    out: Path
    runs: tuple[Run, ...]

    @cached_property
    def variants(self) -> list[Variant]:
        return list({run.variant.label: run.variant for run in self.runs}.values())

    @property
    def seeds(self) -> int:
        return len({run.seed for run in self.runs})

    def choices(self) -> dict[str, Choice]:
        """For each row, the runs it rests on: selected by the validation split alone."""
        return {variant.label: self._choice(variant) for variant in self.variants}

    def selected(self) -> list[Run]:
        """The runs that all rows rest on."""
        return [run for choice in self.choices().values() for run in choice.runs]

    def _choice(self, variant: Variant) -> Choice:
        finished: dict[str, list[tuple[Run, float]]] = {}
        for run in self.runs:
            if run.variant == variant and (results := run.results()) is not None:
                score = results["valid"][headline_of(results["valid"])]
                finished.setdefault(run.point, []).append((run, score))
        scores = {
            point: statistics.fmean(score for _, score in found)
            for point, found in finished.items()
        }
        if not scores:
            return Choice("", (), {})
        # A point at which some seed failed is chosen only if there is no better one.
        point = max(scores, key=lambda point: (len(finished[point]), scores[point]))
        return Choice(point, tuple(run for run, _ in finished[point]), scores)


def headline_of(metrics: Iterable[str]) -> str:
    """The metric of a task that hyper-parameters are selected by and a table is about.

    Example:
        >>> headline_of({"nll": 0.1, "accuracy": 0.9})
        'accuracy'
    """
    return next(name for name in HEADLINES if name in metrics)


# ------------------------------------------------------------------ from a request to runs


def plan(
    recipe: str,
    methods: Sequence[str],
    seeds: int,
    out: str | Path,
    *,
    overrides: Iterable[str] = (),
    grid: Iterable[str] = (),
    teacher: Run | str | None = None,
) -> Comparison:
    """Check a request as a whole and list its runs; nothing is started.

    Args:
        recipe: a recipe file or name.
        methods: the rows: names of ``METHODS``, each perhaps with hyper-parameters
            (``labo:tau=1.05:rho=1``).
        seeds: how many seeds, from 0.
        out: the folder of the run directories.
        overrides: ``key=value`` settings for all runs.
        grid: hyper-parameters to select: ``tau=1.15,1.25`` for the one method that has it,
            ``labo.tau=1.15,1.25`` to name the method, ``optim.lr=0.1,0.2`` for all methods.
        teacher: a run that all methods with a teacher learn from, finished or planned; by default
            each learns from the base run of the same seed.

    Raises:
        RequestError: something in the request is wrong, or does not fit what is in ``out``.
    """
    if seeds < 1:
        raise RequestError(f"--seeds {seeds}: at least one seed is needed")
    overrides, out = tuple(overrides), Path(out)
    for text in overrides:
        if text.partition("=")[0].split(".")[0] in ("method", "seed"):
            raise RequestError(f"{text}: methods and seeds are chosen by --methods and --seeds")
    plain = load_recipe(recipe, overrides)
    variants = read_methods(methods)
    axes = read_grid(grid, variants, plain.task)
    if isinstance(teacher, str):
        RunDirectory(teacher).facts()  # whether it is one
    runs = []
    for seed, variant in itertools.product(range(seeds), variants):
        mine = [axis for axis in axes if axis.applies_to(variant)]
        for values in itertools.product(*(axis.values for axis in mine)):
            place = tuple(zip(mine, values, strict=True))
            settings = [*overrides, *_settings(variant, place, plain), f"seed={seed}"]
            awaited = None
            if _needs_teacher(variant, plain.task):
                if teacher is None:
                    awaited = out / _name_of(_teacher(variant, variants), place, seed, shared=True)
                elif isinstance(teacher, Run):
                    awaited = teacher.path
                settings.append(f"method.teacher={awaited or teacher}")
            runs.append(
                Run(
                    variant,
                    " ".join(f"{axis.key}={value}" for axis, value in place),
                    seed,
                    out / _name_of(variant, place, seed),
                    load_recipe(recipe, settings),
                    (recipe, *settings),
                    awaited,
                )
            )
    for run in runs:
        run.directory.check(run.recipe)
    return Comparison(Path(recipe).stem, out, tuple(runs))


def read_methods(names: Sequence[str]) -> list[Variant]:
    """The rows of a table; each ``NAME[:HYPER=VALUE]...``."""
    variants = []
    for text in names:
        name, *settings = text.split(":")
        pairs = [setting.partition("=") for setting in settings]
        if not all(key and equals and value for key, equals, value in pairs):
            raise RequestError(f"--methods {text}: write NAME:HYPER=VALUE, as in labo:tau=1.15")
        method = method_name(name)
        label = ":".join([method, *settings])
        variants.append(Variant(label, method, {key: value for key, _, value in pairs}))
    labels = [variant.label for variant in variants]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise RequestError(f"--methods: {', '.join(sorted(twice))} is given twice")
    return variants


def read_grid(texts: Iterable[str], variants: Sequence[Variant], task: str) -> list[Axis]:
    """The axes of a grid, each for the methods it is meant for."""
    listed = list(dict.fromkeys(variant.method for variant in variants))
    axes = []
    for text in texts:
        key, _, listing = text.partition("=")
        values = tuple(listing.split(","))
        if not key or not all(values) or len(set(values)) < len(values):
            raise RequestError(
                f"--grid {text}: write a key and its different values, as in tau=1.15,1.25"
            )
        owner, dot, hyper = key.rpartition(".")
        if dot and owner not in METHODS:  # a key of the recipe
            axes.append(Axis(key, values, None))
            continue
        owners = [
            name for name in listed if hyper in METHODS[name].hyper_parameters(task).model_fields
        ]
        if dot:
            owners = [name for name in owners if name == owner]
        if len(owners) > 1:
            raise RequestError(
                f"--grid {text}: {' and '.join(owners)} have {hyper}; write {owners[-1]}.{text}"
            )
        if not owners:
            raise RequestError(f"--grid {text}: no method of {', '.join(listed)} has {key}")
        axes.append(Axis(hyper, values, owners[0]))
    return axes


Place = tuple[tuple[Axis, str], ...]  # a point of a grid


def _settings(variant: Variant, place: Place, plain: Recipe) -> list[str]:
    """The overrides that make a variant of the plain recipe.

    If the recipe itself chooses the method, the hyper-parameters it gives it hold.
    """
    own_choice = variant.method == plain.method["name"]
    chosen = [f"method{'.name' if own_choice else ''}={variant.method}"]
    own = [f"method.{key}={value}" for key, value in variant.settings.items()]
    tried = [f"{'method.' if axis.method else ''}{axis.key}={value}" for axis, value in place]
    return chosen + own + tried


def _name_of(variant: Variant, place: Place, seed: int, *, shared: bool = False) -> str:
    """The folder of a run; with ``shared`` only the axes that all methods have are named."""
    parts = [f"{key}{value}" for key, value in variant.settings.items()]
    parts += [f"{axis.key}{value}" for axis, value in place if not (shared and axis.method)]
    return re.sub(r"[^\w.+-]", "_", "-".join([variant.method, *parts, f"s{seed}"]))


def _needs_teacher(variant: Variant, task: str) -> bool:
    field = METHODS[variant.method].hyper_parameters(task).model_fields.get("teacher")
    return field is not None and field.is_required() and "teacher" not in variant.settings


def _teacher(student: Variant, variants: Sequence[Variant]) -> Variant:
    """The row that the student learns from, seed by seed."""
    for variant in variants:
        if variant.label == BASE:
            return variant
    raise RequestError(
        f"{student.label} learns from another run: add {BASE} to --methods, or give --teacher RUN"
    )


# ------------------------------------------------------------------ from runs to results


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


def _training(run: Run, root: Path, share: launch.Share) -> launch.Job:
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
        starting=lambda: _note_conditions(run, share),
    )


def _scoring(run: Run, root: Path) -> launch.Job:
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


def _log(run: Run) -> Path:
    return run.path.parent / "logs" / f"{run.path.name}.log"


def _training_status(run: Run) -> str:
    """How far a run is, and its last validation score."""
    metric = run.recipe.train.select
    if (results := run.results()) is not None:
        return f"valid {metric} {results['valid'][metric]:.4f} in {results['seconds']:.0f} s"
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


# Under which conditions each run was trained: two times are compared only if they are the same.
def _conditions_file(run: Run) -> Path:
    return run.path.parent / "conditions.json"


def _conditions(run: Run) -> list[dict[str, Any]]:
    file = _conditions_file(run)
    if not file.exists():
        return []
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")).get(
        run.path.name, []
    )
    return found


def _note_conditions(run: Run, share: launch.Share) -> None:
    file, now = _conditions_file(run), share.conditions()
    noted = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known = noted.setdefault(run.path.name, [])
    if now not in known:
        known.append(now)
    atomic.write_json(file, noted)


def compare(comparison: Comparison, jobs: int | None = None) -> tuple[Table, list[launch.Failure]]:
    """Carry a comparison out, and write ``table.md``, ``.tex``, ``.csv`` and ``.json``.

    Returns:
        The table, and the runs that failed, which it lacks.
    """
    failures = carry_out([comparison], comparison.out, jobs)
    table = tabulate(comparison)
    write_table(table, comparison.out / "table")
    return table, failures


# ------------------------------------------------------------------ from results to a table

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

    def run(self, seed: int) -> Run:
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


def _bootstrap(ours: Run, theirs: Run) -> float:
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
        conditions = _conditions(line.run(seed))
        if len(conditions) == 1 and conditions == _conditions(base.run(seed)):
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
        kinds = {json.dumps(c) for run in comparison.runs for c in _conditions(run)}
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
