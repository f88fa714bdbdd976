"""The norm and the standard deviation of rows, by which some losses divide their logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._rows import row_sum, wide

NORM, DEVIATION = "norm", "deviation"

# Elements of a block of rows, whose copies stay in the cache.
_BLOCK = 1 << 19


class Spread(NamedTuple):
    """The spread s of each row, (N,) float64, and d s / d z_j = slope (z_j - center)."""

    size: Tensor
    center: Tensor
    slope: Tensor


def spread(logits: Tensor, kind: str, student: Tensor | None = None) -> Spread:
    """max(|z|, 0.001) + 1e-7, or max(|z - mean z|, 0.001) / sqrt(n - 1) + 1e-7.

    Args:
        logits: (N, K).
        kind: ``NORM`` or ``DEVIATION``. Only the n classes that are not masked count.
        student: (N, K), the logits of the student, whose masked classes do not count either.
    """
    rows = max(1, _BLOCK // max(1, logits.shape[1]))
    scratch = logits.new_empty(min(rows, len(logits)), logits.shape[1], dtype=wide(logits.dtype))
    found = []
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        beside = None if student is None else student[part]
        found.append(_of_block(logits[part], beside, kind, scratch))
    if not found:
        return Spread(*torch.zeros(3, 0, dtype=torch.float64, device=logits.device))
    return Spread(*(torch.cat(columns) for columns in zip(*found, strict=True)))


def _of_block(logits: Tensor, student: Tensor | None, kind: str, scratch: Tensor) -> Spread:
    z = logits.to(scratch.dtype).contiguous()  # bits depend on the strides
    if not z.is_cpu:
        return _masked(z, student, kind)
    # Where values can be read at no cost, most rows turn out to need neither masks nor care.
    center, x = torch.zeros_like(z[:, 0]), z
    if kind == DEVIATION:
        center = row_sum(z) / z.shape[1]
        x = torch.sub(z, center.unsqueeze(1), out=scratch[: len(z)])
    squares = row_sum(torch.mul(x, x, out=scratch[: len(z)]))
    count = torch.full_like(squares, z.shape[1], dtype=torch.float64)
    plain = _finish(squares.double().sqrt(), center.double(), count, kind)
    fine = squares.isfinite()
    if student is not None:
        fine &= row_sum(student).isfinite()
    if bool(fine.all()):
        return plain
    masked = _masked(z, student, kind)
    return Spread(*(torch.where(fine, *pair) for pair in zip(plain, masked, strict=True)))


def _masked(z: Tensor, student: Tensor | None, kind: str) -> Spread:
    mask = z == -math.inf
    if student is not None:
        mask |= student == -math.inf
    count = z.shape[1] - mask.sum(1).double()
    z = z.masked_fill(mask, 0.0)
    largest = z.abs().amax(1, keepdim=True).clamp(min=1e-30)
    z = z / largest  # squares do not overflow
    center = torch.zeros_like(count)
    if kind == DEVIATION:
        center = row_sum(z).double() / count
        z = (z - center.unsqueeze(1).to(z.dtype)).masked_fill_(mask, 0.0)
    unit = largest.squeeze(1).double()
    return _finish(unit * row_sum(z.square()).double().sqrt(), unit * center, count, kind)


def _finish(length: Tensor, center: Tensor, count: Tensor, kind: str) -> Spread:
    """From |z - center| of each row and the number of its classes."""
    per_root = torch.ones_like(length)
    if kind == DEVIATION:
        per_root = 1 / (count - 1).clamp(min=1).sqrt()
    slope = (per_root / length).masked_fill(length <= 1e-3, 0.0)
    return Spread(length.clamp(min=1e-3) * per_root + 1e-7, center, slope)
