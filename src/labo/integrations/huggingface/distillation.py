"""A loss for TRL's ``DistillationTrainer``, computed from the hidden states of both models.

``DistillationTrainer`` gives the hidden states and the output layers of student and teacher to one
function, which returns the loss, the summed entropy and the number of tokens. In training that
function is replaced by :func:`labo.linear_loss`. Generation, buffers, metrics and evaluation stay
those of TRL.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ... import TeacherHead, linear_loss
from .callback import RegularizationCallback
from .losses import Summed, active, check_loss, check_rowwise, mark_used

_FUNCTION = "_chunked_divergence_loss"


def is_distillation_trainer(trainer: object) -> bool:
    """Whether this is the DistillationTrainer of TRL itself; TRL need not be installed."""
    cls = type(trainer)
    return cls.__name__ == "DistillationTrainer" and cls.__module__.startswith("trl.trainer.")


def attach(trainer: Any, loss: nn.Module, options: dict[str, Any]) -> Any:
    """Let the trainer compute ``loss``; returns it."""
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise ValueError(
            f"DistillationTrainer has its own teacher and metrics: leave {', '.join(given)} out"
        )
    check_loss(loss, teacher=True)
    check_rowwise(loss, "regularize with DistillationTrainer")
    if "_compute_loss" in vars(trainer):
        raise ValueError("the trainer has a loss of labo already: make a new trainer")
    module = __import__(type(trainer).__module__, fromlist=[_FUNCTION])
    if not hasattr(module, _FUNCTION) or not hasattr(trainer, "_compute_loss"):
        raise ValueError("regularize needs the DistillationTrainer of TRL 1.16")
    own, loss = trainer._compute_loss, loss.to(trainer.args.device)

    def compute_loss(student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(student, inputs, num_items_in_batch)
        mark_used(loss)
        both = _BothHeads(Summed(active(loss)), inputs["completion_ids"])
        with mock.patch.object(module, _FUNCTION, both):
            return own(student, inputs, num_items_in_batch)

    trainer._compute_loss = compute_loss
    trainer.add_callback(RegularizationCallback(loss))
    return trainer


class _BothHeads:
    """In place of TRL's function; called with its arguments."""

    def __init__(self, loss: Any, completion: Tensor) -> None:
        self.loss, self.completion = loss, completion

    def __call__(
        self,
        student_hidden_states: Tensor,
        teacher_hidden_states: Tensor,
        student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor,
        completion_mask: Tensor,
        beta: float,
        num_items_in_batch: Any = None,
        student_lm_head_bias: Tensor | None = None,
        teacher_lm_head_bias: Tensor | None = None,
        student_logit_scale: float = 1.0,
        teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_final_logit_softcapping: float | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts = completion_mask.reshape(-1) != 0
        target = self.completion.reshape(-1).to(counts.device)[counts]
        hidden, bias = _scaled(
            student_hidden_states, student_lm_head_bias, student_logit_scale, counts
        )
        taught, taught_bias = _scaled(
            teacher_hidden_states, teacher_lm_head_bias, teacher_logit_scale, counts
        )
        teacher = TeacherHead(
            taught, _whole(teacher_lm_head_weight), taught_bias, teacher_final_logit_softcapping
        )
        total, found = linear_loss(
            hidden,
            _whole(student_lm_head_weight),
            target,
            self.loss,
            linear_bias=bias,
            softcap=student_final_logit_softcapping,
            teacher_logits=teacher,
            return_metrics="rows",
        )
        items = counts.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        items = items.to(total.device) if isinstance(items, Tensor) else items
        return total / items, found.entropy.sum(), counts.sum()


def _whole(weight: Any) -> Any:
    """As TRL has it: a split weight is gathered once."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _scaled(
    hidden: Tensor, bias: Tensor | None, scale: float, counts: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The rows that count and the bias, times the factor of the logits."""
    rows = hidden.reshape(-1, hidden.shape[-1])[counts]
    if scale == 1:
        return rows, None if bias is None else _whole(bias)
    return rows * scale, None if bias is None else _whole(bias) * scale
