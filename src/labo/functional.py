r"""Every loss as a pure function of logits and target.

All losses have the signature ``f(logits, target, *, <hyper-parameters>, weight=None,
ignore_index=-100, reduction="mean", dim=-1)``:

- ``logits``: (..., K), or classes in dimension ``dim``. Half types are computed in float32.
- ``target``: (...) class indices of any integer type. The losses that are linear in the label also
  take (..., K) class probabilities (mixup, CutMix).
- ``weight``: (K,) class weights. As in ``F.cross_entropy``, the term of class j in the cross
  entropy of a label is multiplied by w_j. A term that is not a sum over the label is multiplied by
  the weight of the label.
- ``ignore_index``: rows with this target count neither in the sum nor in the mean.
- ``reduction``: "none", "mean" (over the rows that count, weighted by ``weight``) or "sum". The
  mean is 0 if no row counts or if all labels have weight 0.

A class whose logit is -inf is masked: it gets no probability, no smoothing mass and no gradient.
If it is the label, the loss is infinite, unless the label's share (1 - alpha) or weight is 0:
0 * inf = 0.

``cross_entropy_loss``, ``label_smoothing_loss`` and ``labo_loss`` have several backends with the
same results. ``impl="reference"`` is the plain formula, differentiable any number of times.
``"blocked"`` and ``"native"`` compute the gradient together with the value and are faster.
``"auto"`` takes the fastest backend that supports the call (see :func:`labo.backends`). With
``inplace=True`` the gradient is written over the logits and takes no memory of its own. Use it for
logits that are not read afterwards, such as the output of the last layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks, smoothing
from ._checks import check_hyper
from ._rows import Rows, entropy, row_sum, shifted, times, zero_log
from .fused import dispatch, spec

__all__ = [
    "anti_focal_loss",
    "beta_smoothing_loss",
    "confidence_penalty_loss",
    "cross_entropy_loss",
    "cs_kd_loss",
    "distillation_loss",
    "focal_loss",
    "generalized_entropy_loss",
    "kr_ls_loss",
    "label_smoothing_loss",
    "labo_loss",
    "masked_label_smoothing_loss",
    "online_label_smoothing_loss",
    "ps_kd_loss",
    "smoothed_cross_entropy",
    "tf_reg_loss",
    "weighted_label_smoothing_loss",
]

# ------------------------------------------------------------------ the paper's objective


def smoothed_cross_entropy(
    logits: Tensor,
    target: Tensor,
    smoothing: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor = 0.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""The generalized objective of the paper, for any smoothing distribution.

    .. math::
        R(P_{ls}) = -\sum_j \hat P_j \log p_j + \beta\, \mathrm{KL}(P_{ls} \Vert U),
        \qquad \hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P_{ls}

    With the uniform distribution it is label smoothing. With a teacher's prediction and
    beta = alpha it is knowledge distillation plus alpha log K (Remarks 1 and 2). With
    beta = alpha tau its minimum over all P_ls is at ``tempered(logits, tau)``: LABO.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        smoothing: (..., K), P_ls, a distribution for every row. Gradients flow through it unless
            it is detached.
        alpha: a number in [0, 1], or one per sample, (...).
        beta: a number of 0 or more, or one per sample, (...).
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> prior = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
        >>> smoothed_cross_entropy(logits, target, prior, alpha=0.1)
        tensor(0.5473)
    """
    check_hyper(alpha=alpha, beta=beta)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    if smoothing.shape != logits.shape:
        raise ValueError(
            f"smoothing must have the shape of the logits {tuple(logits.shape)}, "
            f"got {tuple(smoothing.shape)}"
        )
    _checks.check_devices(logits, smoothing=smoothing)
    alpha, beta = (_per_row(rows, name, x) for name, x in (("alpha", alpha), ("beta", beta)))
    if isinstance(alpha, Tensor):
        _checks.check_alpha_tensor(alpha)
    p_ls = rows.flatten(smoothing)
    if rows.valid is not None:
        p_ls = p_ls.masked_fill(~rows.valid.unsqueeze(-1), 1 / rows.num_classes)
    _checks.check_distribution("smoothing", p_ls)
    return rows.reduce(_objective(rows, p_ls.to(rows.logits.dtype), alpha, beta))


def _per_row(rows: Rows, name: str, x: float | Tensor) -> float | Tensor:
    """A hyper-parameter: a number, a tensor without dimensions, or one value per row, (M,)."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    if x.shape != rows.shape:
        raise ValueError(
            f"{name} must be a number or have the shape {tuple(rows.shape)} of the samples, "
            f"got {tuple(x.shape)}"
        )
    return x.reshape(-1).to(rows.logits.dtype)


def _objective(
    rows: Rows, p_ls: Tensor, alpha: float | Tensor, beta: float | Tensor = 0.0
) -> Tensor:
    """R(P_ls) per row, (M,)."""
    log_p = rows.log_probabilities()
    hard, soft = rows.nll(log_p), rows.cross_entropy(p_ls, log_p)
    values = times(1 - alpha, hard) + times(alpha, soft)
    if isinstance(beta, Tensor) or beta != 0:
        kl = row_sum(_p_log_p(p_ls)) + math.log(rows.num_classes)
        values = values + rows.weigh(beta * kl)
    return values


def _p_log_p(p: Tensor) -> Tensor:
    """p log p; at 0 it is 0 and so is its gradient."""
    return p * torch.where(p > 0, p, 1.0).log()


def labo_loss(
    logits: Tensor,
    target: Tensor,
    *,
    tau: float = 1.25,
    alpha: float | str = "adaptive",
    rho: float = 0.5,
    alpha_grad: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""LABO: the generalized objective at its optimal smoothing distribution (Theorem 1).

    With :math:`P^* = \mathrm{softmax}(z/\tau)` and :math:`\beta = \alpha\tau` the objective has
    the closed form

    .. math::
        R^* = \mathrm{lse}(z) - (1-\alpha) z_y - \alpha\tau\,(\mathrm{lse}(z/\tau) - \log K)

    and its gradient in the logits is :math:`p - \hat P`. The value includes the KL term, as in the
    paper. That term changes the value and not the gradient: compare models by their NLL, not by
    this value.

    alpha = "adaptive" is :math:`1 - \rho H(p)/\log K` for each sample, held constant. The paper
    does not say whether gradients flow through it. It matters: the paper's argument for ignoring
    the hypergradient holds for a constant alpha only. With ``alpha_grad=True`` alpha stays in the
    graph. The gradient is then no longer p - P_hat and can lower the true class.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        tau: beta / alpha, the temperature of the smoothing distribution; the paper searches
            {1.15, 1.25}. :func:`labo.smoothing.stationary_confidence` gives the confidence that a
            value leads to.
        alpha: "adaptive", or a number in [0, 1].
        rho: how much entropy lowers adaptive alpha.
        alpha_grad: keep adaptive alpha in the graph, to study it.
        weight, ignore_index, reduction, dim: as for every loss here. With class weights the
            smoothing distribution is still that of Theorem 1, held constant.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> labo_loss(logits, target)
        tensor(1.1205)
        >>> labo_loss(logits, target, alpha=0.1)
        tensor(0.5520)

    Reference:
        Lu et al. 2023, LABO: Towards Learning Optimal Label Regularization via Bi-level
        Optimization.
    """
    check_hyper(tau=tau, alpha=alpha, rho=rho, reduction=reduction, impl=impl)
    shared = (weight, ignore_index, reduction, dim)
    only = "alpha_grad=True" if alpha_grad else None
    fused = dispatch.row_loss(
        logits, target, spec.labo(tau, alpha, rho), *shared, impl, inplace, reference_only=only
    )
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared)
    if isinstance(alpha, str):
        strength: float | Tensor = smoothing.adaptive_alpha(rows.shifted, rho)
        if not alpha_grad:
            strength = strength.detach()  # type: ignore[union-attr]
    else:
        strength = alpha
    if weight is None:
        return rows.reduce(_labo_closed_form(rows, tau, strength))
    p_star = smoothing.tempered(rows.shifted.detach(), tau)
    return rows.reduce(_objective(rows, p_star, strength, strength * tau))


def _labo_closed_form(rows: Rows, tau: float, alpha: float | Tensor) -> Tensor:
    """R* per row, from u = z - max z. The maximum, held constant, cancels in the result."""
    u = rows.shifted - rows.shifted.detach().amax(-1, keepdim=True)
    log_s = row_sum(u.exp()).log()
    log_s_tau = row_sum((u / tau).exp()).log()
    optimum = alpha * tau * (log_s_tau - math.log(rows.num_classes))
    return log_s - times(1 - alpha, rows.pick(u)) - optimum


# ------------------------------------------------------------------ fixed distributions


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    """Cross entropy, -log p_y: the baseline, equal to ``F.cross_entropy``.

    Two differences: if all targets are ignored the result is 0, with a graph, rather than NaN; and
    errors say what is wrong with the arguments.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        weight, ignore_index, reduction, dim: as for every loss here.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> cross_entropy_loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.4493)
    """
    check_hyper(reduction=reduction, impl=impl)
    shared = (weight, ignore_index, reduction, dim)
    fused = dispatch.row_loss(logits, target, spec.cross_entropy(), *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared)
    return rows.reduce(rows.nll(rows.log_probabilities()))


def label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float = 0.1,
    convention: str = "torch",
    padding_idx: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Label smoothing, in the three conventions in use.

    ============  ====================================  =========================================
    convention    label of the true class, of others    used by
    ============  ====================================  =========================================
    ``torch``     1 - alpha + alpha/K, alpha/K          PyTorch, the paper's Eq. 1, Hugging Face
    ``fairseq``   1 - alpha, alpha/(K-1)                fairseq since 2021
    ``joeynmt``   1 - alpha, alpha/(K-2), padding 0     JoeyNMT (which logs the KL divergence: this
                                                        value minus the entropy of the label)
    ============  ====================================  =========================================

    fairseq(alpha) equals torch(alpha K/(K-1)). With "torch" the result equals
    ``F.cross_entropy(label_smoothing=alpha)``, except that masked classes (-inf) get no smoothing
    mass, where PyTorch returns inf.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        alpha: mass moved away from the label, in [0, 1].
        convention: which classes share alpha, see the table: "torch", "fairseq" or "joeynmt".
        padding_idx: the padding class, needed by "joeynmt" only.
        weight, ignore_index, reduction, dim: as for every loss here.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> label_smoothing_loss(logits, target, alpha=0.1)
        tensor(0.5968)
        >>> label_smoothing_loss(logits, target, alpha=0.1, convention="fairseq")
        tensor(0.6460)

    Reference:
        Szegedy et al. 2016, Rethinking the Inception Architecture for Computer Vision.
    """
    check_hyper(alpha=alpha, convention=convention, reduction=reduction, impl=impl)
    if (convention == "joeynmt") != (padding_idx is not None):
        raise ValueError('convention="joeynmt" and padding_idx go together: give both or neither')
    shared = (weight, ignore_index, reduction, dim)
    only = None if convention == "torch" else f'convention="{convention}"'
    fused = dispatch.row_loss(
        logits, target, spec.label_smoothing(alpha), *shared, impl, inplace, reference_only=only
    )
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared)
    if convention == "torch":
        p_ls = smoothing.uniform(rows.logits)
    else:
        p_ls = smoothing.others(rows.logits, rows.target, padding_idx=padding_idx)
    return rows.reduce(_objective(rows, p_ls, alpha))


def masked_label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    alpha: float = 0.1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Masked label smoothing: no smoothing mass on words that only the source language has.

    With M the classes of ``mask`` and :math:`e = \alpha/(|M|-1)` the label is
    :math:`(1 - \alpha - e)\,\mathrm{onehot}(y) + e\,1_M`: 1 - alpha on a true class in M, e on the
    other classes of M, 0 elsewhere.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        mask: (K,) bool, True for classes that may get smoothing mass (at least two).
        alpha: mass moved away from the label, in [0, 1].
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> masked_label_smoothing_loss(logits, target, torch.tensor([True, True, False, True]))
        tensor(0.6493)

    Reference:
        Chen et al. 2022, Focus on the Target's Vocabulary: Masked Label Smoothing for Machine
        Translation.
    """
    check_hyper(alpha=alpha)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    _check_mask("mask", mask, rows.num_classes)
    _checks.check_devices(logits, mask=mask)
    allowed = (mask & (rows.logits != -math.inf)).to(rows.logits.dtype)
    e = alpha / (row_sum(allowed).unsqueeze(-1) - 1).clamp(min=1)
    q = (1 - alpha - e) * rows.label() + e * allowed
    return rows.reduce(rows.cross_entropy(q, rows.log_probabilities()))


def _check_mask(name: str, mask: Tensor, num_classes: int) -> None:
    if mask.dtype != torch.bool or mask.shape != (num_classes,):
        raise ValueError(
            f"{name} must be a bool tensor of shape ({num_classes},), "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )


def weighted_label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    groups: Tensor,
    *,
    alpha: float = 0.1,
    shares: tuple[float, float, float] = (0.4, 0.4, 0.2),
    normalize: bool = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Weighted label smoothing: shares of the mass for target-only, common and source-only words.

    A class of group g gets :math:`e_g = \alpha s_g / |g|`, and the label is
    :math:`(1 - \alpha - e_0)\,\mathrm{onehot}(y) + \sum_g e_g 1_g`. In the authors' code this sums
    to 1 - e_0; ``normalize`` divides by that sum. The share of a group without classes goes to the
    other groups.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        groups: (K,) integers: 0 for target-only, 1 for common, 2 for source-only classes.
        alpha: mass moved away from the label, in [0, 1].
        shares: shares of the three groups in the smoothing mass; they are normalized.
        normalize: make the label sum to 1; False is the authors' code.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> groups = torch.tensor([0, 0, 2, 1])
        >>> weighted_label_smoothing_loss(logits, target, groups, normalize=False)
        tensor(0.6183)

    Reference:
        Chen et al. 2022, Focus on the Target's Vocabulary: Masked Label Smoothing for Machine
        Translation.
    """
    check_hyper(alpha=alpha)
    if len(shares) != 3 or any(not share >= 0 for share in shares) or sum(shares) <= 0:
        raise ValueError(f"shares must be three numbers of 0 or more, not all 0, got {shares!r}")
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    groups = _check_groups(groups, rows.num_classes)
    _checks.check_devices(logits, groups=groups)
    present = (rows.logits != -math.inf).to(rows.logits.dtype)
    sizes = torch.stack([row_sum(present * (groups == group)) for group in range(3)], -1)
    mass = torch.where(sizes > 0, sizes.new_tensor(shares), 0.0)
    e = alpha * mass / row_sum(mass).unsqueeze(-1) / sizes.clamp(min=1)  # (M, 3)
    e_target = e[:, :1]
    q = (1 - alpha - e_target) * rows.label() + e[:, groups] * present
    if normalize:
        q = q / (1 - e_target)
    return rows.reduce(rows.cross_entropy(q, rows.log_probabilities()))


def _check_groups(groups: Tensor, num_classes: int) -> Tensor:
    integers = not (groups.is_floating_point() or groups.is_complex())
    if not integers or groups.dtype == torch.bool or groups.shape != (num_classes,):
        raise ValueError(
            f"groups must be integers of shape ({num_classes},), "
            f"got {groups.dtype} of shape {tuple(groups.shape)}"
        )
    groups = groups.long()
    _checks.ensure(
        (groups >= 0) & (groups <= 2),
        lambda: ValueError(
            f"groups must be 0, 1 or 2, got values from {groups.min()} to {groups.max()}"
        ),
        "groups must be 0, 1 or 2",
    )
    return groups


def tf_reg_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float = 0.1,
    tau: float = 20.0,
    mode: str = "repo",
    multiplier: float | None = None,
    confidence: float = 0.99,
    tau_squared: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""TF-reg: distillation from a virtual teacher, as in the authors' code or as in their paper.

    With s the :func:`labo.smoothing.virtual_teacher`:

    - ``mode="repo"``: :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,(m/K)\,\mathrm{KL}(s \Vert p)`, the
      element-wise mean of the authors' code (hence 1/K), temperature on the teacher only.
    - ``mode="paper"``: :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,\mathrm{KL}(s \Vert p_\tau)`, their
      Eq. 9, temperature on both; ``tau_squared`` multiplies the KL by tau squared.

    Args:
        logits: (..., K).
        target: (...) class indices.
        alpha: weight of the teacher, in [0, 1].
        tau: temperature of the virtual teacher; with mode "paper" of the model as well.
        mode: "repo", the loss of the authors' code, or "paper", their Eq. 9.
        multiplier: the factor m of mode "repo". None is K, which is what their CIFAR-100 ResNet18
            uses (100).
        confidence: the value of the virtual teacher for the true class.
        tau_squared: multiply the KL divergence of mode "paper" by tau squared.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> tf_reg_loss(logits, target, alpha=0.1, tau=20, multiplier=100)
        tensor(1.7040)
        >>> tf_reg_loss(logits, target, alpha=0.1, tau=20, mode="paper")
        tensor(0.4045)

    Reference:
        Yuan et al. 2020, Revisiting Knowledge Distillation via Label Smoothing Regularization.
    """
    check_hyper(alpha=alpha, tau=tau, multiplier=multiplier, confidence=confidence, mode=mode)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim, linear=False)
    log_p = rows.log_probabilities()
    teacher = smoothing.virtual_teacher(rows.logits, rows.target, confidence=confidence, tau=tau)
    if mode == "repo":
        factor = 1.0 if multiplier is None else multiplier / rows.num_classes
        kl = _kl(teacher, log_p)
    else:
        factor = tau**2 if tau_squared else 1.0
        kl = _kl(teacher, rows.log_probabilities(tau))
    return rows.reduce(times(1 - alpha, rows.nll(log_p)) + rows.weigh(alpha * factor * kl))


def _kl(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) per row, with 0 log 0 = 0. p has no gradient."""
    return row_sum(_p_log_p(p) - p * log_q.masked_fill(p == 0, 0.0))


# ------------------------------------------------------------------ penalties and factors


def confidence_penalty_loss(
    logits: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    threshold: float | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Confidence penalty: cross entropy minus beta times the entropy of the prediction.

    .. math:: -\log p_y - \beta H(p)

    With a ``threshold`` Gamma the penalty acts below that entropy only:
    :math:`+\beta\max(0, \Gamma - H(p))`. The sign is plus because low entropy is penalised.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        beta: strength; the LABO paper does not give its own. Search {0.05, 0.1, 0.3, 0.5, 1, 2}.
        threshold: entropy in nats below which the penalty acts; None applies it always.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> confidence_penalty_loss(logits, target, beta=0.1)
        tensor(0.3532)

    Reference:
        Pereyra et al. 2017, Regularizing Neural Networks by Penalizing Confident Output
        Distributions.
    """
    check_hyper(beta=beta, threshold=threshold)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    log_p = rows.log_probabilities()
    h = entropy(log_p)
    penalty = -h if threshold is None else (threshold - h).clamp(min=0)
    return rows.reduce(rows.nll(log_p) + rows.weigh(beta * penalty))


def focal_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 1.0,
    detach_factor: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Focal loss: less weight on well-fitted samples.

    .. math:: -(1 - p_y)^\gamma \log p_y

    Args:
        logits: (..., K).
        target: (...) class indices.
        gamma: focusing strength; 0 is cross entropy.
        detach_factor: hold the factor constant, as the translation baselines of Raunak et al. do.
            The original differentiates through it. The values agree, the gradients do not.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> focal_loss(logits, target, gamma=2)
        tensor(0.0589)

    Reference:
        Lin et al. 2017, Focal Loss for Dense Object Detection.
    """
    check_hyper(gamma=gamma)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim, linear=False)
    log_p = rows.log_probabilities()
    base = -torch.expm1(rows.pick(log_p))
    return rows.reduce(_modulated(rows, log_p, base, gamma, detach_factor))


def anti_focal_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 1.0,
    scale: float = 0.5,
    detach_factor: bool = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Anti-focal loss: more weight on well-fitted samples, for better rare tokens.

    .. math:: -(1 + s\,p_y)^\gamma \log p_y

    Args:
        logits: (..., K).
        target: (...) class indices.
        gamma: strength; 0 is cross entropy.
        scale: the factor s of the probability, called alpha by the authors; -1 is focal loss.
        detach_factor: hold the factor fixed, as the authors' code does.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> anti_focal_loss(logits, target, gamma=1, scale=0.5)
        tensor(0.5927)

    Reference:
        Raunak et al. 2020, On Long-Tailed Phenomena in Neural Machine Translation.
    """
    check_hyper(gamma=gamma, scale=scale)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim, linear=False)
    log_p = rows.log_probabilities()
    base = 1 + scale * rows.pick(log_p).exp()
    return rows.reduce(_modulated(rows, log_p, base, gamma, detach_factor))


def _modulated(rows: Rows, log_p: Tensor, base: Tensor, gamma: float, detach: bool) -> Tensor:
    """base^gamma times the cross entropy, per row."""
    factor = base.detach() if detach else base
    # A power below 1 has an infinite slope at 0, where the product with log p_y = 0 has none.
    return factor.clamp(min=torch.finfo(factor.dtype).tiny) ** gamma * rows.nll(log_p)


def generalized_entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float = 0.5,
    beta: float = 0.7,
    prior: Tensor | None = None,
    generator: str = "kl",
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Generalized entropy regularization: one family from confidence penalty to label smoothing.

    .. math::
        -\log p_y + \beta D_\alpha(u \Vert p), \qquad
        D_\alpha = \frac{(1-\alpha)G(u) + \alpha G(p) - G((1-\alpha)u + \alpha p)}{\alpha(1-\alpha)}

    with G(x) = sum x log x ("kl") or sum x^2 ("euclidean"). For "kl" the ends are limits: alpha = 0
    is KL(p || u), the confidence penalty; alpha = 1 is KL(u || p), label smoothing. The authors'
    code leaves out the constant (1-alpha) G(u): its value is larger by beta log(K)/alpha, its
    gradient is the same.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        alpha: member of the family, from confidence penalty (0) to label smoothing (1).
        beta: strength.
        prior: (K,) the distribution u; uniform by default. At alpha = 0 every class that is not
            masked needs a probability above 0, because KL(p || u) is infinite otherwise.
        generator: the divergence: "kl", or "euclidean" for the squared distance.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> generalized_entropy_loss(logits, target, alpha=0.5, beta=0.7)
        tensor(0.7571)

    Reference:
        Meister et al. 2020, Generalized Entropy Regularization or: There's Nothing Special about
        Label Smoothing.
    """
    check_hyper(alpha=alpha, beta=beta, generator=generator)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    if prior is None:
        u = smoothing.uniform(rows.logits)
    else:
        if prior.shape != (rows.num_classes,):
            raise ValueError(
                f"prior must have shape ({rows.num_classes},), got {tuple(prior.shape)}"
            )
        _checks.check_devices(logits, prior=prior)
        _checks.check_distribution("prior", prior)
        u = smoothing._restrict(prior.to(rows.logits.dtype).expand_as(rows.logits), rows.logits)
        if alpha == 0 and generator == "kl":
            _check_positive(u, rows)
    log_p = rows.log_probabilities()
    divergence = _jensen(u, log_p, alpha) if generator == "kl" else _squared(u, log_p.exp())
    return rows.reduce(rows.nll(log_p) + rows.weigh(beta * divergence))


def _check_positive(u: Tensor, rows: Rows) -> None:
    """Refuse a prior at which KL(p || u) is infinite."""
    fine = (u > 0) | (rows.logits == -math.inf)
    if rows.valid is not None:
        fine = fine | ~rows.valid.unsqueeze(-1)
    message = "at alpha=0 the prior must be above 0 for every class: KL(p || u) is infinite"
    _checks.ensure(fine | u.isnan(), lambda: ValueError(message), message)


def _jensen(u: Tensor, log_p: Tensor, alpha: float) -> Tensor:
    """The skew Jensen divergence of the negative entropy, per row, with its limits."""
    if alpha == 1:
        return _kl(u, log_p)
    p = log_p.exp()
    if alpha == 0:
        masked = log_p == -math.inf
        return row_sum(p * (zero_log(log_p) - u.masked_fill(masked, 1.0).log()))
    log_u = torch.where(u > 0, u, 1.0).log()
    mixed = (1 - alpha) * u + alpha * p
    log_mixed = torch.where(mixed > 0, mixed, 1.0).log()
    # As two KL divergences to the mixture, to avoid a difference of large terms at small alpha.
    to_u, to_p = u * (log_u - log_mixed), p * (zero_log(log_p) - log_mixed)
    return row_sum((1 - alpha) * to_u + alpha * to_p) / (alpha * (1 - alpha))


def _squared(u: Tensor, p: Tensor) -> Tensor:
    """D_alpha for G(x) = sum x^2: the squared distance, for every alpha."""
    return row_sum((u - p) ** 2)


# ------------------------------------------------------------------ with teacher logits


def distillation_loss(
    logits: Tensor,
    target: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    alpha: float = 0.9,
    tau: float = 4.0,
    kl_reduction: str = "batchmean",
    multiplier: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Knowledge distillation: learn from the label and from a teacher.

    .. math::
        (1-\alpha)\,\mathrm{CE} + \alpha\, m\, \tau^2\,
        \mathrm{KL}(\mathrm{softmax}(t/\tau) \Vert \mathrm{softmax}(z/\tau))

    ``kl_reduction="elementwise"`` also divides the KL by K, as code built on ``KLDivLoss()`` with
    its default reduction does (Tf-KD; the temperatures of the LABO paper fit that scale). With
    ``multiplier`` it is Tf-KD_self.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        teacher_logits: as ``logits``, required; held constant.
        alpha: weight of the teacher, in [0, 1].
        tau: temperature of teacher and model.
        kl_reduction: "batchmean", or "elementwise" to divide the KL divergence by K as well.
        multiplier: the factor m of the KL divergence.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> distillation_loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.1304)

    Reference:
        Hinton et al. 2015, Distilling the Knowledge in a Neural Network.
    """
    check_hyper(alpha=alpha, tau=tau, multiplier=multiplier, kl_reduction=kl_reduction)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    factor = multiplier / (rows.num_classes if kl_reduction == "elementwise" else 1)
    soft = _tempered_kl(rows, "teacher_logits", teacher_logits, tau)
    hard = rows.nll(rows.log_probabilities())
    return rows.reduce(times(1 - alpha, hard) + rows.weigh(alpha * factor * soft))


def _tempered_kl(rows: Rows, name: str, teacher_logits: Tensor | None, tau: float) -> Tensor:
    """tau^2 KL(softmax(teacher_logits / tau) || softmax(z / tau)) per row."""
    teacher = smoothing.tempered(rows.teacher(name, teacher_logits), tau)
    return tau**2 * _kl(teacher, rows.log_probabilities(tau))


def cs_kd_loss(
    logits: Tensor,
    target: Tensor,
    peer_logits: Tensor | None = None,
    *,
    lam: float = 1.0,
    tau: float = 4.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""CS-KD: agree with the prediction for another sample of the same class.

    .. math::
        \mathrm{CE} + \lambda \tau^2
        \mathrm{KL}(\mathrm{softmax}(z'/\tau) \Vert \mathrm{softmax}(z/\tau))

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        peer_logits: as ``logits``, required: the model's own output z' for the other samples; held
            constant.
        lam: weight lambda of the KL divergence.
        tau: temperature of both predictions.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> cs_kd_loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.5443)

    Reference:
        Yun et al. 2020, Regularizing Class-wise Predictions via Self-knowledge Distillation.
    """
    check_hyper(lam=lam, tau=tau)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    soft = _tempered_kl(rows, "peer_logits", peer_logits, tau)
    return rows.reduce(rows.nll(rows.log_probabilities()) + rows.weigh(lam * soft))


def ps_kd_loss(
    logits: Tensor,
    target: Tensor,
    past_logits: Tensor | None = None,
    *,
    alpha: float | Tensor = 0.8,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""PS-KD: the label mixed with the model's own prediction of the epoch before.

    Cross entropy with :math:`(1-\alpha_t)\,\mathrm{onehot}(y) + \alpha_t p_{past}`.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        past_logits: as ``logits``, the logits or log-probabilities of the past prediction; held
            constant. Without them, as in the first epoch, the loss is the cross entropy.
        alpha: alpha_t of this epoch, in [0, 1].
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> past = torch.tensor([[0.7, 0.2, 0.06, 0.04]])
        >>> ps_kd_loss(logits, target, past.log(), alpha=0.4)
        tensor(0.6229)

    Reference:
        Kim et al. 2021, Self-Knowledge Distillation with Progressive Refinement of Targets.
    """
    check_hyper(alpha=alpha)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    if past_logits is None:
        return rows.reduce(rows.nll(rows.log_probabilities()))
    past = smoothing.tempered(rows.teacher("past_logits", past_logits), 1.0)
    return rows.reduce(_objective(rows, past, alpha))


def beta_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    ema_logits: Tensor | None = None,
    *,
    alpha: float = 0.6,
    a: float = 3.0,
    draws: Tensor | None = None,
    rng: torch.Generator | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Beta smoothing (Beta-LS): random soft labels, harder where the averaged model is confident.

    One draw b from Beta(a, 1) per sample; the i-th smallest goes to the sample with the i-th
    smallest confidence of the averaged model. The label is
    :math:`(1-\alpha)\,\mathrm{onehot}(y) + \alpha\,(b` on y, :math:`(1-b)/(K-1)` elsewhere).
    The ranking makes the rows of a batch depend on each other.

    Args:
        logits: (..., K).
        target: (...) class indices.
        ema_logits: as ``logits``, required: from the averaged model; held constant, used for the
            ranking only.
        alpha: weight of the random label, in [0, 1].
        a: first parameter of the Beta distribution.
        draws: (...) the draws, if they are not to be drawn here.
        rng: the generator to draw from.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> beta_smoothing_loss(logits, target, logits, draws=torch.tensor([0.8]))
        tensor(0.6853)

    Reference:
        Zhang and Sabuncu 2020, Self-Distillation as Instance-Specific Label Smoothing.
    """
    check_hyper(alpha=alpha, a=a)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim, linear=False)
    ema = torch.softmax(rows.teacher("ema_logits", ema_logits), -1)
    if draws is None:
        # Beta(a, 1) by its inverse distribution function.
        uniform = torch.rand(ema.shape[0], dtype=ema.dtype, device=ema.device, generator=rng)
        b = uniform ** (1 / a)
    else:
        given = _per_row(rows, "draws", draws)
        assert isinstance(given, Tensor)
        b = given.reshape(-1)
    moved = smoothing.beta_alpha(rows.pick(ema), b, rows.valid)
    others = smoothing.others(rows.logits, rows.target)
    return rows.reduce(_objective(rows, others, alpha * moved))


# ------------------------------------------------------------------ with a table of classes


def online_label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    table: Tensor,
    *,
    hard_weight: float = 0.5,
    soft_weight: float = 0.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""Online label smoothing (OLS): soft labels from the model's own correct predictions.

    :math:`w_h\,\mathrm{CE} + w_s\,\mathrm{CE}(S_y, p)` with row y of a class table S.
    :class:`labo.OnlineLabelSmoothingLoss` collects the table.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        table: (K, K), row y is the soft label of class y; a row of zeros adds nothing.
        hard_weight: w_h; the authors use 0.5 on CIFAR, 1 for fine-grained data.
        soft_weight: w_s, likewise.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> table = torch.eye(4)
        >>> table[0] = torch.tensor([0.85, 0.10, 0.03, 0.02])
        >>> online_label_smoothing_loss(logits, target, table)
        tensor(0.5578)

    Reference:
        Zhang et al. 2021, Delving Deep into Label Smoothing.
    """
    check_hyper(hard_weight=hard_weight, soft_weight=soft_weight)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    _check_table(table, rows)
    soft = smoothing.class_table(table.to(rows.logits.dtype), rows.target, rows.logits)
    log_p = rows.log_probabilities()
    return rows.reduce(
        times(hard_weight, rows.nll(log_p)) + times(soft_weight, rows.cross_entropy(soft, log_p))
    )


def _check_table(table: Tensor, rows: Rows) -> None:
    num_classes = rows.num_classes
    _checks.check_devices(rows.logits, table=table)
    if table.shape != (num_classes, num_classes):
        raise ValueError(
            f"table must have shape ({num_classes}, {num_classes}), got {tuple(table.shape)}"
        )


def kr_ls_loss(
    logits: Tensor,
    target: Tensor,
    table: Tensor,
    *,
    alpha: float = 0.5,
    order: str = "pq",
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""KR-LS (knowledge refinery): a learned table of the similarities between classes.

    Without the entry of the true class, :math:`p_{res} = \mathrm{softmax}(z_{\ne y})` and
    :math:`q_{res} = \mathrm{softmax}(S_{y,\ne y})`:

    .. math:: \mathrm{CE} + \alpha\,\mathrm{KL}(p_{res} \Vert q_{res})

    trains the network with q_res held constant. In the same backward pass the table learns from
    :math:`\alpha\,\mathrm{KL}(q_{res} \Vert p_{res})` with p_res held constant. That term adds
    nothing to the value. The authors released no code: the order of the KL and what is detached
    follow the published algorithm. The method is experimental.

    Args:
        logits: (..., K).
        target: (...) class indices.
        table: (K, K) logits S; the diagonal is not used.
        alpha: strength, in [0, 1].
        order: "pq" for KL(p_res || q_res) as above, "qp" for KL(q_res || p_res).
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> kr_ls_loss(logits, target, torch.zeros(4, 4))
        tensor(0.5757)

    Reference:
        Ding et al. 2021, Knowledge Refinery: Learning from Decoupled Label.
    """
    check_hyper(alpha=alpha, order=order)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim, linear=False)
    _check_table(table, rows)
    log_p = rows.log_probabilities()
    hard = rows.nll(log_p)
    classes = torch.arange(rows.num_classes, device=rows.target.device)
    absent = (rows.target.unsqueeze(-1) == classes) | (rows.logits == -math.inf)
    alone = absent.all(-1)  # no other class: no residual to learn from
    absent = absent & ~alone.unsqueeze(-1)
    p_res = torch.log_softmax(shifted(rows.logits.masked_fill(absent, -math.inf)), -1)
    table_rows = table.to(rows.logits.dtype)[rows.target]
    q_res = torch.log_softmax(table_rows.masked_fill(absent, -math.inf), -1)
    if order == "pq":
        fixed = q_res.detach()
        residual = row_sum(p_res.exp() * (zero_log(p_res) - zero_log(fixed)))
    else:
        residual = _kl(q_res.detach().exp(), p_res)
    update = row_sum(q_res.exp() * (zero_log(q_res) - zero_log(p_res.detach())))
    learn = update - update.detach()
    return rows.reduce(hard + rows.weigh(alpha * (residual + learn).masked_fill(alone, 0.0)))
