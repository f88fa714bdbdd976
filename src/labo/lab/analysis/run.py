"""The documents of the analysis: of one run, and of several runs together.

:func:`analyze_run` turns one run directory into a small JSON document. ``labo analyze`` writes it
to ``RUN/analysis.json``. :func:`load_analysis` reads that file if it still fits the run, and
computes the document again if not. :func:`analyze_runs` compares runs. Torch is loaded only when
something is computed. Every number may be null where it is undefined.

``analysis.json``::

    {"format": 4, "digest": SHA-256 of the rest,
     "name": folder name, "task": a name of TASKS, "seed": 0,
     "method": {"name", hyper-parameters},
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
(a sentence about confidence), ``views`` and what ``analyze_split`` of the task adds. A VIEW is what
:func:`labo.lab.analysis.views.view` measures of a set of predictions: in classification ``before``
and, on the test split, ``after`` the temperature; of text ``forced`` and ``forced_after`` (every
reference token, given the true prefix) and in translation ``decoded`` (the tokens of the output;
those that a minimum edit-distance alignment matches are right). LABELS are those of
:func:`labo.lab.analysis.labels.shown_labels`, with the sample and the hyper-parameters.

:func:`analyze_runs` returns::

    {"format": 4, "split": "test", "groups": [GROUP], "notes": [sentence]}

A GROUP, see :mod:`labo.lab.analysis.groups`; a task may add to it, as translation does::

    {"task", "examples": n, "metric": the headline metric, "runs": [name],
     "methods": [{"method": label, "name": method name, "runs": [name], "seeds": [],
                  "measures": {MEASURE: {"mean", "std" (n-1; null for one run), "values": []}}}],
     "references": [label],                          base and ls, or else the first
     "differences": [{"method": label, and what groups.Difference has}]}
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
from .groups import Group, Member, Variant, group_runs
from .labels import label_settings, shown_labels, stationary_table
from .reading import Run, digests, noted, read_examples, read_run, sound_run
from .significance import mean_std
from .task import declared_options, find_analysis, read_options

FORMAT = 4
FILE = "analysis.json"
POINTS = 500  # at most, of the curve of the loss


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
    if unknown := options.keys() - _chosen(options, run.task).keys():
        raise RequestError(f"{run.task} has no option {', '.join(sorted(unknown))}")
    notes: list[str] = list(run.problems)
    chosen = run.splits() if splits is None else splits
    if not chosen:
        notes.append(f"there are no records: labo evaluate {run.path} writes them")
    labels = _labels(run)
    document = plain(
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
    accepted = {option.name for option in declared_options("analyze", task)}
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
            members.append(Member(run, load_analysis(path) if split in run.splits() else {}))
    if not members:
        raise RequestError("\n".join(problems))
    notes = [f"left out: {problem}" for problem in problems]
    notes += [
        f"{member.name} is not compared: it has no records of the {split} split"
        for member in members
        if split not in member.run.splits()
    ]
    groups = group_runs([member for member in members if member.split(split)], split)
    documents = [_group(group, options) for group in groups]
    notes += [note for group in groups for note in group.notes]
    return plain(
        {
            "format": FORMAT,
            "split": split,
            "groups": documents,
            "notes": list(dict.fromkeys(notes)),
        }
    )


def _group(group: Group, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": group.task,
        "examples": group.members[0].split(group.split).get("examples"),
        "metric": group.kind.headline.key,
        "runs": [member.name for member in group.members],
        "methods": [_method(group, variant) for variant in group.variants],
        "references": [reference.label for reference in group.references],
        "differences": [{"method": d.variant, **vars(d)} for d in group.differences],
        **group.kind.compare_group(group, **_chosen(options, group.task)),
    }


def _method(group: Group, variant: Variant) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    for member in variant.runs:
        measured = group.kind.measure(member.split(group.split))
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


# ------------------------------------------------------------------ curves and labels


def _training(run: Run) -> dict[str, Any]:
    curves = training_curves(run.metrics)
    entropy, classes, alpha = curves["valid"].get("entropy"), run.num_classes, None
    if entropy is not None and classes is not None:
        alpha = alpha_curve(entropy, classes, run.method)
    return {**curves, "alpha": alpha}


def training_curves(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The logged steps and the evaluations of ``metrics.jsonl`` as columns.

    The loss has at most ``POINTS`` steps, evenly spaced; a metric is None where a line lacks it.

    Example:
        >>> lines = [{"step": 1, "loss": 2.0}, {"step": 1, "valid": {"nll": 1.5}}]
        >>> training_curves(lines)["valid"]
        {'step': [1], 'nll': [1.5]}
    """
    metrics = list(metrics)
    steps = [line for line in metrics if "loss" in line]
    if len(steps) > POINTS:
        steps = [steps[i] for i in np.linspace(0, len(steps) - 1, POINTS).round().astype(int)]
    evaluations = [line for line in metrics if line.get("valid")]
    names = dict.fromkeys(name for line in evaluations for name in line["valid"])
    columns = {name: [line["valid"].get(name) for line in evaluations] for name in names}
    return {
        "loss": {key: [line[key] for line in steps] for key in ("step", "loss")},
        "valid": {"step": [line["step"] for line in evaluations], **columns},
    }


def alpha_curve(
    entropy: Sequence[float | None], num_classes: int, method: Mapping[str, Any]
) -> list[float | None]:
    """LABO's mean alpha over training: the one a run used, or that LABO would have used.

    alpha is linear in the entropy, so its mean follows from the mean entropy, in nats.

    Example:
        >>> alpha_curve([0.0], 10, {"name": "labo", "alpha": 0.3})
        [0.3]
        >>> alpha_curve([0.0], 10, {"name": "ls", "alpha": 0.1})
        [1.0]
    """
    from ...smoothing import alpha_of_entropy

    ours = method if method["name"] == "labo" else {}
    if not isinstance(ours.get("alpha", "adaptive"), str):
        return [ours["alpha"]] * len(entropy)
    rho = ours.get("rho", 0.5)
    return [None if h is None else alpha_of_entropy(h, num_classes, rho) for h in entropy]


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
