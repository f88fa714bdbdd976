"""What the analyses of tasks on text share: the calibration of reference tokens."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..analysis.reading import Run
from ..analysis.task import TaskAnalysis
from ..analysis.views import verdict
from .predictions import tempered_view

__all__ = ["TokenAnalysis", "digest"]


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
