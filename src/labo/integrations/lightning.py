"""Lightning: a callback for losses with state, and teachers that are not part of the module.

Most losses need nothing but ``self.loss = labo.LABOLoss()`` in a LightningModule.
:class:`RegularizationCallback` counts optimizer steps for :class:`labo.Warmup` and ends epochs for
OLS and PS-KD. :class:`FrozenTeacher` and :class:`EMATeacher` hold a second model that is not
optimized, not saved in ``state_dict()`` and not wrapped by DDP, so the checkpoint of a student can
be loaded without its teacher.

The state of the loss is saved in checkpoints as part of the LightningModule. The callback saves the
hyper-parameters of the loss and the state of an averaged teacher in addition.
"""

from __future__ import annotations

import copy
import warnings
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from .settings import check_settings, settings_of

__all__ = ["EMATeacher", "FrozenTeacher", "RegularizationCallback"]

_TEACHER_KEY = "labo.teacher"
_LOSS_KEY = "labo.loss"
_PATIENCE = 100


class FrozenTeacher:
    """A trained model as a teacher, in eval mode and without gradients (KD).

    It is not a Module: as an attribute of a LightningModule it is left out of ``parameters()``,
    ``state_dict()``, ``train()`` and DDP. The callback moves it to the device.

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
        """Called after each optimizer step. A frozen model does not change."""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: empty, since the model is passed to the constructor."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by ``state_dict()``."""


class EMATeacher(FrozenTeacher):
    """The running average of a model's own weights (Beta smoothing).

    The decay after step t is min(decay, 1 - 1/(t+1)): a mean of all weights so far at first, then
    an exponential moving average. As in the code of the Beta smoothing authors, buffers are not
    averaged and the average is used in train mode. Their average starts from another
    initialization, this one from the model's.

    Args:
        model: the model that is trained.
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
        self._calls = 0  # since the last step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the average."""
        self._calls += torch.is_grad_enabled()  # not in validation
        if self._calls == _PATIENCE:
            warnings.warn(
                f"EMATeacher has had {_PATIENCE} training passes without a step: give the Trainer "
                "callbacks=[RegularizationCallback()], or call teacher.step() after each optimizer "
                "step",
                stacklevel=2,
            )
        return super().__call__(*args, **kwargs)

    @torch.no_grad()
    def step(self) -> None:
        """Update the average with the current weights."""
        self.steps += 1
        self._calls = 0
        share = max(1 / (self.steps + 1), 1 - self.decay)
        for mean, new in zip(self.model.parameters(), self.learner.parameters(), strict=True):
            mean.lerp_(new, share)

    def state_dict(self) -> dict[str, Any]:
        """The average and its number of steps."""
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by ``state_dict()``."""
        self.model.load_state_dict(state["model"])
        self.steps = state["steps"]


class RegularizationCallback(Callback):  # type: ignore[misc]
    """Counts steps and epochs for the loss and the teacher of a LightningModule.

    After each optimizer step (not after each micro-batch of ``accumulate_grad_batches``) it calls
    ``step()`` of the loss and of the teacher, and after each epoch ``end_epoch()`` of the loss, if
    they have these methods. This includes losses inside a loss, as in :class:`labo.Warmup`. It
    moves the teacher to the device and saves the state of an :class:`EMATeacher` in checkpoints. A
    checkpoint that was written with another loss or with other hyper-parameters is refused.

    DDP copies the buffers of the first process to all others before each forward pass. The callback
    excludes the buffers of the loss, because OLS collects different statistics in each process.

    Args:
        loss_attr: the attribute of the LightningModule that is the loss; may be a dotted path.
        teacher_attr: the attribute that is the teacher, if there is one.

    Example:
        >>> trainer = pl.Trainer(callbacks=[RegularizationCallback()], logger=False)
    """

    def __init__(self, loss_attr: str = "loss", teacher_attr: str = "teacher") -> None:
        self.loss_attr, self.teacher_attr = loss_attr, teacher_attr
        self._steps_seen = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the loss is there, and exclude its buffers from DDP's broadcast."""
        loss = _find(pl_module, self.loss_attr)
        if not isinstance(loss, nn.Module):
            raise ValueError(
                f"{type(pl_module).__name__}.{self.loss_attr} is not a loss Module: pass the name "
                "of the attribute to RegularizationCallback(loss_attr=...)"
            )
        names = {f"{self.loss_attr}.{name}" for name, _ in loss.named_buffers()}
        ignored = names.union(getattr(pl_module, "_ddp_params_and_buffers_to_ignore", ()))
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            pl_module, sorted(ignored)
        )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Move the teacher to the device of the model."""
        if teacher := self._teacher(pl_module):
            teacher.model.to(pl_module.device)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue from the number of steps in the checkpoint."""
        self._steps_seen = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count an optimizer step, if this batch was the last of one."""
        if trainer.global_step == self._steps_seen:
            return
        self._steps_seen = trainer.global_step
        self._notify(pl_module, "step")
        if teacher := self._teacher(pl_module):
            teacher.step()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the epoch of the loss."""
        self._notify(pl_module, "end_epoch")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the hyper-parameters of the loss, and the state of the teacher, if it has one."""
        checkpoint[_LOSS_KEY] = settings_of(_find(pl_module, self.loss_attr))
        teacher = self._teacher(pl_module)
        if teacher and (state := teacher.state_dict()):
            checkpoint[_TEACHER_KEY] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the state of the teacher, and refuse a checkpoint of another loss."""
        if _LOSS_KEY in checkpoint:  # else it was written without the callback
            check_settings(checkpoint[_LOSS_KEY], _find(pl_module, self.loss_attr))
        teacher = self._teacher(pl_module)
        if teacher and _TEACHER_KEY in checkpoint:
            teacher.load_state_dict(checkpoint[_TEACHER_KEY])

    def _notify(self, pl_module: pl.LightningModule, method: str) -> None:
        """Call a method of the loss and of the losses inside it."""
        for part in _find(pl_module, self.loss_attr).modules():
            if callable(function := getattr(part, method, None)):
                function()

    def _teacher(self, pl_module: pl.LightningModule) -> FrozenTeacher | None:
        teacher = _find(pl_module, self.teacher_attr)
        return teacher if isinstance(teacher, FrozenTeacher) else None


def _find(pl_module: pl.LightningModule, path: str) -> Any:
    """The attribute at a dotted path, or None."""
    try:
        return attrgetter(path)(pl_module)
    except AttributeError:
        return None
