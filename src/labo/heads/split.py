"""The algorithm behind :mod:`labo.heads.parallel`: rows whose columns are split over processes.

Each process sums over its columns, the sums are added up over the processes, and each process
writes the gradient of its columns. The two passes over the logits are those of
:mod:`labo.fast.formula`, by any backend.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks
from .._torch import disable_compile, fsdp_states
from ..fast.columns import COEFFICIENTS, MIXED, SUMS
from ..fast.dispatch import backend_of
from ..fast.formula import differentiate, entries_of, masses_of, plan_of, temperatures
from ..rows import u_of, wide
from ..sums import (
    BEYOND_MARGIN,
    COUNT,
    EMIX,
    FROM_ROW,
    FROM_TABLE,
    FROM_TEACHER,
    NO_MASSES,
    QU,
    TEMPERED,
    TOP,
    UE,
    WQU,
    FoundSums,
    Passes,
    R,
    value_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Group = dist.ProcessGroup, which exists only where PyTorch was built with torch.distributed.
Group = Any
Loss = Any  # labo.loss.Loss, which imports this module when it meets a DTensor

# Stands for ignore_index where targets count columns of a shard.
_IGNORED = torch.iinfo(torch.int64).min


def check_formula(loss: Loss) -> None:
    """Refuse a loss whose sums cannot be added up over the processes."""
    obstacles = {
        BEYOND_MARGIN: "a margin below the largest logit of the whole row",
        FROM_TABLE: "a table of classes",
        FROM_TEACHER: "teacher logits",
    }
    plan = plan_of(loss, loss.weight is not None)
    obstacle = obstacles.get(plan.masses)
    if plan.spread is not None:
        obstacle = "the norm or standard deviation of the whole row"
    if plan.top_k:
        obstacle = "the largest logits of the whole row"
    if plan.stored:
        obstacle = "stored classes of a teacher"
    if obstacle:
        raise ValueError(
            f"logits that are split over processes do not go with a loss that needs {obstacle}: "
            "gather the logits or the weight first, with full_tensor() of a DTensor"
        )


# ------------------------------------------------------------------ communication


def _size(group: Group) -> int:
    return dist.get_world_size(group) if _initialized() else 1


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def all_reduce(x: Tensor, group: Group, op: str = "SUM") -> None:
    """In place; without ``torch.distributed`` there is one process and nothing to do."""
    if _initialized():
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group)


def all_classes(width: int, device: torch.device, group: Group) -> int:
    """The number of columns of all processes."""
    total = torch.full((1,), width, device=device)
    all_reduce(total, group)
    return int(total)


def class_row(loss: Loss, width: int, device: torch.device, group: Group) -> Tensor | None:
    """The masses of a loss that has them for each class, (V,), or None.

    Args:
        loss: the loss.
        width: the number of classes of this process.
        device: of the row.
        group: the processes.
    """
    if plan_of(loss, loss.weight is not None).masses != FROM_ROW:
        return None
    row = loss.class_row(all_classes(width, device, group))
    return None if row is None else row.to(device)


def row_maximum(maximum: Tensor, width: int, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of each row, the first column of this process, and the number of all columns.

    How many columns each process has goes with the same message. The last two are tensors, so that
    no device is waited for.
    """
    count, size = len(maximum), _size(group)
    rank = dist.get_rank(group) if _initialized() else 0
    message = torch.cat([maximum, maximum.new_zeros(size)])
    message[count + rank].fill_(width)  # an assignment would copy the number and wait
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
    """What value and gradient of every row follow from; float64, the same on all processes."""

    values: Tensor  # (N,)
    # (N, 13), see labo.fast.formula; top_at counts columns of this process. None for values only.
    coefficients: Tensor | None
    column: Tensor  # the target as a column of this process; out of range if it is elsewhere
    start: Tensor  # the first column of this process
    plan: Passes

    def scaled(self, factor: float | Tensor) -> Tensor:
        """The coefficients of the gradient of sum_i factor_i value_i."""
        assert self.coefficients is not None
        per_row = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.dim() else factor
        scaled = self.coefficients * per_row
        for name in ("top", "source_top", "top_at"):  # a list as index would wait for the device
            column = COEFFICIENTS.index(name)
            scaled[:, column] = self.coefficients[:, column]
        return scaled


class SplitRows:
    """The rows of a loss whose columns are split over the processes of ``group``.

    Args:
        loss: the loss; its class weights are those of the whole vocabulary.
        target: (N,) int64, the same on all processes.
        group: the processes.
        class_row: (V,), the masses of a loss that has them for each class, or None.
        keep: keep the statistics of a chunk for its gradient in the backward pass.
    """

    def __init__(
        self,
        loss: Loss,
        target: Tensor,
        group: Group,
        class_row: Tensor | None = None,
        keep: bool = False,
    ) -> None:
        check_formula(loss)
        self.loss = loss
        self.weight, self.ignore_index = loss.weight, loss.ignore_index
        self.plan = plan_of(loss, self.weight is not None)
        self.target = target
        self.group = group
        self.class_row = class_row
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
            with_gradient = factor is not None or self.kept is not None
            statistics = self.statistics(logits, part, with_gradient)
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
        if out is None:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        start, width = statistics.start, logits.shape[1]
        fixed = (statistics.plan, self._local(self.weight, start, width), _IGNORED)
        source, coefficients = self._local(self.class_row, start, width), statistics.scaled(factor)
        grad: Tensor = backend_of(logits).gradient(
            logits, statistics.column, *fixed, source, coefficients, out
        )
        return grad

    def statistics(self, logits: Tensor, part: slice, with_gradient: bool) -> _Statistics:
        """Local sums and two all-reduces; three for the first largest logit, or for a mixture."""
        plan, target, width = self.plan, self.target[part], logits.shape[1]
        valid = target != self.ignore_index

        def local_sums(weight: Tensor | None, source: Tensor | None, plan: Passes = plan) -> Tensor:
            fixed = (logits, target, plan, weight, self.ignore_index, source)
            sums: Tensor = backend_of(logits).sums(*fixed)
            return sums

        # The maxima come with the sums, except that what there is for each class is not cut to the
        # columns of this process before all processes have told how many columns they hold.
        whole = self.weight is None and self.class_row is None
        sums = local_sums(None, None) if whole else None
        here = _maximum(logits) if sums is None else sums[:, SUMS.index("top")]
        maximum, start, classes = row_maximum(here, width, self.group)
        self._check(target, classes)
        if sums is None:
            sums = local_sums(
                self._local(self.weight, start, width), self._local(self.class_row, start, width)
            )
        column = (target - start).masked_fill_(~valid, _IGNORED)
        found = _shifted(dict(zip(SUMS, sums.unbind(1), strict=True)), here, maximum, plan)
        found["u_y"] = torch.zeros_like(maximum)
        if width:
            z_y = entries_of(logits, column.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
            u_y = u_of(z_y, maximum, torch.finfo(wide(logits.dtype)))
            found["u_y"] = torch.where((column >= 0) & (column < width), u_y, found["u_y"])
        total = torch.stack([*found.values()], 1)
        all_reduce(total, self.group)
        found = dict(zip(found, total.unbind(1), strict=True))
        if plan.asked & EMIX:
            plan = plan.mixed(found, maximum)
            mixed = local_sums(None, None, plan)[:, SUMS.index(MIXED[0]) :].contiguous()
            all_reduce(mixed, self.group)
            found |= dict(zip(MIXED, mixed.unbind(1), strict=True))
        y = target.masked_fill(~valid, 0)
        zero = torch.zeros_like(maximum)
        found |= masses_of(plan, y, found["u_y"], self.class_row, zero)
        found |= {name: zero for name in SUMS if name not in found} | {"top": maximum}
        if plan.asked & TOP:
            first = torch.where(here == maximum, start + sums[:, SUMS.index("top_at")], math.inf)
            all_reduce(first, self.group, "MIN")
            found["top_at"] = first.masked_fill(first == math.inf, -1.0)  # a row with NaN has none
        w_y = 1.0 if self.weight is None else self.weight[y].double()
        found |= temperatures(plan, maximum)
        coefficients = None
        if with_gradient:
            values, coefficients = differentiate(self.loss, plan, found, w_y, y, classes)
            if plan.asked & TOP:
                coefficients[:, COEFFICIENTS.index("top_at")] -= start
            coefficients = coefficients.masked_fill(~valid.unsqueeze(1), 0.0)
        else:
            values = value_of(self.loss, FoundSums(self.loss, found, w_y, classes))
        return _Statistics(values.masked_fill(~valid, 0.0), coefficients, column, start, plan)

    def _check(self, target: Tensor, classes: Tensor) -> None:
        for name, given in (("weight", self.weight), ("the row of classes", self.class_row)):
            if given is not None:
                size = given.shape
                _checks.ensure(
                    classes == len(given),
                    lambda name=name, size=size: ValueError(  # type: ignore[misc]
                        f"{name} must have shape ({int(classes)},), one per class of all "
                        f"processes, got {tuple(size)}"
                    ),
                    f"{name} must have one entry per class of all processes",
                )
        good = (target >= 0) & (target < classes) | (target == self.ignore_index)
        _checks.ensure(
            good,
            lambda: _checks.out_of_range(target, int(classes), self.ignore_index),
            "a target is outside the classes of all processes and is not ignore_index",
        )

    @staticmethod
    def _local(whole: Tensor | None, start: Tensor, width: int) -> Tensor | None:
        """What there is for each class, for the columns of this process."""
        return None if whole is None else whole[start + torch.arange(width, device=start.device)]


class _ChunkRows(NamedTuple):
    """A chunk of :class:`SplitRows`."""

    all: SplitRows
    part: slice

    def rows(
        self, logits: Tensor, target: Tensor, factor: float | Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`labo.fast.dispatch.FastRows.rows`; the targets are those of the rows."""
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


def _shifted(
    sums: dict[str, Tensor], maximum_here: Tensor, maximum: Tensor, plan: Passes
) -> dict[str, Tensor]:
    """The sums that a formula asks for, with u = z - ``maximum`` instead of that of the shard."""
    d = drop_of(maximum_here, maximum)
    e, ue = moved(d, sums["e"], sums["ue"])
    found = {"e": e}
    if plan.asked & COUNT:
        found["count"] = sums["count"]
    if plan.asked & UE:
        found["ue"] = ue
    if plan.asked & R:
        found["r"] = (d / plan.tau).exp() * sums["r"]
    if plan.masses == NO_MASSES:
        return found
    tau = plan.tau if plan.masses == TEMPERED else math.inf  # others do not depend on u
    found["q"], qu = moved(d, sums["q"], sums["qu"], tau)
    if plan.asked & QU:
        found["qu"] = qu
    if plan.asked & WQU:
        found["wq"], found["wqu"] = moved(d, sums["wq"], sums["wqu"], tau)
    return found


# ------------------------------------------------------------------ losses on logits


class _SplitLoss(torch.autograd.Function):
    """The value from the sums; the gradient from the same sums in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: SplitRows, divisor: float | Tensor, reduction: str
    ) -> Tensor:
        logits = _waited(logits)
        ctx.rows, ctx.divisor = rows, divisor
        ctx.statistics = rows.statistics(logits, slice(0, len(logits)), with_gradient=True)
        ctx.save_for_backward(logits)
        return _reduced(ctx.statistics.values, logits, divisor, reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (logits,) = ctx.saved_tensors
        factor = upstream.double() / ctx.divisor
        return ctx.rows.gradient(logits, ctx.statistics, factor, None), None, None, None


def _reduced(values: Tensor, logits: Tensor, divisor: float | Tensor, reduction: str) -> Tensor:
    """Values (N,) to the result, in at least float32."""
    if reduction != "none":
        values = values.sum() / divisor
    return values.to(torch.promote_types(logits.dtype, torch.float32))


@disable_compile
def row_loss(logits: Tensor, target: Tensor, loss: Loss, group: Group = None) -> Tensor:
    """A loss on this process's columns.

    Args:
        logits: a DTensor that is split over the classes, or this process's columns with ``group``.
        target: (...) class indices among all classes.
        loss: the loss; its class weights are those of all classes.
        group: the processes that hold the columns of plain ``logits``; None for all.
    """
    check_formula(loss)
    target = replicated("target", target)
    loss = loss.having(weight=replicated("weight", loss.weight))
    dim, reduction = loss.dim, loss.reduction
    if _checks.is_dtensor(logits):
        logits, group = _columns_of(logits, dim)
    check_columns(logits, target, dim)
    width = logits.shape[dim]
    row = class_row(loss, width, logits.device, group)
    flat = logits.movedim(dim, -1).reshape(target.numel(), width)
    rows = SplitRows(loss, target.reshape(-1).long(), group, row)
    divisor = rows.divisor() if reduction == "mean" else 1.0
    value: Tensor
    if flat.requires_grad and torch.is_grad_enabled():
        value = _SplitLoss.apply(flat, rows, divisor, reduction)
    else:
        flat = _waited(flat)
        statistics = rows.statistics(flat, slice(0, len(flat)), with_gradient=False)
        value = _reduced(statistics.values, flat, divisor, reduction)
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
    """See :func:`labo.heads.parallel.gather_weight`."""
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
    found = None
    is_parameter = weight.is_leaf and weight.requires_grad  # then not a result of another one
    for state in fsdp_states():
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in groups or [getattr(state, "_fsdp_param_group", None)]:
            mesh_info = getattr(group, "mesh_info", None)
            if mesh_info is None or mesh_info.mesh is not weight.device_mesh:
                continue
            if any(parameter.sharded_param is weight for parameter in group.fsdp_params):
                return group
            found = found or (None if is_parameter else group)
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
