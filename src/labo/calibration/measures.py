r"""How far confidence and accuracy are apart.

The confidence of a prediction is the largest probability of softmax(z / T). A model is calibrated
if predictions with confidence c are right with frequency c.

Every function takes logits (..., K) and a target, or batches: an iterable of pairs
(logits, target), or a function that returns one. Batches are read once and need not fit in memory
together. The errors are numbers in [0, 1]. The arguments that the functions share:

- target: (...) class indices, or (..., K) class probabilities; a prediction is then right to the
  degree of the probability of the predicted class.
- bins: B. Edge b is b / B, rounded to the precision of the confidences. A confidence on an edge
  belongs to the bin above it; the last bin is closed.
- temperature: T, 1 for the model as it is.
- ignore_index: rows with this target do not count.
- dim: the dimension of the classes.

A class whose logit is -inf is masked: its probability is 0. No gradients are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..fields import POSITIVE, Range
from ..rows import Rows, upcast
from ._batches import Batches, blocks

BINS = Range(at_least=1, whole=True)


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """The reliability diagram: confidence and accuracy of the predictions in each bin.

    Bins of the same edges can be added: those of batches, or of processes.

    Attributes:
        edges: (B + 1,) in float64.
        count: (B,) predictions in each bin, int64.
        confidence_sum: (B,) their confidences, summed, float64.
        correct_sum: (B,) how many are right, float64.
    """

    edges: Tensor
    count: Tensor
    confidence_sum: Tensor
    correct_sum: Tensor

    @classmethod
    def of(
        cls, confidence: Tensor, correct: Tensor, bins: int = 15, *, adaptive: bool = False
    ) -> ReliabilityBins:
        """From confidences, for when the logits are not at hand.

        Args:
            confidence: (N,) in [0, 1].
            correct: (N,) whether the prediction is right: booleans, or degrees in [0, 1].
            bins: B.
            adaptive: bins of equal mass instead of equal width, see
                :func:`adaptive_calibration_error`. There are N bins if N is below B.

        Example:
            >>> bins = ReliabilityBins.of(
            ...     torch.tensor([0.2, 0.9, 1.0]), torch.tensor([False, True, False]), bins=2
            ... )
            >>> bins.count.tolist(), bins.accuracy.tolist()
            ([1, 2], [0.0, 0.5])
            >>> (bins + bins).count.tolist()
            [2, 4]
        """
        BINS.check("bins", bins)
        confidence, correct = _flat("confidence", confidence), _flat("correct", correct)
        if len(confidence) != len(correct):
            raise ValueError(
                f"confidence and correct must have one length, got {len(confidence)} and "
                f"{len(correct)}"
            )
        edges = torch.arange(bins + 1, dtype=torch.float64) / bins
        index = _bin_of(confidence, bins)
        if adaptive:  # runs of N / B confidences in ascending order, the longer runs first
            count = _counted(len(confidence))
            confidence, order = confidence.double().sort()
            # Equal confidences share their accuracy: the order of the samples does not matter.
            _, group, size = confidence.unique_consecutive(return_inverse=True, return_counts=True)
            correct = (torch.bincount(group, correct[order].double()) / size)[group]
            runs = torch.arange(count).tensor_split(min(bins, count))
            bins = len(runs)
            index = torch.cat([torch.full_like(run, b) for b, run in enumerate(runs)])
            edges = confidence[[*(int(run[0]) for run in runs), count - 1]]
        sums = (torch.bincount(index, x.double(), bins) for x in (confidence, correct))
        return cls(edges, torch.bincount(index, minlength=bins), *sums)

    def __add__(self, other: ReliabilityBins) -> ReliabilityBins:
        if not torch.equal(self.edges, other.edges):
            raise ValueError("only bins with the same edges can be added")
        sums = ("count", "confidence_sum", "correct_sum")
        added = (getattr(self, name) + getattr(other, name) for name in sums)
        return ReliabilityBins(self.edges, *added)

    @property
    def confidence(self) -> Tensor:
        """(B,) mean confidence; NaN for an empty bin."""
        return self.confidence_sum / self.count

    @property
    def accuracy(self) -> Tensor:
        """(B,) share of right predictions; NaN for an empty bin."""
        return self.correct_sum / self.count

    @property
    def gap(self) -> Tensor:
        """(B,) confidence - accuracy, above 0 where the model is overconfident; 0 if empty."""
        return (self.confidence_sum - self.correct_sum) / self.count.clamp(min=1)

    @property
    def expected_error(self) -> float:
        """The mean size of the gap over the predictions."""
        gaps = (self.confidence_sum - self.correct_sum).abs().sum()
        return float(gaps / _counted(int(self.count.sum())))

    @property
    def maximum_error(self) -> float:
        """The largest size of the gap."""
        _counted(int(self.count.sum()))
        return float(self.gap.abs().max())


def _flat(name: str, values: Tensor) -> Tensor:
    values = values.detach().reshape(-1).cpu()
    values = upcast(values) if values.is_floating_point() else values.double()
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError(f"{name} must lie in [0, 1]")
    return values


def _bin_of(p: Tensor, bins: int) -> Tensor:
    """The bin of each probability. p * B would be rounded: 0.57 * 100 is below 57."""
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    return torch.bucketize(p, edges.to(p.dtype), right=True)


def _counted(count: int) -> int:
    if not count:
        raise ValueError("there is nothing to measure: no target counts")
    return count


def reliability_bins(
    logits: Tensor | Batches,
    target: Tensor | None = None,
    *,
    bins: int = 15,
    adaptive: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dim: int = -1,
) -> ReliabilityBins:
    r"""The reliability diagram (DeGroot and Fienberg 1983; Niculescu-Mizil and Caruana 2005).

    .. math::
        \mathrm{conf}_b = \frac1{n_b} \sum_{n \in b} \max_k p_{nk}, \qquad
        \mathrm{acc}_b = \frac1{n_b} \sum_{n \in b} [\arg\max_k p_{nk} = y_n]

    With ``adaptive`` the bins have equal mass instead of equal width.

    Example:
        >>> logits = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]).log()
        >>> diagram = reliability_bins(logits, torch.tensor([0, 1, 1]), bins=4)
        >>> diagram.count
        tensor([0, 0, 1, 2])
        >>> diagram.confidence
        tensor([   nan,    nan, 0.6000, 0.8500], dtype=torch.float64)
        >>> diagram.accuracy
        tensor([   nan,    nan, 1.0000, 0.5000], dtype=torch.float64)
    """
    return _bins(logits, target, bins, adaptive, temperature, ignore_index, dim)


@torch.no_grad()
def _bins(
    logits: Tensor | Batches,
    target: Tensor | None,
    bins: int,
    adaptive: bool,
    temperature: float,
    *rows: int,
) -> ReliabilityBins:
    BINS.check("bins", bins)
    POSITIVE.check("temperature", temperature)
    empty = torch.empty(0)
    predictions = (_confidence(block, temperature) for block in blocks(logits, target, *rows))
    if not adaptive:
        parts = (ReliabilityBins.of(*part, bins) for part in predictions)
        return sum(parts, ReliabilityBins.of(empty, empty, bins))
    # The edges of the bins depend on all confidences.
    columns = zip((empty, empty), *predictions, strict=True)
    confidence, correct = (torch.cat(column) for column in columns)
    return ReliabilityBins.of(confidence, correct, bins, adaptive=True)


def _confidence(rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """The largest probability of each row, (M,), and the degree to which its class is right.

    Of equal ones the first counts, as for ``argmax``.
    """
    # Of the logits: rounding may make two of their probabilities equal.
    prediction = rows.logits.argmax(-1, keepdim=True)
    log_p = rows.log_probabilities(temperature).gather(-1, prediction).squeeze(-1)
    right = rows.label().gather(-1, prediction).squeeze(-1).clamp(0, 1)
    return log_p.exp().cpu(), right.cpu()


def expected_calibration_error(
    logits: Tensor | Batches,
    target: Tensor | None = None,
    *,
    bins: int = 15,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dim: int = -1,
) -> float:
    r"""ECE: the mean distance of confidence and accuracy (Naeini et al. 2015, Guo et al. 2017).

    .. math:: \mathrm{ECE} = \sum_{b=1}^{B} \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|

    over B bins of equal width. It is biased upwards: with few predictions in a bin it is above 0
    even for a calibrated model.

    Example:
        >>> logits = torch.tensor([[0.9, 0.1]]).log().expand(4, 2)
        >>> target = torch.tensor([0, 0, 0, 1])  # 90 % sure, 75 % right
        >>> round(expected_calibration_error(logits, target), 4)
        0.15
        >>> round(expected_calibration_error(logits, target, temperature=2.0), 4)
        0.0
    """
    return _bins(logits, target, bins, False, temperature, ignore_index, dim).expected_error


def adaptive_calibration_error(
    logits: Tensor | Batches,
    target: Tensor | None = None,
    *,
    bins: int = 15,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dim: int = -1,
) -> float:
    r"""Adaptive ECE: the same with bins of equal mass (Nguyen and O'Connor 2015).

    .. math:: \sum_{b=1}^{B} \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|

    where the N confidences in ascending order are cut into B runs of N / B (the first N mod B runs
    have one more). Most confidences of a trained model are near 1, so that the bins of equal width
    put most predictions into the last one. Equal confidences share their accuracy.

    Example:
        >>> confidence = torch.tensor([0.6, 0.7, 0.8, 0.9])
        >>> logits = torch.stack([confidence, 1 - confidence], -1).log()
        >>> target = torch.tensor([0, 1, 0, 0])  # |1.3 - 1| / 4 + |1.7 - 2| / 4
        >>> round(adaptive_calibration_error(logits, target, bins=2), 4)
        0.15
    """
    return _bins(logits, target, bins, True, temperature, ignore_index, dim).expected_error


def maximum_calibration_error(
    logits: Tensor | Batches,
    target: Tensor | None = None,
    *,
    bins: int = 15,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dim: int = -1,
) -> float:
    r"""MCE: the largest distance of confidence and accuracy in any bin (Naeini et al. 2015).

    .. math:: \mathrm{MCE} = \max_b |\mathrm{acc}_b - \mathrm{conf}_b|

    A bin counts however few predictions are in it.

    Example:
        >>> logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]]).log()
        >>> round(maximum_calibration_error(logits, torch.tensor([0, 0, 0])), 4)
        0.6
    """
    return _bins(logits, target, bins, False, temperature, ignore_index, dim).maximum_error


@torch.no_grad()
def classwise_calibration_error(
    logits: Tensor | Batches,
    target: Tensor | None = None,
    *,
    bins: int = 15,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dim: int = -1,
) -> float:
    r"""Class-wise ECE: of the probability of every class (Kull et al. 2019, Nixon et al. 2019).

    .. math:: \frac1K \sum_{k=1}^{K} \sum_{b=1}^{B} \frac{n_{kb}}{N}
        |\mathrm{freq}_{kb} - \mathrm{conf}_{kb}|

    Bin b of class k holds the samples whose probability of class k lies in the b-th interval of
    equal width; conf is the mean of these probabilities and freq the share of the samples whose
    label is k. The memory is that of K x B numbers.

    Example:
        >>> logits = torch.tensor([[0.75, 0.25], [0.75, 0.25]]).log()
        >>> round(classwise_calibration_error(logits, torch.tensor([0, 0])), 4)
        0.25
    """
    BINS.check("bins", bins)

    def gaps(rows: Rows) -> Tensor:
        p = rows.log_probabilities(temperature).exp().cpu()
        bin_of_class = torch.arange(p.shape[-1]) * bins + _bin_of(p, bins)
        gap = p.double() - rows.label().cpu().double()
        return torch.bincount(bin_of_class.flatten(), gap.flatten(), p.shape[-1] * bins)

    means = _mean_over_rows(gaps, temperature, logits, target, ignore_index, dim)
    return float(means.abs().sum() / (len(means) // bins))


@torch.no_grad()
def brier_score(
    logits: Tensor | Batches,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dim: int = -1,
) -> float:
    r"""The mean squared distance of probabilities and label (Brier 1950).

    .. math:: \frac1N \sum_n \sum_k (p_{nk} - [k = y_n])^2

    The sum runs over all classes, as in Brier's paper: for two classes it is twice the score that
    looks at one of them. It is a proper score: calibration and sharpness both lower it, from 2
    (certain and wrong) to 0 (certain and right).

    Example:
        >>> logits = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
        >>> round(brier_score(logits, torch.tensor([0, 1])), 4)
        0.25
    """

    def distance(rows: Rows) -> Tensor:
        p = rows.log_probabilities(temperature).exp()
        return (p - rows.label()).square_().sum(-1).cpu().double().sum(0, keepdim=True)

    return float(_mean_over_rows(distance, temperature, logits, target, ignore_index, dim))


def _mean_over_rows(of_block: Callable[[Rows], Tensor], temperature: float, *given: Any) -> Tensor:
    """The sums of blocks, added up and divided by the number of rows."""
    POSITIVE.check("temperature", temperature)
    count, total, classes = 0, torch.zeros(1, dtype=torch.float64), None
    for rows in blocks(*given):
        if rows.num_classes != (classes or rows.num_classes):
            raise ValueError(f"a batch has {rows.num_classes} classes, and one before {classes}")
        classes = rows.num_classes
        total = total + of_block(rows)
        count += len(rows.logits)
    return total / _counted(count)
