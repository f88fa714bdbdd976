"""Batches of sentence pairs: padded ids, target prefixes, and what is to be predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..text.arrow import IGNORED
from ..text.batching import Inputs, padded_rows
from .prepared import TextSplit


@dataclass(frozen=True)
class Sentences(Inputs):
    """Padded sources (N, S) and target prefixes (N, T), which begin with the start tokens.

    ``mask`` is False where the source is padding; None if there is no padding.
    """

    source: Tensor
    mask: Tensor | None
    prefix: Tensor


def forced(source: Tensor, target: Tensor, start: Tensor, pad: int) -> tuple[Sentences, Tensor]:
    """The input of the model for padded sentence pairs, and what it is to predict.

    ``start`` (N, G) is given to the decoder before the targets (N, T). Labels are (N, G - 1 + T);
    those of given tokens and of padding are IGNORED.
    """
    mask = source != pad
    given = torch.full_like(start[:, 1:], IGNORED)
    labels = torch.cat([given, target.masked_fill(target == pad, IGNORED)], 1)
    prefix = torch.cat([start, target[:, :-1]], 1)
    prefix[:, start.shape[1] :].masked_fill_(target[:, 1:] == pad, pad)
    return Sentences(source, None if bool(mask.all()) else mask, prefix), labels


def of_split(split: TextSplit, index: Tensor, starts: Tensor, pad: int) -> tuple[Sentences, Tensor]:
    """As :func:`forced`, for sentence pairs of a split; ``starts`` (directions, G)."""
    source, target = (
        padded_rows([sentences.part(i) for i in index.tolist()], pad)
        for sentences in split.sides.values()
    )
    return forced(source, target, starts[torch.from_numpy(split.pair[index.numpy()]).long()], pad)
