r"""Every loss as a pure function of logits and target, derived from its class in ``labo.losses``.

All losses have the signature ``f(logits, target, *, <hyper-parameters>, weight=None,
ignore_index=-100, reduction="mean", dim=-1, z_loss=0.0, impl="auto", inplace=False)``:

- ``logits``: (..., K), or classes in dimension ``dim``. Half types are computed in float32.
- ``target``: (...) class indices of any integer type. The losses that are linear in the label also
  take (..., K) class probabilities (mixup, CutMix).
- what all losses share is explained in :class:`labo.loss.Loss`.

A class whose logit is -inf is masked: it gets no probability, no smoothing mass and no gradient.
If it is the label, the loss is infinite, unless the label's share (1 - alpha) or weight is 0:
0 * inf = 0.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _checks
from .fields import NOT_NEGATIVE
from .loss import Loss, function_of
from .losses import ALL
from .losses.labo import objective
from .rows import Rows


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
        weight, ignore_index, reduction, dim: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> prior = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
        >>> smoothed_cross_entropy(logits, target, prior, alpha=0.1)
        tensor(0.5473)
    """
    NOT_NEGATIVE.check("beta", beta)
    Loss.fields["reduction"].check(reduction)
    rows = Rows(logits, target, weight, ignore_index, reduction, dim)
    if smoothing.shape != logits.shape:
        raise ValueError(
            f"smoothing must have the shape of the logits {tuple(logits.shape)}, "
            f"got {tuple(smoothing.shape)}"
        )
    _checks.check_devices(logits, smoothing=smoothing)
    alpha, beta = rows.per_row("alpha", alpha), rows.per_row("beta", beta)
    _checks.check_alpha(alpha)
    p_ls = rows.flatten(smoothing)
    if rows.valid is not None:
        p_ls = p_ls.masked_fill(~rows.valid.unsqueeze(-1), 1 / rows.num_classes)
    _checks.check_distribution("smoothing", p_ls)
    return rows.reduce(objective(rows, p_ls.to(rows.logits.dtype), alpha, beta))


_DERIVED: dict[str, Any] = {f.__name__: f for f in map(function_of, ALL)}
globals().update(_DERIVED)

__all__ = sorted(["smoothed_cross_entropy", *_DERIVED])
