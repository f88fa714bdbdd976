"""The analysis of a classifier: one label per example, and the whole predicted distribution.

A record has ``label``, a class index, and ``probabilities``, one per class. Nothing here depends on
what is classified; image classification uses it, and so can a task of another kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import RequestError
from ..tables import Column
from . import calibration
from .reading import Booleans, Floats, Integers, Run, floored_log, record_lines
from .selective import aurc, choose_norm, excess_aurc, normalised_logit
from .task import TaskAnalysis
from .views import verdict, view


@dataclass(frozen=True, eq=False)
class Predictions:
    """The records of a split as arrays.

    Attributes:
        labels: (N,) class indices.
        probabilities: (N, K), each row sums to 1.
    """

    labels: Integers
    probabilities: Floats

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def log_p(self) -> Floats:
        """(N, K)."""
        return floored_log(self.probabilities)

    @property
    def right(self) -> Booleans:
        """(N,) whether the most probable class is the label."""
        right: Booleans = self.probabilities.argmax(-1) == self.labels
        return right

    def fingerprint(self) -> str:
        """Equal for two runs that predicted the same examples: a hash of the labels."""
        return hashlib.sha256(self.labels.tobytes()).hexdigest()


class ClassifierAnalysis(TaskAnalysis):
    """Accuracy, NLL and calibration, before and after one temperature fitted on validation.

    Args:
        unit: what is classified, in the plural.
        locations: see :class:`labo.lab.analysis.task.TaskAnalysis`.
    """

    headline = Column("accuracy", "accuracy %", scale=100, better=1)
    scores = (
        Column("nll", "NLL", digits=3, better=-1),
        Column("ece", "ECE %", scale=100, better=-1),
    )
    measures = (
        headline,
        Column("nll", "NLL", digits=3),
        Column("ece", "ECE", digits=3),
        Column("ece_after", "ECE after T", digits=3),
        Column("temperature", "T", digits=3),
        Column("underconfidence", "underconfidence", digits=3, signed=True),
        Column("underconfidence_after", "after T", digits=3, signed=True),
        Column("confidence_on_errors", "confidence on errors", digits=3),
        Column("aurc", "AURC", digits=4),
        Column("excess_aurc", "excess AURC", digits=4),
    )

    def __init__(self, unit: str = "examples", locations: tuple[str, ...] = ()) -> None:
        self.unit, self.locations = unit, locations

    def read_records(self, run: Run, split: str) -> Predictions:
        labels: list[int] = []
        rows: list[Floats] = []
        for line in record_lines(run, split):
            row = line.numbers("probabilities", len(rows[0]) if rows else None, high=1)
            if len(row) == 0 or abs(row.sum() - 1) > 1e-3:
                raise line.wrong("'probabilities' do not sum to 1")
            label = line.integer("label")
            if not 0 <= label < len(row):
                raise line.wrong(f"'label' {label} is not one of the {len(row)} classes")
            labels.append(label)
            rows.append(row)
        return Predictions(np.array(labels), np.stack(rows))

    def analyze_split(
        self, run: Run, split: str, notes: list[str], **options: Any
    ) -> dict[str, Any]:
        records = self.read_records(run, split)
        temperature, norm = None, None
        if split == "test":
            temperature, norm = self._fitted(run, records, notes)
        views = {"before": distribution_view(records.log_p, records.labels)}
        sentence = f"{run.method['name']} {verdict(views['before'])}"
        if temperature is not None:
            scaled = calibration.tempered(records.log_p, temperature["value"])
            views["after"] = distribution_view(scaled, records.labels)
            sentence += f"; after one temperature, T = {temperature['value']:.3f}, it "
            sentence += verdict(views["after"])
        return {
            "examples": len(records),
            "fingerprint": records.fingerprint(),
            "views": views,
            "temperature": temperature,
            "logit_norm": norm,
            "verdict": sentence,
        }

    def _fitted(
        self, run: Run, test: Predictions, notes: list[str]
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The temperature; and the norm of the logits, with its effect on the test split."""
        if "valid" not in run.splits():
            notes.append("no temperature is fitted: there are no records of the valid split")
            return None, None
        valid = self.read_records(run, "valid")
        if valid.probabilities.shape[-1] != test.probabilities.shape[-1]:
            raise RequestError(
                f"{run.records_file('valid')} and {run.records_file('test')} differ in the number "
                "of classes"
            )
        log_p = valid.log_p
        value = calibration.fit_temperature(log_p, valid.labels)
        temperature = None
        if value is None:
            why = "all predictions are right" if valid.right.all() else "the NLL has no minimum"
            notes.append(f"no temperature can be fitted on the valid split: {why}")
        else:
            temperature = {
                "value": value,
                "fitted_on": "valid",
                "examples": len(valid),
                "nll_before": calibration.nll(log_p, valid.labels),
                "nll_after": calibration.nll(calibration.tempered(log_p, value), valid.labels),
            }
        p = choose_norm(log_p, valid.right)
        score = test.log_p.max(-1) if p is None else normalised_logit(test.log_p, p)
        areas = {"aurc": aurc(score, test.right), "excess_aurc": excess_aurc(score, test.right)}
        return temperature, {"p": p, **areas}

    def measure(self, split: Mapping[str, Any]) -> dict[str, float | None]:
        before, after = split["views"]["before"], split["views"].get("after", {})
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


def distribution_view(log_p: Floats, labels: Integers) -> dict[str, Any]:
    """A VIEW of whole distributions.

    Args:
        log_p: (N, K).
        labels: (N,).
    """
    p = np.exp(log_p)
    further = {
        "nll": calibration.nll(log_p, labels),
        "brier": calibration.brier(p, labels),
        "classwise_ece": calibration.classwise_ece(p, labels),
        "entropy": float(calibration.entropy(log_p).mean()),
    }
    return view(p.max(-1), p.argmax(-1) == labels, further=further)
