"""What compare, analyze and report need to know of a task, without torch.

The package of a task has a module ``analysis`` with an instance of :class:`TaskAnalysis` named
``ANALYSIS``. :func:`find_analysis` imports it when it is first needed. No module outside of the
package depends on which task it is.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import RequestError
from ..tables import Column, Table
from ..tasks import task_package
from .reading import Floats, Run


class Records(Protocol):
    """The records of a split, as a task reads them."""

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Equal for two runs that predicted the same examples."""


@dataclass(frozen=True)
class TaskOption:
    """An option of ``labo evaluate`` or ``labo analyze`` that only this task has."""

    name: str  # as in ``NAME=VALUE``
    help: str  # what it sets, with an example of a value
    # turns the text of the value into the value; raises ValueError if it cannot
    parse: Callable[[str], Any]


class TaskAnalysis(ABC):
    """The analysis of a task. A subclass must read records and analyse a split of them.

    Attributes:
        headline: the metric of ``results.json`` that methods are compared by, and how it is shown;
            ``better`` is 1 or -1.
        scores: the other metrics that tables show, in order. CSV and JSON files have all metrics.
        measures: the columns of the table of ``labo analyze``: numbers of :meth:`measure`.
        bootstraps: whether :meth:`bootstrap_scores` is defined.
        unit: what the predictions of a split are, in the plural.
        locations: dotted recipe keys of folders of data. Runs that differ in nothing else are
            runs of one recipe.
        evaluate_options: what ``labo evaluate RUN NAME=VALUE`` accepts; passed to
            :meth:`labo.lab.tasks.Task.evaluate`.
        analyze_options: what ``labo analyze RUN... NAME=VALUE`` accepts; passed to
            :meth:`analyze_split` and :meth:`compare_group`.
    """

    headline: Column = Column("accuracy", "accuracy %", scale=100, better=1)
    scores: Sequence[Column] = ()
    measures: Sequence[Column] = ()
    bootstraps: bool = False
    unit: str = "samples"
    locations: Sequence[str] = ()
    evaluate_options: Sequence[TaskOption] = ()
    analyze_options: Sequence[TaskOption] = ()

    @abstractmethod
    def read_records(self, run: Run, split: str) -> Records:
        """The records of a split, checked.

        Raises:
            RequestError: there are none, or one is wrong; the message names its line.
        """

    @abstractmethod
    def analyze_split(
        self, run: Run, split: str, notes: list[str], **options: Any
    ) -> dict[str, Any]:
        """A SPLIT, as :mod:`labo.lab.analysis.run` describes it.

        Args:
            run: the run.
            split: "valid" or "test". Whatever is fitted is fitted on valid and applied to test.
            notes: gets a sentence for everything that could not be computed.
            **options: values of ``analyze_options``.
        """

    @abstractmethod
    def measure(self, split: Mapping[str, Any]) -> dict[str, float | None]:
        """The numbers of a SPLIT that are averaged over seeds, by name; the headline is first."""

    def bootstrap_scores(self, run: Run, records: Any) -> Floats | None:
        """(1 + B,) the headline on all examples and on each of the draws of the bootstrap.

        It is called if ``bootstraps`` is true. Without it differences are tested over seeds alone.

        Args:
            run: the run.
            records: of :meth:`read_records`.

        Returns:
            The scores on :func:`labo.lab.analysis.significance.example_draws`; None if this run
            has none.
        """
        return None

    def scoring(self, results: Mapping[str, Any]) -> dict[str, str]:
        """How the scores in ``results.json`` were computed, in words, by the name of the tool."""
        return {}

    def compare_group(self, group: Any, **options: Any) -> dict[str, Any]:
        """Further entries of a GROUP document that compare its variants.

        Args:
            group: a :class:`labo.lab.analysis.groups.Group` whose members have an analysis and
                records of ``group.split``.
            **options: values of ``analyze_options``.
        """
        return {}

    def group_tables(self, document: Mapping[str, Any]) -> list[Table]:
        """Tables of the entries of :meth:`compare_group`, for the terminal."""
        return []


def find_analysis(task: str) -> TaskAnalysis:
    """The analysis of a task of ``TASKS``."""
    module = importlib.import_module(f"{task_package(task)}.analysis")
    return module.ANALYSIS


def read_options(command: str, texts: Iterable[str], tasks: Iterable[str]) -> dict[str, Any]:
    """The values of options ``NAME=VALUE`` that one of the tasks declares for a command."""
    tasks = list(dict.fromkeys(tasks))
    declared = {option.name: option for task in tasks for option in declared_options(command, task)}
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in declared or not equals:
            known = "; ".join(f"{option.name}: {option.help}" for option in declared.values())
            raise RequestError(
                f"{text}: {', '.join(tasks)} has no such option for labo {command} "
                f"({known or 'it has none'})"
            )
        try:
            values[name] = declared[name].parse(value)
        except ValueError as error:
            raise RequestError(f"{text}: {declared[name].help}") from error
    return values


def declared_options(command: str, task: str) -> Sequence[TaskOption]:
    """The options a task declares for a command."""
    return getattr(find_analysis(task), f"{command}_options")
