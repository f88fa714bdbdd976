"""Extra peak memory of one contender, in a fresh process: ``python -m benchmarks.memory``.

Extra memory is the peak of the process beyond the memory it held before and the gradients that
remain: the logits and everything computed from them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch

from .contenders import Work, distillation, linear_losses


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _work(name: str, rows: int, width: int, classes: int) -> Work:
    for contenders in (linear_losses, distillation):
        found = contenders(rows, width, classes, names=(name,))
        if found:
            return found[name]
    raise SystemExit(f"no contender {name}")


def extra_at_peak(run: Callable[[], object]) -> int:
    """Extra bytes of this process at the peak of a call."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def measure(name: str, rows: int, width: int, classes: int) -> int:
    """Extra bytes at the peak of one forward + backward, in this process."""
    # Once at a tiny size: libraries, thread pools and compiled code are not measured.
    _work(name, 8, width, 64)()
    work = _work(name, rows, width, classes)
    if "compiled" in name:
        work()
    return max(0, extra_at_peak(work) - 4 * width * (rows + classes))


def in_fresh_process(name: str, rows: int, width: int, classes: int) -> int:
    """The same in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory", name, *map(str, (rows, width, classes))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(run.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    for size in ("rows", "width", "classes"):
        parser.add_argument(size, type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    print(measure(arguments.name, arguments.rows, arguments.width, arguments.classes))
