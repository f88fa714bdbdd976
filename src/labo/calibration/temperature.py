r"""Temperature scaling: one number that divides all logits, fitted on held-out data.

:math:`p = \mathrm{softmax}(z / T)`. The prediction does not change, its confidence does. This is
the remedy for what smoothing does to probabilities: a model trained with label smoothing or LABO
is underconfident, and one temperature below 1 corrects most of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rows import Rows
from ._batches import Batches, blocks

_MOST_PASSES = 40  # three to five are usual
_SETTLED = 1e-5  # relative; what is left after a step this small is about its cube
_LARGEST_STEP = 16.0  # factor


class TemperatureError(ValueError):
    """The negative log-likelihood has no minimum over the temperatures; says why."""


@dataclass(frozen=True)
class TemperatureFit:
    """A fitted temperature.

    Attributes:
        temperature: T; above 1 for an overconfident model, below 1 for an underconfident one.
        nll_before: mean negative log-likelihood at T = 1, in nats.
        nll_after: the same at the fitted temperature.
        count: how many targets it was fitted on.
    """

    temperature: float
    nll_before: float
    nll_after: float
    count: int


@torch.no_grad()
def fit_temperature(
    logits: Tensor | Batches,
    target: Tensor | None = None,
    *,
    ignore_index: int = -100,
    dim: int = -1,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> TemperatureFit:
    r"""The temperature that minimizes the negative log-likelihood (Guo et al. 2017).

    .. math:: T^* = \arg\min_T -\frac1N \sum_n \log \mathrm{softmax}(z_n / T)_{y_n}

    In :math:`s = 1/T` the NLL is convex. Its derivatives are the cumulants of the logits under
    softmax(s z), summed in float64. Halley's method finds the root of the first derivative, kept
    inside an interval at whose ends its sign differs. Each step is one pass over the data. Three
    to five passes are usual, and the memory does not grow with the data.

    Fit on data that the model was not trained on.

    Args:
        logits: (..., K), or batches: an iterable of pairs (logits, target) that can be read
            repeatedly, such as a list, or a function that returns a new iterator each time, such as
            ``lambda: ((model(x), y) for x, y in loader)``. No gradients are recorded. Every pass
            must see the same logits: put the model in eval mode. -inf masks a class.
        target: (...) class indices, or (..., K) class probabilities.
        ignore_index: rows with this target do not count.
        dim: the dimension of the classes.
        reduce: for several processes, each with its own share of the batches: sums a float64
            tensor on the CPU over the processes and returns it. All processes get the same fit.

    Returns:
        The temperature, and the NLL before and after.

    Raises:
        TemperatureError: no temperature is best. Every prediction is right (the NLL falls as T
            goes to 0), the labels are no likelier than chance (it falls as T grows), or the logits
            of each row are all equal.
        ValueError: no row counts, the label of a row has logit -inf, or the logits changed from
            one pass to the next.

    Example:
        >>> logits = torch.tensor([[0.9, 0.1]]).log().expand(4, 2)  # 90 % sure
        >>> fit = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))  # 75 % right
        >>> round(fit.temperature, 4), round(fit.nll_before, 4), round(fit.nll_after, 4)
        (2.0, 0.6547, 0.5623)
        >>> (logits[0] / fit.temperature).softmax(-1)
        tensor([0.7500, 0.2500])
    """
    if isinstance(logits, Iterator):
        raise TypeError(
            "fit_temperature reads its batches several times, and an iterator can be read once: "
            "give a list, or a function that returns a new iterator"
        )

    def curve(s: float) -> _Curve:
        sums = torch.zeros(_Curve.SIZE, dtype=torch.float64)
        for rows in blocks(logits, target, ignore_index, dim):
            sums += _cumulants(rows, s)
        return _Curve.of(s, sums if reduce is None else reduce(sums))

    here = first = curve(1.0)
    _must_have_minimum(first)
    s, low, high = 1.0, 0.0, math.inf
    for _ in range(_MOST_PASSES):
        step = here.halley_step()
        if abs(step) <= _SETTLED:
            break
        low, high = (s, high) if here.slope < 0 else (low, s)
        s = _inside(s + step * s, s, low, high)
        here = curve(s)
        here.must_be_of_the_same_logits(first)
    else:
        raise ValueError(
            f"the temperature did not settle in {_MOST_PASSES} passes: every pass must see the "
            "same logits (is the model in eval mode?)"
        )
    # The step is too small for another pass: the Taylor series is exact to rounding.
    nll = here.nll + step * here.slope + step**2 / 2 * here.curvature
    return TemperatureFit(1 / (s + step * s), first.nll, nll, int(first.count))


@dataclass(frozen=True)
class _Curve:
    """The mean NLL at some s = 1/T, its derivatives there, and its slopes at both ends.

    The k-th derivative is multiplied by s^k: so it does not depend on the scale of the logits.
    """

    SIZE = 7

    s: float
    count: float
    nll: float
    slope: float
    curvature: float
    third: float
    slope_at_zero: float
    slope_at_infinity: float

    @classmethod
    def of(cls, s: float, sums: Tensor) -> _Curve:
        count, *totals = sums.tolist()
        if not count:
            raise ValueError("there is nothing to fit a temperature on: no target counts")
        return cls(s, count, *(total / count for total in totals))

    def halley_step(self) -> float:
        """Towards the root of the slope, relative to s; NaN where the slope is near its limit.

        There the derivatives vanish exponentially, and a step would be tiny however far the root.
        """
        divisor = 2 * self.curvature**2 - self.slope * self.third
        if self.slope > 0.9 * self.slope_at_infinity or not divisor > 0:
            return math.nan
        return -2 * self.slope * self.curvature / divisor

    def must_be_of_the_same_logits(self, first: _Curve) -> None:
        # This slope does not depend on s but for its factor. Rounding may differ from pass to pass,
        # dropout differs by far more.
        mine, others = self.slope_at_infinity / self.s, first.slope_at_infinity / first.s
        if self.count != first.count or not math.isclose(mine, others, rel_tol=1e-4):
            raise ValueError(
                "the batches changed from one pass to the next: every pass must see the same "
                "targets and logits (is the model in eval mode?)"
            )


def _must_have_minimum(curve: _Curve) -> None:
    """The slope must be below 0 at s = 0 and above 0 at s = infinity."""
    if curve.slope_at_infinity == 0 and curve.slope_at_zero == 0:
        raise TemperatureError(
            "no temperature is best: the logits of each row are all equal, so that none changes "
            "the probabilities"
        )
    if curve.slope_at_infinity == 0:
        raise TemperatureError(
            f"no temperature is best: all {curve.count:.0f} predictions are right, so that the NLL "
            "falls towards 0 as T does; fit on data with errors"
        )
    if curve.slope_at_zero >= 0:
        raise TemperatureError(
            "no temperature is best: the labels have no higher logits than the other classes on "
            "average, so that the NLL falls as T grows without end (do the targets fit the logits?)"
        )


def _inside(proposed: float, s: float, low: float, high: float) -> float:
    """The proposed point, or another one strictly between the bounds if it is not or is far."""
    if low < proposed < high and s / _LARGEST_STEP <= proposed <= s * _LARGEST_STEP:
        return proposed
    return math.sqrt(max(low, s / _LARGEST_STEP**2) * min(high, s * _LARGEST_STEP**2))


def _cumulants(rows: Rows, s: float) -> Tensor:
    """The sums over rows that make a :class:`_Curve`, (7,) in float64 on the CPU.

    With x = s (z - max z), and <.> the mean under softmax(x), the NLL of a row is
    log sum exp(x) - x_label. Its derivatives are the cumulants <x> - x_label, <x^2> - <x>^2, ...
    """
    masked = rows.logits == -math.inf
    x = (rows.logits - rows.logits.amax(-1, keepdim=True)).mul_(s).masked_fill_(masked, 0.0)
    label = rows.pick(x)
    if bool(rows.pick(masked.to(x.dtype)).any()):
        raise TemperatureError(
            "a label has the logit -inf: its NLL is infinite at every temperature"
        )
    power = x.exp().masked_fill_(masked, 0.0)
    total = power.sum(-1)
    first, second, third = (power.mul_(x).sum(-1) / total for _ in range(3))
    columns = (
        torch.ones_like(total),
        total.log() - label,
        first - label,
        second - first**2,
        third - 3 * first * second + 2 * first**3,
        x.sum(-1) / (x.shape[-1] - masked.sum(-1)) - label,
        -label,
    )
    return torch.stack(columns).cpu().double().sum(-1)
