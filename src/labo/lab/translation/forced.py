"""Teacher-forced statistics: the prediction for each reference token, given the true prefix.

Logits are computed for one block of tokens at a time; the (tokens, V) logits are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .model import Head

_LOGITS_AT_ONCE = 1 << 24  # numbers
# The inverse temperatures that are tried. They are multiples of the first, so that all powers
# follow from one exponential by multiplication.
BETAS = torch.arange(1, 65, dtype=torch.float64) / 8


def token_statistics(
    head: Head, target: Tensor, temperature: float | None = None
) -> dict[str, Tensor]:
    """For each token: NLL of the reference, entropy, top probability, and whether it is correct.

    Args:
        head: states (N, D) and output layer.
        target: (N,) the reference tokens.
        temperature: if given, add ``tempered_nll`` and ``tempered_confidence``, those of
            ``softmax(logits / temperature)``.
    """
    columns: dict[str, list[Tensor]] = {}
    for log_p, labels in _blocks(head, target):
        top, token = log_p.max(-1)
        found = {
            "nll": -_of(log_p, labels),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "confidence": top.exp(),
            "right": (token == labels).float(),
        }
        if temperature is not None:
            tempered = (log_p / temperature).log_softmax(-1)
            found["tempered_nll"] = -_of(tempered, labels)
            found["tempered_confidence"] = tempered.amax(-1).exp()
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    return {name: torch.cat(parts) for name, parts in columns.items()}


def mean_metrics(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Means of :func:`token_statistics` over all tokens of all sentences."""
    names = {
        "nll": "nll",
        "entropy": "entropy",
        "confidence": "confidence",
        "right": "token_accuracy",
    }
    tokens = sum(len(row["nll"]) for row in rows)
    return {
        metric: math.fsum(float(row[name].double().sum()) for row in rows) / tokens
        for name, metric in names.items()
    }


def losses_by_beta(head: Head, target: Tensor) -> Tensor:
    r"""The summed NLL at every inverse temperature of ``BETAS``.

    .. math:: \sum_i \log\sum_j p_{ij}^\beta - \beta \log p_{iy_i}

    Args:
        head: states (N, D) and output layer.
        target: (N,) the reference tokens.

    Returns:
        (B,) in float64, on the CPU.
    """
    losses = torch.zeros(len(BETAS), dtype=torch.float64)
    for log_p, labels in _blocks(head, target):
        log_p = log_p - log_p.amax(-1, keepdim=True)
        factor = (log_p * float(BETAS[0])).exp()
        power, sums = factor.clone(), []
        for _ in BETAS:
            sums.append(power.sum(-1).double().log().sum())
            power *= factor
        losses += torch.stack(sums).cpu() - BETAS * _of(log_p, labels).double().sum().cpu()
    return losses


def best_temperature(losses: Tensor) -> float | None:
    """The temperature with the smallest loss, interpolated by a parabola.

    Args:
        losses: (B,) of :func:`losses_by_beta`, summed over a split.

    Returns:
        None if the smallest loss is at the edge of the grid, where the minimum is not known.

    Example:
        >>> round(best_temperature((BETAS - 2.2) ** 2), 4)  # 1 / 2.2
        0.4545
        >>> best_temperature(-BETAS)
    """
    index = int(losses.argmin())
    if index in (0, len(losses) - 1):
        return None
    below, here, above = losses[index - 1 : index + 2].tolist()
    offset = (below - above) / (2 * (below - 2 * here + above))
    return 1 / float(BETAS[index] + offset * BETAS[0])


def rival_probabilities(head: Head, target: Tensor) -> Tensor:
    """(N,) the second largest probability at each token: large where two tokens compete."""
    return torch.cat([log_p.topk(2).values[:, 1].exp() for log_p, _ in _blocks(head, target)])


def _blocks(head: Head, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of log-probabilities (n, V) and labels (n,)."""
    at_once = max(1, _LOGITS_AT_ONCE // len(head.weight))
    for states, labels in zip(head.states.split(at_once), target.split(at_once), strict=True):
        yield (states @ head.weight.T).float().log_softmax(-1), labels


def _of(log_p: Tensor, labels: Tensor) -> Tensor:
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
