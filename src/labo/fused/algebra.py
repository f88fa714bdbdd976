r"""Row-wise losses as formulas of a few sums over each row, for every fused backend.

Cross entropy, label smoothing and LABO have kernels of their own (:mod:`labo.fused.spec`). All
other fused losses are written here, once, as a function of sums. For a row of logits z with the
maximum m, over the classes that are not masked,

.. math:: u = z - m, \qquad e = \exp(u), \qquad r = \exp(u / \tau)

and masses q, which are held constant and make a distribution P = q / sum(q):

==================  ===============================================================================
masses              q_j
==================  ===============================================================================
``UNIFORM``         1
``TEMPERED``        r_j
``BEYOND_MARGIN``   1 if -u_j > margin, else 0
``FROM_ROW``        entry j of one row for all samples, such as a mask, (K,)
``FROM_TABLE``      entry j of the row of the target in a table, (K, K)
``FROM_TEACHER``    exp(v_j / tau), where v is a teacher's logits minus their maximum, (N, K)
==================  ===============================================================================

A backend gives the sums of e, u e, r, u r, q, u q, (v - u) q / tau, w q and w u q that the formula
asks for, where w are class weights. A formula may ask for the sums over the classes other than the
target ("others"): m and the teacher's maximum are then those of the other classes. The formula
makes the value of a row of them, of u_y and of m, in float64 and in plain PyTorch. Its derivatives
for the sums, by autograd, are the coefficients of the gradient, because the derivative of each sum
for z_j is known (the maximum m is a constant in u, which changes no gradient):

===============  =====================
sum              derivative
===============  =====================
e                e_j
u e              (1 + u_j) e_j
r                r_j / tau
u q              q_j
(v - u) q / tau  -q_j / tau
w u q            w_j q_j
emix             e_j log(1 + exp(-x_j))
===============  =====================

The backend writes the gradient, times a factor, in a second pass.

A formula may also ask for *stored* classes: k classes of each row, whose numbers log t_j come from
a teacher. They are in no sum, so that what is summed over the other classes keeps its digits when
the stored ones have almost all of the mass. The formula gets their u, (N, k), one by one, and the
derivatives for these are their entries of the gradient. No backend knows about them: both passes
read logits in which the stored classes are masked (in the buffer of the gradient, never in the
logits of the caller), and their entries are added to the 0 that is the gradient of a masked class.
The maximum of the sums is then that of the other classes, while u_y, u_stored and ``top`` have the
maximum of all classes; ``gap``, 0 or less, is the difference.

A formula may also ask for the u of the k largest logits of a row, as constants.

Some losses take the logs of a mixture m = (1 - a) U + a p with the uniform distribution U. For n
classes and x = u + s, s = log(a n / ((1 - a) sum(e))), they are

.. math:: \log m = \log \tfrac{1 - a}{n} + \log(1 + e^x) = \log p + \log a + \log(1 + e^{-x})

The sums of log(1 + exp(x)), "mix", and of e log(1 + exp(-x)), "emix", take a second call, because s
is known after the first one (:class:`RowMixture`). Both logs are held constant, as the masses are.

Some losses divide the logits of a row by their norm or standard deviation s. In the sums that is a
temperature tau s of the row, and another one for a teacher (:class:`RowTau`). The sums of u r and
u q give the derivative for tau s, and the gradient gets a term that is linear in the logits.

The functions of a backend are

- ``sums(logits, target, plan, weight, ignore_index, source)``: (N, 15) float64, the columns as
  :data:`SUMS`. Sums that were not asked for may hold anything; ignored rows are 0. With
  ``plan.mixture`` only "mix" and "emix" are computed.
- ``gradient(logits, target, plan, weight, ignore_index, source, coefficients, out)``: from the
  (N, 13) float64 ``coefficients``, the columns as :data:`COEFFICIENTS`. A target that is not a
  class has no entry. Ignored rows are 0.
- ``moments(logits, centered)``, only on the CPU: :data:`labo.fused.spread.Moments`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .._rows import entropy, largest, log_sum, times, wide
from .._stored import completed, divergence, log_or_0, renormalized
from .spread import DEVIATION, NORM, spread

NO_MASSES, UNIFORM, TEMPERED, BEYOND_MARGIN, FROM_ROW, FROM_TABLE, FROM_TEACHER = range(7)
COUNT, UE, R, QU, QD, WQU, TOP, OTHERS, UR, EMIX = (1 << i for i in range(10))
_NAMES = {
    **{"count": COUNT, "ue": UE, "r": R, "qu": QU, "qd": QD, "wqu": WQU},
    **{"top": TOP, "others": OTHERS, "emix": EMIX},
}

# ``top`` and ``source_top`` are the largest logits of a row and of its teacher; ``top_at`` is the
# first class that has it, if a formula asks for that; ``qd`` is the sum of (v - u) q / tau.
SUMS = (
    *("top", "source_top", "top_at", "count", "e", "ue", "r"),
    *("ur", "q", "qu", "qd", "wq", "wqu", "mix", "emix"),
)
MIXED = SUMS[-2:]  # those of a mixture
# The gradient is from_e e + from_ue u e + from_r r + (from_q + from_wq w) q + from_one + from_u u
# + from_emix e log(1 + exp(-x)), except that at_target and at_top are the entries of the target and
# of the class top_at (-1 for none). Masked classes have none of it.
COEFFICIENTS = (
    *("top", "source_top", "from_e", "from_ue", "from_r", "from_q"),
    *("from_wq", "from_one", "from_u", "from_emix", "at_target", "top_at", "at_top"),
)


class RowTau(NamedTuple):
    """Temperatures of the rows, of their logits and of the teacher's; (N,) float64.

    d tau / d z_j = slope (z_j - center).
    """

    tau: Tensor
    source_tau: Tensor
    center: Tensor
    slope: Tensor


class RowMixture(NamedTuple):
    """The maximum of each row and s, by which x differs from u; (N,) float64."""

    top: Tensor
    shift: Tensor


class Passes(NamedTuple):
    """What the two passes over the logits compute."""

    asked: int  # COUNT | UE | ...
    masses: int = NO_MASSES
    tau: float = 1.0
    margin: float = 0.0
    row_tau: RowTau | None = None  # in place of tau
    top_k: int = 0  # how many of the largest logits
    odds: float = 0.0  # a / (1 - a), where a is the share of p in a mixture
    mixture: RowMixture | None = None  # known after the first sums

    def mixed(self, found: dict[str, Tensor], top: Tensor) -> Passes:
        """With the mixture of rows whose first sums are known."""
        shift = (self.odds * found["count"] / found["e"]).log()
        return self._replace(mixture=RowMixture(top, shift))


class FormulaSpec(NamedTuple):
    """A loss that is a formula: its name, its parameters, and lambda of a z-loss that is added."""

    name: str
    parameters: tuple[float, ...] = ()
    z_loss: float = 0.0


class RowSums:
    """What a formula is made of: (N,) float64 tensors.

    Attributes:
        e, ue, r, q, qu, qd, wq, wqu, mix, emix, count, top: see the module. Without class weights
            ``wq`` and ``wqu`` are ``q`` and ``qu``. ``q``, ``wq``, ``mix``, ``count`` and ``top``
            are constants.
        u_y, v_y, q_y, w_y: u, the teacher's v, q and the class weight of the target. u_y and v_y
            are -inf if it is masked. w_y is 1.0 without class weights.
        u_top: 0, with the gradient of the largest logit.
        u_stored, log_t: u and the teacher's log-probabilities of the stored classes, (N, k); -inf
            for padding, and u_stored also for masked classes.
        u_largest: u of the largest logits, (N, k), in descending order; a constant.
        gap: with stored classes, the maximum of the others minus that of all classes.
        tau, source_tau: the temperatures of r and of a teacher: numbers, or those of each row.
        classes: K, a tensor without dimensions.
        log_e: the log of the sum of e over all classes, also those that are not in the sums.
    """

    top: Tensor
    count: Tensor
    e: Tensor
    ue: Tensor
    r: Tensor
    q: Tensor
    qu: Tensor
    qd: Tensor
    wq: Tensor
    wqu: Tensor
    mix: Tensor
    emix: Tensor
    u_y: Tensor
    v_y: Tensor
    q_y: Tensor
    u_top: Tensor
    u_stored: Tensor
    log_t: Tensor
    u_largest: Tensor
    gap: Tensor

    tau: float | Tensor
    source_tau: float | Tensor

    def __init__(
        self,
        found: dict[str, Tensor],
        w_y: float | Tensor,
        classes: int | Tensor,
        plan: Passes,
    ) -> None:
        self.tau = self.source_tau = plan.tau
        for name, value in found.items():
            setattr(self, name, value)
        self.w_y, self.weighted = w_y, isinstance(w_y, Tensor)
        self.others = others = bool(plan.asked & OTHERS)
        if not isinstance(classes, Tensor):
            classes = self.e.new_full((), classes)
        self.classes = classes.to(self.e.dtype)
        if "u_stored" in found:
            rest = log_or_none(self.e) + self.gap
            self.log_e = log_sum(torch.cat([rest.unsqueeze(1), self.u_stored], 1))
        elif others:
            self.log_e = torch.logaddexp(log_or_none(self.e), self.u_y)
        else:
            self.log_e = self.e.log()

    def log_p_y(self) -> Tensor:
        if self.others:  # exact also where p_y is almost 1
            return torch.nn.functional.logsigmoid(self.u_y - log_or_none(self.e))
        return self.u_y - self.log_e

    def nll(self) -> Tensor:
        """w_y (-log p_y)."""
        return self.weigh(-self.log_p_y())

    def weigh(self, penalty: Tensor) -> Tensor:
        """A term that is not a sum over the label, times the weight of the target."""
        return times(self.w_y, penalty) if self.weighted else penalty

    def cross_entropy(self) -> Tensor:
        """-sum_j w_j q_j log p_j, not yet divided by the sum of q."""
        return self.wq * self.log_e - self.wqu

    def entropy(self) -> Tensor:
        """H(p), in nats."""
        return self.log_e - self.ue / self.e

    def distillation(self, tau: float) -> Tensor:
        """tau^2 KL(P || softmax(z / tau)) with the masses of a teacher."""
        return tau**2 * (self.qd / self.q - self.q.log() + self.r.log())


def over_tau(x: Tensor, tau: float | Tensor) -> Tensor:
    """x / tau; -inf, without a gradient for tau, where x is -inf."""
    masked = x == -math.inf
    return (x.masked_fill(masked, 0.0) / tau).masked_fill(masked, -math.inf)


def log_or_none(total: Tensor) -> Tensor:
    """The log of a sum; -inf without a gradient if it is 0 because there is no class."""
    empty = total == 0
    return total.masked_fill(empty, 1.0).log().masked_fill(empty, -math.inf)


class Formula:
    """A loss as a function of :class:`RowSums` and parameters.

    Called with the parameters, it gives a :class:`FormulaSpec`.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        asked: str,
        weighted: str,
        masses: int,
        spread: str | None,
        stored: bool,
        largest: bool,
    ) -> None:
        self.function = function
        self.name = function.__name__
        self.parameters = tuple(inspect.signature(function).parameters)[1:]
        self.asked, self.weighted = (
            sum(_NAMES[name] for name in names.split()) for names in (asked, weighted)
        )
        self.masses, self.spread, self.stored, self.largest = masses, spread, stored, largest

    @property
    def measures(self) -> bool:
        """Whether all classes are in the sums, so that :func:`rows` can give the statistics."""
        return not (self.stored or self.asked & OTHERS)

    def __call__(self, *parameters: float, z_loss: float = 0.0) -> FormulaSpec:
        return FormulaSpec(self.name, tuple(float(x) for x in parameters), z_loss)

    def plan(self, parameters: tuple[float, ...], weighted: bool) -> Passes:
        named = dict(zip(self.parameters, parameters, strict=True))
        asked = self.weighted if weighted else self.asked
        if self.spread is not None:
            asked |= UR | QU if asked & QD else UR
        uses_masses = asked & (QU | QD | WQU)
        masses = self.masses if uses_masses else NO_MASSES
        plan = Passes(asked, masses, named.get("tau", 1.0), named.get("margin", 0.0))
        if asked & EMIX:
            plan = plan._replace(odds=named["alpha"] / (1 - named["alpha"]))
        return plan._replace(top_k=int(named["top_k"])) if self.largest else plan


FORMULAS: dict[str, Formula] = {}


def formula(
    asked: str = "",
    masses: int = NO_MASSES,
    *,
    weighted: str | None = None,
    spread: str | None = None,
    stored: bool = False,
    largest: bool = False,
) -> Callable[[Callable[..., Tensor]], Formula]:
    """Register a formula.

    Its parameters are numbers. One that is called ``tau`` or ``margin`` is that of r and q. With
    "emix" the one that is called ``alpha`` is the share of p in the mixture, and with ``largest``
    the one that is called ``top_k`` tells how many.

    Args:
        asked: which of the sums "count", "ue", "r", "qu" and "qd" it uses, and "top" for u_top.
            The sum of q comes with those of its products. With "others" the target is in no sum.
            "emix" comes with "mix" and needs "count".
        masses: where q comes from.
        weighted: the same as ``asked`` if there are class weights, also "wqu" (with it wq).
        spread: what the logits are divided by in r and in the masses of a teacher, if anything:
            ``NORM`` or ``DEVIATION``.
        stored: whether it takes stored classes, which are then in no sum.
        largest: whether it takes the largest logits.
    """

    def register(function: Callable[..., Tensor]) -> Formula:
        with_weights = asked if weighted is None else weighted
        made = Formula(function, asked, with_weights, masses, spread, stored, largest)
        FORMULAS[made.name] = made
        return made

    return register


# ------------------------------------------------------------------ the losses


@formula()
def cross_entropy(row: RowSums) -> Tensor:
    return row.nll()


@formula()
def z_squared(row: RowSums, lam: float) -> Tensor:
    return _z_loss(row, lam)


def _z_loss(row: RowSums, lam: float) -> Tensor:
    return row.weigh(lam * (row.top + row.log_e).square())


@formula()
def focal(row: RowSums, gamma: float, detach: float) -> Tensor:
    return _modulated(row, -torch.expm1(row.log_p_y()), gamma, detach)


@formula()
def anti_focal(row: RowSums, gamma: float, scale: float, detach: float) -> Tensor:
    return _modulated(row, 1 + scale * row.log_p_y().exp(), gamma, detach)


def _modulated(row: RowSums, base: Tensor, gamma: float, detach: float) -> Tensor:
    base = base.detach() if detach else base
    return base.clamp(min=torch.finfo(base.dtype).tiny) ** gamma * row.nll()


@formula()
def poly1(row: RowSums, epsilon: float) -> Tensor:
    log_p = row.log_p_y()
    return -row.weigh(log_p + epsilon * torch.expm1(log_p))


@formula("r", spread=NORM)
def logit_norm(row: RowSums, tau: float) -> Tensor:
    return row.weigh(row.r.log() - over_tau(row.u_y, row.tau))


@formula()
def dft(row: RowSums) -> Tensor:
    return times(row.log_p_y().detach().exp(), row.nll())


@formula("ue count")
def eaft(row: RowSums, gamma: float, normalizer: float) -> Tensor:
    """A normalizer of 0 stands for the log of the number of classes that are not masked."""
    return _times_entropy(row, row.entropy().detach(), row.count, gamma, normalizer)


@formula(largest=True)
def eaft_of_largest(row: RowSums, gamma: float, normalizer: float, top_k: float) -> Tensor:
    log_q = torch.log_softmax(row.u_largest, 1)
    count = (log_q != -math.inf).sum(1).double()
    return _times_entropy(row, entropy(log_q), count, gamma, normalizer)


def _times_entropy(
    row: RowSums, h: Tensor, count: Tensor, gamma: float, normalizer: float
) -> Tensor:
    most = count.log().masked_fill(count <= 1, math.inf)
    return times((h.clamp(min=0) / (normalizer or most)) ** gamma, row.nll())


@formula("ue")
def confidence_penalty(row: RowSums, beta: float) -> Tensor:
    return row.nll() - row.weigh(beta * row.entropy())


@formula("ue")
def confidence_hinge(row: RowSums, beta: float, threshold: float) -> Tensor:
    return row.nll() + row.weigh(beta * (threshold - row.entropy()).clamp(min=0))


@formula("qu top", UNIFORM)
def max_suppression(row: RowSums, lam: float) -> Tensor:
    return row.nll() + row.weigh(lam * (row.u_top - row.qu / row.q))


@formula("qu top count", BEYOND_MARGIN)
def margin_smoothing(row: RowSums, lam: float, margin: float) -> Tensor:
    excess = row.q * (row.u_top - margin) - row.qu
    return row.nll() + row.weigh(lam * excess / row.count)


@formula("ue count")
def entropy_to_uniform(row: RowSums, beta: float) -> Tensor:
    """Generalized entropy at alpha = 0: KL(p || U)."""
    return row.nll() + row.weigh(beta * (row.count.log() - row.entropy()))


@formula("qu", UNIFORM)
def uniform_to_prediction(row: RowSums, beta: float) -> Tensor:
    """Generalized entropy at alpha = 1: KL(U || p)."""
    return row.nll() + row.weigh(beta * (row.log_e - row.qu / row.q - row.q.log()))


@formula("count emix")
def jensen(row: RowSums, alpha: float, beta: float) -> Tensor:
    """Generalized entropy between the ends: KL(U || m) / alpha + KL(p || m) / (1 - alpha)."""
    of_uniform = -(math.log1p(-alpha) + row.mix / row.count) / alpha
    of_p = -(math.log(alpha) + row.emix / row.e) / (1 - alpha)
    return row.nll() + row.weigh(beta * (of_uniform + of_p))


@formula("r count")
def squared_distance(row: RowSums, beta: float, tau: float) -> Tensor:
    """Generalized entropy, "euclidean": |p - U|^2, with tau = 1/2, so that r = e^2."""
    return row.nll() + row.weigh(beta * (row.r / row.e.square() - 1 / row.count))


@formula("qu", UNIFORM, weighted="wqu")
def label_smoothing(row: RowSums, alpha: float) -> Tensor:
    return times(1 - alpha, row.nll()) + alpha * row.cross_entropy() / row.q


@formula("r", TEMPERED, weighted="qu wqu")
def labo(row: RowSums, alpha: float, tau: float, multiplier: float) -> Tensor:
    return multiplier * _labo(row, alpha, tau)


@formula("ue r", TEMPERED, weighted="ue qu wqu")
def labo_adaptive(row: RowSums, rho: float, tau: float, multiplier: float) -> Tensor:
    largest = row.classes.log().masked_fill(row.classes <= 1, 1.0)
    alpha = 1 - rho * row.entropy().detach().clamp(min=0) / largest
    return multiplier * _labo(row, alpha, tau)


def _labo(row: RowSums, alpha: float | Tensor, tau: float) -> Tensor:
    hard, log_classes = times(1 - alpha, row.nll()), row.classes.log()
    if not row.weighted:  # the closed form of labo.functional.labo_loss
        return hard + alpha * (row.log_e - tau * (row.r.log() - log_classes))
    divergence = tau * (log_classes - row.q.log()) + row.qu.detach() / row.q
    return hard + alpha * row.cross_entropy() / row.q + row.weigh(alpha * divergence)


@formula("qu", UNIFORM, weighted="wqu")
def fairseq_smoothing(row: RowSums, alpha: float) -> Tensor:
    return _smoothing_of_others(row, alpha)


@formula("qu", FROM_ROW, weighted="wqu")
def joeynmt_smoothing(row: RowSums, alpha: float) -> Tensor:
    """The row is 0 for the padding class and 1 for the others."""
    return _smoothing_of_others(row, alpha)


def _smoothing_of_others(row: RowSums, alpha: float) -> Tensor:
    others = row.q - row.q_y
    soft = row.cross_entropy() - times(row.q_y, row.nll())
    soft = torch.where(others > 0, soft / others.clamp(min=1), row.nll())
    return times(1 - alpha, row.nll()) + times(alpha, soft)


@formula("qu", FROM_ROW, weighted="wqu")
def masked_smoothing(row: RowSums, alpha: float) -> Tensor:
    """The row is 1 for classes that may get smoothing mass, else 0."""
    e = alpha / (row.q - 1).clamp(min=1)
    return times(1 - alpha - e, row.nll()) + e * row.cross_entropy()


@formula("qu", FROM_ROW, weighted="wqu")
def weighted_smoothing(row: RowSums, alpha: float, first: float, normalize: float) -> Tensor:
    """The row has the share of each class in the smoothing mass; ``first`` is that of group 0."""
    total = row.q.masked_fill(row.q == 0, 1.0)
    of_first = alpha * first / total
    label = times(1 - alpha - of_first, row.nll()) + alpha * row.cross_entropy() / total
    return label / (1 - of_first) if normalize else label


@formula("qu", FROM_TABLE, weighted="wqu")
def table_smoothing(row: RowSums, hard_weight: float, soft_weight: float) -> Tensor:
    soft = row.cross_entropy() / row.q.masked_fill(row.q == 0, 1.0)
    return times(hard_weight, row.nll()) + soft_weight * soft


@formula("qu", UNIFORM)
def tf_reg(
    row: RowSums,
    alpha: float,
    teacher_tau: float,
    confidence: float,
    multiplier: float,
    mean: float,
) -> Tensor:
    """The KL divergence is a sum over the classes, or their mean."""
    factor = alpha * multiplier / (row.classes if mean else 1)
    kl = _virtual_teacher_kl(row, confidence, teacher_tau, 1.0, row.log_e)
    return times(1 - alpha, row.nll()) + row.weigh(factor * kl)


@formula("qu r", UNIFORM)
def tf_reg_tempered(
    row: RowSums, alpha: float, tau: float, confidence: float, factor: float
) -> Tensor:
    kl = _virtual_teacher_kl(row, confidence, tau, tau, row.r.log())
    return times(1 - alpha, row.nll()) + row.weigh(alpha * factor * kl)


def _virtual_teacher_kl(
    row: RowSums, confidence: float, teacher_tau: float, tau: float, log_sum: Tensor
) -> Tensor:
    """KL(s || softmax(z / tau)), where s gives one value to the target and one to each other."""
    logit = confidence / teacher_tau
    other = (1 - confidence) / (row.classes - 1).clamp(min=1) / teacher_tau
    others = row.q - row.q_y
    log_total = (row.q_y * math.exp(logit) + others * other.exp()).log()
    s_y, s = row.q_y * (logit - log_total).exp(), (other - log_total).exp()
    negative_entropy = s_y * (logit - log_total) + others * s * (other - log_total)
    mean_u = s * row.qu + times(s_y - s * row.q_y, row.u_y)
    return negative_entropy - mean_u / tau + log_sum


@formula("qd r", FROM_TEACHER)
def distillation(row: RowSums, alpha: float, tau: float, multiplier: float, mean: float) -> Tensor:
    """The KL divergence is a sum over the classes, or their mean."""
    factor = alpha * multiplier / (row.classes if mean else 1)
    return times(1 - alpha, row.nll()) + row.weigh(factor * row.distillation(tau))


@formula("qd r", FROM_TEACHER, spread=DEVIATION)
def standardized_distillation(
    row: RowSums, alpha: float, tau: float, multiplier: float, mean: float
) -> Tensor:
    factor = alpha * multiplier / (row.classes if mean else 1)
    return times(1 - alpha, row.nll()) + row.weigh(factor * row.distillation(tau))


@formula("qd r", FROM_TEACHER)
def peer_distillation(row: RowSums, lam: float, tau: float) -> Tensor:
    return row.nll() + row.weigh(lam * row.distillation(tau))


@formula("r qd others", FROM_TEACHER)
def decoupled_distillation(
    row: RowSums, alpha: float, beta: float, tau: float, hard_weight: float, multiplier: float
) -> Tensor:
    soft = multiplier * tau**2 * _decoupled(row, alpha, beta)
    return times(hard_weight, row.nll()) + row.weigh(soft)


@formula("r qd others", FROM_TEACHER, spread=DEVIATION)
def standardized_decoupled_distillation(
    row: RowSums, alpha: float, beta: float, tau: float, hard_weight: float, multiplier: float
) -> Tensor:
    soft = multiplier * tau**2 * _decoupled(row, alpha, beta)
    return times(hard_weight, row.nll()) + row.weigh(soft)


def _decoupled(row: RowSums, alpha: float, beta: float) -> Tensor:
    log_q, log_r = log_or_none(row.q), log_or_none(row.r)
    teacher = over_tau(row.v_y, row.source_tau) - log_q  # the logit of the target
    student = over_tau(row.u_y, row.tau) - log_r
    of_target = _binary_kl_term(teacher, student) + _binary_kl_term(-teacher, -student)
    alone = row.q == 0  # the teacher has no other class
    mean_d = row.qd / row.q.masked_fill(alone, 1.0)
    of_others = (mean_d - log_q + log_r).masked_fill(alone, 0.0)
    return alpha * of_target + beta * of_others


def _binary_kl_term(a: Tensor, b: Tensor) -> Tensor:
    """p log(p / s), p = sigmoid(a), s = sigmoid(b), with 0 log 0 = 0."""
    log_p, log_s = (torch.nn.functional.logsigmoid(x) for x in (a, b))
    return log_p.exp() * (log_p - log_s).masked_fill(log_p == -math.inf, 0.0)


@formula("qu", FROM_TEACHER, weighted="wqu")
def past_prediction(row: RowSums, alpha: float) -> Tensor:
    return times(1 - alpha, row.nll()) + times(alpha, row.cross_entropy() / row.q)


@formula(stored=True)
def stored_alone(row: RowSums, alpha: float, renormalize: float) -> Tensor:
    log_t, _ = _stored_label(row)
    return _from_stored(row, alpha, renormalized(log_t) if renormalize else log_t)


@formula(stored=True)
def stored_and_bucket(row: RowSums, alpha: float) -> Tensor:
    """All other classes as one."""
    log_share = log_or_0(row.e) + row.gap - row.log_e
    return _from_stored(row, alpha, *_stored_label(row), -log_share)


@formula("qu", UNIFORM, stored=True)
def stored_and_uniform(row: RowSums, alpha: float) -> Tensor:
    count = row.q.clamp(min=1)
    tail = row.log_e - (row.gap + row.qu / count) - count.log()
    return _from_stored(row, alpha, *_stored_label(row), tail)


@formula("qu", TEMPERED, stored=True)
def stored_and_tempered(row: RowSums, alpha: float, tau: float) -> Tensor:
    """The others have softmax(z / tau), held constant."""
    total = row.q.masked_fill(row.q == 0, 1.0)
    negative_entropy = row.qu.detach() / total / tau - total.log()
    tail = negative_entropy + row.log_e - (row.gap + row.qu / total)
    return _from_stored(row, alpha, *_stored_label(row), tail)


def _stored_label(row: RowSums) -> tuple[Tensor, Tensor]:
    """The label: log t of the stored classes, (N, k), and the mass of the others, (N,)."""
    return completed(row.log_t, row.u_stored == -math.inf, row.e == 0)


def _from_stored(
    row: RowSums,
    alpha: float,
    log_t: Tensor,
    mass: Tensor | None = None,
    tail: Tensor | None = None,
) -> Tensor:
    """``tail`` is the KL divergence of the other classes' distribution from their p."""
    soft = divergence(log_t, row.u_stored - row.log_e.unsqueeze(1))
    if mass is not None and tail is not None:
        soft = soft + mass * (log_or_0(mass) + tail)
    return times(1 - alpha, row.nll()) + row.weigh(alpha * soft)


# ------------------------------------------------------------------ from sums to rows


def rows(
    backend: ModuleType,
    logits: Tensor,
    target: Tensor,
    spec: FormulaSpec,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
    source: Tensor | None = None,
    stored: Tensor | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of rows by a backend; the contract is in :mod:`labo.fused.spec`.

    Args:
        source: what the masses come from, see the module; None if they come from the logits. With
            stored classes: their log-probabilities, (N, k).
        stored: (N, k) stored classes, -1 for padding.
        statistics: (N, 5) float64, filled as by :func:`labo.fused.metrics.row_statistics`, for a
            formula that measures them.
    """
    formula = FORMULAS[spec.name]
    plan = formula.plan(spec.parameters, weight is not None)
    if statistics is not None:
        plan = plan._replace(asked=plan.asked | UE)
    if formula.spread is not None:
        how = (formula.spread, getattr(backend, "moments", None))
        own = spread(logits, *how)
        taught = own if source is None else spread(source, *how, logits, own)
        sizes = (plan.tau * own.size, plan.tau * taught.size)
        plan = plan._replace(row_tau=RowTau(*sizes, own.center, plan.tau * own.slope))
    if weight is not None:
        weight = weight.detach().to(wide(logits.dtype))
    ignored = target == ignore_index
    # On the CPU values can be read at no cost. Elsewhere that would wait for the device.
    some_ignored = not logits.is_cpu or bool(ignored.any())
    y = target.masked_fill(ignored, 0) if some_ignored else target
    z_y = entries_of(logits, y.unsqueeze(1)).squeeze(1)
    z_largest = largest(logits, plan.top_k).double() if plan.top_k else None
    z_stored = log_t = None
    if stored is not None and source is not None:
        z_stored, log_t, source = entries_of(logits, stored), source.double(), None
        logits = out = _without_stored(logits, stored, out)
    fixed = (logits, target, plan, weight, ignore_index, source)
    limits = torch.finfo(wide(logits.dtype) if plan.row_tau is None else torch.float64)
    found = _found(plan, backend.sums(*fixed), z_y, limits)
    if statistics is not None:
        torch.stack(statistics_of(found), 1, out=statistics)
        statistics.masked_fill_(ignored.unsqueeze(1), 0.0)
    if z_stored is not None and log_t is not None:
        found |= {"log_t": log_t, **_found_apart(found, z_y, z_stored, limits)}
    if z_largest is not None:
        found["u_largest"] = u_of(z_largest, found["top"].unsqueeze(1), limits)
    if plan.asked & EMIX:
        plan = plan.mixed(found, found["top"])
        fixed = (logits, target, plan, weight, ignore_index, source)
        again = _found(plan, backend.sums(*fixed), z_y, limits)
        found |= {name: again[name] for name in MIXED}
    found |= masses_of(plan, y, found.get("sums_u_y", found["u_y"]), source, found["source_top"])
    w_y = 1.0 if weight is None else weight[y].double()
    values, slopes = differentiate(spec, plan, found, w_y, y, logits.shape[1], factor, stored)
    values = values.masked_fill(ignored, 0.0) if some_ignored else values
    values = values.to(wide(logits.dtype))
    if slopes is None:
        return values, None
    if some_ignored:
        slopes = Slopes(*(x.masked_fill(ignored.unsqueeze(1), 0.0) for x in slopes))
    if out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad: Tensor = backend.gradient(*fixed, slopes.coefficients, out)
    if stored is not None:
        _add_entries(grad, stored, slopes.entries)
    return values, grad


class Slopes(NamedTuple):
    """The gradient of a formula: the coefficients, and the entries of the stored classes."""

    coefficients: Tensor  # (N, 13)
    entries: Tensor  # (N, k)


def entries_of(logits: Tensor, index: Tensor) -> Tensor:
    """Some logits of each row, float64, from (N, k) indices; -inf for a negative index."""
    z = logits.gather(1, index.clamp(min=0)).double()
    return z.masked_fill(index < 0, -math.inf)


def _without_stored(logits: Tensor, index: Tensor, out: Tensor | None) -> Tensor:
    """The logits with the stored classes masked, in the buffer of the gradient."""
    if out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if out is not logits:
        out.copy_(logits)
    return _add_entries(out, index, torch.full(index.shape, -math.inf, device=index.device))


def _add_entries(rows: Tensor, index: Tensor, entries: Tensor) -> Tensor:
    """Add ``entries`` to the rows, in place, at the (N, k) indices that are not negative."""
    entries = entries.masked_fill(index < 0, 0.0).to(rows.dtype)
    return rows.scatter_add_(1, index.clamp(min=0), entries)


def _found(plan: Passes, sums: Tensor, z_y: Tensor, limits: torch.finfo) -> dict[str, Tensor]:
    """The sums by name, and u_y."""
    # Columns in one piece: elementwise functions of PyTorch may round strided ones differently.
    found = dict(zip(SUMS, sums.T.contiguous().unbind(), strict=True))
    if plan.asked & OTHERS:  # without other classes any finite maximum serves
        for name in ("top", "source_top"):
            found[name] = found[name].masked_fill(found[name] == -math.inf, 0.0)
    return found | {"u_y": u_of(z_y, found["top"], limits)}


def statistics_of(found: dict[str, Tensor]) -> list[Tensor]:
    """The columns of the statistics of rows, from the sums of e and u e, the maximum and u_y."""
    log_e, u_y = found["e"].log(), found["u_y"]
    entropy = (log_e - found["ue"] / found["e"]).clamp(min=0.0)
    correct = (u_y >= 0) & ~found["e"].isnan()
    return [log_e - u_y, entropy, correct.double(), found["top"], log_e]


def _found_apart(
    found: dict[str, Tensor], z_y: Tensor, z_stored: Tensor, limits: torch.finfo
) -> dict[str, Tensor]:
    """With stored classes: what has the maximum of all classes, and what has that of the sums."""
    here = found["top"]
    top = torch.maximum(here, z_stored.amax(1))
    top = top.masked_fill(top == -math.inf, 0.0)
    here = torch.where(here == -math.inf, top, here)  # without other classes any number serves
    return {
        "top": top,
        "u_y": u_of(z_y, top, limits),
        "u_stored": u_of(z_stored, top.unsqueeze(1), limits),
        "gap": u_of(here, top, limits),
        "sums_top": here,
        "sums_u_y": u_of(z_y, here, limits),
    }


def u_of(z: Tensor, top: Tensor, limits: torch.finfo) -> Tensor:
    """u of single logits, float64: -inf if one is masked, else within the limits."""
    return torch.where(z.isinf(), z, (z - top).clamp(limits.min, limits.max))


def masses_of(
    plan: Passes, y: Tensor, u_y: Tensor, source: Tensor | None, source_top: Tensor
) -> dict[str, Tensor]:
    """q of the target, and v with a teacher; (N,) float64."""
    if plan.masses == TEMPERED:
        return {"q_y": (u_y / plan.tau).exp()}
    masked = u_y == -math.inf
    if plan.masses == BEYOND_MARGIN:
        return {"q_y": (-u_y > plan.margin).double().masked_fill(masked, 0.0)}
    if source is None:
        return {"q_y": (~masked).double()}
    if plan.masses == FROM_TEACHER:
        v_y = source.gather(1, y.unsqueeze(1)).squeeze(1).double() - source_top
        v_y = v_y.masked_fill(masked, -math.inf)
        tau = plan.tau if plan.row_tau is None else plan.row_tau.source_tau
        return {"q_y": (v_y / tau).exp(), "v_y": v_y}
    mass = (source[y] if source.dim() == 1 else source[y, y]).double()
    return {"q_y": mass.masked_fill(masked, 0.0)}


# What a formula is differentiated for.
_VARIABLES = ("e", "ue", "r", "qu", "qd", "wqu", "emix", "u_y", "u_top", "tau", "u_stored")


def differentiate(
    spec: FormulaSpec,
    plan: Passes,
    found: dict[str, Tensor],
    w_y: float | Tensor,
    y: Tensor,
    classes: int | Tensor,
    factor: float | Tensor | None,
    stored: Tensor | None = None,
) -> tuple[Tensor, Slopes | None]:
    """The values of a formula, (N,), and the slopes of sum_i factor_i value_i.

    Args:
        spec, plan: of the formula.
        found: the sums, u_y, q_y and v_y, and u_stored and log_t with stored classes.
        w_y: the class weights of the targets, or 1.0.
        y: the targets.
        classes: K.
        factor: None for values only.
        stored: (N, k) stored classes.
    """
    zero = torch.zeros_like(found["e"])
    found = found | {"u_top": zero}
    if plan.row_tau is not None:
        found |= {"tau": plan.row_tau.tau, "source_tau": plan.row_tau.source_tau}
    if not plan.asked & WQU:
        found |= {"wq": found["q"], "wqu": found["qu"]}
    optional = ("ue", "r", "qu", "qd", "wqu", "emix")
    unused = {name for name in optional if not plan.asked & _NAMES[name]}
    variables = [name for name in _VARIABLES if name in found and name not in unused]
    with autograd_enabled() if factor is not None else torch.no_grad():
        if factor is not None:
            for name in variables:
                found[name] = found[name].detach().requires_grad_()
            if not plan.asked & WQU:
                found["wqu"] = found["qu"]
        row = RowSums(found, w_y, classes, plan)
        values = FORMULAS[spec.name].function(row, *spec.parameters)
        if spec.z_loss:
            values = values + _z_loss(row, spec.z_loss)
        if factor is None:
            return values, None
        upstream = factor.double() if isinstance(factor, Tensor) else torch.full_like(zero, factor)
        leaves = [found[name] for name in variables]
        grads = torch.autograd.grad(values, leaves, upstream, allow_unused=True)
    slopes = {name: x for name, x in zip(variables, grads, strict=True) if x is not None}
    coefficients = _coefficients(plan, found, slopes, w_y, y)
    if stored is None:
        return values.detach(), Slopes(coefficients, zero.new_empty(len(zero), 0))
    # A target that is stored has no entry among the coefficients. It is in no sum.
    targets = stored == y.unsqueeze(1)
    at_target = coefficients[:, COEFFICIENTS.index("at_target")]
    at_target.masked_fill_(targets.any(1), 0.0)
    of_y = slopes.get("u_y", zero).unsqueeze(1)
    return values.detach(), Slopes(coefficients, slopes["u_stored"] + of_y * targets)


def _coefficients(
    plan: Passes,
    found: dict[str, Tensor],
    slopes: dict[str, Tensor],
    w_y: float | Tensor,
    y: Tensor,
) -> Tensor:
    """The coefficients of the gradient from the derivatives for the sums."""
    u_y, top = (found.get(f"sums_{name}", found[name]).detach() for name in ("u_y", "top"))
    zero = torch.zeros_like(u_y)
    e, ue, r, qu, qd, wqu, emix, of_y, of_top, of_tau = (
        slopes.get(name, zero) for name in _VARIABLES[:-1]
    )
    tau = plan.tau if plan.row_tau is None else plan.row_tau.tau
    from_e, from_ue, from_r, from_q = e + ue, ue, r / tau, qu - qd / tau
    from_one, from_u = zero, zero
    at_target, at_top, top_at = of_y, zero, zero - 1
    if plan.row_tau is not None:
        of_tau = of_tau + (qd * found["qu"].detach() - r * found["ur"]) / tau**2
        from_u = of_tau * plan.row_tau.slope
        from_one = from_u * (top - plan.row_tau.center)
        linear = from_one + from_u * u_y
        at_target = at_target + linear.masked_fill(u_y == -math.inf, 0.0)
    if not plan.asked & OTHERS:
        at_target = at_target + from_e * u_y.exp()
        if plan.asked & UE:
            at_target = at_target + ue * (u_y * u_y.exp()).masked_fill(u_y == -math.inf, 0.0)
        if plan.asked & R:
            at_target = at_target + from_r * (u_y / tau).exp()
        if plan.mixture is not None:
            log_y = torch.logaddexp(zero, -(u_y + plan.mixture.shift))
            at_target = at_target + emix * (u_y.exp() * log_y).masked_fill(u_y == -math.inf, 0.0)
        if plan.masses != NO_MASSES:
            at_target = at_target + (from_q + wqu * w_y) * found["q_y"]
    if plan.asked & TOP:
        top_at = found["top_at"]
        at_target = at_target + of_top.masked_fill(top_at != y, 0.0)
        at_top = from_e + from_r + of_top + (0.0 if plan.masses == BEYOND_MARGIN else from_q)
    return torch.stack(
        [
            *(top, found["source_top"], from_e, from_ue, from_r, from_q),
            *(wqu, from_one, from_u, emix, at_target, top_at, at_top),
        ],
        1,
    )


@contextmanager
def autograd_enabled() -> Iterator[None]:
    """Make autograd work inside an operator of torch.compile, where PyTorch switches it off."""
    off = torch._C._dispatch_tls_local_exclude_set()
    guard = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(),
        off.remove(torch._C.DispatchKey.AutogradFunctionality),
    )
    with guard, torch.enable_grad():
        yield
