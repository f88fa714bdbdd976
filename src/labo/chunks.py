"""What the chunk loops of :func:`labo.linear_loss` share: the rows of a chunk, and the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import metrics
from .fast.dispatch import FastRows
from .rows import row_sum, times

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


class ChunkLoss(Protocol):
    """A loss for the rows of one chunk, as :class:`labo.fast.dispatch.FastRows` is."""

    def rows(
        self, logits: Tensor, target: Tensor, factor: Factor, out: Tensor
    ) -> tuple[Tensor, Tensor | None]: ...


class ChunkRows:
    """A loss on the rows of a call, with the statistics of the rows if they are asked for.

    Args:
        target: (N,) class indices or (N, V) class probabilities.
        for_chunk: the loss for a chunk.
        ignore_index: target of rows that do not count.
        measure: whether the statistics are asked for.
        group: the processes that hold the other columns of the logits, if ``divided``.
        divided: whether there are other columns.

    Attributes:
        statistics: (N, 5), see :func:`labo.metrics.row_statistics`; None if not asked for.
    """

    def __init__(
        self,
        target: Tensor,
        for_chunk: Callable[[slice], ChunkLoss],
        ignore_index: int,
        measure: bool,
        group: Any = None,
        *,
        divided: bool = False,
    ) -> None:
        self.target = target
        self.for_chunk = for_chunk
        self.ignore_index = ignore_index
        self.group, self.divided = group, divided
        self.statistics: Tensor | None = None
        self._known: set[int] = set()  # first rows of the chunks whose statistics are there
        if measure:
            shape = (len(target), metrics.COLUMNS)
            self.statistics = torch.empty(shape, dtype=torch.float64, device=target.device)

    def __call__(
        self, logits: Tensor, part: slice, factor: Factor, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Values and gradient, as :meth:`labo.fast.dispatch.FastRows.rows` gives them."""
        target, loss, statistics = self.target[part], self.for_chunk(part), self.statistics
        if statistics is not None:
            if isinstance(loss, FastRows) and loss.measures(logits):
                return loss.rows(logits, target, factor, out, statistics[part])
            if part.start not in self._known:  # a backward pass has them from the forward pass
                statistics[part] = metrics.row_statistics(
                    logits, target, self.ignore_index, self.group, divided=self.divided
                )
                self._known.add(part.start)
        return loss.rows(logits, target, factor, out)
