"""The paper: LABO, its later outer steps, the warm-up of Algorithm 1, the generalized objective."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..fast.kernel import LABO, LABO_ADAPTIVE, Kernel
from ..fields import NOT_NEGATIVE, POSITIVE, UNIT
from ..loss import Loss, hyper
from ..rows import Rows, row_sum, times
from ..sums import TEMPERED, RowSums


class LABOLoss(Loss):
    r"""LABO: the generalized objective at its optimal smoothing distribution (Theorem 1).

    With :math:`P^* = \mathrm{softmax}(z/\tau)` and :math:`\beta = \alpha\tau` the objective has
    the closed form

    .. math::
        R^* = \mathrm{lse}(z) - (1-\alpha) z_y - \alpha\tau\,(\mathrm{lse}(z/\tau) - \log K)

    over the K classes that are not masked, and its gradient in the logits is :math:`p - \hat P`.
    The value includes the KL term, as in the paper. That term changes the value and not the
    gradient: compare models by their NLL, not by this value. With class weights the smoothing
    distribution is still that of Theorem 1, held constant.

    alpha = "adaptive" is :math:`1 - \rho H(p)/\log K` for each sample, held constant. The paper
    does not say whether gradients flow through it. It matters: the paper's argument for ignoring
    the hypergradient holds for a constant alpha only. With ``alpha_grad=True`` alpha stays in the
    graph. The gradient is then no longer p - P_hat and can lower the true class.

    Example:
        >>> loss = LABOLoss(tau=1.25)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target), LABOLoss(alpha=0.1)(logits, target)
        (tensor(1.1205), tensor(0.5520))

    One dial: ``confidence`` in place of tau.

        >>> LABOLoss(confidence=0.8, num_classes=4).tau
        1.1876074392101608

    Reference:
        Lu et al. 2023, LABO: Towards Learning Optimal Label Regularization via Bi-level
        Optimization.
    """

    name, function_name = "labo", "labo_loss"
    smooths = True

    tau: float = hyper(
        default=1.25,
        within=POSITIVE,
        doc="beta / alpha, the temperature of the smoothing distribution; the paper searches "
        "{1.15, 1.25}. :func:`labo.smoothing.stationary_confidence` gives the confidence that a "
        "value leads to",
    )
    alpha: float | str = hyper(
        default="adaptive",
        within=UNIT,
        word="adaptive",
        doc='weight of the smoothing distribution: "adaptive", or a number in [0, 1]',
    )
    rho: float = hyper(
        default=0.5, within=UNIT, doc="how far the entropy of a prediction lowers adaptive alpha"
    )
    multiplier: float = hyper(
        default=1.0,
        within=NOT_NEGATIVE,
        doc="factor of the loss; ours, not the paper's. With SGD, LABO learns slowly at the "
        "learning rate of cross entropy, because it keeps a part of the label only; "
        "1 / :func:`labo.smoothing.stationary_label_weight` makes up for that",
    )
    alpha_grad: bool = hyper(default=False, doc="keep adaptive alpha in the graph, to study it")
    confidence: float | None = hyper(
        default=None,
        within=UNIT,
        doc="in place of tau: the confidence that fitted samples are to have; "
        ":func:`labo.smoothing.tau_for_confidence` gives the tau that leads there",
    )
    num_classes: int | None = hyper(
        default=None, at_least=2, doc="the number of classes, which confidence needs"
    )

    def check_together(self) -> None:
        if self.confidence is None:
            return
        # The default itself, not a number that is equal to it: then tau was not given.
        if self.tau is not self.fields["tau"].default:
            raise ValueError(
                f"tau={self.tau:g} and confidence={self.confidence:g} were given: confidence sets "
                "tau, so give one of them"
            )
        if self.num_classes is None:
            raise ValueError("confidence needs num_classes, the number of classes")
        from ..smoothing import tau_for_confidence

        self.tau = tau_for_confidence(
            self.confidence, self.num_classes, alpha=self.alpha, rho=self.rho
        )

    def value(self, row: RowSums) -> Tensor:
        alpha: float | Tensor
        log_classes = row.count.log()
        if isinstance(self.alpha, str):
            alpha = adaptive_strength(row, log_classes, self.rho, self.alpha_grad)
        else:
            alpha = self.alpha
        hard = times(1 - alpha, row.nll())
        if not row.weighted:
            optimum = self.tau * (row.tempered(self.tau).log() - log_classes)
            return self.multiplier * (hard + alpha * (row.log_e - optimum))
        star = row.masses(TEMPERED, self.tau)
        divergence = self.tau * (log_classes - star.q.log()) + star.qu.detach() / star.q
        soft = star.cross_entropy() / star.q
        return self.multiplier * (hard + alpha * soft + row.weigh(alpha * divergence))

    def reference_only(self, *inputs: Any) -> str | None:
        return "alpha_grad=True" if self.alpha_grad else None

    def kernel(self) -> Kernel | None:
        if self.z_loss:
            return None
        if isinstance(self.alpha, str):
            return Kernel(LABO_ADAPTIVE, 0.0, self.tau, self.rho, self.multiplier)
        return Kernel(LABO, self.alpha, self.tau, 0.0, self.multiplier)


def adaptive_strength(
    row: RowSums, log_classes: Tensor, rho: float, with_grad: bool = False
) -> Tensor:
    """alpha = 1 - rho H(p) / log K of each row, (N,)."""
    entropy = row.entropy() if with_grad else row.entropy().detach()
    largest = log_classes.masked_fill(row.count <= 1, 1.0)
    return 1 - rho * entropy.clamp(min=0) / largest


class HeldLABOLoss(LABOLoss):
    r"""LABO whose optimal smoothing is held: the objective of its second and later outer steps.

    Called as ``loss(logits, target, held_logits)``. With the logits :math:`z_0` from the start of
    the outer loop, :math:`P^*_0 = \mathrm{softmax}(z_0/\tau)`, :math:`\alpha_0` from :math:`z_0`,
    :math:`\beta_0 = \alpha_0\tau` and
    :math:`\hat P_0 = (1-\alpha_0)\,\mathrm{onehot}(y) + \alpha_0 P^*_0`:

    .. math:: -\sum_j \hat P_{0,j} \log p_j + \beta_0\, \mathrm{KL}(P^*_0 \Vert U)

    The label is a constant, so the gradient is :math:`p - \hat P_0`. Without ``held_logits``, as
    for the first update on a batch, or with those of the same prediction, it is LABO.

    Example:
        >>> loss, target = HeldLABOLoss(tau=1.25), torch.tensor([0])
        >>> start = torch.tensor([[2.0, 1.0, 0.1, -1.0]])
        >>> loss(start, target), loss(torch.tensor([[2.1, 1.0, 0.1, -1.0]]), target, start)
        (tensor(1.1205), tensor(1.1137))

    Reference:
        Lu et al. 2023, LABO; their limitations name the number of outer steps.
    """

    name, function_name = "held-labo", "held_labo_loss"
    without = ("alpha_grad",)
    teacher_argument = "held_logits"
    without_teacher = LABOLoss

    def on_rows(self, rows: Rows, held_logits: Tensor) -> Tensor:
        held = rows.teacher("held_logits", held_logits)
        return self.multiplier * labo_objective(rows, held, self.tau, self.alpha, self.rho)

    def reference_only(self, *inputs: Any) -> str | None:
        return "held_logits"

    def compute(self, logits: Tensor, target: Tensor, *inputs: Any, **keywords: Any) -> Tensor:
        # impl and inplace are for the call without held logits.
        loss = self.having(impl="auto", inplace=False) if inputs else self
        return super(HeldLABOLoss, loss).compute(logits, target, *inputs)


def labo_objective(rows: Rows, held: Tensor, tau: float, alpha: float | str, rho: float) -> Tensor:
    """The objective at the optimum of other logits, (M, K), held constant; per row, (M,)."""
    from ..smoothing import adaptive_alpha, tempered

    strength = adaptive_alpha(held, rho) if isinstance(alpha, str) else alpha
    return objective(rows, tempered(held, tau), strength, strength * tau)


def objective(
    rows: Rows, p_ls: Tensor, alpha: float | Tensor, beta: float | Tensor = 0.0
) -> Tensor:
    """R(P_ls) of :func:`smoothed_cross_entropy` per row, (M,)."""
    log_p = rows.log_probabilities()
    hard, soft = rows.nll(log_p), rows.cross_entropy(p_ls, log_p)
    values = times(1 - alpha, hard) + times(alpha, soft)
    if isinstance(beta, Tensor) or beta != 0:
        negative_entropy = row_sum(p_ls * torch.where(p_ls > 0, p_ls, 1.0).log())
        divergence = negative_entropy + rows.count().clamp(min=1).log()
        values = values + rows.weigh(beta * divergence)
    return values


# Training passes without a step after which a warm-up warns.
_PATIENCE = 1000


class Warmup(nn.Module):
    """The warm-up of Algorithm 1: ``before`` while the step i < ``steps``, then ``after``.

    Steps are counted from 1, so steps 1 .. steps - 1 use ``before``, and ``steps=1`` is no warm-up.
    Call ``step()`` after each optimizer step (not after each micro-batch), as with a learning-rate
    scheduler. The count is in ``state_dict()``.

    Teacher logits are passed on to the loss of the step, if it takes any.

    Args:
        before: the first loss; the paper uses label smoothing with alpha = 0.1.
        after: the loss after the warm-up.
        steps: T_w; 5000 (IWSLT) and 10000 (WMT) in the paper.

    Example:
        >>> from labo import LabelSmoothingLoss
        >>> loss = Warmup(LabelSmoothingLoss(alpha=0.1), LABOLoss(tau=1.25), steps=3)
        >>> for i in range(1, 5):
        ...     print(i, type(loss.active).__name__)
        ...     loss.step()
        1 LabelSmoothingLoss
        2 LabelSmoothingLoss
        3 LABOLoss
        4 LABOLoss
    """

    def __init__(self, before: nn.Module, after: nn.Module, steps: int) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be a whole number of 0 or more, got {steps!r}")
        self.before = before
        self.after = after
        self.steps = steps
        self._set(0)

    def _set(self, steps_done: int) -> None:
        self.steps_done = steps_done
        self._passes = 0  # in training, since the last step
        # forward reads this flag, not the count: torch.compile then compiles at most twice.
        self._warming = steps_done + 1 < self.steps

    @property
    def active(self) -> nn.Module:
        """The loss of the current step."""
        return self.before if self._warming else self.after

    def step(self) -> None:
        """Count one optimizer step."""
        self._set(self.steps_done + 1)

    def forward(
        self, logits: Tensor, target: Tensor, teacher_logits: Tensor | None = None, *draws: Tensor
    ) -> Tensor:
        if self._warming and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._passes += 1
            if self._passes == _PATIENCE:
                warnings.warn(
                    f"Warmup has had {_PATIENCE} training passes without a step: call step() after "
                    "each optimizer step. In Lightning use "
                    "labo.integrations.lightning.RegularizationCallback, in a Hugging Face Trainer "
                    "regularize(trainer, loss)",
                    stacklevel=2,
                )
        loss = self.before if self._warming else self.after
        unused = getattr(loss, "teacher_argument", "") is None
        extra = () if teacher_logits is None or unused else (teacher_logits, *draws)
        result: Tensor = loss(logits, target, *extra)
        return result

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steps_done)

    def set_extra_state(self, state: Tensor) -> None:
        self._set(int(state))

    def extra_repr(self) -> str:
        return f"steps={self.steps}, steps_done={self.steps_done}"
