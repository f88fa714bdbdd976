"""A killed run goes on from a whole checkpoint of its own, or says why not."""

from __future__ import annotations

import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lab_runs import log_of, outcome, train
from labo.lab.run.checksums import MANIFEST
from labo.lab.run.directory import KEPT, RunDirectory
from labo.lab.run.files import sha256

# Accumulation, a short last batch, two evaluations, saves inside an epoch and between two logged
# losses.
RUN = ["train.epochs=2", "train.batch_size=160", "train.accumulate=3", "train.save_every=4"]
RUN += ["train.log_every=5", "optim.warmup_steps=5", "train.average_last=2"]
RUN += ["train.keep_best=1", "train.keep_last=1"]


@pytest.mark.parametrize("kill", [("flush", 1), ("rename", 1), ("flush", 3)])
def test_a_run_killed_as_it_starts(kill, tmp_path):
    """While recipe.yaml is written, and just after."""
    out = tmp_path / "run"
    assert train(out, ["train.epochs=1"], kill=kill) == {-signal.SIGKILL}
    assert train(out, ["train.epochs=1"]) == {0}, log_of(out).read_text()


@pytest.fixture
def whole(run_of):
    return run_of(*RUN)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    out = tmp_path_factory.mktemp("killed") / "run"
    assert train(out, RUN, kill=("step", 14)) == {-signal.SIGKILL}
    assert len(list((out / "checkpoints").iterdir())) == 2
    return out


@pytest.fixture
def stopped(killed, tmp_path):
    """A copy of a run that was killed, with two checkpoints."""
    return shutil.copytree(killed, tmp_path / "run")


def test_a_run_killed_before_it_listed_the_kept_models(whole, tmp_path):
    """After its last checkpoint: the list is that of the evaluation before."""
    out = shutil.copytree(whole, tmp_path / "run")
    (out / "results.json").unlink()
    before = RunDirectory(out)
    before.keep_model(9, {"weight": torch.ones(1)})
    before.list_kept([{"step": 9, "score": 0.5, "nll": 1.0}])
    for path in (whole / "kept").glob("*.safetensors"):
        before.keep_model(int(path.stem.removeprefix("step-")), load_file(path))
    assert train(out, RUN) == {0}, log_of(out).read_text()
    assert outcome(out) == outcome(whole)
    for name in (KEPT, MANIFEST):
        assert (out / "kept" / name).read_text() == (whole / "kept" / name).read_text()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What may happen to a file of a checkpoint.
DAMAGE = {
    "model.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "optimizer.safetensors": flip_a_bit,
    "state.json": Path.unlink,
    "manifest.json": lambda path: path.write_text("{"),
    ".": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(name, stopped, whole):
    newest = max((stopped / "checkpoints").iterdir())
    DAMAGE[name](newest / name)
    assert train(stopped, RUN) == {0}
    reports = [line for line in log_of(stopped).read_text().splitlines() if "passing over" in line]
    assert len(reports) == 1
    assert str(newest) in reports[0]
    assert outcome(stopped) == outcome(whole)


def test_a_checkpoint_of_another_recipe_is_passed_over(stopped, tmp_path):
    other = tmp_path / "other"
    assert train(other, [*RUN, "seed=1"], kill=("step", 14)) == {-signal.SIGKILL}
    for folder in (other / "checkpoints").iterdir():
        shutil.rmtree(folder)
    for folder in (stopped / "checkpoints").iterdir():
        shutil.copytree(folder, other / "checkpoints" / folder.name)
    assert train(other, [*RUN, "seed=1"]) == {1}
    log = log_of(other).read_text()
    assert "belongs to another recipe" in log
    assert "no checkpoint in" in log


class Malicious:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_a_malicious_pickle_is_refused_and_not_run(stopped, tmp_path, whole):
    """Even one with a fitting manifest."""
    trace = tmp_path / "was here"
    newest = max((stopped / "checkpoints").iterdir())
    attack = pickle.dumps(Malicious(trace))
    manifest = newest / "manifest.json"
    for name in ("model.safetensors", "state.json"):
        old = sha256(newest / name)
        (newest / name).write_bytes(attack)
        new = sha256(newest / name)
        manifest.write_text(manifest.read_text().replace(old, new))
    assert train(stopped, RUN) == {0}
    assert not trace.exists()
    assert "passing over" in log_of(stopped).read_text()
    assert outcome(stopped) == outcome(whole)
    pickle.loads(attack)
    assert trace.exists(), "the attack itself works"


def test_a_finished_run_is_left_alone(whole):
    before = outcome(whole)
    assert train(whole, RUN) == {0}
    assert "was already finished" in log_of(whole).read_text()
    assert outcome(whole) == before


def test_another_recipe_is_refused(whole):
    assert train(whole, [*RUN, "optim.lr=0.2", "method.tau=2"]) == {2}
    last = log_of(whole).read_text().splitlines()[-1]
    assert "method.tau, optim.lr" in last


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert train(tmp_path / "out", RUN) == {2}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_change_of_versions_is_mentioned(stopped):
    recipe = stopped / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("torch: 2", "torch: 1"))
    assert train(stopped, RUN) == {0}
    assert "note: it was begun with torch 1" in log_of(stopped).read_text()
