"""``labo demo``, at a size for tests."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from statistics import fmean

from labo.lab import demo
from labo.lab.analysis.task import find_analysis
from labo.lab.compare.grid import read_methods
from labo.lab.compare.setup import Setup
from labo.lab.recipes import load_recipe
from launched import Launcher
from scripts import ROOT


def test_the_demo_ends_with_tables_a_report_and_what_to_try_next(tmp_path, monkeypatch):
    launcher = Launcher.install(monkeypatch)
    tiny = ("train.max_steps=2", "data.size=200", "decode.max_ratio=0.1", "decode.max_extra=2")
    parts = {
        "cldr": replace(demo.PARTS["cldr"], overrides=(*tiny, "decode.beam=1")),
        "digits": replace(
            demo.PARTS["digits"],
            methods=demo.PARTS["digits"].methods[1:],
            seeds=1,
            overrides=tiny[:1],
        ),
    }
    monkeypatch.setattr(demo, "PARTS", parts)
    text, failures = demo.demo(tmp_path / "out", Setup(jobs=2))
    assert failures == []
    assert len(launcher.started) == 10
    assert "digits: test split" in text
    assert "cldr: test split" in text
    assert f"{tmp_path / 'out' / 'report.html'}" in text
    *_, _, compared, differs, unknown = text.splitlines()
    assert compared.startswith("Compared: cross entropy, label smoothing and LABO on digits (1 s")
    assert re.match(r"Differs: digits: accuracy % [\d.]+ \(\w+\) to .*; cldr: BLEU ", differs)
    assert unknown.startswith("Cannot be told: which method is better")
    assert "\nNext: labo compare digits " in text
    assert (tmp_path / "out" / "cldr.tex").exists()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "labo" in page
    assert demo.demo(tmp_path / "out") == (text, [])
    assert len(launcher.started) == 10  # nothing was run again


def test_every_method_of_the_demo_has_settings_that_validation_selected():
    """The committed selection, made with seeds that the demo does not use."""
    for name, part in demo.PARTS.items():
        usual = load_recipe(name).as_document()["optim"]["lr"]
        with (ROOT / "results" / f"{name}-selection.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert min(int(row["seed"]) for row in rows) >= 100
        score = f"valid_{find_analysis(rows[0]['task']).headline.key}"
        for variant in read_methods(part.methods):
            scores: dict[tuple[str, ...], list[float]] = {}
            for row in rows:
                if row["method"] == variant.method:
                    found = {"optim.lr": usual}
                    for pair in f"{row['hyper']} {row['settings']}".split():
                        key, _, value = pair.partition("=")
                        found[key] = value
                    point = tuple(str(float(found[key])) for key in variant.settings)
                    scores.setdefault(point, []).append(float(row[score]))
            means = {point: fmean(values) for point, values in scores.items()}
            chosen = tuple(str(float(value)) for value in variant.settings.values())
            assert means[chosen] == max(means.values()), variant.label
