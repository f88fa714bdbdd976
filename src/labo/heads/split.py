"""The algorithm behind :mod:`labo.heads.parallel`: rows whose columns are split over processes.

Each process sums over its columns, the sums are added up over the processes, and each process
writes the gradient of its columns. The two passes over the logits are those of
:mod:`labo.fast.formula`, by any backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks
from .._torch import disable_compile, fsdp_states
from ..fast.columns import COEFFICIENTS, MIXED, MIXED_TEACHER, SUMS
from ..fast.dispatch import backend_of
from ..fast.formula import (
    add_entries,
    apart,
    differentiate,
    entries_of,
    masses_of,
    plan_of,
    stored_entries,
    temperatures,
)
from ..rows import teacher_rows, u_of, weighted_total, wide
from ..stored import stored_rows
from ..sums import (
    BEYOND_MARGIN,
    COUNT,
    EMIX,
    FROM_ROW,
    FROM_TABLE,
    FROM_TEACHER,
    NO_MASSES,
    OTHERS,
    QD,
    QMIX,
    QU,
    RD,
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


# Stands for a number of classes that only a device knows; checked later.
UNKNOWN = torch.iinfo(torch.int64).max

# The sums that are known to add up, see _shifted.
_KNOWN = COUNT | UE | R | QU | QD | WQU | TOP | OTHERS | EMIX | RD | QMIX


def check_formula(loss: Loss) -> None:
    """Refuse a loss whose sums cannot be added up over the processes."""
    plan, obstacle = plan_of(loss, loss.weight is not None), None
    if plan.asked & ~_KNOWN:
        obstacle = "sums that are not known for parts of a row"
    if plan.masses == BEYOND_MARGIN:
        obstacle = "a margin below the largest logit of the whole row"
    if plan.masses == FROM_TABLE:
        obstacle = "a table of classes"
    if plan.spread is not None:
        obstacle = "the norm or standard deviation of the whole row"
    if plan.top_k:
        obstacle = "the largest logits of the whole row"
    if obstacle:
        raise ValueError(
            f"logits that are split over processes do not go with a loss that needs {obstacle}: "
            "gather the logits or the weight first, with full_tensor() of a DTensor"
        )


# ------------------------------------------------------------------ communication


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def all_reduce(x: Tensor, group: Group, op: str = "SUM") -> None:
    """In place; without ``torch.distributed`` there is one process and nothing to do."""
    if _initialized():
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group)


def reduced(x: Tensor, group: Group, op: str = "SUM") -> Tensor:
    """The result of an all-reduce, in new memory."""
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group, op)
    return total


class Columns(NamedTuple):
    """Which of all columns this process holds, and the processes that hold the others.

    Numbers are tensors where they could not be read without waiting for a device.
    """

    group: Group
    start: int | Tensor  # the first column of this process
    classes: int | Tensor  # the columns of all processes
    most: int | Tensor  # the most columns of a process

    def of_classes(self, whole: Tensor | None, width: int) -> Tensor | None:
        """What there is for each class, for the ``width`` columns of this process."""
        if whole is None or isinstance(self.start, int):
            return whole if whole is None else whole[self.start : self.start + width]
        return whole[self.start + torch.arange(width, device=self.start.device)]


def columns_of(width: int, device: torch.device, group: Group) -> Columns:
    """The columns of plain tensors, of which this process has ``width``: one all-reduce."""
    size = dist.get_world_size(group) if _initialized() else 1
    rank = dist.get_rank(group) if _initialized() else 0
    widths = torch.zeros(size, dtype=torch.int64, device=device)
    widths[rank : rank + 1].fill_(width)  # an assignment would copy the number and wait
    all_reduce(widths, group)
    if _checks.can_read(widths):
        known = widths.tolist()
        return Columns(group, sum(known[:rank]), sum(known), max(known))
    return Columns(group, widths[:rank].sum(), widths.sum(), widths.max())


def _columns_of_dtensor(x: DTensor, dim: int, mesh_dim: int) -> Columns:
    """The columns of a DTensor, which are cut as ``torch.chunk`` does."""
    mesh, classes = x.device_mesh, x.shape[dim]
    widest = math.ceil(classes / mesh.size(mesh_dim))
    start = min(mesh.get_local_rank(mesh_dim) * widest, classes)
    width, wanted = x.to_local().shape[dim], min(widest, classes - start)
    if width != wanted:
        raise ValueError(
            f"a DTensor of {classes} classes on {mesh.size(mesh_dim)} processes must have {wanted} "
            f"of them here, got {width}: use labo.parallel with to_local() for uneven parts"
        )
    return Columns(mesh.get_group(mesh_dim), start, classes, widest)


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
        total = grad.to(wide(grad.dtype), copy=True).contiguous()
        all_reduce(total, ctx.group)
        return total.to(grad.dtype), None


# ------------------------------------------------------------------ rows


class _Statistics(NamedTuple):
    """What value and gradient of every row follow from; float64, the same on all processes."""

    values: Tensor  # (N,)
    column: Tensor  # the target as a column of this process; out of range if it is elsewhere
    plan: Passes
    # (N, 13), see labo.fast.formula; top_at counts columns of this process. None for values only.
    coefficients: Tensor | None = None
    # Stored classes as columns of this process, -1 elsewhere, and their gradients, (N, k).
    stored: tuple[Tensor, Tensor] | None = None

    def scaled(self, per_row: float | Tensor) -> Tensor:
        """The coefficients of the gradient of sum_i factor_i value_i."""
        assert self.coefficients is not None
        scaled = self.coefficients * per_row
        for name in ("top", "source_top", "top_at"):  # a list as index would wait for the device
            column = COEFFICIENTS.index(name)
            scaled[:, column] = self.coefficients[:, column]
        return scaled


class SplitRows:
    """The rows of a loss of which this process has ``width`` columns.

    The class weights of the loss are those of all classes. With ``keep`` the statistics of a chunk
    are kept for its gradient in the backward pass.
    """

    def __init__(
        self, loss: Loss, columns: Columns, width: int, device: torch.device, keep: bool = False
    ) -> None:
        check_formula(loss)
        self.loss, self.columns = loss, columns
        self.weight, self.ignore_index = loss.weight, loss.ignore_index
        self.plan = plan_of(loss, self.weight is not None)
        # The masses of a loss that has them for each class.
        row = loss.class_row(int(columns.classes)) if self.plan.masses == FROM_ROW else None
        self.class_row = None if row is None else row.to(device)
        for name, given in (("weight", self.weight), ("the row of classes", self.class_row)):
            if given is not None:
                self._check(
                    columns.classes == len(given),
                    f"{name} must have one entry per class of all processes",
                    lambda k, name=name, size=tuple(given.shape): ValueError(  # type: ignore[misc]
                        f"{name} must have shape ({k},), one per class of all processes, got {size}"
                    ),
                )
        self.local_weight = columns.of_classes(self.weight, width)
        self.local_row = columns.of_classes(self.class_row, width)
        self.kept: dict[int, _Statistics] | None = {} if keep else None

    def rows(
        self,
        logits: Tensor,
        target: Tensor,
        teacher: tuple[Tensor, ...],
        factor: float | Tensor | None,
        out: Tensor | None,
        number: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Values of some rows, and their gradient times ``factor``; as a chunk loop calls it."""
        if self.kept is not None and number in self.kept:
            statistics = self.kept[number]
        else:
            with_gradient = factor is not None or self.kept is not None
            statistics = self.statistics(logits, target, teacher, out, with_gradient)
            if self.kept is not None:
                self.kept[number] = statistics
        values = statistics.values.to(wide(logits.dtype))
        if factor is None:
            return values, None
        return values, self.gradient(logits, statistics, teacher, factor, out)

    def gradient(
        self,
        logits: Tensor,
        statistics: _Statistics,
        teacher: tuple[Tensor, ...],
        factor: float | Tensor,
        out: Tensor | None,
    ) -> Tensor:
        """The gradient of sum_i factor_i value_i for the columns of this process."""
        plan, stored = statistics.plan, statistics.stored
        if out is None:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if logits.shape[1] == 0:
            return out
        if stored is not None:
            logits = _without(logits, stored[0], out)
        per_row = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.dim() else factor
        fixed = (statistics.column, plan, self.local_weight, _IGNORED, self._source(teacher))
        grad: Tensor = backend_of(logits).gradient(logits, *fixed, statistics.scaled(per_row), out)
        return grad if stored is None else add_entries(grad, stored[0], stored[1] * per_row)

    def _source(self, teacher: tuple[Tensor, ...]) -> Tensor | None:
        """What the masses come from."""
        return self.local_row if self.plan.stored or not teacher else teacher[0]

    def statistics(
        self,
        logits: Tensor,
        target: Tensor,
        teacher: tuple[Tensor, ...],
        out: Tensor | None,
        with_gradient: bool,
    ) -> _Statistics:
        """Local sums and two all-reduces; three for the first largest logit, or for a mixture."""
        plan, (group, start, classes, _), width = self.plan, self.columns, logits.shape[1]
        self._check(
            (target >= 0) & (target < classes) | (target == self.ignore_index),
            "a target is outside the classes of all processes and is not ignore_index",
            lambda k: _checks.out_of_range(target, k, self.ignore_index),
        )
        if plan.stored:
            late = "an entry of indices is not below the classes of all processes"
            sentence = "an entry of indices is not below the {} classes"
            self._check(
                teacher[0] < classes, late, lambda k: _checks.TeacherError(sentence.format(k))
            )
        valid = target != self.ignore_index
        y = target.masked_fill(~valid, 0)
        column = (target - start).masked_fill(~valid, _IGNORED)
        # What one process has and all need: the logits of the target and of the stored classes.
        single = [_entries(logits, column.unsqueeze(1))]
        source, mine = self._source(teacher), None
        if plan.masses == FROM_TEACHER and source is not None:
            single.append(_entries(source, column.unsqueeze(1)))
        if plan.stored:
            mine = torch.where(teacher[0] < 0, -1, teacher[0] - start)
            mine = mine.masked_fill((mine < 0) | (mine >= width), -1)
            single.append(_entries(logits, mine))
            logits = _without(logits, mine, out)
        fixed = (self.local_weight, _IGNORED, source)
        sums = backend_of(logits).sums(logits, column, plan, *fixed).unbind(1)
        named = dict(zip(SUMS, sums, strict=True))
        here = torch.stack([named["top"], named["source_top"]])
        if width == 0:
            here.fill_(-math.inf)
        tops = reduced(here, group, "MAX")
        if plan.asked & OTHERS or plan.stored:  # without other classes any finite number serves
            tops.masked_fill_(tops == -math.inf, 0.0)
        maximum, source_top = tops
        found = _shifted(named, here[0], maximum, plan, drop_of(here[1], source_top))
        message = [torch.stack([*found.values()], 1), *single]
        summed, *single = reduced(torch.cat(message, 1), group).split(
            [part.shape[1] for part in message], 1
        )
        found = dict(zip(found, summed.unbind(1), strict=True))
        found |= {"top": maximum, "source_top": source_top}
        if plan.asked & (EMIX | QMIX):
            plan = plan.mixed(found, maximum)
            again = backend_of(logits).sums(logits, column, plan, *fixed)
            names = MIXED_TEACHER if plan.asked & QMIX else MIXED
            at = SUMS.index(names[0])
            mixed = reduced(again[:, at : at + len(names)], group)
            found |= dict(zip(names, mixed.unbind(1), strict=True))
        limits, z_y = torch.finfo(wide(logits.dtype)), single[0].squeeze(1)
        u_y = found["u_y"] = u_of(z_y, maximum, limits)
        if plan.stored:
            z = torch.cat([single[0], single[1].masked_fill(teacher[0] < 0, -math.inf)], 1)
            found |= {"log_t": teacher[1].double(), **apart(found, z, limits)}
            u_y = found["sums_u_y"]
        if plan.masses == FROM_TEACHER:
            v_y = (single[1].squeeze(1) - source_top).masked_fill(u_y == -math.inf, -math.inf)
            found |= {"v_y": v_y, "q_y": (v_y / plan.tau).exp()}
        else:
            found |= masses_of(plan, y, u_y, self.class_row, source_top)
        zero = torch.zeros_like(maximum)
        found = dict.fromkeys(SUMS, zero) | found
        if plan.asked & TOP:
            first = torch.where(here[0] == maximum, start + named["top_at"], math.inf)
            first = reduced(first, group, "MIN")
            found["top_at"] = first.masked_fill(first == math.inf, -1.0)  # a row with NaN has none
        w_y = 1.0 if self.weight is None else self.weight[y].double()
        found |= temperatures(plan, maximum)
        if not with_gradient:
            values = value_of(self.loss, FoundSums(self.loss, found, w_y, classes))
            return _Statistics(values.masked_fill(~valid, 0.0), column, plan)
        given = (found, w_y, y, classes)
        values, coefficients, slopes = differentiate(self.loss, plan, *given)
        stored = None
        if plan.asked & TOP:
            coefficients[:, COEFFICIENTS.index("top_at")] -= start
        if mine is not None:
            entries = stored_entries(coefficients, slopes, teacher[0], y)
            stored = (mine, entries.masked_fill(~valid.unsqueeze(1), 0.0))
        coefficients = coefficients.masked_fill(~valid.unsqueeze(1), 0.0)
        values = values.masked_fill(~valid, 0.0)
        return _Statistics(values, column, plan, coefficients, stored)

    def _check(
        self, good: bool | Tensor, message: str, failure: Callable[[int], Exception]
    ) -> None:
        """Raise unless ``good``; where it cannot be read, later. ``failure`` is given V."""
        if isinstance(good, Tensor):
            _checks.ensure(good, lambda: failure(int(self.columns.classes)), message)
        elif not good:
            raise failure(int(self.columns.classes))


def _entries(rows: Tensor, index: Tensor) -> Tensor:
    """Some entries of each row, float64, from (N, k) columns; 0 for those of other processes."""
    width = rows.shape[1]
    if width == 0:
        return torch.zeros(index.shape, dtype=torch.float64, device=rows.device)
    mine = (index >= 0) & (index < width)
    return entries_of(rows, index.clamp(0, width - 1)).masked_fill(~mine, 0.0)


def _without(logits: Tensor, stored: Tensor, out: Tensor | None) -> Tensor:
    """The logits with the stored classes of this process masked, in ``out`` if that is given."""
    if out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if out.data_ptr() != logits.data_ptr():
        out.copy_(logits)
    if out.shape[1] == 0:
        return out
    return add_entries(out, stored, torch.full(stored.shape, -math.inf, device=out.device))


def drop_of(maximum_here: Tensor, maximum: Tensor) -> Tensor:
    """By how much every u changes if ``maximum`` takes the place of that of the shard; 0 or less.

    Without unmasked columns all sums are 0, and any finite number serves.
    """
    return torch.where(maximum_here == -math.inf, 0.0, maximum_here - maximum)


def moved(d: Tensor, e: Tensor, ue: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of e and of u e after every u has changed by ``d``."""
    shrink = d.exp()
    return shrink * e, shrink * (ue + d * e)


def _shifted(
    sums: dict[str, Tensor],
    maximum_here: Tensor,
    maximum: Tensor,
    plan: Passes,
    source_drop: Tensor | None = None,
) -> dict[str, Tensor]:
    """The sums that a formula asks for, with u = z - ``maximum`` instead of that of the shard.

    ``source_drop`` is by how much the v of a teacher changes.
    """
    d = drop_of(maximum_here, maximum)
    e, ue = moved(d, sums["e"], sums["ue"])
    found = {"e": e}
    if plan.asked & COUNT:
        found["count"] = sums["count"]
    if plan.asked & UE:
        found["ue"] = ue
    if plan.asked & R:
        shrink_r = (d / plan.tau).exp()
        found["r"] = shrink_r * sums["r"]
    if plan.masses == NO_MASSES:
        return found
    # By how much the log of a mass changes; those of neither kind depend on no maximum.
    log_q = torch.zeros_like(d)
    if plan.masses == TEMPERED:
        log_q = d / plan.tau
    elif plan.masses == FROM_TEACHER and source_drop is not None:
        log_q = source_drop / plan.tau
    shrink, q = log_q.exp(), sums["q"]
    found["q"] = shrink * q
    if plan.asked & QU:
        found["qu"] = shrink * (sums["qu"] + d * q)
    if plan.asked & QD:
        found["qd"] = shrink * (sums["qd"] + (log_q - d / plan.tau) * q)
    if plan.asked & RD:
        rd = shrink_r * (sums["rd"] + (log_q - d / plan.tau) * sums["r"])
        found["rd"] = rd.masked_fill(shrink_r == 0, 0.0)  # also of an infinite sum
    if plan.asked & WQU:
        found["wq"] = shrink * sums["wq"]
        found["wqu"] = shrink * (sums["wqu"] + d * sums["wq"])
    return found


# ------------------------------------------------------------------ losses on logits


class _SplitLoss(torch.autograd.Function):
    """Values, float64, from the sums; the gradient from the same sums in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: SplitRows,
        target: Tensor,
        with_gradient: bool,
        *teacher: Tensor,
    ) -> Tensor:
        ctx.rows, logits = rows, _waited(logits)
        ctx.statistics = rows.statistics(logits, target, teacher, None, with_gradient)
        ctx.save_for_backward(logits, *teacher)
        values: Tensor = ctx.statistics.values
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, *teacher = ctx.saved_tensors
        grad = ctx.rows.gradient(logits, ctx.statistics, tuple(teacher), upstream, None)
        return (grad, None, None, None, *(None for _ in teacher))


@disable_compile
def row_loss(
    logits: Any, target: Tensor, loss: Loss, teacher: tuple[Any, ...] = (), group: Group = None
) -> Tensor:
    """A loss on a DTensor that is split over the classes, or on this process's columns.

    Target, class weights and stored classes are those of all classes. ``teacher`` is what the loss
    takes after the target; its logits are split as ``logits`` are. ``group`` is for plain columns.
    """
    check_formula(loss)
    target = replicated("target", target)
    loss = loss.having(weight=replicated("weight", loss.weight))
    dim, columns = loss.dim, None
    if loss.teacher_is_stored:
        names = ("indices", "log_probabilities")
        teacher = tuple(replicated(*each) for each in zip(names, teacher, strict=True))
    if _checks.is_dtensor(logits):
        mesh_dim = _shard_dim(logits, dim)
        if mesh_dim is None:
            raise ValueError(
                f"logits must be replicated, or split over the classes (dim={dim}) along one mesh "
                f"dimension, got {_describe(logits)}. Redistribute them: "
                "logits.redistribute(placements=[Shard(-1)])"
            )
        columns = _columns_of_dtensor(logits, dim, mesh_dim)
        if not loss.teacher_is_stored:
            teacher = tuple(_split_as(loss.teacher_argument, x, logits, dim) for x in teacher)
        logits = logits.to_local()
    check_columns(logits.shape, target, dim)
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    width, labels = logits.shape[dim], target.reshape(-1).long()
    flat = logits.movedim(dim, -1).reshape(target.numel(), width)
    if loss.teacher_is_stored:
        valid = labels != loss.ignore_index
        teacher = stored_rows(teacher[0], teacher[1], logits, target.shape, UNKNOWN, valid)
    elif loss.teacher_argument is not None:
        given = teacher[0] if teacher else None
        teacher = (teacher_rows(loss.teacher_argument, given, flat, target.shape, dim),)
    if columns is None:
        columns = columns_of(width, logits.device, group)
    rows = SplitRows(loss, columns, width, flat.device)
    with_gradient = flat.requires_grad and torch.is_grad_enabled()
    value: Tensor = _SplitLoss.apply(flat, rows, labels, with_gradient, *teacher)
    value = value.reshape(target.shape) if loss.reduction == "none" else value.sum()
    if loss.reduction == "mean":
        value = value / weighted_total(None, labels, loss.ignore_index, loss.weight)
    return value.to(wide(logits.dtype))


def check_columns(shape: torch.Size, target: Tensor, dim: int) -> None:
    """Refuse targets that do not fit logits of this shape."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim={dim} is not a dimension of logits of shape {tuple(shape)}")
    if target.is_floating_point():
        raise ValueError(
            "logits that are split over processes take class indices as targets, got probabilities"
        )
    _checks.check_target(shape, target, dim)


# ------------------------------------------------------------------ heads


class LocalHead(NamedTuple):
    """An output layer, its rows and what a teacher gives, as plain tensors.

    ``columns`` is None for a whole weight.
    """

    input: Any
    weight: Any
    bias: Any
    target: Tensor
    teacher: Any = None
    columns: Columns | None = None


def local_head(given: LocalHead) -> LocalHead:
    """The arguments of ``linear_loss``, some of which are DTensors, as plain tensors."""
    input, weight, bias, target, teacher, _ = given
    target = replicated("target", target)
    whole = not _checks.is_dtensor(weight) or all(p.is_replicate() for p in weight.placements)
    if _checks.is_dtensor(weight) and _fsdp_group(weight) is not None:
        weight, bias, whole = gather_weight(weight), gather_weight(bias), True
    if whole:
        weight, bias = replicated("linear_weight", weight), replicated("linear_bias", bias)
        return LocalHead(replicated("input", input), weight, bias, target, teacher)
    mesh_dim = _shard_dim(weight, 0)
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
    columns = _columns_of_dtensor(weight, 0, mesh_dim)
    if _checks.is_dtensor(input):
        input = _with_partial_gradient(input, mesh_dim)
    else:
        _check_same_rows(target, columns.group)
        input = SumGradient.apply(input, columns.group)
    teacher = _local_teacher(teacher, weight)
    return LocalHead(input, weight.to_local(), bias, target, teacher, columns)


def _local_teacher(teacher: Any, weight: DTensor) -> Any:
    """The columns of a teacher's logits, or the rows of its weight, that this process holds."""
    if isinstance(teacher, Tensor):
        return _split_as("teacher_logits", teacher, weight, teacher.dim() - 1, of=0)
    layer = isinstance(teacher, tuple | list) and len(teacher) > 1
    if not layer or not getattr(teacher[0], "is_floating_point", bool)():
        return teacher  # stored classes; the others are refused later
    names = ("teacher_weight", "teacher_bias")
    pairs = zip(names, teacher[1:3], strict=False)
    local = [x if x is None else _split_as(name, x, weight, 0) for name, x in pairs]
    rest = [replicated("teacher_hidden", teacher[0]), *local, *teacher[3:]]
    return type(teacher)(*rest) if hasattr(teacher, "_fields") else tuple(rest)


def _split_as(name: str | None, x: Any, other: DTensor, dim: int, of: int | None = None) -> Tensor:
    """The part of this process of a DTensor whose classes, in ``dim``, are split as the other's."""
    mesh_dim = _shard_dim(other, dim if of is None else of)
    same = _checks.is_dtensor(x) and x.device_mesh == other.device_mesh
    if not same or mesh_dim is None or _shard_dim(x, dim) != mesh_dim:
        found = _describe(x) if _checks.is_dtensor(x) else f"a {type(x).__name__}"
        raise _checks.TeacherError(
            f"{name} must be a DTensor whose classes are split as those of the model, got {found}"
        )
    plain: Tensor = x.to_local().detach()
    return plain


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
    """The whole of a weight that is split over *data-parallel* processes, as FSDP2 does.

    One all-gather. The gradient is averaged over the processes and split again, as FSDP2 hands
    gradients to its parameters. :func:`labo.linear_loss` calls this for the parameters of modules
    under ``fully_shard`` that are used outside of their forward pass.

    Args:
        weight: a DTensor, split or replicated, on a mesh whose processes hold different samples.

    Returns:
        A plain tensor.
    """
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


def _waited(x: Tensor) -> Tensor:
    """The result of a collective that may still be under way."""
    return x.wait() if hasattr(x, "wait") else x


def replicated(name: str, x: Tensor | None) -> Any:
    """A replicated DTensor as a plain tensor; a plain one is taken to be replicated."""
    return None if x is None else _checks.local(name, x)
