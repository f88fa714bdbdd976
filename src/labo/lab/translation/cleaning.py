"""Cleaning of sentence pairs, in this process or in several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def map_in_order(function: Callable[[_T], _R], items: Iterable[_T], workers: int) -> Iterator[_R]:
    """``map`` in several processes, which work a few items ahead."""
    workers = min(workers, _MOST_WORKERS)
    if workers == 1:
        yield from map(function, items)
        return
    pending: deque[Future[_R]] = deque()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
