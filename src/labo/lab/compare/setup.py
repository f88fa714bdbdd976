"""The options of ``labo compare``: what is compared, and where it is at work; without torch."""

from __future__ import annotations

import socket
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..command_options import Separated
from ..config import Names, Section
from ..errors import RequestError

if TYPE_CHECKING:
    from .engines import Engine

_ANSWER_SECONDS = 5.0
_option = partial(Field, json_schema_extra={"panel": "Where the runs are at work"})


class Request(Section):
    """What is compared."""

    methods: Separated = Field(
        ("base", "ls", "labo"),
        description="Rows of the table, each with settings of its own, such as "
        "base,ls,labo:tau=1.05:optim.lr=0.2. Default: base,ls,labo.",
    )
    seeds: int = Field(
        3, ge=1, description="Runs per method. They use seeds 0, 1, 2, ... Default: 3."
    )
    first_seed: int = Field(0, ge=0, description="The smallest seed. Default: 0.")
    grid: Names = Field(
        (),
        description="Values of a hyper-parameter, such as labo.tau=1.15,1.25, or with equal "
        "ratios, such as optim.lr=0.01..1@6. The best one on the validation split is reported. "
        "Can be repeated.",
    )
    select_seeds: int | None = Field(
        None,
        description="Seeds that select from the grid; only the selected values are run with the "
        "others. Default: all.",
    )
    extend: bool = Field(
        False, description="Add values to a grid while the best one is at its edge."
    )
    teacher: str | None = Field(
        None,
        description="Run directory of the teacher of kd. Default: base with the same seed.",
    )


class Setup(Section):
    """How jobs are carried out."""

    engine: Literal["local", "ray"] = _option(
        default="local",
        description="What runs them: local (this machine, the default) or ray (a cluster).",
    )
    address: str | None = _option(
        default=None,
        description="Ray cluster, HOST:PORT or auto. Default: Ray is started on this machine.",
    )
    jobs: int | None = _option(
        default=None,
        ge=1,
        description="Runs at the same time. Default: one per GPU, or per core.",
    )
    processes: int = _option(
        default=1, ge=1, description="Processes of each run, started by torchrun. Default: 1."
    )
    threads: int | None = _option(
        default=None,
        ge=1,
        description="Threads of each process. Default: the cores are shared out; with ray, 1.",
    )

    def check(self) -> None:
        """Refuse what cannot be: options of the other engine, Ray that is not there."""
        if self.engine == "local":
            if self.address is not None:
                raise RequestError("--address is that of a Ray cluster: add --engine ray")
            return
        if self.jobs is not None:
            raise RequestError(
                "--jobs: Ray runs as many at once as its nodes have cores or GPUs for; --threads "
                "and --processes say how many a run takes"
            )
        if find_spec("ray") is None:
            raise RequestError("--engine ray needs Ray: pip install 'torch-labo[ray]'")
        if self.address not in (None, "auto"):
            _check_answer(self.address)

    def open(self, work: int, folder: Path) -> Engine:
        """The engine for so many jobs, in a folder of runs."""
        from .engines import LocalEngine, RayEngine

        if self.engine == "ray":
            return RayEngine(self.address, self.threads or 1, self.processes, folder)
        return LocalEngine(*self.share(work))

    def share(self, work: int) -> tuple[int, int]:
        """How many jobs run at once on this machine, and with how many threads per process."""
        from ..run import distributed

        cores = distributed.core_count()
        gpus = len(distributed.visible_gpus()) or (0 if distributed.on_cpu() else 1)
        room = max((gpus or cores) // self.processes, 1)
        at_once = max(min(self.jobs or room, work), 1)
        return at_once, self.threads or max(cores // (at_once * self.processes), 1)


def _check_answer(address: str) -> None:
    """Refuse an address that is none, or where nobody answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise RequestError(f"--address {address}: write HOST:PORT, as in node0:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"--address {address}: nobody answers ({error}); `ray start --head` starts a cluster"
        ) from error
