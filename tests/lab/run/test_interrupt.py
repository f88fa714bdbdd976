"""Ctrl-C and SIGTERM end a run alike: one line, and a checkpoint of the last step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from lab_runs import log_of, metrics, outcome, run, start_train, train
from labo.lab.run import interrupt
from labo.lab.run.interrupt import Interruptions

# No saves but at evaluations, and these are far apart.
RUN = ["train.epochs=40", "train.eval_every=20", "train.log_every=1", "train.batch_size=160"]
LINE = "labo: interrupted; the same command continues the run"


@pytest.fixture
def whole(run_of):
    return outcome(run_of(*RUN))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_last_step_and_the_run_goes_on_exactly(number, tmp_path, whole):
    out = tmp_path / "run"
    process = start_train(out, RUN)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == LINE
    saved = [json.loads(path.read_text()) for path in (out / "checkpoints").glob("*/state.json")]
    assert max(state["step"] for state in saved) == metrics(out)[-1]["step"]
    assert train(out, RUN) == {0}, log_of(out).read_text()
    assert outcome(out) == whole


def test_several_processes_stop_together(tmp_path):
    out = tmp_path / "run"
    process = start_train(out, RUN, world=2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=90)
    assert process.returncode != 0
    assert said.count(LINE) == 1
    newest = max((out / "checkpoints").iterdir())
    assert json.loads((newest / "state.json").read_text())["step"] == metrics(out)[-1]["step"]


@pytest.mark.parametrize(("moment", "second"), [("validate", 2), ("score", 1)])
def test_a_signal_during_an_evaluation_loses_nothing(moment, second, tmp_path, whole):
    """An evaluation that was cut short is made up for; one that was noted is not repeated."""
    out, kill = tmp_path / "run", f"terminate in {moment}"
    assert train(out, RUN, kill=(kill, 1)) == {130}, log_of(out).read_text()
    assert train(out, RUN, kill=(kill, second)) == {130}, log_of(out).read_text()
    assert train(out, RUN) == {0}, log_of(out).read_text()
    assert outcome(out) == whole


def test_a_killed_process_is_reported_in_words(tmp_path):
    out = tmp_path / "run"
    arguments = ["train", "digits", *RUN, "--out", str(out)]
    codes = run(arguments, log_of(out), 2, {1: ("step", 5)}, patience=60)
    assert codes == {1, -signal.SIGKILL}
    last = log_of(out).read_text().splitlines()[-1]
    assert last.startswith("labo: another process of this run has ended")
    assert "the same command continues the run from its last checkpoint" in last


def test_other_commands_end_with_a_line_too(tmp_path):
    script = "import signal, sys; from labo import cli\n"
    script += "from labo.lab.analysis import run\n"
    script += "run.read_settings = lambda *a, **k: signal.raise_signal(signal.SIGTERM)\n"
    script += "cli.main(['analyze', 'x'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "labo: interrupted"


@pytest.fixture
def _interruptible():
    """A shell starts jobs in the background with SIGINT ignored, the tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_the_second_signal_is_not_put_off():
    interruptions = Interruptions()
    with interruptions.handled(), interruptions.deferred():
        signal.raise_signal(signal.SIGINT)
        assert interruptions.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_what_was_ignored_stays_ignored_and_handlers_are_put_back():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruptions().handled():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with interrupt.terminated_as_interrupted(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
