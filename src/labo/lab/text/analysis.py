"""Predictions of reference tokens, each given the true ones before it: records, views, analyses.

``labo evaluate`` writes them as the section ``forced`` of a record, see
:func:`labo.lab.text.forced.forced_record`. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..analysis.reading import Booleans, Floats, RecordLine, Run, floored_log
from ..analysis.task import TaskAnalysis
from ..analysis.views import verdict, view


@dataclass(frozen=True, eq=False)
class Tempered:
    """The same tokens after one temperature, fitted on the validation split; all (tokens,)."""

    temperature: float
    probabilities: Floats
    confidence: Floats


@dataclass(frozen=True, eq=False)
class Forced:
    """Predictions of the tokens of a reference, each given the tokens before it; all (tokens,)."""

    tokens: list[str]
    probabilities: Floats  # of the reference token
    confidence: Floats  # of the most probable token
    right: Booleans  # whether they are the same
    tempered: Tempered | None


def read_forced(line: RecordLine) -> Forced:
    """The section ``forced`` of a record, checked."""
    tokens = line.texts("tokens")
    tempered = None
    if line.content.get("tempered") is not None:
        section = line.section("tempered")
        tempered = Tempered(
            section.number("temperature"),
            section.numbers("probabilities", len(tokens), high=1),
            section.numbers("confidence", len(tokens), high=1),
        )
    return Forced(
        tokens=tokens,
        right=line.booleans("right", len(tokens)),
        probabilities=line.numbers("probabilities", len(tokens), high=1),
        confidence=line.numbers("confidence", len(tokens), high=1),
        tempered=tempered,
    )


def forced_view(forced: Sequence[Forced]) -> dict[str, Any] | None:
    """A VIEW of the reference tokens of all records; None without any."""
    if not any(one.tokens for one in forced):
        return None
    return _token_view(forced, forced)


def tempered_view(
    forced: Sequence[Forced], notes: list[str]
) -> tuple[float | None, dict[str, Any] | None]:
    """The temperature that the evaluation used, and a VIEW of the tokens with it."""
    tempered = [one.tempered for one in forced if one.tempered]
    if len(tempered) < len(forced):
        notes.append(
            "the records have no temperature: labo evaluate writes one if one from 1/8 to 8 fits"
        )
        return None, None
    return tempered[0].temperature, _token_view(forced, tempered)


def _token_view(forced: Sequence[Forced], predicted: Sequence[Forced | Tempered]) -> dict[str, Any]:
    """A VIEW of predictions of reference tokens."""
    units = np.repeat(np.arange(len(forced)), [len(one.tokens) for one in forced])
    confidence = np.concatenate([one.confidence for one in predicted])
    right = np.concatenate([one.right for one in forced])
    log_p = floored_log(np.concatenate([one.probabilities for one in predicted]))
    return view(confidence, right, units, float(-log_p.mean()))


def digest(content: Sequence[object]) -> str:
    """Equal for equal content."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class TokenAnalysis(TaskAnalysis):
    """Views of reference tokens, before and after a temperature; the rest is the task's."""

    bootstraps = True
    locations = ("data.path",)
    circumstances: ClassVar[Mapping[str, str]]
    """View -> the words for it in the verdict."""

    @abstractmethod
    def read_records(self, run: Run, split: str) -> Any:
        """The records of a split, with ``forced``: the predictions of reference tokens."""

    @abstractmethod
    def views(self, records: Any, split: str, notes: list[str]) -> dict[str, Any]:
        """The views of the records, "forced" first; a note for each that is missing."""

    @abstractmethod
    def findings(self, run: Run, records: Any, notes: list[str], **options: Any) -> dict[str, Any]:
        """Further entries of a SPLIT."""

    def analyze_split(
        self, run: Run, split: str, notes: list[str], **options: Any
    ) -> dict[str, Any]:
        records = self.read_records(run, split)
        views = self.views(records, split, notes)
        temperature = None
        if split == "test" and "forced" in views:
            temperature, after = tempered_view(records.forced, notes)
            views |= {} if after is None else {"forced_after": after}
        verdicts = (f"{self.circumstances[name]} it {verdict(v)}" for name, v in views.items())
        return {
            "examples": len(records),
            "fingerprint": records.fingerprint(),
            "views": views,
            "temperature": temperature,
            "verdict": f"{run.method['name']}: {'; '.join(verdicts) or 'no tokens are recorded'}",
            **self.findings(run, records, notes, **options),
        }
