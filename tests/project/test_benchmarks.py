"""The benchmarks run as they stand, at tiny sizes, and have the rows that they promise."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from benchmarks import gpu
from benchmarks.__main__ import _plot, main

from scripts import ROOT


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs sections of the benchmark, and returns what it has written."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    threads = torch.get_num_threads()

    def sections(*names):
        main(["--smoke", "--only", *names, "--out", str(tmp_path)])
        results = json.loads((tmp_path / "results.json").read_text())
        assert all(row["ratio"] > 0 for row in results["rows"])
        return results

    yield sections
    torch.set_num_threads(threads)


def test_large_linear_and_memory(run):
    results = run("large", "linear", "memory")
    assert results["machine"]["torch"] == torch.__version__
    assert results["machine"]["device"].endswith(("1 thread", "2 threads"))
    assert {row["rival"] for row in results["rows"]} >= {"torch LS", "three matrix products"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the Trainer and of its DataLoader
@pytest.mark.parametrize(
    ("section", "rivals"),
    [
        ("parallel", ["rows split", "rows split"]),
        ("training", ["Trainer CE", "Trainer CE", "plain loop LS"]),
    ],
)
def test_two_processes_and_training_of_the_lab(section, rivals, run):
    assert [row["rival"] for row in run(section)["rows"]] == rivals


def test_every_rowwise_loss_beside_label_smoothing(run):
    rows = run("rowwise")["rows"]
    goals = {row["ours"]: row["goal"] for row in rows if row["rival"] == "torch LS"}
    asked = ["KD", "KD, standardized", "DKD", "64 stored classes"]
    assert [goals[name] for name in asked] == [0.60] * len(asked)
    asked = ["FL", "AFL", "CP", "GER", "TF-reg", "MLS", "DFT", "EAFT, top_k=20"]
    assert [goals[name] for name in asked] == [0.50] * len(asked)


def test_auto_beside_the_reference(run):
    rows = run("auto")["rows"]
    sizes, dtypes = ("8 x 10", "128 x 100"), ("float32", "float16")
    assert {row["work"] for row in rows} == {
        f"backend, {size}, {dtype}" for size in sizes for dtype in dtypes
    }
    assert {row["ours"] for row in rows} >= {"LABO, auto", "KD, auto", "stored classes, auto"}
    assert all(row["rival"] == row["ours"].replace("auto", "reference") for row in rows)


def test_a_plot_over_the_vocabulary_is_a_file():
    svg = _plot("loss: time", "ms", {"torch LS": [(64, 0.1), (128, 2.0)], "labo": [(64, 0.1)]})
    for text in ("loss: time", "classes V", "torch LS", "labo", "0.1"):
        assert f">{text}</text>" in svg.decode()


def test_gpu_table(capsys):
    """On the CPU, tiny: every section is in the one table, and all of it runs."""
    gpu.main(["--device", "cpu", "--smoke"])
    printed = capsys.readouterr().out
    table = [line.split(" | ") for line in printed.splitlines() if line.startswith("| 16 x ")]
    assert all(len(row) == len(gpu.HEADER) for row in table)
    assert not [row for row in table if "fails" in row[3]]
    names = [row[2] for row in table]
    assert names.count("torch LS") == 5
    for name in ("labo CE", "KD", "DKD", "labo.linear_loss LABO", "labo.linear_loss top-64"):
        assert names.count(name) >= 1


def test_gpu_benchmark_on_a_device_that_computes_nothing():
    """All shapes, dtypes and sections as they run on a GPU, without torch.compile."""
    script = ROOT / "tests/support/gpu_benchmark.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert [row for row in rows if row[3].startswith("fails")] == []
    names = {row[2] for row in rows}
    assert {"WLS", "labo CE", "PS-KD", "labo.linear_loss CE", "Liger CE"} <= names
    shapes = {row[0] for row in rows if row[2] == "labo.linear_loss LABO"}
    assert shapes == {f"8192 x 4096 x {v}" for v in (32768, 131072, 151936, 256000)}
    told = {row[0]: row[3] for row in rows if row[2] == "naive LABO" and row[1] == "bfloat16"}
    assert told["8192 x 256000"] == "out of memory"  # a row, and the others go on
    assert told["256 x 1000"] == "1e+03"
