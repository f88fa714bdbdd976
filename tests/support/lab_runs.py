"""Training runs for the tests: each in processes of its own, which can be killed at will.

One server process imports everything once; each run is then forked from it, in a few milliseconds.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from labo.lab.methods import methods_for

Kill = tuple[str, int]
BASE = ["method=base", "train.epochs=2"]  # the settings of the run that many tests share
TEACHERLESS = {"kd", "dkd", "tf-kd-self"}  # methods that want another run as their teacher
IMAGE_METHODS = methods_for("image_classification")
TEXT_METHODS = methods_for("translation")
# make soak trains every method; otherwise those with a state, a teacher or draws, and two others.
SOAK = int(os.environ.get("LABO_SOAK", "0"))
_STATEFUL = {"kd", "ps-kd", "r-drop", "connet", "labo", "topk-kd", "ls", "fl"}
_STATEFUL |= {"cs-kd", "beta-ls", "kr-ls", "ols"}


def trained_methods(task: str) -> list[str]:
    """The methods of a task that tests of whole runs train."""
    return [name for name in methods_for(task) if SOAK or name in _STATEFUL]


_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "lab_runs",
        "labo.cli",
        "labo.lab.train",
        "labo.lab.images.task",
        "labo.lab.translation.task",
        "labo.lab.language_modeling.task",
        "torch.utils.tensorboard",
        "torch._dynamo",
    ]
)


def plain_net(num_classes: int, in_channels: int) -> nn.Module:
    """A network whose samples do not see each other: no batch norm."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, num_classes)
    )


def command(arguments: list[str], log: Path, env: dict[str, str], kill: Kill | None) -> None:
    """Run ``labo`` in this process, to the end or to the chosen moment of its death."""
    os.environ.update(env)
    output = log.open("a")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    from labo import cli
    from labo.lab.images.networks import CONVNETS

    CONVNETS["plain"] = plain_net
    if kill is not None:
        arm(*kill)
    cli.main(arguments)
    sys.exit(0)


def arm(moment: str, number: int) -> None:
    """Have this process killed: at the n-th call of something, or after so many milliseconds.

    Or send it SIGTERM in the middle of an evaluation, or give it a full disk: no file of more than
    so many bytes.
    """
    from labo.lab.images.task import ImageTask
    from labo.lab.selection import Selection
    from labo.lab.train import Trainer

    if moment == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
        return
    if moment == "time":
        timer = threading.Timer(number / 1000, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        return
    places: dict[str, tuple[Any, str]] = {
        "step": (Trainer, "update"),
        "flush": (os, "fsync"),
        "rename": (os, "replace"),
        "remove": (shutil, "rmtree"),
        "terminate in validate": (ImageTask, "validate"),
        "terminate in score": (Selection, "select"),
    }
    last = signal.SIGTERM if moment.startswith("terminate") else signal.SIGKILL
    make_deadly([places[moment]], number, last)


def make_deadly(places: list[tuple[Any, str]], number: int, last: signal.Signals) -> None:
    """The n-th call of any of these functions ends in a signal to the process."""
    calls = itertools.count(1)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if next(calls) == number:
                os.kill(os.getpid(), last)
            return result

        return call

    for owner, name in places:
        setattr(owner, name, deadly(getattr(owner, name)))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(
    arguments: list[str],
    log: Path,
    world: int = 1,
    kill: Kill | dict[int, Kill] | None = None,
    environment: dict[str, str] | None = None,
    patience: float | None = None,
) -> set[int]:
    """``labo ARGUMENTS`` in as many processes, as torchrun starts them; their exit codes.

    ``kill`` is for all processes, or by rank. When one of them dies the others are ended, as
    torchrun does; after ``patience`` seconds, if that is given.
    """
    group = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    children = []
    for rank in range(world):
        env = dict(environment or {})
        if world > 1:
            env |= group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        death = kill.get(rank) if isinstance(kill, dict) else kill
        child = _server.Process(target=command, args=(arguments, log, env, death))
        child.start()
        children.append(child)
    alive = list(children)
    while alive:
        wait([child.sentinel for child in alive])
        alive = [child for child in alive if child.exitcode is None]
        if alive and any(child.exitcode for child in children):
            wait([child.sentinel for child in alive], patience or 0)
            for child in alive:
                child.kill()
    return {child.exitcode or 0 for child in children}


def train(out: Path, settings: list[str], world: int = 1, kill: Kill | None = None) -> set[int]:
    """``labo train digits SETTINGS --out OUT``; what it prints is in ``log_of(out)``."""
    return run(["train", "digits", *settings, "--out", str(out)], log_of(out), world, kill)


def start_train(out: Path, settings: list[str], world: int = 1) -> subprocess.Popen[str]:
    """``labo train digits`` as a user starts it, once it has logged a line."""
    command = [sys.executable, "-m", "labo", "train", "digits", *settings, "--out", str(out)]
    if world > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        command[1:1] = [*launcher, "--master-port", free_port()]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},  # as in command()
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process


def replace_and_die(new: Path, folder: Path, moment: int) -> None:
    """``replace_folder`` in a process that is killed after so many of its system calls."""
    child = _server.Process(target=_replace, args=(new, folder, moment))
    child.start()
    child.join()


def _replace(new: Path, folder: Path, moment: int) -> None:
    from labo.lab.run import files

    make_deadly([(os, "replace"), (shutil, "rmtree")], moment, signal.SIGKILL)
    files.replace_folder(new, folder)


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out) if "loss" in line]


def outcome(out: Path) -> dict[str, Any]:
    """All that a finished run leaves behind, but for time, memory and the commit of labo."""
    newest = max((out / "checkpoints").iterdir())
    found = {
        "metrics": metrics(out),
        "results": [json.loads((out / "results.json").read_text())],
        "state": [json.loads((newest / "state.json").read_text())],
    }
    for entries in found.values():
        for entry in entries:
            for measured in ("seconds", "peak_memory", "checksum"):
                entry.pop(measured, None)
    found["results"][0]["signature"] = re.sub(r"git:\S*?\|", "", found["results"][0]["signature"])
    kept = sorted((out / "kept").glob("*.safetensors"))
    tensors = {
        f"{path.name}/{name}": (str(tensor.dtype), tensor.numpy().tobytes())
        for path in (*newest.rglob("*.safetensors"), *kept, out / "best" / "model.safetensors")
        for name, tensor in load_file(path).items()
    }
    folders = sorted(path.name for path in (out / "checkpoints").iterdir())
    return found | {"tensors": tensors, "folders": folders}


def settings_of(method: str, teacher: Path) -> list[str]:
    """A method, with what it cannot do without."""
    settings = [f"method={method}"]
    if method in TEACHERLESS:
        settings.append(f"method.teacher={teacher}")
    if method == "labo":
        settings.append("method.warmup_steps=7")
    return settings
