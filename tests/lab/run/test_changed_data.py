"""A run knows the data it was begun with, and does not go on silently with others."""

from __future__ import annotations

import json
import re
import signal

import pytest

from idx_files import SETTINGS, write_mnist
from lab_runs import log_of, run, train
from labo.lab.compare.execute import carry_out
from labo.lab.compare.plan import plan
from labo.lab.compare.setup import Setup
from labo.lab.errors import RequestError
from labo.lab.run.directory import RunDirectory
from launched import Launcher

RUN = [*SETTINGS, "train.epochs=2", "train.save_every=2"]


@pytest.fixture
def data(tmp_path):
    return write_mnist(tmp_path / "data")


def last_line(out):
    return log_of(out).read_text().splitlines()[-1]


def test_a_killed_run_does_not_continue_on_other_data(data, tmp_path):
    out, settings = tmp_path / "run", [*RUN, f"data.root={data}"]
    assert train(out, settings, kill=("step", 5)) == {-signal.SIGKILL}
    begun = RunDirectory(out).data
    write_mnist(data, seed=1)
    assert train(out, settings) == {2}
    assert re.search(rf"have changed: {begun} when it was begun, mnist@\w+ now", last_line(out))
    assert "--accept-data" in last_line(out)
    assert not (out / "results.json").exists()

    assert train(out, [*settings, "--accept-data"]) == {0}, log_of(out).read_text()
    both = RunDirectory(out).data
    assert both.startswith(f"{begun}+mnist@")
    assert f"|data:{both}|" in RunDirectory(out).results()["signature"]


def test_the_same_data_at_another_time_are_the_same(data, tmp_path):
    out, settings = tmp_path / "run", [*RUN, f"data.root={data}"]
    assert train(out, settings, kill=("step", 5)) == {-signal.SIGKILL}
    write_mnist(data)
    assert train(out, settings) == {0}, log_of(out).read_text()


def test_evaluating_on_other_data_is_refused(data, tmp_path):
    out, log = tmp_path / "run", tmp_path / "evaluate.log"
    assert train(out, [*RUN, f"data.root={data}", "--no-test"]) == {0}
    before = RunDirectory(out).data
    write_mnist(data, seed=1)
    assert run(["evaluate", str(out)], log) == {2}
    assert "have changed" in log.read_text()
    assert not (out / "records").exists()
    assert "test" not in RunDirectory(out).results()

    assert run(["evaluate", str(out), "--accept-data"], log) == {0}, log.read_text()
    results = json.loads((out / "results.json").read_text())
    assert f"|data:{before}+mnist@" in results["signature"]
    assert "test" in results


def test_comparing_on_other_data_is_refused(data, tmp_path, monkeypatch):
    launcher = Launcher.install(monkeypatch)

    def comparison(methods):
        overrides = [*RUN, f"data.root={data}"]
        return plan("digits", methods, 1, tmp_path / "out", overrides=overrides)

    assert carry_out([comparison(["base"])], tmp_path / "out", Setup(jobs=1)) == []
    begun = len(launcher.started)
    write_mnist(data, seed=1)
    with pytest.raises(RequestError, match="have changed"):
        carry_out([comparison(["base", "ls"])], tmp_path / "out", Setup(jobs=1))
    assert len(launcher.started) == begun
    # A finished table needs no data.
    assert carry_out([comparison(["base"])], tmp_path / "out", Setup(jobs=1)) == []

    assert (
        carry_out([comparison(["base", "ls"])], tmp_path / "out", Setup(jobs=1), accept_data=True)
        == []
    )
    with pytest.raises(RequestError, match="different data"):
        carry_out([comparison(["base", "ls"])], tmp_path / "out", Setup(jobs=1))


def test_a_killed_run_does_not_continue_with_another_teacher(data, tmp_path):
    """As a fold makes of it."""
    teacher, out = tmp_path / "teacher", tmp_path / "run"
    settings = [*RUN, f"data.root={data}"]
    assert train(teacher, [*settings, "method=base"]) == {0}, log_of(teacher).read_text()
    settings += ["method=kd", f"method.teacher={teacher}"]
    assert train(tmp_path / "whole", settings) == {0}, log_of(tmp_path / "whole").read_text()
    assert train(out, settings, kill=("step", 5)) == {-signal.SIGKILL}
    folded = run(["calibrate", str(teacher), "--fold"], log_of(teacher))
    assert folded == {0}, log_of(teacher).read_text()
    assert train(out, settings) == {2}
    assert re.search(r"the teacher of .* has changed: teacher@\w+ when it was", last_line(out))

    assert train(out, [*settings, "--accept-data"]) == {0}, log_of(out).read_text()
    signature = RunDirectory(out).results()["signature"]
    assert re.search(r"\bteacher=teacher@\w{12}\+teacher@\w{12}\b", signature)
    assert signature != RunDirectory(tmp_path / "whole").results()["signature"]
