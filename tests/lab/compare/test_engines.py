"""Where runs are at work: a Ray cluster that loses a node, drivers that are killed, torchrun."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab_runs import free_port, metrics
from labo.lab.compare import engines
from labo.lab.compare.engines import Job, LocalEngine, Report, Setup
from labo.lab.compare.execute import carry_out, run_comparison
from labo.lab.compare.launch import in_order
from labo.lab.compare.plan import plan
from labo.lab.run.directory import RunDirectory
from labo.lab.run.lock import held
from launched import Launcher

TINY = ("train.max_steps=300", "train.log_every=1", "train.save_every=10")
# What differs between any two comparisons, even on one machine.
COSTS = ("time", "memory", "seconds", "peak_memory")


def compare(out: Path, *options: str, **popen: Any) -> subprocess.Popen[str]:
    """``labo compare`` as a process."""
    command = [sys.executable, "-m", "labo", "compare", "digits", *TINY, *options]
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
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            started.add_node(num_cpus=1, **small)
        yield started
    finally:
        started.shutdown()


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
    on_ray = ["--methods", ",".join(methods), "--seeds", "1", "--engine", "ray"]
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
    table, failures = run_comparison(plan("digits", methods, 1, alone, overrides=TINY))
    assert failures == []
    for method in methods:
        ours, theirs = (f / f"{method}-s0" / "best" / "model.safetensors" for f in (out, alone))
        assert ours.read_bytes() == theirs.read_bytes()
    assert table_of(out) == table_of(alone)
    (launch,) = json.loads((out / "kd-s0" / "conditions.json").read_text())["launches"]
    assert (launch["jobs"], launch["threads"]) == (1, 1)  # as many as a node has cores
