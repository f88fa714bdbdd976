"""The rules every loss shares: precision, class layout, ignored rows, class weights, reduction.

A loss turns its arguments into a :class:`Rows`, computes one value per row, and hands the values
to :meth:`Rows.reduce`. Nothing else in the library knows about shapes or reductions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks


def upcast(x: Tensor) -> Tensor:
    """Half types to float32; float32 and float64 stay. The one precision rule of the library."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


_SPLIT = 1 << 15  # PyTorch's grain size: shorter sums stay in one thread


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension; the bits of a row depend on nothing but that row.

    PyTorch splits a long sum with a single result over threads, so that its bits change with their
    number. Two results are never split within a row: a lone row is summed twice, at the cost of
    one.
    """
    if x.numel() == x.shape[-1] >= _SPLIT and not torch.compiler.is_compiling():
        return x.expand(2, *x.shape).sum(-1)[0]
    return x.sum(-1)


def zero_log(log_p: Tensor) -> Tensor:
    """log p with 0 for masked classes, so that p log p is 0 there, and its gradient too."""
    return log_p.masked_fill(log_p == -math.inf, 0.0)


def entropy(log_p: Tensor) -> Tensor:
    """H(p) in nats over the last dimension, with 0 log 0 = 0."""
    return -row_sum(log_p.exp() * zero_log(log_p))


class Rows:
    """Logits and labels as rows of classes.

    Attributes:
        logits: (M, K), at least float32.
        target: (M,) class indices with ignored rows set to 0, or (M, K) class probabilities.
        soft: whether the target holds probabilities.
        valid: (M,) False for ignored rows, or None if there cannot be any.
        weight: (K,) class weights, or None.
    """

    def __init__(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        *,
        linear: bool = True,
    ) -> None:
        """Check the arguments and lay them out.

        Args:
            logits: (..., K), or classes in ``dim``.
            target: (...) class indices, or probabilities of the shape of ``logits``.
            weight: (K,) class weights.
            ignore_index: rows with this target do not count.
            reduction: "none", "mean" or "sum".
            dim: the dimension of the classes.
            linear: whether the loss is linear in the label, so that probabilities make sense.
        """
        _checks.check_hyper(reduction=reduction)
        logits, target = _checks.local("logits", logits), _checks.local("target", target)
        _checks.check_logits(logits, dim)
        soft = _checks.check_target(logits.shape, target, dim)
        if soft and not linear:
            raise ValueError(
                "this loss is not linear in the label: give class indices; for mixed labels, "
                "weight the losses of the two labels"
            )
        if soft and ignore_index >= 0:
            raise ValueError("ignore_index needs class-index targets, got class probabilities")
        num_classes = logits.shape[dim]
        _checks.check_weight(weight, num_classes)
        self.reduction = reduction
        self.dim = dim
        self.logits = self.flatten(upcast(logits))
        self.shape = logits.movedim(dim, -1).shape[:-1]
        self.weight = None if weight is None else weight.to(self.logits.dtype)
        self.valid: Tensor | None = None
        self.soft = soft
        if soft:
            self.target = self.flatten(upcast(target)).to(self.logits.dtype)
            _checks.check_distribution("probability targets", self.target)
            return
        _checks.check_range(target, num_classes, ignore_index)
        self.target = target.reshape(-1).long()
        valid = self.target != ignore_index
        if _checks.values_at_hand(valid) and bool(valid.all()):
            return
        self.valid = valid
        self.target = self.target.masked_fill(~valid, 0)
        # What an ignored row holds, NaN included, must reach neither values nor gradients.
        self.logits = self.logits.masked_fill(~valid.unsqueeze(-1), 0.0)

    @property
    def num_classes(self) -> int:
        return self.logits.shape[-1]

    def flatten(self, x: Tensor) -> Tensor:
        """A tensor of the layout of the logits as (M, K)."""
        x = x.movedim(self.dim, -1)
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def second(self, name: str, logits: Tensor) -> Tensor:
        """A second set of logits as constant rows, masked where the first is.

        A class that is not there for the student (logit -inf) is not there for the teacher
        either; ignored rows become uniform.
        """
        logits = _checks.local(name, logits)
        if logits.movedim(self.dim, -1).shape != (*self.shape, self.num_classes):
            raise ValueError(
                f"{name} must have the shape of the logits, got {tuple(logits.shape)} "
                f"for {self.num_classes} classes and targets of shape {tuple(self.shape)}"
            )
        rows = self.flatten(upcast(logits.detach())).to(self.logits.dtype)
        if self.valid is not None:
            rows = rows.masked_fill(~self.valid.unsqueeze(-1), 0.0)
        return rows.masked_fill(self.logits == -math.inf, -math.inf)

    def log_probabilities(self, tau: float = 1.0) -> Tensor:
        """log softmax(z / tau), (M, K)."""
        return torch.log_softmax(self.logits if tau == 1 else self.logits / tau, -1)

    def label(self) -> Tensor:
        """The label as a distribution, (M, K): the probabilities, or one-hot."""
        if self.soft:
            return self.target
        classes = torch.arange(self.num_classes, device=self.target.device)
        return (self.target.unsqueeze(-1) == classes).to(self.logits.dtype)

    def pick(self, x: Tensor) -> Tensor:
        """sum_j label_j x_j, (M,), for x of shape (M, K) or (K,)."""
        if self.soft:
            return row_sum(_product(self.target, x))
        if x.dim() == 1:
            return x[self.target]
        return x.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)

    def nll(self, log_p: Tensor) -> Tensor:
        """Cross entropy with the label, (M,): -sum_j w_j label_j log p_j."""
        return -self.pick(log_p if self.weight is None else _product(self.weight, log_p))

    def cross_entropy(self, q: Tensor, log_p: Tensor) -> Tensor:
        """Cross entropy with a distribution q, (M,): -sum_j w_j q_j log p_j, with 0 log 0 = 0."""
        return -row_sum(_product(q if self.weight is None else q * self.weight, log_p))

    def weigh(self, penalty: Tensor) -> Tensor:
        """A term that is no sum over a label takes the weight of the label, (M,).

        So equal weights cancel in the mean, as they do for the cross entropy.
        """
        return penalty if self.weight is None else penalty * self.pick(self.weight)

    def denominator(self) -> Tensor:
        """What the mean divides by, as F.cross_entropy: weights of the labels that count."""
        rows = self.logits.shape[0]
        if self.soft:
            return self.logits.new_full((), rows)
        counts = self.logits.new_ones(rows) if self.weight is None else self.pick(self.weight)
        if self.valid is not None:
            counts = counts.masked_fill(~self.valid, 0.0)
        return row_sum(counts)

    def reduce(self, values: Tensor) -> Tensor:
        """Per-row values (M,) to the result; ignored rows count nothing, no rows give 0."""
        if self.valid is not None:
            values = values.masked_fill(~self.valid, 0.0)
        if self.reduction == "none":
            return values.reshape(self.shape)
        total = row_sum(values)
        if self.reduction == "sum":
            return total
        denominator = self.denominator()
        return total / denominator.masked_fill(denominator == 0, 1.0)


def _product(q: Tensor, x: Tensor) -> Tensor:
    """q_j x_j with 0 * -inf = 0, in value and in gradient; q_j > 0 keeps an infinite x_j."""
    return q * x.masked_fill((q == 0) & (x == -math.inf), 0.0)
