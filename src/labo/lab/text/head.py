"""Hidden states and the output layer that turns them into logits, kept apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ... import ConNetLoss, RDropLoss, TeacherHead, linear_loss

_CHUNK_BYTES = 64 << 20  # of the logits of one chunk


class Head(NamedTuple):
    """An output layer not yet applied.

    Attributes:
        states: (..., D) hidden states.
        weight: (V, D).
        bias: (V,) or None.
        softcap: if given, the logits are softcap tanh(z / softcap).
        inner: (..., D) hidden states from inside the model, if they were asked for (ConNet).
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    inner: Tensor | None = None

    def logits(self, states: Tensor) -> Tensor:
        """(..., V) logits of states (..., D) through this output layer."""
        logits = nn.functional.linear(states, self.weight, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def at(self, rows: Tensor) -> Head:
        """The states at these rows, a bool tensor (...)."""
        inner = None if self.inner is None else self.inner[rows]
        return self._replace(states=self.states[rows], inner=inner)

    def as_teacher(self) -> TeacherHead:
        return TeacherHead(self.states, self.weight, self.bias, self.softcap)

    def chunk(self, chunks: int) -> tuple[Head, ...]:
        """The parts of the states, as ``Tensor.chunk``, each with this output layer."""
        return tuple(self._replace(states=states) for states in self.states.chunk(chunks))


def mean_of_layers(hidden_states: Sequence[Tensor], layers: int) -> Tensor:
    """The mean of the outputs of the first layers; ``hidden_states`` begins with the embeddings."""
    return torch.stack(tuple(hidden_states[1 : layers + 1])).mean(0)


def head_loss(
    loss: nn.Module,
    head: Head,
    target: Tensor,
    teacher: Head | tuple[Tensor, Tensor] | None = None,
    draws: Tensor | None = None,
) -> Tensor:
    """The loss of logits that are never stored, see :func:`labo.linear_loss`.

    Args:
        loss: a row-wise loss of the library, R-Drop, or ConNet.
        head: states (N, D) and output layer.
        target: (N,) class indices.
        teacher: for a loss with a teacher, the teacher's states at the same targets, or the
            indices and log-probabilities of its most probable classes, each (N, k). For R-Drop
            the states of the second pass, which have a gradient.
        draws: for ConNet, (N,) random numbers in [0, 1).
    """
    if isinstance(loss, RDropLoss):
        assert isinstance(teacher, Head)
        return _by_chunks(loss, [head, teacher], target)
    if isinstance(loss, ConNetLoss):
        confidence, trusted, mean = loss.confidences(target, head.inner, draws)
        assert trusted is not None

        def of_rows(logits: Tensor, target: Tensor, confidence: Tensor, trusted: Tensor) -> Tensor:
            return loss.of_rows(logits, target, confidence, trusted, mean)

        return _by_chunks(of_rows, [head], target, confidence, trusted)
    teacher_logits = teacher.as_teacher() if isinstance(teacher, Head) else teacher
    return linear_loss(
        head.states,
        head.weight,
        target,
        loss,
        linear_bias=head.bias,
        softcap=head.softcap,
        teacher_logits=teacher_logits,
    )


def _by_chunks(
    loss: Callable[..., Tensor], heads: Sequence[Head], target: Tensor, *rows: Tensor
) -> Tensor:
    """The sum of ``loss(logits, target, *further)``, chunk by chunk.

    The further arguments are the logits of the other heads, and ``rows``, (N,). The backward pass
    computes the logits of a chunk again, so those of the batch are never stored.
    """

    def part_loss(target: Tensor, states: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        first, *others = (head.logits(part) for head, part in zip(heads, states, strict=True))
        return loss(first, target, *others, *rows)

    weight = heads[0].weight
    size = max(1, _CHUNK_BYTES // (len(heads) * len(weight) * weight.element_size()))
    values = []
    for start in range(0, max(1, len(target)), size):
        part = slice(start, start + size)
        states = [head.states[part] for head in heads]
        values.append(
            checkpoint(
                part_loss,
                target[part],
                states,
                [row[part] for row in rows],
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.stack(values).sum()
