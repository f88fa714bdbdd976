"""Vocabulary parallel beside data parallel, on processes of one thread each, joined by gloo.

Each process holds either all rows of its columns, or all columns of its rows: the same number of
logits. What vocabulary parallel adds is communication, and a second reading of the logits.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import labo

from .contenders import Work, backward
from .measure import race, seconds_of

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
        "loss on logits": race(_logits(size, processes), size.rounds, _together),
        "output layer + loss": race(_head(size, processes), max(1, size.rounds // 2), _together),
    }
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def _together(contender: Work) -> float:
    """The seconds of the slowest process, when all start together."""
    dist.barrier()
    seconds = torch.tensor(seconds_of(contender))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _logits(size: Size, processes: int) -> dict[str, Work]:
    torch.manual_seed(0)
    share = size.rows // processes, size.classes // processes
    target = torch.randint(size.classes, (size.rows,))
    loss = labo.LABOLoss()
    columns = torch.randn(size.rows, share[1], requires_grad=True)
    rows = torch.randn(share[0], size.classes, requires_grad=True)
    return {
        COLUMNS: backward(partial(labo.parallel.logits_loss, columns, target, loss), columns),
        ROWS: backward(partial(loss, rows, target[: share[0]]), rows),
    }


def _head(size: Size, processes: int) -> dict[str, Work]:
    torch.manual_seed(0)
    share = size.rows // processes, size.classes // processes
    target = torch.randint(size.classes, (size.rows,))
    loss: Any = labo.LABOLoss()
    hidden = torch.randn(size.rows, size.width)
    weight = torch.randn(size.classes, size.width) * 0.02
    parts = [hidden, weight[: share[1]], hidden[: share[0]], weight]
    all_rows, columns, rows, whole = (x.clone().requires_grad_() for x in parts)
    of_columns = partial(labo.parallel.linear_loss, all_rows, columns, target, loss)
    of_rows = partial(labo.linear_loss, rows, whole, target[: share[0]], loss)
    return {COLUMNS: backward(of_columns, all_rows, columns), ROWS: backward(of_rows, rows, whole)}
