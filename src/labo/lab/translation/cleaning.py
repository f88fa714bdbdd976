"""Cleaning of sentence pairs, in this process or in several."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

from .prepared import Pair
from .text import Pipeline, TextOptions

RawPair = tuple[int, str, str]  # number of the language pair, raw source line, raw target line
_MOST_WORKERS = 256
_T = TypeVar("_T")
_R = TypeVar("_R")


class CleanPair(NamedTuple):
    """A sentence pair: cleaned, for the subword model, and raw, for scoring."""

    source: str
    target: str
    pair: int
    source_text: str
    target_text: str


def clean_pairs(
    text: TextOptions, pairs: Sequence[Pair], rows: Sequence[RawPair]
) -> list[CleanPair]:
    cleaned = []
    for number, source, target in rows:
        pipeline = pipeline_for(text, pairs[number].source, pairs[number].target)
        one, other = pipeline.source(source), pipeline.target(target)
        cleaned.append(CleanPair(one, other, number, source, target))
    return cleaned


@lru_cache(maxsize=64)
def pipeline_for(text: TextOptions, source: str, target: str) -> Pipeline:
    return Pipeline(text, source, target)


def chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def map_in_order(
    function: Callable[[_T], _R], items: Iterable[_T], workers: int
) -> Generator[_R, None, None]:
    """``map`` in several processes, which work a few items ahead.

    If it is closed or fails before its end, the processes are killed: their work is not wanted.
    Ctrl-C, which they get too, is left to this process.
    """
    workers = min(workers, _MOST_WORKERS)
    if workers == 1:
        yield from map(function, items)
        return
    pending: deque[Future[_R]] = deque()
    ignored = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, ignored)
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BaseException:
        for process in list((pool._processes or {}).values()):  # shutdown would wait for them
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
