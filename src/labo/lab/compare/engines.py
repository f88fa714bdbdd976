"""Where the commands of a comparison are at work: one interface, two engines.

- ``local``: processes of this machine, each with its share of the cores or GPUs.
- ``ray``: tasks of a Ray cluster. All machines must see the folder of the runs under one path, and
  have labo installed. A task that is lost with its node, or whose process was killed, is started
  again elsewhere, and the run continues from its checkpoint.

An engine executes the commands that a user would type, ``labo train`` and ``labo evaluate``. They
end with it, however it ends; see :mod:`labo.lab.run.launched`.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ..errors import LabError, RequestError
from ..run.distributed import core_count, visible_gpus
from ..run.files import append
from ..run.launched import JOBS
from ..run.progress import notice

ENGINES = ("local", "ray")
POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # between an interruption and the end of what does not heed it
_ANSWER_SECONDS = 5.0
_RETRIES = 10  # of a task of Ray
_RAY_MEMORY = 80 << 20  # bytes for objects, the least that Ray takes: tasks return a number


@dataclass(frozen=True)
class Job:
    """A command, and its place in the table that shows them all.

    Attributes:
        name: what it is called in messages.
        row: where it is shown, together with ``column``.
        arguments: of ``labo``.
        log: the file that takes its output.
        finished: whether its work is done; asked before it is started.
        status: what to show of it while it works and afterwards.
        after: the name of the job it needs; without that one it cannot start.
        processes: how many ``torchrun`` starts; 1 is without it.
    """

    name: str
    row: str
    column: str
    arguments: tuple[str, ...]
    log: Path
    finished: Callable[[], bool]
    status: Callable[[], str]
    after: str | None = None
    processes: int = 1

    @property
    def launcher(self) -> tuple[str, ...]:
        """The modules of Python that start it, as arguments of ``python``."""
        several = ("--standalone", "--nproc-per-node", str(self.processes))
        torchrun = () if self.processes == 1 else ("-m", "torch.distributed.run", *several)
        return (*torchrun, "-m", "labo")


@dataclass(frozen=True)
class Report:
    """What became of a job.

    Attributes:
        job: which one.
        event: it was started; it ended; or it was given up, for the job it needs failed.
        status: its exit status at the end; negative, the signal that killed it.
        reason: why it failed, if that is not in its log.
    """

    job: Job
    event: Literal["started", "ended", "given up"]
    status: int = 0
    reason: str = ""


class Engine(Protocol):
    """What carries out jobs."""

    def submit(self, job: Job, after: str | None) -> None:
        """Take a job. It starts when there is room, and when the job ``after`` has succeeded."""

    def poll(self) -> list[Report]:
        """What has happened since the last call."""

    def stop(self) -> None:
        """End what is still running: as Ctrl-C would, then by force."""


@dataclass(frozen=True)
class Setup:
    """How jobs are carried out.

    Attributes:
        engine: one of ``ENGINES``.
        address: of a Ray cluster, HOST:PORT, or "auto" for the one of this machine. By default Ray
            is started on this machine.
        jobs: how many at once; by default one per GPU, or one per core. Ray decides by itself.
        processes: of each run.
        threads: of each process; by default the cores are shared out, and 1 with Ray.
    """

    engine: str = "local"
    address: str | None = None
    jobs: int | None = None
    processes: int = 1
    threads: int | None = None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            RequestError: an option is wrong, Ray is not installed, or nobody answers.
        """
        if self.engine not in ENGINES:
            raise RequestError(f"--engine {self.engine}: there are {' and '.join(ENGINES)}")
        if self.jobs is not None and self.jobs < 1:
            raise RequestError(f"--jobs {self.jobs}: at least one job must run")
        if self.processes < 1:
            raise RequestError(f"--processes {self.processes}: a run has at least one process")
        if self.threads is not None and self.threads < 1:
            raise RequestError(f"--threads {self.threads}: a process has at least one thread")
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
        if self.engine == "ray":
            return RayEngine(self.address, self.threads or 1, self.processes, folder)
        return LocalEngine(*self.share(work))

    def share(self, work: int) -> tuple[int, int]:
        """How many jobs run at once on this machine, and with how many threads per process."""
        cores = core_count()
        gpus = len(visible_gpus()) or (1 if torch.accelerator.is_available() else 0)
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


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


def _start(arguments: Sequence[str], log: str, environment: dict[str, str]) -> Any:
    """Start Python in a process that ends with this one."""
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,  # closed when this process ends
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C is for us, to be passed on once
        )


def _end(processes: Sequence[Any]) -> None:
    """End processes: as Ctrl-C would, then by force."""
    try:
        for process in processes:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
    finally:  # even if interrupted once more
        for process in processes:
            process.kill()
            process.wait()


class LocalEngine:
    """Processes of this machine; so many at once, so many threads each."""

    def __init__(self, jobs: int, threads: int) -> None:
        self.jobs, self.threads = jobs, threads
        self.waiting: list[tuple[Job, str | None]] = []
        self.running: dict[int, tuple[Job, Any]] = {}  # slot -> a job and its process
        self.ended: dict[str, bool] = {}  # name -> whether it succeeded

    def submit(self, job: Job, after: str | None) -> None:
        self.waiting.append((job, after))

    def poll(self) -> list[Report]:
        reports = []
        for slot, (job, process) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[slot]
                self.ended[job.name] = process.returncode == 0
                reports.append(Report(job, "ended", process.returncode))
        free = [slot for slot in range(self.jobs) if slot not in self.running]
        waiting, self.waiting = self.waiting, []
        for job, after in waiting:
            ready = after is None or self.ended.get(after)
            if ready is False:
                self.ended[job.name] = False
                reports.append(Report(job, "given up"))
            elif ready and free:
                self.start(job, free.pop(0))
                reports.append(Report(job, "started"))
            else:
                self.waiting.append((job, after))
        return reports

    def start(self, job: Job, slot: int) -> None:
        environment = {**_threads(self.threads), JOBS: str(self.jobs)}
        if gpus := visible_gpus():
            first = slot * job.processes
            chosen = [gpus[(first + i) % len(gpus)] for i in range(job.processes)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(chosen))
        command = (*job.launcher, *job.arguments)
        self.running[slot] = job, _start(command, str(job.log), environment)

    def stop(self) -> None:
        _end([process for _, process in self.running.values()])


# ------------------------------------------------------------------ Ray


def _execute(
    needed: int | str | None,
    command: Sequence[str],
    log: str,
    environment: dict[str, str],
    folder: str,
    cores: int,
) -> int | str | None:
    """The task: execute a command in a folder, as soon as the needed one has returned its status.

    It is sent by value: a worker need not import labo.

    Returns:
        The exit status, or why it cannot be executed; None if the needed one failed.

    Raises:
        ChildProcessError: the process was killed.
    """
    import ray

    if needed is None or needed:
        return None
    host = socket.gethostname()
    if not os.path.isdir(folder) or not os.path.isfile(log):
        return f"{host} does not see {log}: all machines of the cluster must, under the same path"
    os.chdir(folder)
    own = ray.get_runtime_context().get_node_id()
    room = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == own)
    with open(log, "a", encoding="utf-8") as file:
        print(f"on {host}, process {os.getpid()} of Ray:", file=file)
    process = _start(command, log, {**environment, "LABO_JOBS": str(max(int(room // cores), 1))})
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:  # the task was cancelled
            _end([process])
    if process.returncode < 0:
        raise ChildProcessError(f"ended by signal {-process.returncode}")
    return int(process.returncode)


class RayEngine:
    """Tasks of a Ray cluster. What Ray has to say is in ``logs/ray.log`` of the folder."""

    def __init__(self, address: str | None, threads: int, processes: int, folder: Path) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send them
        import ray

        self.ray, self.threads = ray, threads
        cores = threads * processes
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        own = {
            "num_cpus": max(core_count(), cores),
            "object_store_memory": _RAY_MEMORY,
            "include_dashboard": False,
        }
        options: dict[str, Any] = own if address == "local" else {}
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        # Ray prints what happens to its nodes; the output is for the runs and the table.
        self.stack = ExitStack()
        log = io.TextIOWrapper(append(folder / "logs" / "ray.log"), line_buffering=True)
        self.stack.enter_context(redirect_stdout(self.stack.enter_context(log)))
        terminated = signal.getsignal(signal.SIGTERM)  # ray takes it
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR", **options)
            signal.signal(signal.SIGTERM, terminated)
        except (ConnectionError, RuntimeError, ValueError) as error:
            self.stack.close()
            first = str(error).partition("\n")[0]
            raise LabError(f"Ray cannot be used at {address}: {first}") from error
        self.has_gpus = bool(ray.cluster_resources().get("GPU"))
        most = max((node["Resources"].get("CPU", 0) for node in ray.nodes()), default=0)
        if most < cores:
            notice(f"no node of the cluster has {cores} cores: the runs wait until one has")
        self.task = ray.remote(max_retries=_RETRIES, retry_exceptions=[ChildProcessError])(_execute)
        self.settings = {k: v for k, v in os.environ.items() if k.startswith("LABO_")}
        self.references: dict[str, Any] = {}  # name -> the object that will be its status
        self.pending: dict[Any, Job] = {}
        self.sizes: dict[str, int] = {}  # of the logs of jobs that have not started
        self.failed: set[str] = set()

    def submit(self, job: Job, after: str | None) -> None:
        append(job.log).close()
        self.sizes[job.name] = job.log.stat().st_size
        cores, gpus = self.threads * job.processes, job.processes if self.has_gpus else 0
        reference = self.task.options(num_cpus=cores, num_gpus=gpus).remote(
            0 if after is None else self.references[after],
            (*job.launcher, *job.arguments),
            str(job.log.resolve()),
            {**_threads(self.threads), **self.settings},
            os.getcwd(),
            cores,
        )
        self.references[job.name] = reference
        self.pending[reference] = job

    def poll(self) -> list[Report]:
        done, _ = self.ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0)
        reports = []
        for reference in done:
            job = self.pending.pop(reference)
            reports += [*self.started(job), self.ended(reference, job)]
        return reports + [report for job in self.pending.values() for report in self.started(job)]

    def started(self, job: Job) -> list[Report]:
        """That a job has started, once: its log has grown."""
        if self.sizes.get(job.name) in (None, job.log.stat().st_size):
            return []
        del self.sizes[job.name]
        return [Report(job, "started")]

    def ended(self, reference: Any, job: Job) -> Report:
        try:
            status = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error  # that of the command, or of Ray itself
            status = None if job.after in self.failed else str(cause).partition("\n")[0]
        if status != 0:
            self.failed.add(job.name)
        if status is None:
            return Report(job, "given up")
        if isinstance(status, str):
            return Report(job, "ended", 1, status)
        return Report(job, "ended", status)

    def stop(self) -> None:
        try:
            for reference in self.pending:
                self.ray.cancel(reference)
            if self.pending:
                several = list(self.pending)
                self.ray.wait(several, num_returns=len(several), timeout=_GRACE_SECONDS + 1)
        finally:
            self.ray.shutdown()
            self.stack.close()
