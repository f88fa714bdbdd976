"""Output layer and loss of a language model in one function."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._checks import is_dtensor
from ...calibration.folding import enlarged, evaluating
from ...linear import LinearLossOptions, TeacherHead
from ...losses import CrossEntropyLoss
from ...metrics import LossMetrics
from .logits import LazyLogits
from .losses import (
    DISTILLATION,
    Columns,
    Summed,
    active,
    check_loss,
    check_rowwise,
    mark_used,
    over,
    share,
    warn_uncounted,
)
from .metrics import Collected
from .models import (
    OutputLayer,
    added_loss,
    check_flag,
    check_pair,
    check_tokenizers,
    find_head,
    four_tokens,
    gathers_again,
    is_sharded,
    output_layer,
    set_counted,
    shifted,
    shifts,
    unwrapped,
    with_decoder_inputs,
)

_Model = TypeVar("_Model", bound=nn.Module)
_Found = TypeVar("_Found")


def fuse_head(
    model: _Model,
    loss: nn.Module,
    *,
    teacher: nn.Module | None = None,
    z_loss: float = 0.0,
    metrics: bool = False,
    eval_logits: bool | None = None,
    options: LinearLossOptions | None = None,
) -> _Model:
    """Compute the output layer and the loss of a language model by :func:`labo.linear_loss`.

    With labels and with gradients enabled, ``model(...)`` then returns this loss and no logits,
    which are never stored. ``num_items_in_batch`` is taken into account, so the model can be given
    to a ``Trainer`` as it is. With labels and under ``torch.no_grad()``, the loss is the plain
    negative log-likelihood, computed in chunks as well. Without labels nothing changes, so
    ``generate`` works. ``model.train()`` and ``model.eval()`` make no difference to the loss.

    ``model(..., token_weight=...)`` gives each label a weight, in the shape of the labels. The loss
    is the weighted sum over the sum of the weights, or over ``num_items_in_batch`` if that is
    given, as a ``Trainer`` does. Evaluation takes no weights. :class:`labo.TopKDistillationLoss`
    reads ``teacher_indices`` and ``teacher_log_probabilities``, k stored classes for each label.

    The fused loss is compared with the model's own on four tokens before the model is changed.

    Args:
        model: a causal or encoder-decoder model of transformers, or PEFT's wrapper of one; changed
            in place. Call this before the model is compiled or distributed.
        loss: any row-wise loss Module of labo, or a :class:`labo.Warmup` of two, to be stepped by
            :class:`RegularizationCallback` in a Trainer and by ``loss.step()`` elsewhere.
        teacher: for :class:`labo.DistillationLoss` and :class:`labo.DecoupledDistillationLoss`: a
            model with the same vocabulary, which receives the same inputs, in eval mode and without
            gradients. Its logits are computed chunk by chunk, too. It is not saved with the model.
        z_loss: coefficient of the z-loss, which is added in training.
        metrics: collect entropy, accuracy and more; :func:`take_metrics` returns them, and
            ``regularize(trainer, loss)`` logs them.
        eval_logits: whether evaluation returns logits. None: logits that are computed when they are
            used, by ``compute_metrics`` for example. True: plain logits. False: none.
        options: chunk size or memory budget.

    Returns:
        ``model``.

    Raises:
        ValueError: the loss or the model cannot be fused. The message gives the reason.
    """
    base = unwrapped(model)
    kind: Any = type(base)
    if not issubclass(kind, PreTrainedModel):
        raise TypeError(
            f"fuse_head needs a model of transformers, got {kind.__name__}. Fuse the model before "
            "it is compiled or distributed"
        )
    if is_fused(base):
        raise ValueError("the model is fused already: call unfuse_head first")
    if "forward" in vars(base):
        raise ValueError(
            f"the forward pass of {kind.__name__} was replaced by {_origin(base.forward)}. Call "
            "fuse_head before that, or use regularize(trainer, loss): with TRL's SFTTrainer, or "
            "for a model on several devices (device_map)"
        )
    check_flag("metrics", metrics)
    check_flag("eval_logits", eval_logits)
    check_loss(loss, teacher=teacher is not None)
    check_rowwise(loss, "fuse_head")
    head = find_head(base)
    shift = shifts(base)
    check_equal(base, head, shift)
    if teacher is not None:
        teacher = _check_teacher(teacher, base, head)
    if not (math.isfinite(z_loss) and z_loss >= 0):
        raise ValueError(f"z_loss must be a number of at least 0, got {z_loss!r}")
    base._labo = _Fused(
        loss=loss.to(head.weight.device),
        shift=shift,
        options=options,
        loss_type=base.loss_type,
        z_loss=z_loss,
        teacher=teacher,
        eval_logits=eval_logits,
        collected=Collected() if metrics else None,
    )
    set_counted(base, shift)
    _add_tap(head)
    base.__class__ = _fused_class(kind)
    return model


def unfuse_head(model: _Model) -> _Model:
    """Undo :func:`fuse_head`, and remove what replaced the forward pass since then.

    Args:
        model: a fused model, or PEFT's wrapper of one; changed in place.

    Returns:
        ``model``.
    """
    base: Any = unwrapped(model)
    if not is_fused(base):
        raise ValueError("the model is not fused")
    for module in base.modules():
        if _is_tapped(module):
            _remove_tap(module)
    base.loss_type = base._labo.loss_type
    del base._labo
    for name in ("forward", "_labo_expected"):
        vars(base).pop(name, None)
    base.__class__ = base._labo_class
    return model


def take_metrics(model: nn.Module, *, training: bool = True) -> LossMetrics | None:
    """The metrics of a model that was fused with ``metrics=True``, since the last call.

    Args:
        model: the fused model, or PEFT's wrapper of it.
        training: those of forward passes with gradients, or of those without.

    Returns:
        Sums over the targets of this process; None if there was no forward pass with labels.
    """
    fused = fused_part(model)
    if fused is None or fused.collected is None:
        raise ValueError("the model collects no metrics: use fuse_head(model, loss, metrics=True)")
    return fused.collected.take(training)


def fused_part(model: nn.Module) -> _Fused | None:
    """What :func:`fuse_head` added to the model, if it is fused."""
    base: Any = unwrapped(model)
    return base._labo if is_fused(base) else None


def is_fused(model: nn.Module) -> bool:
    return hasattr(unwrapped(model), "_labo_class")


# ------------------------------------------------------------------ the fused model


@dataclass(frozen=True)
class _Fused:
    """What a fused model has in addition."""

    loss: nn.Module
    shift: bool
    options: LinearLossOptions | None
    loss_type: str | None
    z_loss: float
    teacher: nn.Module | None
    eval_logits: bool | None
    collected: Collected | None


def _check_teacher(teacher: nn.Module, model: nn.Module, head: Any) -> nn.Module:
    """The teacher, frozen; refused if its output layer cannot be used by chunks."""
    base = unwrapped(teacher)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"teacher must be a model of transformers, got {teacher!r:.80}")
    check_pair(teacher, model)
    check_tokenizers(teacher, model)
    if is_fused(base):
        raise ValueError("the teacher is fused: call unfuse_head(teacher) first")
    its_head = find_head(base)
    if len(its_head.weight) != len(head.weight):
        raise ValueError(
            f"the teacher has {len(its_head.weight)} classes and the model {len(head.weight)}: "
            "both must have the same vocabulary"
        )
    if output_layer(base, its_head).adapter is not None:
        raise ValueError(
            "the output layer of the teacher has an adapter: merge it (merge_and_unload)"
        )
    if shifts(base) != shifts(model):
        raise ValueError(
            f"one of {type(base).__name__}, the teacher, and {type(model).__name__} predicts the "
            "label of a position and the other one that of the next: both must do the same"
        )
    check_equal(base, its_head, shifts(base))
    return teacher.eval().requires_grad_(False)


@functools.cache
def _fused_class(cls: Any) -> Any:
    """A subclass of a model's class, of the same name, whose forward pass ends in the loss.

    With a subclass, unlike with a patched instance, copies and replicas of the model use their own
    weights.
    """
    signature = inspect.signature(cls.forward)
    names = list(signature.parameters)[1:]

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(cls.forward, self)
        return _fused_forward(self, own, {**kwargs, **dict(zip(names, args, strict=False))})

    # The Trainer drops the columns of a data set that the forward pass does not name.
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in Columns._fields
    ]
    *others, last = signature.parameters.values()
    rest = [last] if last.kind is inspect.Parameter.VAR_KEYWORD else []
    others = others if rest else [*others, last]
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*others, *more, *rest]
    )

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == "forward":
            value = _guarded(self, value, names)
        cls.__setattr__(self, name, value)

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (cls,), self.__dict__

    members = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__reduce_ex__": reduce,
        "__setattr__": set_attribute,
        "_labo_class": cls,
        "_labo_expected": False,
        "accepts_loss_kwargs": True,
        "forward": forward,
    }
    return type(cls.__name__, (cls,), members)


def _rebuild(cls: Any) -> Any:
    """An empty fused model, for copying and unpickling."""
    fused = _fused_class(cls)
    return fused.__new__(fused)


def _fused_forward(model: Any, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    if model._labo_expected:  # see _guarded
        model._labo_expected = False
    items = inputs.pop("num_items_in_batch", None)
    labels = inputs.pop("labels", None)
    target = inputs.pop("shift_labels", None)
    columns = Columns.taken_from(inputs)
    if labels is None and target is None:
        if items is not None:
            raise ValueError(
                "the Trainer does not pass the labels to the model, because a "
                "label_smoothing_factor or a compute_loss_func is set. The loss of a fused model "
                "needs them: remove that setting, or call unfuse_head"
            )
        return forward(**inputs)
    fused: _Fused = model._labo
    given = labels if target is None else target
    target = shifted(labels) if target is None and fused.shift else given
    inputs = with_decoder_inputs(model, {**inputs, "labels": labels})
    inputs.pop("labels")
    as_dict = inputs.pop("return_dict", None)
    inputs["return_dict"] = True
    inputs.setdefault("use_cache", False)
    training, head = torch.is_grad_enabled(), find_head(model)
    if training and items is not None and not torch.compiler.is_compiling():
        warn_uncounted(fused.loss)

    def in_training(hidden: Tensor, _: Tensor) -> tuple[Tensor, None]:
        layer = output_layer(model, head)
        mark_used(fused.loss)
        loss = active(fused.loss)
        extras = columns.extras(loss, given, target, layer.weight.device)
        if fused.teacher is not None and isinstance(loss, DISTILLATION):  # not in a warm-up
            extras["teacher_logits"] = _teacher_head(fused.teacher, inputs, layer.weight.device)
        extras["z_loss"] = fused.z_loss
        return _value(fused, layer, hidden, target, loss, items, **extras), None

    def in_evaluation(hidden: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
        layer = output_layer(model, head)
        value = _value(fused, layer, hidden, target, CrossEntropyLoss(), items)
        return value, _eval_logits(fused, layer, hidden, row.dtype)

    outputs, found = run_body(forward, head, inputs, in_training if training else in_evaluation)
    value, logits = with_row(found[0], head, outputs), found[1]
    added = added_loss(model, outputs) if training else None
    if added is not None:
        value = value + share(added.to(value.device), target, items)
    outputs = type(outputs)(**{**outputs, "loss": value, "logits": logits})
    as_dict = model.config.return_dict if as_dict is None else as_dict
    return outputs if as_dict else outputs.to_tuple()


def _value(
    fused: _Fused,
    layer: OutputLayer,
    hidden: Tensor,
    target: Tensor,
    loss: nn.Module,
    items: Tensor | float | None,
    **extras: Any,
) -> Tensor:
    """The mean of ``loss``, or its sum over the number of ``items``; its metrics are collected."""
    collected = fused.collected
    measured: Any = loss if items is None else Summed(loss)
    value, found = layer.loss_and_metrics(
        hidden, target, measured, fused.options, measure=collected is not None, **extras
    )
    if collected is not None and found is not None:
        collected.add(found, training=torch.is_grad_enabled())
    return value if items is None else over(value, target, items)


@torch.no_grad()
def _teacher_head(teacher: nn.Module, inputs: dict[str, Any], device: torch.device) -> TeacherHead:
    """The teacher's hidden states and output layer."""
    base = unwrapped(teacher.to(device))
    head = find_head(base)
    gathered = is_sharded(head.weight)
    inputs = {name: value for name, value in inputs.items() if name != "output_router_logits"}

    def end(hidden: Tensor, _: Tensor) -> TeacherHead:
        found = output_layer(base, head).as_teacher(hidden)
        if not gathered or not isinstance(found.weight, Tensor):  # a quantized one is whole
            return found
        # FSDP and ZeRO-3 free the weight after this call, and the student's loss needs it later.
        bias = None if found.bias is None else found.bias.clone()
        return found._replace(weight=found.weight.clone(), bias=bias)

    return run_body(base, head, inputs, end)[1]


def _eval_logits(
    fused: _Fused, layer: OutputLayer, hidden: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """The logits of an evaluation, as ``eval_logits`` of :func:`fuse_head` says."""
    if fused.eval_logits is False:
        return None
    if fused.eval_logits or torch.compiler.is_compiling():
        return layer.logits(hidden)
    weight, device = layer.weight, layer.weight.device
    autocast = (device.type, torch.get_autocast_dtype(device.type))
    autocast_is_on = torch.is_autocast_enabled(device.type)

    def versions() -> list[int]:
        return [x._version for x in layer.weights if not x.is_inference()]

    before = versions()

    def compute() -> Tensor:
        # ZeRO-3 and FSDP, after the forward pass; a quantized tensor is a wrapper
        freed = weight.numel() == 0
        freed |= type(weight.data) is Tensor and weight.untyped_storage().size() == 0
        if freed or versions() != before:
            raise ValueError(
                "the logits of a fused model are computed when they are used, and its output layer "
                f"{'is sharded again' if freed else 'has changed'} by now: use "
                "fuse_head(model, loss, eval_logits=True)"
            )
        with torch.no_grad(), torch.autocast(*autocast, enabled=autocast_is_on):
            return layer.logits(hidden)

    shape = (*hidden.shape[:-1], len(weight))
    return LazyLogits(compute, shape, dtype, device)


# ------------------------------------------------------------------ a replaced forward pass


def _guarded(model: Any, forward: Any, names: list[str]) -> Any:
    """A forward pass that was assigned to a fused model, with a check that it uses the fused one.

    A wrapper such as accelerate's mixed precision does. TRL and Liger compute another loss instead,
    and training would go on with that.
    """

    def checked(model: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**kwargs, **dict(zip(names, args, strict=False))}
        if given.get("labels") is None and given.get("shift_labels") is None:
            return call(*args, **kwargs)
        model._labo_expected = True
        outputs = call(*args, **kwargs)
        if model._labo_expected:
            model._labo_expected = False
            raise ValueError(
                f"fuse_head has no effect: the forward pass of {type(model).__name__} was replaced "
                f"by {_origin(forward)}, which computes another loss. {_remedy(forward)}"
            )
        return outputs

    if isinstance(forward, MethodType) and forward.__self__ is model:
        function = forward.__func__

        @functools.wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return checked(self, functools.partial(function, self), args, kwargs)

        return MethodType(method, model)

    @functools.wraps(forward)
    def closure(*args: Any, **kwargs: Any) -> Any:
        return checked(model, forward, args, kwargs)

    return closure


def _origin(function: Any) -> str:
    """The module of a function. ``__module__`` is not reliable: functools.wraps copies it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    found = getattr(function, "__globals__", {}).get("__name__")
    return found or type(function).__module__


def _remedy(function: Any) -> str:
    library = _origin(function).split(".")[0]
    if library == "trl":
        return "Give SFTTrainer the model without fuse_head, and call regularize(trainer, loss)"
    if library == "liger_kernel":
        return 'Set liger_kernel_config={"fused_linear_cross_entropy": False}'
    return "Call fuse_head after that, or use regularize(trainer, loss)"


# ------------------------------------------------------------------ the body of the model


def run_body(
    forward: Callable[..., Any],
    head: Any,
    inputs: dict[str, Any],
    end: Callable[[Tensor, Tensor], _Found],
) -> tuple[Any, _Found]:
    """The forward pass of a model with another end than its logits.

    The output layer is called with a single row, so whatever the model does with its logits is done
    on one row. ``end`` is called inside of that call: FSDP and ZeRO-3 gather the weight before it
    and may free it after it, whatever group the layer is in.

    Args:
        forward: of the model.
        head: its output layer.
        inputs: of ``forward``.
        end: gets the hidden states (..., D) and the single row of logits.

    Returns:
        The outputs of ``forward``, and what ``end`` returns.
    """
    if not _is_tapped(head):  # PEFT or resizing installed a new layer
        _add_tap(head)
    head._labo_end = end
    try:
        outputs = forward(**inputs)
        found = head._labo_found
    finally:
        head._labo_end = head._labo_hidden = head._labo_found = None
    if found is None:
        raise ValueError(
            "the forward pass of the model does not call its output layer. Was the class patched "
            "after fuse_head, by Liger for example?"
        )
    return outputs, found[0]


def _tap(head: Any, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
    """Forward pre-hook of the output layer: keep the hidden states and pass on a single row.

    They are kept in the layer, so a replica of the model (DataParallel) keeps its own.
    """
    if head._labo_end is None:
        return None
    (hidden,) = args
    if is_dtensor(hidden):
        raise ValueError(
            "the hidden states are a DTensor, of which each process holds a part: let the last "
            "layer of the model return whole tensors, or use regularize(trainer, loss)"
        )
    head._labo_hidden = hidden
    return (hidden[:1, :1],)


def _call_end(head: Any, args: tuple[Tensor, ...], row: Tensor) -> Tensor | None:
    """Forward hook of the output layer: what :func:`run_body` does in the place of the logits."""
    if head._labo_end is None:
        return None
    head._labo_found = (head._labo_end(head._labo_hidden, row),)
    if not (gathers_again(head) and torch.is_grad_enabled()):
        return None
    # FSDP2 and ZeRO-3 gather the weight again when the gradient of the output arrives: the output
    # has to be part of the loss, see with_row(). Without the graph of the weight, whose gradient of
    # this row would be as large as the weight.
    return row.detach() + 0 * args[0][..., :1]


def with_row(value: Tensor, head: nn.Module, outputs: Any) -> Tensor:
    """A loss of :func:`run_body`; FSDP2 and ZeRO-3 get it with the row of logits in its graph."""
    if not (gathers_again(head) and torch.is_grad_enabled()):
        return value
    row: Tensor = outputs.logits
    everything = torch.ones_like(row, dtype=torch.bool)  # 0 times the row may be NaN
    return value + row.masked_fill(everything, 0.0).sum().to(value)


def _add_tap(head: Any) -> None:
    head._labo_end = head._labo_hidden = head._labo_found = None
    head.register_forward_pre_hook(_tap)
    head.register_forward_hook(_call_end, prepend=True)  # before FSDP frees the weight


def _is_tapped(module: nn.Module) -> bool:
    return _tap in module._forward_pre_hooks.values()


def _remove_tap(head: Any) -> None:
    for hooks, ours in ((head._forward_pre_hooks, _tap), (head._forward_hooks, _call_end)):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
    del head._labo_end, head._labo_hidden, head._labo_found


# ------------------------------------------------------------------ the comparison


@torch.no_grad()
def check_equal(model: Any, head: Any, shift: bool) -> None:
    """Raise an error if the model's own loss on four tokens is not what the fused one would be."""
    name = type(model).__name__
    layer = output_layer(model, head)
    inputs = None if layer.weight.is_meta else four_tokens(model)
    if inputs is None:
        raise ValueError(
            f"{name} cannot be tried on four tokens: it must take input_ids or be an "
            "encoder-decoder, and have its weights in memory"
        )
    tokens: Tensor = inputs["labels"]
    device = tokens.device
    seen: list[Tensor] = []

    def enlarge(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(enlarged(args[0], layer.weight))
        return (seen[-1],)

    ours = None
    with evaluating(head):  # the dropout of an adapter would not be the same twice
        hook, devices = head.register_forward_pre_hook(enlarge), [device]
        with hook, torch.random.fork_rng(devices if device.type == "cuda" else []):
            outputs = model(**inputs)
        own: Tensor = outputs.loss
        target = shifted(tokens) if shift else tokens
        if len(seen) == 1 and seen[0].shape[:-1] == tokens.shape:
            ours, _ = layer.loss_and_metrics(seen[0], target, CrossEntropyLoss())
            added = added_loss(model, outputs)
            ours = ours if added is None else ours + added.to(ours)
    tolerance = 1e-3 if layer.weight.dtype in (torch.float32, torch.float64) else 3e-2
    if ours is None or not torch.isclose(ours.to(own), own, rtol=tolerance, atol=0.0):
        value = "unknown" if ours is None else f"{ours.item():.6g}"
        raise ValueError(
            f"the loss of {name} is not the cross entropy of its output layer as fuse_head knows "
            f"it: on four tokens the fused loss is {value} and the model's own {own.item():.6g}. "
            "Use regularize(trainer, loss), which works on the logits"
        )
