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
from .reading import Booleans, Floats, Integers, Run, floored_log, record_lines
from .selective import aurc, choose_norm, normalised_logit
from .task import TaskAnalysis
from .views import verdict, view


@dataclass(frozen=True, eq=False)
class Predictions:
    """The records of a split as arrays."""

    labels: Integers  # (N,) class indices
    probabilities: Floats  # (N, K), each row sums to 1

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def log_p(self) -> Floats:
        """(N, K)."""
        return floored_log(self.probabilities)

    @property
    def right(self) -> Booleans:
        """(N,) whether the most probable class is the label."""
        return self.probabilities.argmax(-1) == self.labels

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
        Column("aurc_normalised", "AURC, normalised logits", digits=4),
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
        test = self.read_records(run, split)
        valid = self._valid(run, test, notes) if split == "test" else None
        temperature = None if valid is None else _temperature(valid, notes)
        views = {"before": _view(test.log_p, test.labels)}
        sentence = f"{run.method['name']} {verdict(views['before'])}"
        if temperature is not None:
            views["after"] = _view(_tempered(test.log_p, temperature), test.labels)
            sentence += f"; after one temperature, T = {temperature:.3f}, it "
            sentence += verdict(views["after"])
        norm = None if valid is None else _logit_norm(valid, test)
        if norm is not None and norm["p"] is not None:
            sentence += f"; ranking by logits divided by their {norm['p']}-norm changes its AURC "
            sentence += f"from {views['before']['selective']['aurc']:.4f} to {norm['aurc']:.4f}"
        return {
            "examples": len(test),
            "fingerprint": test.fingerprint(),
            "views": views,
            "temperature": temperature,
            "logit_norm": norm,
            "verdict": sentence,
        }

    def _valid(self, run: Run, test: Predictions, notes: list[str]) -> Predictions | None:
        """The validation records, which everything is fitted on."""
        if "valid" not in run.splits():
            notes.append("no temperature is fitted: there are no records of the valid split")
            return None
        valid = self.read_records(run, "valid")
        if valid.probabilities.shape[-1] != test.probabilities.shape[-1]:
            raise RequestError(
                f"{run.records_file('valid')} and {run.records_file('test')} differ in the number "
                "of classes"
            )
        return valid

    def measure(self, split: Mapping[str, Any]) -> dict[str, float | None]:
        before, after = split["views"]["before"], split["views"].get("after", {})
        return {
            "accuracy": before["accuracy"],
            "nll": before["nll"],
            "ece": before["ece"],
            "ece_after": after.get("ece"),
            "aurc": before["selective"]["aurc"],
            "aurc_normalised": (split["logit_norm"] or {}).get("aurc"),
            "confidence_on_errors": before["confidence_on_errors"],
            "underconfidence": before["underconfidence"],
            "underconfidence_after": after.get("underconfidence"),
            "temperature": split["temperature"],
        }


def _view(log_p: Floats, labels: Integers) -> dict[str, Any]:
    """A VIEW of whole distributions, (N, K), and the labels, (N,)."""
    nll = float(-np.take_along_axis(log_p, labels[:, None], -1).mean())
    return view(np.exp(log_p.max(-1)), log_p.argmax(-1) == labels, nll=nll)


def _tempered(log_p: Floats, temperature: float) -> Floats:
    """(N, K) the log-probabilities of softmax(z / T), from those at T = 1."""
    import torch

    return torch.log_softmax(torch.from_numpy(log_p) / temperature, -1).numpy()


def _temperature(valid: Predictions, notes: list[str]) -> float | None:
    """The temperature of the validation records; None, and a note, if none is best."""
    import torch

    from ...calibration import TemperatureError, fit_temperature

    try:
        log_p, labels = torch.from_numpy(valid.log_p), torch.from_numpy(valid.labels)
        return fit_temperature(log_p, labels).temperature
    except TemperatureError as error:
        notes.append(f"valid split: {error}")
        return None


def _logit_norm(valid: Predictions, test: Predictions) -> dict[str, Any]:
    """The norm that ranks the validation records best, and the AURC of that ranking on test."""
    p = choose_norm(valid.log_p, valid.right)
    score = test.log_p.max(-1) if p is None else normalised_logit(test.log_p, p)
    return {"p": p, "aurc": aurc(score, test.right)}
