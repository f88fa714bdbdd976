"""Benchmarks that need more than one process or a GPU run as they stand, at tiny sizes."""

from __future__ import annotations

import importlib
import json

import pytest

from scripts import ROOT


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


def test_two_processes(tmp_path):
    main = importlib.import_module("benchmarks.__main__").main
    main(["--smoke", "--only", "parallel", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["rival"] for row in rows] == ["rows split", "rows split"]
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the Trainer and of its DataLoader
def test_training_of_the_lab(tmp_path):
    main = importlib.import_module("benchmarks.__main__").main
    main(["--smoke", "--only", "training", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["rival"] for row in rows] == ["Trainer CE", "Trainer CE", "plain loop LS"]
    assert all(row["ratio"] > 0 for row in rows)


def test_every_rowwise_loss_beside_label_smoothing(tmp_path):
    main = importlib.import_module("benchmarks.__main__").main
    main(["--smoke", "--only", "rowwise", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    goals = {row["ours"]: row["goal"] for row in rows if row["rival"] == "torch LS"}
    asked = ["GER", "EAFT, top_k=20", "KD", "KD, standardized", "DKD", "64 stored classes"]
    assert [goals[name] for name in asked] == [0.60] * len(asked)
    assert {"FL", "AFL", "CP", "TF-reg", "MLS", "DFT"} < set(goals)
    assert all(row["ratio"] > 0 for row in rows)


def test_gpu_tables(capsys):
    main = importlib.import_module("benchmarks.gpu").main
    main(["--device", "cpu", "--smoke"])
    printed = capsys.readouterr().out
    assert printed.count("| torch LS |") == 2
    assert printed.count("| labo.linear_loss LABO |") == 2
    assert printed.count("| LABO | bfloat16 |") == 1
