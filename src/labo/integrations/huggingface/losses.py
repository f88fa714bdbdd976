"""Which losses can be used in a ``Trainer``, and how their means are combined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ...losses import (
    BetaSmoothingLoss,
    CSKDLoss,
    DecoupledDistillationLoss,
    DistillationLoss,
    PSKDLoss,
    RDropLoss,
    Warmup,
    _Loss,
)

# Losses that take the logits of a frozen teacher.
DISTILLATION = (DistillationLoss, DecoupledDistillationLoss)

# Hugging Face collators write this where there is no target, and the Trainer does not count it.
IGNORED = -100

# Losses whose steps are being counted by a RegularizationCallback.
FOLLOWED: WeakSet[nn.Module] = WeakSet()


def leaves(loss: nn.Module) -> Iterator[nn.Module]:
    """The losses that a warm-up switches between, or the loss itself."""
    if isinstance(loss, Warmup):
        yield from leaves(loss.before)
        yield from leaves(loss.after)
    else:
        yield loss


def active(loss: nn.Module) -> nn.Module:
    """The loss of the current step."""
    while isinstance(loss, Warmup):
        loss = loss.active
    return loss


def follows_training(loss: nn.Module) -> bool:
    """Whether the loss has to be told about steps or epochs."""
    return any(isinstance(part, Warmup) or hasattr(part, "end_epoch") for part in loss.modules())


def check_loss(loss: nn.Module, *, teacher: bool) -> None:
    """Raise an error for a loss that a Trainer cannot compute correctly."""
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a Module such as labo.LABOLoss(), got {loss!r}")
    for leaf in leaves(loss):
        name = type(leaf).__name__
        if isinstance(leaf, CSKDLoss | BetaSmoothingLoss | PSKDLoss | RDropLoss):
            raise ValueError(
                f"{name} needs a second sample or pass, an averaged model or earlier predictions, "
                "which a Trainer does not provide: use `labo train`"
            )
        if isinstance(leaf, DISTILLATION) and not teacher:
            raise ValueError(f"{name} needs a teacher: give teacher= to regularize or to fuse_head")
        if any(parameter.requires_grad for parameter in leaf.parameters()):
            raise ValueError(
                f"{name} has trainable parameters, and a Trainer optimizes the parameters of the "
                "model only: use `labo train`"
            )
        if getattr(leaf, "reduction", "mean") != "mean":
            raise ValueError(
                f'{name} must have reduction="mean", got {leaf.reduction!r}: the result is scaled '
                "to the number of targets in the whole batch afterwards"
            )
        if getattr(leaf, "ignore_index", IGNORED) != IGNORED:
            raise ValueError(
                f"{name} must have ignore_index={IGNORED}, got {leaf.ignore_index}: the Trainer "
                f"counts every label except {IGNORED}"
            )
        if getattr(leaf, "dim", -1) != -1:
            raise ValueError(
                f"{name} must have dim=-1, got {leaf.dim}: the classes are the last dimension"
            )
    if teacher and not any(isinstance(leaf, DISTILLATION) for leaf in leaves(loss)):
        raise ValueError(
            f"{type(loss).__name__} does not use a teacher: leave teacher out, or use "
            "labo.DistillationLoss()"
        )


def check_rowwise(loss: nn.Module, function: str) -> None:
    """Raise an error for a loss that cannot be computed one chunk of rows at a time."""
    for leaf in leaves(loss):
        if isinstance(leaf, nn.CrossEntropyLoss):
            instead = "labo.CrossEntropyLoss()"
            if leaf.label_smoothing:
                instead = f"labo.LabelSmoothingLoss(alpha={leaf.label_smoothing})"
            raise ValueError(
                f"{function} needs a loss of labo, and torch.nn.CrossEntropyLoss is not one: use "
                f"{instead}"
            )
        if not isinstance(leaf, _Loss):
            raise ValueError(f"{function} needs a loss of labo, got {type(leaf).__name__}")
        if not leaf.rowwise:
            raise ValueError(
                f"{function} needs a row-wise loss, and {type(leaf).__name__} is not one: its "
                "value for a row depends on other rows or on a table"
            )


def share(
    mean: Tensor,
    target: Tensor,
    items: Tensor | int | None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
) -> Tensor:
    """The contribution of a micro-batch's mean to the mean over the whole batch.

    Args:
        mean: mean over the targets of the micro-batch, weighted by class if ``weight`` is given,
            and by ``token_weight``.
        target: the targets of the micro-batch, ``IGNORED`` where there is none.
        items: the number of targets in the whole batch, or None to return ``mean``.
        weight: (K,) class weights.
        token_weight: weights of the shape of ``target``.
    """
    if items is None:
        return mean
    if target.is_floating_point():  # the Trainer counts every entry of class probabilities
        return mean * (target.numel() / items)
    valid = target != IGNORED
    mass: Tensor = valid
    if weight is not None:
        mass = weight[target.to(weight.device).masked_fill(~valid.to(weight.device), 0)]
    if token_weight is not None:
        mass = mass.to(token_weight.device) * token_weight
    mass = mass.masked_fill(~valid.to(mass.device), 0).sum()
    if isinstance(items, Tensor):
        items = items.to(mean.device)
    return mean * (mass.to(mean.device) / items)


# An attribute and not a set: a compiled forward pass can assign it without a graph break.


def mark_used(loss: Any) -> None:
    """Record that the loss was computed for training."""
    loss._labo_used = True


def take_used(loss: Any) -> bool:
    """Whether the loss was computed for training since the last call."""
    used = getattr(loss, "_labo_used", False)
    loss._labo_used = False
    return used
