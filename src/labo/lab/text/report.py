"""The part of the report that is about predictions of reference tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.figures import Reliability
from ..report.task import TEMPERED, TaskReport
from .token_text import token_names


class TokenReport(TaskReport):
    """Calibration of reference tokens, and tokens as readable text."""

    views = ("forced", "forced_after")
    reliability: Sequence[Reliability] = (
        Reliability(
            "reliability",
            "Reliability",
            ("forced", "forced_after"),
            f"Filled marks: every reference token, given the true words before it. {TEMPERED}",
        ),
    )

    def class_names(self, names: Sequence[str]) -> list[str]:
        return token_names(names)
