"""Documents cut and packed into blocks of tokens.

A document of n tokens gives n - 1 pairs of an input and the token that follows it. It is cut where
it is longer than a block, so that each pair is in exactly one piece. The pieces are packed into
blocks, longest first, each into the fullest block that has room for it (best fit; Ding et al. 2024,
"Fewer Truncations Improve Language Modeling"). No piece is cut to fill a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..run.seeds import permutation

__all__ = ["Packing", "best_fit", "cut", "pack"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Blocks of pieces of documents. Block i has the pieces starts[i] .. starts[i + 1] - 1.

    Attributes:
        document: (P,) which document a piece is of.
        first: (P,) the index in the document of its first input token.
        length: (P,) its pairs of an input and the token that follows.
        starts: (B + 1,).
    """

    document: Ints
    first: Ints
    length: Ints
    starts: Ints

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.starts) - 1

    def pieces(self, block: int) -> range:
        """The pieces of a block."""
        return range(int(self.starts[block]), int(self.starts[block + 1]))

    def sums(self, values: npt.NDArray[Any]) -> Ints:
        """(B,) the sum over the pieces of each block of values (P,)."""
        total = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return total[self.starts[1:]] - total[self.starts[:-1]]


def cut(lengths: Ints, block: int, *, whole: bool) -> tuple[Ints, Ints, Ints]:
    """The pieces of documents.

    Args:
        lengths: (N,) tokens of each document.
        block: the most pairs of a piece.
        whole: leave out the documents that are longer, instead of cutting them.

    Returns:
        For each piece its document, the index of its first input token, and its pairs.

    Example:
        >>> cut(np.array([6, 3]), 4, whole=False)  # 5 pairs and 2 pairs
        (array([0, 0, 1]), array([0, 4, 0]), array([4, 1, 2]))
    """
    pairs = np.maximum(lengths.astype(np.int64) - 1, 0)
    if whole:
        pairs = np.where(pairs <= block, pairs, 0)
    count = -(-pairs // block)
    document = np.repeat(np.arange(len(lengths)), count)
    number = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    first = number * block
    return document, first, np.minimum(pairs[document] - first, block)


def best_fit(lengths: Ints, block: int, seed: int) -> tuple[Ints, Ints]:
    """Which pieces share a block.

    Args:
        lengths: (P,) of the pieces, none above ``block``.
        block: the most of a block.
        seed: decides among pieces of one length.

    Returns:
        (P,) the pieces, block by block; and (B + 1,) where each block begins among them.

    Example:
        >>> order, starts = best_fit(np.array([5, 3, 2, 6]), 8, seed=0)
        >>> [sorted(order[a:b].tolist()) for a, b in zip(starts, starts[1:])]
        [[2, 3], [0, 1]]
    """
    shuffled = permutation(seed, 0, len(lengths), stream="packing").numpy()
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    block_of = np.empty(len(lengths), dtype=np.int64)
    open_blocks: list[list[int]] = [[] for _ in range(block + 1)]  # by the room they have left
    rooms = 0  # bit r is set if a block with room r is open
    blocks = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = open_blocks[room].pop()
            if not open_blocks[room]:
                rooms &= ~(1 << room)
        else:
            chosen, room = blocks, block
            blocks += 1
        block_of[piece] = chosen
        room -= length
        if room:
            open_blocks[room].append(chosen)
            rooms |= 1 << room
    arranged = order[np.argsort(block_of[order], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(block_of, minlength=blocks))])
    return arranged, starts


def pack(lengths: Ints, block: int, seed: int, *, whole: bool, share: bool) -> Packing:
    """Cut documents and pack the pieces.

    Args:
        lengths: (N,) tokens of each document.
        block: the most pairs of a block.
        seed: decides which pieces are together.
        whole: leave out the documents that are longer than a block, instead of cutting them.
        share: whether several pieces may share a block.
    """
    document, first, length = cut(lengths, block, whole=whole)
    if share:
        order, starts = best_fit(length, block, seed)
    else:
        order, starts = np.arange(len(length)), np.arange(len(length) + 1)
    return Packing(document[order], first[order], length[order], starts)
