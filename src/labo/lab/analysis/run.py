"""A run's analysis put together, and several runs beside each other.

``analyze_run`` turns one run directory into a small JSON document, which ``labo analyze`` writes to
``RUN/analysis.json``; ``load_analysis`` reads that file if it still fits the run, and makes the
document anew if not. ``analyze_runs`` sets runs beside each other. Nothing here needs torch.

Every number may be null where there is nothing to compute it from (no errors: no confidence on
errors). A VIEW is a way to look at the same predictions:

- images: ``before`` (as the model says) and, on the test split, ``after`` (one temperature fitted
  on the validation records; absent without them);
- translation: ``forced`` (every reference token, given the true prefix), ``forced_after`` (the same
  with one temperature, on the test split) and ``decoded`` (the tokens of the hypothesis; right are
  those that a minimum edit-distance alignment matches).

``analysis.json``::

    {"format": 1,
     "name": folder name, "task": "image_classification" | "translation",
     "method": {"name", its hyper-parameters}, "seed": 0,
     "num_classes": K or null,
     "state": {"kind": "finished" | "unfinished", "step": n, "reason": null},
     "signature": text or null,
     "results": results.json or null,
     "inputs": {file: sha256},                       what this was computed from
     "training": {"loss": {"step": [], "epoch": [], "loss": [], "lr": []},
                  "valid": {"step": [], "epoch": [], METRIC: [number or null]},
                  "alpha": {"rho": 0.5, "used": true, "values": []} or null},
                                                     LABO's mean alpha at each valid step, and
                                                     whether this run was trained with it
     "splits": {"test": SPLIT, "valid": SPLIT},      those with records
     "labels": [LABELS],                             figure 1c, from records/examples.json
     "notes": [sentence]}                            what could not be done, and why

SPLIT of either task::

    {"examples": n,                                  images or sentences
     "views": {VIEW: {
        "samples": n,                                images or tokens
        "accuracy", "confidence" (mean top probability), "underconfidence" (accuracy - confidence),
        "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "mce", "entropy",
        "ece_floor" (the ECE a calibrated model of these confidences would show by chance),
        "confidence_on_right", "confidence_on_errors", "errors": n,
        "reliability": {"edges": [16], "count": [15], "confidence": [15], "accuracy": [15]},
        "selective": {"aurc", "excess_aurc",
                      "coverage_at_risk": {"0.01": c, "0.05": c, "0.1": c},
                      "risk_at_coverage": {"0.5": r, "0.8": r, "0.9": r, "1": r},
                      "curve": {"coverage": [<= 101], "risk": [<= 101]}},
        "intervals": {"accuracy" | "underconfidence" | "ece" | "aurc": [low, high]}  95 %
     }},
     "temperature": {"value": T, "fitted_on": "valid", "examples": n, "nll_before", "nll_after"}
                    or null (notes say why),         the last three on the validation records
     "verdict": sentence}                            under- or overconfident, before and after

SPLIT of images besides::

    {"logit_norm": {"p": 2 (null: none better on valid), "aurc": a, "excess_aurc": e} or null}
                                                     ranked by normalised logits instead

SPLIT of translation besides::

    {"bleu": b, "bleu_signature": text, "pairs": {"de-en": {"examples": n, "bleu": b}},
     "frequency": {"rule": "thirds" | "slices of 2400", "left_over": n,
                   PART: {"examples": n, "mean_frequency": f, "bleu": b}} or null,
     "confidence": {"edges": [21], "shares": {"all" | PART: [20]}, "mean": {...}, "peak": {...}},
     "lengths": {"reference": mean, "beams": {"1": {"mean", "ratio", "shorter"}, ...},
                 "drift": ratio at the widest beam - ratio at the narrowest} or null}

with PART one of most, medium, least. LABELS::

    {"example": index in examples.json, "title", "context",
     "alpha_ls", "tau", "rho" (null if alpha is fixed), "alpha": the LABO alpha of this sample,
     "classes": [names of the likeliest classes and the target], "index": [of each in all classes],
     "target": place of the target in this list,
     "prediction": [], "one_hot": [], "ls": [], "optimal": [] (P*), "labo": [],
     "rest": {"prediction": mass on classes not shown, "one_hot", "ls", "optimal", "labo"}}

``analyze_runs`` returns::

    {"format": 1, "split": "test", "groups": [GROUP], "distillation": [STUDENT],
     "notes": [sentence]}

A GROUP holds the runs that predicted the same examples::

    {"task", "examples": n, "metric": "accuracy" | "bleu", "runs": [name],
     "methods": [{"method": label, "name": method name, "runs": [name], "seeds": [],
                  "measures": {MEASURE: {"mean", "std" (n-1; null for one run), "values": []}}}],
     "baseline": label,                              ls, else base, else the first
     "differences": [{"method": label, "metric", "seeds": [], "values": [], "mean",
                      "interval": [low, high] or null, "p": of the sign-flip test or null,
                      "smallest_p": 2 / 2^n or null,
                      "bootstrap": [{"seed", "difference", "p"}] (translation) or null}],
     "frequency": {"rule", "baseline": label, "sizes": {PART: n}, "left_over": n,
                   "mean_frequency": {PART: f},
                   "rows": [{"method": label, "bleu": {PART: b}, "difference": {PART: d} or null}]}
                  or null,
     "confidence": {"edges": [21],
                    "rows": [{"method": label, "shares", "mean", "peak": {"all" | PART: ...}}]}
                   or null}

MEASURE: the metric, and nll, ece, ece_after, aurc, excess_aurc, confidence_on_errors,
underconfidence, underconfidence_after, temperature (images); nll, forced_ece, forced_ece_after,
temperature, decoded_ece,
decoded_aurc, confidence, confidence_on_errors, underconfidence (all three decoded), length_ratio_1,
length_ratio_5, length_ratio_20 (translation). One that no run has is absent.
STUDENT::

    {"student": run name, "teacher": run name, "method": method of the student,
     "teacher_method": method name or null, "metric", "student_score", "teacher_score", "seed"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RequestError
from ..translation.analysis import translation_split
from .classification import image_split
from .distillation import METRICS, students
from .groups import Member, compare_group
from .labels import label_settings, shown_labels
from .reading import (
    Images,
    Run,
    Translations,
    digests,
    read_examples,
    read_images,
    read_translations,
    sound_run,
)
from .training import alpha_curve, training_curves

FORMAT = 1
FILE = "analysis.json"


def analyze_run(
    path: str | Path, splits: Sequence[str] | None = None, *, part_size: int | None = None
) -> dict[str, Any]:
    """Analyse one run.

    Args:
        path: the run directory.
        splits: "valid", "test"; those with records, which ``labo evaluate`` writes, if not given.
        part_size: sentences of each part by frequency, as in the paper; thirds if not given.

    Returns:
        The document that the module describes.
    """
    run = _known_task(sound_run(path))
    notes: list[str] = []
    chosen = run.splits() if splits is None else splits
    if not chosen:
        notes.append(f"there are no records: labo evaluate {run.path} writes them")
    document: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "name": run.name,
            "task": run.task,
            "method": run.method,
            "seed": run.seed,
            "num_classes": run.num_classes,
            "state": vars(run.state),
            "signature": (run.results or {}).get("signature"),
            "results": run.results,
            "inputs": digests(run),
            "training": _training(run),
            "splits": {split: _split(run, split, part_size, notes) for split in chosen},
            "labels": _labels(run),
            "notes": list(dict.fromkeys(notes)),
        }
    )
    return document


def write_analysis(
    path: str | Path, splits: Sequence[str] | None = None, *, part_size: int | None = None
) -> dict[str, Any]:
    """:func:`analyze_run`, written to ``RUN/analysis.json`` too."""
    from ..run import files as atomic

    document = analyze_run(path, splits, part_size=part_size)
    atomic.write_json(Path(path) / FILE, document)
    return document


def load_analysis(path: str | Path) -> dict[str, Any]:
    """``RUN/analysis.json`` if it fits what the run holds now; else the analysis made anew.

    Args:
        path: the run directory.
    """
    run = sound_run(path)
    try:
        document: dict[str, Any] = json.loads((run.path / FILE).read_text(encoding="utf-8"))
        current = (
            document["format"] == FORMAT
            and document["inputs"] == digests(run)
            and set(document["splits"]) == set(run.splits())
        )
    except (OSError, ValueError, KeyError, TypeError):
        current = False
    return document if current else analyze_run(path)


def analyze_runs(
    paths: Iterable[str | Path], split: str = "test", *, part_size: int | None = None
) -> dict[str, Any]:
    """Set runs beside each other.

    Args:
        paths: run directories.
        split: whose records.
        part_size: sentences of each part by frequency, as in the paper; thirds if not given.

    Returns:
        The second document that the module describes. A run without records of the split is in no
        group, and a note says so.
    """
    notes: list[str] = []
    places = dict.fromkeys(Path(path).resolve() for path in paths)
    runs = [_known_task(sound_run(path)) for path in places]
    groups: dict[tuple[str, str], list[Member]] = {}
    for run in runs:
        if split not in run.splits():
            notes.append(
                f"{run.name} has no records of the {split} split, and is compared with none"
            )
            continue
        records = _records(run, split)
        analysis = load_analysis(run.path)["splits"][split]
        groups.setdefault((run.task, records.fingerprint()), []).append(
            Member(run, analysis, records)
        )
    document: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "split": split,
            "groups": [compare_group(group, runs, part_size, notes) for group in groups.values()],
            "distillation": students(runs, split),
            "notes": list(dict.fromkeys(notes)),
        }
    )
    return document


def plain(value: Any) -> Any:
    """A value as JSON has it: a number that is not finite becomes null.

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


def _known_task(run: Run) -> Run:
    if run.task not in METRICS:
        raise RequestError(f"{run.path}: there is no analysis for task {run.task!r}")
    return run


def _records(run: Run, split: str) -> Images | Translations:
    if run.task == "translation":
        return read_translations(run, split)
    return read_images(run, split)


def _split(run: Run, split: str, part_size: int | None, notes: list[str]) -> dict[str, Any]:
    if run.task == "translation":
        return translation_split(run, split, part_size, notes)
    return image_split(run, split, notes)


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
    settings = label_settings(run.method)
    return [
        {
            "example": number,
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
        for number, example in enumerate(examples["examples"])
    ]
