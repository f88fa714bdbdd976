"""A loss for a ``Trainer``, computed from the logits."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Trainer

from ...chunks import Mean
from ...linear import weighted_total
from ...loss import Loss
from ...losses import CrossEntropyLoss
from ...metrics import loss_metrics
from . import sft
from .callback import RegularizationCallback, check_arguments
from .head import fused_part, is_fused
from .losses import DISTILLATION, IGNORED, Columns, active, check_loss, mark_used, over, share
from .metrics import Collected, log_metrics
from .models import (
    added_loss,
    check_flag,
    check_pair,
    is_dtensor,
    shifted,
    shifts,
    unwrapped,
    with_decoder_inputs,
)

_Trainer = TypeVar("_Trainer", bound=Trainer)


def regularize(
    trainer: _Trainer,
    loss: nn.Module,
    *,
    teacher: nn.Module | None = None,
    shift: bool | None = None,
    metrics: bool = False,
) -> _Trainer:
    """Let a ``Trainer`` train with a loss of labo.

    The loss is computed from the logits, with the batches and the model as they are. Decoder inputs
    of an encoder-decoder are made from the labels. A :class:`RegularizationCallback` for the loss
    is added. In evaluation the loss is the plain negative log-likelihood. The columns
    ``token_weight``, and for :class:`labo.TopKDistillationLoss` ``teacher_indices`` and
    ``teacher_log_probabilities``, are read from the batch as by a fused model.

    For a model that :func:`fuse_head` gave the same loss, this adds the callback, and logs the
    metrics that the model collects.

    TRL's ``SFTTrainer`` computes its loss from hidden states in chunks, and so does this function
    for it, by :func:`labo.linear_loss`. TRL logs its metrics as usual. Its evaluation is its own.

    Args:
        trainer: a ``Trainer``, a ``Seq2SeqTrainer``, another subclass that calls
            ``Trainer.compute_loss``, or TRL's ``SFTTrainer``; changed in place. It may have been
            made with ``model_init``.
        loss: any loss Module with mean reduction, or a :class:`labo.Warmup` of two;
            :class:`labo.DistillationLoss` with a teacher. A weighted loss is the weighted sum over
            the number of targets. For ``SFTTrainer`` a row-wise loss of labo.
        teacher: a model that receives the same inputs, in eval mode and without gradients.
        shift: whether the logits at position i predict label i + 1. By default this is derived
            from the model: true for causal models, false for encoder-decoders and classifiers.
        metrics: log ``nll``, ``entropy``, ``mean_token_accuracy``, ``alpha`` and ``z_squared`` (see
            :class:`labo.LossMetrics`) with the loss, and without alpha for evaluations. They are
            means over the targets since the last log. A fused model has its own setting, and TRL
            logs its own metrics.

    Returns:
        ``trainer``.

    Raises:
        ValueError: the loss does not fit, or the trainer would use another one.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"regularize needs a transformers.Trainer, got {type(trainer).__name__}")
    fused_teacher = getattr(fused_part(trainer.model), "teacher", None)
    check_loss(loss, teacher=teacher is not None or fused_teacher is not None)
    check_flag("metrics", metrics)
    check_flag("shift", shift)
    check_arguments(trainer.args)
    _check_trainer(trainer)
    model: Any = trainer.model
    if teacher is not None:
        check_pair(teacher, model)
    fused = fused_part(model)
    if fused is not None:
        _check_fused(trainer, fused, loss, teacher, shift, metrics)
        if fused.collected is not None:
            log_metrics(trainer, fused.collected)
        trainer.add_callback(RegularizationCallback(loss))
        return trainer
    shift = shifts(model) if shift is None else shift
    if sft.is_sft_trainer(trainer):
        if metrics:
            raise ValueError("SFTTrainer logs its own metrics: leave metrics out")
        sft.attach(trainer, loss, shift=shift, teacher=teacher)
    else:
        if teacher is not None:
            teacher = teacher.to(trainer.args.device).eval().requires_grad_(False)
        collected = Collected() if metrics else None
        _LogitLoss(trainer, loss.to(trainer.args.device), teacher, shift, collected).attach()
        if collected is not None:
            log_metrics(trainer, collected)
    # The number of targets. The Trainer derives it from the loss_type of the model that it was
    # made with, which GPT-2 does not have.
    trainer._loss_shifts_labels = shift
    # It drops the columns of a data set that the model does not name.
    trainer._set_signature_columns_if_needed()
    trainer._signature_columns = [*trainer._signature_columns, *Columns._fields]
    trainer.add_callback(RegularizationCallback(loss))
    return trainer


def _check_trainer(trainer: Any) -> None:
    owner = getattr(trainer.compute_loss, "__self__", None)
    if isinstance(owner, _LogitLoss) or sft.is_attached(trainer):
        raise ValueError("the trainer has a loss of labo already: make a new trainer")
    if trainer.compute_loss_func is not None:
        raise ValueError("the trainer has a compute_loss_func, and only one loss can be used")
    if is_fused(trainer.model) and sft.is_sft_trainer(trainer):
        raise ValueError(
            "the model computes the loss already (fuse_head): make the SFTTrainer with a model "
            "that is not fused"
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and parallel.sp_enabled and parallel.sp_backend == "deepspeed":
        raise ValueError(
            "under DeepSpeed sequence parallelism the Trainer uses the model's own loss and no "
            "other: use fuse_head(model, loss), or sp_size=1"
        )


def _check_fused(
    trainer: Any,
    fused: Any,
    loss: nn.Module,
    teacher: nn.Module | None,
    shift: bool | None,
    metrics: bool,
) -> None:
    """Refuse what :func:`fuse_head` was to be told."""
    problem = "the model computes the loss already (fuse_head)"
    if loss is not fused.loss:
        raise ValueError(f"{problem}: give regularize the same loss")
    if teacher is not None or shift is not None:
        raise ValueError(f"{problem}: give teacher to fuse_head, and leave shift out")
    if metrics and fused.collected is None:
        raise ValueError(f"{problem}: use fuse_head(model, loss, metrics=True)")
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(callback, RegularizationCallback) for callback in callbacks):
        raise ValueError("the trainer has a RegularizationCallback already: leave it out")


class _LogitLoss:
    """The loss of a Trainer, from the logits that its model returns."""

    def __init__(
        self,
        trainer: Trainer,
        loss: nn.Module,
        teacher: nn.Module | None,
        shift: bool,
        collected: Collected | None,
    ) -> None:
        self.trainer: Any = trainer
        self.loss = loss
        self.teacher = teacher
        self.shift = shift
        self.collected = collected
        self.trainers_own = trainer.compute_loss
        # of the current call
        self.is_shifted = False
        self.columns = Columns()
        self.teacher_logits: Tensor | None = None

    def attach(self) -> None:
        self.trainer.compute_loss = self.compute_loss
        self.trainer.compute_loss_func = self.from_outputs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """``Trainer.compute_loss`` with the inputs that the loss needs."""
        inputs = with_decoder_inputs(unwrapped(self.trainer.model), dict(inputs))
        self.columns = Columns.taken_from(inputs)
        inputs.pop("skip_logits", None)  # Liger would leave out what the loss is computed from
        # Context parallelism and some collators shift the labels themselves.
        given = inputs.pop("shift_labels", None)
        self.is_shifted = given is not None
        if given is not None:
            inputs["labels"] = given
        needs_teacher = isinstance(active(self.loss), DISTILLATION)  # not in a warm-up
        if self.teacher is not None and needs_teacher and torch.is_grad_enabled():
            self.teacher_logits = self._teacher_logits(self.teacher, inputs)
        return self.trainers_own(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def from_outputs(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """``compute_loss_func`` of the Trainer."""
        if labels is None:
            raise ValueError('the batch has no "labels", so there is no loss to compute')
        logits = _logits(outputs)
        target = shifted(labels) if self.shift and not self.is_shifted else labels
        if target.shape not in (logits.shape[:-1], logits.shape):
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} do not fit logits of shape "
                f"{tuple(logits.shape)}"
            )
        training, loss = torch.is_grad_enabled(), active(self.loss)
        extras = self.columns.extras(loss, labels, target, logits.device) if training else {}
        flat = logits.reshape(-1, logits.shape[-1])
        target = target.reshape(flat.shape if target.is_floating_point() else -1).to(logits.device)
        if self.collected is not None:
            self.collected.add(loss_metrics(flat, target, loss), training=training)
        if not training:
            return share(CrossEntropyLoss()(flat, target), target, num_items_in_batch)
        if not isinstance(loss, Loss):  # the losses of labo are accurate in half precision
            flat = flat.float()
        mark_used(self.loss)
        value = self._value(loss, flat, target, num_items_in_batch, extras)
        added = added_loss(unwrapped(self.trainer.model), outputs, logits)
        if added is not None:
            value = value + share(added.to(value.device), target, num_items_in_batch)
        return value

    def _value(
        self,
        loss: Any,
        logits: Tensor,
        target: Tensor,
        items: Tensor | int | None,
        extras: dict[str, Any],
    ) -> Tensor:
        stored = (x.flatten(0, -2) for x in extras.get("teacher_logits", ()))
        more = (*self._extra(loss, logits), *stored)
        if "token_weight" in extras:
            return self._weighted(loss, logits, target, items, extras["token_weight"], more)
        if not isinstance(loss, Loss) and not (target != IGNORED).any():
            return logits[:0].sum()  # the mean of torch's own losses is NaN then
        return share(loss(logits, target, *more), target, items, getattr(loss, "weight", None))

    def _weighted(
        self,
        loss: Any,
        logits: Tensor,
        target: Tensor,
        items: Tensor | int | None,
        token_weight: Tensor,
        more: tuple[Tensor, ...],
    ) -> Tensor:
        """As in ``linear_loss``, from the values of the rows."""
        if not isinstance(loss, Loss) or not loss.rowwise:
            raise ValueError(
                "token_weight needs a row-wise loss of labo, and "
                f"{type(loss).__name__} is not one: leave token_weight out of the batch"
            )
        values = loss.current().having(reduction="none").compute(logits, target, *more)
        weights = token_weight.reshape(-1).to(values.dtype)
        if items is not None:
            return over(Mean(1.0, weights).reduce(values), target, items)
        return Mean(weighted_total(weights, target, IGNORED, loss.weight), weights).reduce(values)

    def _extra(self, loss: nn.Module, logits: Tensor) -> tuple[Tensor, ...]:
        """What the loss takes besides logits and target."""
        if not isinstance(loss, DISTILLATION):
            return ()
        teacher_logits, self.teacher_logits = self.teacher_logits, None
        if teacher_logits is None:
            raise ValueError("there are no logits of the teacher for this batch")
        if teacher_logits.numel() != logits.numel():
            raise ValueError(
                f"the teacher has logits of shape {tuple(teacher_logits.shape)} and the model of "
                f"{tuple(logits.shape)}: both must have the same classes"
            )
        return (teacher_logits.reshape(logits.shape),)

    @torch.no_grad()
    def _teacher_logits(self, teacher: nn.Module, inputs: dict[str, Any]) -> Tensor:
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        with self.trainer.accelerator.autocast():
            return _logits(teacher(**inputs))


def _logits(outputs: Any) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if is_dtensor(logits):
        raise ValueError(
            "the logits are a DTensor, of which each process holds a part of the classes: let the "
            "output layer gather them (colwise_gather_output in the tensor-parallel plan)"
        )
    return logits
