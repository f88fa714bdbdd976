"""Labels that follow the prediction: its probabilities, its ranks, its entropy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..fields import NOT_NEGATIVE, POSITIVE, UNIT
from ..loss import Loss, hyper
from ..rows import Rows, row_sum, times, zero_log
from ..sums import FROM_TEACHER, TEMPERED, UNIFORM, RowSums
from .labo import adaptive_strength


class GeneralizedCrossEntropyLoss(Loss):
    r"""Generalized cross entropy (GCE): less weight on samples that are hard to fit.

    .. math:: \frac{1 - p_y^\gamma}{\gamma}

    Its gradient is that of the cross entropy times :math:`p_y^\gamma`: at gamma = 1 that of
    :class:`labo.DFTLoss`.

    Example:
        >>> loss = GeneralizedCrossEntropyLoss(gamma=0.7)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.3855)

    Reference:
        Zhang and Sabuncu 2018, Generalized Cross Entropy Loss for Training Deep Neural Networks
        with Noisy Labels.
    """

    name, function_name, linear = "gce", "generalized_cross_entropy_loss", False

    gamma: float = hyper(
        default=0.7,
        within=NOT_NEGATIVE,
        doc="from cross entropy (0, the limit) to the probability of an error (1)",
    )

    def value(self, row: RowSums) -> Tensor:
        if self.gamma == 0:
            return row.nll()
        return row.weigh(-torch.expm1(self.gamma * row.log_p_y()) / self.gamma)


class GEMLoss(Loss):
    r"""GEM: fine-tuning that keeps the entropy of the prediction.

    With :math:`q = \mathrm{softmax}(z/\beta)`, held constant:

    .. math:: \sum_j q_j w_j (\log p_j - \log p_y)

    where w is 1 (``h="linear"``) or :math:`\mathrm{sigmoid}(0.01 (z_j - z_y))`, held constant too
    (``h="logsigmoid"``). With the first, the gradient is q - onehot(y). The value may be negative:
    it is no likelihood, so compare models by their NLL. The second has the plain formula alone: its
    weights depend on the target and on each logit, so that it is no formula of sums over a row.

    Example:
        >>> loss = GEMLoss(beta=0.7)
        >>> loss(torch.tensor([[0.5, -0.5, 1.5, 0.0]]), torch.tensor([1]))
        tensor(1.6249)

    Reference:
        Li et al. 2025, Preserving Diversity in Supervised Fine-Tuning of Large Language Models.
    """

    name, function_name, linear = "gem", "gem_loss", False

    beta: float = hyper(default=0.7, within=POSITIVE, doc="temperature of q")
    h: str = hyper(
        default="linear",
        choices=("linear", "logsigmoid"),
        doc='"linear", or "logsigmoid" with about half the gradient, by the reference',
    )

    def value(self, row: RowSums) -> Tensor:
        sharp = row.masses(TEMPERED, self.beta)
        return row.nll() - row.weigh(row.log_e - sharp.qu / sharp.q)

    def reference_only(self, *inputs: Any) -> str | None:
        return None if self.h == "linear" else 'h="logsigmoid"'

    def on_rows(self, rows: Rows) -> Tensor:
        log_p, z = rows.log_probabilities(), rows.shifted.detach()
        q = torch.softmax(z / self.beta, -1)
        weight = q * torch.sigmoid(0.01 * (z - rows.pick(z).unsqueeze(-1)))
        kept = weight.masked_fill(q == 0, 0.0)
        of_target = times(row_sum(kept), -rows.pick(log_p))
        return rows.weigh(row_sum(kept * zero_log(log_p)) + of_target)


class ZipfSmoothingLoss(Loss):
    r"""Zipf label smoothing: the other classes by their rank in the prediction.

    .. math:: -\log p_y + \lambda\, \mathrm{KL}(\pi \Vert p_{others}), \qquad
        \pi_j \propto \mathrm{rank}_j^{-s}

    over the classes other than y, where :math:`p_{others}` is p renormalised over them. The rank of
    a class is that of its logit among all classes (1 is the largest; equal logits share the
    smallest rank), held constant. Ranks need the row in order, not sums over it: there is the plain
    formula alone.

    Example:
        >>> loss = ZipfSmoothingLoss(lam=1.0, power=1.0)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.5629)

    Reference:
        Liang et al. 2022, Efficient One Pass Self-distillation with Zipf's Label Smoothing.
    """

    name, function_name, linear = "zipf", "zipf_smoothing_loss", False

    lam: float = hyper(default=0.1, within=NOT_NEGATIVE, doc="weight lambda of the KL divergence")
    power: float = hyper(default=1.0, within=NOT_NEGATIVE, doc="the exponent s of the ranks")
    correct_only: bool = hyper(
        default=False, doc="leave the KL divergence out where the prediction is wrong"
    )

    def on_rows(self, rows: Rows) -> Tensor:
        log_p, z = rows.log_probabilities(), rows.shifted.detach().contiguous()
        others, absent, alone = rows.without_label()
        ordered = z.sort(-1).values
        rank = z.shape[-1] - torch.searchsorted(ordered, z, right=True) + 1
        mass = rank.to(z.dtype).pow(-self.power).masked_fill(absent, 0.0)
        pi = mass / row_sum(mass).unsqueeze(-1)
        divergence = row_sum(pi * (torch.where(pi > 0, pi, 1.0).log() - zero_log(others)))
        left_out = alone
        if self.correct_only:
            left_out = alone | (rows.pick(rank.to(z.dtype)) > 1)
        return rows.nll(log_p) + rows.weigh(self.lam * divergence.masked_fill(left_out, 0.0))


class ACLSLoss(Loss):
    r"""Adaptive and conditional label smoothing (ACLS): margins on the logits themselves.

    .. math::
        -\log p_y + \lambda \Bigl(\lambda_1 \sum_{j \in M} \max(0, z_j - m)^2 +
        \frac{\lambda_2}{K-1} \sum_{j \notin M} \max(0, \max z - z_j - m)^2\Bigr)

    M are the classes with the largest logit, which is held constant in the second sum. The first
    sum depends on a shift of all logits: this loss does not see the softmax alone. It has the plain
    formula alone: no other loss sums squares beyond a margin, and the backends do not.

    Example:
        >>> loss = ACLSLoss(margin=1.0)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.5653)

    Reference:
        Park et al. 2023, ACLS: Adaptive and Conditional Label Smoothing for Network Calibration.
    """

    name, function_name = "acls", "acls_loss"

    lam: float = hyper(default=0.1, within=NOT_NEGATIVE, doc="weight lambda of both penalties")
    lam_top: float = hyper(
        default=1.0, within=NOT_NEGATIVE, doc="lambda_1, the weight of the largest logits"
    )
    lam_rest: float = hyper(
        default=0.1, within=NOT_NEGATIVE, doc="lambda_2, the weight of the other logits"
    )
    margin: float = hyper(default=10.0, within=NOT_NEGATIVE, doc="the margin m")

    def on_rows(self, rows: Rows) -> Tensor:
        z = rows.logits
        largest = z.detach().amax(-1, keepdim=True)
        at_top, masked = z == largest, z == -math.inf
        over = (z - self.margin).clamp(min=0).masked_fill(~at_top, 0.0)
        below = (largest - z.masked_fill(masked, math.inf) - self.margin).clamp(min=0)
        below = below.masked_fill(at_top, 0.0)
        per_class = self.lam_rest / (rows.count() - 1).clamp(min=1)
        penalty = self.lam_top * row_sum(over.square()) + per_class * row_sum(below.square())
        penalty = penalty.masked_fill(rows.count() <= 1, 0.0)  # one class: nothing to choose
        return rows.nll(rows.log_probabilities()) + rows.weigh(self.lam * penalty)


class AdaptiveSmoothingLoss(Loss):
    r"""Label smoothing with the alpha of LABO: smoothing is even, its strength is not.

    .. math:: \mathrm{CE}((1-\alpha)\,\mathrm{onehot}(y) + \alpha U, p), \qquad
        \alpha = 1 - \rho H(p)/\log K

    alpha is held constant. Beside LABO it tells what its alpha and what its optimal smoothing
    distribution contribute.

    Example:
        >>> loss = AdaptiveSmoothingLoss(rho=0.5)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(1.4132)

    Reference:
        Lee et al. 2022, Adaptive Label Smoothing with Self-Knowledge in Natural Language
        Generation.
    """

    name, function_name = "als", "adaptive_smoothing_loss"

    rho: float = hyper(
        default=0.5, within=UNIT, doc="how far the entropy of a prediction lowers alpha"
    )
    _masses = UNIFORM

    def value(self, row: RowSums) -> Tensor:
        alpha = adaptive_strength(row, row.count.log(), self.rho)
        prior = row.masses(self._masses)
        return times(1 - alpha, row.nll()) + alpha * prior.cross_entropy() / prior.q


class PriorSmoothingLoss(AdaptiveSmoothingLoss):
    r"""Adaptive label smoothing towards an earlier prediction.

    .. math:: \mathrm{CE}((1-\alpha)\,\mathrm{onehot}(y) + \alpha\,\mathrm{softmax}(t), p), \qquad
        \alpha = 1 - \rho H(p)/\log K

    :class:`labo.AdaptiveSmoothingLoss` with the prediction of an earlier model, whose logits are t,
    in place of U. It is held constant. Called as ``loss(logits, target, teacher_logits)``; without
    them, as in the first epoch, the smoothing is even.

    Example:
        >>> loss = PriorSmoothingLoss(rho=0.5)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.6313)

    Reference:
        Lee et al. 2022, as for :class:`labo.AdaptiveSmoothingLoss`.
    """

    name, function_name = "als-past", "prior_smoothing_loss"
    teacher_argument = "prior_logits"
    without_teacher = AdaptiveSmoothingLoss
    _masses = FROM_TEACHER
