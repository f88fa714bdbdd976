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

Losses with an argument ``impl`` have several backends with the same results.
``impl="reference"`` is the plain formula, differentiable any number of times.
``"blocked"`` and ``"native"`` compute the gradient together with the value and are faster.
``"auto"`` takes the fastest backend that supports the call (see :func:`labo.backends`). With
``inplace=True`` the gradient is written over the logits and takes no memory of its own. Use it for
logits that are not read afterwards, such as the output of the last layer.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from . import _checks, smoothing
from ._checks import check_hyper
from ._rows import Rows, entropy, log_sum, row_sum, shifted, spread, teacher_rows, times, zero_log
from ._stored import completed, divergence, log_or_0, renormalized, stored_rows
from .fused import dispatch, spec

__all__ = [
    "anti_focal_loss",
    "beta_smoothing_loss",
    "confidence_penalty_loss",
    "connet_loss",
    "cross_entropy_loss",
    "cs_kd_loss",
    "decoupled_distillation_loss",
    "dft_loss",
    "distillation_loss",
    "eaft_loss",
    "focal_loss",
    "generalized_entropy_loss",
    "held_labo_loss",
    "kr_ls_loss",
    "label_smoothing_loss",
    "labo_loss",
    "logit_norm_loss",
    "margin_smoothing_loss",
    "masked_label_smoothing_loss",
    "max_suppression_loss",
    "online_label_smoothing_loss",
    "poly1_loss",
    "ps_kd_loss",
    "r_drop_loss",
    "smoothed_cross_entropy",
    "tf_reg_loss",
    "topk_distillation_loss",
    "weighted_label_smoothing_loss",
    "z_loss",
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
    multiplier: float = 1.0,
    alpha_grad: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
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
        multiplier: factor of the loss; ours, not the paper's. With SGD, LABO learns slowly at the
            learning rate of cross entropy, because it keeps a part of the label only;
            1 / :func:`labo.smoothing.stationary_label_weight` makes up for that.
        alpha_grad: keep adaptive alpha in the graph, to study it.
        weight, ignore_index, reduction, dim: as for every loss here. With class weights the
            smoothing distribution is still that of Theorem 1, held constant.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
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
    check_hyper(tau=tau, alpha=alpha, rho=rho, multiplier=multiplier)
    check_hyper(reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.labo(tau, alpha, rho, multiplier, alpha_grad, z_loss)
    fused = dispatch.row_loss(
        logits, target, known, *shared, impl, inplace, reference_only="alpha_grad=True"
    )
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    if isinstance(alpha, str):
        strength: float | Tensor = smoothing.adaptive_alpha(rows.shifted, rho)
        if not alpha_grad:
            strength = strength.detach()  # type: ignore[union-attr]
    else:
        strength = alpha
    if weight is None:
        return rows.reduce(multiplier * _labo_closed_form(rows, tau, strength))
    p_star = smoothing.tempered(rows.shifted.detach(), tau)
    return rows.reduce(multiplier * _objective(rows, p_star, strength, strength * tau))


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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Cross entropy, the baseline, equal to ``F.cross_entropy``.

    .. math:: -\log p_y

    Two differences: if all targets are ignored the result is 0, with a graph, rather than NaN; and
    errors say what is wrong with the arguments.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> cross_entropy_loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.4493)
    """
    check_hyper(reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    fused = dispatch.row_loss(logits, target, spec.cross_entropy(z_loss), *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Label smoothing, in the three conventions in use.

    .. math:: -\sum_j \hat P_j \log p_j

    with a label :math:`\hat P` that has a part of its mass on the other classes:

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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
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
    check_hyper(alpha=alpha, convention=convention, reduction=reduction, impl=impl, z_loss=z_loss)
    if (convention == "joeynmt") != (padding_idx is not None):
        raise ValueError('convention="joeynmt" and padding_idx go together: give both or neither')
    shared = (weight, ignore_index, reduction, dim)
    known = spec.label_smoothing(alpha, convention, padding_idx, z_loss)
    source = None
    if convention == "joeynmt":
        source = partial(_not_padding, logits, dim, padding_idx)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    if convention == "torch":
        p_ls = smoothing.uniform(rows.logits)
    else:
        p_ls = smoothing.others(rows.logits, rows.target, padding_idx=padding_idx)
    return rows.reduce(_objective(rows, p_ls, alpha))


def _not_padding(logits: Tensor, dim: int, padding_idx: int | None) -> Tensor:
    """(K,): 0 for the padding class, 1 for the others."""
    assert padding_idx is not None
    classes = torch.arange(logits.shape[dim], device=logits.device)
    return torch.ne(classes, padding_idx).to(torch.float32)


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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

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
    check_hyper(alpha=alpha, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.masked_label_smoothing(alpha, z_loss)
    source = partial(_mask_row, mask, logits, dim)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    _mask_row(mask, logits, dim)
    allowed = (mask & (rows.logits != -math.inf)).to(rows.logits.dtype)
    e = alpha / (row_sum(allowed).unsqueeze(-1) - 1).clamp(min=1)
    q = (1 - alpha - e) * rows.label() + e * allowed
    return rows.reduce(rows.cross_entropy(q, rows.log_probabilities()))


def _mask_row(mask: Tensor, logits: Tensor, dim: int) -> Tensor:
    """The mask as 0 and 1, (K,), once it is known to fit."""
    num_classes = logits.shape[dim]
    if mask.dtype != torch.bool or mask.shape != (num_classes,):
        raise ValueError(
            f"mask must be a bool tensor of shape ({num_classes},), "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    _checks.check_devices(logits, mask=mask)
    return mask.to(torch.float32)


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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Weighted label smoothing: shares of the mass for target-only, common and source-only words.

    A class of group g gets :math:`e_g = \alpha s_g / |g|`, and the label is
    :math:`(1 - \alpha - e_0)\,\mathrm{onehot}(y) + \sum_g e_g 1_g`. In the authors' code this sums
    to 1 - e_0; ``normalize`` divides by that sum. The share of a group without classes goes to the
    other groups, and that of a masked class to the other classes.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        groups: (K,) integers: 0 for target-only, 1 for common, 2 for source-only classes.
        alpha: mass moved away from the label, in [0, 1].
        shares: shares of the three groups in the smoothing mass; they are normalized.
        normalize: make the label sum to 1; False is the authors' code.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

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
    check_hyper(alpha=alpha, reduction=reduction, impl=impl, z_loss=z_loss)
    if len(shares) != 3 or any(not share >= 0 for share in shares) or sum(shares) <= 0:
        raise ValueError(f"shares must be three numbers of 0 or more, not all 0, got {shares!r}")
    shared = (weight, ignore_index, reduction, dim)
    known = spec.weighted_label_smoothing(groups, alpha, shares, normalize, z_loss)
    source = partial(_group_row, groups, shares, logits, dim)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    groups = _check_groups(groups, logits, dim)
    of_group = smoothing.group_shares(groups, shares, rows.logits.dtype)
    mass = of_group[groups] * (rows.logits != -math.inf)
    total = row_sum(mass).unsqueeze(-1)
    total = total.masked_fill(total == 0, 1.0)
    of_first = alpha * of_group[0] / total
    q = (1 - alpha - of_first) * rows.label() + alpha * mass / total
    if normalize:
        q = q / (1 - of_first)
    return rows.reduce(rows.cross_entropy(q, rows.log_probabilities()))


def _group_row(
    groups: Tensor, shares: tuple[float, float, float], logits: Tensor, dim: int
) -> Tensor:
    """The share of each class in the smoothing mass, (K,), once the groups are known to fit."""
    groups = _check_groups(groups, logits, dim)
    return smoothing.group_shares(groups, shares)[groups]


def _check_groups(groups: Tensor, logits: Tensor, dim: int) -> Tensor:
    num_classes = logits.shape[dim]
    integers = not (groups.is_floating_point() or groups.is_complex())
    if not integers or groups.dtype == torch.bool or groups.shape != (num_classes,):
        raise ValueError(
            f"groups must be integers of shape ({num_classes},), "
            f"got {groups.dtype} of shape {tuple(groups.shape)}"
        )
    groups = groups.long()
    _checks.check_devices(logits, groups=groups)
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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

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
    check_hyper(
        alpha=alpha,
        tau=tau,
        multiplier=multiplier,
        confidence=confidence,
        mode=mode,
        reduction=reduction,
        impl=impl,
        z_loss=z_loss,
    )
    shared = (weight, ignore_index, reduction, dim)
    known = spec.tf_reg(alpha, tau, mode, multiplier, confidence, tau_squared, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, linear=False, z_loss=z_loss)
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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

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
    check_hyper(beta=beta, threshold=threshold, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.confidence_penalty(beta, threshold, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    log_p = rows.log_probabilities()
    h = entropy(log_p)
    penalty = -h if threshold is None else (threshold - h).clamp(min=0)
    return rows.reduce(rows.nll(log_p) + rows.weigh(beta * penalty))


def max_suppression_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float | Tensor = 0.1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Max suppression (MaxSup): the penalty of label smoothing, on the largest logit.

    .. math:: -\log p_y + \lambda \Bigl(\max_j z_j - \frac{1}{K} \sum_j z_j\Bigr)

    Label smoothing is the same with z_y in place of the maximum. The two agree where the prediction
    is correct.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: strength lambda.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> max_suppression_loss(logits, target, lam=0.1)
        tensor(0.5968)

    Reference:
        Zhou et al. 2025, MaxSup: Overcoming Representation Collapse in Label Smoothing.
    """
    check_hyper(lam=lam, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.max_suppression(lam, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    below, top, present = _below_maximum(rows)
    penalty = lam * (top + row_sum(below) / row_sum(present).clamp(min=1))
    return rows.reduce(rows.nll(rows.log_probabilities()) + rows.weigh(penalty))


def margin_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float = 0.1,
    margin: float = 10.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Margin-based label smoothing (MbLS): logits may differ by a margin without a penalty.

    .. math:: -\log p_y + \frac{\lambda}{K} \sum_j \max(0, \max_i z_i - z_j - m)

    With m = 0 it is max suppression.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: strength lambda, called alpha by the authors. Their paper sums over the classes; their
            code, as here, takes the mean.
        margin: the difference m to the largest logit up to which there is no penalty.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> margin_smoothing_loss(logits, target, lam=0.1, margin=1.5)
        tensor(0.4968)

    Reference:
        Liu et al. 2022, The Devil is in the Margin: Margin-based Label Smoothing for Network
        Calibration.
    """
    check_hyper(lam=lam, margin=margin, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.margin_smoothing(lam, margin, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    below, top, present = _below_maximum(rows)
    active = row_sum((below.detach() > margin).to(below.dtype))
    excess = row_sum((below - margin).relu()) + active * top
    penalty = lam * excess / row_sum(present).clamp(min=1)
    return rows.reduce(rows.nll(rows.log_probabilities()) + rows.weigh(penalty))


def _below_maximum(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """How far the logits are below the largest of their row.

    Returns:
        c - z_j, (M, K), 0 for masked classes, where c is the largest logit, held constant; max z
        - c, (M,), which is 0 and has the gradient of the maximum; and 1 for the classes that are
        not masked, (M, K).
    """
    masked = rows.logits == -math.inf
    u = rows.shifted - rows.shifted.detach().amax(-1, keepdim=True)
    # Of several largest logits the first one gets the whole gradient; amax would share it.
    top = u.max(-1).values
    return -u.masked_fill(masked, 0.0), top, (~masked).to(u.dtype)


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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> focal_loss(logits, target, gamma=2)
        tensor(0.0589)

    Reference:
        Lin et al. 2017, Focal Loss for Dense Object Detection.
    """
    check_hyper(gamma=gamma, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.focal(gamma, detach_factor, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, linear=False, z_loss=z_loss)
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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> anti_focal_loss(logits, target, gamma=1, scale=0.5)
        tensor(0.5927)

    Reference:
        Raunak et al. 2020, On Long-Tailed Phenomena in Neural Machine Translation.
    """
    check_hyper(gamma=gamma, scale=scale, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.anti_focal(gamma, scale, detach_factor, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, linear=False, z_loss=z_loss)
    log_p = rows.log_probabilities()
    base = 1 + scale * rows.pick(log_p).exp()
    return rows.reduce(_modulated(rows, log_p, base, gamma, detach_factor))


def _modulated(rows: Rows, log_p: Tensor, base: Tensor, gamma: float, detach: bool) -> Tensor:
    """base^gamma times the cross entropy, per row."""
    factor = base.detach() if detach else base
    # A power below 1 has an infinite slope at 0, where the product with log p_y = 0 has none.
    return factor.clamp(min=torch.finfo(factor.dtype).tiny) ** gamma * rows.nll(log_p)


def poly1_loss(
    logits: Tensor,
    target: Tensor,
    *,
    epsilon: float = 2.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Poly-1: cross entropy with another first coefficient in its series in 1 - p_y.

    .. math:: -\log p_y + \epsilon (1 - p_y)

    The gradient is that of the cross entropy times :math:`1 + \epsilon p_y`: more weight on
    well-fitted samples. Class probabilities q give
    :math:`\sum_j q_j (-\log p_j + \epsilon (1 - p_j))`.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        epsilon: what is added to the coefficient, -1 or more; 0 is cross entropy.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> poly1_loss(logits, target, epsilon=2)
        tensor(1.1732)

    Reference:
        Leng et al. 2022, PolyLoss: A Polynomial Expansion Perspective of Classification Loss
        Functions.
    """
    check_hyper(epsilon=epsilon, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.poly1(epsilon, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    log_p = rows.log_probabilities()
    return rows.reduce(rows.nll(log_p + epsilon * torch.expm1(log_p)))


def logit_norm_loss(
    logits: Tensor,
    target: Tensor,
    *,
    tau: float = 0.04,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""LogitNorm: cross entropy of logits that are divided by their norm.

    .. math:: -\log \mathrm{softmax}\Bigl(\frac{z}{\tau \lVert z \rVert}\Bigr)_y

    The loss does not depend on the scale of the logits. Unlike the other losses it changes when a
    number is added to all logits. The norm is that of the classes that are not masked. It is
    at least 0.001, which bounds the gradient at 0.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        tau: temperature. The smallest value that the loss can have grows with it.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> logit_norm_loss(logits, target, tau=1.0)
        tensor(0.8837)

    Reference:
        Wei et al. 2022, Mitigating Neural Network Overconfidence with Logit Normalization.
    """
    check_hyper(tau=tau, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.logit_norm(tau, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    masked = rows.logits == -math.inf
    z = rows.logits.masked_fill(masked, 0.0)
    z = _over_norm(z) / tau
    log_p = torch.log_softmax(z.masked_fill(masked, -math.inf), -1)
    return rows.reduce(rows.nll(log_p))


def _over_norm(x: Tensor, scale: float | Tensor = 1.0, unit: float | Tensor = 1.0) -> Tensor:
    """x / (scale max(|x|, 0.001) + 1e-7) per row, without overflow; 1e-7 is from the authors' code.

    The entries of ``x`` are in units of ``unit``, so that they need not overflow either.
    """
    size = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-3 / unit)
    x = x / size
    # The sum is below 1 only if all entries, and so the norm, are below 0.001.
    norm = row_sum(x.square()).clamp(min=1.0).sqrt()
    return x / spread(scale * norm + (1e-7 / (unit * size)).squeeze(-1), x.shape[-1])


def dft_loss(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Dynamic fine-tuning (DFT): cross entropy times the probability of the target.

    .. math:: -p_y \log p_y

    with the factor held constant. The gradient is that of the cross entropy times :math:`p_y`:
    targets that the model finds unlikely hardly count. The mean divides by the number of rows, not
    by the sum of the factors.

    Args:
        logits: (..., K).
        target: (...) class indices.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> dft_loss(logits, target)
        tensor(0.2867)

    Reference:
        Wu et al. 2025, On the Generalization of SFT: A Reinforcement Learning Perspective with
        Reward Rectification.
    """
    check_hyper(reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.dft(z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, linear=False, z_loss=z_loss)
    log_p = rows.log_probabilities()
    return rows.reduce(times(rows.pick(log_p.detach()).exp(), rows.nll(log_p)))


def eaft_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 1.0,
    top_k: int | None = None,
    normalizer: float | str | None = "log_k",
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Entropy-adaptive fine-tuning (EAFT): cross entropy times the entropy of the prediction.

    .. math:: -\Bigl(\frac{H(p)}{\log K}\Bigr)^\gamma \log p_y

    with the factor held constant. A confident prediction, correct or not, hardly changes. At
    gamma = 1 the adaptive alpha of LABO is 1 minus rho times this factor. The mean divides by the
    number of rows, not by the sum of the factors.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        gamma: exponent of the factor; 0 is cross entropy.
        top_k: compute the entropy of the k largest probabilities, divided by their sum; 20 in the
            authors' code. None computes it exactly.
        normalizer: what the entropy is divided by: "log_k" for its largest value, log K or log k
            (masked classes do not count); a number, such as 3.0 in the authors' code; or None.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> eaft_loss(logits, target)
        tensor(0.3114)
        >>> eaft_loss(logits, target, top_k=2)
        tensor(0.3774)

    Reference:
        Diao et al. 2026, Entropy-Adaptive Fine-Tuning: Resolving Confident Conflicts to Mitigate
        Forgetting.
    """
    check_hyper(
        gamma=gamma,
        top_k=top_k,
        normalizer=normalizer,
        reduction=reduction,
        impl=impl,
        z_loss=z_loss,
    )
    shared = (weight, ignore_index, reduction, dim)
    known = spec.eaft(gamma, top_k, normalizer, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    log_p = rows.log_probabilities()
    factor = _relative_entropy(log_p.detach(), top_k, normalizer) ** gamma
    return rows.reduce(times(factor, rows.nll(log_p)))


def _relative_entropy(log_p: Tensor, top_k: int | None, normalizer: float | str | None) -> Tensor:
    """The entropy of the k largest probabilities per row, divided by the normalizer."""
    if top_k is not None and top_k < log_p.shape[-1]:
        log_p = torch.log_softmax(log_p.topk(top_k, -1).values, -1)
    h = entropy(log_p)
    if not isinstance(normalizer, str):
        return h if normalizer is None else h / normalizer
    count = row_sum((log_p != -math.inf).to(log_p.dtype))
    return h / count.log().masked_fill(count <= 1, math.inf)  # 0 / log 1 is 0


def z_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float = 1e-4,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""z-loss: a penalty that keeps the log-sum-exp of the logits near 0, to add to any loss.

    .. math:: \lambda \Bigl(\log \sum_j e^{z_j}\Bigr)^2

    Softmax does not determine the sum of the logits; this does, and leaves the probabilities free.
    The target tells only which rows count, and with which class weight, so that the sum
    ``cross_entropy_loss(logits, target) + z_loss(logits, target)`` has one reduction.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: strength lambda.
        weight, ignore_index, reduction, dim: as for every loss here.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> z_loss(logits, target, lam=0.01)
        tensor(0.0600)

    Reference:
        Chowdhery et al. 2022, PaLM: Scaling Language Modeling with Pathways.
    """
    check_hyper(lam=lam, reduction=reduction, impl=impl)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.z_squared(lam)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared)
    return rows.reduce(rows.weigh(lam * log_sum(rows.logits).square()))


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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

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
    check_hyper(
        alpha=alpha, beta=beta, generator=generator, reduction=reduction, impl=impl, z_loss=z_loss
    )
    shared = (weight, ignore_index, reduction, dim)
    known = spec.generalized_entropy(alpha, beta, prior, generator, z_loss)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
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
    standardize: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Knowledge distillation: learn from the label and from a teacher.

    .. math::
        (1-\alpha)\,\mathrm{CE} + \alpha\, m\, \tau^2\,
        \mathrm{KL}(\mathrm{softmax}(t/\tau) \Vert \mathrm{softmax}(z/\tau))

    ``kl_reduction="elementwise"`` also divides the KL by K, as code built on ``KLDivLoss()`` with
    its default reduction does (Tf-KD; the temperatures of the LABO paper fit that scale). With
    ``multiplier`` it is Tf-KD_self.

    ``standardize=True`` takes (t - mean t) / std t and (z - mean z) / std z in place of t and z in
    the KL divergence: the student is free to have another mean and scale of its logits. The
    standard deviation is the unbiased one. Masked classes are left out of it.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        teacher_logits: as ``logits``, required; held constant.
        alpha: weight of the teacher, in [0, 1].
        tau: temperature of teacher and model.
        kl_reduction: "batchmean", or "elementwise" to divide the KL divergence by K as well.
        multiplier: the factor m of the KL divergence.
        standardize: standardize the logits of both models in the KL divergence.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> distillation_loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.1304)

    Reference:
        Hinton et al. 2015, Distilling the Knowledge in a Neural Network.
        Sun et al. 2024, Logit Standardization in Knowledge Distillation.
    """
    check_hyper(
        alpha=alpha,
        tau=tau,
        multiplier=multiplier,
        kl_reduction=kl_reduction,
        reduction=reduction,
        impl=impl,
        z_loss=z_loss,
    )
    shared = (weight, ignore_index, reduction, dim)
    known = spec.distillation(alpha, tau, kl_reduction, multiplier, standardize, z_loss)
    source = partial(_teacher_rows, "teacher_logits", teacher_logits, logits, dim)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    factor = multiplier / (rows.num_classes if kl_reduction == "elementwise" else 1)
    if standardize:
        teacher = _standardized(rows.teacher("teacher_logits", teacher_logits)) / tau
        log_p = torch.log_softmax(_standardized(rows.logits) / tau, -1)
        soft = tau**2 * _kl(torch.softmax(teacher, -1), log_p)
    else:
        soft = _tempered_kl(rows, "teacher_logits", teacher_logits, tau)
    hard = rows.nll(rows.log_probabilities())
    return rows.reduce(times(1 - alpha, hard) + rows.weigh(alpha * factor * soft))


def _teacher_rows(name: str, teacher: Tensor | None, logits: Tensor, dim: int) -> Tensor:
    """Teacher logits for a fused backend, (M, K), once they are known to fit."""
    shape, num_classes = logits.movedim(dim, -1).shape[:-1], logits.shape[dim]
    rows = teacher_rows(name, teacher, shape, num_classes, dim)
    _checks.check_devices(logits, **{name: rows})
    return rows


def _tempered_kl(rows: Rows, name: str, teacher_logits: Tensor | None, tau: float) -> Tensor:
    """tau^2 KL(softmax(teacher_logits / tau) || softmax(z / tau)) per row."""
    teacher = smoothing.tempered(rows.teacher(name, teacher_logits), tau)
    return tau**2 * _kl(teacher, rows.log_probabilities(tau))


def _standardized(logits: Tensor) -> Tensor:
    """(z - mean z) / (std z + 1e-7) per row, over the classes that are not masked."""
    masked = logits == -math.inf
    classes = logits.shape[-1]
    count = row_sum((~masked).to(logits.dtype))
    z = logits / 4  # the differences of quarters do not overflow
    z = (z - z.detach().amax(-1, keepdim=True)).masked_fill(masked, 0.0)
    size = z.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    z = z / size  # nor does their sum
    z = (z - spread(row_sum(z) / count, classes)).masked_fill(masked, 0.0)
    per_root = 1 / (count - 1).clamp(min=1).sqrt()
    return _over_norm(z, per_root, unit=4 * size).masked_fill(masked, -math.inf)


def decoupled_distillation_loss(
    logits: Tensor,
    target: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 8.0,
    tau: float = 4.0,
    hard_weight: float = 1.0,
    multiplier: float | Tensor = 1.0,
    standardize: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Decoupled distillation (DKD): the target class and the other classes, weighted apart.

    With :math:`s = \mathrm{softmax}(z/\tau)` and :math:`u = \mathrm{softmax}(t/\tau)`, and a hat
    for the distribution over the classes other than y:

    .. math::
        w\,\mathrm{CE} + m \tau^2 \bigl(\alpha\,
        \mathrm{KL}((u_y, 1-u_y) \Vert (s_y, 1-s_y)) +
        \beta\,\mathrm{KL}(\hat u \Vert \hat s)\bigr)

    Distillation with the weights 1 and :math:`1-u_y` of the two terms is ordinary distillation.
    With two classes the second term is 0.

    Args:
        logits: (..., K).
        target: (...) class indices.
        teacher_logits: as ``logits``, required; held constant.
        alpha: weight of the target class, in [0, 1]. For more, raise ``multiplier``.
        beta: weight of the other classes; from 0.5 to 8 in the authors' settings.
        tau: temperature of teacher and model.
        hard_weight: w, weight of the cross entropy.
        multiplier: the factor m of both KL divergences.
        standardize: standardize the logits of both models in the KL divergences, as for
            :func:`distillation_loss`.
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> decoupled_distillation_loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.7009)

    Reference:
        Zhao et al. 2022, Decoupled Knowledge Distillation.
    """
    check_hyper(
        alpha=alpha,
        beta=beta,
        tau=tau,
        hard_weight=hard_weight,
        multiplier=multiplier,
        reduction=reduction,
        impl=impl,
        z_loss=z_loss,
    )
    shared = (weight, ignore_index, reduction, dim)
    known = spec.decoupled_distillation(
        alpha, beta, tau, hard_weight, multiplier, standardize, z_loss
    )
    source = partial(_teacher_rows, "teacher_logits", teacher_logits, logits, dim)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, linear=False, z_loss=z_loss)
    teacher = rows.teacher("teacher_logits", teacher_logits)
    if standardize:
        student, teacher = _standardized(rows.logits) / tau, _standardized(teacher) / tau
    else:
        student, teacher = rows.shifted / tau, shifted(teacher) / tau
    classes = torch.arange(rows.num_classes, device=rows.target.device)
    label = rows.target.unsqueeze(-1) == classes
    soft = alpha * _target_kl(label, teacher, student) + beta * _others_kl(label, teacher, student)
    hard = rows.nll(rows.log_probabilities())
    return rows.reduce(times(hard_weight, hard) + rows.weigh(multiplier * tau**2 * soft))


def _target_kl(label: Tensor, teacher: Tensor, student: Tensor) -> Tensor:
    """KL between (u_y, 1 - u_y) and (s_y, 1 - s_y) per row, from logits, with 0 log 0 = 0."""
    log_u, log_s = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)

    def term(part: Tensor) -> Tensor:
        # A sum over the other classes: 1 - p_y would lose its digits near p_y = 1.
        log_a, log_b = (log_sum(x.masked_fill(~part, -math.inf)) for x in (log_u, log_s))
        return log_a.exp() * (zero_log(log_a) - zero_log(log_b))

    return term(label) + term(~label)


def _others_kl(label: Tensor, teacher: Tensor, student: Tensor) -> Tensor:
    """KL between the distributions over the classes other than the label, per row, from logits."""
    absent = label | (teacher == -math.inf)
    alone = absent.all(-1)  # the teacher has no other class
    absent = absent & ~alone.unsqueeze(-1)
    u = torch.softmax(teacher.masked_fill(absent, -math.inf), -1)
    log_s = torch.log_softmax(student.masked_fill(label & ~alone.unsqueeze(-1), -math.inf), -1)
    return _kl(u, log_s).masked_fill(alone, 0.0)


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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> cs_kd_loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.5443)

    Reference:
        Yun et al. 2020, Regularizing Class-wise Predictions via Self-knowledge Distillation.
    """
    check_hyper(lam=lam, tau=tau, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.cs_kd(lam, tau, z_loss)
    source = partial(_teacher_rows, "peer_logits", peer_logits, logits, dim)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

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
    check_hyper(alpha=alpha, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.cross_entropy(z_loss) if past_logits is None else spec.ps_kd(alpha, z_loss)
    source = None
    if past_logits is not None:
        source = partial(_teacher_rows, "past_logits", past_logits, logits, dim)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
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


def topk_distillation_loss(
    logits: Tensor,
    target: Tensor,
    indices: Tensor,
    log_probabilities: Tensor,
    *,
    alpha: float = 0.5,
    tail: str = "bucket",
    tau: float = 1.25,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Distillation from the stored k largest probabilities of a teacher.

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

    A class that is masked for the model (logit -inf) is masked for the teacher too.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        indices: (..., k) the stored classes, each at most once; a negative index is padding.
        log_probabilities: (..., k) their log-probabilities under the whole softmax of the teacher;
            held constant.
        alpha: weight of the teacher, in [0, 1].
        tail: "bucket", "uniform", "labo", "drop" or "renormalize".
        tau: temperature of the tail "labo".
        weight, ignore_index, reduction, dim: as for every loss here.
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> teacher = torch.tensor([[3.0, 1.0, 0.2, -0.5]]).log_softmax(-1)
        >>> stored = teacher.topk(2)
        >>> topk_distillation_loss(logits, target, stored.indices, stored.values)
        tensor(0.2630)
    """
    check_hyper(alpha=alpha, tail=tail, tau=tau, reduction=reduction, impl=impl, z_loss=z_loss)
    shared = (weight, ignore_index, reduction, dim)
    known = spec.topk_distillation(alpha, tail, tau, z_loss)
    stored = (indices, log_probabilities)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, stored=stored)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    teacher = _Stored(rows, *stored)
    log_p = rows.log_probabilities()
    log_t = renormalized(teacher.log_t) if tail == "renormalize" else teacher.log_t
    soft = divergence(log_t, log_p.gather(-1, teacher.index))
    if tail in ("bucket", "uniform", "labo"):
        soft = soft + teacher.mass * (
            log_or_0(teacher.mass) + _tail(rows, teacher, log_p, tail, tau)
        )
    hard = rows.nll(log_p)
    return rows.reduce(times(1 - alpha, hard) + rows.weigh(alpha * soft))


def _tail(rows: Rows, teacher: _Stored, log_p: Tensor, tail: str, tau: float) -> Tensor:
    """The cross entropy, minus the entropy, of the tail's own distribution, (M,).

    Rows without other classes get any finite value: their tail has no mass.
    """
    outside = ~teacher.others
    if tail == "bucket":
        return -zero_log(log_sum(log_p.masked_fill(outside, -math.inf)))
    count = row_sum(teacher.others.to(log_p.dtype)).clamp(min=1)
    if tail == "uniform":
        return -count.log() - row_sum(log_p.masked_fill(outside, 0.0)) / count
    outside = outside & teacher.others.any(-1, keepdim=True)
    z = rows.shifted.detach().masked_fill(outside, -math.inf)
    return _kl(torch.softmax(z / tau, -1), log_p)


class _Stored:
    """The stored part of a teacher, as rows.

    Attributes:
        index: (M, k) classes; any class where there is no entry.
        log_t: (M, k) log-probabilities; -inf where there is no entry or the class is masked.
        mass: (M,) probability of the classes that are not stored.
        others: (M, K) bool, the classes that are neither stored nor masked.
    """

    def __init__(self, rows: Rows, indices: Tensor, log_probabilities: Tensor) -> None:
        size = rows.num_classes
        fixed = (rows.logits, rows.shape, size, rows.valid)
        index, log_t = stored_rows(indices, log_probabilities, *fixed)
        # Padding is written to a column that is then left out.
        column = index.masked_fill(index < 0, size)
        stored = column.new_zeros(len(column), size + 1, dtype=torch.bool)
        stored = stored.scatter(-1, column, True)[:, :size]
        self.index = index.clamp(min=0)
        self.others = ~stored & (rows.logits != -math.inf)
        masked = rows.logits.detach().gather(-1, self.index) == -math.inf
        alone = ~self.others.any(-1)
        self.log_t, self.mass = completed(log_t.to(rows.logits.dtype), masked, alone)


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
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
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
        z_loss: lambda of a :func:`z_loss` that is added to the loss.
        impl, inplace: see the module.

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
    check_hyper(
        hard_weight=hard_weight,
        soft_weight=soft_weight,
        reduction=reduction,
        impl=impl,
        z_loss=z_loss,
    )
    shared = (weight, ignore_index, reduction, dim)
    known = (
        None
        if table.requires_grad
        else spec.online_label_smoothing(hard_weight, soft_weight, z_loss)
    )
    source = partial(_table_rows, table, logits, dim)
    fused = dispatch.row_loss(logits, target, known, *shared, impl, inplace, source=source)
    if fused is not None:
        return fused
    rows = Rows(logits, target, *shared, z_loss=z_loss)
    _table_rows(table, logits, dim)
    soft = smoothing.class_table(table.to(rows.logits.dtype), rows.target, rows.logits)
    log_p = rows.log_probabilities()
    return rows.reduce(
        times(hard_weight, rows.nll(log_p)) + times(soft_weight, rows.cross_entropy(soft, log_p))
    )


def _table_rows(table: Tensor, logits: Tensor, dim: int) -> Tensor:
    """The table, once it is known to fit."""
    num_classes = logits.shape[dim]
    _checks.check_devices(logits, table=table)
    if table.shape != (num_classes, num_classes):
        raise ValueError(
            f"table must have shape ({num_classes}, {num_classes}), got {tuple(table.shape)}"
        )
    return table


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
    _table_rows(table, logits, dim)
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


# ------------------------------------------------------------------ with a second forward pass


def r_drop_loss(
    logits: Tensor,
    target: Tensor,
    other_logits: Tensor | None = None,
    *,
    lam: float = 1.0,
    hard_weight: float = 0.5,
    label: str = "onehot",
    alpha: float | str | None = None,
    tau: float = 1.25,
    rho: float = 0.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""R-Drop: two forward passes with different dropout are to agree.

    With z and z' the logits of the two passes, p and p' their probabilities:

    .. math::
        w\,(\ell(z) + \ell(z')) + \lambda\,
        \frac{\mathrm{KL}(p \Vert p') + \mathrm{KL}(p' \Vert p)}{2}

    where :math:`\ell` is the cross entropy with the label, with the smoothed label
    (:func:`label_smoothing_loss`), or LABO (:func:`labo_loss`, each pass with its own optimal
    smoothing). Gradients flow through both passes and through both directions of the divergence.

    Args:
        logits: (..., K), of the first pass.
        target: (...) class indices or (..., K) class probabilities.
        other_logits: as ``logits``, required: of the second pass.
        lam: lambda, the weight of the divergence, called alpha by the authors.
        hard_weight: w, the weight of each of the two cross entropies; 1 in the authors' code.
        label: "onehot", "smoothed" or "labo".
        alpha: of label "smoothed", by default 0.1, or of "labo", by default "adaptive".
        tau: temperature of label "labo".
        rho: how much entropy lowers the adaptive alpha of label "labo".
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> other = torch.tensor([[3.0, 1.0, 0.2, -0.5]])
        >>> r_drop_loss(logits, target, other)
        tensor(0.4113)
        >>> r_drop_loss(logits, target, other, lam=5, hard_weight=1, label="smoothed")
        tensor(1.4314)

    Reference:
        Wu et al. 2021, R-Drop: Regularized Dropout for Neural Networks.
    """
    check_hyper(lam=lam, hard_weight=hard_weight, label=label, tau=tau, rho=rho)
    alpha = _strength_of(label, alpha)
    _checks.check_tensors(logits, target)
    if not isinstance(other_logits, Tensor):
        raise _checks.TeacherError(
            "this loss needs other_logits: the logits of a second forward pass, of the shape of "
            "the logits"
        )
    _checks.check_logits(logits, dim)
    logits, other_logits = (
        _checks.local(name, z) for name, z in (("logits", logits), ("other_logits", other_logits))
    )
    if other_logits.shape != logits.shape:
        raise _checks.TeacherError(
            f"other_logits must have the shape of the logits {tuple(logits.shape)}, "
            f"got {tuple(other_logits.shape)}"
        )
    _checks.check_devices(logits, other_logits=other_logits)
    masked = (logits == -math.inf) | (other_logits == -math.inf)
    first, second = (
        Rows(z.masked_fill(masked, -math.inf), target, weight, ignore_index, reduction, dim)
        for z in (logits, other_logits)
    )
    log_p, log_other = (zero_log(rows.log_probabilities()) for rows in (first, second))
    # Both logarithms are 0 where a class is masked.
    divergence = row_sum((log_p.exp() - log_other.exp()) * (log_p - log_other)) / 2
    hard = _labelled(first, label, alpha, tau, rho) + _labelled(second, label, alpha, tau, rho)
    return first.reduce(times(hard_weight, hard) + first.weigh(lam * divergence))


def _strength_of(label: str, alpha: float | str | None) -> float | str:
    """The alpha of a label: its default, or the given one, if the label has one."""
    if label == "onehot" and alpha is not None:
        raise ValueError('alpha goes with label="smoothed" or label="labo"')
    if label == "smoothed" and isinstance(alpha, str):
        raise ValueError('alpha="adaptive" goes with label="labo"')
    check_hyper(alpha=alpha)
    if alpha is not None:
        return alpha
    return "adaptive" if label == "labo" else 0.1


def _labelled(rows: Rows, label: str, alpha: float | str, tau: float, rho: float) -> Tensor:
    """Cross entropy, label smoothing or LABO per row, (M,)."""
    if label == "onehot":
        return rows.nll(rows.log_probabilities())
    if label == "smoothed":
        assert not isinstance(alpha, str)
        return _objective(rows, smoothing.uniform(rows.logits), alpha)
    held = rows.shifted.detach()
    strength = smoothing.adaptive_alpha(held, rho) if isinstance(alpha, str) else alpha
    return _objective(rows, smoothing.tempered(held, tau), strength, strength * tau)


# ------------------------------------------------------------------ with an earlier prediction


def held_labo_loss(
    logits: Tensor,
    target: Tensor,
    held_logits: Tensor | None = None,
    *,
    tau: float = 1.25,
    alpha: float | str = "adaptive",
    rho: float = 0.5,
    multiplier: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""LABO whose optimal smoothing is held: the objective of its second and later outer steps.

    With the logits :math:`z_0` from the start of the outer loop,
    :math:`P^*_0 = \mathrm{softmax}(z_0/\tau)`, :math:`\alpha_0` from :math:`z_0`,
    :math:`\beta_0 = \alpha_0\tau` and
    :math:`\hat P_0 = (1-\alpha_0)\,\mathrm{onehot}(y) + \alpha_0 P^*_0`:

    .. math:: -\sum_j \hat P_{0,j} \log p_j + \beta_0\, \mathrm{KL}(P^*_0 \Vert U)

    The label is a constant, so the gradient is :math:`p - \hat P_0`. Without ``held_logits``, or
    with those of the same prediction, it is :func:`labo_loss`.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        held_logits: as ``logits``: the logits at the start of the outer loop; held constant.
        tau, alpha, rho, multiplier: as for :func:`labo_loss`.
        weight, ignore_index, reduction, dim: as for every loss here.
        impl, inplace: see the module; used without ``held_logits``.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> start, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> held_labo_loss(start, target, start)
        tensor(1.1205)
        >>> held_labo_loss(torch.tensor([[2.1, 1.0, 0.1, -1.0]]), target, start)
        tensor(1.1137)

    Reference:
        Lu et al. 2023, LABO: Towards Learning Optimal Label Regularization via Bi-level
        Optimization; their limitations name the number of outer steps.
    """
    if held_logits is None:
        return labo_loss(
            logits,
            target,
            tau=tau,
            alpha=alpha,
            rho=rho,
            multiplier=multiplier,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            dim=dim,
            impl=impl,
            inplace=inplace,
        )
    check_hyper(tau=tau, alpha=alpha, rho=rho, multiplier=multiplier, impl=impl)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    held = rows.teacher("held_logits", held_logits)
    strength = smoothing.adaptive_alpha(held, rho) if isinstance(alpha, str) else alpha
    value = _objective(rows, smoothing.tempered(held, tau), strength, strength * tau)
    return rows.reduce(multiplier * value)


# ------------------------------------------------------------------ with a learned confidence


def connet_loss(
    logits: Tensor,
    target: Tensor,
    confidence: Tensor,
    *,
    alpha: float = 0.1,
    lam: float | Tensor = 30.0,
    trusted: Tensor | None = None,
    mean_confidence: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""ConNet-LS: a learned confidence decides how much to smooth, and may ask for the label.

    With a confidence :math:`c` in (0, 1) for each row and its mean :math:`\bar c` over the rows
    that count,

    .. math::
        p' = c\,p + (1-c)\,\mathrm{onehot}(y), \qquad
        \epsilon = \alpha \exp(1 - c/\bar c),

    .. math::
        -(1-\epsilon) \log p'_y - \frac{\epsilon}{K-1} \sum_{j \ne y} \log p'_j - \lambda \log c

    A low confidence makes a wrong prediction cheaper, raises the smoothing, and costs
    :math:`-\lambda\log c`. Gradients flow through everything, the mean included.
    :class:`labo.ConNetLoss` has the network that computes the confidence.

    Args:
        logits: (..., K).
        target: (...) class indices.
        confidence: (...) logits of the confidence, c = sigmoid(confidence).
        alpha: smoothing of a row of mean confidence.
        lam: lambda, the price of a low confidence.
        trusted: (...) bool: rows with c = 1 in p', so that the label does not help them.
        mean_confidence: the mean of c, if it is over more rows than these.
        weight, ignore_index, reduction, dim: as for every loss here.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> connet_loss(logits, target, torch.tensor([0.9]).logit(), lam=0)
        tensor(0.6069)

    Reference:
        Lu et al. 2022, Learning Confidence for Transformer-based Neural Machine Translation.
    """
    check_hyper(alpha=alpha, lam=lam)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim, linear=False)
    given = (confidence,) if trusted is None else (confidence, trusted)
    if any(not isinstance(x, Tensor) or x.shape != rows.shape for x in given):
        raise _checks.TeacherError(
            f"confidence and trusted must have the shape {tuple(rows.shape)} of the samples, got "
            f"{[tuple(x.shape) if isinstance(x, Tensor) else x for x in given]}"
        )
    _checks.check_devices(rows.logits, confidence=confidence, trusted=trusted)
    u = confidence.reshape(-1).to(rows.logits.dtype)
    if rows.valid is not None:
        u = u.masked_fill(~rows.valid, 0.0)
    if mean_confidence is None:
        counted = torch.ones_like(u) if rows.valid is None else rows.valid.to(u.dtype)
        mean_confidence = row_sum(u.sigmoid() * counted) / row_sum(counted).clamp(min=1)
    epsilon = alpha * (1 - u.sigmoid() / mean_confidence.clamp(min=1e-20)).exp()
    log_mixed = _with_hints(rows, u, None if trusted is None else trusted.reshape(-1))
    others = smoothing.others(rows.logits, rows.target)
    hard, soft = rows.nll(log_mixed), rows.cross_entropy(others, log_mixed)
    price = -lam * torch.nn.functional.logsigmoid(u)
    return rows.reduce(times(1 - epsilon, hard) + times(epsilon, soft) + rows.weigh(price))


def _with_hints(rows: Rows, u: Tensor, trusted: Tensor | None) -> Tensor:
    """log(c p + (1 - c) onehot(y)), (M, K), with c = sigmoid(u), or 1 in trusted rows."""
    log_c, log_hint = (torch.nn.functional.logsigmoid(x) for x in (u, -u))
    if trusted is not None:
        log_c, log_hint = log_c.masked_fill(trusted, 0.0), log_hint.masked_fill(trusted, -math.inf)
    log_p = rows.log_probabilities() + spread(log_c, rows.num_classes)
    hinted = torch.logaddexp(rows.pick(log_p), log_hint)
    return torch.where(rows.label() > 0, spread(hinted, rows.num_classes), log_p)
