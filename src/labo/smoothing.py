r"""Smoothing distributions and strengths, and the confidence that they lead a model to.

A smoothed label is :math:`\hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P_{ls}`. This module
has the distributions :math:`P_{ls}` and the strengths alpha as plain functions. Any of them, or one
of your own, can be passed to :func:`labo.functional.smoothed_cross_entropy`.

A class whose logit is -inf is masked: no distribution gives it any mass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks
from .fields import POSITIVE, UNIT
from .rows import entropy, row_sum, shifted, upcast

__all__ = [
    "adaptive_alpha",
    "beta_alpha",
    "class_table",
    "others",
    "smoothed_target",
    "stationary_confidence",
    "stationary_label_weight",
    "tau_for_confidence",
    "tempered",
    "uniform",
    "virtual_teacher",
]


def restricted(distribution: Tensor, logits: Tensor) -> Tensor:
    """A distribution over the classes that are not masked: sums to 1, or to 0 if it is all 0."""
    kept = distribution.masked_fill(logits == -math.inf, 0.0)
    total = row_sum(kept).unsqueeze(-1)
    return kept / total.masked_fill(total == 0, 1.0)


def uniform(logits: Tensor) -> Tensor:
    """The uniform distribution U of conventional label smoothing.

    Args:
        logits: (..., K).

    Returns:
        (..., K): 1/K for each class, or, with masked classes, 1 over the number of the others.

    Example:
        >>> uniform(torch.tensor([2.0, 1.0, -math.inf, 0.0]))
        tensor([0.3333, 0.3333, 0.0000, 0.3333])
    """
    present = (logits != -math.inf).to(upcast(logits).dtype)
    return present / row_sum(present).unsqueeze(-1)


def others(logits: Tensor, target: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Uniform over all classes but the label: the smoothing of fairseq and JoeyNMT.

    Args:
        logits: (..., K).
        target: (...) class indices in [0, K), or (..., K) class probabilities, for the mean over
            the classes weighted by the label.
        padding_idx: a class that gets no mass, as in JoeyNMT.

    Returns:
        (..., K); the label itself if there is no other class.

    Example:
        >>> others(torch.zeros(4), torch.tensor(1))
        tensor([0.3333, 0.0000, 0.3333, 0.3333])
        >>> others(torch.zeros(4), torch.tensor(1), padding_idx=0)
        tensor([0.0000, 0.0000, 0.5000, 0.5000])
    """
    dtype = upcast(logits).dtype
    classes = torch.arange(logits.shape[-1], device=logits.device)
    allowed = logits != -math.inf
    if padding_idx is not None:
        allowed = allowed & (classes != padding_idx)
    allowed = allowed.to(dtype)
    label = (target if target.is_floating_point() else target.unsqueeze(-1) == classes).to(dtype)
    inside = label * allowed
    mass = row_sum(inside).unsqueeze(-1)
    count = row_sum(allowed).unsqueeze(-1)
    # Mass of the label on a class that is not allowed (padding) goes to all that are.
    shared = allowed * (
        (mass - inside) / (count - 1).clamp(min=1) + (1 - mass) / count.clamp(min=1)
    )
    return torch.where(count > 1, shared, torch.where(count == 1, allowed, label))


def tempered(logits: Tensor, tau: float = 1.25) -> Tensor:
    r"""Theorem 1's optimal smoothing distribution: softmax(z / tau), with tau = beta / alpha.

    .. math:: P^*_j = p_j^{1/\tau} / \sum_k p_k^{1/\tau}

    With a teacher's logits it is the soft label of knowledge distillation.

    Args:
        logits: (..., K).
        tau: temperature, above 0.

    Returns:
        (..., K), in the graph of ``logits``; detach it to hold it constant.

    Example:
        >>> tempered(torch.tensor([2.0, 1.0, 0.1, -1.0]), tau=1.25)
        tensor([0.5686, 0.2555, 0.1244, 0.0516])
    """
    POSITIVE.check("tau", tau)
    return torch.softmax(shifted(upcast(logits)) / tau, -1)


def adaptive_alpha(logits: Tensor, rho: float = 0.5) -> Tensor:
    r"""The paper's instance-specific strength, from the entropy of the prediction.

    .. math:: \alpha = 1 - \rho\, H(p) / \log K

    K counts the classes that are not masked. It ranges from 1 - rho (uniform prediction) to 1
    (certain prediction): the more confident the model, the less weight is left for the label.

    Args:
        logits: (..., K).
        rho: in [0, 1]; the paper uses 0.5.

    Returns:
        (...), in the graph of ``logits``; LABO detaches it.

    Example:
        >>> adaptive_alpha(torch.tensor([2.0, 1.0, 0.1, -1.0]))
        tensor(0.6535)
    """
    UNIT.check("rho", rho)
    log_p = torch.log_softmax(shifted(upcast(logits)), -1)
    count = (logits != -math.inf).sum(-1)
    uniform_entropy = count.to(log_p.dtype).log().masked_fill(count <= 1, 1.0)
    return 1 - rho * entropy(log_p) / uniform_entropy


def virtual_teacher(
    logits: Tensor, target: Tensor, *, confidence: float = 0.99, tau: float = 20.0
) -> Tensor:
    """TF-reg's virtual teacher, softmax(v / tau) with v_y = confidence and the rest shared evenly.

    As in the authors' code the vector v of probabilities is used as logits: at tau = 20 and K = 100
    the teacher is uniform to within 5 %.

    Args:
        logits: (..., K), for the number of classes and the mask.
        target: (...) class indices in [0, K).
        confidence: v_y.
        tau: temperature of the teacher.

    Returns:
        (..., K).

    Example:
        >>> virtual_teacher(torch.zeros(4), torch.tensor(0), tau=20)
        tensor([0.2594, 0.2469, 0.2469, 0.2469])
    """
    UNIT.check("confidence", confidence)
    POSITIVE.check("tau", tau)
    num_classes = logits.shape[-1]
    is_label = target.unsqueeze(-1) == torch.arange(num_classes, device=logits.device)
    rest = (1 - confidence) / max(num_classes - 1, 1)
    # new_full, because torch.where of two numbers has the default dtype.
    virtual = upcast(logits).detach().new_full(logits.shape, rest).masked_fill(is_label, confidence)
    return torch.softmax(virtual.masked_fill(logits == -math.inf, -math.inf) / tau, -1)


def class_table(table: Tensor, target: Tensor, logits: Tensor) -> Tensor:
    """The row of a table of soft labels (OLS), restricted to the classes that are not masked.

    Args:
        table: (K, K), row y is the soft label of class y; a row of zeros stays zero.
        target: (...) class indices in [0, K), or (..., K) class probabilities, to mix rows.
        logits: (..., K), for the mask.

    Returns:
        (..., K).

    Example:
        >>> table = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
        >>> class_table(table, torch.tensor([1, 0]), torch.zeros(2, 2))
        tensor([[0.5000, 0.5000],
                [0.8000, 0.2000]])
    """
    if target.is_floating_point():
        with torch.autocast(logits.device.type, enabled=False):
            rows = target.to(table.dtype) @ table
    else:
        rows = table[target.long()]  # uint8 would be read as a mask
    return restricted(rows, logits)


def beta_alpha(confidence: Tensor, draws: Tensor, valid: Tensor | None = None) -> Tensor:
    """Beta smoothing's instance-specific strength 1 - b.

    The i-th smallest draw b goes to the sample with the i-th smallest confidence.

    Args:
        confidence: (N,) probability that the averaged model gives to the label.
        draws: (N,) draws from Beta(a, 1), one per row.
        valid: (N,) rows that count. The others, and their draws, are not ranked.

    Returns:
        (N,), the mass that is moved away from the label of each row.

    Example:
        >>> beta_alpha(torch.tensor([0.9, 0.3]), torch.tensor([0.55, 0.95]))
        tensor([0.0500, 0.4500])
    """
    if valid is not None:
        confidence = confidence.masked_fill(~valid, math.inf)
        draws = draws.masked_fill(~valid, math.inf)
    rank = confidence.argsort(dim=-1, stable=True)
    assigned = torch.empty_like(draws).scatter(-1, rank, draws.sort(dim=-1).values)
    if valid is not None:
        assigned = assigned.masked_fill(~valid, 1.0)
    return 1 - assigned


def smoothed_target(target: Tensor, smoothing: Tensor, alpha: float | Tensor) -> Tensor:
    r"""The smoothed label itself, for inspection.

    .. math:: \hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P_{ls}

    Args:
        target: (...) class indices in [0, K), or (..., K) class probabilities.
        smoothing: (..., K) smoothing distribution.
        alpha: a number in [0, 1], or one per sample, (...).

    Returns:
        (..., K).

    Example:
        >>> logits = torch.tensor([2.0, 1.0, 0.1, -1.0])
        >>> smoothed_target(torch.tensor(0), tempered(logits, 1.25), adaptive_alpha(logits))
        tensor([0.7181, 0.1670, 0.0813, 0.0337])
    """
    num_classes = smoothing.shape[-1]
    if target.is_floating_point():
        label = target
    else:
        target = target.long()
        _checks.check_range(target, num_classes)
        label = target.unsqueeze(-1) == torch.arange(num_classes, device=target.device)
        # A bool times a number would have the default dtype.
        label = label.to(smoothing.dtype)
    _checks.check_alpha(alpha)
    if isinstance(alpha, Tensor):
        alpha = alpha.unsqueeze(-1)
    return (1 - alpha) * label + alpha * smoothing


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def alpha_of_entropy(entropy: float, num_classes: int, rho: float) -> float:
    """:func:`adaptive_alpha` of a prediction with this entropy, in nats.

    It is linear in the entropy: the mean over predictions is that of their mean entropy.
    """
    return 1 - rho * entropy / (math.log(num_classes) if num_classes > 1 else 1.0)


def _alpha_at(log_odds: float, num_classes: int, alpha: float | str, rho: float) -> float:
    """alpha for a prediction with these log-odds of the label and the rest spread evenly."""
    if not isinstance(alpha, str):
        return alpha
    log_p, log_rest = _log_sigmoid(log_odds), _log_sigmoid(-log_odds)
    spread = log_rest - math.log(num_classes - 1)
    h = -math.exp(log_p) * log_p - math.exp(log_rest) * spread
    return alpha_of_entropy(h, num_classes, rho)


def _check_setting(num_classes: int, alpha: float | str, rho: float) -> None:
    UNIT.check("alpha", alpha, "adaptive")
    UNIT.check("rho", rho)
    if num_classes < 1:
        raise ValueError(f"num_classes must be 1 or more, got {num_classes!r}")


def stationary_confidence(
    num_classes: int, *, tau: float = 1.25, alpha: float | str = "adaptive", rho: float = 0.5
) -> float:
    r"""The confidence that LABO leads a fitted sample to.

    The gradient p - P_hat vanishes where :math:`p = (1-\alpha) + \alpha P^*_y(p)`, with the rest
    of the mass spread evenly over the other classes.

    Args:
        num_classes: K.
        tau: temperature; ``math.inf`` is conventional label smoothing.
        alpha: "adaptive", or a number in [0, 1].
        rho: for adaptive alpha.

    Returns:
        p_y. It is 1 if the confidence is not limited (tau <= 1, or alpha = 0).

    Example:
        >>> round(stationary_confidence(10_000, tau=1.25), 3)
        0.404
        >>> round(stationary_confidence(10, tau=math.inf, alpha=0.1), 3)  # label smoothing
        0.91
    """
    _check_setting(num_classes, alpha, rho)
    if tau != math.inf:
        POSITIVE.check("tau", tau)
    if num_classes == 1 or tau <= 1 or alpha == 0:
        return 1.0
    base = math.log(num_classes - 1)

    def pull(log_odds: float) -> float:
        """log (1-p) - log alpha (1-P*): above 0 where the gradient increases the confidence."""
        strength = _alpha_at(log_odds, num_classes, alpha, rho)
        if strength == 0:
            return math.inf
        star = (log_odds + base) / tau - base  # log-odds of P*_y
        return _log_sigmoid(-log_odds) - math.log(strength) - _log_sigmoid(-star)

    low, high = -base, 700.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if pull(middle) > 0 else (low, middle)
    return math.exp(_log_sigmoid((low + high) / 2))


def stationary_label_weight(
    num_classes: int, *, tau: float = 1.25, alpha: float | str = "adaptive", rho: float = 0.5
) -> float:
    r"""The share 1 - alpha of the label that LABO keeps at the :func:`stationary_confidence`.

    The gradient of LABO is about that share of the gradient of cross entropy. With SGD the learning
    rate of cross entropy is then too small: divide it by this number, or multiply the loss.

    Args:
        num_classes, tau, alpha, rho: as for :func:`stationary_confidence`.

    Returns:
        :math:`\rho H(p) / \log K` for adaptive alpha, else 1 - alpha. It is 0 for adaptive alpha
        if the confidence is not limited (tau <= 1).

    Example:
        >>> round(stationary_label_weight(10, tau=1.25), 3)
        0.295
        >>> import labo
        >>> loss = labo.LABOLoss(tau=1.25, multiplier=1 / stationary_label_weight(10, tau=1.25))
    """
    p = stationary_confidence(num_classes, tau=tau, alpha=alpha, rho=rho)
    if isinstance(alpha, str) and p == 1:
        return 0.0
    log_odds = math.inf if p == 1 else math.log(p) - math.log1p(-p)
    return 1 - _alpha_at(log_odds, num_classes, alpha, rho)


def tau_for_confidence(
    p: float, num_classes: int, *, alpha: float | str = "adaptive", rho: float = 0.5
) -> float:
    """The tau that leads a fitted sample to confidence ``p``.

    The inverse of :func:`stationary_confidence`, to choose tau by its effect.

    Args:
        p: the confidence, in (1/K, 1].
        num_classes, alpha, rho: as for :func:`stationary_confidence`.

    Returns:
        tau, 1 or more.

    Raises:
        ValueError: if no tau leads to it. The message says which confidences can be reached.

    Example:
        >>> tau = tau_for_confidence(0.9, num_classes=100)
        >>> round(tau, 4), round(stationary_confidence(100, tau=tau), 4)
        (1.0149, 0.9)
    """
    _check_setting(num_classes, alpha, rho)
    if num_classes < 2:
        raise ValueError("with one class the confidence is always 1")
    if not 1 / num_classes < p <= 1:
        raise ValueError(f"p must lie in (1/K, 1] = ({1 / num_classes:.4g}, 1], got {p!r}")
    if p == 1:
        return 1.0
    log_odds = math.log(p) - math.log1p(-p)
    strength = _alpha_at(log_odds, num_classes, alpha, rho)
    rest = (1 - p) / strength if strength else math.inf  # 1 - P*_y
    if rest >= 1 - 1 / num_classes:
        lowest = stationary_confidence(num_classes, tau=math.inf, alpha=alpha, rho=rho)
        setting = f"rho={rho}" if isinstance(alpha, str) else f"alpha={alpha}"
        raise ValueError(
            f"no tau gives a confidence of {p} with {num_classes} classes and {setting}: "
            f"it stays above {lowest:.4f}"
        )
    base = math.log(num_classes - 1)
    star = math.log1p(-rest) - math.log(rest)
    return (log_odds + base) / (star + base)
