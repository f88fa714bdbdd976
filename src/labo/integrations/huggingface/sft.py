"""A loss for TRL's ``SFTTrainer``, computed from the hidden states.

``SFTTrainer`` calls its model with ``fused_lm_head=True`` and expects per-token quantities: it sums
``-log_probs`` for the loss, and ``entropy`` and ``is_top1`` for its metrics. While gradients are
enabled, the model answers with the loss of labo in the place of ``-log_probs``. The body of the
model runs once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.utils import ModelOutput

from ...metrics import LossMetrics
from .head import check_equal, run_body, with_row
from .losses import IGNORED, Columns, Summed, active, check_rowwise, mark_used
from .models import find_head, output_layer, shifted, unwrapped


@dataclass
class TokenOutput(ModelOutput):  # type: ignore[misc]
    """What ``SFTTrainer`` reads from a model that it called with ``fused_lm_head=True``."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def is_sft_trainer(trainer: object) -> bool:
    """Whether this is TRL's SFTTrainer or a subclass; TRL need not be installed."""
    classes = type(trainer).__mro__
    return any(c.__name__ == "SFTTrainer" and c.__module__.startswith("trl.") for c in classes)


def is_attached(trainer: Any) -> bool:
    return hasattr(getattr(unwrapped(trainer.model), "forward", None), "_labo_forward")


def attach(trainer: Any, loss: nn.Module, *, shift: bool, teacher: nn.Module | None) -> None:
    """Let the model of an SFTTrainer answer with ``loss``."""
    check_rowwise(loss, "regularize with SFTTrainer")
    if teacher is not None:
        raise ValueError("regularize takes no teacher with SFTTrainer: use transformers' Trainer")
    if trainer.args.loss_type != "nll":
        raise ValueError(
            f"loss_type={trainer.args.loss_type!r} is another loss than {type(loss).__name__}: use "
            'SFTConfig(loss_type="nll")'
        )
    if not shift:
        raise ValueError("SFTTrainer trains causal models only: leave shift out")
    dropped = set(getattr(trainer.train_dataset, "column_names", None) or ()) & set(Columns._fields)
    if dropped and type(trainer.data_collator).__module__.startswith("trl."):
        raise ValueError(
            f"the collator of TRL drops {', '.join(sorted(dropped))} of the data set: give "
            "SFTTrainer a data_collator that keeps what the loss needs, or remove the column"
        )
    model = unwrapped(trainer.model)
    if "forward" not in vars(model):
        raise ValueError("regularize needs the SFTTrainer of TRL 1.16 or newer")
    check_equal(model, find_head(model), shift)
    loss = loss.to(trainer.args.device)
    model.forward = _with_loss(model, model.forward, loss)


def _with_loss(model: Any, own: Callable[..., Any], loss: nn.Module) -> Callable[..., Any]:
    """The forward pass ``own`` of TRL, except that training is answered with ``loss``."""
    body = functools.partial(type(model).forward, model)

    @functools.wraps(own)
    def forward(*args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head or not torch.is_grad_enabled():
            return own(*args, fused_lm_head=fused_lm_head, **inputs)
        return _answer(model, body, loss, *args, **inputs)

    forward._labo_forward = True  # type: ignore[attr-defined]
    return forward


def _answer(
    model: Any,
    body: Callable[..., Any],
    loss: nn.Module,
    *,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    **inputs: Any,
) -> TokenOutput:
    columns = Columns.taken_from(inputs)
    given = labels if shift_labels is None else shift_labels
    if given is None:
        raise ValueError('the batch has no "labels", so there is no loss to compute')
    if shift_labels is None:
        shift_labels = shifted(given)
    head, rows = find_head(model), shift_labels != IGNORED
    mark_used(loss)
    current = active(loss)
    summed: Any = Summed(current)

    def end(hidden: Tensor, _: Tensor) -> tuple[Tensor, LossMetrics | None, Tensor]:
        layer = output_layer(model, head)
        mask = rows.to(layer.weight.device)
        target = shift_labels.to(mask.device)[mask]
        extras = columns.extras(current, given, shift_labels, mask.device)
        extras = tree_map(lambda x: x[mask], extras)
        total, found = layer.loss_and_metrics(
            hidden.to(mask.device)[mask], target, summed, measure="rows", **extras
        )
        return total, found, mask

    outputs, (total, found, mask) = run_body(body, head, {**inputs, "return_dict": True}, end)
    assert found is not None
    total = with_row(total, head, outputs)
    return TokenOutput(
        # SFTTrainer uses the sum only: each token gets an equal part of it
        log_probs=-total / mask.sum().clamp(min=1) * mask,
        entropy=found.entropy.float(),
        is_top1=found.correct.bool(),
        label_mask=mask,
        aux_loss=getattr(outputs, "aux_loss", None),
    )
