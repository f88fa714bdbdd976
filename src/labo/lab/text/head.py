"""Hidden states and the output layer that turns them into logits, kept apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ... import RDropLoss, TeacherHead, linear_loss

_CHUNK_BYTES = 64 << 20  # of the logits of one chunk


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

    def chunk(self, chunks: int) -> tuple[Head, ...]:
        """The parts of the states, as ``Tensor.chunk``, each with this output layer."""
        return tuple(self._replace(states=states) for states in self.states.chunk(chunks))


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
        teacher: for a loss with a teacher, the teacher's states at the same targets, or the
            indices and log-probabilities of its most probable classes, each (N, k). For R-Drop
            the states of the second pass, which have a gradient.
    """
    if isinstance(loss, RDropLoss):
        assert isinstance(teacher, Head)
        return _by_chunks(loss, target, head, teacher)
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


def _by_chunks(loss: nn.Module, target: Tensor, *heads: Head) -> Tensor:
    """The sum of a loss of the logits of several heads, chunk by chunk.

    The backward pass computes the logits of a chunk again, so those of the batch are never stored.
    """

    def part_loss(target: Tensor, *states: Tensor) -> Tensor:
        logits = [head.logits(part) for head, part in zip(heads, states, strict=True)]
        value: Tensor = loss(logits[0], target, *logits[1:])
        return value

    weight = heads[0].weight
    rows = max(1, _CHUNK_BYTES // (len(heads) * len(weight) * weight.element_size()))
    parts = zip(target.split(rows), *(head.states.split(rows) for head in heads), strict=True)
    values = [
        checkpoint(part_loss, *part, use_reentrant=False, preserve_rng_state=False)
        for part in parts
    ]
    return torch.stack(values).sum()
