"""The comparison of runs: which belong together, and how much they differ.

``labo compare``, ``analyze``, ``report`` and ``reproduce`` all use this module, so they agree.
``docs/compare.md`` describes the rules for users, with references:

- A *group* is the runs of one task on the same data with the same model.
- A *variant* is the runs of a group that differ in their seed alone. Of a student, the method of
  its teacher counts, not which run the teacher was.
- A variant has one run per seed. Another run of the same recipe and seed is left out.
- Every variant is compared with the *references* ``base`` and ``ls``, as far as they are there, by
  the paired differences over the seeds that both have.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..config import differing_keys
from ..errors import RequestError
from ..tables import Cell, Column
from .reading import Floats, Run, find_teacher, noted, read_conditions
from .significance import mean_std, paired_bootstrap, paired_difference
from .task import Records, TaskAnalysis, find_analysis

REFERENCES = ("base", "ls")
NEVER_ACTIVE = "(never active)"  # beside the name of a method whose warm-up was longer than the run
_Pace = tuple[float, tuple[list[Any], list[str]]]  # seconds per step; its conditions and devices


# ------------------------------------------------------------------ members


@dataclass(frozen=True, eq=False)
class Member:
    """A run, and the document of :func:`labo.lab.analysis.run.analyze_run`; empty without one."""

    run: Run
    analysis: Mapping[str, Any] = field(default_factory=dict)
    _records: dict[str, Records] = field(default_factory=dict, repr=False)
    _drawn: dict[str, Floats | None] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def results(self) -> Mapping[str, Any]:
        """The content of ``results.json``; empty if the run is not finished."""
        return self.run.results or {}

    @property
    def first_step(self) -> int:
        """The step at which the method itself begins; 0 if it has no warm-up."""
        method = self.run.method
        return int(method.get("warmup_steps") or 0) * int(method.get("outer_steps") or 1)

    @property
    def never_active(self) -> bool:
        """Whether the warm-up of the method was longer than the finished run."""
        steps = self.results.get("steps")
        return steps is not None and self.first_step > steps

    @property
    def marked_name(self) -> str:
        """The name of the run, with a mark if its method was never active."""
        return f"{self.name} {NEVER_ACTIVE}" if self.never_active else self.name

    @cached_property
    def kind(self) -> TaskAnalysis:
        """The analysis of the task."""
        return find_analysis(self.run.task)

    @cached_property
    def signature(self) -> dict[str, str]:
        """The parts of the signature in ``results.json``."""
        parts = str(self.results.get("signature", "")).split("|")
        return dict(part.split(":", 1) for part in parts if ":" in part)

    def split(self, name: str) -> Mapping[str, Any]:
        """The analysis of a split; empty if it has no records or was not analysed."""
        return self.analysis.get("splits", {}).get(name, {})

    def view(self, split: str, name: str) -> Mapping[str, Any]:
        """A VIEW of the analysis of a split; empty if it has no such view."""
        return self.split(split).get("views", {}).get(name, {})

    def metric(self, split: str, name: str) -> float | None:
        """A metric of ``results.json``."""
        return self.results.get(split, {}).get(name)

    def score(self, split: str) -> float | None:
        """The headline metric: that of ``results.json``, or else that of the records."""
        score = self.metric(split, self.kind.headline.key)
        if score is None and (analysed := self.split(split)):
            score = self.kind.measure(analysed)[self.kind.headline.key]
        return score

    def records(self, split: str) -> Any:
        """The records of a split, read once."""
        if split not in self._records:
            self._records[split] = self.kind.read_records(self.run, split)
        return self._records[split]

    def bootstrap_scores(self, split: str) -> Floats | None:
        """The headline on the draws of the bootstrap over examples, if the task has one."""
        if split not in self._drawn:
            self._drawn[split] = (
                self.kind.bootstrap_scores(self.run, self.records(split))
                if self.kind.bootstraps
                else None
            )
        return self._drawn[split]


def _text(section: Any) -> str:
    return json.dumps(section, sort_keys=True, default=str)


def _without(recipe: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A copy of a recipe without some dotted keys."""
    document = copy.deepcopy(dict(recipe))
    for key in keys:
        *sections, name = key.split(".")
        section = _at(document, ".".join(sections)) if sections else document
        if isinstance(section, dict):
            section.pop(name, None)
    return document


def _at(document: Any, key: str) -> Any:
    for name in key.split("."):
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


# ------------------------------------------------------------------ variants


@dataclass(frozen=True, eq=False)
class Variant:
    """The runs of a group that differ in their seed alone."""

    # the name of the method, with the keys in which variants of that name differ; marked if the
    # method itself was never used
    label: str
    # what the runs share: the recipe without the seed and the location of the data;
    # ``method.teacher`` is the method of the teacher
    recipe: Mapping[str, Any]
    members: Mapping[int, Member]  # by seed, in ascending order

    @property
    def name(self) -> str:
        """The name of the method."""
        return str(self.recipe["method"]["name"])

    @property
    def first_step(self) -> int:
        """The step at which the method itself begins; 0 if it has no warm-up."""
        return self.runs[0].first_step

    @property
    def never_active(self) -> bool:
        """Whether the warm-up of the method was longer than each of its runs."""
        return all(member.never_active for member in self.runs)

    @property
    def runs(self) -> list[Member]:
        """By seed."""
        return list(self.members.values())

    def numbers(self, value: Callable[[Member], float | None]) -> dict[int, float]:
        """Seed -> a number of its run, where there is one."""
        numbers = {seed: value(member) for seed, member in self.members.items()}
        return {seed: number for seed, number in numbers.items() if number is not None}

    def scores(self, split: str) -> dict[int, float]:
        """Seed -> the headline metric."""
        return self.numbers(lambda member: member.score(split))

    def cell(self, value: Callable[[Member], float | None]) -> Cell:
        """Mean and standard deviation over the seeds."""
        return mean_cell(self.numbers(value).values())


def mean_cell(values: Iterable[float]) -> Cell:
    """The mean of numbers, and their standard deviation if there are several.

    Example:
        >>> mean_cell([1.0, 2.0, 3.0])
        Cell(value=2.0, spread=1.0, paper=None, interval=None)
    """
    numbers = list(values)
    return Cell(*mean_std(numbers)) if numbers else Cell()


def _canonical(run: Run, runs: Sequence[Run], locations: Iterable[str]) -> dict[str, Any]:
    """The recipe that the runs of one variant share."""
    recipe = _without(run.recipe, ["seed", *locations])
    if run.method.get("teacher"):
        teacher = find_teacher(run, runs)
        method = teacher.method if teacher is not None and teacher.recipe else {"name": "unknown"}
        method.pop("teacher", None)  # the teacher of the teacher does not count
        recipe["method"]["teacher"] = method
    return recipe


def _labels(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each recipe the name of its method, with the keys in which namesakes differ."""
    labels = []
    for recipe in recipes:
        name = recipe["method"]["name"]
        namesakes = [other for other in recipes if other["method"]["name"] == name]
        keys = sorted({key for other in namesakes for key in differing_keys(recipe, other)})
        # Hyper-parameters of a teacher are named only if its method is not enough.
        short = [key for key in keys if not key.startswith("method.teacher.")]
        short += ["method.teacher.name"] if "method.teacher.name" in keys else []
        if len({_text([_at(other, key) for key in short]) for other in namesakes}) < len(namesakes):
            short = keys
        # A key that is null or missing, as in the runs of an older version, says nothing.
        values = {_short(key): _at(recipe, key) for key in short}
        shown = (f"{key}={value}" for key, value in values.items() if value is not None)
        labels.append(" ".join([name, *shown]))
    return labels


def _short(key: str) -> str:
    return key.removeprefix("method.").replace("teacher.name", "teacher")


# ------------------------------------------------------------------ differences


@dataclass(frozen=True)
class Difference:
    """How much a variant differs from a reference in the headline metric of a split."""

    variant: str  # its label
    reference: str  # the label of the reference
    name: str  # the method of the reference
    seeds: list[int]  # those that both have
    values: list[float]  # the difference for each seed
    mean: float  # their mean
    # 95 % Student interval of the mean over seeds; None for one seed
    interval: tuple[float, float] | None
    p: float | None  # of the exact sign-flip test over seeds; None for one seed
    smallest_p: float | None  # the smallest p that so many seeds can give
    p_bootstrap: float | None = None  # of the bootstrap over examples; None if the task has none

    @property
    def cell(self) -> Cell:
        """The mean with its interval."""
        return Cell(self.mean, interval=self.interval)


def paired_numbers(
    variant: Variant, reference: Variant, value: Callable[[Member], float | None]
) -> dict[int, float]:
    """Seed -> variant - reference, for the seeds that both have."""
    ours, theirs = variant.numbers(value), reference.numbers(value)
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one task on the same data with the same model."""

    task: str
    split: str  # the split that is compared
    variants: Sequence[Variant]  # in the order in which their runs were given
    repeated: Sequence[str] = ()  # notes about runs that were left out

    @cached_property
    def kind(self) -> TaskAnalysis:
        """The analysis of the task."""
        return find_analysis(self.task)

    @property
    def members(self) -> list[Member]:
        return [member for variant in self.variants for member in variant.runs]

    def first(self, name: str) -> Variant | None:
        """The first variant of a method."""
        return next((variant for variant in self.variants if variant.name == name), None)

    @cached_property
    def references(self) -> list[Variant]:
        """What every variant is compared with: base and ls, or else the first variant."""
        scored = [variant for variant in self.variants if variant.scores(self.split)]
        firsts = {variant.name: variant for variant in reversed(scored)}
        return [firsts[name] for name in REFERENCES if name in firsts] or scored[:1]

    @property
    def differences(self) -> list[Difference]:
        """Of every variant to every reference, where they have a seed in common."""
        return self._compared[0]

    def difference(self, variant: Variant, reference: Variant) -> Difference | None:
        """That of two variants of the group."""
        labels = variant.label, reference.label
        return next((d for d in self.differences if (d.variant, d.reference) == labels), None)

    def difference_cells(self, variant: Variant) -> dict[str, Cell]:
        """The cells of the differences of a variant, by :meth:`difference_columns`."""
        cells = {}
        for difference in self.differences:
            if difference.variant == variant.label:
                cells[f"delta_{difference.name}"] = difference.cell
                cells[f"p_{difference.name}"] = Cell(difference.p)
                cells[f"p_bootstrap_{difference.name}"] = Cell(difference.p_bootstrap)
        return cells

    def difference_columns(self) -> list[Column]:
        """Three columns for each reference: the difference, and its p-values."""
        headline = replace(self.kind.headline, signed=True, better=0)
        return [
            column
            for name in dict.fromkeys(reference.name for reference in self.references)
            for column in (
                replace(headline, key=f"delta_{name}", heading=f"Δ {name}"),
                Column(f"p_{name}", "p", digits=3),
                Column(f"p_bootstrap_{name}", "p examples", digits=3),
            )
        ]

    @property
    def notes(self) -> list[str]:
        """What was left out, and what makes a comparison unfair or impossible."""
        return list(
            dict.fromkeys([*self.repeated, *self._told(), *self._compared[1], *self._paces[1]])
        )

    def _told(self) -> Iterator[str]:
        """The notes of the runs themselves, each with the method whose runs have it."""
        for variant in self.variants:
            notes = (note for member in variant.runs for note in member.results.get("notes") or ())
            for note in dict.fromkeys(notes):
                yield f"{variant.label}: {note}"

    def step_times(self, variant: Variant) -> list[float]:
        """Seconds per training step relative to the base run of the same seed, for each seed.

        Times are compared only if both runs were made on the same device and under the same
        conditions, as ``conditions.json`` beside them says, or if nothing was noted for either.
        """
        base, (paces, _), ratios = self.first(REFERENCES[0]), self._paces, []
        for seed, member in variant.members.items():
            other = None if base is None else base.members.get(seed)
            if member in paces and other in paces:
                (ours, place), (theirs, base_place) = paces[member], paces[other]
                if theirs and place == base_place and all(len(part) <= 1 for part in place):
                    ratios.append(ours / theirs)
        return ratios

    @cached_property
    def _paces(self) -> tuple[dict[Member, _Pace], list[str]]:
        """How fast each run was; and notes."""
        paces: dict[Member, _Pace] = {}
        notes: list[str] = []
        for member in self.members if self.first(REFERENCES[0]) is not None else ():
            seconds, steps = member.results.get("seconds"), member.results.get("steps")
            if seconds is not None and steps is not None:
                with noted(notes, "times are not compared: "):
                    place = read_conditions(member.run.path), member.results.get("devices", [])
                    paces[member] = seconds / steps, place
        devices = {" and ".join(place[1]) or "unknown" for _, place in paces.values()}
        if len(devices) > 1:
            places = "; ".join(sorted(devices))
            notes.append(f"times of different devices are not compared: {places}")
        return paces, notes

    @cached_property
    def _compared(self) -> tuple[list[Difference], list[str]]:
        differences: list[Difference] = []
        notes: list[str] = []
        for reference in self.references:
            namesakes = [v.label for v in self.variants if v.name == reference.name]
            if reference.name in REFERENCES and len(namesakes) > 1:
                notes.append(f"of {', '.join(namesakes)} the reference is {reference.label}")
            for variant in self.variants:
                if variant is reference or not variant.scores(self.split):
                    continue
                # Two references are compared in both directions; one note is enough.
                quiet = variant in self.references[: self.references.index(reference)]
                difference = self._difference(variant, reference, [] if quiet else notes)
                differences += [] if difference is None else [difference]
        return differences, notes

    def _difference(
        self, variant: Variant, reference: Variant, notes: list[str]
    ) -> Difference | None:
        pair = f"{variant.label} and {reference.label}"
        keys = [
            key
            for key in differing_keys(variant.recipe, reference.recipe)
            if not key.startswith("method.")
        ]
        if keys:
            notes.append(f"{pair} differ in {', '.join(keys)}, not only in method")
        ours, theirs = variant.scores(self.split), reference.scores(self.split)
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds:
            notes.append(f"{pair} have no seed in common")
            return None
        over_seeds = paired_difference([ours[s] for s in seeds], [theirs[s] for s in seeds])
        members, others = ([side.members[seed] for seed in seeds] for side in (variant, reference))
        p = self._bootstrap(members, others, notes)
        labels = variant.label, reference.label, reference.name
        return Difference(*labels, seeds, **over_seeds, p_bootstrap=p)

    def _bootstrap(
        self, ours: Sequence[Member], theirs: Sequence[Member], notes: list[str]
    ) -> float | None:
        try:
            drawn = [[member.bootstrap_scores(self.split) for member in m] for m in (ours, theirs)]
            known = [[scores for scores in side if scores is not None] for side in drawn]
            if len(known[0]) < len(ours) or len(known[1]) < len(theirs):
                return None
            prints = {m.name: m.records(self.split).fingerprint() for m in (*ours, *theirs)}
        except RequestError as error:
            notes.append(f"no bootstrap over examples: {error}")
            return None
        if len(set(prints.values())) > 1:
            notes.append(
                f"no bootstrap over examples: the records of {', '.join(prints)} are not of the "
                "same examples"
            )
            return None
        return paired_bootstrap(*known)


# ------------------------------------------------------------------ grouping


def group_runs(members: Sequence[Member], split: str | None = None) -> list[Group]:
    """Sort runs into groups and variants. Teachers are looked for among them.

    The data are those that the signature in ``results.json`` names by their content. A run without
    a signature has the data of a run with an equal data section. Runs whose records are of
    different examples are in different groups. Without a ``split`` test is compared where a run has
    been tested, else valid.
    """
    sections = {m: _text(_without(m.run.recipe, m.kind.locations).get("data")) for m in members}
    names = {sections[m]: m.signature["data"] for m in members if "data" in m.signature}
    by_data: dict[tuple[str, str, str], list[Member]] = {}
    for member in members:
        data = member.signature.get("data") or names.get(sections[member], sections[member])
        key = member.run.task, data, _text(member.run.recipe.get("model"))
        by_data.setdefault(key, []).append(member)
    runs = [member.run for member in members]
    groups = []
    for (task, _, _), belonging in by_data.items():
        splits = ("test", "valid") if split is None else (split,)
        analysed = [[part for name in splits if (part := m.split(name))] for m in belonging]
        known = next((parts[0]["fingerprint"] for parts in analysed if parts), None)
        by_examples: dict[str | None, list[Member]] = {}
        for member, parts in zip(belonging, analysed, strict=True):
            examples = parts[0]["fingerprint"] if parts else known
            by_examples.setdefault(examples, []).append(member)
        groups += [_group(task, m, split or _split(m), runs) for m in by_examples.values()]
    first = {member: index for index, member in enumerate(members)}
    return sorted(groups, key=lambda group: min(first[member] for member in group.members))


def _split(members: Iterable[Member]) -> str:
    tested = any("test" in member.results or member.split("test") for member in members)
    return "test" if tested else "valid"


def _group(task: str, members: Sequence[Member], split: str, runs: Sequence[Run]) -> Group:
    locations = find_analysis(task).locations
    by_recipe: dict[str, tuple[dict[str, Any], list[Member]]] = {}
    for member in members:
        recipe = _canonical(member.run, runs, locations)
        by_recipe.setdefault(_text(recipe), (recipe, []))[1].append(member)
    notes: list[str] = []
    variants = []
    labels = _labels([recipe for recipe, _ in by_recipe.values()])
    for (recipe, repeated), label in zip(by_recipe.values(), labels, strict=True):
        seeds: dict[int, Member] = {}
        # Of two runs of one seed the one that has a score, else the one given first.
        for member in sorted(repeated, key=lambda m: (m.run.seed, m.score(split) is None)):
            kept = seeds.setdefault(member.run.seed, member)
            if kept is not member:
                notes.append(f"{member.name} is left out: {kept.name} has the same recipe and seed")
        variant = Variant(label, recipe, seeds)
        marked = f"{label} {NEVER_ACTIVE}" if variant.never_active else label
        variants.append(replace(variant, label=marked))
    return Group(task, split, variants, notes)
