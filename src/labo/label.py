"""Every loss as a label: what it pulls a prediction towards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._torch import autograd_enabled
from .loss import Loss
from .losses.labo import Warmup
from .rows import upcast


def label_of(loss: nn.Module, logits: Tensor, target: Tensor, *inputs: Any) -> Tensor:
    r"""The label that a row-wise loss pulls each prediction towards, :math:`Q = p - dL/dz`.

    The gradient of a cross entropy with the label Q is p - Q, so that any other loss has, at these
    logits, the gradient of the cross entropy with this label. It sums to 1 unless the loss depends
    on a shift of the logits. It may be negative, and of a row that does not count it is p.

    Args:
        loss: a loss of labo; of a warm-up the active one.
        logits: (..., K), or classes in the ``dim`` of the loss.
        target: as for the loss.
        inputs: what the loss takes after the target, such as teacher logits.

    Returns:
        Q, of the shape of the logits, without a graph.

    Example:
        >>> from labo import FocalLoss, LabelSmoothingLoss
        >>> logits, target = torch.tensor([2.0, 1.0, 0.1, -1.0]), torch.tensor(0)
        >>> label_of(LabelSmoothingLoss(alpha=0.1), logits, target)
        tensor([0.9250, 0.0250, 0.0250, 0.0250])
        >>> label_of(FocalLoss(gamma=2.0), logits, target)
        tensor([0.7606, 0.1553, 0.0631, 0.0210])

    Reference:
        Xie et al. 2026, who call it the Q-target.
    """
    active = loss.active if isinstance(loss, Warmup) else loss
    if not isinstance(active, Loss) or not active.rowwise:
        raise ValueError(f"a label needs a row-wise loss of labo, got {type(active).__name__}")
    summed = active.current().having(reduction="sum", inplace=False)
    with autograd_enabled():
        z = upcast(logits.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(summed.compute(z, target, *inputs), z)
    return torch.softmax(z.detach(), active.dim) - slope
