"""Where runs are at work: a Ray cluster that loses a node, drivers that are killed, torchrun."""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab_runs import free_port, metrics
from labo.lab.compare import engines
from labo.lab.compare.engines import Job
from labo.lab.compare.execute import run_comparison
from labo.lab.compare.plan import plan
from labo.lab.run.directory import RunDirectory
from launched import Launcher
from scripts import ROOT

TINY = ("train.max_steps=8",)
LONG = ("train.max_steps=400", "train.save_every=20")  # there is time to kill something
# What differs between any two comparisons, even on one machine.
COSTS = ("time", "memory", "seconds", "peak_memory")


def compare(out: Path, *options: str, **popen: Any) -> subprocess.Popen[str]:
    """``labo compare`` as a process."""
    command = [sys.executable, "-m", "labo", "compare", "digits", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "--out", str(out)], **pipes, **popen)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """The first true value of a condition, while a process is at work."""
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return found


def has_begun(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and any((run / "checkpoints").glob("step-*"))


def table_of(out: Path) -> list[dict[str, str]]:
    with (out / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith(COSTS)} for row in rows]


# ------------------------------------------------------------------ Ray


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Any]:
    """A cluster of three nodes on this machine; runs have room on two of them."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    soon = {  # notices within seconds that a node is gone
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 2000,
        "health_check_failure_threshold": 3,
    }
    small = {"object_store_memory": engines._RAY_MEMORY, "include_dashboard": False}
    head = {"num_cpus": 0, "_system_config": soon, **small}
    terminated = signal.getsignal(signal.SIGTERM)
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            started.add_node(num_cpus=1, **small)
        yield started
    finally:
        started.shutdown()
        signal.signal(signal.SIGTERM, terminated)  # Ray has taken it


def node_of(log: Path, cluster: Any) -> Any:
    """The node that works on a run; None before the log says so."""
    found = re.findall(r"process (\d+) of Ray", log.read_text() if log.exists() else "")
    if not found:
        return None
    status = Path(f"/proc/{found[-1]}/status").read_text()
    parent = int(re.search(r"^PPid:\s+(\d+)$", status, re.M)[1])
    nodes = cluster.worker_nodes
    return next(n for n in nodes if n.all_processes["raylet"][0].process.pid == parent)


def test_a_cluster_that_loses_a_node_and_its_driver_gives_the_table_of_one_machine(
    cluster, tmp_path, monkeypatch
):
    methods = ["base", "labo", "kd"]
    out, alone = tmp_path / "ray", tmp_path / "local"
    on_ray = [*LONG, "--methods", ",".join(methods), "--seeds", "1", "--engine", "ray"]
    on_ray += ["--address", cluster.address]
    driver = compare(out, *on_ray)
    wait_for(lambda: has_begun(out / "base-s0"), driver)
    node = wait_for(lambda: node_of(out / "logs" / "base-s0.log", cluster), driver)
    cluster.remove_node(node, allow_graceful=False)
    log = out / "logs" / "base-s0.log"
    wait_for(lambda: "continuing" in log.read_text(), driver)
    assert not RunDirectory(out / "base-s0").finished

    labo = out / "labo-s0" / "results.json"
    wait_for(labo.exists, driver)
    driver.kill()
    driver.communicate()
    finished = labo.stat().st_mtime_ns
    again = compare(out, *on_ray)
    said, wrong = again.communicate()
    assert again.returncode == 0, wrong
    assert "labo-s0: started" not in said
    assert labo.stat().st_mtime_ns != finished  # scored on the test split, not trained again
    assert said.index("base-s0: valid accuracy") < said.index("kd-s0: started")
    assert "raylet" not in said

    Launcher.install(monkeypatch)
    _, failures = run_comparison(plan("digits", methods, 1, alone, overrides=LONG))
    assert failures == []
    for method in methods:
        ours, theirs = (f / f"{method}-s0" / "best" / "model.safetensors" for f in (out, alone))
        assert ours.read_bytes() == theirs.read_bytes()
    assert table_of(out) == table_of(alone)
    (launch,) = json.loads((out / "kd-s0" / "conditions.json").read_text())["launches"]
    assert (launch["jobs"], launch["threads"]) == (1, 1)  # as many as a node has cores


def job(folder: Path, name: str) -> Job:
    log = folder / f"{name}.log"
    return Job(name, name, "", (name,), log, lambda: False, lambda: "", processes=3)


class FakeRay:
    """As much of Ray as the engine uses; a reference is the last argument of its command."""

    class exceptions:
        RayError = ChildProcessError

    def __init__(self) -> None:
        self.cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)
        self.ended: dict[str, Any] = {}
        self.resources: list[dict[str, int]] = []
        self.cancelled: list[str] = []

    def init(self, address: str, **options: Any) -> None: ...

    def shutdown(self) -> None: ...

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": 4.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Resources": {"CPU": 8.0, "GPU": 4.0}}]

    def remote(self, **options: Any) -> Any:
        task = SimpleNamespace(remote=lambda command, *rest: command[-1])

        def chosen(**resources: int) -> Any:
            self.resources.append(resources)
            return task

        return lambda function: SimpleNamespace(options=chosen)

    def wait(self, references: list[str], **options: Any) -> tuple[list[str], list[str]]:
        return [r for r in references if r in self.ended], []

    def get(self, reference: str) -> Any:
        if isinstance(self.ended[reference], Exception):
            raise self.ended[reference]
        return self.ended[reference]

    def cancel(self, reference: str) -> None:
        self.cancelled.append(reference)


def test_what_ray_cannot_see_or_do_is_a_failure_with_its_reason(tmp_path, monkeypatch):
    """A worker without the folder, and a command that is killed again and again."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    engine = engines.RayEngine("auto", 2, 3, tmp_path)
    names = ("fine", "wrong", "unseen", "killed", "waiting")
    jobs = {name: job(tmp_path, name) for name in names}
    for each in jobs.values():
        engine.submit(each)
    assert engine.poll() == []
    ray.ended = {
        "unseen": "node1 does not see it",
        "killed": ChildProcessError("ended by signal 9"),
    }
    ray.ended |= {"fine": 0, "wrong": 2}
    jobs["fine"].log.write_text("on node2")
    assert {(r.job.name, r.event, r.status, r.reason) for r in engine.poll()} == {
        ("unseen", "ended", 1, "node1 does not see it"),
        ("killed", "ended", 1, "ended by signal 9"),
        ("fine", "started", 0, ""),
        ("fine", "ended", 0, ""),
        ("wrong", "ended", 2, ""),
    }
    assert ray.resources == [{"num_cpus": 6, "num_gpus": 3}] * len(jobs)
    print("from Ray")
    engine.stop()
    assert ray.cancelled == ["waiting"]
    assert (tmp_path / "logs" / "ray.log").read_text() == "from Ray\n"


def test_the_task_says_which_machine_does_not_see_the_folder(tmp_path):
    log = tmp_path / "missing.log"
    said = engines._execute([], str(log), {}, str(tmp_path), 1)
    assert f"{platform.node()} does not see {log}: all machines of the cluster must" in said


# ------------------------------------------------------------------ this machine


def test_the_runs_of_a_killed_driver_end_with_a_checkpoint_and_are_continued(tmp_path):
    options = ["train.max_steps=150", "train.save_every=1000", "train.log_every=1"]
    options += ["--methods", "base", "--seeds", "1"]
    driver = compare(tmp_path, *options)
    run = tmp_path / "base-s0"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 5, driver)
    driver.kill()
    driver.communicate()
    again = compare(tmp_path, *options)  # at once: it waits for the run to end
    _, said = again.communicate()
    assert again.returncode == 0, said
    log = (tmp_path / "logs" / "base-s0.log").read_text()
    assert re.search(r"continuing \S+ at step [1-9]", log)  # the schedule saves at the end only
    steps = [line["step"] for line in metrics(run) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))


def test_of_two_drivers_in_one_folder_one_is_refused_and_no_run_is_lost(tmp_path):
    options = [*TINY, "--methods", "base,ls", "--seeds", "1", "--jobs", "1"]
    both = [compare(tmp_path, *options) for _ in range(2)]
    ends = [(*process.communicate(), process.returncode) for process in both]
    refused = [said for _, said, code in ends if code]
    assert len(refused) == 1, ends
    assert [code for *_, code in ends if code] == [2]
    assert re.fullmatch(
        rf"labo: {tmp_path} is in use by process \d+ on \S+ since .* \(labo compare .*\)\n",
        refused[0],
    )
    runs = plan("digits", ["base", "ls"], 1, tmp_path, overrides=TINY).runs
    assert all("test" in (run.results() or {}) for run in runs)
    assert len(table_of(tmp_path)) == 2


def test_the_documented_script_of_slurm_executes_one_line_of_a_plan(tmp_path):
    page = (ROOT / "docs" / "compare.md").read_text()
    (script,) = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", page, re.DOTALL)
    assert len(script.splitlines()) == 10
    (tmp_path / "plan.sh").write_text("exit 1\nprintf '%s|' 'one arg' $OMP_NUM_THREADS\nexit 1\n")
    variables = os.environ | {"SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "3"}
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == ["one arg|3|"]


# ------------------------------------------------------------------ several processes per run


def test_each_run_has_its_processes(tmp_path):
    driver = compare(tmp_path, *TINY, "--methods", "base", "--seeds", "1", "--processes", "2")
    _, wrong = driver.communicate()
    assert driver.returncode == 0, (wrong, (tmp_path / "logs" / "base-s0.log").read_text())
    results = RunDirectory(tmp_path / "base-s0").results()
    assert "|processes:2|" in results["signature"]
    assert "test" in results
    (launch,) = json.loads((tmp_path / "base-s0" / "conditions.json").read_text())["launches"]
    assert (launch["processes"], launch["jobs"]) == (2, 1)


def test_two_machines_train_one_run_on_a_shared_folder(tmp_path):
    """The command of docs/distributed.md, with both agents on this machine."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "one"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    command += ["-m", "labo", "train", "digits", *TINY, "--out", str(out)]
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "|processes:2|" in RunDirectory(out).results()["signature"]
    assert sum("is finished" in text for text in said) == 1
