"""One recipe, several methods, several seeds: which runs a comparison consists of.

No run is evaluated on the test split while it is trained. Where a method has a grid, the point with
the best mean validation score over the seeds is selected, and only the runs of selected points are
evaluated on the test split, once.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..analysis.reading import read_results, read_run
from ..analysis.task import find_analysis
from ..config import Recipe
from ..errors import RequestError
from ..methods import METHODS, hyper_parameters, method_name
from ..recipes import load_recipe
from ..run import files
from ..run.directory import RunDirectory
from ..run.lock import LOCK

BASE = "base"  # what students learn from, and what times are relative to


@dataclass(frozen=True)
class MethodSpec:
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
class GridAxis:
    """A grid's hyper-parameter: an override and its values; for one method, or for all."""

    key: str
    values: tuple[str, ...]
    method: str | None

    def applies_to(self, variant: MethodSpec) -> bool:
        if self.method is None:
            return True
        return variant.method == self.method and self.key not in variant.settings


@dataclass(frozen=True)
class PlannedRun:
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

    variant: MethodSpec
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
        """The content of ``results.json``; None if the run is not finished or the file is wrong."""
        try:
            return read_results(self.path)
        except RequestError:
            return None

    def score(self) -> float | None:
        """The validation score that selects among runs; None without one."""
        metric = find_analysis(self.recipe.task).headline.key
        found: float | None = (self.results() or {}).get("valid", {}).get(metric)
        return found

    def problem(self) -> str | None:
        """Why a run that has ended cannot be used."""
        run = read_run(self.path) if self.directory.finished else None
        if run is None:
            return None
        metric = find_analysis(self.recipe.task).headline.key
        if run.state.kind != "broken" and self.score() is None:
            return f"{self.directory.results_file}: valid.{metric} is missing"
        return run.state.reason


@dataclass(frozen=True)
class Choice:
    """The runs that stand for a row.

    Attributes:
        point: the selected place in the grid; empty without a grid.
        runs: the finished runs of that place, by seed.
        scores: place -> the validation scores of its finished runs; empty if it has none.
    """

    point: str
    runs: tuple[PlannedRun, ...]
    scores: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """The runs of a table, seed by seed, so that methods take turns and their times compare."""

    name: str
    out: Path
    runs: tuple[PlannedRun, ...]

    @cached_property
    def variants(self) -> list[MethodSpec]:
        return list({run.variant.label: run.variant for run in self.runs}.values())

    @property
    def seeds(self) -> int:
        return len({run.seed for run in self.runs})

    def choices(self) -> dict[str, Choice]:
        """For each row, the runs it rests on: selected by the validation split alone."""
        return {variant.label: self._choice(variant) for variant in self.variants}

    def selected(self) -> list[PlannedRun]:
        """The runs that all rows rest on."""
        return [run for choice in self.choices().values() for run in choice.runs]

    def _choice(self, variant: MethodSpec) -> Choice:
        runs: dict[str, list[PlannedRun]] = {}
        scores: dict[str, list[float]] = {}
        for run in self.runs:
            if run.variant == variant:
                found = scores.setdefault(run.point, [])
                if (score := run.score()) is not None:
                    found.append(score)
                    runs.setdefault(run.point, []).append(run)
        if not any(scores.values()):
            return Choice("", (), {})
        sign = 1 if find_analysis(self.runs[0].recipe.task).higher_is_better else -1

        def merit(point: str) -> tuple[int, float]:
            """A point at which a seed failed is chosen only if every point has a failed seed."""
            found = scores[point]
            return len(found), sign * statistics.fmean(found) if found else 0.0

        point = max(scores, key=merit)
        return Choice(point, tuple(runs[point]), scores)


# ------------------------------------------------------------------ the folder of the runs

_MARK = ".labo"


def runs_in(paths: Iterable[str | Path], left_out: dict[Path, str]) -> list[Path]:
    """Run directories, with a folder that has runs in it replaced by those that are scored.

    Of a grid these are the runs of the selected points.

    Args:
        paths: run directories, and folders with runs.
        left_out: gets the other runs in such folders, and why they are left out.

    Raises:
        RequestError: such a folder has no scored run.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.rglob("recipe.yaml"))
        if path in inside or not (inside or (path / _MARK).is_file()):
            found.append(path)
            continue
        scored = [run for run in inside if (run / "records" / "test.jsonl").is_file()]
        if not scored:
            raise RequestError(f"{path}: no run in it is scored yet (it has {len(inside)} runs)")
        found += scored
        for run in inside:
            if run not in scored:
                state = read_run(run).state
                finished = "not scored on the test split: labo evaluate RUN does it"
                left_out[run] = finished if state.kind == "finished" else str(state)
    return found


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than runs of labo.

    It may be missing or empty, be one of :func:`claim_folder`, or hold run directories only.
    """
    if not folder.exists() or (folder / _MARK).is_file():
        return
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder: choose another --out")
    foreign = [
        path.name
        for path in sorted(folder.iterdir())
        if path.name != LOCK and not (path / "recipe.yaml").is_file()
    ]
    if foreign:
        raise RequestError(
            f"{folder} holds something else ({foreign[0]}): choose an --out that is new, empty or "
            "made by labo"
        )


def claim_folder(folder: Path) -> None:
    """Mark a folder as one that labo may write to."""
    if not (folder / _MARK).exists():
        text = "Runs of labo compare, reproduce or demo. labo may replace files in this folder.\n"
        files.write_text(folder / _MARK, text)


# ------------------------------------------------------------------ from a request to runs


def plan(
    recipe: str,
    methods: Sequence[str],
    seeds: int,
    out: str | Path,
    *,
    overrides: Iterable[str] = (),
    grid: Iterable[str] = (),
    teacher: PlannedRun | str | None = None,
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
        key, _, value = text.partition("=")
        section, _, hyper = key.partition(".")
        if section == "method" and hyper and hyper != "name":
            raise RequestError(f"{text}: {_cure(methods, hyper, value, load_recipe(recipe).task)}")
        if section in ("method", "seed"):
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
                elif isinstance(teacher, PlannedRun):
                    awaited = teacher.path
                settings.append(f"method.teacher={awaited or teacher}")
            runs.append(
                PlannedRun(
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


def _cure(methods: Sequence[str], hyper: str, value: str, task: str) -> str:
    """How to set a hyper-parameter in a comparison."""
    listed = {text: method_name(text.partition(":")[0]) for text in methods}
    owners = [t for t, name in listed.items() if hyper in hyper_parameters(name, task).model_fields]
    if not owners:
        return f"no method of {', '.join(methods)} has {hyper}"
    chosen = ",".join(f"{t}:{hyper}={value}" if t == owners[-1] else t for t in methods)
    return f"hyper-parameters are set by method: --methods {chosen}"


def read_methods(names: Sequence[str]) -> list[MethodSpec]:
    """The rows of a table; each ``NAME[:HYPER=VALUE]...``."""
    variants = []
    for text in names:
        name, *settings = text.split(":")
        pairs = [setting.partition("=") for setting in settings]
        if not all(key and equals and value for key, equals, value in pairs):
            raise RequestError(f"--methods {text}: write NAME:HYPER=VALUE, as in labo:tau=1.15")
        method = method_name(name)
        label = ":".join([method, *settings])
        variants.append(MethodSpec(label, method, {key: value for key, _, value in pairs}))
    labels = [variant.label for variant in variants]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise RequestError(f"--methods: {', '.join(sorted(twice))} is given twice")
    return variants


def read_grid(texts: Iterable[str], variants: Sequence[MethodSpec], task: str) -> list[GridAxis]:
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
            axes.append(GridAxis(key, values, None))
            continue
        owners = [name for name in listed if hyper in hyper_parameters(name, task).model_fields]
        if dot:
            owners = [name for name in owners if name == owner]
        if len(owners) > 1:
            raise RequestError(
                f"--grid {text}: {' and '.join(owners)} have {hyper}; write {owners[-1]}.{text}"
            )
        if not owners:
            raise RequestError(f"--grid {text}: no method of {', '.join(listed)} has {key}")
        axes.append(GridAxis(hyper, values, owners[0]))
    return axes


Place = tuple[tuple[GridAxis, str], ...]  # a point of a grid


def _settings(variant: MethodSpec, place: Place, plain: Recipe) -> list[str]:
    """The overrides that make a variant of the plain recipe.

    If the recipe itself chooses the method, the hyper-parameters it gives it hold.
    """
    own_choice = variant.method == plain.method["name"]
    chosen = [f"method{'.name' if own_choice else ''}={variant.method}"]
    own = [f"method.{key}={value}" for key, value in variant.settings.items()]
    tried = [f"{'method.' if axis.method else ''}{axis.key}={value}" for axis, value in place]
    return chosen + own + tried


def _name_of(variant: MethodSpec, place: Place, seed: int, *, shared: bool = False) -> str:
    """The folder of a run; with ``shared`` only the axes that all methods have are named."""
    parts = [f"{key}{value}" for key, value in variant.settings.items()]
    parts += [f"{axis.key}{value}" for axis, value in place if not (shared and axis.method)]
    return re.sub(r"[^\w.+-]", "_", "-".join([variant.method, *parts, f"s{seed}"]))


def _needs_teacher(variant: MethodSpec, task: str) -> bool:
    field = hyper_parameters(variant.method, task).model_fields.get("teacher")
    return field is not None and field.is_required() and "teacher" not in variant.settings


def _teacher(student: MethodSpec, variants: Sequence[MethodSpec]) -> MethodSpec:
    """The row that the student learns from, seed by seed."""
    for variant in variants:
        if variant.label == BASE:
            return variant
    raise RequestError(
        f"{student.label} learns from another run: add {BASE} to --methods, or give --teacher RUN"
    )
