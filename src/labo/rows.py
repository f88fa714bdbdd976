"""What every loss shares: precision, class layout, ignored rows, class weights, reduction.

A loss builds a :class:`Rows` from its arguments, computes one value per row, and passes the values
to :meth:`Rows.reduce`. No loss handles shapes or reductions itself.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor

from . import _checks


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half types, otherwise the same. The precision rule of the library."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def exact(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of sums: float64, or ``dtype`` on a device that has no float64."""
    if device.type == "xpu" and not torch.compiler.is_compiling():
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else wide(dtype)
    return wide(dtype) if device.type == "mps" else torch.float64


def upcast(x: Tensor) -> Tensor:
    """Half types to float32; float32 and float64 stay."""
    return x.to(wide(x.dtype))


SPLIT = 1 << 15  # PyTorch's grain size: shorter sums are computed by one thread


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension. The bits of a row depend on that row alone.

    PyTorch splits a long sum with a single result over threads, so its bits depend on the number
    of threads. A sum with two results is split between them instead, so a single row is summed
    twice, in the time of one.
    """
    # Under torch.compile the order of a sum is the compiler's, and a test of the length would
    # compile once more for lengths on the other side of it.
    if not torch.compiler.is_compiling() and x.numel() == x.shape[-1] >= SPLIT:
        return x.expand(2, *x.shape).sum(-1)[0]
    return x.sum(-1)


def spread(x: Tensor, num_classes: int) -> Tensor:
    """A value per row, (M,), repeated for each class, (M, K).

    The backward pass sums over the classes. As in :func:`row_sum`, the bits of a row depend on that
    row alone; plain broadcasting does not guarantee this for a single row.
    """
    if not torch.compiler.is_compiling() and x.numel() == 1 and num_classes >= SPLIT:
        return x.expand(2, *x.shape).unsqueeze(-1).expand(2, *x.shape, num_classes)[0]
    return x.unsqueeze(-1).expand(*x.shape, num_classes)


def times(factor: float | Tensor, x: Tensor) -> Tensor:
    """``factor * x`` with 0 * inf = 0, in value and in gradient. 0 * NaN is NaN."""
    if isinstance(factor, Tensor):
        return factor * x.masked_fill((factor == 0) & x.isinf(), 0.0)
    return factor * (x if factor != 0 else x.masked_fill(x.isinf(), 0.0))


def shifted(logits: Tensor) -> Tensor:
    """Logits whose differences are finite where the logits are: for softmax near the limits.

    softmax does not change when a number is subtracted from all logits. Where a difference to the
    maximum overflows, the result has the maximum subtracted, and the lowest finite number for a
    finite logit that is further below. -inf stays reserved for masked classes.
    """
    if logits.numel() == 0:
        return logits
    limits = torch.finfo(logits.dtype)
    # No finite number overflows when so small a one is subtracted.
    if _checks.can_read(logits) and bool(logits.amax() <= limits.max * limits.eps / 4):
        return logits
    top = logits.detach().amax(-1, keepdim=True)
    u = logits - top.masked_fill(top == -math.inf, 0.0)
    overflown = (u == -math.inf) & (logits != -math.inf)
    # The second term is 0 and has the gradient 1.
    return torch.where(overflown, limits.min + (logits - logits.detach()), u)


def zero_log(log_p: Tensor) -> Tensor:
    """log p with 0 for masked classes, so that p log p and its gradient are 0 there."""
    return log_p.masked_fill(log_p == -math.inf, 0.0)


def kl_divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum_j a_j log(a_j / b_j) over the last dimension, for logarithms, with 0 log 0 = 0."""
    a = log_a.exp()
    return row_sum(a * (zero_log(log_a) - log_b.masked_fill(a == 0, 0.0)))


def entropy(log_p: Tensor) -> Tensor:
    """H(p) in nats over the last dimension, with 0 log 0 = 0."""
    return -row_sum(log_p.exp() * zero_log(log_p))


_GROUP = 64


def largest(logits: Tensor, k: int) -> Tensor:
    """The k largest entries of each row, (N, min(k, K)), in descending order.

    They lie in the k groups of neighbours with the largest maxima, or in the rest that makes no
    whole group. A maximum takes one fast reading, and what is sorted is short.
    """
    classes = logits.shape[1]
    groups = classes // _GROUP
    if groups <= 2 * k:
        return logits.topk(min(k, classes), 1).values
    whole = logits[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    at = whole.amax(2).topk(k, 1).indices
    inside = whole.gather(1, at.unsqueeze(2).expand(-1, -1, _GROUP)).flatten(1)
    return torch.cat([inside, logits[:, groups * _GROUP :]], 1).topk(k, 1).values


def teacher_rows(name: str, given: Any, logits: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Teacher logits as rows without a graph, (M, K); see :func:`other_rows`."""
    return other_rows(name, given, logits, shape, dim).detach()


def other_rows(name: str, given: Any, logits: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Other logits for the same samples as rows, (M, K), once they are known to fit.

    Args:
        name: of the argument.
        given: (..., K), or classes in ``dim``.
        logits: (M, K), those of the model.
        shape: (...) of the samples.
        dim: the dimension of the classes.
    """
    if not isinstance(given, Tensor):
        raise _checks.TeacherError(
            f"this loss needs {name}: the logits of a teacher or a second pass, of the same shape"
        )
    given = _checks.local(name, given)
    wanted = (*shape, logits.shape[1])
    if given.dim() != len(wanted) or given.movedim(dim, -1).shape != wanted:
        raise _checks.TeacherError(
            f"{name} must have the shape of the logits, got {tuple(given.shape)} "
            f"for {logits.shape[1]} classes and targets of shape {tuple(shape)}"
        )
    _checks.check_devices(logits, **{name: given})
    return given.movedim(dim, -1).reshape(logits.shape)


def log_sum(logits: Tensor) -> Tensor:
    """log sum exp per row; -inf without a gradient if all entries are -inf."""
    top = logits.detach().amax(-1)
    top = top.masked_fill(top == -math.inf, 0.0)
    return top + log_or_none(row_sum((logits - top.unsqueeze(-1)).exp()))


def log_or_none(total: Tensor) -> Tensor:
    """The log of a sum; -inf without a gradient if it is 0 because there is no class."""
    empty = total == 0
    return total.masked_fill(empty, 1.0).log().masked_fill(empty, -math.inf)


def u_of(z: Tensor, top: Tensor, limits: torch.finfo) -> Tensor:
    """u of single logits, float64: -inf if one is masked, else within the limits."""
    u = z - top
    return u if limits.bits == 64 else torch.where(z.isinf(), z, u.clamp(limits.min, limits.max))


def over_tau(x: Tensor, tau: float | Tensor) -> Tensor:
    """x / tau; -inf, without a gradient for tau, where x is -inf."""
    masked = x == -math.inf
    return (x.masked_fill(masked, 0.0) / tau).masked_fill(masked, -math.inf)


def spread_of(logits: Tensor, masked: Tensor, centered: bool) -> Tensor:
    """max(|z|, 0.001) + 1e-7 per row, or max(|z - mean z|, 0.001) / sqrt(n - 1) + 1e-7.

    Over the n classes that are not masked; 1e-7 is from the authors' code.
    """
    z = logits.masked_fill(masked, 0.0)
    size = z.detach().abs().amax(-1, keepdim=True).clamp(min=1e-3)
    z = z / size  # squares do not overflow
    per_root: float | Tensor = 1.0
    if centered:
        count = row_sum((~masked).to(z.dtype))
        mean = spread(row_sum(z) / count.clamp(min=1), z.shape[-1])
        z = (z - mean).masked_fill(masked, 0.0)
        per_root = 1 / (count - 1).clamp(min=1).sqrt()
    # The length is at least 0.001: below that it has no gradient.
    least = (1e-3 / size.squeeze(-1)).square()
    length = size.squeeze(-1) * row_sum(z.square()).clamp(min=least).sqrt()
    return length * per_root + 1e-7


class Rows:
    """Logits and labels as rows of classes.

    Attributes:
        logits: (M, K), at least float32.
        shifted: the logits as softmax takes them, see :func:`shifted`.
        target: (M,) class indices with ignored rows set to 0, or (M, K) class probabilities.
        soft: whether the target has class probabilities.
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
        """Check the arguments, which are those of every loss, and bring them into rows.

        ``linear`` tells whether the loss is linear in the label, and so takes class probabilities.
        """
        _checks.check_tensors(logits, target)
        logits, target = _checks.local("logits", logits), _checks.local("target", target)
        _checks.check_logits(logits, dim)
        self.soft = _checks.check_target(logits.shape, target, dim)
        if self.soft and not linear:
            raise ValueError(
                "this loss is not linear in the label and takes class indices only; for mixed "
                "labels, add up the losses of the two labels with their weights"
            )
        if self.soft and ignore_index >= 0:
            raise ValueError("ignore_index needs class-index targets, got class probabilities")
        num_classes = logits.shape[dim]
        _checks.check_weight(weight, num_classes)
        _checks.check_devices(logits, target=target, weight=weight)
        self.reduction = reduction
        self.dim = dim
        self.shape = logits.movedim(dim, -1).shape[:-1]
        self.logits = self.flatten(upcast(logits))
        self.weight = None if weight is None else weight.to(self.logits.dtype)
        self.valid: Tensor | None = None
        if self.soft:
            _checks.check_distribution("probability targets", self.flatten(target))
            self.target = self.flatten(target).to(self.logits.dtype)
        else:
            _checks.check_range(target.long(), num_classes, ignore_index)
            self.target = target.long().reshape(-1)
            valid = self.target != ignore_index
            if not (_checks.can_read(valid) and bool(valid.all())):
                self.valid = valid
                self.target = self.target.masked_fill(~valid, 0)
                self.logits = self.of_valid(self.logits)
        self.shifted = shifted(self.logits)

    def of_valid(self, x: Tensor) -> Tensor:
        """0 in ignored rows: nothing in them, NaN included, may reach values or gradients."""
        return x if self.valid is None else x.masked_fill(~self.valid.unsqueeze(-1), 0.0)

    def count(self) -> Tensor:
        """The number of classes that are not masked, (M,)."""
        return row_sum((self.logits != -math.inf).to(self.logits.dtype))

    @property
    def num_classes(self) -> int:
        return self.logits.shape[-1]

    def flatten(self, x: Tensor) -> Tensor:
        """A tensor of the layout of the logits as (M, K)."""
        x = x.movedim(self.dim, -1)
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def per_row(self, name: str, x: Any) -> Any:
        """A hyper-parameter: a number, a tensor without dimensions, or one value per row, (M,)."""
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x
        if x.shape != self.shape:
            raise ValueError(
                f"{name} must be a number or have the shape {tuple(self.shape)} of the samples, "
                f"got {tuple(x.shape)}"
            )
        return x.reshape(-1).to(self.logits.dtype)

    def having(self, logits: Tensor) -> Rows:
        """The rows with the same labels and other logits, (M, K)."""
        other = copy(self)
        other.logits, other.shifted = logits, shifted(logits)
        return other

    def mask(self, classes: Tensor) -> None:
        """Mask further classes, (M, K) bool."""
        self.logits = self.logits.masked_fill(classes, -math.inf)
        self.shifted = shifted(self.logits)

    def other(self, name: str, logits: Tensor | None) -> Tensor:
        """Other logits for the same samples as rows, (M, K), in their graph.

        A class that is masked here (logit -inf) is masked there too. Ignored rows become uniform.
        """
        given = other_rows(name, logits, self.logits, self.shape, self.dim)
        rows = self.of_valid(upcast(given).to(self.logits.dtype))
        return rows.masked_fill(self.logits == -math.inf, -math.inf)

    def teacher(self, name: str, logits: Tensor | None) -> Tensor:
        """Teacher logits as rows without a graph, (M, K); masked as :meth:`other` says."""
        return self.other(name, logits).detach()

    def log_probabilities(self, tau: float = 1.0) -> Tensor:
        """log softmax(z / tau), (M, K)."""
        return torch.log_softmax(self.shifted if tau == 1 else self.shifted / tau, -1)

    def without_label(self) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probabilities of the classes other than the label among themselves, (M, K).

        And the classes that are left out, (M, K), and the rows that have no other class, (M,), from
        which nothing is left out.
        """
        absent = self.is_label() | (self.logits == -math.inf)
        alone = absent.all(-1)
        absent = absent & ~alone.unsqueeze(-1)
        others = shifted(self.logits.masked_fill(absent, -math.inf))
        return torch.log_softmax(others, -1), absent, alone

    def label(self) -> Tensor:
        """The label as a distribution, (M, K): the probabilities, or one-hot."""
        return self.target if self.soft else self.is_label().to(self.logits.dtype)

    def is_label(self) -> Tensor:
        """(M, K) bool: which class is the label."""
        classes = torch.arange(self.num_classes, device=self.target.device)
        return self.target.unsqueeze(-1) == classes

    def pick(self, x: Tensor) -> Tensor:
        """sum_j label_j x_j, (M,), for x of shape (M, K) or (K,)."""
        if self.soft:
            return row_sum(times(self.target, x))
        if x.dim() == 1:
            return x[self.target]
        return x.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)

    def nll(self, log_p: Tensor) -> Tensor:
        """Cross entropy with the label, (M,): -sum_j w_j label_j log p_j."""
        return -self.pick(log_p if self.weight is None else times(self.weight, log_p))

    def cross_entropy(self, q: Tensor, log_p: Tensor) -> Tensor:
        """Cross entropy with a distribution q, (M,): -sum_j w_j q_j log p_j, with 0 log 0 = 0."""
        return -row_sum(times(q if self.weight is None else q * self.weight, log_p))

    def weigh(self, penalty: Tensor) -> Tensor:
        """A term that is not a sum over the label, times the weight of the label, (M,).

        Equal class weights then cancel in the mean, as they do for the cross entropy.
        """
        return penalty if self.weight is None else times(self.pick(self.weight), penalty)

    def denominator(self) -> Tensor:
        """What the mean divides by, as in ``F.cross_entropy``: the weights of the labels."""
        rows = self.logits.shape[0]
        if self.soft:
            return self.logits.new_full((), rows)
        counts = self.logits.new_ones(rows) if self.weight is None else self.pick(self.weight)
        if self.valid is not None:
            counts = counts.masked_fill(~self.valid, 0.0)
        return row_sum(counts)

    def reduce(self, values: Tensor) -> Tensor:
        """Per-row values (M,) to the result. Ignored rows do not count.

        The mean is 0 if no row counts or all labels have weight 0.
        """
        if self.valid is not None:
            values = values.masked_fill(~self.valid, 0.0)
        if self.reduction == "none":
            return values.reshape(self.shape)
        total = row_sum(values)
        if self.reduction == "sum":
            return total
        denominator = self.denominator()
        return total / denominator.masked_fill(denominator == 0, math.inf)


def weighted_total(
    token_weight: Tensor | None, target: Tensor, ignore_index: int, class_weight: Tensor | None
) -> float | Tensor:
    """What a mean divides by: the weights of the rows that count; inf if that would be 0."""
    if token_weight is None:
        counts = torch.ones(len(target), dtype=torch.float64, device=target.device)
    else:
        counts = token_weight.double()
    if not target.is_floating_point():
        valid = target != ignore_index
        if class_weight is not None:
            inside = target.clamp(0, len(class_weight) - 1)  # the range is checked elsewhere
            counts = counts * class_weight.double()[inside]
        counts = counts.masked_fill(~valid, 0.0)
    total = counts.sum()
    total = total.masked_fill(total == 0, math.inf)
    total = total if token_weight is None else total.to(token_weight.dtype)
    return float(total) if _checks.can_read(total) else total
