"""What a model says of whole documents, which it sees in pieces that it has positions for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from ..text.arrow import IGNORED
from ..text.batching import padded_rows
from ..text.head import Head
from .model import LanguageModel
from .packing import Ints, cut

__all__ = ["by_pieces"]

_TOKENS_AT_ONCE = 4096
_R = TypeVar("_R")


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
    columns: Any = (column.tolist() for column in cut(lengths, block, whole=False))
    pieces = sorted(zip(*columns, strict=True), key=lambda piece: int(piece[2]))
    at_once = max(1, _TOKENS_AT_ONCE // block)
    device = next(model.parameters()).device
    pad = getattr(model.causal.config, "pad_token_id", None)
    found: list[dict[int, _R]] = [{} for _ in lengths]
    for start in range(0, len(pieces), at_once):
        part = pieces[start : start + at_once]
        ids, labels = zip(*(read(*piece) for piece in part), strict=True)
        inputs = padded_rows(ids, 0 if pad != 0 else 1).to(device)
        target = padded_rows(labels, IGNORED).to(device)
        positions = torch.arange(inputs.shape[1], device=device).expand(len(part), -1)
        rows = result(model(inputs, positions), target)
        for (document, first, _), row in zip(part, rows, strict=True):
            found[document][first] = row
    return [[parts[first] for first in sorted(parts)] for parts in found]
