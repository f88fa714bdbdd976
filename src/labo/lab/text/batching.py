"""Batches of sequences of like length, and small helpers of tasks on text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..run.seeds import permutation

if TYPE_CHECKING:
    from typing_extensions import Self


TOKENS_AT_ONCE = 4096  # of a batch that is scored, padding included
_R = TypeVar("_R")


@dataclass(frozen=True)
class Inputs:
    """Tensors that a model reads, in the order of its arguments; None if it needs one not."""

    def tensors(self) -> dict[str, Tensor | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        moved = {
            name: None if tensor is None else tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors().items()
        }
        return replace(self, **moved)


def training_batches(lengths: Tensor, fits: Tensor, limit: int, seed: int) -> list[Tensor]:
    """Sequences of like length together, as many as fit in a batch with their padding.

    Args:
        lengths: (N,) of each sequence, in tokens.
        fits: (N,) whether a sequence is used at all; at least one must be.
        limit: sequences x longest sequence of a batch, at most.
        seed: decides which sequences of one length are together.
    """
    # At random first, so that sequences of one length are not in the order of the corpus.
    order = permutation(seed, 0, len(lengths), stream="batches")
    order = order[fits[order]]
    order = order[lengths[order].argsort(stable=True)]
    return [torch.tensor(batch) for batch in grouped(order.tolist(), lengths.tolist(), limit)]


def grouped(order: Iterable[int], lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Sequences sorted by their lengths, as many to a batch as fit into ``limit`` with padding.

    A sequence that is longer than the limit is alone.

    Example:
        >>> list(grouped([1, 3, 2, 0], [3, 9, 4, 8], 18))
        [[1, 3], [2, 0]]
    """
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if batch and (len(batch) + 1) * longest > limit:
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def by_length(
    lengths: Sequence[int], limit: int = TOKENS_AT_ONCE, *, longest_first: bool = False
) -> Iterator[list[int]]:
    """The indices of sequences of like length in batches, see :func:`grouped`."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=longest_first)
    return grouped(order, lengths, limit)


def in_batches(
    function: Callable[[list[int]], Iterable[_R]],
    lengths: Sequence[int],
    limit: int = TOKENS_AT_ONCE,
    *,
    longest_first: bool = False,
    advance: Callable[[int], object] | None = None,
) -> list[_R]:
    """What a function of the indices of a batch gives for each sequence, in their order.

    Batches are those of :func:`by_length`; ``advance`` is called with the size of each.
    """
    results: dict[int, _R] = {}
    for batch in by_length(lengths, limit, longest_first=longest_first):
        results |= zip(batch, function(batch), strict=True)
        if advance is not None:
            advance(len(batch))
    return [results[index] for index in range(len(lengths))]


def padded_rows(rows: Sequence[npt.ArrayLike], filler: int) -> Tensor:
    """(N, longest) token ids, filled up on the right."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    ids = np.full((len(arrays), max(map(len, arrays))), filler, dtype=np.int64)
    for row, values in zip(ids, arrays, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(ids)


def text_digest(text: str) -> str:
    """16 hex digits that name a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounded(values: Sequence[float]) -> list[float]:
    """Values with six significant digits, for records."""
    return [float(f"{value:.6g}") for value in values]
