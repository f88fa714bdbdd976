"""``labo reproduce``: the paper's tables and figures at one of three scales.

- ``demo``: built-in data instead of the paper's, minutes on a laptop. The layout is that of the
  paper; data and models are not.
- ``small``: the paper's kind of data as far as ``--data`` has them, small models, few epochs.
- ``paper``: the paper's data, models and schedules.

An *experiment* is a recipe on a data set. An *exhibit* is a table or figure, made of the runs of
experiments. All exhibits of a scale share the runs in one folder. An exhibit of one experiment can
also be made of finished runs of any data (:func:`of_runs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..analysis.collection import check_folder, claim_folder, runs_in
from ..analysis.groups import Group, Member, group_runs
from ..analysis.printing import difference_table
from ..analysis.reading import sound_run
from ..compare import plan as compare
from ..compare.execute import carry_out
from ..compare.launch import Failure
from ..compare.plan import Comparison, PlannedRun
from ..compare.setup import Setup
from ..compare.table import NO_RUNS, SPLIT, compared_rows
from ..errors import RequestError
from ..tables import Table, write_table
from .exhibits import EXHIBITS, Exhibit, Trained, make_table

SCALES = ("demo", "small", "paper")

# GPU hours are floating point operations, with two forward passes for a backward pass, divided by
# what a V100 is assumed to do per second in single precision: 8e12 in convolutions, 1e12 where they
# are depthwise, 6e12 in a Transformer. Nothing was measured: expect an error of a factor of two.
_EXTRA_PASSES = {"cs-kd": 1 / 3, "beta-ls": 1 / 3}  # share of the work of a step
_TEACHER, _TEACHER_HOURS = "resnext29", 0.0505  # of CIFAR, and an epoch of its training


@dataclass(frozen=True)
class Experiment:
    """A recipe on a data set of the paper, and what replaces it in the demo."""

    recipe: str  # at the scale of the paper
    data: str  # the folder below ``--data``
    needs: str  # what must be in that folder
    folder_key: str  # the recipe key that names the folder
    hours: float  # estimated GPU hours of an epoch at the scale of the paper
    settings: tuple[str, ...] = ()  # overrides of the recipe
    small_settings: tuple[str, ...] = ()  # further overrides at the scale ``small``
    stand_in: str = "digits"  # the recipe of the demo
    # Its overrides. They name the folder of the runs: experiments with one stand-in share them
    stand_in_settings: tuple[str, ...] = ()
    demo_settings: tuple[str, ...] = ()  # further overrides in the demo
    # Scale -> warm-up steps of LABO, where the paper's are more than the schedule
    labo_warmup: Mapping[str, int] = field(default_factory=dict)
    has_teacher: bool = False  # whether distillation learns from ``_TEACHER``

    @property
    def stand_in_name(self) -> str:
        """The folder of its runs in the demo."""
        values = (text.partition("=")[2].strip("[]") for text in self.stand_in_settings)
        return "-".join([self.stand_in, *values]).replace(",", "-")

    def at(self, scale: str, folder: Path) -> tuple[str, tuple[str, ...]]:
        """The recipe at a scale, with its overrides; ``folder`` has the data."""
        if scale == "demo":
            return self.stand_in, self.stand_in_settings + self.demo_settings
        further = self.small_settings if scale == "small" else ()
        return self.recipe, (*self.settings, f"{self.folder_key}={folder}", *further)

    def methods(self, names: Iterable[str], scale: str) -> list[str]:
        """The rows of an exhibit, as ``labo compare --methods`` takes them."""
        steps = self.labo_warmup.get(scale)
        labo = "labo" if steps is None else f"labo:warmup_steps={steps}"
        return [labo if name == "labo" else name for name in names]


def _text(recipe: str, data: str, hours: float, *pairs: str) -> Experiment:
    return Experiment(
        recipe,
        data,
        needs=f"made by `labo prepare`; the recipe {recipe} says how",
        folder_key="data.path",
        hours=hours,
        small_settings=("train.epochs=5", "model.preset=small", "optim.warmup_steps=500"),
        stand_in="cldr",
        stand_in_settings=(f"data.languages=[{','.join(pairs)}]",),
        demo_settings=("data.size=8000", "optim.warmup_steps=150"),  # there are many runs
        labo_warmup={"demo": 200, "small": 500},  # the paper: 5000 or more
    )


def _images(data: str, model: str, hours: float) -> Experiment:
    imagenet = data == "imagenet"
    classes = "one folder of images per class, for each split"
    return Experiment(
        data,
        data,
        needs=classes if imagenet else "the binary or the python version",
        folder_key="data.root",
        hours=hours,
        settings=(f"model.name={model}",),
        small_settings=("train.epochs=5", "optim.schedule=cosine", "optim.milestones=[]"),
        # The stand-in of CIFAR-100 is the harder one: it has a fifth of the digits to train on.
        stand_in_settings=("data.holdout=0.8",) if data == "cifar100" else (),
        has_teacher=not imagenet,
    )


EXPERIMENTS: dict[str, Experiment] = {
    "iwslt14-de-en": _text("iwslt14", "iwslt14.de-en", 0.0407, "de-en"),
    "iwslt14-en-de": _text("iwslt14", "iwslt14.en-de", 0.0407, "en-de"),
    "iwslt14-en-fr": _text("iwslt14", "iwslt14.en-fr", 0.0427, "en-fr"),
    "iwslt14-fr-en": _text("iwslt14", "iwslt14.fr-en", 0.0427, "fr-en"),
    "wmt14-en-de": _text("wmt14", "wmt14.en-de", 2.1, "en-de"),
    "wmt14-de-en": _text("wmt14", "wmt14.de-en", 2.1, "de-en"),
    "iwslt17": _text("iwslt17_multi", "iwslt17", 0.123, "de-en", "fr-en"),
    "cifar100-mobilenet-v2": _images("cifar100", "mobilenet-v2", 0.0049),
    "cifar100-resnet18": _images("cifar100", "resnet18", 0.0052),
    "cifar10-mobilenet-v2": _images("cifar10", "mobilenet-v2", 0.0049),
    "cifar10-resnet18": _images("cifar10", "resnet18", 0.0052),
    "imagenet-resnet50": _images("imagenet", "resnet50", 1.09),
    "imagenet-resnet152": _images("imagenet", "resnet152", 3.07),
}


# ------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """The runs of an exhibit at a scale."""

    name: str  # of ``EXHIBITS``: what is reproduced
    scale: str  # one of ``SCALES``
    out: Path  # the folder of all runs
    # Experiment -> its runs; in the demo several may share one
    comparisons: Mapping[str, Comparison]
    # Data -> the run that distillation learns from, if it is not a base run
    teachers: Mapping[str, Comparison]
    folders: Mapping[str, Path]  # data -> the folder they are expected in
    missing: Sequence[str]  # the data that were not found, in words
    overrides: Sequence[str]  # the settings given on the command line

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

    ``data`` are folders that hold the data by their names, or ``NAME=FOLDER``. There are as many
    seeds as in the paper by default, fewer at the other scales.
    """
    exhibit, out = _exhibit(name), Path(out or f"runs/reproduce-{scale}")
    if scale not in SCALES:
        raise RequestError(f"--scale {scale}: there are {', '.join(SCALES)}")
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
        if scale == "paper" and experiment.has_teacher and "kd" in exhibit.methods:
            if experiment.data not in teachers:
                chosen = (*settings, f"model.name={_TEACHER}", *overrides)
                folder = out / f"{experiment.data}-teacher"
                teachers[experiment.data] = compare.plan(
                    recipe, ["base"], 1, folder, overrides=chosen
                )
            learned_from = teachers[experiment.data].runs[0]
        comparisons[key] = compare.plan(
            recipe,
            experiment.methods(exhibit.methods, scale),
            seeds,
            out / (experiment.stand_in_name if scale == "demo" else key),
            overrides=(*settings, *overrides),
            grid=exhibit.grid,
            teacher=learned_from,
        )
    missing = () if scale == "demo" else _missing(exhibit, folders)
    return Plan(name, scale, out, comparisons, teachers, folders, missing, overrides)


def _exhibit(name: str) -> Exhibit:
    if name not in EXHIBITS:
        raise RequestError(f"no exhibit {name!r} (known: {', '.join(EXHIBITS)})")
    return EXHIBITS[name]


def _missing(exhibit: Exhibit, folders: Mapping[str, Path]) -> tuple[str, ...]:
    """The data that were not found, each once, with what they should be."""
    needs = {EXPERIMENTS[key].data: EXPERIMENTS[key].needs for key in exhibit.experiments}
    return tuple(
        f"{folders[data]} ({data}: {what})"
        for data, what in needs.items()
        if not folders[data].is_dir()
    )


def _find_data(exhibit: Exhibit, given: Sequence[str]) -> dict[str, Path]:
    """Data of the exhibit -> their folder, or the folder they are expected in."""
    named = dict(text.split("=", 1) for text in given if "=" in text)
    roots = [Path(text) for text in given if "=" not in text]
    known = {experiment.data for experiment in EXPERIMENTS.values()}
    if unknown := sorted(named.keys() - known):
        raise RequestError(f"--data {unknown[0]}=...: known names are {', '.join(sorted(known))}")
    folders = {}
    for key in exhibit.experiments:
        name = EXPERIMENTS[key].data
        candidates = [Path(named[name])] if name in named else [root / name for root in roots]
        folders[name] = next(
            (p for p in candidates if p.is_dir()), (candidates or [Path("DATA") / name])[0]
        )
    return folders


# ------------------------------------------------------------------ the dry run


def describe(plan: Plan) -> str:
    """A plan in short: a line for each folder of runs, their number, and the data it lacks."""
    head = ["folder", "recipe", "methods", "seeds", "runs", "finished", "GPU h", "data"]
    sources = {c.out: (data, _TEACHER_HOURS) for data, c in plan.teachers.items()}
    for key, c in plan.comparisons.items():
        sources[c.out] = EXPERIMENTS[key].data, EXPERIMENTS[key].hours
    lines, total = [], 0.0
    for comparison in plan.all():
        data, of_epoch = sources[comparison.out]
        folder = plan.folders[data]
        hours = sum(_hours(run, of_epoch) for run in comparison.runs)
        total += hours
        where = str(folder) if folder.is_dir() else f"{folder} (missing)"
        lines.append(
            [
                comparison.out.relative_to(plan.out).as_posix(),
                comparison.runs[0].arguments[0],
                ",".join(dict.fromkeys(variant.method for variant in comparison.variants)),
                str(comparison.seeds),
                str(len(comparison.runs)),
                str(sum(run.directory.finished for run in comparison.runs)),
                f"{hours:,.0f}" if plan.scale == "paper" else "-",
                "built in" if plan.scale == "demo" else where,
            ]
        )
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    ]
    text.append(f"{sum(len(comparison.runs) for comparison in plan.all())} runs in all")
    if plan.scale == "paper":
        text.append(
            f"about {total:,.0f} GPU hours: an estimate for a V100 in single precision, not a "
            "measurement"
        )
    return "\n".join([*text, *(f"missing: {what}" for what in plan.missing)])


def _hours(run: PlannedRun, of_epoch: float) -> float:
    """Estimated GPU hours of a run; a student has the forward pass of its teacher, too."""
    of_epoch *= 1 + _EXTRA_PASSES.get(run.variant.method, 0)
    of_epoch += 0 if run.teacher is None else _TEACHER_HOURS / 3
    return of_epoch * (run.recipe.train.epochs or 1)


def require(plan: Plan) -> None:
    """Refuse a plan that cannot be carried out."""
    if plan.missing and (plan.scale == "paper" or not plan.comparisons):
        raise RequestError("\n".join(f"missing: {what}" for what in plan.missing))


# ------------------------------------------------------------------ carrying it out


def reproduce(plan: Plan, setup: Setup | None = None) -> tuple[list[Table], list[Failure]]:
    """Train the missing runs, and write the tables, and the figure if the exhibit is one.

    Returned are the exhibit (``NAME.md`` and so on) and the differences between methods, if there
    are any (``NAME-differences.md``), and the runs that failed, which are not in them.
    """
    failures = carry_out(plan.all(), plan.out, setup)
    compared = {c.out: compared_rows(c) for c in plan.comparisons.values()}
    trained = Trained(
        {
            key: {variant.method: compared[c.out][0][variant.label] for variant in c.variants}
            for key, c in plan.comparisons.items()
        }
    )
    by_hand = [f"set by hand, for all runs: {' '.join(plan.overrides)}"] if plan.overrides else []
    groups = {folder.name: groups for folder, (_, groups) in compared.items()}
    notes = [*_scale_notes(plan), *by_hand]
    return _written(plan.name, trained, groups, notes, plan.out), failures


def of_runs(name: str, paths: Iterable[str | Path], out: str | Path | None = None) -> list[Table]:
    """Make an exhibit of finished runs, and write it as :func:`reproduce` does; nothing is trained.

    It is one of a single experiment, whose runs these, scored on the test split, take the place of.
    """
    exhibit, out = _exhibit(name), Path(out or "runs/reproduce")
    if len(exhibit.experiments) > 1:
        single = [known for known, other in EXHIBITS.items() if len(other.experiments) == 1]
        raise RequestError(f"--runs: {name} has several columns of runs; try {', '.join(single)}")
    left_out: dict[Path, str] = {}
    members = [Member(sound_run(path)) for path in runs_in(paths, left_out)]
    group, *others = group_runs(members, SPLIT)
    if others:
        raise RequestError("--runs: the runs differ in data or model; give those of one study")
    rows = {}
    for method in exhibit.methods:
        variants = [variant for variant in group.variants if variant.name == method]
        if len(variants) != 1 or not variants[0].scores(SPLIT):
            settings = ", ".join(variant.label for variant in variants) or "none"
            raise RequestError(
                f"--runs: {name} needs scored runs of {method} with one setting; found: {settings}"
            )
        rows[method] = replace(NO_RUNS, variant=variants[0], group=group)
    (experiment,) = exhibit.experiments
    notes = [
        f"ours: {member.name} ({member.signature.get('data', 'unknown data')})"
        for row in rows.values()
        for member in row.scored.values()
    ]
    notes += [f"the paper's: {experiment}"]
    notes += [f"{path} is left out: {reason}" for path, reason in left_out.items()]
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    claim_folder(out)
    return _written(name, Trained({experiment: rows}), {"runs": [group]}, notes, out)


def _written(
    name: str, trained: Trained, groups: Mapping[str, Sequence[Group]], notes: list[str], out: Path
) -> list[Table]:
    """The tables and the figure of an exhibit, also as files."""
    exhibit = EXHIBITS[name]
    notes += [note for several in groups.values() for group in several for note in group.notes]
    tables = {name: make_table(exhibit, trained, notes)}
    if (differences := _differences(groups)) is not None:
        tables[f"{name}-differences"] = differences
    for stem, content in tables.items():
        write_table(content, out / stem)
    if exhibit.draw is not None:
        exhibit.draw(trained, out / name)
    return list(tables.values())


def _differences(groups: Mapping[str, Sequence[Group]]) -> Table | None:
    """The differences within each folder of runs."""
    named = {
        name if len(several) == 1 else f"{name} {number}": group
        for name, several in groups.items()
        for number, group in enumerate(several, 1)
    }
    return difference_table("differences between methods, test split", named)


def _scale_notes(plan: Plan) -> list[str]:
    if plan.scale == "paper":
        return []
    if plan.scale == "small":
        settings = dict.fromkeys(
            " ".join(EXPERIMENTS[key].small_settings) for key in plan.comparisons
        )
        return [f"ours: {text}" for text in settings] + [
            f"no data: {what}" for what in plan.missing
        ]
    stand_ins: dict[str, list[str]] = {}
    for key in plan.comparisons:
        stand_ins.setdefault(EXPERIMENTS[key].stand_in_name, []).append(key)
    return [
        f"ours: {name} stands in for {', '.join(keys)}; rows can be compared with each other, not "
        "with the paper's numbers"
        for name, keys in stand_ins.items()
    ]
