"""Runs that predicted the same examples, beside each other: methods, seeds, differences."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import differing_keys
from ..translation.analysis import bleu_signature, mean_or_none
from ..translation.confidence import chosen_probabilities
from ..translation.frequency import bleu_by_part, differences, frequency_parts, rule
from .distillation import METRICS, find_teacher
from .reading import Images, Integers, Run, Translations
from .significance import mean_std, paired_bootstrap_bleu, paired_difference

BASELINES = ("ls", "base")  # what the others are compared with: the first of these that is there


@dataclass(frozen=True, eq=False)
class Member:
    """A run with its analysis and its records of the split that is compared."""

    run: Run
    split: Mapping[str, Any]  # the SPLIT of its analysis
    records: Images | Translations


@dataclass(frozen=True, eq=False)
class Method:
    """Runs that differ in nothing but their seed."""

    label: str
    recipe: Mapping[str, Any]
    members: dict[int, Member]  # by seed, in order

    @property
    def name(self) -> str:
        return str(self.recipe["method"]["name"])


def compare_group(
    members: Sequence[Member], runs: Iterable[Run], part_size: int | None, notes: list[str]
) -> dict[str, Any]:
    """A GROUP, as :mod:`labo.lab.analysis.run` describes it.

    Args:
        members: runs of one task whose records are of the same examples.
        runs: all runs there are, in which teachers are looked for.
        part_size: sentences of each part by frequency; thirds if not given.
        notes: gets a sentence for what makes a comparison unfair or impossible.
    """
    methods = group_methods(members, runs, notes)
    baseline = find_baseline(methods)
    translation = isinstance(members[0].records, Translations)
    task = members[0].run.task
    return {
        "task": task,
        "examples": len(members[0].records),
        "metric": METRICS[task],
        "runs": [member.run.name for member in members],
        "methods": [_row(method, task) for method in methods],
        "baseline": baseline.label,
        "differences": [
            difference
            for method in methods
            if method is not baseline
            and (difference := _difference(method, baseline, METRICS[task], notes))
        ],
        "frequency": _frequency(methods, baseline, part_size) if translation else None,
        "confidence": _confidence(methods, baseline, part_size) if translation else None,
    }


# ------------------------------------------------------------------ which runs belong together


def group_methods(members: Sequence[Member], runs: Iterable[Run], notes: list[str]) -> list[Method]:
    """Runs of one recipe, whatever their seed, make a method.

    The label is the name of the method and, where recipes of one name differ, what they differ in.
    Of a student the teacher's method counts, not which run it was.
    """
    runs = list(runs)
    recipes: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[int, Member]] = {}
    for member in sorted(members, key=lambda member: member.run.seed):
        recipe = _without_seed(member.run, runs)
        key = json.dumps(recipe, sort_keys=True)
        recipes[key] = recipe
        seeds = found.setdefault(key, {})
        if member.run.seed in seeds:
            other = seeds[member.run.seed].run.name
            notes.append(f"{member.run.name} is left out: it is {other} once more, seed and all")
        else:
            seeds[member.run.seed] = member
    first = {key: min(members.index(m) for m in seeds.values()) for key, seeds in found.items()}
    labels = _method_labels(recipes)
    return [
        Method(labels[key], recipes[key], found[key])
        for key in sorted(found, key=first.__getitem__)
    ]


def _without_seed(run: Run, runs: list[Run]) -> dict[str, Any]:
    recipe = copy.deepcopy({**run.recipe, "method": run.method})
    recipe.pop("seed", None)
    if run.method.get("teacher"):
        teacher = find_teacher(run, runs)
        known = teacher is not None and bool(teacher.recipe)
        recipe["method"]["teacher"] = teacher.method["name"] if teacher and known else "unknown"
    return recipe


def _method_labels(recipes: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    labels = {}
    for key, recipe in recipes.items():
        namesakes = [r for r in recipes.values() if r["method"]["name"] == recipe["method"]["name"]]
        differing = sorted({k for other in namesakes for k in differing_keys(recipe, other)})
        said = [recipe["method"]["name"]]
        said += [f"{k.removeprefix('method.')}={_at(recipe, k)}" for k in differing]
        labels[key] = " ".join(said)
    return labels


def _at(recipe: Mapping[str, Any], key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def find_baseline(methods: Sequence[Method]) -> Method:
    """What the others are compared with: ls, else base, else the first."""
    for name in BASELINES:
        for method in methods:
            if method.name == name:
                return method
    return methods[0]


# ------------------------------------------------------------------ a row per method


def measures(split: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The numbers of a split that are averaged over seeds, by name.

    Args:
        split: a SPLIT.
        task: of the run.
    """
    views = split["views"]
    if task == "image_classification":
        before, after = views["before"], views.get("after", {})
        return {
            "accuracy": before["accuracy"],
            "nll": before["nll"],
            "ece": before["ece"],
            "ece_after": after.get("ece"),
            "aurc": before["selective"]["aurc"],
            "excess_aurc": before["selective"]["excess_aurc"],
            "confidence_on_errors": before["confidence_on_errors"],
            "underconfidence": before["underconfidence"],
            "underconfidence_after": after.get("underconfidence"),
            "temperature": (split["temperature"] or {}).get("value"),
        }
    forced, decoded = views.get("forced", {}), views.get("decoded", {})
    beams = (split["lengths"] or {}).get("beams", {})
    return {
        "bleu": split["bleu"],
        "nll": forced.get("nll"),
        "forced_ece": forced.get("ece"),
        "forced_ece_after": views.get("forced_after", {}).get("ece"),
        "temperature": (split["temperature"] or {}).get("value"),
        "decoded_ece": decoded.get("ece"),
        "decoded_aurc": decoded.get("selective", {}).get("aurc"),
        "confidence": decoded.get("confidence"),
        "confidence_on_errors": decoded.get("confidence_on_errors"),
        "underconfidence": decoded.get("underconfidence"),
        **{f"length_ratio_{beam}": beams.get(beam, {}).get("ratio") for beam in ("1", "5", "20")},
    }


def _row(method: Method, task: str) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    for member in method.members.values():
        for name, value in measures(member.split, task).items():
            if value is not None:
                columns.setdefault(name, []).append(value)
    row = {}
    for name, values in columns.items():
        mean, std = mean_std(values)
        row[name] = {"mean": mean, "std": std, "values": values}
    return {
        "method": method.label,
        "name": method.name,
        "runs": [member.run.name for member in method.members.values()],
        "seeds": list(method.members),
        "measures": row,
    }


# ------------------------------------------------------------------ differences


def _difference(
    method: Method, baseline: Method, metric: str, notes: list[str]
) -> dict[str, Any] | None:
    others = differing_keys(method.recipe, baseline.recipe)
    if others := [key for key in others if not key.startswith("method.")]:
        notes.append(
            f"{method.label} and {baseline.label} differ in {', '.join(others)}, not only in method"
        )
    seeds = [seed for seed in method.members if seed in baseline.members]
    if not seeds:
        notes.append(f"{method.label} and {baseline.label} have no seed in common")
        return None
    ours = [method.members[seed] for seed in seeds]
    theirs = [baseline.members[seed] for seed in seeds]
    task = ours[0].run.task
    found = paired_difference(
        *([measures(member.split, task)[metric] for member in side] for side in (ours, theirs))
    )
    bootstrap = None
    if isinstance(ours[0].records, Translations):
        bootstrap = [_bootstrap(a, b, seed) for a, b, seed in zip(ours, theirs, seeds, strict=True)]
    return {
        "method": method.label,
        "metric": metric,
        "seeds": seeds,
        **found,
        "bootstrap": bootstrap,
    }


def _bootstrap(ours: Member, theirs: Member, seed: int) -> dict[str, Any]:
    a, b = _translations(ours), _translations(theirs)
    signature = bleu_signature(theirs.run)
    difference, p = paired_bootstrap_bleu(a.hypotheses, b.hypotheses, b.references, signature)
    return {"seed": seed, "difference": difference, "p": p}


# ------------------------------------------------------------------ by frequency


def _translations(member: Member) -> Translations:
    assert isinstance(member.records, Translations)
    return member.records


def _parts(baseline: Method, part_size: int | None) -> tuple[Translations, dict[str, Integers]]:
    """The parts by the baseline's frequencies: the same sentences for all runs."""
    records = _translations(next(iter(baseline.members.values())))
    return records, frequency_parts(records.frequency, part_size)


def _frequency(
    methods: Sequence[Method], baseline: Method, part_size: int | None
) -> dict[str, Any]:
    records, parts = _parts(baseline, part_size)

    def scores(method: Method) -> dict[str, float | None]:
        runs = [
            bleu_by_part(
                _translations(member).hypotheses,
                _translations(member).references,
                parts,
                bleu_signature(member.run),
            )
            for member in method.members.values()
        ]
        return {
            part: mean_or_none([run[part] for run in runs if run[part] is not None])
            for part in parts
        }

    theirs = scores(baseline)
    rows = []
    for method in methods:
        ours = scores(method)
        difference = None if method is baseline else differences(ours, theirs)
        rows.append({"method": method.label, "bleu": ours, "difference": difference})
    return {
        "rule": rule(part_size),
        "baseline": baseline.label,
        "sizes": {part: len(index) for part, index in parts.items()},
        "left_over": len(records) - sum(len(index) for index in parts.values()),
        "mean_frequency": {
            part: mean_or_none(records.frequency[index]) for part, index in parts.items()
        },
        "rows": rows,
    }


def _confidence(
    methods: Sequence[Method], baseline: Method, part_size: int | None
) -> dict[str, Any]:
    """The histograms of each method, over the tokens of all its runs."""
    records, parts = _parts(baseline, part_size)
    rows = []
    edges: list[float] = []
    for method in methods:
        pooled = [
            p for member in method.members.values() for p in _translations(member).probabilities
        ]
        shift = len(records) * np.arange(len(method.members))[:, None]
        everywhere = {part: (index + shift).ravel() for part, index in parts.items()}
        found = chosen_probabilities(pooled, everywhere)
        edges = found.pop("edges")
        rows.append({"method": method.label, **found})
    return {"edges": edges, "rows": rows}
