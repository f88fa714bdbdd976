"""``labo reproduce``: the paper's tables and figures again, at one of three scales.

- ``demo``: built-in data stand in for the paper's, in minutes on a laptop. The layout is the
  paper's; data and models are not.
- ``small``: the paper's kind of data as far as ``--data`` has them, small models, few epochs.
- ``paper``: the paper's data, models and schedules.

An *experiment* is a recipe on a data set; an *exhibit* is a table or figure, made of the runs of
some experiments. The runs of all exhibits of a scale lie in one folder, and are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..compare import launch
from ..compare import plan as compare
from ..compare.execute import carry_out
from ..compare.plan import Comparison, PlannedRun
from ..compare.table import Scored, scored_rows
from ..errors import RequestError
from ..tables import Table, write_table
from . import estimates, paper
from .exhibits import EXHIBITS, Exhibit, Found, make_table

SCALES = ("demo", "small", "paper")

_SMALL_IMAGES = ("train.epochs=5", "optim.schedule=cosine", "optim.milestones=[]")
_SMALL_TEXT = ("train.epochs=5", "model.preset=small", "optim.warmup_steps=500")
_DEMO_TEXT = ("data.size=8000", "optim.warmup_steps=150")  # there are many of them
_LABO_WARMUP = {"demo": 200, "small": 500}  # steps, where the paper has 5000 or more


@dataclass(frozen=True)
class Experiment:
    """A recipe on a data set of the paper, and what stands in for it in the demo.

    Attributes:
        recipe: of the paper's size.
        data: the folder below ``--data``.
        needs: what must be in that folder.
        size: examples to train on.
        settings: overrides of the recipe.
        stand_in: the recipe of the demo.
        stand_in_settings: its overrides.
        teacher: the network that distillation learns from.
    """

    recipe: str
    data: str
    needs: str
    size: int
    settings: tuple[str, ...] = ()
    stand_in: str = "digits"
    stand_in_settings: tuple[str, ...] = ()
    teacher: str | None = None

    @property
    def is_text(self) -> bool:
        return self.stand_in == "cldr"

    @property
    def stand_in_name(self) -> str:
        """The folder of its runs in the demo; experiments with one stand-in share them."""
        values = (text.partition("=")[2].strip("[]") for text in self.stand_in_settings)
        return "-".join([self.stand_in, *values]).replace(",", "-")

    def at(self, scale: str, folder: Path) -> tuple[str, tuple[str, ...]]:
        """The recipe at a scale, with its overrides; ``folder`` has the data."""
        if scale == "demo":
            return self.stand_in, self.stand_in_settings + (_DEMO_TEXT if self.is_text else ())
        settings = (*self.settings, f"data.{'path' if self.is_text else 'root'}={folder}")
        if scale == "small":
            settings += _SMALL_TEXT if self.is_text else _SMALL_IMAGES
        return self.recipe, settings

    def hours(self, run: PlannedRun) -> float:
        """Estimated GPU hours of a run at the paper's scale."""
        recipe, epochs = run.recipe, run.recipe.train.epochs or 1
        model = recipe.as_document()["model"]
        if self.is_text:
            corpus = self.data.partition(".")[0]
            return estimates.text_hours(model["preset"], corpus, self.size, epochs)
        teacher = self.teacher if run.teacher is not None else None
        return estimates.image_hours(model["name"], self.data, epochs, run.variant.method, teacher)


def _text(recipe: str, data: str, size: int, *pairs: str) -> Experiment:
    needs = f"made by `labo prepare`; the recipe {recipe} says how"
    languages = f"data.languages=[{','.join(pairs)}]"
    return Experiment(recipe, data, needs, size, (), "cldr", (languages,))


def _cifar(data: str, model: str) -> Experiment:
    # The stand-in of CIFAR-100 is the harder one: a fifth of the digits to learn from.
    few = ("data.holdout=0.8",) if data == "cifar100" else ()
    needs, size = "the binary or the python version", paper.SIZES[data][0]
    settings = (f"model.name={model}",)
    return Experiment(data, data, needs, size, settings, "digits", few, teacher="resnext29")


def _imagenet(model: str) -> Experiment:
    needs, size = "one folder of images per class, for each split", paper.SIZES["imagenet"][0]
    return Experiment("imagenet", "imagenet", needs, size, (f"model.name={model}",))


_DE, _FR, _WMT = (paper.SIZES[n][0] for n in ("iwslt14-de-en", "iwslt14-fr-en", "wmt14-en-de"))
_BOTH = paper.SIZES["iwslt17-de-en"][0] + paper.SIZES["iwslt17-fr-en"][0]

EXPERIMENTS: dict[str, Experiment] = {
    "iwslt14-de-en": _text("iwslt14", "iwslt14.de-en", _DE, "de-en"),
    "iwslt14-en-de": _text("iwslt14", "iwslt14.en-de", _DE, "en-de"),
    "iwslt14-en-fr": _text("iwslt14", "iwslt14.en-fr", _FR, "en-fr"),
    "iwslt14-fr-en": _text("iwslt14", "iwslt14.fr-en", _FR, "fr-en"),
    "wmt14-en-de": _text("wmt14", "wmt14.en-de", _WMT, "en-de"),
    "wmt14-de-en": _text("wmt14", "wmt14.de-en", _WMT, "de-en"),
    "iwslt17": _text("iwslt17_multi", "iwslt17", _BOTH, "de-en", "fr-en"),
    "cifar100-mobilenet-v2": _cifar("cifar100", "mobilenet-v2"),
    "cifar100-resnet18": _cifar("cifar100", "resnet18"),
    "cifar10-mobilenet-v2": _cifar("cifar10", "mobilenet-v2"),
    "cifar10-resnet18": _cifar("cifar10", "resnet18"),
    "imagenet-resnet50": _imagenet("resnet50"),
    "imagenet-resnet152": _imagenet("resnet152"),
}


# ------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """The runs of an exhibit at a scale.

    Attributes:
        exhibit: what is reproduced.
        scale: one of ``SCALES``.
        out: the folder of all runs.
        comparisons: experiment -> its runs; in the demo several may share one.
        teachers: data -> the run that distillation learns from, where it is not a base run.
        folders: data -> where they are expected.
        missing: what is not there, in words.
        overrides: what was set by hand.
    """

    exhibit: Exhibit
    scale: str
    out: Path
    comparisons: Mapping[str, Comparison]
    teachers: Mapping[str, Comparison]
    folders: Mapping[str, Path]
    missing: Sequence[str]
    overrides: Sequence[str]

    def all(self) -> list[Comparison]:
        """Every comparison once, teachers first."""
        different = {comparison.out: comparison for comparison in self.comparisons.values()}
        return [*self.teachers.values(), *different.values()]


def plan(
    name: str,
    scale: str,
    data: Sequence[str] = (),
    *,
    overrides: Iterable[str] = (),
    seeds: int | None = None,
    out: str | Path | None = None,
) -> Plan:
    """Check a request and list its runs; nothing is started.

    Args:
        name: one of ``EXHIBITS``.
        scale: one of ``SCALES``.
        data: folders that hold the data by their names, or ``NAME=FOLDER``.
        overrides: ``key=value`` settings for all runs.
        seeds: how many; by default as many as the paper has, fewer at the other scales.
        out: the folder of the runs; ``runs/reproduce-SCALE`` by default.
    """
    if name not in EXHIBITS:
        raise RequestError(f"no exhibit {name!r} (known: {', '.join(EXHIBITS)})")
    if scale not in SCALES:
        raise RequestError(f"--scale {scale}: there are {', '.join(SCALES)}")
    exhibit, out = EXHIBITS[name], Path(out or f"runs/reproduce-{scale}")
    if seeds is None:
        seeds = {"demo": exhibit.demo_seeds, "small": 1, "paper": exhibit.seeds}[scale]
    overrides, folders = tuple(overrides), _find_data(exhibit, data)
    comparisons: dict[str, Comparison] = {}
    teachers: dict[str, Comparison] = {}
    for key in exhibit.experiments:
        experiment = EXPERIMENTS[key]
        if scale == "small" and not folders[experiment.data].is_dir():
            continue
        recipe, settings = experiment.at(scale, folders[experiment.data])
        learned_from = None
        if scale == "paper" and experiment.teacher and "kd" in exhibit.methods:
            if experiment.data not in teachers:
                chosen = (*settings, f"model.name={experiment.teacher}", *overrides)
                place = out / f"{experiment.data}-teacher"
                teachers[experiment.data] = compare.plan(
                    recipe, ["base"], 1, place, overrides=chosen
                )
            learned_from = teachers[experiment.data].runs[0]
        comparisons[key] = compare.plan(
            recipe,
            _methods(exhibit, experiment, scale),
            seeds,
            out / (experiment.stand_in_name if scale == "demo" else key),
            overrides=(*settings, *overrides),
            grid=exhibit.grid,
            teacher=learned_from,
        )
    missing = () if scale == "demo" else _missing(exhibit, folders)
    return Plan(exhibit, scale, out, comparisons, teachers, folders, missing, overrides)


def _methods(exhibit: Exhibit, experiment: Experiment, scale: str) -> list[str]:
    """The rows; a short schedule would be over before the paper's warm-up of LABO is."""
    if not experiment.is_text or scale not in _LABO_WARMUP:
        return list(exhibit.methods)
    labo = f"labo:warmup_steps={_LABO_WARMUP[scale]}"
    return [labo if name == "labo" else name for name in exhibit.methods]


def _missing(exhibit: Exhibit, folders: Mapping[str, Path]) -> tuple[str, ...]:
    """The data that are not there, each once, with what they should be."""
    needs = {EXPERIMENTS[key].data: EXPERIMENTS[key].needs for key in exhibit.experiments}
    return tuple(
        f"{folders[data]} ({data}: {what})"
        for data, what in needs.items()
        if not folders[data].is_dir()
    )


def _find_data(exhibit: Exhibit, given: Sequence[str]) -> dict[str, Path]:
    """Data of the exhibit -> their folder, or where one is expected."""
    named = dict(text.split("=", 1) for text in given if "=" in text)
    roots = [Path(text) for text in given if "=" not in text]
    known = {experiment.data for experiment in EXPERIMENTS.values()}
    if unknown := sorted(named.keys() - known):
        raise RequestError(f"--data {unknown[0]}=...: known names are {', '.join(sorted(known))}")
    folders = {}
    for key in exhibit.experiments:
        name = EXPERIMENTS[key].data
        places = [Path(named[name])] if name in named else [root / name for root in roots]
        folders[name] = next(
            (p for p in places if p.is_dir()), (places or [Path("DATA") / name])[0]
        )
    return folders


# ------------------------------------------------------------------ what it would take


def describe(plan: Plan) -> str:
    """Every run of a plan, with its recipe, its data and, at the paper's scale, its GPU hours."""
    lines, total = [], 0.0
    owners = {comparison.out: EXPERIMENTS[key] for key, comparison in plan.comparisons.items()}
    owners |= {
        c.out: next(e for e in EXPERIMENTS.values() if e.data == d)
        for d, c in plan.teachers.items()
    }
    for comparison in plan.all():
        experiment = owners[comparison.out]
        for run in comparison.runs:
            state = "  finished" if run.directory.finished else ""
            if plan.scale == "paper":
                hours = experiment.hours(run)
                total += hours
                state = f"  {hours:.1f} GPU h{state}"
            data = "built in" if plan.scale == "demo" else str(plan.folders[experiment.data])
            name = run.path.relative_to(plan.out).as_posix()
            lines.append(f"{name}  [{' '.join(run.arguments)}]  data: {data}{state}")
    lines.append(_count(plan))
    if plan.scale == "paper":
        lines.append(
            f"about {total:,.0f} GPU hours: an estimate by arithmetic for a V100 in single "
            "precision (labo.lab.reproduce.estimates), not a measurement"
        )
    return "\n".join(lines)


def _count(plan: Plan) -> str:
    """How many runs there are, and why."""
    runs = sum(len(comparison.runs) for comparison in plan.all())
    some = next(iter(plan.comparisons.values()), None)
    if some is None:
        return "0 runs"
    columns = len({comparison.out for comparison in plan.comparisons.values()})
    methods, seeds = len(plan.exhibit.methods), some.seeds
    table = methods * columns * seeds
    factors = (_many(methods, "method"), _many(columns, "column"), _many(seeds, "seed"))
    text = f"{' x '.join(factors)} = {_many(table, 'run')}"
    if plan.teachers:
        text += f", and {_many(len(plan.teachers), 'teacher')}"
    if grid := runs - table - len(plan.teachers):
        text += f", and {grid} more to select {', '.join(plan.exhibit.grid)}"
    return f"{text}: {runs} in all"


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def require(plan: Plan) -> None:
    """Refuse a plan that cannot be carried out."""
    if plan.missing and (plan.scale == "paper" or not plan.comparisons):
        raise RequestError("\n".join(f"missing: {what}" for what in plan.missing))


# ------------------------------------------------------------------ carrying it out


def reproduce(name: str, plan: Plan, jobs: int | None = None) -> tuple[Table, list[launch.Failure]]:
    """PlannedRun what is missing, and write the table, and the figure if it is one.

    Args:
        name: of the files.
        plan: what to do.
        jobs: how many runs at once.

    Returns:
        The table, and the runs that failed, which it lacks.
    """
    failures = carry_out(plan.all(), plan.out, jobs)
    found = Found({key: _by_method(runs) for key, runs in plan.comparisons.items()})
    by_hand = [f"set by hand, for all runs: {' '.join(plan.overrides)}"] if plan.overrides else []
    table = make_table(plan.exhibit, found, [*_scale_notes(plan), *by_hand])
    write_table(table, plan.out / name)
    if plan.exhibit.draw is not None:
        plan.exhibit.draw(found, plan.out / name)
    return table, failures


def _by_method(comparison: Comparison) -> dict[str, Scored]:
    rows = scored_rows(comparison)
    return {variant.method: rows[variant.label] for variant in comparison.variants}


def _scale_notes(plan: Plan) -> list[str]:
    if plan.scale == "paper":
        return []
    if plan.scale == "small":
        is_text = any(EXPERIMENTS[key].is_text for key in plan.comparisons)
        settings = " ".join(_SMALL_TEXT if is_text else _SMALL_IMAGES)
        return [f"ours: {settings}", *(f"no data: {what}" for what in plan.missing)]
    stand_ins: dict[str, list[str]] = {}
    for key in plan.comparisons:
        stand_ins.setdefault(EXPERIMENTS[key].stand_in_name, []).append(key)
    return [
        f"ours: {name} stands in for {', '.join(keys)}; compare rows, not with the paper's numbers"
        for name, keys in stand_ins.items()
    ]
