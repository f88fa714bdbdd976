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
from pathlib import Path
from typing import Any, Literal

from ..errors import LabError
from ..run.distributed import core_count, visible_gpus
from ..run.files import append
from ..run.launched import JOBS
from ..run.progress import notice

POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # between an interruption and the end of what does not heed it
_RETRIES = 10  # of a task of Ray
_RAY_MEMORY = 80 << 20  # bytes for objects, the least that Ray takes: tasks return a number


@dataclass(frozen=True)
class Job:
    """A command, and its place in the table that shows them all."""

    name: str  # what it is called in messages
    row: str  # where it is shown, together with ``column``
    column: str
    arguments: tuple[str, ...]  # of ``labo``
    log: Path  # the file that takes its output
    finished: Callable[[], bool]  # whether its work is done; asked before it is started
    status: Callable[[], str]  # what to show of it while it works and afterwards
    after: str | None = None  # the name of the job it needs, which is finished before it starts
    processes: int = 1  # how many ``torchrun`` starts; 1 is without it

    @property
    def launcher(self) -> tuple[str, ...]:
        """The modules of Python that start it, as arguments of ``python``."""
        several = ("--standalone", "--nproc-per-node", str(self.processes))
        torchrun = () if self.processes == 1 else ("-m", "torch.distributed.run", *several)
        return (*torchrun, "-m", "labo")


@dataclass(frozen=True)
class Report:
    """What became of a job."""

    job: Job
    event: Literal["started", "ended"]
    status: int = 0  # its exit status at the end; negative, the signal that killed it
    reason: str = ""  # why it failed, if that is not in its log


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
        self.waiting: list[Job] = []
        self.running: dict[int, tuple[Job, Any]] = {}  # slot -> a job and its process

    def submit(self, job: Job) -> None:
        """Take a job, which starts when there is room."""
        self.waiting.append(job)

    def poll(self) -> list[Report]:
        """What has happened since the last call."""
        reports = []
        for slot, (job, process) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[slot]
                reports.append(Report(job, "ended", process.returncode))
        for slot in range(self.jobs):
            if self.waiting and slot not in self.running:
                job = self.waiting.pop(0)
                self.start(job, slot)
                reports.append(Report(job, "started"))
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
        """End what is still running: as Ctrl-C would, then by force."""
        _end([process for _, process in self.running.values()])


# ------------------------------------------------------------------ Ray


def _execute(
    command: Sequence[str], log: str, environment: dict[str, str], folder: str, cores: int
) -> int | str:
    """The task: execute a command in a folder.

    It is sent by value: a worker need not import labo. It returns the exit status, or why the
    command cannot be executed. A killed process is an error.
    """
    import ray

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
        self.pending: dict[Any, Job] = {}  # the object that will be the status -> its job
        self.sizes: dict[str, int] = {}  # of the logs of jobs that have not started

    def submit(self, job: Job) -> None:
        append(job.log).close()
        self.sizes[job.name] = job.log.stat().st_size
        cores, gpus = self.threads * job.processes, job.processes if self.has_gpus else 0
        reference = self.task.options(num_cpus=cores, num_gpus=gpus).remote(
            (*job.launcher, *job.arguments),
            str(job.log.resolve()),
            {**_threads(self.threads), **self.settings},
            os.getcwd(),
            cores,
        )
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
            status = str(cause).partition("\n")[0]
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


Engine = LocalEngine | RayEngine
