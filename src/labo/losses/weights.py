"""Cross entropy, with a penalty on the prediction or a weight for each sample."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _checks, smoothing
from ..fast.kernel import CROSS_ENTROPY, Kernel
from ..fields import NOT_NEGATIVE, POSITIVE, UNIT
from ..loss import Loss, hyper, state
from ..rows import Rows, entropy, exact, over_tau, row_sum, times, zero_log
from ..sums import BEYOND_MARGIN, NORM, UNIFORM, RowSums


class _ByEpoch(Loss):
    """A loss with a strength that grows by the epoch. Call ``end_epoch()`` after each one."""

    epoch: Tensor = state(init=False)

    def make_state(self) -> None:
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))

    def end_epoch(self) -> None:
        self.epoch += 1

    def _progress(self, epochs: int, done: int = 1) -> Tensor:
        """min((epoch + done) / epochs, 1), for an epoch counted from 0.

        A tensor, so that torch.compile does not compile again for each epoch; in float64, so that
        it does not limit the precision of the loss.
        """
        return (self.epoch + done).clamp(max=epochs).to(exact(self.epoch.device)) / epochs


class CrossEntropyLoss(Loss):
    r"""Cross entropy, the baseline, equal to ``F.cross_entropy``.

    .. math:: -\log p_y

    Two differences: if all targets are ignored the result is 0, with a graph, rather than NaN; and
    errors say what is wrong with the arguments.

    Example:
        >>> loss = CrossEntropyLoss()
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.4493)
    """

    name, function_name = "base", "cross_entropy_loss"

    def value(self, row: RowSums) -> Tensor:
        return row.nll()

    def kernel(self) -> Kernel | None:
        return None if self.z_loss else Kernel(CROSS_ENTROPY)


class ConfidencePenaltyLoss(Loss):
    r"""Confidence penalty: cross entropy minus beta times the entropy of the prediction.

    .. math:: -\log p_y - \beta H(p)

    With a ``threshold`` Gamma the penalty acts below that entropy only:
    :math:`+\beta\max(0, \Gamma - H(p))`. The sign is plus because low entropy is penalised.

    Example:
        >>> loss = ConfidencePenaltyLoss(beta=0.1)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.3532)

    Reference:
        Pereyra et al. 2017, Regularizing Neural Networks by Penalizing Confident Output
        Distributions.
    """

    name, function_name = "cp", "confidence_penalty_loss"

    beta: float = hyper(
        default=0.1,
        within=NOT_NEGATIVE,
        doc="strength; the LABO paper does not give its own. Search {0.05, 0.1, 0.3, 0.5, 1, 2}",
    )
    threshold: float | None = hyper(
        default=None,
        within=NOT_NEGATIVE,
        doc="entropy in nats below which the penalty acts; None applies it always",
    )

    def value(self, row: RowSums) -> Tensor:
        penalty = -row.entropy()
        if self.threshold is not None:
            penalty = (self.threshold + penalty).clamp(min=0)
        return row.nll() + row.weigh(self.beta * penalty)


class MaxSuppressionLoss(_ByEpoch):
    r"""Max suppression (MaxSup): the penalty of label smoothing, on the largest logit.

    .. math:: -\log p_y + \lambda \Bigl(\max_j z_j - \frac{1}{K} \sum_j z_j\Bigr)

    Label smoothing is the same with z_y in place of the maximum. The two agree where the prediction
    is correct. With ``final_lam`` the strength goes linearly from ``lam`` in the first of
    ``epochs`` epochs to ``final_lam`` in the last one. Call ``end_epoch()`` after each epoch.

    Example:
        >>> loss = MaxSuppressionLoss(lam=0.1)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.5968)

    Reference:
        Zhou et al. 2025, MaxSup: Overcoming Representation Collapse in Label Smoothing.
    """

    name, function_name = "maxsup", "max_suppression_loss"

    lam: float | Tensor = hyper(
        default=0.1,
        within=NOT_NEGATIVE,
        doc="strength lambda; with final_lam that of the first epoch",
    )
    final_lam: float | None = hyper(
        default=None,
        within=NOT_NEGATIVE,
        module_only=True,
        doc="lambda of the last epoch, reached linearly; None keeps lambda constant. The authors' "
        "code goes from 0.1 to 0.2",
    )
    epochs: int | None = hyper(
        default=None,
        at_least=1,
        module_only=True,
        doc="epochs of the whole training; needed with final_lam",
    )

    def value(self, row: RowSums) -> Tensor:
        flat = row.masses(UNIFORM)
        return row.nll() + row.weigh(self.lam * (row.u_top - flat.qu / flat.q))

    def make_state(self) -> None:
        if self.final_lam is not None:
            if self.epochs is None:
                raise ValueError(f"final_lam needs epochs, 1 or more, got epochs={self.epochs!r}")
            super().make_state()

    def current(self) -> Loss:
        if self.final_lam is None:
            return self
        done = self._progress(max(1, (self.epochs or 1) - 1), done=0)
        return self.having(lam=self.lam + (self.final_lam - self.lam) * done)

    def end_epoch(self) -> None:
        if self.final_lam is not None:
            super().end_epoch()


class MarginSmoothingLoss(Loss):
    r"""Margin-based label smoothing (MbLS): logits may differ by a margin without a penalty.

    .. math:: -\log p_y + \frac{\lambda}{K} \sum_j \max(0, \max_i z_i - z_j - m)

    With m = 0 it is max suppression.

    Example:
        >>> loss = MarginSmoothingLoss(lam=0.1, margin=1.5)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.4968)

    Reference:
        Liu et al. 2022, The Devil is in the Margin: Margin-based Label Smoothing for Network
        Calibration.
    """

    name, function_name = "mbls", "margin_smoothing_loss"

    lam: float = hyper(
        default=0.1,
        within=NOT_NEGATIVE,
        doc="strength lambda, called alpha by the authors. Their paper sums over the classes; "
        "their code, as here, takes the mean",
    )
    margin: float = hyper(
        default=10.0,
        within=NOT_NEGATIVE,
        doc="the difference m to the largest logit up to which there is no penalty",
    )

    def value(self, row: RowSums) -> Tensor:
        far = row.masses(BEYOND_MARGIN, margin=self.margin)
        excess = far.q * (row.u_top - self.margin) - far.qu
        return row.nll() + row.weigh(self.lam * excess / row.count)


class FocalLoss(Loss):
    r"""Focal loss: less weight on well-fitted samples.

    .. math:: -(1 - p_y)^\gamma \log p_y

    Example:
        >>> loss = FocalLoss(gamma=2)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.0589)

    Reference:
        Lin et al. 2017, Focal Loss for Dense Object Detection.
    """

    name, function_name, linear = "fl", "focal_loss", False

    gamma: float = hyper(
        default=1.0, within=NOT_NEGATIVE, doc="focusing strength; 0 is cross entropy"
    )
    detach_factor: bool = hyper(
        default=False,
        doc="hold the factor constant, as the translation baselines of Raunak et al. do. The "
        "original differentiates through it. The values agree, the gradients do not",
    )

    def value(self, row: RowSums) -> Tensor:
        return _modulated(row, -torch.expm1(row.log_p_y()), self.gamma, self.detach_factor)


class AntiFocalLoss(Loss):
    r"""Anti-focal loss: more weight on well-fitted samples, for better rare tokens.

    .. math:: -(1 + s\,p_y)^\gamma \log p_y

    Example:
        >>> loss = AntiFocalLoss(gamma=1, scale=0.5)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.5927)

    Reference:
        Raunak et al. 2020, On Long-Tailed Phenomena in Neural Machine Translation.
    """

    name, function_name, linear = "afl", "anti_focal_loss", False

    gamma: float = hyper(default=1.0, within=NOT_NEGATIVE, doc="strength; 0 is cross entropy")
    scale: float = hyper(
        default=0.5,
        at_least=-1.0,
        doc="the factor s of the probability, called alpha by the authors; -1 is focal loss",
    )
    detach_factor: bool = hyper(
        default=True, doc="hold the factor fixed, as the authors' code does"
    )

    def value(self, row: RowSums) -> Tensor:
        base = 1 + self.scale * row.log_p_y().exp()
        return _modulated(row, base, self.gamma, self.detach_factor)


def _modulated(row: RowSums, base: Tensor, gamma: float, detach: bool) -> Tensor:
    """base^gamma times the cross entropy."""
    factor = base.detach() if detach else base
    # A power below 1 has an infinite slope at 0, where the product with log p_y = 0 has none.
    return factor.clamp(min=torch.finfo(factor.dtype).tiny) ** gamma * row.nll()


class Poly1Loss(Loss):
    r"""Poly-1: cross entropy with another first coefficient in its series in 1 - p_y.

    .. math:: -\log p_y + \epsilon (1 - p_y)

    The gradient is that of the cross entropy times :math:`1 + \epsilon p_y`: more weight on
    well-fitted samples. Class probabilities q give
    :math:`\sum_j q_j (-\log p_j + \epsilon (1 - p_j))`.

    Example:
        >>> loss = Poly1Loss(epsilon=2)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(1.1732)

    Reference:
        Leng et al. 2022, PolyLoss: A Polynomial Expansion Perspective of Classification Loss
        Functions.
    """

    name, function_name = "poly", "poly1_loss"

    epsilon: float = hyper(
        default=2.0,
        at_least=-1.0,
        doc="what is added to the coefficient, -1 or more; 0 is cross entropy",
    )

    def value(self, row: RowSums) -> Tensor:
        log_p = row.log_p_y()
        return -row.weigh(log_p + self.epsilon * torch.expm1(log_p))


class LogitNormLoss(Loss):
    r"""LogitNorm: cross entropy of logits that are divided by their norm.

    .. math:: -\log \mathrm{softmax}\Bigl(\frac{z}{\tau \lVert z \rVert}\Bigr)_y

    The loss does not depend on the scale of the logits. Unlike the other losses it changes when a
    number is added to all logits. The norm is that of the classes that are not masked. It is
    at least 0.001, which bounds the gradient at 0.

    Example:
        >>> loss = LogitNormLoss(tau=1.0)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.8837)

    Reference:
        Wei et al. 2022, Mitigating Neural Network Overconfidence with Logit Normalization.
    """

    name, function_name = "logitnorm", "logit_norm_loss"

    tau: float = hyper(
        default=0.04,
        within=POSITIVE,
        doc="temperature. The smallest value that the loss can have grows with it",
    )

    def value(self, row: RowSums) -> Tensor:
        log_total = row.tempered(self.tau, NORM).log()
        return row.weigh(log_total - over_tau(row.u_y, row.tau))


class DFTLoss(Loss):
    r"""Dynamic fine-tuning (DFT): cross entropy times the probability of the target.

    .. math:: -p_y \log p_y

    with the factor held constant. The gradient is that of the cross entropy times :math:`p_y`:
    targets that the model finds unlikely hardly count. The mean divides by the number of rows, not
    by the sum of the factors.

    Example:
        >>> loss = DFTLoss()
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.2867)

    Reference:
        Wu et al. 2025, On the Generalization of SFT: A Reinforcement Learning Perspective with
        Reward Rectification.
    """

    name, function_name, linear = "dft", "dft_loss", False

    def value(self, row: RowSums) -> Tensor:
        return times(row.log_p_y().detach().exp(), row.nll())


class EAFTLoss(Loss):
    r"""Entropy-adaptive fine-tuning (EAFT): cross entropy times the entropy of the prediction.

    .. math:: -\Bigl(\frac{H(p)}{\log K}\Bigr)^\gamma \log p_y

    with the factor held constant. A confident prediction, correct or not, hardly changes. At
    gamma = 1 the adaptive alpha of LABO is 1 minus rho times this factor. The mean divides by the
    number of rows, not by the sum of the factors.

    Example:
        >>> loss = EAFTLoss()
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.3114)

    Reference:
        Diao et al. 2026, Entropy-Adaptive Fine-Tuning: Resolving Confident Conflicts to Mitigate
        Forgetting.
    """

    name, function_name = "eaft", "eaft_loss"

    gamma: float = hyper(
        default=1.0, within=NOT_NEGATIVE, doc="exponent of the factor; 0 is cross entropy"
    )
    top_k: int | None = hyper(
        default=None,
        at_least=2,
        doc="compute the entropy of the k largest probabilities, divided by their sum; 20 in the "
        "authors' code. None computes it exactly",
    )
    normalizer: float | str | None = hyper(
        default="log_k",
        within=POSITIVE,
        word="log_k",
        doc='what the entropy is divided by: "log_k" for its largest value, log K or log k (masked '
        "classes do not count); a number, such as 3.0 in the authors' code; or None",
    )

    def value(self, row: RowSums) -> Tensor:
        if self.top_k is None:
            h, count = row.entropy().detach(), row.count
        else:
            log_q = torch.log_softmax(row.largest(self.top_k), -1)
            h, count = entropy(log_q), (log_q != -math.inf).sum(-1).to(log_q.dtype)
        h = h.clamp(min=0)
        if isinstance(self.normalizer, str):
            h = h / count.log().masked_fill(count <= 1, math.inf)  # 0 / log 1 is 0
        elif self.normalizer is not None:
            h = h / self.normalizer
        return times(h**self.gamma, row.nll())

    def few_classes(self) -> int:
        return 0 if self.top_k is None else 128  # the largest logits take most of the time


class GeneralizedEntropyLoss(Loss):
    r"""Generalized entropy regularization: one family from confidence penalty to label smoothing.

    .. math::
        -\log p_y + \beta D_\alpha(u \Vert p), \qquad
        D_\alpha = \frac{(1-\alpha)G(u) + \alpha G(p) - G((1-\alpha)u + \alpha p)}{\alpha(1-\alpha)}

    with G(x) = sum x log x ("kl") or sum x^2 ("euclidean"). For "kl" the ends are limits: alpha = 0
    is KL(p || u), the confidence penalty; alpha = 1 is KL(u || p), label smoothing. The authors'
    code leaves out the constant (1-alpha) G(u): its value is larger by beta log(K)/alpha, its
    gradient is the same.

    Example:
        >>> loss = GeneralizedEntropyLoss(alpha=0.5, beta=0.7)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.7571)

    Reference:
        Meister et al. 2020, Generalized Entropy Regularization or: There's Nothing Special about
        Label Smoothing.
    """

    name, function_name = "ger", "generalized_entropy_loss"

    alpha: float = hyper(
        default=0.5,
        within=UNIT,
        doc="member of the family, from confidence penalty (0) to label smoothing (1)",
    )
    beta: float = hyper(default=0.7, within=NOT_NEGATIVE, doc="strength")
    prior: Tensor | None = hyper(
        default=None,
        doc="(K,) the distribution u; uniform by default. At alpha = 0 every class that is not "
        "masked needs a probability above 0, because KL(p || u) is infinite otherwise",
    )
    generator: str = hyper(
        default="kl",
        choices=("kl", "euclidean"),
        doc='the divergence: "kl", or "euclidean" for the squared distance',
    )

    def value(self, row: RowSums) -> Tensor:
        return row.nll() + row.weigh(self.beta * self._to_uniform(row))

    def _to_uniform(self, row: RowSums) -> Tensor:
        alpha = self.alpha
        if self.generator == "euclidean":  # |p - U|^2, with exp(u / (1/2)) = e^2
            return row.tempered(0.5) / row.e.square() - 1 / row.count
        if alpha < 1e-20:  # 0, or as good as 0 in float64: KL(p || U)
            return row.count.log() - row.entropy()
        if alpha == 1:  # KL(U || p)
            flat = row.masses(UNIFORM)
            return row.log_e - flat.qu / flat.q - flat.q.log()
        row.mixture(alpha)  # KL(U || m) / alpha + KL(p || m) / (1 - alpha)
        of_uniform = -(math.log1p(-alpha) + row.mix / row.count) / alpha
        of_p = -(math.log(alpha) + row.emix / row.e) / (1 - alpha)
        return of_uniform + of_p

    def reference_only(self, *inputs: Any) -> str | None:
        return None if self.prior is None else "a prior"

    def on_rows(self, rows: Rows) -> Tensor:
        prior = self.prior
        assert prior is not None
        if prior.shape != (rows.num_classes,):
            raise ValueError(
                f"prior must have shape ({rows.num_classes},), got {tuple(prior.shape)}"
            )
        _checks.check_devices(rows.logits, prior=prior)
        _checks.check_distribution("prior", prior)
        u = smoothing.restricted(prior.to(rows.logits.dtype).expand_as(rows.logits), rows.logits)
        log_p = rows.log_probabilities()
        if self.generator == "euclidean":
            divergence = row_sum((u - log_p.exp()) ** 2)
        else:
            if self.alpha == 0:
                _check_positive(u, rows)
            divergence = _jensen(u, log_p, self.alpha)
        return rows.nll(log_p) + rows.weigh(self.beta * divergence)


def _check_positive(u: Tensor, rows: Rows) -> None:
    """Refuse a prior at which KL(p || u) is infinite."""
    fine = (u > 0) | (rows.logits == -math.inf)
    if rows.valid is not None:
        fine = fine | ~rows.valid.unsqueeze(-1)
    message = "at alpha=0 the prior must be above 0 for every class: KL(p || u) is infinite"
    _checks.ensure(fine | u.isnan(), lambda: ValueError(message), message)


def _jensen(u: Tensor, log_p: Tensor, alpha: float) -> Tensor:
    """The skew Jensen divergence of the negative entropy, per row, with its limits."""
    p, log_u = log_p.exp(), torch.where(u > 0, u, 1.0).log()
    if alpha == 1:
        return row_sum(u * (log_u - log_p.masked_fill(u == 0, 0.0)))
    if alpha == 0:
        masked = log_p == -math.inf
        return row_sum(p * (zero_log(log_p) - u.masked_fill(masked, 1.0).log()))
    mixed = (1 - alpha) * u + alpha * p
    log_mixed = torch.where(mixed > 0, mixed, 1.0).log()
    # As two KL divergences to the mixture, to avoid a difference of large terms at small alpha.
    to_u, to_p = u * (log_u - log_mixed), p * (zero_log(log_p) - log_mixed)
    return row_sum((1 - alpha) * to_u + alpha * to_p) / (alpha * (1 - alpha))


class ZLoss(Loss):
    r"""z-loss: a penalty that keeps the log-sum-exp of the logits near 0, to add to any loss.

    .. math:: \lambda \Bigl(\log \sum_j e^{z_j}\Bigr)^2

    Softmax does not determine the sum of the logits; this does, and leaves the probabilities free.
    The target tells only which rows count, and with which class weight, so that the sum
    ``cross_entropy_loss(logits, target) + z_loss(logits, target)`` has one reduction.

    Example:
        >>> loss = ZLoss(lam=0.01)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.0600)

    Reference:
        Chowdhery et al. 2022, PaLM: Scaling Language Modeling with Pathways.
    """

    function_name = "z_loss"
    without = ("z_loss",)
    z_loss = 0.0

    lam: float = hyper(default=1e-4, within=NOT_NEGATIVE, doc="strength lambda")

    def value(self, row: RowSums) -> Tensor:
        return row.weigh(self.lam * (row.top + row.log_e).square())
