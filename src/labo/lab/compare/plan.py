"""One recipe, several methods, several seeds: which runs a comparison consists of.

No run is evaluated on the test split while it is trained. Where a method has a grid, the point with
the best mean validation score over the seeds is selected, and only the runs of selected points are
evaluated on the test split, once. If fewer seeds select, the others are run at the selected points
only.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..analysis.reading import read_results, read_run
from ..analysis.task import find_analysis
from ..command_options import validated
from ..config import Recipe
from ..errors import RequestError
from ..methods import hyper_parameters, method_name
from ..recipes import load_recipe
from ..run.directory import RunDirectory
from .grid import GridAxis, MethodSpec, Place, read_grid, read_methods, shared
from .setup import Request

BASE = "base"  # what students learn from, and what times are relative to


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison."""

    variant: MethodSpec
    place: Place  # its place in the grid of its row
    seed: int
    path: Path
    recipe: Recipe  # what it trains
    arguments: tuple[str, ...]  # the recipe's name and the overrides that make ``recipe`` of it
    teacher: Path | None = None  # the run of this comparison that must be finished before

    @property
    def point(self) -> str:
        """Its place in words, such as ``tau=1.15``; empty without a grid."""
        return " ".join(f"{axis.key}={value}" for axis, value in self.place)

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
        score: float | None = (self.results() or {}).get("valid", {}).get(metric)
        return score

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
    """The runs that stand for a row."""

    point: str  # the selected place in the grid; empty without a grid
    runs: tuple[PlannedRun, ...]  # the finished runs of that place, by seed
    # Place -> the validation scores of its finished runs; empty if it has none
    scores: Mapping[str, Sequence[float]]

    @property
    def trials(self) -> int:
        """How many places were tried."""
        return sum(map(bool, self.scores.values()))


_EXTENSIONS = 5  # values that are added to an axis, for each method


@dataclass
class Comparison:
    """The runs of a table, seed by seed, so that methods take turns and their times compare."""

    recipe: str
    plain: Recipe  # the recipe with the overrides
    overrides: tuple[str, ...]
    request: Request  # what was asked for
    variants: Sequence[MethodSpec]  # its rows
    grid: Sequence[GridAxis]  # its axes
    out: Path
    teacher: PlannedRun | str | None = None  # of all students; else each has one of its seed
    # Those known so far; :meth:`grow` adds to them
    runs: list[PlannedRun] = field(default_factory=list)
    # Row -> its grid, with the values that were added
    axes: dict[str, list[GridAxis]] = field(default_factory=dict)
    # Row -> why its grid could not be extended
    limits: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for variant in self.variants:
            self.axes[variant.label] = [axis for axis in self.grid if axis.applies_to(variant)]
        for seed, variant in itertools.product(self.selecting, self.variants):
            for place in self._places(variant):
                self._add(variant, place, seed)

    @property
    def name(self) -> str:
        return Path(self.recipe).stem

    @property
    def seeds(self) -> int:
        """How many there are."""
        return self.request.seeds

    @property
    def _seeds(self) -> range:
        return range(self.request.first_seed, self.request.first_seed + self.seeds)

    @property
    def selecting(self) -> range:
        """The seeds that select a point of the grid."""
        return self._seeds[: self.request.select_seeds]

    def _places(self, variant: MethodSpec) -> list[Place]:
        axes = self.axes[variant.label]
        points = itertools.product(*(axis.values for axis in axes))
        return [tuple(zip(axes, values, strict=True)) for values in points]

    def _add(self, variant: MethodSpec, place: Place, seed: int) -> bool:
        """Add a run, and the teacher it needs; whether it is new."""
        path = self.out / _name_of(variant, place, seed)
        if any((run.path, run.variant) == (path, variant) for run in self.runs):
            return False
        self.runs.append(run := self._run(variant, place, seed))
        if run.teacher is not None and self.teacher is None:
            self._add(_teacher(variant, self.variants), shared(place), seed)
        return True

    def _run(self, variant: MethodSpec, place: Place, seed: int) -> PlannedRun:
        settings = [*self.overrides, *_settings(variant, place, self.plain), f"seed={seed}"]
        awaited = None
        if _needs_teacher(variant, self.plain.task):
            if self.teacher is None:
                awaited = self.out / _name_of(_teacher(variant, self.variants), shared(place), seed)
            elif isinstance(self.teacher, PlannedRun):
                awaited = self.teacher.path
            settings.append(f"method.teacher={awaited or self.teacher}")
        path = self.out / _name_of(variant, place, seed)
        recipe = load_recipe(self.recipe, settings)
        RunDirectory(path).check(recipe)
        return PlannedRun(variant, place, seed, path, recipe, (self.recipe, *settings), awaited)

    def grow(self) -> bool:
        """Add the runs that the results so far ask for; whether there are any.

        Where the selected value is at the edge of a grid that may be extended, those with the next
        value; elsewhere those of the selected point with the seeds that do not select.
        """
        wanted = []
        for variant in self.variants:
            choice = self._choice(variant)
            if not choice.runs:
                continue
            place, seeds = choice.runs[0].place, self._seeds[len(self.selecting) :]
            places = [place]
            if self.request.extend and self._extend(variant, place):
                places, seeds = self._places(variant), self.selecting
            wanted += [(seed, variant, place) for seed in seeds for place in places]
        wanted.sort(key=lambda run: run[0])
        return sum(self._add(variant, place, seed) for seed, variant, place in wanted) > 0

    def _extend(self, variant: MethodSpec, selected: Place) -> bool:
        """Add a value to each axis at whose edge the selected place is; whether there is one."""
        axes = self.axes[variant.label]
        before = list(axes)
        for index, (axis, (_, chosen)) in enumerate(zip(before, selected, strict=True)):
            asked = next(known for known in self.grid if known.key == axis.key)
            value = axis.beyond(chosen)
            if value is None or len(axis.values) - len(asked.values) >= _EXTENSIONS:
                continue
            beyond = (*selected[:index], (axis, value), *selected[index + 1 :])
            try:
                self._run(variant, beyond, self.request.first_seed)
                axes[index] = axis.extended(value)
            except RequestError as error:  # such as a share above 1
                self.limits[variant.label] = str(error)
        return axes != before

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
                of_point = scores.setdefault(run.point, [])
                if (score := run.score()) is not None:
                    runs.setdefault(run.point, []).append(run)
                    if run.seed in self.selecting:
                        of_point.append(score)
        if not any(scores.values()):
            return Choice("", (), {})
        sign = find_analysis(self.runs[0].recipe.task).headline.better

        def merit(point: str) -> tuple[int, float]:
            """A point at which a seed failed is chosen only if every point has a failed seed."""
            some = scores[point]
            return len(some), sign * statistics.fmean(some) if some else 0.0

        point = max(scores, key=merit)
        return Choice(point, tuple(runs[point]), scores)


# ------------------------------------------------------------------ from a request to runs


def plan(
    recipe: str,
    methods: Sequence[str],
    seeds: int,
    out: str | Path,
    *,
    overrides: Iterable[str] = (),
    teacher: PlannedRun | str | None = None,
    **further: Any,
) -> Comparison:
    """Check a request as a whole and list its runs; nothing is started.

    Args:
        recipe: a recipe file or name.
        methods: the rows: names of ``METHODS``, each perhaps with hyper-parameters and keys of the
            recipe (``labo:tau=1.05:optim.lr=0.2``).
        seeds: how many seeds.
        out: the folder of the run directories.
        overrides: ``key=value`` settings for all runs.
        teacher: a run that all methods with a teacher learn from, finished or planned; by default
            each learns from the base run of the same seed.
        **further: further fields of :class:`labo.lab.compare.setup.Request`, such as ``grid``.

    Raises:
        RequestError: something in the request is wrong, or does not fit what is in ``out``.
    """
    request = validated(Request, {"methods": methods, "seeds": seeds, **further})
    overrides = tuple(overrides)
    for text in overrides:
        key, _, value = text.partition("=")
        section, _, hyper = key.partition(".")
        if section == "method" and hyper and hyper != "name":
            raise RequestError(f"{text}: {_cure(methods, hyper, value, load_recipe(recipe).task)}")
        if section in ("method", "seed"):
            raise RequestError(f"{text}: methods and seeds are chosen by --methods and --seeds")
    plain = load_recipe(recipe, overrides)
    variants = read_methods(request.methods)
    axes = read_grid(request.grid, variants, plain.task)
    selecting = request.select_seeds
    if selecting is not None and not axes:
        raise RequestError("--select-seeds: there is nothing to select without --grid")
    if selecting is not None and not 1 <= selecting <= seeds:
        raise RequestError(f"--select-seeds {selecting}: must be from 1 to --seeds {seeds}")
    if request.extend and not axes:
        raise RequestError("--extend: there is nothing to extend without --grid")
    for axis in axes if request.extend else ():
        if len(axis.numbers) < 2:
            raise RequestError(f"--extend: {axis.key} needs two values or more, all numbers")
    if isinstance(teacher, str):
        RunDirectory(teacher).facts()  # whether it is one
    return Comparison(recipe, plain, overrides, request, variants, axes, Path(out), teacher)


def _cure(methods: Sequence[str], hyper: str, value: str, task: str) -> str:
    """How to set a hyper-parameter in a comparison."""
    listed = {text: method_name(text.partition(":")[0]) for text in methods}
    owners = [t for t, name in listed.items() if hyper in hyper_parameters(name, task).model_fields]
    if not owners:
        return f"no method of {', '.join(methods)} has {hyper}"
    chosen = ",".join(f"{t}:{hyper}={value}" if t == owners[-1] else t for t in methods)
    return f"hyper-parameters are set by method: --methods {chosen}"


def _settings(variant: MethodSpec, place: Place, plain: Recipe) -> list[str]:
    """The overrides that make a variant of the plain recipe.

    If the recipe itself chooses the method, the hyper-parameters it gives it hold.
    """
    own_choice = variant.method == plain.method["name"]
    chosen = [f"method{'.name' if own_choice else ''}={variant.method}"]
    own = [
        f"{'' if '.' in key else 'method.'}{key}={value}" for key, value in variant.settings.items()
    ]
    tried = [f"{'method.' if axis.method else ''}{axis.key}={value}" for axis, value in place]
    return chosen + own + tried


def _name_of(variant: MethodSpec, place: Place, seed: int) -> str:
    """The folder of a run."""
    parts = [f"{key}{value}" for key, value in variant.settings.items()]
    parts += [f"{axis.key}{value}" for axis, value in place]
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
