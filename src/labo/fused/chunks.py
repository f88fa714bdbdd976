"""What the chunk loops of :func:`labo.linear_loss` share: the rows of a chunk, and the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._rows import row_sum, times
from . import metrics
from .dispatch import RowLoss

Factor = float | Tensor | None
# (logits, chunk, factor, out) -> (values, gradient): a loss as a chunk loop sees it.
Rows = Callable[[Tensor, slice, Factor, Tensor], tuple[Tensor, Tensor | None]]


class Mean(NamedTuple):
    """How the values of the rows become one: sum_i token_weight_i value_i / divisor.

    Attributes:
        divisor: a number or a scalar tensor; 1 for a sum, inf if nothing counts.
        token_weight: (N,), or None for 1.
    """

    divisor: float | Tensor = 1.0
    token_weight: Tensor | None = None

    def factor(self, count: int) -> float | Tensor:
        """The derivative of the result for the value of each row: one number, or (N,)."""
        if self.token_weight is not None:
            return self.token_weight / self.divisor
        factor = 1 / self.divisor
        return factor.expand(count) if isinstance(factor, Tensor) else factor

    def weigh(self, values: Tensor) -> Tensor:
        """(N,) to (N,)."""
        return values if self.token_weight is None else times(self.token_weight, values)

    def reduce(self, values: Tensor) -> Tensor:
        """(N,) to the result."""
        return row_sum(self.weigh(values)) / self.divisor


class Extras(NamedTuple):
    """What is computed beside the loss: the z-loss with this coefficient, the statistics."""

    z_loss: float = 0.0
    measure: bool = False


class ChunkLoss(Protocol):
    """A loss for the rows of one chunk, as :class:`labo.fused.dispatch.RowLoss` is."""

    def rows(
        self, logits: Tensor, target: Tensor, factor: Factor, out: Tensor
    ) -> tuple[Tensor, Tensor | None]: ...


class ChunkRows:
    """A loss on the rows of a call, with what is computed beside it.

    Args:
        target: (N,) class indices or (N, V) class probabilities.
        for_chunk: the loss for a chunk.
        weight: (V,) class weights of the whole vocabulary, or None.
        ignore_index: target of rows that do not count.
        extras: what is computed beside the loss.
        group: the processes that hold the other columns of the logits, if ``split``.
        split: whether there are other columns.

    Attributes:
        statistics: (N, 5), see :func:`labo.fused.metrics.row_statistics`; None if not asked for.
    """

    def __init__(
        self,
        target: Tensor,
        for_chunk: Callable[[slice], ChunkLoss],
        weight: Tensor | None,
        ignore_index: int,
        extras: Extras,
        group: Any = None,
        *,
        split: bool = False,
    ) -> None:
        self.target = target
        self.for_chunk = for_chunk
        self.weight = weight
        self.ignore_index = ignore_index
        self.extras = extras
        self.group, self.split = group, split
        self.statistics: Tensor | None = None
        self._known: set[int] = set()  # first rows of the chunks whose statistics are there
        self._penalty: Tensor | None = None
        if any(extras):
            shape = (len(target), metrics.COLUMNS)
            self.statistics = torch.empty(shape, dtype=torch.float64, device=target.device)

    def __call__(
        self, logits: Tensor, part: slice, factor: Factor, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Values and gradient, as :meth:`labo.fused.dispatch.RowLoss.rows` gives them."""
        target = self.target[part]
        loss = self.for_chunk(part)
        if self.statistics is None:
            return loss.rows(logits, target, factor, out)
        if isinstance(loss, RowLoss) and loss.measures(logits):
            return loss.rows(logits, target, factor, out, self.statistics[part])
        found = self._statistics(self.statistics, logits, part)
        if not self.extras.z_loss:
            return loss.rows(logits, target, factor, out)
        z = found[:, metrics.MAXIMUM] + found[:, metrics.LOG_E]
        strength = self.extras.z_loss * self._label_weight(target)
        penalty = None
        if factor is not None:
            valid = self._valid(target)
            slope = 2 * strength * z * factor
            penalty = metrics.probabilities_times(logits, found, slope, valid, self._like(out))
        values, grad = loss.rows(logits, target, factor, out)
        values = values + (strength * z.square()).to(values.dtype)
        if grad is not None and penalty is not None:
            grad.add_(penalty)
        return values, grad

    def _statistics(self, statistics: Tensor, logits: Tensor, part: slice) -> Tensor:
        if part.start not in self._known:  # a backward pass has them from the forward pass
            statistics[part] = metrics.row_statistics(
                logits, self.target[part], self.ignore_index, self.group, split=self.split
            )
            self._known.add(part.start)
        return statistics[part]

    def _valid(self, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return torch.ones(len(target), dtype=torch.bool, device=target.device)
        return target != self.ignore_index

    def _label_weight(self, target: Tensor) -> float | Tensor:
        """The class weight of the labels, (N,) float64, or 1."""
        if self.weight is None:
            return 1.0
        if target.is_floating_point():
            return row_sum(target.double() * self.weight.double())
        return self.weight.double()[target.masked_fill(target == self.ignore_index, 0)]

    def _like(self, out: Tensor) -> Tensor:
        """A buffer for the gradient of the penalty; the first chunk is the largest."""
        if self._penalty is None or len(self._penalty) < len(out):
            self._penalty = torch.empty_like(out)
        return self._penalty[: len(out)]
