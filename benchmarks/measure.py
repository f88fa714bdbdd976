"""How time and memory are measured.

The machine is noisy: contenders run in turn, and only ratios within a race count. Extra memory is
the peak of a fresh process beyond the memory it held before and the gradients that remain: the
logits and everything computed from them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from .contenders import Work, distillation, linear_losses

_T = TypeVar("_T")


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def race(
    contenders: Mapping[str, Any], rounds: int, measure: Callable[[Any], float] = seconds_of
) -> dict[str, float]:
    """Median seconds of each contender, over rounds in which each runs once, in turn.

    A temporary load on the machine affects all contenders, and none always has the same before it.
    One round before the first is not counted: it compiles, allocates and fills caches. ``measure``
    runs a contender and says how many seconds count.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # so that the collections before each turn look at nothing older than the race
    try:
        for round_ in range(rounds + 1):
            for name in names if round_ % 2 else reversed(names):
                gc.collect()
                seconds = measure(contenders[name])
                if round_:
                    times[name].append(seconds)
    finally:
        gc.unfreeze()
    return {name: statistics.median(seconds) for name, seconds in times.items()}


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
