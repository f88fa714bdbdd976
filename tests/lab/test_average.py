"""``labo average``: the mean of models that a run kept."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

import lab_runs
from command import status
from labo.lab.average import average_models
from labo.lab.errors import RequestError
from labo.lab.run.checkpoint import KeptModel
from labo.lab.selection import ranked

SETTINGS = ["train.epochs=5", "train.batch_size=300", "train.select=accuracy", "optim.lr=1e-2"]
SETTINGS += ["train.keep_best=2", "train.keep_last=1"]


@pytest.fixture
def finished(run_of):
    return run_of(*SETTINGS)


def test_the_best_and_the_last_are_kept(finished):
    evaluated = [
        KeptModel(step=line["step"], score=line["valid"]["accuracy"], nll=line["valid"]["nll"])
        for line in map(json.loads, (finished / "metrics.jsonl").read_text().splitlines())
        if "valid" in line
    ]
    assert len(evaluated) == 5
    wanted = {model.step for model in [*ranked(evaluated, True)[:2], evaluated[-1]]}
    listed = json.loads((finished / "kept" / "models.json").read_text())["models"]
    assert {model["step"] for model in listed} == wanted
    files = {path.name for path in (finished / "kept").glob("*.safetensors")}
    assert files == {f"step-{step:08d}.safetensors" for step in wanted}


def test_of_equal_scores_the_lower_nll_is_better_then_the_later_step():
    models = [
        KeptModel(step=s, score=c, nll=n) for s, c, n in [(1, 0.5, 2), (2, 0.5, 1), (3, 0.5, 1)]
    ]
    models.append(KeptModel(step=4, score=0.4, nll=0))
    assert [model.step for model in ranked(models, True)] == [3, 2, 1, 4]
    assert [model.step for model in ranked(models, False)] == [4, 3, 2, 1]


def test_the_average_is_a_model(finished, tmp_path, capsys):
    assert status("average", finished, "--best", 2, "--out", tmp_path / "mean") == 0
    listed = json.loads((finished / "kept" / "models.json").read_text())["models"]
    best = ranked([KeptModel(**model) for model in listed], True)[:2]
    one, other = (
        load_file(finished / "kept" / f"step-{model.step:08d}.safetensors") for model in best
    )
    found = load_file(tmp_path / "mean" / "model.safetensors")
    for name, tensor in found.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (one[name] + other[name]) / 2)
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    first, second = sorted(model.step for model in best)
    assert f"the average of steps {first}, {second} is in" in shown


def test_what_cannot_be_averaged_is_said(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    with pytest.raises(RequestError, match=r"kept \d models, not 9"):
        average_models(copy, last=9)
    newest = max((copy / "kept").glob("*.safetensors"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    with pytest.raises(RequestError, match=f"{newest.name} is damaged"):
        average_models(copy, last=1)
    shutil.rmtree(copy / "kept")
    with pytest.raises(RequestError, match=r"kept no models: train with train\.keep_best=N"):
        average_models(copy)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(RequestError, match="is no average of this run"):
        average_models(finished, out=tmp_path / "mine")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["best", "other"])
def test_only_an_average_of_this_run_is_replaced(name, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    if name == "other":  # an average of another run
        average_models(run, last=1, out=run / name)
        mark = run / name / "average.json"
        mark.write_text(mark.read_text().replace('"recipe": "', '"recipe": "0'))
    before = contents(run / name)
    assert "manifest.json" in {path.name for path in before}
    with pytest.raises(RequestError, match="is no average of this run: choose an --out"):
        average_models(run, last=1, out=run / name)
    assert contents(run / name) == before


@pytest.mark.parametrize("kill", [("rename", 1), ("rename", 3), ("rename", 5), ("flush", 1)])
def test_an_average_that_was_killed_can_be_made_again(kill, finished, tmp_path):
    run_path = shutil.copytree(finished, tmp_path / "run")
    arguments, log = ["average", str(run_path), "--last", "1"], tmp_path / "log"
    assert lab_runs.run(arguments, log, kill=kill) == {-signal.SIGKILL}
    assert lab_runs.run(arguments, log) == {0}, log.read_text()
    kept = max((run_path / "kept").glob("*.safetensors"))
    found, wanted = load_file(run_path / "average" / "model.safetensors"), load_file(kept)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
