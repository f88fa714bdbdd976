"""Hidden states and the output layer that turns them into logits, kept apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import TeacherHead, linear_loss


class Head(NamedTuple):
    """An output layer not yet applied.

    Attributes:
        states: (..., D) hidden states.
        weight: (V, D).
        bias: (V,) or None.
        softcap: if given, the logits are softcap tanh(z / softcap).
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    def logits(self, states: Tensor) -> Tensor:
        """(..., V) logits of states (..., D) through this output layer."""
        logits = nn.functional.linear(states, self.weight, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_loss(
    loss: nn.Module,
    head: Head,
    target: Tensor,
    teacher: Head | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The loss of logits that are never stored, see :func:`labo.linear_loss`.

    Args:
        loss: a row-wise loss of the library.
        head: states (N, D) and output layer.
        target: (N,) class indices.
        teacher: for a loss with a teacher, the teacher's states at the same targets; or the
            indices and log-probabilities of its most probable classes, each (N, k).
    """
    teacher_logits = TeacherHead(*teacher) if isinstance(teacher, Head) else teacher
    return linear_loss(
        head.states,
        head.weight,
        target,
        loss,
        linear_bias=head.bias,
        softcap=head.softcap,
        teacher_logits=teacher_logits,
    )
