"""Timing on a noisy machine: contenders run in turn, and only ratios within a race count."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping


def race(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender, over rounds in which each runs once, in turn.

    A temporary load on the machine affects all contenders. One round before the first is not
    counted: it compiles, allocates and fills caches.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()  # so that the collections before each turn look at nothing older than the race
    try:
        for round_ in range(rounds + 1):
            for name, contender in contenders.items():
                gc.collect()
                start = time.perf_counter()
                contender()
                if round_:
                    times[name].append(time.perf_counter() - start)
    finally:
        gc.unfreeze()
    return {name: statistics.median(seconds) for name, seconds in times.items()}
