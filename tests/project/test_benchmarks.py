"""Benchmarks that need more than one process or a GPU run as they stand, at tiny sizes."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

import labo
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
    asked = ["KD", "KD, standardized", "DKD", "64 stored classes"]
    assert [goals[name] for name in asked] == [0.60] * len(asked)
    asked = ["FL", "AFL", "CP", "GER", "TF-reg", "MLS", "DFT", "EAFT, top_k=20"]
    assert [goals[name] for name in asked] == [0.50] * len(asked)
    assert all(row["ratio"] > 0 for row in rows)


def test_a_plot_over_the_vocabulary_is_a_file():
    plot = importlib.import_module("benchmarks.__main__")._plot
    svg = plot("loss: time", "ms", {"torch LS": [(64, 0.1), (128, 2.0)], "labo": [(64, 0.1)]})
    for text in ("loss: time", "classes V", "torch LS", "labo", "0.1"):
        assert f">{text}</text>" in svg.decode()


def test_auto_beside_the_reference(tmp_path):
    main = importlib.import_module("benchmarks.__main__").main
    main(["--smoke", "--only", "auto", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    sizes, dtypes = ("8 x 10", "128 x 100"), ("float32", "float16")
    assert {row["work"] for row in rows} == {
        f"backend, {size}, {dtype}" for size in sizes for dtype in dtypes
    }
    assert {row["ours"] for row in rows} >= {"LABO, auto", "KD, auto", "stored classes, auto"}
    assert all(row["rival"] == row["ours"].replace("auto", "reference") for row in rows)


def test_gpu_tables(capsys):
    main = importlib.import_module("benchmarks.gpu").main
    main(["--device", "cpu", "--smoke"])
    printed = capsys.readouterr().out
    assert printed.count("| torch LS |") == 3  # a table each
    assert printed.count("| labo.linear_loss LABO |") == 1
    assert printed.count("| labo.linear_loss top-64 |") == 1
    for name in ("LABO", "FL", "KD", "stored classes", "LABO, z-loss", "LABO, token weights"):
        assert printed.count(f"| {name} | bfloat16 |") == 1
    assert printed.count("| LABO, metrics | float32 |  |") == 1  # there are none on logits


@pytest.mark.parametrize("name", ["LABO, token weights", "LABO, metrics", "KD", "stored classes"])
def test_gpu_check_sees_an_error(monkeypatch, name):
    """A result that is off by a thousandth is refused."""
    gpu = importlib.import_module("benchmarks.gpu")
    own = labo.linear_loss

    def off(x, *arguments, return_metrics=False, **options):
        found = own(x, *arguments, return_metrics=return_metrics, **options)
        if x.dtype == torch.float64:
            return found
        return (
            (found[0], found[1]._replace(nll=1.001 * found[1].nll))
            if return_metrics
            else (1.001 * found)
        )

    monkeypatch.setattr(gpu, "CASES", {name: gpu.CASES[name]})
    gpu.check("cpu", 211)
    monkeypatch.setattr(labo, "linear_loss", off)
    with pytest.raises(SystemExit, match=f"{name} in float32 is off by 1"):
        gpu.check("cpu", 211)
