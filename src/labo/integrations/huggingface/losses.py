"""Which losses can be used in a ``Trainer``, and how their means are combined."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ...loss import Loss
from ...losses import (
    BetaSmoothingLoss,
    CSKDLoss,
    DecoupledDistillationLoss,
    DistillationLoss,
    PSKDLoss,
    RDropLoss,
    Warmup,
)

# Losses that take the logits of a frozen teacher.
DISTILLATION = (DistillationLoss, DecoupledDistillationLoss)

# Hugging Face collators write this where there is no target, and the Trainer does not count it.
IGNORED = -100

# Losses whose steps are being counted by a RegularizationCallback.
FOLLOWED: WeakSet[nn.Module] = WeakSet()

# For other losses: the counts of their warm-ups, and the training passes since these changed.
_UNCOUNTED: WeakKeyDictionary[nn.Module, tuple[list[int], int]] = WeakKeyDictionary()
_PATIENCE = 8


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


def warn_uncounted(loss: nn.Module) -> None:
    """Called in each training pass: warn about a loss whose steps nobody seems to count.

    Not an error: a loop of one's own calls ``loss.step()``, after any number of micro-batches.
    """
    if loss in FOLLOWED or not follows_training(loss):
        return
    counts = [part.steps_done for part in loss.modules() if isinstance(part, Warmup)]
    before, passes = _UNCOUNTED.get(loss, (counts, 0))
    passes = passes + 1 if before == counts else 1
    _UNCOUNTED[loss] = counts, passes
    if passes == _PATIENCE:
        warnings.warn(
            f"nothing has counted the optimizer steps for {type(loss).__name__} in {passes} "
            "training passes: give the Trainer callbacks=[RegularizationCallback(loss)], or call "
            "loss.step() after each step",
            stacklevel=2,
        )


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
        if not isinstance(leaf, Loss):
            raise ValueError(f"{function} needs a loss of labo, got {type(leaf).__name__}")
        if not leaf.rowwise:
            raise ValueError(
                f"{function} needs a row-wise loss, and {type(leaf).__name__} is not one: its "
                "value for a row depends on other rows or on a table"
            )


class Summed:
    """A row-wise loss as ``linear_loss`` sees it, summed and not averaged over the targets.

    A sum is right where a mean is not known: without targets, or with weights that cancel.
    """

    reduction = "sum"

    def __init__(self, loss: nn.Module) -> None:
        self._loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)


def over(total: Tensor, target: Tensor, items: Tensor | float) -> Tensor:
    """A sum over the targets of a micro-batch as a part of the mean over the whole batch.

    Args:
        total: the sum.
        target: the targets of the micro-batch.
        items: the number of targets in the whole batch. If it is 0, so is the sum.
    """
    if isinstance(items, Tensor):
        items = items.to(total.device)
        items = items.masked_fill(items == 0, 1)
    items = items if isinstance(items, Tensor) else items or 1
    if target.is_floating_point():  # the Trainer counts every entry of class probabilities
        items = items / target.shape[-1]
    return total / items


def share(
    mean: Tensor, target: Tensor, items: Tensor | float | None, weight: Tensor | None = None
) -> Tensor:
    """The contribution of a micro-batch's mean to the mean over the whole batch.

    Args:
        mean: mean over the targets of the micro-batch, weighted by class if ``weight`` is given.
        target: the targets of the micro-batch, ``IGNORED`` where there is none.
        items: the number of targets in the whole batch, or None to return ``mean``.
        weight: (K,) class weights.
    """
    if items is None:
        return mean
    if target.is_floating_point():
        return over(mean * target.shape[:-1].numel(), target, items)
    valid = target != IGNORED
    mass: Tensor = valid
    if weight is not None:
        valid = valid.to(weight.device)
        mass = weight[target.to(weight.device).masked_fill(~valid, 0)].masked_fill(~valid, 0)
    return over(mean * mass.sum().to(mean.device), target, items)


class Columns(NamedTuple):
    """What a batch may have beside inputs and labels, aligned with the labels.

    Attributes:
        token_weight: (...), a factor for the loss of each label.
        teacher_indices: (..., k), the stored classes of a teacher for each label.
        teacher_log_probabilities: (..., k), of these classes.
    """

    token_weight: Any = None
    teacher_indices: Any = None
    teacher_log_probabilities: Any = None

    @classmethod
    def taken_from(cls, inputs: dict[str, Any]) -> Columns:
        """The columns, which are removed from the inputs."""
        return cls(*(inputs.pop(name, None) for name in cls._fields))

    def extras(
        self, loss: nn.Module, labels: Tensor, target: Tensor, device: torch.device
    ) -> dict[str, Any]:
        """``token_weight`` and ``teacher_logits`` of ``linear_loss``, as far as ``loss`` has them.

        Args:
            loss: the loss of the current step.
            labels: as the batch has them.
            target: the labels, shifted or not. What belongs to a label is shifted with it.
            device: of the result.
        """
        shape = labels.shape[:-1] if labels.is_floating_point() else labels.shape
        found: dict[str, Any] = {}
        if self.token_weight is not None:
            weight = self._checked("token_weight", shape, 0)
            if target is not labels:
                weight = nn.functional.pad(weight[..., 1:], (0, 1))
            if not target.is_floating_point():
                weight = weight.masked_fill((target == IGNORED).to(weight.device), 0)
            found["token_weight"] = weight.to(device)
        if getattr(loss, "teacher_is_stored", False):
            stored = [self._checked(name, shape, 1) for name in self._fields[1:]]
            if target is not labels:
                stored = [nn.functional.pad(x[..., 1:, :], (0, 0, 0, 1)) for x in stored]
            found["teacher_logits"] = tuple(x.to(device) for x in stored)
        return found

    def _checked(self, name: str, shape: torch.Size, more: int) -> Tensor:
        """A column, if it has the shape of the labels and ``more`` dimensions."""
        value = getattr(self, name)
        if not isinstance(value, Tensor) or value.shape[: value.dim() - more] != shape:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            wanted = "the shape of the labels" + (" and k classes" if more else "")
            raise ValueError(
                f"{name} must be a tensor in the batch with {wanted}, "
                f"{(*shape, 'k') if more else tuple(shape)}, got {found[:80]}"
            )
        return value


# An attribute and not a set: a compiled forward pass can assign it without a graph break.


def mark_used(loss: Any) -> None:
    """Record that the loss was computed for training."""
    loss._labo_used = True


def take_used(loss: Any) -> bool:
    """Whether the loss was computed for training since the last call."""
    used = getattr(loss, "_labo_used", False)
    loss._labo_used = False
    return used
