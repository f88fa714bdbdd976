"""A loss for a ``Trainer``, computed from the logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Trainer

from ...chunks import Mean
from ...loss import Loss
from ...losses import CrossEntropyLoss, Warmup
from ...metrics import loss_metrics
from ...rows import weighted_total
from . import distillation, sft
from .callback import RegularizationCallback, check_arguments
from .head import fused_part, is_fused
from .losses import (
    DISTILLATION,
    IGNORED,
    Columns,
    active,
    check_loss,
    mark_used,
    over,
    share,
    warn_uncounted,
)
from .metrics import Collected, log_metrics
from .models import (
    added_loss,
    check_flag,
    check_pair,
    check_task,
    check_tokenizers,
    check_whole,
    checked_shift,
    classes_last,
    has_prompt_positions,
    is_causal,
    is_encoder_decoder,
    is_segmentation,
    set_counted,
    shifted,
    shifts,
    unwrapped,
    with_decoder_inputs,
    without_ignored_pixels,
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
            from the model: true for causal models, false for encoder-decoders and classifiers. It
            is compared with the model's own loss on four tokens.
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
    if distillation.is_distillation_trainer(trainer):
        given = {"teacher": teacher, "shift": shift, "metrics": metrics}
        return distillation.attach(trainer, loss, given)
    fused_teacher = getattr(fused_part(trainer.model), "teacher", None)
    check_loss(loss, teacher=teacher is not None or fused_teacher is not None)
    check_flag("metrics", metrics)
    check_flag("shift", shift)
    check_arguments(trainer.args)
    _check_trainer(trainer)
    model: Any = trainer.model
    check_task(model)
    if teacher is not None:
        check_pair(teacher, model)
        check_tokenizers(teacher, model, trainer.processing_class)
    fused = fused_part(model)
    if fused is not None:
        _check_fused(trainer, fused, loss, teacher, shift, metrics)
        if fused.collected is not None:
            log_metrics(trainer, fused.collected)
        _count_targets(trainer, fused.shift)
        trainer.add_callback(RegularizationCallback(loss))
        return trainer
    if sft.is_sft_trainer(trainer):
        shift = shifts(model) if shift is None else shift
        if metrics:
            raise ValueError("SFTTrainer logs its own metrics: leave metrics out")
        sft.attach(trainer, loss, shift=shift, teacher=teacher)
    else:
        shift = checked_shift(model, shift)
        if teacher is not None:
            teacher = teacher.to(trainer.args.device).eval().requires_grad_(False)
        collected = Collected() if metrics else None
        _LogitLoss(trainer, loss.to(trainer.args.device), teacher, shift, collected).attach()
        if collected is not None:
            log_metrics(trainer, collected)
    _count_targets(trainer, shift)
    # The Trainer drops the columns of a data set that the model does not name.
    trainer._set_signature_columns_if_needed()
    trainer._signature_columns = [*trainer._signature_columns, *Columns._fields]
    trainer.add_callback(RegularizationCallback(loss))
    return trainer


def compute_loss_func(
    model: nn.Module, loss: nn.Module, *, shift: bool | None = None
) -> Callable[..., Tensor]:
    """A loss of labo for the argument ``compute_loss_func`` of a ``Trainer``.

    ``Trainer(model=model, compute_loss_func=compute_loss_func(model, loss))`` trains as
    ``regularize(trainer, loss)`` does: labels are shifted for a causal model, the sum is divided by
    the number of targets in the whole batch, and evaluation uses the plain negative log-likelihood.
    A loss with a warm-up needs ``callbacks=[RegularizationCallback(loss)]`` in addition. For
    encoder-decoders, teachers, metrics and ``model_init`` use :func:`regularize`.

    Args:
        model: the model of the ``Trainer``. Call this before the ``Trainer`` is made.
        loss: any loss Module with mean reduction, or a :class:`labo.Warmup` of two.
        shift: as in :func:`regularize`.

    Returns:
        A function of the outputs of the model, the labels and ``num_items_in_batch``.

    Raises:
        ValueError: the loss or the model does not fit.
    """
    base = unwrapped(model)
    if not isinstance(base, nn.Module) or isinstance(base, Loss | Warmup):
        raise TypeError(f"the first argument must be the model, got {model!r:.80}")
    check_loss(loss, teacher=False)
    check_flag("shift", shift)
    check_task(model)
    if is_fused(base):
        raise ValueError("the model computes the loss already (fuse_head): leave one of them out")
    reason = None
    if is_encoder_decoder(base):
        reason = "makes its decoder inputs from the labels, which it does not get"
    elif is_segmentation(base):
        reason = "ignores pixels that the Trainer counts"
    elif is_causal(base) and not _mentions(
        Trainer._get_num_items_in_batch.__code__, ("_loss_shifts_labels",)
    ):
        reason = "does not predict first labels, which this version of transformers counts,"
    if reason is not None:
        raise ValueError(
            f"{type(base).__name__} {reason} in a Trainer with a compute_loss_func: use "
            "regularize(trainer, loss)"
        )
    shift = checked_shift(model, shift)
    set_counted(base, shift and not has_prompt_positions(model))
    return LossFunction(lambda: model, loss, shift)


def _check_trainer(trainer: Any) -> None:
    owner = getattr(trainer.compute_loss, "__self__", None)
    if isinstance(owner, _LogitLoss) or sft.is_attached(trainer):
        raise ValueError("the trainer has a loss of labo already: make a new trainer")
    if isinstance(trainer.compute_loss_func, LossFunction):
        raise ValueError(
            "the trainer has a loss of labo already (compute_loss_func): for a warm-up give it "
            "callbacks=[RegularizationCallback(loss)], or leave compute_loss_func out"
        )
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "the trainer has a compute_loss_func, and only one loss can be used: leave it out"
        )
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
    _check_own_loss(trainer)


def _check_own_loss(trainer: Any) -> None:
    """Refuse a trainer whose own method takes the place of ``Trainer.compute_loss``."""
    for name in ("compute_loss", "training_step"):
        own = [vars(trainer)] if name in vars(trainer) else []
        for cls in type(trainer).__mro__:
            if cls is Trainer or (cls.__name__ == "SFTTrainer" and sft.is_sft_trainer(trainer)):
                break
            own.append(vars(cls))
        for method in (members[name] for members in own if name in members):
            function = inspect.unwrap(getattr(method, "__func__", method))
            if _mentions(
                getattr(function, "__code__", None), (name, "compute_loss", "compute_loss_func")
            ):
                continue  # it calls the method of its parent, or what we give it
            _refuse_own_loss(trainer, f"{function.__module__}.{function.__qualname__}")


def _mentions(code: CodeType | None, names: tuple[str, ...]) -> bool:
    if code is None:  # not written in Python
        return True
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not set(names).isdisjoint(code.co_names) or any(_mentions(x, names) for x in inner)


def _refuse_own_loss(trainer: Any, where: str) -> None:
    name, of_trl = type(trainer).__name__, where.startswith("trl.")
    if is_fused(trainer.model) and not of_trl:
        return  # it can return the loss of the model
    if not of_trl:
        advice = (
            "Let that method call the one of its parent class, use fuse_head(model, loss) if it "
            "returns the loss of the model, or compute the loss of labo in it"
        )
    elif any(word in name for word in ("Distillation", "GKD", "GOLD", "OPD", "SDFT")):
        advice = (
            "To distil with a loss of labo, use transformers' Trainer and "
            "regularize(trainer, labo.DistillationLoss(), teacher=teacher)"
        )
    else:
        advice = (
            "Its loss compares whole answers and has no label for each position. Use a loss of "
            "labo before that, in supervised fine-tuning with SFTTrainer"
        )
    raise ValueError(f"{name} has a loss of its own ({where}) and would not use this one. {advice}")


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


def _count_targets(trainer: Any, shift: bool) -> None:
    """Let a Trainer count the labels that are predicted, and no others.

    By itself it counts by the ``loss_type`` of the model that it was made with, which GPT-2 does
    not have; older versions always count the first label of each row. Neither knows the virtual
    tokens of PEFT or the ignored pixels of segmentation.
    """
    own = trainer._get_num_items_in_batch

    def targets(batch: Any) -> Any:
        if batch.get("shift_labels") is not None:
            return batch["shift_labels"]
        labels, model = without_ignored_pixels(trainer.model, batch["labels"]), trainer.model
        first = shift and not has_prompt_positions(model) and isinstance(labels, Tensor)
        return labels[..., 1:] if first else labels

    def count(batches: list[Any], *args: Any, **kwargs: Any) -> Any:
        if all("labels" in batch for batch in batches):
            batches = [{"labels": targets(batch)} for batch in batches]
        return own(batches, *args, **kwargs)

    trainer._get_num_items_in_batch = count
    trainer._loss_shifts_labels = False


class LossFunction:
    """A ``compute_loss_func`` of a Trainer: the loss from the outputs of its model.

    Args:
        model: returns the model of the Trainer.
        loss: in training; evaluation uses the plain negative log-likelihood.
        shift: whether the logits of a position predict the next label.
        collected: the metrics, if there are to be any.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        loss: nn.Module,
        shift: bool,
        collected: Collected | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.shift = shift
        self.collected = collected
        self._seen_probabilities = False
        # of the current call
        self.is_shifted = False
        self.columns = Columns()
        self.teacher_logits: Tensor | None = None

    def __call__(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if labels is None:
            raise ValueError('the batch has no "labels", so there is no loss to compute')
        logits, target = self._aligned(_logits(outputs), labels)
        training, loss = torch.is_grad_enabled(), active(self.loss.to(logits.device))
        extras = self.columns.extras(loss, labels, target, logits.device) if training else {}
        flat = logits.reshape(-1, logits.shape[-1])
        target = target.reshape(flat.shape if target.is_floating_point() else -1).to(logits.device)
        if self.collected is not None:
            self.collected.add(loss_metrics(flat, target, loss), training=training)
        if not training:
            return share(CrossEntropyLoss()(flat, target), target, num_items_in_batch)
        if num_items_in_batch is not None:
            warn_uncounted(self.loss)
        if not isinstance(loss, Loss):  # the losses of labo are accurate in half precision
            flat = flat.float()
        mark_used(self.loss)
        value = self._value(loss, flat, target, num_items_in_batch, extras)
        added = added_loss(unwrapped(self.model()), outputs, logits)
        if added is not None:
            value = value + share(added.to(value.device), target, num_items_in_batch)
        return value

    def _aligned(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits with the classes last, and the target of each of their positions."""
        model = self.model()
        check_whole(model, logits)
        labels = without_ignored_pixels(model, labels)
        shift = self.shift and not self.is_shifted
        if has_prompt_positions(model) and labels.dim() == 2 and logits.dim() == 3:
            # The last virtual token predicts the first label.
            first = logits.shape[1] - labels.shape[1]
            logits = (
                logits[:, first - 1 : -1] if shift and first > 0 else logits[:, max(first, 0) :]
            )
            shift = shift and first <= 0
        logits = classes_last(model, logits, labels)
        target = shifted(labels) if shift else labels
        if target.shape not in (logits.shape[:-1], logits.shape):
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} do not fit logits of shape "
                f"{tuple(logits.shape)}"
            )
        if target.is_floating_point():
            self._check_probabilities(target)
        return logits, target

    def _check_probabilities(self, target: Tensor) -> None:
        """Refuse labels of several classes each, in the first batch."""
        if self._seen_probabilities:
            return
        total = target.detach().float().sum(-1)
        if not torch.allclose(total, torch.ones_like(total), atol=1e-2):
            raise ValueError(
                "labels with a number for each class must be probabilities that sum to 1, got "
                f"sums of {total.min():g} to {total.max():g}: labels of several classes each "
                "(multi-label) need another loss"
            )
        self._seen_probabilities = True

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


class _LogitLoss(LossFunction):
    """The loss that :func:`regularize` gives to a Trainer, with what its batches need for it."""

    def __init__(
        self,
        trainer: Trainer,
        loss: nn.Module,
        teacher: nn.Module | None,
        shift: bool,
        collected: Collected | None,
    ) -> None:
        super().__init__(lambda: self.trainer.model, loss, shift, collected)
        self.trainer: Any = trainer
        self.teacher = teacher
        self.trainers_own = trainer.compute_loss

    def attach(self) -> None:
        self.trainer.compute_loss = self.compute_loss
        self.trainer.compute_loss_func = self

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

    @torch.no_grad()
    def _teacher_logits(self, teacher: nn.Module, inputs: dict[str, Any]) -> Tensor:
        labels = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        with self.trainer.accelerator.autocast():
            return classes_last(teacher, _logits(teacher(**inputs)), labels)


def _logits(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, dict) else outputs[0]
