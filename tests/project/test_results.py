"""docs/results.md has the numbers of results/*.csv, and these have the numbers of the runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from tools import results

from labo.lab.analysis.groups import Member, group_runs
from labo.lab.analysis.reading import read_run
from labo.lab.analysis.run import load_analysis
from labo.lab.recipes import load_recipe
from labo.lab.train import train
from report_runs import BASE, LABO, LS, write_run
from scripts import ROOT

PARTS = "".join(
    f"<!-- results: {part} digits -->\n<!-- /results -->\n\n"
    for part in ("answer", "summary", "table", "settings", "differences", "selection", "decoding")
)


def test_the_page_agrees_with_the_committed_results():
    for page in results.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == results.page(text), "run: make results"
        for file, content in results.pictures(text).items():
            assert file.read_text(encoding="utf-8") == content, "run: make results"


def test_the_committed_results_name_no_place_on_a_machine():
    for file in results.RESULTS.glob("*.csv"):
        assert not re.search(r"[=,:\s]/\w", file.read_text(encoding="utf-8")), file


@pytest.fixture
def study(tmp_path, monkeypatch):
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
    results.PAGES[0].write_text(PARTS)
    results.add(tmp_path / "runs", "digits")
    results.add(tmp_path / "runs", "digits", selection=True)
    results.rebuild()
    return runs


def test_the_rows_have_the_differences_of_the_runs(study):
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


def test_the_rows_have_the_ranking_after_logit_normalisation(study):
    split = load_analysis(study[0])["splits"]["test"]
    file = results.RESULTS / "digits.csv"
    row, other = (row for row in results.read(file) if row["method"] == "base")
    assert float(row["analysis_aurc"]) == split["views"]["before"]["selective"]["aurc"]
    area = split["logit_norm"]["aurc"]
    assert float(row["analysis_aurc_normalised"]) == area
    text = results.table("digits")
    assert " | AURC % | AURC, normalised logits % |" in text
    assert f"{50 * (area + float(other['analysis_aurc_normalised'])):.2f} ±" in text
    for older in (row, other):  # runs of an earlier version
        text = file.read_text().replace(older["analysis_aurc_normalised"], "")
        file.write_text(text)
    assert "normalised" not in results.table("digits")


def test_some_methods_are_compared_with_one_of_them(study):
    (group,) = group_runs([Member(read_run(path)) for path in study], "test")
    pair = [group.first(name).scores("test") for name in ("base", "labo")]
    difference = 100 * fmean(pair[0][seed] - pair[1][seed] for seed in (0, 1))
    head, _, *rows = results.among("digits", "labo", "base", "als").splitlines()
    assert "| Δ labo | p |" in head
    assert "Δ ls" not in head
    assert {row.split("|")[1].strip() for row in rows} == {"`base`", "`labo`"}
    assert f"| {difference:+.2f} (" in next(row for row in rows if "base" in row)
    shown = f"{difference:+.2f}".replace("-", "−")
    assert results.verdict("digits", "labo", "base", "als").splitlines() == [
        f"- `base` {shown} points (p = 0.5, 2 seeds), too few seeds for a statement.",
        "- `als`: no runs yet.",
    ]


def test_a_selection_has_the_seeds_that_select(study, tmp_path):
    """Seeds that were run at the selected point alone would change its mean."""
    for seed, tau in ((0, 1.05), (1, 1.05), (2, 1.25)):
        write_run(tmp_path / "more" / f"labo-{tau}-s{seed}", {**LABO, "tau": tau}, seed)
    for seed in (0, 1):
        write_run(tmp_path / "more" / f"labo-s{seed}", LABO, seed)
    results.add(tmp_path / "more", "grid", selection=True, recipe="digits")
    rows = results.read(results.RESULTS / "grid-selection.csv")
    assert sorted(row["seed"] for row in rows) == ["0", "0", "1", "1"]


def test_runs_are_decoded_again_with_other_penalties_and_beams(study, tmp_path, capsys):
    tiny = ["train.max_steps=2", "data.size=200", "decode.max_ratio=0.1", "decode.max_extra=2"]
    trained = train(load_recipe("cldr", [*tiny, "method=ls"]), tmp_path / "cldr" / "ls-s0")
    asked = ["--decode", str(tmp_path / "cldr"), "--as", "cldr", "--split", "valid", "test"]
    results.main([*asked, "--penalties", "1,2", "--beams", "1"])
    assert "6 rows of 1 runs" in capsys.readouterr().out
    rows = results.read(results.RESULTS / "cldr-decoding.csv")
    points = [(row["split"], float(row["length_penalty"]), row["beam"]) for row in rows]
    assert sorted(points) == [
        (split, *point)
        for split in ("test", "valid")
        for point in ((1.0, "1"), (1.0, "5"), (2.0, "5"))
    ]
    for row in rows:
        if (row["length_penalty"], row["beam"]) == ("1.0", "5"):  # as in the recipe
            scores = trained[row["split"]]
            assert float(row["bleu"]) == scores["bleu"]
            assert float(row["chrf"]) == scores["chrf"]
            assert float(row["length_ratio"]) == scores["length_ratio"]
            assert 0 < float(row["word_ratio"]) < 1
    results.main([*asked, "--penalties", "1,2,3"])
    assert "2 rows of 1 runs" in capsys.readouterr().out  # only what is new
    table = results.decoding("cldr").splitlines()
    assert len(table) == 2 + 8
    assert "| valid | `ls` | 3 | 5 | 1 |" in "".join(table)
    best = max(
        results.read(results.RESULTS / "cldr-decoding.csv"),
        key=lambda row: (row["split"] == "valid", float(row["bleu"])),
    )
    point = f"{float(best['length_penalty']):g} | {best['beam']}"
    assert results.tuned("cldr").splitlines()[2].startswith(f"| `ls` | {point} | 1 | ")
    assert "*No runs yet: `results/digits-decoding.csv`.*" in results.PAGES[0].read_text()
    with pytest.raises(SystemExit):
        results.main(asked)
    assert "--decode needs --penalties or --beams" in capsys.readouterr().err


def test_numbers_by_word_frequency_are_those_of_the_analysis(study, tmp_path):
    folder = tmp_path / "translations"
    for method in (LS, LABO):
        for seed in (0, 1):
            write_run(folder / f"{method['name']}-s{seed}", method, seed, task="translation")
    results.add(folder, "cldr")
    rows = results.read(results.RESULTS / "cldr-frequency.csv")
    assert len(rows) == 2 * 2 * 2 * 3  # methods, seeds, splits, parts
    analysed = {
        (method, seed): load_analysis(folder / f"{method}-s{seed}")["splits"]["test"]
        for method in ("ls", "labo")
        for seed in (0, 1)
    }
    for row in (row for row in rows if row["split"] == "test"):
        split, part = analysed[row["method"], int(row["seed"])], row["part"]
        assert float(row["bleu"]) == split["frequency"][part]["bleu"]
        assert float(row["peak"]) == split["confidence"]["peak"][part]
        assert float(row["mean"]) == split["confidence"]["mean"][part]

    bleu = {
        key: [split["frequency"][part]["bleu"] for part in ("most", "medium", "least")]
        for key, split in analysed.items()
    }
    table = results.frequency("cldr").splitlines()
    assert table[5].startswith(f"| test | `ls` | {fmean(bleu['ls', s][0] for s in (0, 1)):.2f} ± ")
    paired = fmean(bleu["labo", seed][2] - bleu["ls", seed][2] for seed in (0, 1))
    assert f"{paired:+.2f} ± " in table[7].split("|")[5]
    assert "(+0.6)" in table[7].split("|")[5]  # the paper's
    peak = fmean(analysed["labo", seed]["confidence"]["peak"]["least"] for seed in (0, 1))
    row = results.confidence("cldr").splitlines()[3]
    assert row.startswith("| `labo` | 0.4 | ")
    assert f" {peak:.3f} ± " in row.split("|")[5]
    drawn = results.drawn_histogram("cldr")
    assert all(f">Words: {part} frequent<" in drawn for part in ("most", "medium", "least"))


def test_adding_twice_changes_nothing_and_a_changed_row_is_noticed(study, tmp_path):
    file = results.RESULTS / "digits.csv"
    before, page = file.read_text(), results.PAGES[0].read_text()
    results.add(tmp_path / "runs", "digits")
    assert file.read_text() == before
    assert results.page(page) == page
    score = results.read(file)[0]["test_accuracy"]
    for place in (str(Path.home()), "/tmp"):  # of a machine
        assert place not in before
    file.write_text(before.replace(score, "0.5"))
    assert results.page(page) != page


def test_rebuilding_needs_no_torch():
    script = "import sys, tools.results as r; r.page(r.PAGES[0].read_text()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split()
