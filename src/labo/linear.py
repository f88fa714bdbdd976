"""Output layer and loss in one, without ever storing the (N, V) logits.

The rows are processed in chunks. The logits of a chunk are computed into one small buffer, replaced
by their gradient, multiplied into the gradients of hidden states, weight and bias, and discarded.
A loss that has fused backends uses the fastest one for a chunk. Every other row-wise loss of the
library is differentiated by autograd, chunk by chunk.

The order here: arguments, checks, the chunk loop, autograd, ``torch.compile``. Output layer, loss
of a chunk and chunks are in :mod:`labo.chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import _checks, metrics
from ._torch import disable_compile
from .chunks import (
    TILE,
    ChunkRows,
    HeadRows,
    LossRows,
    Mean,
    cap_slope,
    capped,
    length,
    parts_of,
)
from .fast.dispatch import LATE_GRADIENT, ROW_LOSS_SCHEMA, choose, denominator, times_upstream
from .heads import split
from .heads.low_rank import LowRankWeight
from .heads.quantized import QuantizedWeight, as_weight
from .loss import Loss
from .rows import weighted_total, wide
from .stored import stored_rows

# About how many buffers of the size of a chunk of logits autograd keeps at a time.
_AUTOGRAD_COPIES = 8
# About how many bytes a formula takes for each stored class of a row.
_STORED_BYTES = 80
# The budget of a chunk where it does not follow the weight.
_BUDGET = 96 << 20
# The fewest rows for which a matrix product on a GPU is worth reading and writing its result.
_FEWEST_ROWS = 1024


@dataclass(frozen=True)
class LinearLossOptions:
    """How :func:`linear_loss` divides its rows into chunks.

    Attributes:
        batch_chunk_size: the largest number of rows of a chunk; None derives it from the budget.
        memory_budget: bytes for the logits of one chunk and what is computed from them. Each chunk
            reads and writes the whole gradient of the weight, so few large chunks are faster. None
            is 96 MiB; on CUDA it is the size of the weight, or 1024 rows if these take more, and
            chunks have a multiple of 256 rows.
        drop_ignored: leave the rows whose target is ``ignore_index`` out of the matrix products.
            Values and gradients are the same. None does so on the CPU. On CUDA it has to be asked
            for, because the number of these rows must be known: the device is waited for once in
            a call (under ``torch.compile`` once in each pass).
    """

    batch_chunk_size: int | None = None
    memory_budget: int | None = None
    drop_ignored: bool | None = None

    def __post_init__(self) -> None:
        for name in ("batch_chunk_size", "memory_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value!r}")
        if self.drop_ignored not in (None, False, True):
            raise ValueError(f"drop_ignored must be True, False or None, got {self.drop_ignored!r}")

    def most_rows(self, bytes_per_row: int, rows_of_weight: int | None = None) -> int:
        """The largest number of rows of a chunk; see :func:`rows_of_weight`."""
        if self.batch_chunk_size is not None:
            return self.batch_chunk_size
        if self.memory_budget is None and rows_of_weight is not None:
            return max(TILE, rows_of_weight // TILE * TILE)
        return max(1, (self.memory_budget or _BUDGET) // bytes_per_row)

    def drops(self, device: torch.device) -> bool:
        """Whether ignored rows are left out of the products."""
        return device.type == "cpu" if self.drop_ignored is None else self.drop_ignored


def rows_of_weight(width: int, copies: int) -> int:
    """How many rows of logits, with ``copies`` buffers each, take as much as a weight (V, D).

    One buffer of D rows does, whatever V is. Of few columns, D, it is more.
    """
    return max(_FEWEST_ROWS, width) // copies


class TeacherHead(NamedTuple):
    """The output layer of a teacher and its rows, as ``teacher_logits`` of :func:`linear_loss`.

    Attributes:
        hidden: (..., E) hidden states of the teacher.
        weight: (V, E); it may be quantized, see :class:`labo.QuantizedWeight`.
        bias: (V,), or None.
        softcap: as for :func:`linear_loss`.
    """

    hidden: Tensor
    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None
    softcap: float | None = None


Teacher = Tensor | tuple[Tensor | QuantizedWeight, ...] | TeacherHead | None
ReturnMetrics = Literal[False, True, "rows"]


class Call(NamedTuple):
    """The arguments of :func:`linear_loss`.

    ``columns`` says which classes this process has, if the others are elsewhere.
    """

    input: Tensor
    weight: Any
    target: Tensor
    loss: nn.Module
    bias: Tensor | None
    softcap: float | None
    teacher: Any
    token_weight: Tensor | None
    z_loss: float
    return_metrics: ReturnMetrics
    impl: str
    options: LinearLossOptions | None
    columns: split.Columns | None = None


@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor | LowRankWeight | QuantizedWeight,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None = ...,
    softcap: float | None = ...,
    teacher_logits: Teacher = ...,
    token_weight: Tensor | None = ...,
    z_loss: float = ...,
    return_metrics: Literal[False] = ...,
    impl: str = ...,
    options: LinearLossOptions | None = ...,
) -> Tensor: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor | LowRankWeight | QuantizedWeight,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None = ...,
    softcap: float | None = ...,
    teacher_logits: Teacher = ...,
    token_weight: Tensor | None = ...,
    z_loss: float = ...,
    return_metrics: Literal[True, "rows"],
    impl: str = ...,
    options: LinearLossOptions | None = ...,
) -> tuple[Tensor, metrics.LossMetrics]: ...
def linear_loss(
    input: Tensor,
    linear_weight: Tensor | LowRankWeight | QuantizedWeight,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_logits: Teacher = None,
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    return_metrics: ReturnMetrics = False,
    impl: str = "auto",
    options: LinearLossOptions | None = None,
) -> Tensor | tuple[Tensor, metrics.LossMetrics]:
    """``loss(F.linear(input, linear_weight, linear_bias), target)`` without the logits.

    Memory grows with N + V instead of N V. Gradients of the hidden states, the weight and the bias
    are computed in the forward pass, and only those that are required. (In float16, and for
    ``reduction="none"``, they are computed in the backward pass.) The ``reduction``,
    ``ignore_index`` and ``weight`` of the loss apply. Names follow ``F.linear_cross_entropy``.

    Args:
        input: (..., D) hidden states.
        linear_weight: (V, D). A DTensor that is split over the classes is used where it is (see
            :mod:`labo.heads.parallel`), one that FSDP2 has split is gathered. Or a
            :class:`labo.LowRankWeight`, for a layer with a LoRA or DoRA adapter. Or a frozen
            quantized weight, see :class:`labo.QuantizedWeight`.
        target: (...) class indices or (..., V) class probabilities.
        loss: any row-wise loss Module of the library, or a :class:`labo.Warmup` of two.
        linear_bias: (V,).
        softcap: if given, the logits are softcap tanh(z / softcap), as in Gemma 2.
        teacher_logits: for a loss with teacher logits (``labo.DistillationLoss``,
            ``DecoupledDistillationLoss``, ``CSKDLoss``, ``PSKDLoss``): those logits,
            (..., V), or hidden states (..., E), weight (V, E) and optionally bias (V,) of the
            teacher's output layer (a tuple or a :class:`labo.TeacherHead`), whose logits are then
            computed by chunks too; that weight may be quantized. For ``TopKDistillationLoss`` the
            pair (indices, log_probabilities), each (..., k). Held constant.
        token_weight: (...), a factor for the value of each row, held constant. The mean divides by
            the sum over the rows that count of the token weight times the class weight of the
            label; if that is 0, the mean is 0. A sum is not divided.
        z_loss: coefficient of :func:`labo.functional.z_loss`, which is added to the loss of each
            row.
        return_metrics: True returns ``(loss, metrics)`` with a :class:`labo.LossMetrics` of sums
            over the rows that count; "rows" has one number per row in it, (...).
        impl: the backend, for losses that have several.
        options: chunk size or memory budget.

    Returns:
        The reduced loss, or (...) if the loss has ``reduction="none"``; with the metrics if they
        are asked for.

    Example:
        >>> from labo import LABOLoss
        >>> hidden, head = torch.ones(3, 2), torch.eye(4, 2)
        >>> linear_loss(hidden, head, torch.tensor([0, 1, 1]), LABOLoss(tau=1.25))
        tensor(1.2238)
    """
    Loss.fields["impl"].check(impl)
    check_tensors(input, linear_weight, target)
    extras = (teacher_logits, token_weight, z_loss, return_metrics, impl, options)
    call = Call(input, linear_weight, target, loss, linear_bias, softcap, *extras)
    if any(map(_checks.is_dtensor, (input, linear_weight, linear_bias, target))):
        call = split.local_call(call)
        if call.columns is not None and impl != "auto":
            raise ValueError('a split linear_weight goes with impl="auto" alone')
    return compute(call)


def compute(call: Call) -> Any:
    """:func:`linear_loss` of plain tensors, on all classes or on those of this process."""
    call = call._replace(weight=as_weight("linear_weight", call.weight))
    weights = (call.weight, _teacher_weight(call.teacher))
    # torch.compile knows the columns of other processes and such weights as little as its operators
    own = any(isinstance(x, LowRankWeight | QuantizedWeight) for x in weights)
    if torch.compiler.is_compiling() and (own or call.columns is not None):
        return disable_compile(_compute)(call)
    return _compute(call)


def _compute(call: Call) -> Any:
    shape, columns = call.input.shape[:-1], call.columns
    _check_settings(call.softcap, call.z_loss, call.return_metrics)
    options = check_options(call.options)
    active = _rowwise(call.loss)
    # as in Warmup.forward
    unused = active is not call.loss and active.teacher_argument is None
    teacher = None if unused else call.teacher
    loss = computing(active, teacher is not None, columns is not None)
    loss = loss.having(z_loss=loss.z_loss + call.z_loss, impl=call.impl, inplace=False)
    adapter = call.weight if isinstance(call.weight, LowRankWeight) else None
    weight = call.weight if adapter is None else adapter.base
    head = _layer(_LAYER, call.input, weight, call.bias, call.softcap)
    target = _check_target(head, call.target, loss, shape, columns is not None)
    taught = _check_teacher(teacher, loss, target, shape, len(weight), columns is not None)
    token_weight = _check_token_weight(call.token_weight, call.input, target, loss.ignore_index)
    split_loss = None
    if columns is None:
        rows = _rows(loss, head, target, taught)
    else:
        rows = LossRows(loss, "split", None, taught)
        split_loss = split.SplitLoss(loss, columns, len(weight), target.device)
    most, drop = _most_rows(options, head, rows, columns), options.drops(target.device)
    measure, reduction = bool(call.return_metrics), active.reduction
    statistics: Tensor | None
    with torch.autocast(call.input.device.type, enabled=False):
        total = _total(head, target, token_weight, loss, columns is not None)
        mean = Mean(total if reduction == "mean" else 1.0, token_weight)
        if torch.compiler.is_compiling():
            fixed = (reduction, most, drop, measure)
            value, statistics = _compiled(head, target, rows, mean, *fixed)
        else:
            if adapter is not None:
                low, scale = adapter.low_rank(head.input), adapter.class_scale()
                head = head._replace(low=low, b=adapter.b.to(head.input.dtype), scale=scale)
            parts = parts_of(target, loss.ignore_index, most, drop)
            late = torch.is_grad_enabled() and _is_late(head, reduction)
            chunked = ChunkRows(rows, target, parts, measure, split_loss, keep=late)
            value = _eager(head, chunked, mean, reduction)
            statistics = chunked.statistics
    if reduction == "none":
        value = value.reshape(shape)
    if statistics is None or not measure:
        return value
    classes = len(weight) if columns is None else columns.classes
    if call.return_metrics == "rows":
        per_row = metrics.rows_of(statistics, target, active, classes)
        return value, metrics.LossMetrics(*(x.reshape(shape) for x in per_row))
    return value, metrics.sums_of(statistics, target, active, classes)


class LinearLoss(nn.Module):
    """An output layer together with its loss: ``nn.Linear`` and any row-wise loss, by chunks.

    The parameters are those of ``nn.Linear``. See :func:`linear_loss`.

    Args:
        in_features: D.
        num_classes: V.
        loss: any row-wise loss Module of the library, or a :class:`labo.Warmup` of two.
        bias: whether there is a bias.
        softcap, z_loss, impl, options: as for :func:`linear_loss`.
        device, dtype: of the parameters.

    Example:
        >>> from labo import LABOLoss
        >>> head = LinearLoss(8, 100, LABOLoss(tau=1.25))
        >>> head(torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)).shape
        torch.Size([])
        >>> head.logits(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 100])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        loss: nn.Module,
        *,
        bias: bool = False,
        softcap: float | None = None,
        z_loss: float = 0.0,
        impl: str = "auto",
        options: LinearLossOptions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_settings(softcap, z_loss)
        Loss.fields["impl"].check(impl)
        check_options(options)
        _rowwise(loss)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.loss = loss
        self.softcap = softcap
        self.z_loss = z_loss
        self.impl = impl
        self.options = options

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        teacher_logits: Teacher = None,
        token_weight: Tensor | None = None,
        return_metrics: ReturnMetrics = False,
    ) -> Tensor | tuple[Tensor, metrics.LossMetrics]:
        result: Tensor | tuple[Tensor, metrics.LossMetrics] = linear_loss(
            input,
            self.linear.weight,
            target,
            self.loss,
            linear_bias=self.linear.bias,
            softcap=self.softcap,
            teacher_logits=teacher_logits,
            token_weight=token_weight,
            z_loss=self.z_loss,
            return_metrics=return_metrics,
            impl=self.impl,
            options=self.options,
        )
        return result

    def logits(self, input: Tensor) -> Tensor:
        """The logits, (..., V), for evaluation and decoding."""
        result: Tensor = self.linear(input)
        return result if self.softcap is None else capped(result, self.softcap)


# ------------------------------------------------------------------ checks

_LAYER = ("input", "linear_weight", "linear_bias")
_TEACHER_LAYER = ("the teacher's hidden states", "weight", "bias")


def check_options(options: LinearLossOptions | None) -> LinearLossOptions:
    if options is None:
        return LinearLossOptions()
    if not isinstance(options, LinearLossOptions):
        raise TypeError(
            f"options must be a LinearLossOptions, got {options!r}: for chunks of 64 rows write "
            "LinearLossOptions(batch_chunk_size=64)"
        )
    return options


def check_tensors(input: object, weight: object, target: object) -> None:
    """Refuse a call with other things than tensors, such as the whole output of a model."""
    _checks.check_tensors(input, target, "input", "pass the hidden states before the output layer")
    if not isinstance(weight, LowRankWeight | QuantizedWeight):
        instead = "pass linear.weight, and linear.bias as linear_bias"
        _checks.check_tensor("linear_weight", weight, instead)


def _check_settings(
    softcap: float | None, z_loss: float = 0.0, return_metrics: ReturnMetrics = False
) -> None:
    if softcap is not None and not (_checks.is_number(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a number above 0 or None, got {softcap!r}")
    Loss.fields["z_loss"].check(z_loss)
    if return_metrics not in (False, True, "rows"):
        raise ValueError(f'return_metrics must be False, True or "rows", got {return_metrics!r}')


def _rowwise(loss: Any) -> Any:
    """The loss that computes (the current one of a warm-up), if its rows are independent."""
    if isinstance(loss, type):
        raise TypeError(f"loss must be a Module, got the class: write {loss.__name__}(...)")
    while hasattr(loss, "active"):  # Warmup
        loss = loss.active
    if not getattr(loss, "rowwise", False):
        raise ValueError(
            f"linear_loss takes a row-wise loss of labo, not {type(loss).__name__}: its value "
            "for a row must depend on that row alone"
        )
    return loss


def computing(loss: nn.Module, taught: bool, divided: bool) -> Loss:
    """The loss with the hyper-parameters of this epoch, with or without a teacher.

    If its columns are ``divided`` among processes, losses that need whole rows are refused.
    """
    active = _rowwise(loss)
    active.check_teacher(taught)
    current: Loss = active.current()
    if not taught:
        current = current.untaught()
    if not divided:
        return current
    if current.reference_only() is not None:
        raise ValueError(
            f"{active!r} cannot work on logits that are split over processes: it has no fused "
            "backend. Gather the logits or the weight first: full_tensor() of a DTensor"
        )
    split.check_formula(current)
    return current.having(weight=split.replicated("weight", current.weight))


def _layer(
    names: Sequence[str], input: Tensor, weight: Any, bias: Tensor | None, softcap: float | None
) -> HeadRows:
    """An output layer with its rows, (N, D), in the dtype of autocast if that is on."""
    if len(weight.shape) != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        hint = ""
        if len(weight.shape) == 1:
            hint = (
                "; FullyShardedDataParallel and ZeRO-3 flatten parameters outside of the forward "
                "pass of their module: use a LinearLoss inside of the wrapped model"
            )
        raise ValueError(
            f"{names[1]} must have shape (V, D) for {names[0]} of shape (..., D), got "
            f"{tuple(weight.shape)} and {tuple(input.shape)}{hint}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{names[2]} must have shape ({len(weight)},), got {tuple(bias.shape)}")
    # The products of a quantized weight have the dtype of the input.
    quantized = isinstance(weight, QuantizedWeight)
    tensors: list[Any] = [input, None if quantized else weight, bias]
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        tensors = [None if x is None else x.to(dtype) for x in tensors]
    input, dense, bias = tensors
    if len({x.dtype for x in tensors if x is not None}) > 1:
        kind = "" if dense is None else f" ({dense.dtype})"
        raise ValueError(
            f"{names[0]} ({input.dtype}), {names[1]}{kind} and {names[2]} must have "
            "the same dtype, unless autocast is on"
        )
    _checks.check_logits(input, -1)
    flat = input.reshape(-1, input.shape[-1])
    return HeadRows(flat, weight if quantized else dense, bias, softcap=softcap)


def _check_target(
    head: HeadRows, target: Tensor, loss: Loss, rows: torch.Size, divided: bool
) -> Tensor:
    """The targets, (N,) or (N, V). Class indices are checked later."""
    if loss.dim != -1:
        raise ValueError(
            f"linear_loss has the classes last: the loss must have dim=-1, not {loss.dim}"
        )
    if loss.weight is not None and loss.weight.requires_grad:
        raise ValueError("linear_loss computes no gradient for class weights: detach them")
    shape, soft = torch.Size((*rows, len(head.weight))), target.is_floating_point()
    if divided:
        split.check_columns(shape, target, -1)
    else:
        _checks.check_weight(loss.weight, len(head.weight))
        _checks.check_target(shape, target, -1)
    _checks.check_devices(head.input, target=target, weight=loss.weight)
    return target.reshape(-1, len(head.weight)) if soft else target.reshape(-1).long()


def _check_token_weight(
    token_weight: Tensor | None, input: Tensor, target: Tensor, ignore_index: int
) -> Tensor | None:
    """(N,), at least float32; 0 for the rows that do not count, whatever is given for them."""
    if token_weight is None:
        return None
    if not isinstance(token_weight, Tensor) or token_weight.is_complex():
        kind = getattr(token_weight, "dtype", type(token_weight).__name__)
        raise TypeError(f"token_weight must be a tensor of real numbers, one per row, got {kind}")
    token_weight = _checks.local("token_weight", token_weight)
    if token_weight.shape != input.shape[:-1]:
        raise ValueError(
            f"token_weight must have shape {tuple(input.shape[:-1])}, one per row, got "
            f"{tuple(token_weight.shape)}"
        )
    if token_weight.requires_grad:
        raise ValueError("linear_loss computes no gradient for token_weight: detach it")
    _checks.check_devices(input, token_weight=token_weight)
    weights = token_weight.reshape(-1).to(wide(input.dtype))
    return weights if target.is_floating_point() else weights.masked_fill(target == ignore_index, 0)


def _check_teacher(
    teacher: Any,
    loss: Loss,
    target: Tensor,
    rows: torch.Size,
    classes: int,
    divided: bool,
) -> tuple[Any, ...]:
    """What the loss learns from, as :class:`labo.chunks.LossRows` has it."""
    if teacher is None:
        return ()
    if loss.teacher_is_stored:
        if not isinstance(teacher, tuple | list) or len(teacher) != 2:
            raise _checks.TeacherError(
                "teacher_logits must be the pair (indices, log_probabilities)"
            )
        names = ("indices", "log_probabilities")
        indices, log_t = (_checks.local(*each) for each in zip(names, teacher, strict=True))
        valid = None if target.is_floating_point() else target != loss.ignore_index
        all_classes = split.UNKNOWN if divided else classes
        return stored_rows(indices, log_t, target, rows, all_classes, valid)
    want = f"for input of shape {(*rows, 'D')} and {classes} classes"
    if isinstance(teacher, Tensor):
        teacher = _checks.local("teacher_logits", teacher)
        if teacher.shape != (*rows, classes):
            raise _checks.TeacherError(
                f"teacher_logits must have shape {(*rows, classes)} {want}, "
                f"got {tuple(teacher.shape)}"
            )
        return (teacher.detach().reshape(len(target), classes),)
    several = isinstance(teacher, tuple | list)
    if not several or not 2 <= len(teacher) <= (4 if isinstance(teacher, TeacherHead) else 3):
        found = f"{len(teacher)} tensors" if several else type(teacher).__name__
        raise _checks.TeacherError(
            "teacher_logits must be logits, or hidden states, weight and perhaps bias of the "
            f"teacher's output layer, got {found}"
        )
    hidden, weight, bias, softcap = TeacherHead(*teacher)
    _check_settings(softcap)
    layer: list[Any] = [hidden, _teacher_weight(teacher), bias]
    for i, name in enumerate(("teacher_hidden", "teacher_weight", "teacher_bias")):
        x = layer[i]
        if isinstance(x, LowRankWeight):
            raise _checks.TeacherError(
                f"{name} cannot be a LowRankWeight: merge the adapter into a plain tensor "
                "(merge_and_unload() of PEFT)"
            )
        if not (isinstance(x, QuantizedWeight) or (i == 2 and x is None)):
            _checks.check_tensor(name, x, "pass linear.weight, and linear.bias after it")
            layer[i] = _checks.local(name, x).detach()
    if layer[0].shape[:-1] != rows or len(layer[1]) != classes:
        raise _checks.TeacherError(
            f"the teacher's hidden states must have shape {(*rows, 'E')} and its weight "
            f"{(classes, 'E')} {want}, got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    return (_layer(_TEACHER_LAYER, layer[0], layer[1], layer[2], softcap),)


def _teacher_weight(teacher: Teacher) -> Any:
    """The weight of a teacher's output layer, if that is given."""
    if not isinstance(teacher, tuple | list) or len(teacher) < 2:
        return None
    return as_weight("teacher_weight", teacher[1], constant=True)


# ------------------------------------------------------------------ what is computed


def _total(
    head: HeadRows, target: Tensor, token_weight: Tensor | None, loss: Loss, divided: bool
) -> float | Tensor:
    """What a mean divides by. Class indices are checked, except on parts of the classes."""
    fixed = (loss.ignore_index, loss.weight)
    if target.is_floating_point():
        total: float | Tensor = max(1, len(target))
    elif not divided:
        total = denominator(head.input.dtype, target, len(head.weight), *fixed)
    if divided or token_weight is not None:
        total = weighted_total(token_weight, target, *fixed)
    return total


def _rows(loss: Loss, head: HeadRows, target: Tensor, teacher: tuple[Any, ...]) -> LossRows:
    """The loss on the backend that serves the call."""
    logits = head.input.new_empty(0, len(head.weight), dtype=head.dtype)
    backend = choose(loss, logits, target[:0], loss.reference_only(*teacher))
    if backend == "reference":
        plain = loss.having(reduction="none", impl="reference")
        return LossRows(plain, backend, None, teacher)
    source = None if teacher else loss.class_row(len(head.weight))
    return LossRows(loss, backend, source if source is None else source.to(logits.device), teacher)


def _most_rows(
    options: LinearLossOptions, head: HeadRows, rows: LossRows, columns: split.Columns | None
) -> int:
    """The largest number of rows of a chunk; the same on all processes that share the columns."""
    copies = _AUTOGRAD_COPIES if rows.backend == "reference" else 1
    copies += any(isinstance(x, HeadRows) for x in rows.teacher) + (head.softcap is not None)
    by_weight = rows_of_weight(head.input.shape[1], copies) if head.input.is_cuda else None
    classes = len(head.weight)
    by_budget = by_weight is None or options.memory_budget is not None
    if columns is not None and by_budget and options.batch_chunk_size is None:
        classes = int(columns.most)  # a device may be waited for
    row_bytes = max(1, classes) * head.dtype.itemsize * copies
    if rows.loss.teacher_is_stored and rows.backend != "reference":
        row_bytes += rows.teacher[0].shape[1] * _STORED_BYTES
    return options.most_rows(row_bytes, by_weight)


# ------------------------------------------------------------------ the chunk loop

_NOTHING = (False,) * 6


def _run(
    head: HeadRows,
    rows: ChunkRows,
    factor: float | Tensor | None = None,
    needs: Sequence[bool] = _NOTHING,
) -> tuple[Tensor, list[Tensor | None]]:
    """Values (N,), 0 for rows in no chunk, and the gradients of sum_i factor_i value_i.

    ``needs`` says which of the tensors of the head get one.
    """
    values = head.input.new_zeros(len(head.input), dtype=wide(head.input.dtype))
    totals = head.totals(rows.parts, needs)
    _run_chunks(head, rows, factor, values, totals)
    both = zip(totals, head.tensors, strict=True)  # the buffers of the chunks are free by now
    return values, [None if total is None else total.to(x.dtype) for total, x in both]


def _run_chunks(
    head: HeadRows,
    rows: ChunkRows,
    factor: float | Tensor | None,
    values: Tensor,
    totals: Sequence[Tensor | None],
) -> None:
    """Write the values, and add up the gradients."""
    buffer, softcap = head.buffer(rows.longest), head.softcap
    slopes = None if softcap is None or factor is None else torch.empty_like(buffer)
    for number, part in enumerate(rows.parts):
        hidden, size = head.rows(part), length(part)
        logits = head.products(hidden, part, out=buffer[:size])
        raw = None if totals[5] is None else logits.clone()
        logits = head.finish(logits)
        slope = None
        if slopes is not None and softcap is not None:
            slope = cap_slope(logits, softcap, out=slopes[:size])
        values[part], grad = rows(logits, number, factor)
        if grad is not None:
            grad = grad if slope is None else grad.mul_(slope)
            head.add_gradients(totals, grad, hidden, part, raw, first=number == 0)


# ------------------------------------------------------------------ autograd


class _LinearLoss(torch.autograd.Function):
    """With a mean, the gradients are computed in the forward pass.

    Without, the result is the values of the rows, and the backward pass computes logits and
    gradients again.
    """

    @staticmethod
    def forward(ctx: Any, rows: ChunkRows, mean: Mean | None, softcap: Any, *x: Any) -> Tensor:
        head, ctx.needs = HeadRows._make((*x, softcap)), ctx.needs_input_grad[3:]
        if mean is None:
            ctx.save_for_backward(rows.target, *(t if isinstance(t, Tensor) else None for t in x))
            ctx.again = (rows, softcap, head.weight)
            return _run(head, rows)[0]
        values, ctx.grads = _run(head, rows, mean.factor(len(head.input)), ctx.needs)
        return mean.reduce(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if upstream.dim():
            (rows, softcap, weight), (_, *x) = ctx.again, ctx.saved_tensors
            head = HeadRows._make((*x, softcap))
            head = head._replace(weight=weight) if head.weight is None else head
            return (None, None, None, *_run(head, rows, upstream, ctx.needs)[1])
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "a second backward pass through linear_loss: its gradients were handed out by the "
                'first one. Compute the loss again, or use reduction="none"'
            )
        scaled = (None if grad is None else times_upstream(grad, upstream) for grad in grads)
        return (None, None, None, *scaled)


def _is_late(head: HeadRows, reduction: str) -> bool:
    """Whether the gradients are computed in the backward pass."""
    return reduction == "none" or head.input.dtype in LATE_GRADIENT


def _eager(head: HeadRows, rows: ChunkRows, mean: Mean, reduction: str) -> Tensor:
    tensors = head.tensors
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
        values = _run(head, rows)[0]
    elif _is_late(head, reduction):
        values = _LinearLoss.apply(rows, None, head.softcap, *tensors)
    else:
        value: Tensor = _LinearLoss.apply(rows, mean, head.softcap, *tensors)
        return value
    return mean.weigh(values) if reduction == "none" else mean.reduce(values)


# ------------------------------------------------------------------ torch.compile


def _compiled(
    head: HeadRows, target: Tensor, rows: LossRows, mean: Mean, reduction: str, *fixed: Any
) -> tuple[Tensor, Tensor]:
    """One operator, which runs the chunks: the graph does not depend on their number.

    Returns the value and the statistics of the rows.
    """
    divisor, needs = mean.divisor, [False] * 3
    described = (*head[:3], head.softcap, target, *fixed, *rows.pack())
    if rows.backend == "reference" or _is_late(head, reduction):
        values, statistics, *_ = linear_op(*described, None, None, None, needs)
        value = mean.weigh(values) if reduction == "none" else mean.reduce(values)
        return value, statistics.detach()
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=wide(head.input.dtype), device=target.device)
    if torch.is_grad_enabled():
        needs = [x is not None and x.requires_grad for x in head[:3]]
    value, statistics, *_ = linear_op(*described, divisor, mean.token_weight, None, needs)
    return value, statistics.detach()


@torch.library.custom_op(
    "labo::linear_loss",
    mutates_args=(),
    schema=(
        "(Tensor input, Tensor weight, Tensor? bias, float? softcap, Tensor target, int most_rows, "
        f"bool drop, bool measure, {ROW_LOSS_SCHEMA}, Tensor? divisor, Tensor? token_weight, "
        "Tensor? upstream, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def linear_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The value, the statistics of the rows, and the gradients for input, weight and bias.

    With a divisor: the reduced loss and its gradients. Without: the values of the rows, and with
    ``upstream`` the gradients of sum_i upstream_i value_i. What is not needed is empty.
    """
    input, weight, bias, softcap, target, most, drop, measure, *described = arguments
    *described, divisor, token_weight, factor, needs = described
    loss = LossRows.unpack(*described)
    rows = ChunkRows(loss, target, parts_of(target, loss.loss.ignore_index, most, drop), measure)
    mean = None if divisor is None else Mean(divisor, token_weight)
    if mean is not None and any(needs):
        factor = mean.factor(len(input))
    head = HeadRows(input, weight, bias, softcap=softcap)
    values, grads = _run(head, rows, factor, (*needs, False, False, False))
    found = _no_statistics(input) if rows.statistics is None else rows.statistics
    d_input, d_weight, d_bias = (input.new_empty(0) if x is None else x for x in grads[:3])
    return values if mean is None else mean.reduce(values), found, d_input, d_weight, d_bias


def _no_statistics(like: Tensor, rows: Any = 0) -> Tensor:
    return like.new_empty(rows, metrics.COLUMNS, dtype=torch.float64)


@linear_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    input, weight, measure, (divisor, *_, needs) = *arguments[:2], arguments[7], arguments[-4:]
    count = input.shape[0]
    value = input.new_empty(count if divisor is None else (), dtype=wide(input.dtype))
    shapes = zip((input.shape, weight.shape, weight.shape[:1]), needs, strict=True)
    d_input, d_weight, d_bias = (input.new_empty(shape if need else 0) for shape, need in shapes)
    return value, _no_statistics(input, count if measure else 0), d_input, d_weight, d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.reduced, ctx.needs = inputs[-4] is not None, inputs[-1]
    leaves, ctx.tree = tree_flatten(inputs)
    kept = output[2:] if ctx.reduced else [x if isinstance(x, Tensor) else None for x in leaves]
    ctx.save_for_backward(*kept)
    ctx.plain = [None if isinstance(x, Tensor) else x for x in leaves]


def _backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    inputs = tree_unflatten(ctx.plain, ctx.tree)
    if ctx.reduced:
        needs = ctx.needs
        grads = [(grad * upstream).to(grad.dtype) for grad in ctx.saved_tensors]
    else:
        needs = list(ctx.needs_input_grad[:3])
        leaves = zip(ctx.saved_tensors, ctx.plain, strict=True)
        given = tree_unflatten([x if y is None else y for x, y in leaves], ctx.tree)
        grads = linear_op(*given[:7], False, *given[8:-2], upstream, needs)[2:]
    wanted = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return (*wanted, *tree_map(lambda _: None, tuple(inputs[3:-1])), None)


linear_op.register_autograd(_backward, setup_context=_save)
