"""``benchmarks.gpu`` on a device that computes nothing; run as a script, prints the rows as JSON.

The device has memory for 16 GB: what takes more raises as CUDA does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["LABO_CHECK_KERNELS"] = "0"  # there are no results to compare
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from benchmarks import gpu

from fake_device import fake_device

MEMORY = 16 << 30


def main() -> None:
    with fake_device(1 << 20) as count:
        count.read = 1  # the count of targets that Liger reads
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch.cuda.synchronize = lambda: _limit(count.peak)
        torch.cuda.memory_allocated = lambda: 0
        torch.cuda.max_memory_allocated = lambda: count.peak
        torch.cuda.reset_peak_memory_stats = torch.cuda.empty_cache = lambda: count.given()
        gpu.race = lambda work, rounds: dict.fromkeys(work, 1.0)
        rows = list(gpu.benchmark("cuda", smoke=False, compiled=False))
    json.dump(rows, sys.stdout)


def _limit(peak: int) -> None:
    if peak > MEMORY:
        raise torch.OutOfMemoryError


if __name__ == "__main__":
    main()
