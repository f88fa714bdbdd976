"""Metrics go to the trackers that a recipe names."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import tracking

from labo.lab.errors import RequestError
from labo.lab.recipes import load_recipe
from labo.lab.train import train

LOGGED: list[tuple[str, Any]] = []


class Recorder(tracking.GeneralTracker):
    """Stands for wandb."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        LOGGED.append(("init", (project, options)))

    def start(self) -> None:
        pass

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        LOGGED.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        LOGGED.append(("log", (step, set(values))))

    def finish(self) -> None:
        LOGGED.append(("finish", None))


def test_metrics_and_recipe_are_passed_on(tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    available = [*tracking._available_trackers, tracking.LoggerType.WANDB]
    monkeypatch.setattr(tracking, "_available_trackers", available)
    out = tmp_path / "run"
    settings = ["train.max_steps=4", "train.log_every=2", "train.log_with=[wandb, tensorboard]"]
    train(load_recipe("digits", settings), out)
    found = dict(LOGGED)
    assert found["init"] == ("labo", {"name": "run", "dir": str(out)})
    assert found["config"]["method.tau"] == 1.25
    assert all(isinstance(v, bool | int | float | str) for v in found["config"].values())
    steps = [value for kind, value in LOGGED if kind == "log"]
    assert [step for step, _ in steps] == [2, 4, 4]
    assert steps[0][1] == {"train/loss", "lr"}
    assert "valid/accuracy" in steps[2][1]
    assert LOGGED[-1] == ("finish", None)
    assert list((out / "tensorboard" / "labo").iterdir())


def test_a_continued_run_is_the_same_run_in_trackio(tmp_path, monkeypatch):
    begun = []

    def init(**options):
        begun.append(options)
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    config = SimpleNamespace(update=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, config=config))
    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.TRACKIO])
    train(load_recipe("digits", ["train.max_steps=1", "train.log_with=trackio"]), tmp_path / "run")
    assert begun == [{"project": "labo", "name": "run", "resume": "allow"}]


def test_without_tensorboard_a_run_says_where_metrics_go(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    out = tmp_path / "run"
    train(load_recipe("digits", ["train.max_steps=1"]), out)
    lines = [line for line in capsys.readouterr().out.splitlines() if "TensorBoard" in line]
    assert lines == [
        "note: metrics go to metrics.jsonl alone; to have them in TensorBoard too: "
        "pip install 'torch-labo[tensorboard]'"
    ]
    assert (out / "metrics.jsonl").is_file()
    assert not (out / "tensorboard").exists()


def test_a_tracker_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(
        RequestError, match=r"^train\.log_with: mlflow is not installed: pip install"
    ):
        train(load_recipe("digits", ["train.log_with=mlflow"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RequestError, match=r"^train\.log_with: unknown tracker 'wandbb'; did you"):
        load_recipe("digits", ["train.log_with=wandbb"])
