"""Documents cut and packed into blocks of tokens.

A document of n tokens gives n - 1 pairs of an input and the token that follows it. It is cut where
it is longer than a block, so that each pair is in exactly one piece. The pieces are packed into
blocks, longest first, each into the fullest block that has room for it (best fit; Ding et al. 2024,
"Fewer Truncations Improve Language Modeling"). No piece is cut to fill a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..run.seeds import permutation
from ..text.arrow import IGNORED
from ..text.batching import TOKENS_AT_ONCE, padded_rows
from ..text.head import Head
from .model import LanguageModel

_R = TypeVar("_R")

Ints = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """A stretch of a document: its number, the first input token, and so many pairs."""

    document: int
    first: int
    length: int


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

    def pieces(self, block: int) -> Iterator[Piece]:
        """The pieces of a block."""
        here = slice(int(self.starts[block]), int(self.starts[block + 1]))
        columns = (column[here].tolist() for column in (self.document, self.first, self.length))
        return map(Piece, *columns)

    def block_lengths(self) -> Ints:
        """(B,) the pairs of each block."""
        total = np.concatenate([[0], np.cumsum(self.length, dtype=np.int64)])
        return total[self.starts[1:]] - total[self.starts[:-1]]


def cut(lengths: Ints, block: int, *, whole: bool) -> tuple[Ints, Ints, Ints]:
    """The document, first input token and pairs of each piece of documents of so many tokens.

    A piece has ``block`` pairs at most. Longer documents are cut, or left out if pieces are
    ``whole``.

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
    """(P,) the pieces, block by block; and (B + 1,) where each block begins among them.

    The seed decides among pieces of one length, none of which is above ``block``.

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
    """Cut documents and pack the pieces; ``share``: several of them may be in a block."""
    document, first, length = cut(lengths, block, whole=whole)
    if share:
        order, starts = best_fit(length, block, seed)
    else:
        order, starts = np.arange(len(length)), np.arange(len(length) + 1)
    return Packing(document[order], first[order], length[order], starts)


@torch.inference_mode()
def by_pieces(
    model: LanguageModel,
    lengths: Ints,
    block: int,
    read: Callable[[int, int, int], tuple[npt.ArrayLike, npt.ArrayLike]],
    result: Callable[[Head, Tensor], Sequence[_R]],
) -> list[list[_R]]:
    """The results of the pieces of each document, in their order.

    Args:
        model: the model.
        lengths: (N,) tokens of each document.
        block: the most tokens that the model sees at once.
        read: the ids of a piece of a document (its number, first token and length), and the labels
            of the tokens that follow them.
        result: of each row of a batch, from states (n, T, D) with the output layer and the labels
            (n, T).
    """
    columns = (column.tolist() for column in cut(lengths, block, whole=False))
    pieces = sorted(map(Piece, *columns), key=lambda piece: piece.length)
    at_once = max(1, TOKENS_AT_ONCE // block)
    device = next(model.parameters()).device
    pad = getattr(model.causal.config, "pad_token_id", None)
    results: list[dict[int, _R]] = [{} for _ in lengths]
    for start in range(0, len(pieces), at_once):
        part = pieces[start : start + at_once]
        ids, labels = zip(*(read(*piece) for piece in part), strict=True)
        inputs = padded_rows(ids, 0 if pad != 0 else 1).to(device)
        target = padded_rows(labels, IGNORED).to(device)
        positions = torch.arange(inputs.shape[1], device=device).expand(len(part), -1)
        rows = result(model(inputs, positions), target)
        for piece, row in zip(part, rows, strict=True):
            results[piece.document][piece.first] = row
    return [[parts[first] for first in sorted(parts)] for parts in results]
