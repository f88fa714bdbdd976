"""Logits and labels as the measures read them: in blocks of bounded size, without ignored rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from .. import _checks
from ..rows import Rows

# (logits, target) of each batch, or a function that returns such an iterable.
Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]] | Callable[[], Iterable[tuple[Tensor, Tensor]]]

# The most numbers of a block. A block is copied a few times; 4 M float32 numbers are 16 MB.
_BLOCK = 1 << 22


def pairs(logits: Tensor | Batches, target: Tensor | None) -> Iterable[tuple[Tensor, Tensor]]:
    """The batches of one pass over what the caller gave."""
    if isinstance(logits, Tensor):
        if target is None:
            raise TypeError("target is missing: give logits and target, or batches of such pairs")
        return [(logits, target)]
    if target is not None:
        raise TypeError("target goes with a tensor of logits; batches hold their own targets")
    return logits() if callable(logits) else logits


def blocks(
    logits: Tensor | Batches, target: Tensor | None, ignore_index: int, dim: int
) -> Iterator[Rows]:
    """The rows that count, in order, cut into blocks; blocks without rows are left out.

    Raises:
        ValueError: a row that counts has no distribution, because its logits hold NaN or +inf or
            are all -inf.
    """
    for batch in pairs(logits, target):
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not all(isinstance(part, Tensor) for part in batch):
            raise TypeError(
                f"each batch must be a pair of tensors (logits, target), got {type(batch).__name__}"
            )
        scores, labels = batch[0], batch[1].to(batch[0].device)
        _checks.check_logits(scores, dim)
        if not _checks.check_target(scores.shape, labels, dim):
            _checks.check_range(labels, scores.shape[dim], ignore_index)
        elif ignore_index >= 0:
            raise ValueError("ignore_index needs class-index targets, got probabilities")
        else:
            labels = labels.movedim(dim, -1)
        scores = scores.movedim(dim, -1)
        if scores.dim() == 1:
            scores, labels = scores.unsqueeze(0), labels.unsqueeze(0)
        if not scores.numel():
            continue
        at_once = max(1, _BLOCK * len(scores) // scores.numel())
        for part, of_part in zip(scores.split(at_once), labels.split(at_once), strict=True):
            rows = _rows(part, of_part, ignore_index)
            if len(rows.logits):
                yield rows


def _rows(logits: Tensor, target: Tensor, ignore_index: int) -> Rows:
    """The rows of a block that count."""
    if not target.is_floating_point():
        keep = target != ignore_index
        logits, target = logits[keep], target[keep]
    rows = Rows(logits, target)
    if len(rows.logits) and not bool(torch.isfinite(rows.logits.amax(-1)).all()):
        raise ValueError(
            "the logits of a row that counts hold NaN or +inf, or are all -inf: "
            "they describe no distribution"
        )
    return rows
