r"""Losses on logits whose columns (classes) are split over processes: vocabulary parallel.

Process s holds the columns :math:`J_s` of the logits, as a DTensor with ``Shard`` on the class
dimension, or as a plain tensor with a process group. All processes hold the same rows and the same
targets. Cross entropy, label smoothing (``convention="torch"``) and LABO are computed exactly, with
the K of the whole vocabulary, from a few sums per row:

1. each process takes the maximum of its columns, and sums over them with u = z - maximum:
   :math:`\sum e^u`, :math:`\sum u e^u` (adaptive alpha), :math:`\sum q` and :math:`\sum u q` for
   the smoothing masses q, and the last two with class weights;
2. one all-reduce (MAX) of N numbers gives the maximum of each row;
3. one all-reduce (SUM) of N times 2 to 7 numbers gives the sums, shifted to that maximum;
4. value and gradient follow from the sums. The backward pass of the logits communicates nothing.

The value is the same on every process. Call ``backward()`` on each of them, once, as for any
replicated loss: nothing is multiplied by the number of processes.

For a head, the gradient of the weight is that of the local columns; the gradient of the hidden
states is summed over the processes.

**Backends.** Each has two functions (:mod:`labo.fused.blocked`, :mod:`labo.fused.native` and
:mod:`labo.fused.kernels`):

- ``shard_sums(logits, target, spec, weight, ignore_index)``: (N, 7) float64 with the columns
  maximum, S(e), S(ue), S(q), S(uq), S(wq), S(wuq), where u = z - maximum of the *shard*. Columns
  that the loss does not need may hold anything; ignored rows are 0.
- ``shard_gradient(logits, target, spec, weight, ignore_index, results, out)``: from ``results``,
  (N, 4) float64 with the columns maximum of the *row*, from_e, from_q and at_target, the gradient
  from_e e - from_q w q, with at_target at the target; 0 for ignored rows.

Here ``target`` counts columns of the shard, and ``weight`` is that of its columns.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import _checks
from . import blocked, dispatch, native
from .spec import CROSS_ENTROPY, LABEL_SMOOTHING, LABO_ADAPTIVE, RowSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from ..losses import _Loss
    from .linear import LinearLossOptions

__all__ = ["gather_weight", "linear_loss", "logits_loss"]

# Group = dist.ProcessGroup, which exists only where PyTorch was built with torch.distributed.
Group = Any

# The columns of the sums that backends give.
_MAXIMUM, _E, _UE, _Q, _UQ, _WQ, _WUQ = range(7)
_AT_TARGET = 7  # u of the target, which comes with them

# Stands for ignore_index where targets count columns of a shard.
_IGNORED = torch.iinfo(torch.int64).min


def _columns(spec: RowSpec, weighted: bool) -> list[int]:
    """Which sums a loss needs."""
    if spec.mode == CROSS_ENTROPY:
        return [_E]
    columns = [_E, _UE, _Q] if spec.mode == LABO_ADAPTIVE else [_E, _Q]
    if weighted:
        return [*columns, _UQ, _WQ, _WUQ]
    return [*columns, _UQ] if spec.mode == LABEL_SMOOTHING else columns


def _backend(logits: Tensor) -> ModuleType:
    """The fastest backend for these logits."""
    if logits.is_cpu and native.refuses(logits) is None and logits.dtype in native.SHARD_DTYPES:
        return native
    if logits.is_cuda and dispatch._native_refuses(logits) is None:
        from . import kernels

        return kernels
    return blocked


# ------------------------------------------------------------------ communication


def _size(group: Group) -> int:
    return dist.get_world_size(group) if _initialized() else 1


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _all_reduce(x: Tensor, group: Group, op: str = "SUM") -> None:
    """In place; without ``torch.distributed`` there is one process and nothing to do."""
    if _initialized():
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group)


def _row_maximum(maximum: Tensor, width: int, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of each row, the first column of this process, and the number of all columns.

    How many columns each process has goes with the same message. The last two are tensors, so that
    no device is waited for.
    """
    count, size = len(maximum), _size(group)
    rank = dist.get_rank(group) if _initialized() else 0
    message = torch.cat([maximum, maximum.new_zeros(size)])
    message[count + rank] = width
    _all_reduce(message, group, "MAX")
    widths = message[count:].long()
    return message[:count], widths[:rank].sum(), widths.sum()


class _SumGradient(torch.autograd.Function):
    """The identity on a replicated tensor; its gradient is the sum over the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Half types are summed in float32, as between chunks.
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous()
        _all_reduce(total, ctx.group)
        return total.to(grad.dtype), None


# ------------------------------------------------------------------ rows


class _Statistics(NamedTuple):
    """What value and gradient of every row follow from; (N,) float64, the same on all processes."""

    values: Tensor
    maximum: Tensor
    from_e: Tensor
    from_q: Tensor
    at_target: Tensor
    column: Tensor  # the target as a column of this process; out of range if it is elsewhere
    start: Tensor  # the first column of this process

    def results(self, factor: float | Tensor) -> Tensor:
        """For ``shard_gradient``: the gradient of sum_i factor_i value_i."""
        scaled = [factor * x for x in (self.from_e, self.from_q, self.at_target)]
        return torch.stack([self.maximum, *scaled], 1)


class _Rows:
    """The rows of a loss whose columns are split over the processes of ``group``.

    Args:
        spec: the loss.
        target: (N,) int64, the same on all processes.
        weight: (V,) class weights of the whole vocabulary, or None.
        ignore_index: target of rows that do not count.
        group: the processes.
        keep: keep the statistics of a chunk for its gradient in the backward pass.
    """

    def __init__(
        self,
        spec: RowSpec,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        group: Group,
        keep: bool = False,
    ) -> None:
        self.spec = spec
        self.target = target
        self.weight = weight
        self.ignore_index = ignore_index
        self.group = group
        self.kept: dict[int, _Statistics] | None = {} if keep else None

    def divisor(self) -> float | Tensor:
        """What a mean divides by; 1 if nothing counts."""
        counts = self.target != self.ignore_index
        if self.weight is not None:
            inside = self.target.clamp(0, len(self.weight) - 1)  # the range is checked later
            counts = self.weight[inside].double().masked_fill(~counts, 0.0)
        total = counts.sum(dtype=torch.float64)
        total = total.masked_fill(total == 0, 1.0)
        return float(total) if _checks.values_at_hand(total) else total

    def __call__(
        self, logits: Tensor, part: slice, factor: float | Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Values of some rows, and their gradient times ``factor``; as a chunk loop calls it."""
        if self.kept is not None and part.start in self.kept:
            statistics = self.kept[part.start]
        else:
            statistics = self.statistics(logits, part)
            if self.kept is not None:
                self.kept[part.start] = statistics
        values = statistics.values.to(torch.promote_types(logits.dtype, torch.float32))
        return values, None if factor is None else self.gradient(logits, statistics, factor, out)

    def gradient(
        self, logits: Tensor, statistics: _Statistics, factor: float | Tensor, out: Tensor | None
    ) -> Tensor:
        """The gradient of sum_i factor_i value_i for the columns of this process."""
        column, weight = statistics.column, self._local(statistics.start, logits.shape[1])
        results = statistics.results(factor)
        backend = _backend(logits)
        grad: Tensor = backend.shard_gradient(
            logits, column, self.spec, weight, _IGNORED, results, out
        )
        return grad

    def statistics(self, logits: Tensor, part: slice) -> _Statistics:
        """Local sums and two all-reduces; see the module."""
        backend, spec, target = _backend(logits), self.spec, self.target[part]
        width, weighted = logits.shape[1], self.weight is not None

        def local_sums(weight: Tensor | None) -> Tensor:
            sums: Tensor = backend.shard_sums(logits, target, spec, weight, self.ignore_index)
            return sums

        # The maxima come with the sums, except that class weights are not cut to the columns of
        # this process before all processes have told how many columns they hold.
        sums = None if weighted else local_sums(None)
        maximum = _maximum(logits) if sums is None else sums[:, _MAXIMUM]
        maximum, start, classes = _row_maximum(maximum, width, self.group)
        self._check(target, classes)
        if sums is None:
            sums = local_sums(self._local(start, width))
        valid = target != self.ignore_index
        column = (target - start).masked_fill_(~valid, _IGNORED)
        here = (column >= 0) & (column < width)
        u_y = torch.zeros_like(maximum)
        if width:
            picked = logits.gather(1, column.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
            u_y = torch.where(here, picked.double() - maximum, u_y)
        columns = _columns(spec, weighted)
        total = torch.cat([_shifted(sums, maximum, spec)[:, columns], u_y.unsqueeze(1)], 1)
        _all_reduce(total, self.group)
        found = dict(zip((*columns, _AT_TARGET), total.unbind(1), strict=True))
        w_y: float | Tensor = 1.0
        if self.weight is not None:
            w_y = self.weight[target.masked_fill(~valid, 0)].double()
        values, from_e, from_q, at_target = (
            x.masked_fill(~valid, 0.0) for x in _finish(found, w_y, classes, spec)
        )
        maximum = maximum.masked_fill(~valid, 0.0)
        return _Statistics(values, maximum, from_e, from_q, at_target, column, start)

    def _check(self, target: Tensor, classes: Tensor) -> None:
        if self.weight is not None:
            _checks.ensure(
                classes == len(self.weight),
                lambda: ValueError(
                    f"weight must have shape ({int(classes)},), one per class of all processes, "
                    f"got {tuple(self.weight.shape)}"  # type: ignore[union-attr]
                ),
                "weight must have one entry per class of all processes",
            )
        good = (target >= 0) & (target < classes) | (target == self.ignore_index)
        _checks.ensure(
            good,
            lambda: _checks.out_of_range(target, int(classes), self.ignore_index),
            "a target is outside the classes of all processes and is not ignore_index",
        )

    def _local(self, start: Tensor, width: int) -> Tensor | None:
        """The class weights of the columns of this process."""
        if self.weight is None:
            return None
        return self.weight[start + torch.arange(width, device=start.device)]


def _maximum(logits: Tensor) -> Tensor:
    """Of each row, (N,) float64; -inf without columns."""
    if logits.shape[1] == 0:
        return torch.full((len(logits),), -math.inf, dtype=torch.float64, device=logits.device)
    return logits.amax(1).double()


def _shifted(sums: Tensor, maximum: Tensor, spec: RowSpec) -> Tensor:
    """Sums with u = z - (maximum of the shard) as sums with u = z - ``maximum``, larger or equal.

    Every u falls by d: e^u shrinks by e^d, and a sum of u e^u loses d times that of e^u as well.
    """
    maximum_here, e, ue, q, uq, wq, wuq = sums.unbind(1)
    # Without unmasked columns all sums are 0, and any finite d serves.
    d = torch.where(maximum_here == -math.inf, 0.0, maximum_here - maximum)
    shrink = d.exp()
    q_shrink = torch.ones_like(d) if spec.mode == LABEL_SMOOTHING else (d / spec.tau).exp()
    moved_q = (q_shrink * x for x in (q, uq + d * q, wq, wuq + d * wq))
    return torch.stack([maximum, shrink * e, shrink * (ue + d * e), *moved_q], 1)


def _finish(
    found: dict[int, Tensor], w_y: float | Tensor, classes: Tensor, spec: RowSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, and the coefficients of the gradient, from the sums over all columns."""
    per_e, u_y = 1 / found[_E], found[_AT_TARGET]
    log_e, log_k = found[_E].log(), classes.double().log()
    onehot_share: float | Tensor = 1.0 - (0.0 if spec.mode == CROSS_ENTROPY else spec.alpha)
    if spec.mode == LABO_ADAPTIVE:
        entropy = (log_e - found[_UE] * per_e).clamp(min=0.0)
        onehot_share = spec.rho * entropy / torch.where(classes > 1, log_k, 1.0)
    alpha = 1 - onehot_share
    # A masked target costs infinity whatever its share.
    hit = torch.where(u_y == -math.inf, math.inf, w_y * onehot_share * (log_e - u_y))
    if spec.mode == CROSS_ENTROPY:
        return hit, w_y * per_e, torch.zeros_like(hit), w_y * (u_y.exp() * per_e - 1)
    per_q = 1 / found[_Q]
    weighted = _WQ in found
    mean_u = found[_UQ] * per_q if _UQ in found else torch.zeros_like(hit)
    mean_w = found[_WQ] * per_q if weighted else 1.0
    mean_wu = found[_WUQ] * per_q if weighted else mean_u
    values = hit + alpha * (mean_w * log_e - mean_wu)
    if spec.mode == LABEL_SMOOTHING:
        q_y = (u_y != -math.inf).double()
    else:
        values = values + w_y * alpha * (spec.tau * (log_k - found[_Q].log()) + mean_u)
        q_y = (u_y / spec.tau).exp()
    p_y = u_y.exp() * per_e
    from_e = (w_y * onehot_share + alpha * mean_w) * per_e
    at_target = w_y * onehot_share * (p_y - 1) + alpha * (mean_w * p_y - w_y * q_y * per_q)
    return values, from_e, alpha * per_q, at_target


# ------------------------------------------------------------------ losses on logits


class _ShardedLoss(torch.autograd.Function):
    """The value from the sums; the gradient from the same sums in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: _Rows, divisor: float | Tensor, reduction: str
    ) -> Tensor:
        logits = _waited(logits)
        ctx.rows, ctx.divisor = rows, divisor
        ctx.statistics = statistics = rows.statistics(logits, slice(0, len(logits)))
        ctx.save_for_backward(logits)
        values = statistics.values
        if reduction != "none":
            values = values.sum() / divisor
        return values.to(torch.promote_types(logits.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (logits,) = ctx.saved_tensors
        factor = upstream.double() / ctx.divisor
        return ctx.rows.gradient(logits, ctx.statistics, factor, None), None, None, None


def row_loss(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    dim: int,
    group: Group = None,
) -> Tensor:
    """A loss of the family on this process's columns; arguments as in :mod:`labo.functional`.

    Args:
        logits: a DTensor that is split over the classes, or this process's columns with ``group``.
        target: (...) class indices among all classes.
        weight: (V,) class weights.
        spec, ignore_index, reduction, dim: as everywhere.
        group: the processes that hold the columns of plain ``logits``; None for all.
    """
    target, weight = _whole("target", target), _whole("weight", weight)
    if is_dtensor(logits):
        logits, group = _columns_of(logits, dim)
    _check_columns(logits, target, dim)
    flat = logits.movedim(dim, -1).reshape(target.numel(), logits.shape[dim])
    rows = _Rows(spec, target.reshape(-1).long(), weight, ignore_index, group)
    divisor = rows.divisor() if reduction == "mean" else 1.0
    value: Tensor = _ShardedLoss.apply(flat, rows, divisor, reduction)
    return value.reshape(target.shape) if reduction == "none" else value


@torch.compiler.disable
def logits_loss(
    logits: Tensor, target: Tensor, loss: nn.Module, *, group: Group | None = None
) -> Tensor:
    """``loss(all_logits, target)`` where each process holds some columns of the logits.

    Two all-reduces of a few numbers per row in the forward pass, none in the backward pass.
    A DTensor needs no function of its own: ``loss(logits, target)`` does the same.

    Args:
        logits: (..., V_s), the columns of this process, in the order of the ranks; V_s may differ
            between processes. Or a DTensor that is split over its last dimension.
        target: (...) class indices in [0, V), the same on all processes.
        loss: :class:`labo.CrossEntropyLoss`, :class:`labo.LabelSmoothingLoss` (convention "torch")
            or :class:`labo.LABOLoss`, or a :class:`labo.Warmup` of two. Class weights are those of
            all V classes.
        group: the processes that share the columns; None for all. A DTensor brings its own.

    Returns:
        The reduced loss, or (...) if the loss has ``reduction="none"``; the same on all processes.

    Example:
        >>> from labo import LABOLoss  # with one process, its columns are all there are
        >>> logits_loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), LABOLoss())
        tensor(1.1205)
    """
    if is_dtensor(logits):
        if group is not None:
            raise ValueError("a DTensor brings its own processes: do not give group")
        value: Tensor = loss(logits, target)
        return value
    member, spec = _member(loss)
    shared = (member.weight, member.ignore_index, member.reduction, member.dim)
    return row_loss(logits, target, spec, *shared, group)


def _member(loss: nn.Module) -> tuple[_Loss, RowSpec]:
    """The loss that computes (the current one of a warm-up) and its specification."""
    from ..losses import Warmup, _Loss

    while isinstance(loss, Warmup):
        loss = loss.active
    spec = loss.spec() if isinstance(loss, _Loss) else None
    if not isinstance(loss, _Loss) or spec is None:
        raise ValueError(f"{loss!r} {_NO_PARALLEL_FORM}")
    return loss, spec


_NO_PARALLEL_FORM = (
    "has no vocabulary-parallel form. CrossEntropyLoss, LabelSmoothingLoss with "
    'convention="torch" and LABOLoss without alpha_grad have one. For other losses, gather the '
    "logits first: logits.full_tensor() of a DTensor"
)


def _check_columns(logits: Tensor, target: Tensor, dim: int) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if not -logits.dim() <= dim < logits.dim():
        raise ValueError(f"dim={dim} is not a dimension of logits of shape {tuple(logits.shape)}")
    if target.is_floating_point():
        raise ValueError(
            "logits that are split over processes take class indices as targets, got probabilities"
        )
    _checks.check_target(logits.shape, target, dim)


# ------------------------------------------------------------------ output layer and loss


@torch.compiler.disable
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    group: Group | None = None,
    options: LinearLossOptions | None = None,
) -> Tensor:
    """:func:`labo.linear_loss` where each process holds some rows of the weight.

    The logits of this process's columns are computed by chunks and never exist at once. Each chunk
    takes two all-reduces of a few numbers per row. The backward pass sums the gradient of the
    hidden states over the processes; the gradient of the weight stays where the weight is.
    A DTensor needs no function of its own: :func:`labo.linear_loss` takes it as ``linear_weight``.

    Args:
        input: (..., D) hidden states, the same on all processes.
        linear_weight: (V_s, D), the part of this process, in the order of the ranks; V_s may
            differ between processes.
        target: (...) class indices in [0, V), the same on all processes.
        loss: as for :func:`logits_loss`.
        linear_bias: (V_s,).
        softcap: as for :func:`labo.linear_loss`.
        group: the processes that share the weight; None for all.
        options: as for :func:`labo.linear_loss`; the memory budget is that of one process.

    Returns:
        The reduced loss, or (...) if the loss has ``reduction="none"``; the same on all processes.

    Example:
        >>> from labo import LABOLoss  # with one process, its columns are all there are
        >>> hidden, head = torch.ones(3, 2), torch.eye(4, 2)
        >>> linear_loss(hidden, head, torch.tensor([0, 1, 1]), LABOLoss(tau=1.25))
        tensor(1.2238)
    """
    if any(map(is_dtensor, (input, linear_weight, linear_bias))):
        raise ValueError(
            "labo.parallel.linear_loss takes plain tensors; give DTensors to labo.linear_loss"
        )
    widest = torch.tensor([len(linear_weight)], device=input.device)
    _all_reduce(widest, group, "MAX")
    input = _SumGradient.apply(input, group)
    return _sharded_head(
        input, linear_weight, linear_bias, target, loss, softcap, group, int(widest), options
    )


def _sharded_head(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    loss: nn.Module,
    softcap: float | None,
    group: Group,
    widest: int,
    options: LinearLossOptions | None,
) -> Tensor:
    """Plain tensors of this process; ``widest`` is the largest number of columns of any process."""
    from . import linear

    linear._check_softcap(softcap)
    member, spec = _member(loss)
    head = linear._lay_out(input, weight, bias, softcap, member)
    _check_columns(input, target, -1)
    reduction = member.reduction
    labels, keep = target.reshape(-1).long(), reduction == "none"
    rows = _Rows(spec, labels, _whole("weight", member.weight), member.ignore_index, group, keep)
    divisor = rows.divisor() if reduction == "mean" else 1.0
    # The same chunks on all processes, or they would wait for each other in vain.
    row_bytes = max(1, widest) * input.element_size() * (2 if softcap is not None else 1)
    chunk = (options or linear.LinearLossOptions()).chunk_rows(len(head.input), row_bytes)
    with torch.autocast(input.device.type, enabled=False):
        value: Tensor = linear._LinearLoss.apply(
            head.input, head.weight, head.bias, softcap, rows, chunk, divisor, reduction
        )
    return value.reshape(input.shape[:-1]) if reduction == "none" else value


@torch.compiler.disable
def dtensor_linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None,
    softcap: float | None,
    second: Any,
    impl: str,
    options: LinearLossOptions | None,
) -> Tensor:
    """:func:`labo.linear_loss` with DTensors among its arguments."""
    from . import linear

    target = _whole("target", target)
    mesh_dim = None
    if is_dtensor(linear_weight):
        weight: Any = linear_weight
        if _data_parallel(weight) is None:
            mesh_dim = _shard_dim(weight, 0)
            if mesh_dim is None and not all(p.is_replicate() for p in weight.placements):
                raise ValueError(
                    "linear_weight must be replicated, or split over the classes (Shard(0)) along "
                    f"one mesh dimension, got {_describe(weight)}. A weight of an FSDP module is "
                    "whole inside of its forward pass, and after module.unshard()"
                )
    if mesh_dim is None:
        return linear.linear_loss(
            _whole("input", input),
            _gathered(linear_weight),
            target,
            loss,
            linear_bias=_gathered(linear_bias),
            softcap=softcap,
            second=second,
            impl=impl,
            options=options,
        )
    if second is not None or impl != "auto":
        raise ValueError(
            "a linear_weight that is split over the classes goes with neither a teacher nor impl="
        )
    bias: Any = linear_bias
    if bias is not None and (not is_dtensor(bias) or bias.placements != weight.placements):
        raise ValueError("linear_bias must be a DTensor split as linear_weight is")
    mesh = weight.device_mesh
    group = mesh.get_group(mesh_dim)
    if is_dtensor(input):
        input = _replicated(input, mesh_dim)
    else:
        _check_same_rows(target, group)
        input = _SumGradient.apply(input, group)
    return _sharded_head(
        input,
        weight.to_local(),
        None if bias is None else bias.to_local(),
        target,
        loss,
        softcap,
        group,
        math.ceil(len(weight) / mesh.size(mesh_dim)),
        options,
    )


def _replicated(input: Any, mesh_dim: int) -> Tensor:
    """Hidden states as a plain tensor, of whose gradient each process will give a part."""
    from torch.distributed.tensor import Partial, Replicate

    dims = range(input.device_mesh.ndim)
    parts = [Partial() if i == mesh_dim else Replicate() for i in dims]
    whole = input.redistribute(placements=[Replicate() for _ in dims])
    plain: Tensor = whole.to_local(grad_placements=parts)
    return plain


_SAME_ROWS: set[str] = set()  # the groups that were found to hold the same rows


def _check_same_rows(target: Tensor, group: Group) -> None:
    """Once for each group: its processes must hold the same targets.

    A weight that is split over data-parallel processes looks the same as one that is split over
    tensor-parallel ones. Taken for the latter, rows of different samples would be mixed.
    """
    if not _initialized() or group.group_name in _SAME_ROWS:
        return
    labels = target.reshape(-1).long()
    positions = torch.arange(1, labels.numel() + 1, device=labels.device)
    mark = ((labels + 1) * positions).sum() % (1 << 50)
    count = torch.full_like(mark, labels.numel())
    message = torch.stack([mark, -mark, count, -count]).double()
    _all_reduce(message, group, "MAX")
    largest, smallest, most, fewest = message.tolist()
    if largest != -smallest or most != -fewest:
        raise ValueError(
            "linear_weight is a DTensor that is split over its classes, but the processes that "
            "share it have different targets. If they are data-parallel, give "
            "labo.parallel.gather_weight(linear_weight); if they are tensor-parallel, they must "
            "have the same rows"
        )
    _SAME_ROWS.add(group.group_name)


# ------------------------------------------------------------------ data-parallel weights (FSDP2)


def gather_weight(weight: Tensor) -> Tensor:
    """The whole of a weight that is split over *data-parallel* processes, as FSDP2 does.

    One all-gather. The gradient is averaged over the processes and split again, as FSDP2 hands
    gradients to its parameters. :func:`labo.linear_loss` calls this for the parameters of modules
    under ``fully_shard`` that are used outside of their forward pass.

    Args:
        weight: a DTensor, split or replicated, on a mesh whose processes hold different samples.

    Returns:
        A plain tensor.
    """
    from torch.distributed.tensor import Partial

    if not is_dtensor(weight):
        return weight
    sharded: Any = weight
    mesh = sharded.device_mesh
    whole: Tensor = sharded.full_tensor(grad_placements=[Partial("avg") for _ in range(mesh.ndim)])
    factor = getattr(_data_parallel(sharded), "gradient_divide_factor", None)
    if factor is not None and whole.requires_grad:  # FSDPModule.set_gradient_divide_factor
        whole.register_hook(lambda grad: grad * (mesh.size() / factor))
    return whole


def _gathered(x: Tensor | None) -> Any:
    """A weight or bias as a plain tensor: from all processes if it belongs to FSDP2."""
    if x is None or not is_dtensor(x):
        return x
    sharded: Any = x
    return sharded.to_local() if _data_parallel(sharded) is None else gather_weight(x)


def _data_parallel(weight: DTensor) -> Any:
    """The parameter group of FSDP2 that ``weight`` belongs to, or None.

    That is the group that holds it; for a result of such a parameter (a cast), one on its mesh.
    Nothing in the parameter itself tells it from one that is split for tensor parallelism, and
    PyTorch has no public list of the modules under ``fully_shard``.
    """
    try:
        from torch.distributed._composable_state import _module_state_mapping as states
    except ImportError:
        return None
    found = None
    for reference in list(states.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in groups or [getattr(state, "_fsdp_param_group", None)]:
            mesh_info = getattr(group, "mesh_info", None)
            if mesh_info is None or mesh_info.mesh is not weight.device_mesh:
                continue
            if any(parameter.sharded_param is weight for parameter in group.fsdp_params):
                return group
            found = found or group
    return found


# ------------------------------------------------------------------ DTensors


def is_dtensor(x: object) -> bool:
    return _checks.is_dtensor(x)


def _describe(x: DTensor) -> str:
    return f"placements {tuple(x.placements)} on a mesh of shape {tuple(x.device_mesh.shape)}"


def _shard_dim(x: DTensor, dim: int) -> int | None:
    """The mesh dimension that splits dimension ``dim`` of ``x``, if all others replicate it."""
    from torch.distributed.tensor import Replicate, Shard

    dim %= x.dim()
    splits = [i for i, placement in enumerate(x.placements) if placement == Shard(dim)]
    others = [p for i, p in enumerate(x.placements) if i not in splits]
    if len(splits) == 1 and all(isinstance(p, Replicate) for p in others):
        return splits[0]
    return None


def _columns_of(logits: Any, dim: int) -> tuple[Tensor, Group]:
    """The columns of this process and the processes that hold the others."""
    mesh_dim = _shard_dim(logits, dim)
    if mesh_dim is None:
        raise ValueError(
            f"logits must be replicated, or split over the classes (dim={dim}) along one mesh "
            f"dimension, got {_describe(logits)}. Redistribute them: "
            "logits.redistribute(placements=[Shard(-1)])"
        )
    return logits.to_local(), logits.device_mesh.get_group(mesh_dim)


def _waited(x: Tensor) -> Tensor:
    """The result of a collective that may still be under way."""
    return x.wait() if hasattr(x, "wait") else x


def _whole(name: str, x: Tensor | None) -> Any:
    """A replicated DTensor as a plain tensor; a plain one is taken to be replicated."""
    return None if x is None else _checks.local(name, x)
