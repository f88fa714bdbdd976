"""One set of runs, and its report, for all tests of the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from labo.lab.report import write_report
from report_runs import BASE, LABO, LS, write_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Base, LS and LABO, two seeds each, on images and on sentences."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        write_run(folder / f"{task[:5]}-{method['name']}-s{seed}", method, seed, task=task)
        for task in ("image_classification", "translation")
        for method in (BASE, LS, LABO)
        for seed in (0, 1)
    ]


@pytest.fixture(scope="session")
def file(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all of them."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report(runs, out)
    return out
