"""The callback that counts steps and epochs for a loss."""

from __future__ import annotations

import base64
from typing import Any

import safetensors.torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ...losses import OnlineLabelSmoothingLoss, Warmup
from ..settings import check_settings, settings_of
from .losses import FOLLOWED, follows_training, take_used


def check_arguments(args: TrainingArguments) -> None:
    """Raise an error if the Trainer is configured to use another loss."""
    if args.label_smoothing_factor != 0:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} and a loss of labo are both "
            "set, and the Trainer would use only one of them: set label_smoothing_factor=0, and "
            "for label smoothing use labo.LabelSmoothingLoss(alpha=...)"
        )


class RegularizationCallback(TrainerCallback):  # type: ignore[misc]
    """Counts optimizer steps and epochs for a loss, and saves its state with the checkpoints.

    Needed in a ``Trainer`` whose model was changed by :func:`fuse_head` with a loss that has a
    warm-up; :func:`regularize` adds it by itself.

    The state of the loss is written to ``trainer_state.json`` in every checkpoint and read by
    ``train(resume_from_checkpoint=...)``, so that a warm-up continues from its step. A checkpoint
    of another loss or of other hyper-parameters is refused. A ``train()`` that does not resume
    starts from the state that the loss had at the first ``train()``.

    An optimizer step in which the loss was not computed raises an error: the Trainer then trains
    with another loss.

    Args:
        loss: the loss that was given to :func:`fuse_head`.
    """

    _KEY = "labo"

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss
        self.epochs = 0
        self._initial: dict[str, Tensor] | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_arguments(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_arguments(args)
        gathers = any(isinstance(part, OnlineLabelSmoothingLoss) for part in self.loss.modules())
        if gathers and args.world_size > 1 and args.save_strategy not in ("no", "epoch"):
            raise ValueError(
                "online label smoothing collects statistics in each process until the end of an "
                'epoch, and a checkpoint holds those of one process: use save_strategy="epoch"'
            )
        self.loss.to(args.device)
        FOLLOWED.add(self.loss)
        take_used(self.loss)
        if self._initial is None:
            self._initial = self._state()
        if state.global_step > 0:
            self._restore(state)
        else:
            self.loss.load_state_dict(self._initial)
            self.epochs = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not take_used(self.loss):
            raise ValueError(
                f"{type(self.loss).__name__} was not computed in step {state.global_step}: the "
                "Trainer uses another loss. Pass it to regularize(trainer, loss) or to "
                "fuse_head(model, loss)"
            )
        for part in self.loss.modules():
            if isinstance(part, Warmup):
                part.step()
        self._save(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if float(state.epoch).is_integer():  # the Trainer also ends an epoch that it interrupts
            self._end_epoch()
            self._save(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        FOLLOWED.discard(self.loss)

    def _end_epoch(self) -> None:
        self.epochs += 1
        for part in self.loss.modules():
            end_epoch = getattr(part, "end_epoch", None)
            if callable(end_epoch):
                end_epoch()

    def _state(self) -> dict[str, Tensor]:
        state = self.loss.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def _save(self, state: TrainerState) -> None:
        """Write to the dict that the Trainer saves.

        The Trainer's own way of saving callbacks constructs them anew when it resumes.
        """
        packed = base64.b64encode(safetensors.torch.save(self._state())).decode("ascii")
        saved: Any = state.stateful_callbacks
        settings = settings_of(self.loss)
        saved[self._KEY] = {"loss": packed, "settings": settings, "epochs": self.epochs}

    def _restore(self, state: TrainerState) -> None:
        saved = state.stateful_callbacks.get(self._KEY)
        if saved is None:
            if follows_training(self.loss):
                raise ValueError(
                    f"the checkpoint of step {state.global_step} has no state of the loss: it was "
                    "written without RegularizationCallback"
                )
            return
        check_settings(saved["settings"], self.loss)
        try:
            self.loss.load_state_dict(safetensors.torch.load(base64.b64decode(saved["loss"])))
        except RuntimeError as error:
            raise ValueError(f"the checkpoint has the state of another loss: {error}") from error
        self.epochs = saved["epochs"]
        # The checkpoint of the last step of an epoch is written before the epoch ends.
        for _ in range(int(state.epoch) - self.epochs):
            self._end_epoch()
