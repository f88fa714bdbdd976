"""The k classes that are stored of a teacher: checks, and the label that they make."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks
from .rows import log_sum, row_sum, zero_log


def stored_rows(
    indices: Tensor,
    log_probabilities: Tensor,
    logits: Tensor,
    shape: torch.Size,
    num_classes: int,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Stored classes and their log-probabilities as rows, (M, k), once they are known to fit.

    Args:
        indices: (..., k) classes; a negative index is padding.
        log_probabilities: (..., k).
        logits: any tensor on the device of the logits.
        shape: (...) of the samples.
        num_classes: K.
        valid: (M,) False for ignored rows, or None if there cannot be any.

    Returns:
        The classes, int64, with -1 for padding and in ignored rows; the log-probabilities without
        a graph, with -inf there.
    """
    k = _check_shape(indices, log_probabilities, shape)
    _checks.check_devices(logits, indices=indices, log_probabilities=log_probabilities)
    index = indices.reshape(-1, k).long().clamp(min=-1)
    if valid is not None:
        index = index.masked_fill(~valid.unsqueeze(-1), -1)
    log_t = log_probabilities.detach().reshape(-1, k).masked_fill(index < 0, -math.inf)
    _check_values(index, log_t, num_classes)
    return index, log_t


def _check_shape(indices: Tensor, log_probabilities: Tensor, rows: torch.Size) -> int:
    """Refuse tensors that are not stored classes and their log-probabilities; return k."""
    if not all(isinstance(x, Tensor) for x in (indices, log_probabilities)):
        raise _checks.TeacherError("this loss needs indices and log_probabilities of a teacher")
    whole = (
        not (indices.is_floating_point() or indices.is_complex()) and indices.dtype != torch.bool
    )
    if not whole or not log_probabilities.is_floating_point():
        raise _checks.TeacherError(
            "indices must be integers and log_probabilities floating point, got "
            f"{indices.dtype} and {log_probabilities.dtype}"
        )
    shape = indices.shape
    if shape[:-1] != rows or shape != log_probabilities.shape or shape[-1:].numel() == 0:
        raise _checks.TeacherError(
            f"indices and log_probabilities must have shape {(*rows, 'k')}, "
            f"got {tuple(shape)} and {tuple(log_probabilities.shape)}"
        )
    return shape[-1]


def _check_values(index: Tensor, log_t: Tensor, num_classes: int) -> None:
    """Refuse classes that do not exist or occur twice, and probabilities that exceed 1."""

    def refuse(fine: Tensor, message: str) -> None:
        _checks.ensure(fine, lambda: _checks.TeacherError(message), message)

    refuse(index < num_classes, f"an entry of indices is not below the {num_classes} classes")
    ordered = index.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    refuse(~twice, "a row of indices has a class twice")
    total = row_sum(log_t.exp())
    fine = ~(total > 1 + _checks.tolerance(log_t.dtype))
    refuse(fine, "a row of log_probabilities has a sum of probabilities above 1")


def completed(log_t: Tensor, masked: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
    """The label of the stored classes, (M, k) logarithms, and the mass of all others, (M,).

    They sum to 1, also if the stored numbers are rounded or some of the classes are masked.

    Args:
        log_t: (M, k), -inf for padding.
        masked: (M, k), the stored classes that the model has masked.
        alone: (M,), whether there are no other classes.
    """
    mass = -torch.expm1(log_sum(log_t).clamp(max=0.0))
    mass = mass.masked_fill(alone, 0.0)
    log_t = log_t.masked_fill(masked, -math.inf)
    total = log_sum(log_t).exp() + mass
    return log_t - log_or_0(total).unsqueeze(-1), mass / total.masked_fill(total == 0, 1.0)


def renormalized(log_t: Tensor) -> Tensor:
    """The probabilities of the stored classes divided by their sum; logarithms, (M, k)."""
    return log_t - zero_log(log_sum(log_t)).unsqueeze(-1)


def log_or_0(x: Tensor) -> Tensor:
    """log x, and 0 for x = 0."""
    return torch.where(x > 0, x, 1.0).log()
