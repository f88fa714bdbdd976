r"""The losses that the fused backends compute, and the rules that every backend follows.

Cross entropy, label smoothing and LABO are cross entropies with a label
:math:`\hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P`. They differ in P and alpha. Three
backends compute them with the same results: :mod:`labo.fused.blocked`, :mod:`labo.fused.native`
and :mod:`labo.fused.kernels`. Each has one function for them; all other losses are formulas
(:mod:`labo.fused.algebra`), which any backend computes in two passes with the same contract:

``rows(logits, target, spec, *, weight, ignore_index, factor, out) -> (values, grad)``

- ``logits``: (N, K); ``target``: (N,) int64, checked before; ``weight``: (K,) class weights.
- ``factor``: None for values only. For the gradient too: the number, or the (N,) numbers, that it
  is multiplied with before it is rounded to the dtype of the logits.
- ``out``: where the gradient is written, (N, K) of the dtype of the logits. May be ``logits``. A
  buffer that is given may be overwritten also if there is no gradient.
- ``values``: (N,), at least float32. The value and the gradient of an ignored row are 0, whatever
  its logits are.

The rules, which the reference follows too:

- A class whose logit is -inf is masked. It has no part in P, and its gradient is 0 unless it is
  the label.
- 0 * inf = 0. A masked label costs infinity, unless its share 1 - alpha (in the precision of the
  computation) or its class weight is 0: then it costs nothing. 0 * NaN is NaN.
- The mean divides by the sum of the weights of the labels. If that is 0, because no row counts or
  because all labels have weight 0, the mean and its gradient are 0.
- The computation uses u = z - max z in at least float32. Where z is finite u is too: if the
  difference overflows, it is the lowest finite number. Such a class is not masked.
- A row with a NaN or a +inf, or with all classes masked, has the value NaN.
- The bits of a row depend on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import smoothing
from .._checks import can_read
from . import algebra
from .algebra import FormulaSpec

CROSS_ENTROPY, LABEL_SMOOTHING, LABO, LABO_ADAPTIVE = range(4)


class RowSpec(NamedTuple):
    """One of the three losses with kernels of their own.

    The modes have the same numbers in ``native.c`` and the kernels. Value and gradient are those of
    the loss times ``multiplier``, which is left to :class:`labo.fused.dispatch.RowLoss`.
    """

    mode: int
    alpha: float = 0.0
    tau: float = 1.0
    rho: float = 0.0
    multiplier: float = 1.0


Spec = RowSpec | FormulaSpec

# ------------------------------------------------------------------ from the arguments of a loss
#
# Each function has the hyper-parameters of the loss of the same name in labo.functional. It returns
# None for an option that only the reference has.


def as_formula(spec: Spec) -> FormulaSpec:
    """The loss as a formula, also if it has kernels of its own."""
    if isinstance(spec, FormulaSpec):
        return spec
    if spec.mode == CROSS_ENTROPY:
        return algebra.cross_entropy()
    if spec.mode == LABEL_SMOOTHING:
        return algebra.label_smoothing(spec.alpha)
    if spec.mode == LABO:
        return algebra.labo(spec.alpha, spec.tau, spec.multiplier)
    return algebra.labo_adaptive(spec.rho, spec.tau, spec.multiplier)


def with_z_loss(spec: Spec, z_loss: float) -> Spec:
    """The loss with z_loss (log sum exp z)^2 added to each row: a formula, unless it is 0."""
    if not z_loss:
        return spec
    formula = as_formula(spec)
    return formula._replace(z_loss=formula.z_loss + z_loss)


def cross_entropy(z_loss: float = 0.0) -> Spec:
    return with_z_loss(RowSpec(CROSS_ENTROPY), z_loss)


def label_smoothing(
    alpha: float, convention: str = "torch", padding_idx: int | None = None, z_loss: float = 0.0
) -> Spec:
    if convention == "fairseq":
        return algebra.fairseq_smoothing(alpha, z_loss=z_loss)
    if convention == "joeynmt":
        return algebra.joeynmt_smoothing(alpha, z_loss=z_loss)
    return with_z_loss(RowSpec(LABEL_SMOOTHING, alpha=alpha), z_loss)


def labo(
    tau: float,
    alpha: float | str,
    rho: float,
    multiplier: float = 1.0,
    alpha_grad: bool = False,
    z_loss: float = 0.0,
) -> Spec | None:
    if alpha_grad:
        return None
    if isinstance(alpha, str):
        spec = RowSpec(LABO_ADAPTIVE, tau=tau, rho=rho, multiplier=multiplier)
    else:
        spec = RowSpec(LABO, alpha=alpha, tau=tau, multiplier=multiplier)
    return with_z_loss(spec, z_loss)


def masked_label_smoothing(alpha: float, z_loss: float = 0.0) -> Spec:
    return algebra.masked_smoothing(alpha, z_loss=z_loss)


def weighted_label_smoothing(
    groups: Tensor,
    alpha: float,
    shares: tuple[float, float, float],
    normalize: bool,
    z_loss: float = 0.0,
) -> Spec | None:
    if not can_read(groups):
        return None
    first = float(smoothing.group_shares(groups, shares, torch.float64)[0])
    return algebra.weighted_smoothing(alpha, first, normalize, z_loss=z_loss)


def tf_reg(
    alpha: float,
    tau: float,
    mode: str,
    multiplier: float | None,
    confidence: float,
    tau_squared: bool,
    z_loss: float = 0.0,
) -> Spec:
    if mode == "paper":
        factor = tau**2 if tau_squared else 1.0
        return algebra.tf_reg_tempered(alpha, tau, confidence, factor, z_loss=z_loss)
    divided = (1.0, False) if multiplier is None else (multiplier, True)
    return algebra.tf_reg(alpha, tau, confidence, *divided, z_loss=z_loss)


def confidence_penalty(beta: float, threshold: float | None, z_loss: float = 0.0) -> Spec:
    if threshold is None:
        return algebra.confidence_penalty(beta, z_loss=z_loss)
    return algebra.confidence_hinge(beta, threshold, z_loss=z_loss)


def max_suppression(lam: float | Tensor, z_loss: float = 0.0) -> Spec | None:
    strength = _number(lam)
    return None if strength is None else algebra.max_suppression(strength, z_loss=z_loss)


def margin_smoothing(lam: float, margin: float, z_loss: float = 0.0) -> Spec:
    return algebra.margin_smoothing(lam, margin, z_loss=z_loss)


def focal(gamma: float, detach_factor: bool, z_loss: float = 0.0) -> Spec:
    return algebra.focal(gamma, detach_factor, z_loss=z_loss)


def anti_focal(gamma: float, scale: float, detach_factor: bool, z_loss: float = 0.0) -> Spec:
    return algebra.anti_focal(gamma, scale, detach_factor, z_loss=z_loss)


def poly1(epsilon: float, z_loss: float = 0.0) -> Spec:
    return algebra.poly1(epsilon, z_loss=z_loss)


def logit_norm(tau: float, z_loss: float = 0.0) -> Spec:
    return algebra.logit_norm(tau, z_loss=z_loss)


def dft(z_loss: float = 0.0) -> Spec:
    return algebra.dft(z_loss=z_loss)


def eaft(
    gamma: float, top_k: int | None, normalizer: float | str | None, z_loss: float = 0.0
) -> Spec:
    if isinstance(normalizer, str):
        normalizer = 0.0  # the log of the number of classes
    divisor = 1.0 if normalizer is None else normalizer
    if top_k is None:
        return algebra.eaft(gamma, divisor, z_loss=z_loss)
    return algebra.eaft_of_largest(gamma, divisor, top_k, z_loss=z_loss)


def generalized_entropy(
    alpha: float, beta: float, prior: Tensor | None, generator: str, z_loss: float = 0.0
) -> Spec | None:
    if prior is not None:
        return None
    if generator == "euclidean":
        return algebra.squared_distance(beta, 0.5, z_loss=z_loss)
    if alpha < 1e-20:  # 0, or as good as 0 in float64
        return algebra.entropy_to_uniform(beta, z_loss=z_loss)
    if alpha == 1:
        return algebra.uniform_to_prediction(beta, z_loss=z_loss)
    return algebra.jensen(alpha, beta, z_loss=z_loss)


def distillation(
    alpha: float,
    tau: float,
    kl_reduction: str,
    multiplier: float,
    standardize: bool,
    z_loss: float = 0.0,
) -> Spec:
    formula = algebra.standardized_distillation if standardize else algebra.distillation
    return formula(alpha, tau, multiplier, kl_reduction == "elementwise", z_loss=z_loss)


def decoupled_distillation(
    alpha: float,
    beta: float,
    tau: float,
    hard_weight: float,
    multiplier: float | Tensor,
    standardize: bool,
    z_loss: float = 0.0,
) -> Spec | None:
    factor = _number(multiplier)
    if factor is None:
        return None
    standardized = algebra.standardized_decoupled_distillation
    formula = standardized if standardize else algebra.decoupled_distillation
    return formula(alpha, beta, tau, hard_weight, factor, z_loss=z_loss)


def topk_distillation(alpha: float, tail: str, tau: float, z_loss: float = 0.0) -> Spec:
    if tail == "labo":
        return algebra.stored_and_tempered(alpha, tau, z_loss=z_loss)
    if tail == "uniform":
        return algebra.stored_and_uniform(alpha, z_loss=z_loss)
    if tail == "bucket":
        return algebra.stored_and_bucket(alpha, z_loss=z_loss)
    return algebra.stored_alone(alpha, tail == "renormalize", z_loss=z_loss)


def cs_kd(lam: float, tau: float, z_loss: float = 0.0) -> Spec:
    return algebra.peer_distillation(lam, tau, z_loss=z_loss)


def ps_kd(alpha: float | Tensor, z_loss: float = 0.0) -> Spec | None:
    share = _number(alpha)
    return None if share is None else algebra.past_prediction(share, z_loss=z_loss)


def online_label_smoothing(hard_weight: float, soft_weight: float, z_loss: float = 0.0) -> Spec:
    return algebra.table_smoothing(hard_weight, soft_weight, z_loss=z_loss)


def z_squared(lam: float) -> Spec:
    return algebra.z_squared(lam)


def _number(x: float | Tensor) -> float | None:
    """A hyper-parameter as a number, which formulas take; None if that would wait for a device."""
    if isinstance(x, Tensor) and (x.requires_grad or not can_read(x)):
        return None
    return float(x)
