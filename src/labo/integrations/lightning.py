"""Lightning: a callback for losses with state, and teachers that Lightning does not see.

For most losses ``self.loss = labo.LABOLoss()`` in a LightningModule is all. The rest is here.
:class:`RegularizationCallback` counts optimizer steps for :class:`labo.Warmup` and
ends epochs for OLS and PS-KD. :class:`FrozenTeacher` and :class:`EMATeacher` hold a second model
that is in no optimizer, no ``state_dict()`` and no data-parallel wrapper: the checkpoint of a
student can be loaded without its teacher.

The state of the loss is in the checkpoint already, as part of the LightningModule; the callback
adds that of an averaged teacher, and has none of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

__all__ = ["EMATeacher", "FrozenTeacher", "RegularizationCallback"]

_CHECKPOINT_KEY = "labo.teacher"


class FrozenTeacher:
    """A finished model to learn from, in eval mode and without gradients (KD).

    Not a Module on purpose: as an attribute of a LightningModule it is passed over by
    ``parameters()``, ``state_dict()``, ``train()`` and DDP. The callback moves it to the device.

    Args:
        model: the teacher; its parameters are frozen.

    Example:
        >>> teacher = FrozenTeacher(nn.Linear(3, 2))
        >>> teacher(torch.zeros(1, 3)).requires_grad
        False
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The teacher's output."""
        return self.model(*args, **kwargs)

    def step(self) -> None:
        """Follow an optimizer step: a frozen model stays as it is."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: nothing, as the model is given again."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state of ``state_dict()``."""


class EMATeacher(FrozenTeacher):
    """The running average of a model's own weights (Beta smoothing).

    A plain mean of the weights at first (decay 1 - 1/(t+1) after step t), an exponential average
    once ``decay`` is reached. As in the Beta smoothing authors' code the average leaves the buffers
    alone and is run in train mode; theirs starts from an initialisation of its own, this one from
    the model's.

    Args:
        model: the model that learns.
        decay: in [0, 1).

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 0.0)
        >>> teacher = EMATeacher(model)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> teacher.step()  # the callback does this after each optimizer step
        >>> teacher(torch.ones(1))
        tensor([0.5000])
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay!r}")
        super().__init__(copy.deepcopy(model))
        self.model.train()
        self.learner, self.decay, self.steps = model, decay, 0

    @torch.no_grad()
    def step(self) -> None:
        """Move the average towards the weights of now."""
        self.steps += 1
        share = max(1 / (self.steps + 1), 1 - self.decay)
        for mean, new in zip(self.model.parameters(), self.learner.parameters(), strict=True):
            mean.lerp_(new, share)

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of steps in it."""
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state of ``state_dict()``."""
        self.model.load_state_dict(state["model"])
        self.steps = state["steps"]


class RegularizationCallback(Callback):  # type: ignore[misc]
    """Tells the loss and the teacher of a LightningModule how training goes on.

    After each optimizer step (not after each micro-batch of ``accumulate_grad_batches``) it calls
    ``step()`` of the loss and of the teacher, after each epoch ``end_epoch()`` of the loss, as far
    as they have them; losses inside a loss, as in :class:`labo.Warmup`, are told as well. It moves
    the teacher to the device and keeps the state of an :class:`EMATeacher` in the checkpoint.

    Under DDP it takes the buffers of the loss out of the broadcast from the first process before
    each forward pass, which would overwrite what OLS gathers on the others.

    Args:
        loss_attr: where the loss is in the LightningModule; dots lead inside.
        teacher_attr: where the teacher is, if there is one.

    Example:
        >>> trainer = pl.Trainer(callbacks=[RegularizationCallback()], logger=False)
    """

    def __init__(self, loss_attr: str = "loss", teacher_attr: str = "teacher") -> None:
        self.loss_attr, self.teacher_attr = loss_attr, teacher_attr
        self._steps_told = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the loss, before any work is done."""
        loss = _find(pl_module, self.loss_attr)
        if not isinstance(loss, nn.Module):
            raise ValueError(
                f"{type(pl_module).__name__}.{self.loss_attr} is no loss Module: "
                "say where it is with RegularizationCallback(loss_attr=...)"
            )
        names = {f"{self.loss_attr}.{name}" for name, _ in loss.named_buffers()}
        ignored = names.union(getattr(pl_module, "_ddp_params_and_buffers_to_ignore", ()))
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            pl_module, sorted(ignored)
        )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Move the teacher to where the model is."""
        for teacher in self._teachers(pl_module):
            teacher.model.to(pl_module.device)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on from the steps of the checkpoint."""
        self._steps_told = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Tell of an optimizer step, if this batch made one."""
        if trainer.global_step == self._steps_told:
            return
        self._steps_told = trainer.global_step
        self._tell(pl_module, "step")
        for teacher in self._teachers(pl_module):
            teacher.step()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell of the end of an epoch."""
        self._tell(pl_module, "end_epoch")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state of the teacher, if it has one."""
        for teacher in self._teachers(pl_module):
            if state := teacher.state_dict():
                checkpoint[_CHECKPOINT_KEY] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take up the state of the teacher."""
        for teacher in self._teachers(pl_module):
            if _CHECKPOINT_KEY in checkpoint:
                teacher.load_state_dict(checkpoint[_CHECKPOINT_KEY])

    def _tell(self, pl_module: pl.LightningModule, event: str) -> None:
        for part in _find(pl_module, self.loss_attr).modules():
            if callable(hook := getattr(part, event, None)):
                hook()

    def _teachers(self, pl_module: pl.LightningModule) -> Iterator[FrozenTeacher]:
        """The teacher, or none."""
        teacher = _find(pl_module, self.teacher_attr)
        if isinstance(teacher, FrozenTeacher):
            yield teacher


def _find(pl_module: pl.LightningModule, path: str) -> Any:
    """The attribute at a dotted path, or None."""
    try:
        return attrgetter(path)(pl_module)
    except AttributeError:
        return None
