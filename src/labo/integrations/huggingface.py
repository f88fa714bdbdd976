"""Hugging Face: any loss in a ``Trainer``, and language models that never store their logits.

Three ways in:

- :func:`compute_loss_func` and :class:`RegularizationCallback`, for a ``Trainer`` as it is.
- :class:`RegularizedTrainer` and :class:`RegularizedSeq2SeqTrainer`, which wire both, and take a
  teacher.
- :func:`fuse_head`, for a causal or seq2seq model: its output layer and the loss become one
  :func:`labo.linear_loss`, in a ``Trainer`` or in any other loop.

All of them own what others got wrong. A loss is the sum over the targets of a micro-batch divided
by the number of targets in the whole batch (``num_items_in_batch``), so that accumulation and
several processes change nothing. Labels are shifted for decoders once. What is measured without
gradients is the plain negative log-likelihood, whatever the training loss. What cannot be done
right is refused with its reason.
"""

from __future__ import annotations

import base64
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..fused.linear import LinearLossOptions, linear_loss
from ..losses import (
    BetaSmoothingLoss,
    CrossEntropyLoss,
    CSKDLoss,
    DistillationLoss,
    OnlineLabelSmoothingLoss,
    PSKDLoss,
    Warmup,
    _Loss,
)

__all__ = [
    "RegularizationCallback",
    "RegularizedSeq2SeqTrainer",
    "RegularizedTrainer",
    "compute_loss_func",
    "fuse_head",
    "unfuse_head",
]

# What Hugging Face collators write where there is no target, and what the Trainer does not count.
_IGNORED = -100

_Model = TypeVar("_Model", bound=nn.Module)


# ------------------------------------------------------------------ losses


def _leaves(loss: nn.Module) -> Iterator[nn.Module]:
    """The losses a warm-up switches between, or the loss itself."""
    if isinstance(loss, Warmup):
        yield from _leaves(loss.before)
        yield from _leaves(loss.after)
    else:
        yield loss


def _active(loss: nn.Module) -> nn.Module:
    """The loss of the current step."""
    while isinstance(loss, Warmup):
        loss = loss.active
    return loss


def _follows_training(loss: nn.Module) -> bool:
    """Whether someone must tell the loss about steps or epochs."""
    return any(isinstance(part, Warmup) or hasattr(part, "end_epoch") for part in loss.modules())


def _check_loss(loss: nn.Module, teacher: bool) -> None:
    """Refuse a loss that would not mean here what it means elsewhere."""
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a Module such as labo.LABOLoss(), got {loss!r}")
    for leaf in _leaves(loss):
        name = type(leaf).__name__
        if isinstance(leaf, CSKDLoss | BetaSmoothingLoss | PSKDLoss):
            raise ValueError(
                f"{name} compares with another sample, an average or the past of the model, which "
                "a Trainer does not keep; `labo train` does"
            )
        if isinstance(leaf, DistillationLoss) and not teacher:
            raise ValueError(f"{name} needs a teacher: RegularizedTrainer(..., teacher=model)")
        if any(parameter.requires_grad for parameter in leaf.parameters()):
            raise ValueError(
                f"{name} has parameters of its own, and the Trainer optimizes those of the model "
                "alone; `labo train` optimizes both"
            )
        if getattr(leaf, "reduction", "mean") != "mean":
            raise ValueError(
                f'{name} must have reduction="mean", not {leaf.reduction!r}: the division by the '
                "targets of the whole batch is done for it"
            )
        if getattr(leaf, "ignore_index", _IGNORED) != _IGNORED:
            raise ValueError(
                f"{name} must have ignore_index={_IGNORED}, not {leaf.ignore_index}: the Trainer "
                f"counts every label but {_IGNORED}"
            )
        if getattr(leaf, "dim", -1) != -1:
            raise ValueError(f"{name} must have dim=-1, not {leaf.dim}: the classes come last")
    if teacher and not any(isinstance(leaf, DistillationLoss) for leaf in _leaves(loss)):
        raise ValueError(f"a teacher was given, and {type(loss).__name__} does not listen to one")


def _check_arguments(args: TrainingArguments) -> None:
    if args.label_smoothing_factor != 0:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} and a loss of labo are both "
            "configured, and the Trainer uses one of them only, in silence: set it to 0, and for "
            "label smoothing pass labo.LabelSmoothingLoss(alpha=...)"
        )


def _share(mean: Tensor, loss: nn.Module, target: Tensor, items: Tensor | int | None) -> Tensor:
    """The mean over a micro-batch as its share of the mean over the whole batch."""
    if items is None:
        return mean
    if target.is_floating_point():  # the Trainer counts the entries of class probabilities
        return mean * (target.numel() / items)
    valid = target != _IGNORED
    weight = getattr(loss, "weight", None)
    if weight is None:
        mass = valid.sum()
    else:
        mass = weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0.0).sum()
    if isinstance(items, Tensor):
        items = items.to(mean.device)
    return mean * (mass.to(mean.device) / items)


# ------------------------------------------------------------------ models


def _unwrapped(model: nn.Module) -> Any:
    """The model inside PEFT's wrapper, if there is one."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _trainer_counts_shifted(model: nn.Module) -> bool:
    """Whether the Trainer leaves the first label of a row out of its count."""
    own_loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")
    return own_loss is ForCausalLMLoss and not _is_encoder_decoder(model)


def _shifts(model: nn.Module) -> bool:
    """Whether the logits at a position are about the label at the next one.

    Raises:
        ValueError: this cannot be told from the class of the model.
    """
    model = _unwrapped(model)
    if _is_encoder_decoder(model):
        return False
    name = type(model).__name__
    causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or _trainer_counts_shifted(model)
    # Some old decoders (MarianForCausalLM) want labels that are shifted already.
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    own_way = code is not None and "CrossEntropyLoss" in code.co_names
    if (causal and own_way) or (not causal and getattr(model, "loss_type", None) is None):
        raise ValueError(
            f"cannot tell whether {name} predicts the label at its position or the next one: "
            "say shift=False or shift=True"
        )
    return causal


def _count_as(model: nn.Module, shift: bool) -> None:
    """Have the Trainer count the targets that there are.

    It goes by ``loss_type``, which GPT-2 lacks: the first label of each row would be counted, and
    the loss too small by one part in the length.
    """
    inner = _unwrapped(model)
    if _trainer_counts_shifted(inner) != shift:
        inner.loss_type = "ForCausalLM" if shift else None


def _shifted(labels: Tensor) -> Tensor:
    """The label of the next position; the last has none. The logits stay where they are."""
    if labels.is_floating_point():
        raise ValueError(f"the labels of a causal model must be tokens, got {labels.dtype}")
    return nn.functional.pad(labels[..., 1:], (0, 1), value=_IGNORED)


# ------------------------------------------------------------------ the Trainer's hooks


# Losses that a callback has taken charge of.
_FOLLOWED: WeakSet[nn.Module] = WeakSet()


class _ComputeLoss:
    """``compute_loss_func`` of a Trainer."""

    def __init__(self, loss: nn.Module, shift: bool) -> None:
        self.loss = loss
        self.shift = shift
        self.teacher_logits: Tensor | None = None

    def __call__(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if labels is None:
            raise ValueError('the batches have no "labels", so there is no loss to compute')
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        target = _shifted(labels) if self.shift else labels
        classes = logits.shape[-1]
        if target.shape not in (logits.shape[:-1], logits.shape):
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} do not fit logits of shape "
                f"{tuple(logits.shape)}"
            )
        flat = logits.reshape(-1, classes)
        target = target.reshape(flat.shape if target.is_floating_point() else -1).to(logits.device)
        if torch.is_grad_enabled():
            loss, second = self._training_loss(flat)
        else:
            loss, second = CrossEntropyLoss(), ()
        if not isinstance(loss, _Loss):  # ours are exact in half precision, others may not be
            flat = flat.float()
        return _share(loss(flat, target, *second), loss, target, num_items_in_batch)

    def _training_loss(self, logits: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
        if self.loss not in _FOLLOWED and _follows_training(self.loss):
            raise ValueError(
                f"{type(self.loss).__name__} follows the training, and nobody tells it about the "
                "steps: give the Trainer callbacks=[RegularizationCallback(loss)] as well"
            )
        loss = _active(self.loss)
        if not isinstance(loss, DistillationLoss) or self.teacher_logits is None:
            return loss, ()
        second, self.teacher_logits = self.teacher_logits, None
        if second.shape[-1] != logits.shape[-1]:
            raise ValueError(
                f"the teacher knows {second.shape[-1]} classes, the model {logits.shape[-1]}"
            )
        return loss, (second.reshape(logits.shape),)


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: the inputs that a model without its labels cannot do without."""
    if kwargs.get("shift_labels") is not None:
        raise ValueError(
            "the collator shifts the labels itself (shift_labels), and compute_loss_func is not "
            "shown those: use fuse_head, whose model is"
        )
    given = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
    if _is_encoder_decoder(_unwrapped(model)) and all(kwargs.get(name) is None for name in given):
        raise ValueError(
            "the Trainer takes the labels for the loss, so that an encoder-decoder gets no decoder "
            "inputs: use DataCollatorForSeq2Seq(tokenizer, model=model), or RegularizedTrainer"
        )


def compute_loss_func(
    loss: nn.Module, model: nn.Module, args: TrainingArguments, *, shift: bool | None = None
) -> Callable[..., Tensor]:
    """``Trainer(..., compute_loss_func=...)`` from any loss.

    In training the loss is summed over the targets and divided by ``num_items_in_batch``; in
    evaluation (without gradients) it is the plain negative log-likelihood.

    Args:
        loss: any loss Module without a teacher, or a :class:`labo.Warmup` of two, with its mean
            reduction. With class weights the weighted sum is divided by the number of targets.
        model: the model that will be trained, wrapped by PEFT or not.
        args: the Trainer's arguments, looked at for a second label smoothing.
        shift: whether position i predicts label i + 1. By default known from the model's class:
            true for causal models, false for encoder-decoders and classifiers.

    Returns:
        The function. A loss with a warm-up also needs :class:`RegularizationCallback`.
    """
    _check_loss(loss, teacher=False)
    _check_arguments(args)
    if _is_fused(model):
        raise ValueError(
            "the loss is in the model already (fuse_head): the Trainer needs no compute_loss_func"
        )
    shift = _shifts(model) if shift is None else shift
    _count_as(model, shift)
    model.register_forward_pre_hook(_check_call, with_kwargs=True)
    return _ComputeLoss(loss.to(args.device), shift)


class RegularizationCallback(TrainerCallback):  # type: ignore[misc]
    """Tells a loss about optimizer steps and epochs, and keeps its state with the checkpoints.

    The state goes into ``trainer_state.json``, which the Trainer writes with every checkpoint and
    reads on ``train(resume_from_checkpoint=...)``, so that a warm-up goes on where it was.

    Args:
        loss: the loss that was given to :func:`compute_loss_func` or :func:`fuse_head`.
    """

    _KEY = "labo"

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss
        self.epochs = 0

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _check_arguments(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _check_arguments(args)
        gathers = any(isinstance(part, OnlineLabelSmoothingLoss) for part in self.loss.modules())
        if gathers and args.world_size > 1 and args.save_strategy not in ("no", "epoch"):
            raise ValueError(
                "online label smoothing gathers in each process until the end of an epoch, and a "
                'checkpoint holds the state of one: use save_strategy="epoch"'
            )
        self.loss.to(args.device)
        _FOLLOWED.add(self.loss)
        if state.global_step > 0:
            self._restore(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for part in self.loss.modules():
            if isinstance(part, Warmup):
                part.step()
        self._keep(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if float(state.epoch).is_integer():  # the Trainer also ends an epoch that it breaks off
            self._end_epoch()
            self._keep(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _FOLLOWED.discard(self.loss)

    def _end_epoch(self) -> None:
        self.epochs += 1
        for part in self.loss.modules():
            end_epoch = getattr(part, "end_epoch", None)
            if callable(end_epoch):
                end_epoch()

    def _keep(self, state: TrainerState) -> None:
        """Into the dict that the Trainer saves; its own way would build the callback anew."""
        tensors = {
            name: value.detach().cpu().clone() for name, value in self.loss.state_dict().items()
        }
        packed = base64.b64encode(safetensors.torch.save(tensors)).decode("ascii")
        kept: Any = state.stateful_callbacks  # a dict, once the Trainer has begun
        kept[self._KEY] = {"loss": packed, "epochs": self.epochs}

    def _restore(self, state: TrainerState) -> None:
        kept: Any = state.stateful_callbacks
        saved = kept.get(self._KEY)
        if saved is None:
            if _follows_training(self.loss):
                raise ValueError(
                    f"the checkpoint of step {state.global_step} holds no state of a loss: it was "
                    "written without RegularizationCallback"
                )
            return
        try:
            self.loss.load_state_dict(safetensors.torch.load(base64.b64decode(saved["loss"])))
        except RuntimeError as error:
            raise ValueError(f"the checkpoint holds the state of another loss: {error}") from error
        self.epochs = saved["epochs"]
        # A checkpoint of the last step of an epoch is written before the epoch is ended.
        for _ in range(int(state.epoch) - self.epochs):
            self._end_epoch()


class _Regularized(Trainer):  # type: ignore[misc]
    """What the two Trainers share."""

    def __init__(
        self,
        *args: Any,
        loss: nn.Module,
        teacher: nn.Module | None = None,
        shift: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError("give either loss or compute_loss_func: one loss can be used only")
        super().__init__(*args, **kwargs)
        _check_loss(loss, teacher is not None)
        _check_arguments(self.args)
        model: Any = self.model
        if _is_fused(model):
            raise ValueError(
                "the loss is in the model already (fuse_head): use transformers' own Trainer, with "
                "RegularizationCallback(loss) if it has a warm-up"
            )
        shift = _shifts(model) if shift is None else shift
        self._loss_shifts_labels = shift  # what it counts; see _count_as
        self._regularizer = _ComputeLoss(loss.to(self.args.device), shift)
        self.compute_loss_func = self._regularizer
        model.register_forward_pre_hook(_check_call, with_kwargs=True)
        self.add_callback(RegularizationCallback(loss))
        self.teacher = teacher
        if teacher is not None:
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        core: Any = self.model
        inputs = _with_decoder_inputs(_unwrapped(core), inputs)
        if self.teacher is not None and torch.is_grad_enabled():
            seen = {name: value for name, value in inputs.items() if name != "labels"}
            with torch.no_grad(), self.accelerator.autocast():
                outputs = self.teacher(**seen)
            logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
            self._regularizer.teacher_logits = logits
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def _with_decoder_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What an encoder-decoder makes of its labels, made before the labels are taken away."""
    given = ("decoder_input_ids", "decoder_inputs_embeds")
    if (
        not _is_encoder_decoder(model)
        or inputs.get("labels") is None
        or any(inputs.get(name) is not None for name in given)
    ):
        return inputs
    labels = inputs["labels"]
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
    return {**inputs, "decoder_input_ids": decoder_input_ids}


class RegularizedTrainer(_Regularized):
    """A ``Trainer`` with a loss, and perhaps a teacher.

    The loss, its warm-up and its checkpoints are wired as by :func:`compute_loss_func` and
    :class:`RegularizationCallback`.

    Args:
        *args, **kwargs: as for ``transformers.Trainer``, without ``compute_loss_func``.
        loss: any loss Module; :class:`labo.DistillationLoss` with a teacher.
        teacher: a frozen model that is shown the same inputs in eval mode.
        shift: as for :func:`compute_loss_func`.
    """


class RegularizedSeq2SeqTrainer(_Regularized, Seq2SeqTrainer):  # type: ignore[misc]
    """A ``Seq2SeqTrainer`` with a loss; see :class:`RegularizedTrainer`.

    Decoder inputs are made from the labels, so that any collator will do.
    """


# ------------------------------------------------------------------ the fused head


@dataclass(frozen=True)
class _Fused:
    """What a fused model knows besides what it knew before."""

    loss: nn.Module
    shift: bool
    options: LinearLossOptions | None
    loss_type: str | None


@dataclass(frozen=True)
class _OutputLayer:
    """How a model makes logits of hidden states."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def loss(
        self, hidden: Tensor, target: Tensor, loss: nn.Module, options: LinearLossOptions | None
    ) -> Tensor:
        hidden = hidden.to(self.weight.device)
        if self.scale != 1:
            hidden = hidden * self.scale
        return linear_loss(
            hidden,
            self.weight,
            target.to(self.weight.device),
            loss,
            linear_bias=self.bias,
            softcap=self.softcap,
            options=options,
        )


def _head(model: Any) -> nn.Linear:
    """The layer that a model's hidden states go through last."""
    head = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):  # PEFT trains a copy of the layer
        adapters = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[adapters[0]] if adapters else head.original_module
    if type(head) is not nn.Linear:
        raise ValueError(
            f"fuse_head multiplies by the weight of an nn.Linear, and the output layer of "
            f"{type(model).__name__} is {type(head).__name__}, which may do more than that"
        )
    return head


def _output_layer(model: Any, head: nn.Linear) -> _OutputLayer:
    """The output layer with what some families do behind it."""
    config = model.config.get_text_config(decoder=True)
    bias = head.bias
    added = getattr(model, "final_logits_bias", None)  # Marian, BART and their kin
    if added is not None:
        added = added.reshape(-1).to(head.weight.dtype)
        bias = added if bias is None else bias + added
    scale = getattr(model, "logit_scale", 1.0)  # Cohere
    scale /= getattr(config, "logits_scaling", 1.0)  # Granite
    return _OutputLayer(head.weight, bias, scale, getattr(config, "final_logit_softcapping", None))


def _tap(head: Any, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
    """Forward pre-hook of the output layer: keeps the hidden states, lets a single row through.

    So whatever the model does with its logits is done, on one row. What is kept lies in the layer:
    a copy of the model, as in DataParallel, has its own.
    """
    if not head._labo_open:
        return None
    (hidden,) = args
    head._labo_hidden = hidden
    return (hidden[:1, :1],)


def _forward_tapped(
    forward: Callable[..., Any], head: Any, inputs: dict[str, Any]
) -> tuple[Any, Tensor]:
    """The model's own forward pass but for the logits: its outputs, and the hidden states."""
    if _tap not in head._forward_pre_hooks.values():  # PEFT or resizing may have put in a new layer
        _add_tap(head)
    head._labo_open = True
    try:
        outputs = forward(**inputs)
        hidden = head._labo_hidden
    finally:
        head._labo_open, head._labo_hidden = False, None
    return outputs, hidden


def _add_tap(head: Any) -> None:
    head._labo_open, head._labo_hidden = False, None
    head.register_forward_pre_hook(_tap)


@functools.cache
def _fused_class(cls: Any) -> Any:
    """A subclass of a model's class, of the same name, whose forward pass ends in the loss.

    A subclass and not a patched instance: copies and replicas of the model then run their own.
    """
    names = list(inspect.signature(cls.forward).parameters)[1:]

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(cls.forward, self)
        return _fused_forward(self, own, {**kwargs, **dict(zip(names, args, strict=False))})

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (cls,), self.__dict__

    members = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__reduce_ex__": reduce,
        "_labo_class": cls,
        "accepts_loss_kwargs": True,
        "forward": forward,
    }
    return type(cls.__name__, (cls,), members)


def _rebuild(cls: Any) -> Any:
    """An empty fused model, for copying and unpickling."""
    fused = _fused_class(cls)
    return fused.__new__(fused)


def _fused_forward(model: Any, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    items = inputs.pop("num_items_in_batch", None)
    labels = inputs.pop("labels", None)
    target = inputs.pop("shift_labels", None)
    if labels is None and target is None:
        if items is not None and model.training:
            raise ValueError(
                "the Trainer took the labels away, for a label_smoothing_factor or a "
                "compute_loss_func of its own; the loss of a fused model needs them: leave both "
                "out, or undo it with unfuse_head"
            )
        return forward(**inputs)
    if target is None:
        target = _shifted(labels) if model._labo.shift else labels
    inputs = _with_decoder_inputs(model, {**inputs, "labels": labels})
    inputs.pop("labels")
    as_dict = inputs.pop("return_dict", None)
    inputs["return_dict"] = True
    if model.training:
        if items is not None and not torch.compiler.is_compiling():
            _miss_callback(model._labo.loss)
        inputs.setdefault("use_cache", False)
        head = _head(model)
        outputs, hidden = _forward_tapped(forward, head, inputs)
        _refuse_router(outputs)
        loss, logits = _active(model._labo.loss), None
        mean = _output_layer(model, head).loss(hidden, target, loss, model._labo.options)
    else:
        outputs = forward(**inputs)
        loss, logits = CrossEntropyLoss(), outputs.logits
        mean = loss(logits, target.to(logits.device))
    value = _share(mean, loss, target, items)
    outputs = type(outputs)(**{**outputs, "loss": value, "logits": logits})
    as_dict = model.config.return_dict if as_dict is None else as_dict
    return outputs if as_dict else outputs.to_tuple()


def _miss_callback(loss: nn.Module) -> None:
    """Say once that a Trainer, who passes a count, seems to leave a warm-up alone.

    Not an error: a loop of one's own may pass a count too, and step the loss by hand.
    """
    if loss not in _FOLLOWED and _follows_training(loss):
        warnings.warn(
            f"{type(loss).__name__} follows the training: give the Trainer "
            "callbacks=[RegularizationCallback(loss)], or call loss.step() after each step",
            stacklevel=2,
        )


def _refuse_router(outputs: Any) -> None:
    if getattr(outputs, "aux_loss", None) is not None:
        raise ValueError(
            "fuse_head knows no loss of a router, which this model adds to its own: set "
            "output_router_logits=False"
        )


def _is_fused(model: nn.Module) -> bool:
    return hasattr(_unwrapped(model), "_labo_class")


def fuse_head(
    model: _Model, loss: nn.Module, *, options: LinearLossOptions | None = None
) -> _Model:
    """Let the output layer and the loss of a language model go through :func:`labo.linear_loss`.

    From then on, in training mode and with labels, ``model(...)`` returns this loss and no logits,
    which are never stored. ``num_items_in_batch`` is honoured, so the model can be given to a
    ``Trainer`` as it is. In eval mode the loss is the plain negative log-likelihood, and the logits
    are there; without labels nothing changes, so that ``generate`` works.

    The fused loss is compared with the model's own on four tokens here and now.

    Args:
        model: a causal or encoder-decoder model of transformers, or PEFT's wrapper of one; changed
            in place, before it is compiled or distributed.
        loss: any row-wise loss Module of the library, or a :class:`labo.Warmup` of two, to be
            stepped by :class:`RegularizationCallback` or by hand.
        options: chunk size or memory budget.

    Returns:
        ``model``.

    Raises:
        ValueError: the model does something with its logits that this function does not know.
    """
    base = _unwrapped(model)
    kind: Any = type(base)
    if not issubclass(kind, PreTrainedModel):
        raise TypeError(
            f"fuse_head takes a model of transformers, not {kind.__name__}; fuse it before it is "
            "compiled or distributed"
        )
    if _is_fused(base):
        raise ValueError("the model is fused already: call unfuse_head first")
    if "forward" in vars(base):
        raise ValueError(
            "the forward pass of this model was replaced (by accelerate's prepare, perhaps): fuse "
            "it before that"
        )
    _check_loss(loss, teacher=False)
    for leaf in _leaves(loss):
        if not isinstance(leaf, _Loss) or not leaf.rowwise:
            raise ValueError(
                f"fuse_head takes a row-wise loss of labo, not {type(leaf).__name__}: its value "
                "for a row must depend on that row alone"
            )
    head = _head(base)
    fused = _Fused(loss.to(head.weight.device), _shifts(base), options, base.loss_type)
    _count_as(base, fused.shift)
    try:
        _check_equal(base, head, fused.shift)
    except ValueError:
        base.loss_type = fused.loss_type
        raise
    base._labo = fused
    _add_tap(head)
    base.__class__ = _fused_class(kind)
    return model


def unfuse_head(model: _Model) -> _Model:
    """Undo :func:`fuse_head`.

    Args:
        model: a fused model, or PEFT's wrapper of one; changed in place.

    Returns:
        ``model``.
    """
    base: Any = _unwrapped(model)
    if not _is_fused(base):
        raise ValueError("the model is not fused")
    for module in base.modules():
        taps = [key for key, hook in module._forward_pre_hooks.items() if hook is _tap]
        for key in taps:
            del module._forward_pre_hooks[key]
        if taps:
            del module._labo_open, module._labo_hidden
    base.loss_type = base._labo.loss_type
    del base._labo
    base.__class__ = base._labo_class
    return model


# Largest logit in the comparison: what bends logits, bends these.
_LARGE = 60.0


@torch.no_grad()
def _check_equal(model: Any, head: nn.Linear, shift: bool) -> None:
    """Refuse a model whose own loss on four tokens is not what the fused one would be."""
    name = type(model).__name__
    if model.main_input_name != "input_ids" or head.weight.is_meta:
        raise ValueError(f"fuse_head must try {name} on tokens, with its weights in memory")
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(4, device=device).remainder(len(head.weight)).unsqueeze(0)
    seen: list[Tensor] = []

    def enlarge(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        logits = nn.functional.linear(args[0], head.weight)
        seen.append(args[0] * (_LARGE / logits.abs().max().clamp(min=1e-3)))
        return (seen[-1],)

    handle = head.register_forward_pre_hook(enlarge)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            outputs = model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                labels=tokens,
                use_cache=False,
                return_dict=True,
            )
    finally:
        handle.remove()
    _refuse_router(outputs)
    own = outputs.loss
    target = _shifted(tokens) if shift else tokens
    ours = None
    if len(seen) == 1 and seen[0].shape[:-1] == tokens.shape:
        ours = _output_layer(model, head).loss(seen[0], target, CrossEntropyLoss(), None)
    tolerance = 1e-3 if head.weight.dtype in (torch.float32, torch.float64) else 3e-2
    if ours is None or not torch.isclose(ours.to(own), own, rtol=tolerance, atol=0.0):
        raise ValueError(
            f"fuse_head does not know what {name} makes of its logits: its loss would be "
            f"{'nothing' if ours is None else f'{ours.item():.6g}'}, and the model's own is "
            f"{own.item():.6g}"
        )
