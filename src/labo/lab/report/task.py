"""What the report shows for a task besides what it shows for every task.

The package of a task may have a module ``report`` with an instance of :class:`TaskReport` named
``REPORT``. Without one the report has the tables and figures that every task has.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ..analysis.task import find_analysis
from ..tables import Column, Table
from ..tasks import task_package
from .figures import Figure, Reliability
from .gather import ReportGroup

TEMPERED = "Hollow marks: after one temperature, fitted on the validation split."


@dataclass(frozen=True)
class ReportSection:
    """A section of the page that only this task has."""

    name: str  # its id on the page. Groups of one name share a section.
    title: str  # its heading
    tables: Sequence[Table]  # shown first
    figures: Sequence[Figure]  # shown below


class TaskReport:
    """The parts of a report that depend on the task.

    Attributes:
        views: the views of the analysis that the tables and figures about confidence are of: the
            predictions of the model, and those after a temperature.
        confidence_columns: further columns of the table about confidence, each with its view and
            the key in that view.
        reliability: the reliability diagrams.
    """

    views: tuple[str, str] = ("before", "after")
    confidence_columns: Sequence[tuple[Column, str, str]] = ()
    reliability: Sequence[Reliability] = (
        Reliability(
            "reliability",
            "Reliability",
            ("before", "after"),
            f"Filled marks: the predictions of the model. {TEMPERED}",
        ),
    )

    def validation(self, task: str) -> Sequence[Column]:
        """Metrics for the learning curves; the first that was logged is shown."""
        return (find_analysis(task).headline,)

    def class_names(self, names: Sequence[str]) -> list[str]:
        """How the names of classes are shown."""
        return list(names)

    def section(self, group: ReportGroup, name: str) -> ReportSection | None:
        """A section of its own; ``name`` begins the ids of its figures."""
        return None

    def browser(self, group: ReportGroup, budget: int) -> dict[str, Any] | None:
        """The data of the sentence browser, for a task whose output is text.

        Args:
            group: the runs.
            budget: how many characters the data may have.

        Returns:
            ``{"runs": [{"name", "colour"}], "total": sentences in all, "split", "sentences":
            [{"source", "reference", "outputs": [{"run": index, "text", "tokens": [[text,
            probability]]}]}]}``, or None.
        """
        return None


def find_report(task: str) -> TaskReport:
    """The report of a task of ``TASKS``, or the default."""
    module = f"{task_package(task)}.report"
    if find_spec(module) is None:
        return TaskReport()
    return importlib.import_module(module).REPORT
