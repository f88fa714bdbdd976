"""Distillation: from a teacher, from stored classes, from other predictions of the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import smoothing
from ..fields import NOT_NEGATIVE, POSITIVE, UNIT
from ..loss import Loss, hyper
from ..rows import Rows, kl_divergence, log_or_none, over_tau, row_sum, times, zero_log
from ..stored import completed, log_or_0, renormalized
from ..sums import DEVIATION, FROM_TEACHER, TEMPERED, UNIFORM, RowSums
from .divergences import DIVERGENCES, check_mixture, of_classes, of_sums
from .labo import labo_objective, objective
from .weights import CrossEntropyLoss, _ByEpoch

_DIVERGENCE = hyper(
    default="forward",
    choices=DIVERGENCES,
    doc='"forward", "reverse", "jsd", "skew" or "skew_reverse", see the table',
)
_MIXTURE = hyper(
    default=None,
    within=UNIT,
    doc='the weight b of a mixture: by default 0.5 for "jsd" and 0.1 for "skew" and "skew_reverse"',
)


class DistillationLoss(Loss):
    r"""Knowledge distillation; called as ``loss(logits, target, teacher_logits)``.

    .. math::
        (1-\alpha)\,\mathrm{CE} + \alpha\, m\, \tau^2\,
        D(\mathrm{softmax}(v/\tau), \mathrm{softmax}(z/\tau))

    with the teacher's logits v. D(t, p) is a divergence:

    ================  ==========================================================================
    divergence        D
    ================  ==========================================================================
    ``forward``       KL(t || p)
    ``reverse``       KL(p || t)
    ``jsd``           b KL(t || m) + (1-b) KL(p || m), m = b t + (1-b) p; b = 0.5 by default
    ``skew``          KL(t || b t + (1-b) p); b = 0.1 by default
    ``skew_reverse``  KL(p || b p + (1-b) t); b = 0.1 by default
    ================  ==========================================================================

    A class that is masked for the model (logit -inf) is masked for the teacher too. One that the
    teacher alone masks makes ``reverse`` infinite, and no other divergence. The ``beta`` of TRL is
    b; its ends 0 and 1 are ``forward`` and ``reverse``, and it has no factor :math:`\tau^2`.

    ``kl_reduction="elementwise"`` also divides the KL by K, as code built on ``KLDivLoss()`` with
    its default reduction does (Tf-KD; the temperatures of the LABO paper fit that scale). With
    ``multiplier`` it is Tf-KD_self.

    ``standardize=True`` takes (v - mean v) / std v and (z - mean z) / std z in place of v and z in
    the KL divergence: the student is free to have another mean and scale of its logits. The
    standard deviation is the unbiased one. Masked classes are left out of it.

    Example:
        >>> loss = DistillationLoss(alpha=0.9, tau=4)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.1304)

    Reference:
        Hinton et al. 2015, Distilling the Knowledge in a Neural Network.
        Agarwal et al. 2024, On-Policy Distillation of Language Models (``reverse``, ``jsd``).
        Ko et al. 2024, DistiLLM (``skew``, ``skew_reverse``).
        Sun et al. 2024, Logit Standardization in Knowledge Distillation.
    """

    name, function_name = "kd", "distillation_loss"
    teacher_argument = "teacher_logits"

    alpha: float = hyper(default=0.9, within=UNIT, doc="weight of the teacher, in [0, 1]")
    tau: float = hyper(default=4.0, within=POSITIVE, doc="temperature of teacher and model")
    kl_reduction: str = hyper(
        default="batchmean",
        choices=("batchmean", "elementwise"),
        doc='"batchmean", or "elementwise" to divide the KL divergence by K as well',
    )
    multiplier: float = hyper(
        default=1.0, within=NOT_NEGATIVE, doc="the factor m of the KL divergence"
    )
    divergence: str = _DIVERGENCE
    mixture: float | None = _MIXTURE
    tau_squared: bool = hyper(default=True, doc="multiply the divergence by tau^2")
    standardize: bool = hyper(
        default=False, doc="standardize the logits of both models in the KL divergence"
    )

    def value(self, row: RowSums) -> Tensor:
        factor: float | Tensor = self.alpha * self.multiplier
        if self.kl_reduction == "elementwise":
            factor = factor / row.classes
        if self.tau_squared:
            factor = factor * self.tau**2
        if self.standardize:
            row.tempered(self.tau, DEVIATION)
            soft = row.masses(FROM_TEACHER, self.tau, spread=DEVIATION).distillation()
        else:
            soft = of_sums(row, self.tau, self.divergence, self.mixture)
        return times(1 - self.alpha, row.nll()) + row.weigh(factor * soft)

    def check_together(self) -> None:
        check_mixture(self.divergence, self.mixture)
        if self.standardize and self.divergence != "forward":
            raise ValueError('standardize=True goes with divergence="forward"')


class DecoupledDistillationLoss(_ByEpoch):
    r"""Decoupled distillation (DKD): the target class and the other classes, weighted apart.

    Called as ``loss(logits, target, teacher_logits)``. With
    :math:`s = \mathrm{softmax}(z/\tau)` and :math:`u = \mathrm{softmax}(t/\tau)`, and a hat for the
    distribution over the classes other than y:

    .. math::
        w\,\mathrm{CE} + m \tau^2 \bigl(\alpha\,
        \mathrm{KL}((u_y, 1-u_y) \Vert (s_y, 1-s_y)) +
        \beta\,\mathrm{KL}(\hat u \Vert \hat s)\bigr)

    Distillation with the weights 1 and :math:`1-u_y` of the two terms is ordinary distillation.
    With two classes the second term is 0. In epoch e = 1, 2, ... the factor m of the Module is
    ``multiplier * min(e / warmup_epochs, 1)``. Call ``end_epoch()`` after each epoch.

    Example:
        >>> loss = DecoupledDistillationLoss(warmup_epochs=1)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.7009)

    Reference:
        Zhao et al. 2022, Decoupled Knowledge Distillation.
    """

    name, function_name, linear = "dkd", "decoupled_distillation_loss", False
    teacher_argument = "teacher_logits"
    leaves_out_target = True

    alpha: float = hyper(
        default=1.0,
        within=UNIT,
        doc="weight of the target class, in [0, 1]. For more, raise multiplier",
    )
    beta: float = hyper(
        default=8.0,
        within=NOT_NEGATIVE,
        doc="weight of the other classes; from 0.5 to 8 in the authors' settings",
    )
    tau: float = hyper(default=4.0, within=POSITIVE, doc="temperature of teacher and model")
    hard_weight: float = hyper(
        default=1.0, within=NOT_NEGATIVE, doc="w, weight of the cross entropy"
    )
    multiplier: float | Tensor = hyper(
        default=1.0, within=NOT_NEGATIVE, doc="the factor m of both KL divergences"
    )
    standardize: bool = hyper(
        default=False,
        doc="standardize the logits of both models in the KL divergences, as for "
        ":class:`labo.DistillationLoss`",
    )
    warmup_epochs: int = hyper(
        default=20,
        at_least=0,
        module_only=True,
        doc="epochs until the teacher has its full weight; 0 and 1 mean no warm-up",
    )

    def value(self, row: RowSums) -> Tensor:
        spread = DEVIATION if self.standardize else None
        log_r = log_or_none(row.tempered(self.tau, spread))
        taught = row.masses(FROM_TEACHER, self.tau, spread=spread)
        log_q = log_or_none(taught.q)
        teacher = over_tau(taught.v_y, row.source_tau) - log_q  # the logit of the target
        student = over_tau(row.u_y, row.tau) - log_r
        of_target = _binary_kl(teacher, student)
        alone = taught.q == 0  # the teacher has no other class
        mean_d = taught.qd / taught.q.masked_fill(alone, 1.0)
        of_others = (mean_d - log_q + log_r).masked_fill(alone, 0.0)
        soft = self.multiplier * self.tau**2 * (self.alpha * of_target + self.beta * of_others)
        return times(self.hard_weight, row.nll()) + row.weigh(soft)

    def current(self) -> Loss:
        return self.having(multiplier=self.multiplier * self._progress(max(1, self.warmup_epochs)))


def _binary_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL((p, 1 - p) || (s, 1 - s)), p = sigmoid(a), s = sigmoid(b), with 0 log 0 = 0."""
    both = (torch.nn.functional.logsigmoid(torch.stack([x, -x])) for x in (a, b))
    log_p, log_s = both
    return (log_p.exp() * (log_p - log_s).masked_fill(log_p == -math.inf, 0.0)).sum(0)


# What the stored probabilities leave to the other classes, at least, where 0 would be infinite:
# their sum is rounded.
_LEAST_MASS = 1e-8


class TopKDistillationLoss(Loss):
    r"""Distillation from the stored k largest probabilities of a teacher.

    Called as ``loss(logits, target, indices, log_probabilities)``: (..., k) the stored classes,
    each at most once, a negative index for padding; and their log-probabilities under the whole
    softmax of the teacher, held constant. In :func:`labo.linear_loss` the two are passed as
    ``teacher_logits=(indices, log_probabilities)``.

    :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,\mathrm{KL}`, where the KL divergence at temperature 1
    is known for the stored classes S only. With t_j the probabilities of the teacher,
    :math:`m = 1 - \sum_S t_j` the mass of its other classes and :math:`w = \sum_{j \notin S} p_j`
    that of the model, ``tail`` says what takes its place:

    ================  ============================================================================
    tail              divergence
    ================  ============================================================================
    ``bucket``        :math:`\sum_S t_j \log(t_j/p_j) + m \log(m/w)`: the other classes as one
                      class. Never above the KL divergence to the whole teacher.
    ``uniform``       KL(Q || p) with the mass m spread evenly over the other classes
    ``labo``          KL(Q || p) with m spread as softmax(z / tau) over the other classes, held
                      constant: the optimal smoothing of LABO; at tau = 1 it equals ``bucket``
    ``drop``          :math:`\sum_S t_j \log(t_j/p_j)`: no tail; may be negative
    ``renormalize``   KL(t_S / (1-m) || p): the stored probabilities divided by their sum
    ================  ============================================================================

    Another ``divergence`` (see :class:`labo.DistillationLoss`) takes the other classes as one class
    (``bucket``): it is never above that to the whole teacher, because merging classes lowers it.
    ``jsd``, ``skew`` and ``skew_reverse`` also take ``renormalize``, which is no bound;
    ``reverse`` would be infinite there. With ``reverse`` m is at least 1e-8.

    A class that is masked for the model (logit -inf) is masked for the teacher too.

    Example:
        >>> loss = TopKDistillationLoss(alpha=0.5, tail="bucket")
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> stored = torch.tensor([[3.0, 1.0, 0.2, -0.5]]).log_softmax(-1).topk(2)
        >>> loss(logits, target, stored.indices, stored.values)
        tensor(0.2630)
    """

    name, function_name = "topk-kd", "topk_distillation_loss"
    teacher_argument = "indices"
    teacher_is_stored = True
    inputs = ("indices", "log_probabilities")

    alpha: float = hyper(default=0.5, within=UNIT, doc="weight of the teacher, in [0, 1]")
    tail: str = hyper(
        default="bucket",
        choices=("bucket", "uniform", "labo", "drop", "renormalize"),
        doc='"bucket", "uniform", "labo", "drop" or "renormalize", see the table',
    )
    tau: float = hyper(default=1.25, within=POSITIVE, doc='temperature of the tail "labo"')
    divergence: str = _DIVERGENCE
    mixture: float | None = _MIXTURE

    def value(self, row: RowSums) -> Tensor:
        log_t, mass = completed(row.log_t, row.u_stored == -math.inf, row.e == 0)
        if self.tail == "renormalize":
            log_t = renormalized(log_t)
        log_p = row.u_stored - row.log_e.unsqueeze(-1)
        if self.divergence != "forward":
            soft = self._with_one_class(row, log_t, log_p, mass)
            return times(1 - self.alpha, row.nll()) + row.weigh(self.alpha * soft)
        soft = kl_divergence(log_t, log_p)
        if self.tail in ("bucket", "uniform", "labo"):
            soft = soft + mass * (log_or_0(mass) + self._tail(row))
        return times(1 - self.alpha, row.nll()) + row.weigh(self.alpha * soft)

    def few_classes(self) -> int:
        return 128

    def _with_one_class(self, row: RowSums, log_t: Tensor, log_p: Tensor, mass: Tensor) -> Tensor:
        """The divergence with the other classes as one class."""
        if self.tail == "renormalize":
            mass = torch.zeros_like(mass)
        elif self.divergence == "reverse":
            mass = mass.clamp(min=_LEAST_MASS)
        others = log_or_none(row.e) + row.gap - row.log_e
        log_t = torch.cat([log_t, log_or_none(mass).unsqueeze(-1)], -1)
        log_p = torch.cat([log_p, others.unsqueeze(-1)], -1)
        return of_classes(log_t, log_p, self.divergence, self.mixture)

    def check_together(self) -> None:
        check_mixture(self.divergence, self.mixture)
        if self.divergence == "forward" or self.tail == "bucket":
            return
        if self.tail != "renormalize" or self.divergence == "reverse":
            raise ValueError(
                f'divergence="{self.divergence}" is not defined for tail="{self.tail}": use '
                'tail="bucket"'
            )

    def _tail(self, row: RowSums) -> Tensor:
        """The KL divergence of the other classes' distribution from their p."""
        if self.tail == "bucket":
            return row.log_e - log_or_0(row.e) - row.gap
        if self.tail == "uniform":
            flat = row.masses(UNIFORM)
            count = flat.q.clamp(min=1)
            return row.log_e - (row.gap + flat.qu / count) - count.log()
        star = row.masses(TEMPERED, self.tau)
        total = star.q.masked_fill(star.q == 0, 1.0)
        negative_entropy = star.qu.detach() / total / self.tau - total.log()
        return negative_entropy + row.log_e - (row.gap + star.qu / total)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        indices: Tensor | None = None,
        log_probabilities: Tensor | None = None,
    ) -> Tensor:
        return self.compute(logits, target, indices, log_probabilities)


class CSKDLoss(Loss):
    r"""CS-KD: agree with the prediction for another sample of the same class.

    Called as ``loss(logits, target, teacher_logits)`` with the model's own logits z' for the other
    samples, held constant.

    .. math::
        \mathrm{CE} + \lambda \tau^2
        \mathrm{KL}(\mathrm{softmax}(z'/\tau) \Vert \mathrm{softmax}(z/\tau))

    Example:
        >>> loss = CSKDLoss(lam=1, tau=4)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.5443)

    Reference:
        Yun et al. 2020, Regularizing Class-wise Predictions via Self-knowledge Distillation.
    """

    name, function_name = "cs-kd", "cs_kd_loss"
    teacher_argument = "peer_logits"

    lam: float = hyper(default=1.0, within=NOT_NEGATIVE, doc="weight lambda of the KL divergence")
    tau: float = hyper(default=4.0, within=POSITIVE, doc="temperature of both predictions")

    def value(self, row: RowSums) -> Tensor:
        soft = self.tau**2 * of_sums(row, self.tau, "forward", None)
        return row.nll() + row.weigh(self.lam * soft)


class PSKDLoss(_ByEpoch):
    r"""PS-KD: the label mixed with the model's own prediction of the epoch before.

    Cross entropy with :math:`(1-\alpha_t)\,\mathrm{onehot}(y) + \alpha_t p_{past}`. Called as
    ``loss(logits, target, teacher_logits)`` with the logits or log-probabilities of the past
    prediction, held constant. Without them, as in the first epoch, the loss is the cross entropy.

    The Module has alpha_t = alpha (e + 1) / epochs in epoch e = 0, 1, ... Call ``end_epoch()``
    after each epoch.

    Example:
        >>> loss = PSKDLoss(alpha=0.8, epochs=2)  # alpha_t is 0.4 in the first epoch
        >>> past = torch.tensor([[0.7, 0.2, 0.06, 0.04]])
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), past.log())
        tensor(0.6229)

    Reference:
        Kim et al. 2021, Self-Knowledge Distillation with Progressive Refinement of Targets.
    """

    name, function_name = "ps-kd", "ps_kd_loss"
    teacher_argument = "past_logits"
    without_teacher = CrossEntropyLoss

    epochs: int = hyper(
        kw_only=False, module_only=True, at_least=1, doc="epochs of the whole training"
    )
    alpha: float | Tensor = hyper(
        default=0.8,
        within=UNIT,
        doc="weight of the past prediction; in the Module that of the last epoch, reached linearly",
    )

    def value(self, row: RowSums) -> Tensor:
        past = row.masses(FROM_TEACHER)
        soft = past.cross_entropy() / past.q
        return times(1 - self.alpha, row.nll()) + times(self.alpha, soft)

    def current(self) -> Loss:
        return self.having(alpha=self.alpha * self._progress(self.epochs))


class BetaSmoothingLoss(Loss):
    r"""Beta smoothing (Beta-LS): random soft labels, harder where the averaged model is confident.

    Called as ``loss(logits, target, teacher_logits, draws=None)`` with the logits of the averaged
    model, which are used for the ranking only. One draw b from Beta(a, 1) per sample, from the
    default generator of PyTorch if they are not given; the i-th smallest goes to the sample with
    the i-th smallest confidence of the averaged model. The label is
    :math:`(1-\alpha)\,\mathrm{onehot}(y) + \alpha\,(b` on y, :math:`(1-b)/(K-1)` elsewhere).
    The ranking makes the rows of a batch depend on each other.

    Example:
        >>> loss = BetaSmoothingLoss(alpha=0.6)
        >>> logits = torch.tensor([[2.0, 1.0, 0.1, -1.0]])
        >>> loss(logits, torch.tensor([0]), logits, draws=torch.tensor([0.8]))
        tensor(0.6853)

    Reference:
        Zhang and Sabuncu 2020, Self-Distillation as Instance-Specific Label Smoothing.
    """

    name, function_name, linear = "beta-ls", "beta_smoothing_loss", False
    smooths, rowwise = True, False
    teacher_argument = "ema_logits"

    alpha: float = hyper(default=0.6, within=UNIT, doc="weight of the random label, in [0, 1]")
    a: float = hyper(default=3.0, within=POSITIVE, doc="first parameter of the Beta distribution")

    def on_rows(
        self,
        rows: Rows,
        ema_logits: Tensor | None = None,
        *,
        draws: Tensor | None = None,
        rng: torch.Generator | None = None,
    ) -> Tensor:
        ema = torch.softmax(rows.teacher("ema_logits", ema_logits), -1)
        if draws is None:
            # Beta(a, 1) by its inverse distribution function.
            uniform = torch.rand(len(ema), dtype=ema.dtype, device=ema.device, generator=rng)
            b = uniform ** (1 / self.a)
        else:
            b = rows.per_row("draws", draws).reshape(-1)
        moved = smoothing.beta_alpha(rows.pick(ema), b, rows.valid)
        return objective(rows, smoothing.others(rows.logits, rows.target), self.alpha * moved)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        teacher_logits: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Tensor:
        self.check_teacher(teacher_logits is not None)
        return self.compute(logits, target, teacher_logits, draws=draws)


class RDropLoss(Loss):
    r"""R-Drop: two forward passes with different dropout are to agree.

    Called as ``loss(logits, target, other_logits)``. With z and z' the logits of the two passes, p
    and p' their probabilities:

    .. math::
        w\,(\ell(z) + \ell(z')) + \lambda\,
        \frac{\mathrm{KL}(p \Vert p') + \mathrm{KL}(p' \Vert p)}{2}

    where :math:`\ell` is the cross entropy with the label, with the smoothed label
    (:class:`labo.LabelSmoothingLoss`), or LABO (:class:`labo.LABOLoss`, each pass with its own
    optimal smoothing). Gradients flow through both passes and through both directions of the
    divergence.

    Example:
        >>> loss = RDropLoss(lam=1.0)
        >>> other = torch.tensor([[3.0, 1.0, 0.2, -0.5]])
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), other)
        tensor(0.4113)

    Reference:
        Wu et al. 2021, R-Drop: Regularized Dropout for Neural Networks.
    """

    name, function_name = "r-drop", "r_drop_loss"
    rowwise = False  # linear_loss holds a second prediction constant
    teacher_argument = "other_logits"

    lam: float = hyper(
        default=1.0,
        within=NOT_NEGATIVE,
        doc="lambda, the weight of the divergence, called alpha by the authors",
    )
    hard_weight: float = hyper(
        default=0.5,
        within=NOT_NEGATIVE,
        doc="w, the weight of each of the two cross entropies; 1 in the authors' code",
    )
    label: str = hyper(
        default="onehot",
        choices=("onehot", "smoothed", "labo"),
        doc='"onehot", "smoothed" or "labo"',
    )
    alpha: float | str | None = hyper(
        default=None,
        within=UNIT,
        word="adaptive",
        doc='of label "smoothed", by default 0.1, or of "labo", by default "adaptive"',
    )
    tau: float = hyper(default=1.25, within=POSITIVE, doc='temperature of label "labo"')
    rho: float = hyper(
        default=0.5, within=UNIT, doc='how much entropy lowers the adaptive alpha of label "labo"'
    )

    def check_together(self) -> None:
        if self.label == "onehot" and self.alpha is not None:
            raise ValueError('alpha goes with label="smoothed" or label="labo"')
        if self.label == "smoothed" and isinstance(self.alpha, str):
            raise ValueError('alpha="adaptive" goes with label="labo"')

    @property
    def smoothing_weight(self) -> float | str:
        """That of the label: given, or its default."""
        if self.label == "onehot" or self.alpha is not None:
            return self.alpha or 0.0
        return "adaptive" if self.label == "labo" else 0.1

    def forward(self, logits: Tensor, target: Tensor, other_logits: Tensor | None = None) -> Tensor:
        inputs = () if other_logits is None else (other_logits,)
        return self.compute(logits, target, *inputs)

    def on_rows(self, rows: Rows, other_logits: Tensor | None = None) -> Tensor:
        other = rows.having(rows.other("other_logits", other_logits))
        rows.mask(other.logits == -math.inf)
        log_p, log_other = (zero_log(x.log_probabilities()) for x in (rows, other))
        # Both logarithms are 0 where a class is masked.
        agreement = row_sum((log_p.exp() - log_other.exp()) * (log_p - log_other)) / 2
        hard = self._labelled(rows) + self._labelled(other)
        return times(self.hard_weight, hard) + rows.weigh(self.lam * agreement)

    def _labelled(self, rows: Rows) -> Tensor:
        """Cross entropy, label smoothing or LABO per row, (M,)."""
        if self.label == "onehot":
            return rows.nll(rows.log_probabilities())
        alpha = self.smoothing_weight
        if self.label == "smoothed":
            assert not isinstance(alpha, str)
            return objective(rows, smoothing.uniform(rows.logits), alpha)
        return labo_objective(rows, rows.shifted.detach(), self.tau, alpha, self.rho)
