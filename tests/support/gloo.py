"""Processes that are joined by gloo, for tests: started once and given one function at a time, or
started for one function in the environment of torchrun."""

from __future__ import annotations

import datetime
import importlib
import inspect
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

_PATIENCE = 120  # seconds, for a whole task; a collective that waits in vain fails sooner


class World:
    """What a function sees of the processes it runs on.

    Attributes:
        rank: of this process.
        size: how many take part.
        group: their process group.
        mesh: the same as a mesh.
    """

    def __init__(self, rank: int, size: int, group: Any, mesh: DeviceMesh) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.mesh = mesh

    def share(self, x: torch.Tensor, dim: int, sizes: list[int] | None = None) -> torch.Tensor:
        """The part of this process: as DTensor cuts, or parts of the given sizes."""
        if sizes is not None:
            return x.split(sizes, dim)[self.rank]
        parts = x.chunk(self.size, dim)
        return parts[self.rank] if self.rank < len(parts) else x.narrow(dim, 0, 0)

    def placed(self, x: torch.Tensor, placement: Any) -> Any:
        """The tensor as a DTensor of these processes."""
        return distribute_tensor(x, self.mesh, [placement])


def _serve(rank: int, most: int, store: str, tasks: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=most,
        timeout=datetime.timedelta(seconds=60),
    )
    worlds = {}
    for size in range(2, most + 1):
        group = dist.new_group(list(range(size)))
        worlds[size] = World(rank, size, group, DeviceMesh("cpu", list(range(size))))
    while True:
        number, function, size, args = tasks.get()
        torch.manual_seed(0)
        try:
            answers.put((number, rank, function(worlds[size], *args), None))
        except BaseException:
            answers.put((number, rank, None, traceback.format_exc()))


class Processes:
    """``Processes(3, folder).run(2, f, *args)``: f(world, *args) on two of three processes."""

    def __init__(self, most: int, folder: Path) -> None:
        self.number = 0  # of the task
        context = multiprocessing.get_context("spawn")
        self.answers = context.Queue()
        self.tasks = [context.Queue() for _ in range(most)]
        self.workers = [
            context.Process(
                target=_serve,
                args=(rank, most, str(folder / "store"), self.tasks[rank], self.answers),
                daemon=True,
            )
            for rank in range(most)
        ]
        for worker in self.workers:
            worker.start()

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each process returns; fails with the traceback of the first that failed."""
        self.number += 1
        for tasks in self.tasks[:size]:
            tasks.put((self.number, function, size, args))
        # The first task also waits for the processes to start and import.
        patience = _PATIENCE if self.number > 1 else 4 * _PATIENCE
        found = {}
        while len(found) < size:
            number, rank, result, problem = self.answers.get(timeout=patience)
            if number != self.number:  # of a task that failed elsewhere
                continue
            # At once: the others may wait for this process in vain.
            assert problem is None, f"process {rank}:\n{problem}"
            found[rank] = result
        return [found[rank] for rank in range(size)]

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()


def on_processes(*sizes: int) -> Callable[[Callable[..., None]], Any]:
    """A test that runs on so many processes at once; its first argument is the World of each."""

    def decorate(case: Callable[..., None]) -> Any:
        def test(processes: Processes, size: int, **arguments: Any) -> None:
            processes.run(size, _run_case, case.__module__, case.__name__, arguments)

        names = ("processes", "size", *list(inspect.signature(case).parameters)[1:])
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = case.__name__, case.__doc__, case.__module__
        test.case = case  # type: ignore[attr-defined]
        return pytest.mark.parametrize("size", sizes)(test)

    return decorate


def _run_case(world: World, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).case(world, **arguments)


def launch(size: int, function: Callable[..., None], *args: Any) -> None:
    """``function(rank, *args)`` in new processes, with what torchrun tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_launched, (size, port, function, args), nprocs=size)


def _launched(
    rank: int, size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    torch.set_num_threads(1)
    function(rank, *args)
    dist.destroy_process_group()
