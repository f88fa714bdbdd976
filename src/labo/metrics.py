r"""What training logs beside the loss, from the logits of a chunk before they are overwritten.

One pass over the logits gives the maximum, :math:`\sum e^u` and :math:`\sum u e^u` of each row
(u = z - maximum). The negative log-likelihood, the entropy of the prediction, the log-sum-exp and
the adaptive alpha of LABO follow from them. See ``return_metrics`` of :func:`labo.linear_loss`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fast.columns import SUMS, RowInputs
from .fast.dispatch import backend_of
from .fast.formula import statistics_of
from .rows import row_sum, times
from .sums import UE, Passes

# The columns of the statistics of the rows.
NLL, ENTROPY, CORRECT, MAXIMUM, LOG_E = range(5)
COLUMNS = 5


class LossMetrics(NamedTuple):
    """Sums over the rows that count, or one number per row; float64 and without a graph.

    Rows with the target ``ignore_index`` do not count. Class weights and token weights do not
    apply, and the z-loss is not included. Divide by ``targets`` for means, or call :meth:`means`.

    Attributes:
        targets: number of rows that count.
        nll: negative log-likelihood of the targets.
        entropy: entropy of the predictions, in nats.
        correct: number of rows whose target has the highest logit. Ties are correct.
        alpha: weight of the smoothing distribution: the adaptive alpha of LABO, the constant alpha
            of other smoothing losses, 0 for a loss without one.
        z_squared: squares of the log-sum-exp of the logits.
    """

    targets: Tensor
    nll: Tensor
    entropy: Tensor
    correct: Tensor
    alpha: Tensor
    z_squared: Tensor

    def means(self) -> dict[str, float]:
        """Means over the rows that count, for a logger; ``{}`` if there is none."""
        count, *sums = torch.stack([x.sum() for x in self]).tolist()
        if count == 0:
            return {}
        names = ("nll", "entropy", "accuracy", "alpha", "z_squared")
        return {name: total / count for name, total in zip(names, sums, strict=True)}

    def plus(self, other: LossMetrics) -> LossMetrics:
        """The metrics of the rows of both, for example of two micro-batches."""
        return LossMetrics(*(a + b for a, b in zip(self, other, strict=True)))


def row_statistics(
    logits: Tensor, target: Tensor, ignore_index: int, columns: Any = None
) -> Tensor:
    """(N, 5) float64: NLL, entropy, whether the target is highest, maximum, log of the sum of e.

    Args:
        logits: (N, K), or the columns of this process.
        target: (N,) class indices, or (N, K) class probabilities. The NLL is then the cross
            entropy, and the most probable class of the target is to be highest.
        ignore_index: target of rows that do not count, which are 0.
        columns: :class:`labo.heads.split.Columns`, if other processes hold other columns.
    """
    soft = target.is_floating_point()
    labels = target.argmax(1) if soft else target
    sums = backend_of(logits).sums(logits, RowInputs(labels, Passes(UE), None, ignore_index))
    maximum, e, ue = (sums[:, SUMS.index(name)] for name in ("top", "e", "ue"))
    width, valid, column = logits.shape[1], labels != ignore_index, labels
    if columns is not None:
        from .heads import split

        here, maximum = maximum, split.reduced(maximum, columns.group, "MAX")
        e, ue = split.moved(split.drop_of(here, maximum), e, ue)
        column = labels - columns.start
    mine = valid & (column >= 0) & (column < width)
    z_y = torch.zeros_like(maximum)
    if width:
        picked = logits.gather(1, column.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
        z_y = torch.where(mine, picked.double(), z_y)
    if columns is not None:
        e, ue, z_y = split.reduced(torch.stack([e, ue, z_y]), columns.group).unbind()
    columns = statistics_of({"e": e, "ue": ue, "top": maximum, "u_y": z_y - maximum})
    if soft:
        q, u = target.double(), logits.double() - maximum.unsqueeze(1)
        columns[NLL] = columns[LOG_E] * row_sum(q) - row_sum(times(q, u))
    return torch.stack(columns, 1).masked_fill_(~valid.unsqueeze(1), 0.0)


def loss_metrics(logits: Tensor, target: Tensor, loss: Any) -> LossMetrics:
    """The metrics of logits that are in memory, (N, K), as sums.

    Args:
        logits: (N, K).
        target: (N,) class indices or (N, K) class probabilities.
        loss: a loss Module, for its ``ignore_index`` and its alpha.
    """
    ignored = getattr(loss, "ignore_index", -100)
    statistics = row_statistics(logits.detach(), target, ignored)
    return sums_of(statistics, target, loss, logits.shape[1])


def sums_of(statistics: Tensor, target: Tensor, loss: Any, classes: int | Tensor) -> LossMetrics:
    """The metrics as sums; arguments as for :func:`rows_of`."""
    return LossMetrics(*(x.sum() for x in rows_of(statistics, target, loss, classes)))


def rows_of(statistics: Tensor, target: Tensor, loss: Any, classes: int | Tensor) -> LossMetrics:
    """The metrics of each row, (N,).

    Args:
        statistics: (N, 5), from :func:`row_statistics`.
        target: as given there.
        loss: a loss Module; its ``smoothing_weight`` is "adaptive", a number, or missing.
        classes: K, of all processes; a tensor if it cannot be read without waiting.
    """
    nll, entropy, correct, maximum, log_e = statistics.unbind(1)
    counts = torch.ones_like(nll)
    if not target.is_floating_point():
        counts = (target != getattr(loss, "ignore_index", -100)).to(counts.dtype)
    alpha = getattr(loss, "smoothing_weight", 0.0)
    if alpha == "adaptive":
        log_classes: float | Tensor
        if isinstance(classes, Tensor):
            log_classes = classes.double().log().where(classes > 1, 1.0)
        else:
            log_classes = math.log(classes) if classes > 1 else 1.0
        weight = counts - loss.rho * entropy / log_classes
    else:
        weight = counts * alpha
    return LossMetrics(counts, nll, entropy, correct, weight, (maximum + log_e).square())
