"""The algorithm behind :mod:`labo.fused.parallel`: rows whose columns are split over processes.

Each process sums over its columns, the sums are added up over the processes, and each process
writes the gradient of its columns. The two passes over the logits are those of
:mod:`labo.fused.algebra`, by any backend.
"""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from .. import _checks
from . import blocked, native
from .algebra import COEFFICIENTS, QU, SUMS, TEMPERED, UE, UNIFORM, WQU, Passes
from .pages import on_large_pages
from .spec import CROSS_ENTROPY, LABEL_SMOOTHING, LABO_ADAPTIVE, RowSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None

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


class ShardBackend(NamedTuple):
    """The two passes of a backend over a shard, whose columns ``weight`` has."""

    module: ModuleType

    def shard_sums(
        self,
        logits: Tensor,
        target: Tensor,
        spec: RowSpec,
        weight: Tensor | None,
        ignore_index: int,
    ) -> Tensor:
        """(N, 7) float64: maximum, S(e), S(ue), S(q), S(uq), S(wq), S(wuq).

        S sums over the columns of the shard, and u = z - maximum *of the shard*. Columns that the
        loss does not need may hold anything; ignored rows are 0.
        """
        plan = _plan(spec, weight is not None)
        found = self.module.sums(logits, target, plan, weight, ignore_index)
        columns = [SUMS.index(name) for name in ("top", "e", "ue", "q", "qu", "wq", "wqu")]
        chosen: Tensor = found[:, columns]
        return chosen

    def shard_gradient(
        self,
        logits: Tensor,
        target: Tensor,
        spec: RowSpec,
        weight: Tensor | None,
        ignore_index: int,
        results: Tensor,
        out: Tensor | None,
    ) -> Tensor:
        """The gradient from_e e - from_q w q, with at_target in the column ``target``.

        ``results``, (N, 4) float64, has the columns maximum *of the row*, from_e, from_q and
        at_target. Ignored rows are 0. A target outside of the shard has no entry.
        """
        if out is None:
            out = on_large_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))
        plan = _plan(spec, weight is not None)
        top, from_e, from_q, at_target = results.double().unbind(1)
        named = {
            "top": top,
            "from_e": from_e,
            "at_target": at_target,
            "top_at": -torch.ones_like(top),
        }
        named["from_q" if weight is None else "from_wq"] = -from_q
        zero = torch.zeros_like(top)
        coefficients = torch.stack([named.get(name, zero) for name in COEFFICIENTS], 1)
        fixed = (logits, target, plan, weight, ignore_index, None)
        grad: Tensor = self.module.gradient(*fixed, coefficients, out)
        return grad


def _plan(spec: RowSpec, weighted: bool) -> Passes:
    """What the passes over a shard compute."""
    asked = UE if spec.mode == LABO_ADAPTIVE else 0
    if spec.mode == CROSS_ENTROPY:
        return Passes(asked)
    asked |= QU | WQU if weighted else QU
    return Passes(asked, UNIFORM if spec.mode == LABEL_SMOOTHING else TEMPERED, spec.tau)


def backend_of(logits: Tensor) -> ModuleType:
    """The fastest backend for these logits, with the functions of :mod:`labo.fused.algebra`."""
    if logits.is_cpu and native.refuses(logits) is None and logits.dtype in native.SHARD_DTYPES:
        return native
    if logits.is_cuda and logits.dtype != torch.float64 and _HAS_TRITON:
        from . import kernels

        return kernels
    return blocked


def _backend(logits: Tensor) -> ShardBackend:
    return ShardBackend(backend_of(logits))


# ------------------------------------------------------------------ communication


def _size(group: Group) -> int:
    return dist.get_world_size(group) if _initialized() else 1


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def all_reduce(x: Tensor, group: Group, op: str = "SUM") -> None:
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
    all_reduce(message, group, "MAX")
    widths = message[count:].long()
    return message[:count], widths[:rank].sum(), widths.sum()


class SumGradient(torch.autograd.Function):
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
        all_reduce(total, ctx.group)
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


class ShardedRows:
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
        """What a mean divides by; inf if that would be 0."""
        counts = self.target != self.ignore_index
        if self.weight is not None:
            inside = self.target.clamp(0, len(self.weight) - 1)  # the range is checked later
            counts = self.weight[inside].double().masked_fill(~counts, 0.0)
        total = counts.sum(dtype=torch.float64)
        total = total.masked_fill(total == 0, math.inf)
        return float(total) if _checks.can_read(total) else total

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

    def for_chunk(self, part: slice) -> _ChunkRows:
        """These rows as the chunk loop of ``linear_loss`` calls them."""
        return _ChunkRows(self, part)

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
        all_reduce(total, self.group)
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


class _ChunkRows(NamedTuple):
    """A chunk of :class:`ShardedRows`."""

    all: ShardedRows
    part: slice

    def rows(
        self, logits: Tensor, target: Tensor, factor: float | Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`labo.fused.dispatch.RowLoss.rows`; the targets are those of the rows."""
        return self.all(logits, self.part, factor, out)


def _maximum(logits: Tensor) -> Tensor:
    """Of each row, (N,) float64; -inf without columns."""
    if logits.shape[1] == 0:
        return torch.full((len(logits),), -math.inf, dtype=torch.float64, device=logits.device)
    return logits.amax(1).double()


def drop_of(maximum_here: Tensor, maximum: Tensor) -> Tensor:
    """By how much every u changes if ``maximum`` takes the place of that of the shard; 0 or less.

    Without unmasked columns all sums are 0, and any finite number serves.
    """
    return torch.where(maximum_here == -math.inf, 0.0, maximum_here - maximum)


def moved(d: Tensor, masses: Tensor, products: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """The sums of q = exp(u / tau) and of u q after every u has changed by ``d``."""
    shrink = (d / tau).exp()
    return shrink * masses, shrink * (products + d * masses)


def _shifted(sums: Tensor, maximum: Tensor, spec: RowSpec) -> Tensor:
    """Sums with u = z - (maximum of the shard) as sums with u = z - ``maximum``."""
    maximum_here, e, ue, q, uq, wq, wuq = sums.unbind(1)
    d = drop_of(maximum_here, maximum)
    # Uniform masses do not depend on u.
    tau = math.inf if spec.mode == LABEL_SMOOTHING else spec.tau
    of_q, of_wq = moved(d, q, uq, tau), moved(d, wq, wuq, tau)
    return torch.stack([maximum, *moved(d, e, ue), *of_q, *of_wq], 1)


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
    # 0 * inf = 0: a masked target costs nothing without a share of the label, else infinity.
    hit = w_y * onehot_share * (log_e - u_y)
    hit = hit.masked_fill((u_y == -math.inf) & (w_y * onehot_share == hit.new_zeros(())), 0.0)
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
        ctx: Any, logits: Tensor, rows: ShardedRows, divisor: float | Tensor, reduction: str
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


@_disable_dynamo  # as torch.compiler.disable, which would import the compiler here
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
    target, weight = replicated("target", target), replicated("weight", weight)
    if _checks.is_dtensor(logits):
        logits, group = _columns_of(logits, dim)
    check_columns(logits, target, dim)
    flat = logits.movedim(dim, -1).reshape(target.numel(), logits.shape[dim])
    rows = ShardedRows(spec, target.reshape(-1).long(), weight, ignore_index, group)
    divisor = rows.divisor() if reduction == "mean" else 1.0
    value: Tensor = _ShardedLoss.apply(flat, rows, divisor, reduction)
    return value.reshape(target.shape) if reduction == "none" else value


def check_columns(logits: Tensor, target: Tensor, dim: int) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if not -logits.dim() <= dim < logits.dim():
        raise ValueError(f"dim={dim} is not a dimension of logits of shape {tuple(logits.shape)}")
    if target.is_floating_point():
        raise ValueError(
            "logits that are split over processes take class indices as targets, got probabilities"
        )
    _checks.check_target(logits.shape, target, dim)


# ------------------------------------------------------------------ heads


class LocalHead(NamedTuple):
    """An output layer and its rows as plain tensors.

    ``group`` is None for a whole weight; else the processes that hold its other rows, of which no
    process has more than ``widest``.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    group: Group
    widest: int


def local_head(input: Any, weight: Any, bias: Any, target: Tensor) -> LocalHead:
    """The arguments of ``linear_loss``, some of which are DTensors."""
    target = replicated("target", target)
    whole = not _checks.is_dtensor(weight) or all(p.is_replicate() for p in weight.placements)
    if _checks.is_dtensor(weight) and _fsdp_group(weight) is not None:
        weight, bias, whole = gather_weight(weight), gather_weight(bias), True
    if whole:
        weight, bias = replicated("linear_weight", weight), replicated("linear_bias", bias)
        return LocalHead(replicated("input", input), weight, bias, target, None, 0)
    mesh, mesh_dim = weight.device_mesh, _shard_dim(weight, 0)
    if mesh_dim is None:
        raise ValueError(
            "linear_weight must be replicated, or split over the classes (Shard(0)) along one "
            f"mesh dimension, got {_describe(weight)}. A weight of an FSDP module is whole inside "
            "of its forward pass, and after module.unshard()"
        )
    if bias is not None:
        if not _checks.is_dtensor(bias) or bias.placements != weight.placements:
            raise ValueError("linear_bias must be a DTensor that is split as linear_weight is")
        bias = bias.to_local()
    group = mesh.get_group(mesh_dim)
    if _checks.is_dtensor(input):
        input = _with_partial_gradient(input, mesh_dim)
    else:
        _check_same_rows(target, group)
        input = SumGradient.apply(input, group)
    widest = math.ceil(len(weight) / mesh.size(mesh_dim))
    return LocalHead(input, weight.to_local(), bias, target, group, widest)


def _with_partial_gradient(input: Any, mesh_dim: int) -> Tensor:
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
    all_reduce(message, group, "MAX")
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


def gather_weight(weight: Any) -> Any:
    """See :func:`labo.fused.parallel.gather_weight`."""
    if not _checks.is_dtensor(weight):
        return weight
    from torch.distributed.tensor import Partial

    mesh = weight.device_mesh
    whole = weight.full_tensor(grad_placements=[Partial("avg") for _ in range(mesh.ndim)])
    factor = getattr(_fsdp_group(weight), "gradient_divide_factor", None)
    if factor is not None and whole.requires_grad:  # FSDPModule.set_gradient_divide_factor
        whole.register_hook(lambda grad: grad * (mesh.size() / factor))
    return whole


def _fsdp_group(weight: DTensor) -> Any:
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


def replicated(name: str, x: Tensor | None) -> Any:
    """A replicated DTensor as a plain tensor; a plain one is taken to be replicated."""
    return None if x is None else _checks.local(name, x)
