"""Cleaning in several processes: in order, a little ahead, and ended with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from operator import neg
from pathlib import Path

import pytest

from labo.lab.translation import cleaning


def test_processes_work_in_order_and_only_a_little_ahead():
    taken = []

    def items():
        for number in range(40):
            taken.append(number)
            yield number

    results = cleaning.map_in_order(neg, items(), 2)
    assert next(results) == 0
    assert len(taken) <= 5
    assert [0, *results] == [-n for n in range(40)]


# Cleaning that takes an hour: what is interrupted is the work itself.
SCRIPT = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored
from labo.lab.translation.cleaning import map_in_order
from labo.lab.run.interrupt import terminated_as_interrupted
from contextlib import closing

def slow(number):
    if number:
        print("working", flush=True)
        time.sleep(3600)
    return number

if __name__ == "__main__":
    with terminated_as_interrupted(), closing(map_in_order(slow, range(40), 2)) as found:
        print("started", flush=True)
        for number in found:
            pass
"""


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_workers_end_with_their_command(signals, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        said = sorted(process.stdout.readline() for _ in range(3))
        assert said == [b"started\n", b"working\n", b"working\n"]
        workers = children(process.pid)
        assert len(workers) == 3  # two, and the resource tracker
        for number in signals:
            os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(
                number
            )
            time.sleep(0.1)
        process.wait(120)  # an hour, without the change
        deadline = time.monotonic() + 120
        while any(map(running, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(running, workers))
    finally:
        process.stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
