"""The documents of the analysis: of one run, and of several runs together.

:func:`analyze_run` turns one run directory into a small JSON document. ``labo analyze`` writes it
to ``RUN/analysis.json``. :func:`load_analysis` reads that file if it still fits the run, and
computes the document again if not. :func:`analyze_runs` compares runs. Torch is loaded only when
something is computed. Every number may be null where it is undefined.

``analysis.json``::

    {"format": 4, "digest": SHA-256 of the rest,
     "name": folder name, "task": a name of TASKS, "method": {"name", hyper-parameters}, "seed": 0,
     "inputs": {file: sha256},                       the files it was computed from
     "options": {name: value},                       options of the task
     "training": {"loss": {"step": [], "loss": []}, "valid": {"step": [], METRIC: []},
                  "alpha": [] or null},              LABO's mean alpha at each evaluation
     "splits": {"test": SPLIT, "valid": SPLIT},      those with records
     "labels": [LABELS],                             figure 1c, from records/examples.json
     "stationary": {K: of labels.stationary_table},  for the numbers of classes of the labels
     "notes": [sentence]}                            what was left out or not computed, and why

A SPLIT has the number of ``examples``, their ``fingerprint`` (equal for equal examples, whatever
was predicted), a ``temperature`` that was fitted on the validation split (or null), a ``verdict``
(a sentence about confidence) and ``views``: a VIEW is a set of predictions, with what
:func:`labo.lab.analysis.views.view` measures of them. The views of the tasks are:

- classification: ``before`` (the predictions of the model) and, on the test split, ``after`` (with
  the temperature);
- translation: ``forced`` (every reference token, given the true prefix), ``forced_after`` (the same
  with the temperature, on the test split) and ``decoded`` (the tokens of the output; those that a
  minimum edit-distance alignment matches are right);
- language modelling: ``forced`` and ``forced_after``, of the tokens that are recorded.

Besides, a SPLIT of classification has ``"logit_norm": {"p": 2, "aurc": a} or null``: the ranking by
the largest logit, divided by the p-norm of the centred logits; p is null if none is better on the
validation split. One of translation has, with PART one of most, medium, least::

    {"bleu": b, "bleu_signature": text, "pairs": {"de-en": {"bleu": b}},
     "frequency": {"rule": "thirds" | "slices of 2400", "left_over": n,
                   PART: {"examples": n, "mean_frequency": f, "bleu": b}} or null,
     "confidence": {"edges": [21], "shares": {"all" | PART: [20]}, "mean": {...}, "peak": {...}},
     "lengths": {"beams": {"1": {"ratio"}, ...}} or null}

and one of language modelling ``bits_per_byte``, ``nll`` of a token in nats, ``tokens``, ``bytes``.

LABELS are those of :func:`labo.lab.analysis.labels.shown_labels`, with title and context of the
sample and the hyper-parameters ``alpha_ls``, ``tau`` and ``rho`` (null if alpha is fixed).

:func:`analyze_runs` returns::

    {"format": 4, "split": "test", "groups": [GROUP], "notes": [sentence],
     "distillation": [{"method", "teacher_method", "task", "student_score", "teacher_score"}]}

A GROUP, see :mod:`labo.lab.analysis.groups`::

    {"task", "examples": n, "metric": the headline metric, "runs": [name],
     "methods": [{"method": label, "name": method name, "runs": [name], "seeds": [],
                  "measures": {MEASURE: {"mean", "std" (n-1; null for one run), "values": []}}}],
     "references": [label],                          base and ls, or else the first
     "differences": [{"method": label, and what groups.Difference has}],
     "frequency": {"rule", "references", "sizes", "left_over", "mean_frequency",
                   "rows": [{"method", "bleu": {PART: b}, "differences": {label: {PART: d}}}]}}

A MEASURE that no run has is absent. Only translation has ``frequency``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RequestError
from ..run import files as atomic
from .distillation import students
from .groups import Group, Member, Variant, group_runs
from .labels import label_settings, shown_labels, stationary_table
from .reading import Run, digests, noted, read_examples, read_run, sound_run
from .significance import mean_std
from .task import declared_options, find_analysis, read_options
from .training import alpha_curve, training_curves

FORMAT = 4
FILE = "analysis.json"


# ------------------------------------------------------------------ one run


def analyze_run(
    path: str | Path, splits: Sequence[str] | None = None, **options: Any
) -> dict[str, Any]:
    """Analyse one run.

    Args:
        path: the run directory.
        splits: "valid", "test"; those with records, which ``labo evaluate`` writes, if not given.
        **options: values of the ``analyze_options`` of the task.

    Returns:
        The first document that the module describes.
    """
    run = sound_run(path)
    kind = find_analysis(run.task)
    if unknown := options.keys() - _accepted(run.task):
        raise RequestError(f"{run.task} has no option {', '.join(sorted(unknown))}")
    notes: list[str] = list(run.problems)
    chosen = run.splits() if splits is None else splits
    if not chosen:
        notes.append(f"there are no records: labo evaluate {run.path} writes them")
    labels = _labels(run)
    document: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "name": run.name,
            "task": run.task,
            "method": run.method,
            "seed": run.seed,
            "inputs": digests(run),
            "options": options,
            "training": _training(run),
            "splits": {s: kind.analyze_split(run, s, notes, **options) for s in chosen},
            "labels": labels,
            "stationary": {
                count: stationary_table(count)
                for count in sorted({label["sliders"]["classes"] for label in labels})
            },
            "notes": list(dict.fromkeys(notes)),
        }
    )
    return {**document, "digest": _digest(document)}


def _accepted(task: str) -> set[str]:
    return {option.name for option in declared_options("analyze", task)}


def _digest(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_analysis(
    path: str | Path, splits: Sequence[str] | None = None, **options: Any
) -> dict[str, Any]:
    """:func:`analyze_run`, and write the document to ``RUN/analysis.json``."""
    document = analyze_run(path, splits, **options)
    atomic.write_json(Path(path) / FILE, document)
    return document


def write_analyses(
    paths: Iterable[str | Path], **options: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """:func:`write_analysis` of several runs with the options of their tasks; notes about the
    others.

    Raises:
        RequestError: no run can be analysed.
    """
    documents: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in dict.fromkeys(map(Path, paths)):
        with noted(problems):
            documents.append(write_analysis(path, **_chosen(options, sound_run(path).task)))
    if not documents:
        raise RequestError("\n".join(problems))
    return documents, [f"left out: {problem}" for problem in problems]


def _chosen(options: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The options that are for a task."""
    accepted = _accepted(task)
    return {name: value for name, value in options.items() if name in accepted}


def read_settings(paths: Iterable[str | Path], texts: Iterable[str]) -> dict[str, Any]:
    """Options ``NAME=VALUE`` for the runs of ``labo analyze``, as their tasks declare them."""
    texts = list(texts)
    if not texts:
        return {}
    runs = [read_run(path) for path in paths if (Path(path) / "recipe.yaml").is_file()]
    tasks = [run.task for run in runs if run.recipe]
    return read_options("analyze", texts, tasks) if tasks else {}


def load_analysis(path: str | Path) -> dict[str, Any]:
    """``RUN/analysis.json`` if it is unchanged and fits the files of the run; else a new one."""
    run = sound_run(path)
    try:
        document: dict[str, Any] = json.loads((run.path / FILE).read_text(encoding="utf-8"))
        current = (
            document["format"] == FORMAT
            and document["digest"] == _digest(document)
            and document["inputs"] == digests(run)
            and set(document["splits"]) == set(run.splits())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        current = False
    return document if current else analyze_run(path)


# ------------------------------------------------------------------ several runs


def analyze_runs(
    paths: Iterable[str | Path], split: str = "test", **options: Any
) -> dict[str, Any]:
    """Compare runs.

    Args:
        paths: run directories.
        split: whose records.
        **options: each is for the runs whose task has it.

    Returns:
        The second document that the module describes. A run that cannot be read, or that has no
        records of the split, is in no group, and a note says so.
    """
    members: list[Member] = []
    problems: list[str] = []
    unique = {Path(path).resolve(): Path(path) for path in reversed(list(paths))}
    for path in reversed(unique.values()):
        with noted(problems):
            run = sound_run(path)
            find_analysis(run.task)
            members.append(Member(run, load_analysis(path) if split in run.splits() else None))
    if not members:
        raise RequestError("\n".join(problems))
    runs = [member.run for member in members]
    notes = [f"left out: {problem}" for problem in problems]
    notes += [
        f"{run.name} is not compared: it has no records of the {split} split"
        for run in runs
        if split not in run.splits()
    ]
    groups = group_runs([member for member in members if member.split(split)], split)
    documents = [_group(group, options) for group in groups]
    notes += [note for group in groups for note in group.notes]
    document: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "split": split,
            "groups": documents,
            "distillation": students(runs, split),
            "notes": list(dict.fromkeys(notes)),
        }
    )
    return document


def _group(group: Group, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": group.task,
        "examples": (group.members[0].split(group.split) or {}).get("examples"),
        "metric": group.kind.headline.key,
        "runs": [member.name for member in group.members],
        "methods": [_method(group, variant) for variant in group.variants],
        "references": [reference.label for reference in group.references],
        "differences": [{"method": found.variant, **vars(found)} for found in group.differences],
        **group.kind.compare_group(group, **_chosen(options, group.task)),
    }


def _method(group: Group, variant: Variant) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    for member in variant.runs:
        measured = group.kind.measure(member.split(group.split) or {})
        measured |= {group.kind.headline.key: member.score(group.split)}
        for name, value in measured.items():
            if value is not None:
                columns.setdefault(name, []).append(value)
    measures = {}
    for name, values in columns.items():
        mean, std = mean_std(values)
        measures[name] = {"mean": mean, "std": std, "values": values}
    return {
        "method": variant.label,
        "name": variant.name,
        "runs": [member.name for member in variant.runs],
        "seeds": list(variant.members),
        "measures": measures,
    }


def plain(value: Any) -> Any:
    """A value as JSON: a number that is not finite becomes null.

    Example:
        >>> plain({"a": (1.0, math.inf), "b": np.float64(2.5)})
        {'a': [1.0, None], 'b': 2.5}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _training(run: Run) -> dict[str, Any]:
    curves = training_curves(run.metrics)
    entropy, classes, alpha = curves["valid"].get("entropy"), run.num_classes, None
    if entropy is not None and classes is not None:
        alpha = alpha_curve(entropy, classes, run.method)
    return {**curves, "alpha": alpha}


def _labels(run: Run) -> list[dict[str, Any]]:
    """Figure 1c for every example."""
    examples = read_examples(run)
    if examples is None:
        return []
    settings = label_settings(run.method, run.num_classes)
    return [
        {
            "title": example["title"],
            "context": example.get("context"),
            "alpha_ls": settings["alpha_ls"],
            "tau": settings["tau"],
            "rho": settings["rho"] if settings["alpha"] is None else None,
            **shown_labels(
                np.array(example["logits"], dtype=np.float64),
                example["target"],
                examples["classes"],
                **settings,
            ),
        }
        for example in examples["examples"]
    ]
