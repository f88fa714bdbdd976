"""Devices and processes: gathering rows, batch norm over all of them, what to say if one ends."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import LabError, RequestError
from . import files
from .directory import Conditions, RunDirectory
from .launched import jobs_at_once, patience
from .lock import held

T = TypeVar("T")


def on_cpu() -> bool:
    """Whether there is no accelerator. With several processes accelerate must be told so."""
    return not torch.accelerator.is_available()


def core_count() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return chosen.split(",")[:count] if chosen else [str(number) for number in range(count)]


def device_name(device: torch.device) -> str:
    """What times and the last digits depend on: the GPU, or the processor.

    Of a processor with the instructions and threads that PyTorch uses, such as "Intel(R) Xeon(R)
    Processor, AVX512, 2 threads".
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    name = model[1] if model else platform.processor() or platform.machine()
    if device.type != "cpu":
        return name
    threads = torch.get_num_threads()
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {instructions}, {threads} thread{'s' if threads > 1 else ''}"


def note_conditions(run: RunDirectory, processes: int) -> None:
    """Add to ``conditions.json`` of a run where and how it is trained now.

    Two times are compared only if these are equal; see
    :func:`labo.lab.analysis.groups.Group.step_times`. A file that cannot be read is replaced.
    """
    now: dict[str, Any] = {
        "machine": platform.node(),
        "torch": str(torch.__version__),
        "jobs": jobs_at_once(),
        "threads": torch.get_num_threads(),
    }
    if processes > 1:
        now["processes"] = processes
    try:
        known = files.read_json(run.conditions_file, Conditions).launches
    except RequestError:
        known = []
    if now not in known:
        files.write_json(run.conditions_file, {"launches": [*known, now]})


@contextmanager
def owned(run: RunDirectory) -> Iterator[None]:
    """Own a run directory. The processes of a run are one owner: the first one holds the lock."""
    with ExitStack() as stack:
        once(run.refuse_links)
        once(lambda: stack.enter_context(held(run.path, patience())))
        yield


def once(make: Callable[[], T]) -> T:
    """What the first process makes, on every process; its error is raised on every one, too."""
    if not torch.distributed.is_initialized():
        return make()
    made: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            made = [make(), None]
        except (LabError, OSError) as error:
            made = [None, error]
    torch.distributed.broadcast_object_list(made)
    value, failure = made
    if failure is not None:
        raise failure
    return cast(T, value)


def free_memory() -> float:
    """Bytes of main memory that are available; infinity where the system does not tell."""
    information = Path("/proc/meminfo")
    if not information.is_file():
        return math.inf
    lines = information.read_text(encoding="utf-8").splitlines()
    free = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(free, math.inf)


def peak_memory() -> int:
    """The most memory this process has held so far, in bytes: of the GPU if it works on one."""
    if not on_cpu():
        return int(torch.accelerator.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux ru_maxrss includes the process that started this one
        lines = status.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


def make_accelerator(precision: str, **options: Any) -> Accelerator:
    """Devices and processes as the launcher says.

    Accelerators of a process share their precision. That of an earlier run is forgotten; its
    process group stays.
    """
    AcceleratorState._reset_state()
    return Accelerator(cpu=on_cpu(), mixed_precision=precision, **options)


def gather_rows(accelerator: Accelerator, rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of the processes; their numbers may differ."""
    if accelerator.num_processes == 1:
        return rows
    sizes = accelerator.gather(torch.tensor([len(rows)], device=accelerator.device)).tolist()
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = accelerator.gather(padded.to(accelerator.device)).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def in_step(count: int, processes: int, size: int) -> range:
    """Where the batches of a process begin if ``count`` samples are shared out evenly.

    The processes get as many batches, though their shares may differ by one sample. A process whose
    share has ended runs the model on any sample and drops the result: a model that is split over
    the processes needs all of them in every pass.
    """
    return range(0, -(-count // processes), size)


# What gloo, NCCL and the store say when another process is gone.
_GONE = re.compile(r"closed by peer|reset by peer|Broken pipe|connection.*(closed|lost)|NCCL", re.I)


def is_lost_process(error: Exception) -> bool:
    """Whether an error means that another process of the run has ended."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and bool(_GONE.search(str(error)))
    )


# ------------------------------------------------------------------ batch norm


class SynchronizedBatchNorm(nn.modules.batchnorm._BatchNorm):
    r"""Batch norm over the samples of all processes, on any device and backend.

    ``nn.SyncBatchNorm`` needs GPUs. Mean and variance are those of the whole batch,

    .. math:: \mu = \frac1N \sum_r \sum_i x_{ri}, \quad
              \sigma^2 = \frac1N \sum_r \sum_i (x_{ri} - \mu)^2,

    by one ``all_reduce`` each, through which the gradient flows. Inputs are (N, C, ...).
    """

    counted = True  # see nothing_counted

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm takes (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        from torch.distributed.nn.functional import all_reduce

        x = input.float()
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        real = float(self.counted)
        count = x.new_full((1,), x.numel() / x.shape[1] * real)
        total: Any = all_reduce(torch.cat([x.sum(dims) * real, count]))
        mean, size = total[:-1] / total[-1], total[-1].detach()
        centred = x - mean.view(shape)
        squares: Any = all_reduce(centred.square().sum(dims) * real)
        variance = squares / size
        with torch.no_grad():
            self._follow(mean, variance * size / (size - 1).clamp(min=1))
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def has_batchnorm(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def synchronize_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with its batch norm taken over all processes; parameters are shared."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        new = SynchronizedBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
        )
        new._parameters, new._buffers = module._parameters, module._buffers
        new.training = module.training
        return new
    for name, child in module.named_children():
        setattr(module, name, synchronize_batchnorm(child, device))
    return module


def is_synchronized(module: nn.Module) -> bool:
    kinds = (SynchronizedBatchNorm, nn.SyncBatchNorm)
    return any(isinstance(part, kinds) for part in module.modules())


@contextmanager
def nothing_counted(nothing: bool) -> Iterator[None]:
    """Within, if ``nothing``, the samples of this process do not count in batch norm.

    A process without a share of a batch runs the model on a sample whose loss is ignored, because
    all processes must take part in every step.
    """
    SynchronizedBatchNorm.counted = not nothing
    try:
        yield
    finally:
        SynchronizedBatchNorm.counted = True
