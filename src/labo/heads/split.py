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
from ..fast.columns import MIXED, MIXED_TEACHER, SUMS
from ..fast.dispatch import backend_of
from ..fast.formula import (
    FormulaRows,
    apart,
    columns_asked,
    entries_of,
    masses_of,
    plan_of,
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
    OTHERS,
    QD,
    QMIX,
    QU,
    RD,
    TEMPERED,
    TOP,
    UE,
    WQU,
    Passes,
    R,
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


class SplitLoss:
    """A loss of which this process has ``width`` columns, with what it has for each class.

    The class weights of the loss are those of all classes.
    """

    def __init__(self, loss: Loss, columns: Columns, width: int, device: torch.device) -> None:
        check_formula(loss)
        self.loss, self.columns = loss, columns
        self.class_row: Tensor | None = None
        if plan_of(loss, loss.weight is not None).masses == FROM_ROW:
            self.class_row = loss.class_row(int(columns.classes)).to(device)
        if loss.weight is not None:
            shape = tuple(loss.weight.shape)
            self.check(
                columns.classes == len(loss.weight),
                "weight must have one entry per class of all processes",
                lambda k: ValueError(
                    f"weight must have shape ({k},), one per class of all processes, got {shape}"
                ),
            )
        self.local_weight = columns.of_classes(loss.weight, width)
        self.local_row = columns.of_classes(self.class_row, width)

    def check(self, good: bool | Tensor, message: str, failure: Callable[[int], Exception]) -> None:
        """Raise unless ``good``; where it cannot be read, later. ``failure`` is given V."""
        if isinstance(good, Tensor):
            _checks.ensure(good, lambda: failure(int(self.columns.classes)), message)
        elif not good:
            raise failure(int(self.columns.classes))


class SplitRows(FormulaRows):
    """The rows of a formula on the columns of this process.

    Args:
        split: the loss.
        logits: (N, V_s), of which only dtype and device matter.
        target: (N,) class indices, of all classes.
        teacher: what the loss takes after the target; stored classes are of all classes.
        out: as for :class:`FormulaRows`.

    Attributes:
        reduced: the plan and the sums of all processes; None before the first pass. A backward
            pass that is given those of the forward pass communicates nothing.
    """

    def __init__(
        self,
        split: SplitLoss,
        logits: Tensor,
        target: Tensor,
        teacher: tuple[Tensor, ...],
        out: Tensor | None = None,
    ) -> None:
        loss, (_, start, self.classes, _) = split.loss, split.columns
        self.split, self.labels, self.stored_classes = split, target, None
        # The target as a column of this process; out of range if it is elsewhere.
        column = (target - start).masked_fill(target == loss.ignore_index, _IGNORED)
        source, stored = teacher[0] if teacher else split.local_row, None
        if loss.teacher_is_stored:
            self.stored_classes, source = teacher
            stored = torch.where(teacher[0] < 0, -1, teacher[0] - start)
            stored = stored.masked_fill((stored < 0) | (stored >= logits.shape[1]), -1)
        super().__init__(backend_of(logits), loss, column, source, stored, out)
        self.weight, self.ignore_index, self.y = split.local_weight, _IGNORED, column
        self.reduced: tuple[Passes, dict[str, Tensor]] | None = None

    def gradient(self, logits: Tensor, slopes: dict[str, Tensor]) -> Tensor:
        if logits.shape[1] == 0:
            return torch.empty_like(logits)
        return super().gradient(_waited(logits), slopes)

    def _without_stored(self, logits: Tensor) -> Tensor:
        return super()._without_stored(logits) if logits.shape[1] else logits

    def _first_pass(self, logits: Tensor, statistics: Tensor | None) -> float | Tensor:
        """Local sums and two all-reduces; three for the first largest logit, or for a mixture."""
        self.ignored = ignored = self.labels == self.loss.ignore_index
        y, weight = self.labels.masked_fill(ignored, 0), self.loss.weight
        self.w_y = 1.0 if weight is None else weight[y].double()
        if self.reduced is None:
            self._check_values()
            self.reduced = self._reduced_sums(_waited(logits), y)
        self.plan, self.sums = self.reduced
        return self.w_y

    def _check_values(self) -> None:
        target, classes, ignore_index = self.labels, self.classes, self.loss.ignore_index
        self.split.check(
            (target >= 0) & (target < classes) | (target == ignore_index),
            "a target is outside the classes of all processes and is not ignore_index",
            lambda k: _checks.out_of_range(target, k, ignore_index),
        )
        if self.stored_classes is not None:
            self.split.check(
                self.stored_classes < classes,
                "an entry of indices is not below the classes of all processes",
                lambda k: _checks.TeacherError(f"an entry of indices is not below the {k} classes"),
            )

    def _reduced_sums(self, logits: Tensor, y: Tensor) -> tuple[Passes, dict[str, Tensor]]:
        """The plan and the sums, float64 and the same on all processes."""
        plan, (group, start, *_), column = self.plan, self.split.columns, self.target.unsqueeze(1)
        # What one process has and all need: the logits of the target and of the stored classes.
        single = [_entries(logits, column)]
        if plan.masses == FROM_TEACHER:
            single.append(_entries(self.source, column))
        if self.stored is not None:
            single.append(_entries(logits, self.stored))
            logits = self._masked = self._without_stored(logits)
        sums = self._local_sums(logits, plan)
        here = torch.stack([sums["top"], sums["source_top"]])
        if logits.shape[1] == 0:
            here.fill_(-math.inf)
        tops = reduced(here, group, "MAX")
        if not plan.measures:  # without other classes any finite number serves
            tops.masked_fill_(tops == -math.inf, 0.0)
        maximum, source_top = tops
        local = _shifted(sums, plan, drop_of(here[0], maximum), drop_of(here[1], source_top))
        message = [torch.stack([*local.values()], 1), *single]
        widths = [part.shape[1] for part in message]
        summed, *single = reduced(torch.cat(message, 1), group).split(widths, 1)
        found = dict(zip(local, summed.unbind(1), strict=True))
        found |= {"top": maximum, "source_top": source_top}
        if plan.asked & (EMIX | QMIX):
            plan = plan.mixed(found, maximum)
            again = self._local_sums(logits, plan)
            names = MIXED_TEACHER if plan.asked & QMIX else MIXED
            mixed = reduced(torch.stack([again[name] for name in names], 1), group)
            found |= dict(zip(names, mixed.unbind(1), strict=True))
        limits, z_y = torch.finfo(wide(logits.dtype)), single[0].squeeze(1)
        u_y = found["u_y"] = u_of(z_y, maximum, limits)
        if self.stored_classes is not None and self.log_t is not None:
            z = single[1].masked_fill(self.stored_classes < 0, -math.inf)
            z = torch.cat([single[0], z], 1)
            found |= {"log_t": self.log_t.double(), **apart(found, z, limits)}
            u_y = found["sums_u_y"]
        if plan.masses == FROM_TEACHER:
            v_y = (single[1].squeeze(1) - source_top).masked_fill(u_y == -math.inf, -math.inf)
            found |= {"v_y": v_y, "q_y": (v_y / plan.tau).exp()}
        else:
            found |= masses_of(plan, y, u_y, self.split.class_row, source_top)
        if plan.asked & TOP:
            first = torch.where(here[0] == maximum, start + sums["top_at"], math.inf)
            first = reduced(first, group, "MIN")  # inf in a row with NaN, which has none
            found["top_at"] = (first - start).masked_fill(first == math.inf, -1.0)
        return plan, found | temperatures(plan, maximum)

    def _local_sums(self, logits: Tensor, plan: Passes) -> dict[str, Tensor]:
        sums = self.backend.sums(logits, self._given(plan))
        return dict(zip(SUMS, sums.unbind(1), strict=True))


def _entries(rows: Tensor | None, index: Tensor) -> Tensor:
    """Some entries of each row, float64, from (N, k) columns; 0 for those of other processes."""
    assert rows is not None
    width = rows.shape[1]
    if width == 0:
        return torch.zeros(index.shape, dtype=torch.float64, device=rows.device)
    mine = (index >= 0) & (index < width)
    return entries_of(rows, index.clamp(0, width - 1)).masked_fill(~mine, 0.0)


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
    sums: dict[str, Tensor], plan: Passes, d: Tensor, source_d: Tensor
) -> dict[str, Tensor]:
    """The sums that a plan asks for, after every u has changed by ``d`` and every v by another."""
    d_r = d / plan.tau
    # By how much the log of a mass changes; those of other kinds depend on no maximum.
    d_q = {TEMPERED: d_r, FROM_TEACHER: source_d / plan.tau}.get(plan.masses, torch.zeros_like(d))
    shrink_r, shrink_q = d_r.exp(), d_q.exp()
    e, ue = moved(d, sums["e"], sums["ue"])
    r, q, wq = sums["r"], sums["q"], sums["wq"]
    rd = shrink_r * (sums["rd"] + (d_q - d_r) * r)
    all_sums = {
        "count": sums["count"],
        "e": e,
        "ue": ue,
        "r": shrink_r * r,
        "rd": rd.masked_fill(shrink_r == 0, 0.0),  # also of an infinite sum
        "q": shrink_q * q,
        "qu": shrink_q * (sums["qu"] + d * q),
        "qd": shrink_q * (sums["qd"] + (d_q - d_r) * q),
        "wq": shrink_q * wq,
        "wqu": shrink_q * (sums["wqu"] + d * wq),
    }
    asked = dict(columns_asked(plan.asked, plan.masses))
    return {name: x for name, x in all_sums.items() if name in asked}


# ------------------------------------------------------------------ losses on logits


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
    split = SplitLoss(loss, columns, width, flat.device)
    value = SplitRows(split, flat, labels, teacher).values(flat)
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


def local_call(call: Any) -> Any:
    """A :class:`labo.linear.Call` with DTensors, with what each process has of them."""
    weight, bias, target = call.weight, call.bias, replicated("target", call.target)
    whole = not _checks.is_dtensor(weight) or all(p.is_replicate() for p in weight.placements)
    if _checks.is_dtensor(weight) and _fsdp_group(weight) is not None:
        weight, bias, whole = gather_weight(weight), gather_weight(bias), True
    if whole:
        weight, bias = replicated("linear_weight", weight), replicated("linear_bias", bias)
        input = replicated("input", call.input)
        return call._replace(input=input, weight=weight, bias=bias, target=target)
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
    if _checks.is_dtensor(call.input):
        input = _with_partial_gradient(call.input, mesh_dim)
    else:
        _check_same_rows(target, columns.group)
        input = SumGradient.apply(call.input, columns.group)
    return call._replace(
        input=input,
        weight=weight.to_local(),
        bias=bias,
        target=target,
        teacher=_local_teacher(call.teacher, weight),
        columns=columns,
    )


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
