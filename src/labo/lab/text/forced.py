"""What a model says of the tokens of a reference, each given the true ones before it.

The (tokens, V) logits of a split are never held: they are made for a block of tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .head import Head

_LOGITS_AT_ONCE = 1 << 24  # numbers
_BINS = 15
# The inverse temperatures that are tried. They are multiples of the first: one exponential serves
# all of them, by multiplication.
BETAS = torch.arange(1, 65, dtype=torch.float64) / 8


def token_statistics(
    head: Head, target: Tensor, temperature: float | None = None
) -> dict[str, Tensor]:
    """For each token: -log p of the reference, the entropy, the top probability, whether right.

    Args:
        head: states (N, D) and output layer.
        target: (N,) the reference tokens.
        temperature: if given, ``tempered_nll`` and ``tempered_confidence`` are those of
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
    """The means over all tokens of sentences with their :func:`token_statistics`."""
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


class ReliabilityBins:
    """Sums of confidence and of right predictions over 15 bins of equal width.

    Example:
        >>> bins = ReliabilityBins()
        >>> bins.add(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]))
        >>> bins.calibration_error()
        0.5
    """

    def __init__(self) -> None:
        self.confidence = torch.zeros(_BINS, dtype=torch.float64)
        self.right = torch.zeros(_BINS, dtype=torch.float64)
        self.count = 0

    def add(self, confidence: Tensor, right: Tensor) -> None:
        """Take in predictions: (N,) their top probability, and 1 where they are right, else 0."""
        bins = (confidence * _BINS).long().clamp(max=_BINS - 1)  # the last bin is closed
        self.confidence.index_add_(0, bins, confidence.double())
        self.right.index_add_(0, bins, right.double())
        self.count += len(confidence)

    def __iadd__(self, other: ReliabilityBins) -> ReliabilityBins:
        self.confidence += other.confidence
        self.right += other.right
        self.count += other.count
        return self

    def calibration_error(self) -> float:
        """The expected calibration error: how far confidence and accuracy lie apart."""
        return float((self.confidence - self.right).abs().sum()) / self.count


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
    """The temperature of the smallest loss, between those that were tried by a parabola.

    Args:
        losses: (B,) of :func:`losses_by_beta`, summed over a split.

    Returns:
        None if the smallest is at the edge of what was tried: then there is no telling.

    Example:
        >>> round(best_temperature((BETAS - 2.2) ** 2), 4)  # 1 / 2.2
        0.4545
        >>> best_temperature(-BETAS)
    """
    place = int(losses.argmin())
    if place in (0, len(losses) - 1):
        return None
    below, here, above = losses[place - 1 : place + 2].tolist()
    aside = (below - above) / (2 * (below - 2 * here + above))
    return 1 / float(BETAS[place] + aside * BETAS[0])


def rival_probabilities(head: Head, target: Tensor) -> Tensor:
    """(N,) the second largest probability at each token: large where two words compete."""
    return torch.cat([log_p.topk(2).values[:, 1].exp() for log_p, _ in _blocks(head, target)])


def _blocks(head: Head, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-probabilities (n, V) and labels (n,)."""
    at_once = max(1, _LOGITS_AT_ONCE // len(head.weight))
    for states, labels in zip(head.states.split(at_once), target.split(at_once), strict=True):
        yield head.logits(states).float().log_softmax(-1), labels


def _of(log_p: Tensor, labels: Tensor) -> Tensor:
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
