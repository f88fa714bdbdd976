"""Extra peak memory of one contender, in a fresh process.

Extra memory is the peak of the process beyond the memory it held before and the gradients that
remain: the logits and everything computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

from .contenders import Work, distillation, linear_losses

_T = TypeVar("_T")


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _work(name: str, rows: int, width: int, classes: int) -> Work:
    for contenders in (linear_losses, distillation):
        found = contenders(rows, width, classes, names=(name,))
        if found:
            return found[name]
    raise ValueError(f"no contender {name}")


def extra_at_peak(run: Callable[[], object]) -> int:
    """Extra bytes of this process at the peak of a call."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def extra_bytes(name: str, rows: int, width: int, classes: int) -> int:
    """Extra bytes at the peak of one forward + backward, in this process."""
    # Once at a tiny size: libraries, thread pools and compiled code are not measured.
    _work(name, 8, width, 64)()
    work = _work(name, rows, width, classes)
    if "compiled" in name:
        work()
    return max(0, extra_at_peak(work) - 4 * width * (rows + classes))


def in_fresh_process(measure: Callable[..., _T], *arguments: object) -> _T:
    """What a function returns in a new process with two threads."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (2,)) as process:
        return process.submit(measure, *arguments).result()
