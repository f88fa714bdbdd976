"""The norm and the standard deviation of rows, by which some losses divide their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import exact, row_sum, wide

# Elements of a block of rows: on the CPU its copies stay in the cache, elsewhere a block should be
# worth its launches.
_BLOCK = 1 << 19
_BLOCK_ELSEWHERE = 1 << 24


class Spread(NamedTuple):
    """The spread s of each row, (N,) float64, and d s / d z_j = slope (z_j - center).

    ``plain`` tells whether no class of the row is masked, as far as that is known.
    """

    size: Tensor
    center: Tensor
    slope: Tensor
    plain: Tensor


def spread(
    logits: Tensor,
    centered: bool,
    backend: ModuleType,
    student: Tensor | None = None,
    own: Spread | None = None,
) -> Spread:
    """max(|z|, 0.001) + 1e-7, or max(|z - mean z|, 0.001) / sqrt(n - 1) + 1e-7.

    Args:
        logits: (N, K).
        centered: whether it is the standard deviation. Only the n classes that are not masked
            count.
        backend: on the CPU with ``moments``, see :mod:`labo.fast.formula`; Triton with
            ``masked_moments``, which counts the classes that are not masked too.
        student: (N, K), the logits of the student, whose masked classes do not count either.
        own: the spread of these.
    """
    classes = logits.shape[1]
    if hasattr(backend, "masked_moments"):
        center, squares, count = backend.masked_moments(logits, centered, student)
        return _finish(squares.sqrt(), center, count, centered, count == classes)
    block = _BLOCK if logits.is_cpu else _BLOCK_ELSEWHERE
    at_once = max(1, block // max(1, classes))
    if not logits.is_cpu:
        everywhere = range(0, max(1, len(logits)), at_once)
        blocks = [slice(first, first + at_once) for first in everywhere]
        return _masked_rows(logits, centered, student, blocks)
    # Where values can be read at no cost, most rows turn out to need neither masks nor care.
    center, squares = backend.moments(logits, centered)
    plain = squares.isfinite()
    if own is not None:
        plain &= own.plain
    count = torch.full_like(squares, classes)
    of_rows = _finish(squares.sqrt(), center, count, centered, plain)
    if not bool(plain.all()):
        rest = (~plain).nonzero().squeeze(1)
        masked = _masked_rows(logits, centered, student, rest.split(at_once))
        for x, y in zip(of_rows, masked, strict=True):
            x[rest] = y
    return of_rows


def _masked_rows(
    logits: Tensor, centered: bool, student: Tensor | None, blocks: Sequence[slice | Tensor]
) -> Spread:
    """The spread of the rows in these blocks, of which classes may be masked."""
    of_blocks = []
    for part in blocks:
        z = logits[part].to(wide(logits.dtype))
        of_blocks.append(_masked(z, None if student is None else student[part], centered))
    return Spread(*(torch.cat(columns) for columns in zip(*of_blocks, strict=True)))


def _masked(z: Tensor, student: Tensor | None, centered: bool) -> Spread:
    mask, wider = z == -math.inf, exact(z.device, z.dtype)
    if student is not None:
        mask |= student == -math.inf
    count = z.shape[1] - mask.sum(1).to(wider)
    z = z.masked_fill(mask, 0.0)
    largest = z.abs().amax(1, keepdim=True).clamp(min=1e-30)
    z = z / largest  # squares do not overflow
    center = torch.zeros_like(count)
    if centered:
        center = row_sum(z).to(wider) / count
        z = (z - center.unsqueeze(1).to(z.dtype)).masked_fill_(mask, 0.0)
    unit = largest.squeeze(1).to(wider)
    length = unit * row_sum(z.square()).to(wider).sqrt()
    return _finish(length, unit * center, count, centered, ~mask.any(1))


def _finish(length: Tensor, center: Tensor, count: Tensor, centered: bool, plain: Tensor) -> Spread:
    """From |z - center| of each row and the number of its classes."""
    per_root = torch.ones_like(length)
    if centered:
        per_root = 1 / (count - 1).clamp(min=1).sqrt()
    slope = (per_root / length).masked_fill(length <= 1e-3, 0.0)
    return Spread(length.clamp(min=1e-3) * per_root + 1e-7, center, slope, plain)
