"""Batches of sequences of like length, and small helpers of tasks on text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..run.seeds import permutation, uniforms
from ..tasks import Batch


def batches_by_length(lengths: Tensor, fits: Tensor, limit: int, seed: int) -> list[Tensor]:
    """Sequences of like length together, as many as fit in a batch with their padding.

    Args:
        lengths: (N,) of each sequence, in tokens.
        fits: (N,) whether a sequence is used at all; at least one must be.
        limit: sequences x longest sequence of a batch, at most.
        seed: decides which sequences of one length are together.

    Returns:
        The indices of the sequences of each batch, shortest sequences first.
    """
    # At random first, so that sequences of one length are not in the order of the corpus.
    order = permutation(seed, 0, len(lengths), stream="batches")
    order = order[fits[order]]
    order = order[lengths[order].argsort(stable=True)]
    batches, first = [], 0
    sizes = lengths[order].tolist()
    for position, size in enumerate(sizes):  # ascending: the last one of a batch is its longest
        if (position + 1 - first) * size > limit:
            batches.append(order[first:position])
            first = position
    batches.append(order[first:])
    return batches


def token_draws(seed: int, batch: Batch, rows: Tensor, stream: str) -> Tensor:
    """Random numbers in [0, 1) for tokens: functions of the sample, its epoch and the position.

    Args:
        seed: of the run.
        batch: the samples.
        rows: (N, T) bool, the tokens.
        stream: what the numbers are for.
    """
    draws = uniforms(seed, batch.epoch, batch.index, rows.shape[1], stream=stream)
    return draws.to(rows.device)[rows]


def text_digest(text: str) -> str:
    """16 hex digits that name a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounded(values: Sequence[float]) -> list[float]:
    """Values with six significant digits, for records."""
    return [float(f"{value:.6g}") for value in values]


def in_order(numbered: Sequence[tuple[int, Any]]) -> list[Any]:
    """The items of (number, item) pairs in the order of their numbers."""
    return [item for _, item in sorted(numbered, key=lambda pair: pair[0])]
