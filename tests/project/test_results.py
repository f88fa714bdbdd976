"""docs/results.md has the numbers of results/*.csv, and these have the numbers of the runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labo.lab.analysis.groups import Member, group_runs
from labo.lab.analysis.reading import read_run
from labo.lab.analysis.run import load_analysis, write_analysis
from report_runs import BASE, LABO, LS, write_run
from scripts import ROOT


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tools.results")


PARTS = "".join(
    f"<!-- results: {part} digits -->\n<!-- /results -->\n\n"
    for part in ("answer", "summary", "table", "settings", "differences", "selection")
)


def test_the_page_agrees_with_the_committed_results(results):
    for page in results.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == results.page(text), "run: make results"
        for file, content in results.pictures(text).items():
            assert file.read_text(encoding="utf-8") == content, "run: make results"


def test_the_committed_results_name_no_place_on_a_machine(results):
    for file in results.RESULTS.glob("*.csv"):
        assert not re.search(r"[=,:\s]/\w", file.read_text(encoding="utf-8")), file


@pytest.fixture
def study(results, tmp_path, monkeypatch):
    """Runs that were added, and a page about them."""
    for name, path in {"ROOT": "", "RESULTS": "results", "ASSETS": ""}.items():
        monkeypatch.setattr(results, name, tmp_path / path)
    monkeypatch.setattr(results, "PAGES", (tmp_path / "page.md",))
    monkeypatch.setattr(results, "SEEDS", 2)
    runs = [
        write_run(tmp_path / "runs" / f"{m['name']}-s{seed}", m, seed)
        for m in (BASE, LS, LABO)
        for seed in (0, 1)
    ]
    write_analysis(runs[0])
    results.PAGES[0].write_text(PARTS)
    results.add(tmp_path / "runs", "digits")
    results.add(tmp_path / "runs", "digits", selection=True)
    results.rebuild()
    return runs


def test_the_rows_have_the_differences_of_the_runs(results, study):
    (expected,) = group_runs([Member(read_run(path)) for path in study], "test")
    found = results.study("digits")
    ours, theirs = (
        {(d.variant, d.reference): vars(d) for d in group.differences}
        for group in (found, expected)
    )
    assert ours == theirs
    assert len(ours) == 4
    text = results.PAGES[0].read_text()
    labo = expected.difference(expected.first("labo"), expected.first("ls"))
    assert f"{100 * labo.mean:+.2f} (" in text
    assert f"`labo` {100 * labo.mean:+.2f} points (p = 0.5, 2 seeds), too few seeds" in text
    assert f"{100 * labo.mean:+.2f} | 0.500 | `labo` " in text  # the summary
    assert (results.ASSETS / "results-differences.svg").read_text().startswith("<?xml")
    assert "| `ls` | `alpha=0.1` |" in text


def test_the_rows_have_the_ranking_after_logit_normalisation(results, study):
    split = load_analysis(study[0])["splits"]["test"]
    (row,) = [r for r in results.read(results.RESULTS / "digits.csv") if "analysis_ece" in r]
    assert float(row["analysis_aurc"]) == split["views"]["before"]["selective"]["aurc"]
    area = split["logit_norm"]["aurc"]
    assert float(row["analysis_aurc_normalised"]) == area
    text = results.table("digits")
    assert " | AURC % | AURC, normalised logits % |" in text
    assert f"{100 * area:.2f}" in text


def test_adding_twice_changes_nothing_and_a_changed_row_is_noticed(results, study, tmp_path):
    file = results.RESULTS / "digits.csv"
    before, page = file.read_text(), results.PAGES[0].read_text()
    results.add(tmp_path / "runs", "digits")
    assert file.read_text() == before
    assert results.page(page) == page
    score = results.read(file)[0]["test_accuracy"]
    file.write_text(before.replace(score, "0.5"))
    assert results.page(page) != page


def test_no_path_of_a_machine_is_committed(results, study):
    for file in results.RESULTS.iterdir():
        assert str(Path.home()) not in file.read_text()
        assert "/tmp" not in file.read_text()


def test_rebuilding_needs_no_torch():
    script = "import sys, tools.results as r; r.page(r.PAGES[0].read_text()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split()
