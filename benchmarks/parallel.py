"""Vocabulary parallel beside data parallel, on processes of one thread each, joined by gloo.

Each process holds either all rows of its columns, or all columns of its rows: the same number of
logits. What vocabulary parallel adds is communication, and a second reading of the logits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

import labo

COLUMNS, ROWS = "columns split", "rows split"


class Size(NamedTuple):
    rows: int
    width: int
    classes: int
    rounds: int


SMOKE = Size(8, 16, 64, 1)
FULL = Size(2048, 512, 32768, 9)


def measure(size: Size, processes: int = 2) -> dict[str, dict[str, float]]:
    """Median seconds of the slowest process, of the loss on logits and of the head with it."""
    with tempfile.TemporaryDirectory() as folder:
        args = (processes, folder, size)
        start_processes(_process, args, processes, start_method="spawn")
        found: dict[str, dict[str, float]] = torch.load(Path(folder) / "found.pt")
        return found


def _process(rank: int, processes: int, folder: str, size: Size) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    found = {
        "loss on logits": _race(_logits(size, processes), size.rounds),
        "output layer + loss": _race(_head(size, processes), max(1, size.rounds // 2)),
    }
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def _race(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """As :func:`benchmarks.race.race`, with all processes starting each turn together."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, contender in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            contender()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if round_:
                times[name].append(float(seconds))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _forward_backward(loss: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], None]:
    def run() -> None:
        loss(*leaves).backward()
        for leaf in leaves:
            leaf.grad = None

    return run


def _logits(size: Size, processes: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    share = size.rows // processes, size.classes // processes
    target = torch.randint(size.classes, (size.rows,))
    loss = labo.LABOLoss()
    columns = torch.randn(size.rows, share[1], requires_grad=True)
    rows = torch.randn(share[0], size.classes, requires_grad=True)
    return {
        COLUMNS: _forward_backward(lambda x: labo.parallel.logits_loss(x, target, loss), columns),
        ROWS: _forward_backward(lambda x: loss(x, target[: share[0]]), rows),
    }


def _head(size: Size, processes: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    share = size.rows // processes, size.classes // processes
    target = torch.randint(size.classes, (size.rows,))
    loss: Any = labo.LABOLoss()
    hidden = torch.randn(size.rows, size.width)
    weight = torch.randn(size.classes, size.width) * 0.02
    leaves = [hidden, weight[: share[1]], hidden[: share[0]], weight]
    leaves = [x.clone().requires_grad_() for x in leaves]
    return {
        COLUMNS: _forward_backward(
            lambda h, w: labo.parallel.linear_loss(h, w, target, loss), *leaves[:2]
        ),
        ROWS: _forward_backward(
            lambda h, w: labo.linear_loss(h, w, target[: share[0]], loss), *leaves[2:]
        ),
    }
