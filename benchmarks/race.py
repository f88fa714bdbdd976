"""Timing on a noisy machine: contenders run in turn, and only ratios within a race count."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


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
