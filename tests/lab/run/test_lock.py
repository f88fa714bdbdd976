"""One owner per run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time

import pytest

from lab_runs import log_of, metrics, run, start_train, train
from labo.lab.errors import LabError, RequestError
from labo.lab.run.lock import LOCK, Owner, held, locked


def test_the_second_start_is_told_who_has_the_run(tmp_path):
    out = tmp_path / "run"
    first = start_train(out, ["train.epochs=100000"])
    try:
        assert train(out, ["train.epochs=100000"]) == {2}
        line = log_of(out).read_text().splitlines()[-1]
        assert f"{out} is in use by process {first.pid} on {platform.node()} since 2" in line
        assert "labo train digits" in line
        log = tmp_path / "evaluate.log"
        assert run(["evaluate", str(out)], log) == {2}
        assert f"is in use by process {first.pid}" in log.read_text()
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    # Released by death: the run goes on.
    steps = metrics(out)[-1]["step"]
    assert train(out, ["train.epochs=100000"], kill=("step", 60)) == {-signal.SIGKILL}
    assert metrics(out)[-1]["step"] > steps - 40


def test_both_processes_of_a_second_start_are_refused(tmp_path):
    out = tmp_path / "run"
    with held(out):
        assert train(out, ["train.epochs=1"], world=2) == {2}
    assert log_of(out).read_text().count("is in use by") == 1


def test_four_starts_at_once_make_one_run(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "labo", "train", "digits", "train.epochs=3", "--out", str(out)]
    several = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ends = [(process.communicate()[1], process.returncode) for process in several]
    codes = sorted(code for _, code in ends)
    assert codes[0] == 0
    assert set(codes) <= {0, 2}  # one that came late found the run finished
    assert all("is in use by" in said for said, code in ends if code == 2)
    steps = [line["step"] for line in metrics(out) if "loss" in line]
    assert steps == sorted(set(steps))


def test_a_waiting_process_goes_on_when_the_owner_ends(tmp_path):
    path = tmp_path / ".lock"
    with locked(path, tmp_path, wait=True):
        script = "from pathlib import Path; from labo.lab.run.lock import locked; import sys\n"
        script += "p = Path(sys.argv[1])\nwith locked(p, p, wait=True): print('mine')"
        other = subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
        )
        time.sleep(0.5)
        assert other.poll() is None
    assert other.communicate(timeout=60)[0] == "mine\n"
    assert not path.exists()


# ------------------------------------------------------------------ file systems without locks


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def leave(folder, **changes):
    owner = Owner.this_process().model_dump() | changes
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps(owner))


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ({"pid": os.getppid()}, f"in use by process {os.getppid()}"),
        ({"host": "elsewhere"}, rf"on elsewhere .* remove \S*{LOCK}"),
    ],
)
def test_without_locks_a_process_that_lives_or_cannot_be_asked_is_believed(
    owner, said, no_locks, tmp_path
):
    leave(tmp_path, **owner)
    with pytest.raises(RequestError, match=said), held(tmp_path):
        pass


def test_without_locks_a_process_that_has_ended_is_not(no_locks, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    leave(tmp_path, pid=ended.pid)
    with held(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == ""


@pytest.mark.parametrize("content", ["", '{"pid": "x"}', "\udcff"])
def test_a_lock_file_with_anything_in_it_is_no_hindrance(content, tmp_path):
    (tmp_path / LOCK).write_bytes(content.encode("utf-8", "surrogateescape"))
    with held(tmp_path):
        owner = Owner.model_validate_json((tmp_path / LOCK).read_bytes())
        assert owner.pid == os.getpid()


def test_a_disk_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LabError, match=r"cannot write \S*: Read-only file system"), held(tmp_path):
        pass
