"""How far a prediction p is from a teacher t, by the table in :class:`labo.DistillationLoss`.

Each divergence is written twice: from the sums over a row, and for distributions over a few stored
classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rows import kl_divergence as kl
from ..sums import FROM_TEACHER, RowSums, log_1_exp

DIVERGENCES = ("forward", "reverse", "jsd", "skew", "skew_reverse")
_USUAL = {"jsd": 0.5, "skew": 0.1, "skew_reverse": 0.1}


def check_mixture(divergence: str, mixture: float | None) -> None:
    """Refuse a weight that the divergence does not have, and the ends, where it is 0 or another."""
    if mixture is None:
        return
    if divergence not in _USUAL:
        raise ValueError(
            f'mixture goes with divergence="jsd", "skew" or "skew_reverse", not "{divergence}"'
        )
    if mixture in (0, 1):
        raise ValueError(
            f"mixture must be above 0 and below 1, got {mixture!r}: for the KL divergences say "
            'divergence="forward" or divergence="reverse"'
        )


def _teacher_share(divergence: str, mixture: float | None) -> float:
    """The weight of the teacher in m."""
    weight = _USUAL[divergence] if mixture is None else mixture
    return 1 - weight if divergence == "skew_reverse" else weight


def of_sums(row: RowSums, tau: float, divergence: str, mixture: float | None) -> Tensor:
    """The divergence of softmax(t / tau) and softmax(z / tau), (N,)."""
    row.masses(FROM_TEACHER, tau)
    if divergence == "forward":
        return row.distillation()
    if divergence == "reverse":
        return row.q.log() - row.r.log() - row.rd / row.r
    b = _teacher_share(divergence, mixture)
    row.teacher_mixture(b)
    if divergence == "skew":
        return -math.log(b) - row.qmix / row.q
    of_model = -math.log(1 - b) - row.rmix / row.r
    if divergence == "skew_reverse":
        return of_model
    return b * (-math.log(b) - row.qmix / row.q) + (1 - b) * of_model


def of_classes(log_t: Tensor, log_p: Tensor, divergence: str, mixture: float | None) -> Tensor:
    """The divergence of two distributions, (M, k) logarithms; (M,)."""
    if divergence == "forward":
        return kl(log_t, log_p)
    if divergence == "reverse":
        return kl(log_p, log_t)
    b = _teacher_share(divergence, mixture)
    absent = (log_t == -math.inf) & (log_p == -math.inf)
    of_teacher = log_t.masked_fill(absent, 0.0) + math.log(b)
    of_model = log_p.masked_fill(absent, 0.0) + math.log(1 - b)
    # As logaddexp, whose bits depend on where an element lies in memory.
    log_m = torch.maximum(of_teacher, of_model) + log_1_exp(-(of_teacher - of_model).abs())
    if divergence == "skew":
        return kl(log_t, log_m)
    if divergence == "skew_reverse":
        return kl(log_p, log_m)
    return b * kl(log_t, log_m) + (1 - b) * kl(log_p, log_m)
