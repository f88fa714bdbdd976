"""Output layer and loss in one, without ever storing the (N, V) logits.

The rows are processed in chunks. The logits of a chunk are computed into one small buffer, replaced
by their gradient, multiplied into the gradients of hidden states, weight and bias, and discarded.
A loss that has fused backends uses the fastest one for a chunk. Every other row-wise loss of the
library is differentiated by autograd, chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import _checks, metrics
from ._torch import autograd_enabled, disable_compile
from .chunks import ChunkRows, Mean
from .fast.dispatch import (
    LATE_GRADIENT,
    ROW_LOSS_SCHEMA,
    FastRows,
    choose,
    denominator,
    times_upstream,
)
from .fields import describe, described
from .heads import split
from .heads.low_rank import LowRankWeight, adapted_loss
from .heads.quantized import QuantizedWeight, as_weight, by_blocks, product_dtype
from .loss import Loss
from .rows import wide
from .stored import stored_rows

# About how many buffers of the size of a chunk of logits autograd keeps at a time.
_AUTOGRAD_COPIES = 8
# About how many bytes a formula takes for each stored class of a row.
_STORED_BYTES = 80


@dataclass(frozen=True)
class LinearLossOptions:
    """How :func:`linear_loss` divides its rows into chunks.

    Attributes:
        batch_chunk_size: the largest number of rows of a chunk; None derives it from the budget.
        memory_budget: bytes for the logits of one chunk and what is computed from them. Each chunk
            reads and writes the whole gradient of the weight, so few large chunks are faster.
    """

    batch_chunk_size: int | None = None
    memory_budget: int = 96 << 20

    def __post_init__(self) -> None:
        for name in ("batch_chunk_size", "memory_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value!r}")

    def most_rows(self, bytes_per_row: int) -> int:
        """The largest number of rows of a chunk."""
        if self.batch_chunk_size is not None:
            return self.batch_chunk_size
        return max(1, self.memory_budget // bytes_per_row)


def _chunks(rows: int, most: int) -> list[slice]:
    """Chunks of at most ``most`` rows, of about equal size, so that the last one is not small."""
    size = math.ceil(rows / max(1, math.ceil(rows / most)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size or 1)]


@dataclass(frozen=True)
class _Head:
    """The output layer: hidden states (N, D), weight (V, D), bias (V,), and a cap or None."""

    input: Tensor
    weight: Any  # a tensor, or a QuantizedWeight
    bias: Tensor | None
    softcap: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the products, and so of the logits."""
        return product_dtype(self.input)

    def rows(self, part: slice) -> Tensor:
        """The hidden states of a chunk, in the dtype of the products."""
        return self.input[part].to(self.dtype)

    @property
    def _blocks(self) -> QuantizedWeight | None:
        """The weight, if it is brought to the dtype of the products block by block."""
        weight = self.weight
        dense = not isinstance(weight, QuantizedWeight) and weight.dtype == self.dtype
        return None if dense else by_blocks(weight)

    def logits(self, part: slice, out: Tensor | None = None) -> Tensor:
        """(rows of the chunk, V)."""
        rows, blocks = self.rows(part), self._blocks
        bias = None if self.bias is None else self.bias.to(self.dtype)
        if blocks is not None:
            buffer = rows.new_empty(len(rows), len(self.weight)) if out is None else out
            logits = blocks.logits(rows, bias, buffer)
        elif bias is None:
            logits = torch.mm(rows, self.weight.T, out=out)
        else:
            logits = torch.addmm(bias, rows, self.weight.T, out=out)
        return logits if self.softcap is None else _cap(logits, self.softcap, out=logits)

    def hidden_gradient(self, grad: Tensor, out: Tensor) -> None:
        """From the gradient of the logits of a chunk to that of its hidden states."""
        blocks = self._blocks
        if blocks is not None:
            blocks.times(grad, out)
        else:
            torch.mm(grad, self.weight, out=out)


def _cap(logits: Tensor, softcap: float, out: Tensor | None = None) -> Tensor:
    """Softcap tanh(z / softcap)."""
    scaled = torch.div(logits, softcap, out=out)
    return torch.mul(torch.tanh(scaled, out=out), softcap, out=out)


def _cap_slope(capped: Tensor, softcap: float, out: Tensor) -> Tensor:
    """The derivative of the cap, 1 - tanh^2, from the capped logits."""
    torch.div(capped, softcap, out=out)
    return out.square_().neg_().add_(1)


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


class _AutogradLoss(NamedTuple):
    """A loss that is differentiated by autograd, one chunk at a time.

    Attributes:
        loss: for one value per row, by the reference.
        teacher: the teacher logits, (N, V), or hidden states (N, E), weight and perhaps bias of
            the teacher's output layer, or the stored classes, (N, k), and their log-probabilities;
            empty for a loss without a teacher.
        teacher_softcap: the cap of the teacher's output layer.
    """

    loss: Loss
    teacher: tuple[Any, ...] = ()
    teacher_softcap: float | None = None

    @property
    def weight(self) -> Tensor | None:
        """(V,) class weights."""
        return self.loss.weight

    @property
    def ignore_index(self) -> int:
        """Target of rows that do not count."""
        return self.loss.ignore_index

    def for_chunk(self, part: slice) -> _AutogradLoss:
        """The loss for the rows of a chunk: with their teacher logits, if there is a teacher."""
        if not self.teacher:
            return self
        first, *layer = self.teacher
        if not first.is_floating_point():  # stored classes
            return self._replace(teacher=tuple(x[part] for x in self.teacher))
        if layer:
            bias = layer[1] if len(layer) > 1 else None
            head = _Head(first, layer[0], bias, self.teacher_softcap)
            return self._replace(teacher=(head.logits(part),))
        return self._replace(teacher=(first[part],))

    def rows(
        self, logits: Tensor, target: Tensor, factor: float | Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`FastRows.rows`, for one chunk."""
        if factor is None:
            with torch.no_grad():
                return self.loss.compute(logits, target, *self.teacher), None
        with autograd_enabled():
            leaf = logits.detach().requires_grad_()
            values = self.loss.compute(leaf, target, *self.teacher)
            upstream = factor if isinstance(factor, Tensor) else torch.full_like(values, factor)
            (grad,) = torch.autograd.grad(values, leaf, upstream.to(values.dtype))
        return values.detach(), out.copy_(grad)

    def pack(self) -> tuple[list[Tensor], str]:
        """The arguments of an operator; the inverse is :meth:`unpack`."""
        given = {f"teacher{i}": x for i, x in enumerate(self.teacher)}
        given |= {"teacher_softcap": self.teacher_softcap}
        text, tensors = describe(self.loss._registered, self.loss.values() | given)
        return tensors, text

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], text: str) -> _AutogradLoss:
        kind, values = described(text, tensors)
        softcap = values.pop("teacher_softcap")
        names = [name for name in values if name.startswith("teacher")]
        teacher = tuple(values.pop(name) for name in names)
        return cls(kind.bare(values), teacher, softcap)  # type: ignore[attr-defined]


@dataclass
class _TaughtRows:
    """A fused loss with a teacher, whose output layer gives the logits of one chunk at a time."""

    loss: FastRows
    teacher: _Head
    buffer: Tensor | None = None

    @property
    def weight(self) -> Tensor | None:
        return self.loss.weight

    @property
    def ignore_index(self) -> int:
        return self.loss.ignore_index

    def for_chunk(self, part: slice) -> FastRows:
        """The loss with the teacher's logits for the rows of a chunk."""
        rows = part.stop - part.start
        if self.buffer is None or len(self.buffer) < rows:  # the first chunk is the largest
            shape = (rows, len(self.teacher.weight))
            self.buffer = self.teacher.input.new_empty(shape, dtype=self.teacher.dtype)
        return self.loss._replace(source=self.teacher.logits(part, out=self.buffer[:rows]))


_Rows = FastRows | _AutogradLoss | _TaughtRows | split.SplitRows
_NOTHING = (False, False, False)


def _rows(loss: _Rows, target: Tensor, measure: bool) -> ChunkRows:
    """The rows of a call, as a chunk loop computes them."""
    divided = isinstance(loss, split.SplitRows)
    group = loss.group if isinstance(loss, split.SplitRows) else None
    return ChunkRows(target, loss.for_chunk, loss.ignore_index, measure, group, divided=divided)


def _run(
    head: _Head,
    rows: ChunkRows,
    most: int,
    factor: float | Tensor | None = None,
    needs: Sequence[bool] = _NOTHING,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Values (N,), and the gradients of sum_i factor_i value_i that are needed, chunk by chunk."""
    count, classes = len(head.input), len(head.weight)
    accurate = wide(head.input.dtype)
    values = head.input.new_empty(count, dtype=accurate)
    d_input = torch.empty_like(head.input) if needs[0] else None
    d_weight = None
    if needs[1]:  # written by the first chunk; the others add to it
        make = torch.empty_like if count else torch.zeros_like
        d_weight = make(head.weight, dtype=accurate, memory_format=torch.contiguous_format)
    d_bias = head.input.new_zeros(classes, dtype=accurate) if needs[2] else None
    chunks = _chunks(count, most)
    longest = max((part.stop - part.start for part in chunks), default=0)
    buffer = head.input.new_empty(longest, classes, dtype=head.dtype)
    slopes = None if head.softcap is None or factor is None else torch.empty_like(buffer)
    for part in chunks:
        length = part.stop - part.start
        logits = head.logits(part, out=buffer[:length])
        if slopes is not None and head.softcap is not None:
            _cap_slope(logits, head.softcap, out=slopes[:length])
        part_factor = factor[part] if isinstance(factor, Tensor) else factor
        values[part], grad = rows(logits, part, part_factor, logits)
        if grad is None:
            continue
        if slopes is not None:
            grad.mul_(slopes[:length])
        if d_input is not None:
            head.hidden_gradient(grad, out=d_input[part])
        if d_weight is not None:
            _add_product(d_weight, grad, head.rows(part), first=part.start == 0)
        if d_bias is not None:
            d_bias += grad.sum(0, dtype=accurate)
    if d_weight is not None:
        d_weight = d_weight.to(head.weight.dtype)
    if d_bias is not None:
        d_bias = d_bias.to(head.input.dtype)
    return values, d_input, d_weight, d_bias


def _add_product(total: Tensor, grad: Tensor, rows: Tensor, *, first: bool) -> None:
    """total += grad^T rows. For half types the sum over chunks is in float32."""
    if total.dtype != grad.dtype:
        product = grad.T @ rows
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(grad.T, rows, out=total)
    else:
        total.addmm_(grad.T, rows)


class _GradientsWithValue(torch.autograd.Function):
    """Mean or sum. The gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        rows: ChunkRows,
        most: int,
        mean: Mean,
    ) -> Tensor:
        head, factor = _Head(input, weight, bias, softcap), mean.factor(len(input))
        values, *ctx.grads = _run(head, rows, most, factor, ctx.needs_input_grad[:3])
        return mean.reduce(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "a second backward pass through linear_loss: its gradients were handed out by the "
                'first one. Compute the loss again, or use reduction="none"'
            )
        scaled = (None if grad is None else times_upstream(grad, upstream) for grad in grads)
        return (*scaled, *(None,) * 4)


class _GradientsLater(torch.autograd.Function):
    """The values of the rows. Logits and gradients are computed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        rows: ChunkRows,
        most: int,
    ) -> Tensor:
        quantized = isinstance(weight, QuantizedWeight)
        ctx.save_for_backward(input, None if quantized else weight, bias, rows.target)
        ctx.fixed = (softcap, rows, most, weight if quantized else None)
        return _run(_Head(input, weight, bias, softcap), rows, most)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        softcap, rows, most, quantized = ctx.fixed
        input, weight, bias, _ = ctx.saved_tensors
        head = _Head(input, weight if quantized is None else quantized, bias, softcap)
        grads = _run(head, rows, most, upstream, ctx.needs_input_grad[:3])[1:]
        return (*grads, *(None,) * 3)


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
    _check_softcap(softcap)
    _check_extras(z_loss, return_metrics)
    check_tensors(input, linear_weight, target)
    if any(map(_checks.is_dtensor, (input, linear_weight, linear_bias, target))):
        local = split.local_head(input, linear_weight, linear_bias, target)
        if local.group is not None and (teacher_logits is not None or impl != "auto"):
            raise ValueError("a split linear_weight goes with neither a teacher nor impl=")
        if local.group is not None:
            return split_linear_loss(
                local, loss, softcap, options, token_weight, z_loss, return_metrics
            )
        input, linear_weight, linear_bias, target = local[:4]
    active = _rowwise(loss)
    if active is not loss and active.teacher_argument is None:
        teacher_logits = None  # as in Warmup.forward
    adapter = None
    linear_weight = as_weight("linear_weight", linear_weight)
    both = (linear_weight, _teacher_weight(teacher_logits))
    custom = any(isinstance(x, LowRankWeight | QuantizedWeight) for x in both)
    if custom and torch.compiler.is_compiling():
        return _eagerly(
            input,
            linear_weight,
            target,
            loss,
            linear_bias=linear_bias,
            softcap=softcap,
            teacher_logits=teacher_logits,
            token_weight=token_weight,
            z_loss=z_loss,
            return_metrics=return_metrics,
            impl=impl,
            options=options,
        )
    if isinstance(linear_weight, LowRankWeight):
        adapter, linear_weight = linear_weight, linear_weight.base
    head, labels = _check(input, linear_weight, linear_bias, softcap, target, active)
    teacher = _check_teacher(teacher_logits, active, labels, input.shape[:-1], len(head.weight))
    teacher_softcap = None
    if teacher and isinstance(teacher_logits, TeacherHead):
        teacher_softcap = teacher_logits.softcap
        _check_softcap(teacher_softcap)
    rows = _choose(
        _computing(active, teacher, z_loss, impl), head, labels, teacher, teacher_softcap
    )
    classes = len(head.weight)
    if target.is_floating_point():
        total: float | Tensor = max(1, len(labels))
    else:
        total = denominator(head.input.dtype, labels, classes, active.ignore_index, active.weight)
    weights = _check_token_weight(token_weight, input, labels, active.ignore_index)
    if weights is not None:
        total = weighted_total(weights, labels, active.ignore_index, active.weight)
    mean = Mean(total if active.reduction == "mean" else 1.0, weights)
    copies = _AUTOGRAD_COPIES if isinstance(rows, _AutogradLoss) else 1
    copies += isinstance(rows, _TaughtRows) + (softcap is not None)
    row_bytes = classes * head.dtype.itemsize * copies
    if isinstance(rows, FastRows) and rows.stored is not None:
        row_bytes += rows.stored.shape[1] * _STORED_BYTES
    most = _check_options(options).most_rows(row_bytes)
    statistics: Tensor | None
    with torch.autocast(input.device.type, enabled=False):
        if torch.compiler.is_compiling():
            assert not isinstance(rows, _TaughtRows)
            fixed = (most, mean, active.reduction, bool(return_metrics))
            value, statistics = _compiled(head, labels, rows, *fixed)
        else:
            chunked = _rows(rows, labels, bool(return_metrics))
            if adapter is None:
                value = _eager(head, chunked, most, mean, active.reduction)
            else:
                value = _adapted(adapter, head, chunked, most, mean, active.reduction)
            statistics = chunked.statistics
    return _finish(value, statistics, active, labels, classes, input.shape[:-1], return_metrics)


def _computing(active: Loss, teacher: Sequence[Any], z_loss: float, impl: str) -> Loss:
    """The loss that computes: of this epoch, without a teacher if none is given."""
    loss = active.current()
    if not teacher and loss.teacher_optional:
        loss = loss.without_teacher()
    return loss.having(z_loss=loss.z_loss + z_loss, impl=impl, inplace=False)


def _active(loss: Any) -> Any:
    """The loss that computes: the current one of a warm-up."""
    if isinstance(loss, type):
        raise TypeError(f"loss must be a Module, got the class: write {loss.__name__}(...)")
    while hasattr(loss, "active"):  # Warmup
        loss = loss.active
    return loss


def _rowwise(loss: Any) -> Any:
    """The loss that computes, if its value for a row depends on that row alone."""
    active = _active(loss)
    if not getattr(active, "rowwise", False):
        raise ValueError(
            f"linear_loss takes a row-wise loss of labo, not {type(active).__name__}: its value "
            "for a row must depend on that row alone"
        )
    return active


ReturnMetrics = Literal[False, True, "rows"]


def _check_extras(z_loss: float, return_metrics: ReturnMetrics) -> None:
    Loss.fields["z_loss"].check(z_loss)
    if return_metrics not in (False, True, "rows"):
        raise ValueError(f'return_metrics must be False, True or "rows", got {return_metrics!r}')


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
    dtype = torch.promote_types(wide(input.dtype), torch.float32)
    weights = token_weight.reshape(-1).to(dtype)
    return weights if target.is_floating_point() else weights.masked_fill(target == ignore_index, 0)


def weighted_total(
    token_weight: Tensor, target: Tensor, ignore_index: int, class_weight: Tensor | None
) -> float | Tensor:
    """What a mean divides by with token weights; inf if that would be 0."""
    counts = token_weight.double()
    if not target.is_floating_point():
        valid = target != ignore_index
        if class_weight is not None:
            inside = target.clamp(0, len(class_weight) - 1)  # the range is checked elsewhere
            counts = counts * class_weight.double()[inside]
        counts = counts.masked_fill(~valid, 0.0)
    total = counts.sum()
    total = total.masked_fill(total == 0, math.inf).to(token_weight.dtype)
    return float(total) if _checks.can_read(total) else total


def _finish(
    value: Tensor,
    statistics: Tensor | None,
    loss: Any,
    target: Tensor,
    classes: int,
    shape: torch.Size,
    return_metrics: ReturnMetrics,
) -> Any:
    """What :func:`linear_loss` returns: the value in its shape, and the metrics if asked for."""
    if loss.reduction == "none":
        value = value.reshape(shape)
    if not return_metrics or statistics is None:
        return value
    if return_metrics == "rows":
        found = metrics.rows_of(statistics, target, loss, classes)
        return value, metrics.LossMetrics(*(x.reshape(shape) for x in found))
    return value, metrics.sums_of(statistics, target, loss, classes)


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
        _check_softcap(softcap)
        _check_extras(z_loss, False)
        Loss.fields["impl"].check(impl)
        _check_options(options)
        _rowwise(loss)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.loss = loss
        self.softcap = softcap
        self.z_loss = z_loss
        self.impl = impl
        self.options = options

    @overload
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        teacher_logits: Teacher = ...,
        token_weight: Tensor | None = ...,
        return_metrics: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        teacher_logits: Teacher = ...,
        token_weight: Tensor | None = ...,
        *,
        return_metrics: Literal[True, "rows"],
    ) -> tuple[Tensor, metrics.LossMetrics]: ...
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
        return result if self.softcap is None else _cap(result, self.softcap)


def _check_options(options: LinearLossOptions | None) -> LinearLossOptions:
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


def _check_softcap(softcap: float | None) -> None:
    if softcap is not None and not (_checks.is_number(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a number above 0 or None, got {softcap!r}")


def _in_autocast_dtype(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype that autocast has for ``F.linear``, if it is on."""
    device = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [None if x is None else x.to(dtype) for x in tensors]


def _check_layer(
    names: Sequence[str], input: Tensor, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Any, Tensor | None]:
    """Refuse tensors that are not input, weight and bias of a linear layer; autocast them."""
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
    quantized = isinstance(weight, QuantizedWeight)  # its products have the dtype of the input
    input_, dense, bias = _in_autocast_dtype(input, None if quantized else weight, bias)
    assert input_ is not None
    if len({x.dtype for x in (input_, dense, bias) if x is not None}) > 1:
        kind = "" if dense is None else f" ({dense.dtype})"
        raise ValueError(
            f"{names[0]} ({input_.dtype}), {names[1]}{kind} and {names[2]} must have "
            "the same dtype, unless autocast is on"
        )
    return input_, weight if dense is None else dense, bias


def _check(
    input: Tensor,
    weight: Any,
    bias: Tensor | None,
    softcap: float | None,
    target: Tensor,
    loss: Loss,
) -> tuple[_Head, Tensor]:
    """The output layer with its rows, (N, D), and the targets, (N,) or (N, V)."""
    head = _lay_out(input, weight, bias, softcap, loss)
    _checks.check_weight(loss.weight, len(weight))
    _checks.check_target(torch.Size((*input.shape[:-1], len(weight))), target, -1)
    _checks.check_devices(input, target=target, weight=loss.weight)
    if target.is_floating_point():
        return head, target.reshape(-1, len(weight))
    return head, target.reshape(-1).long()


def _lay_out(
    input: Tensor, weight: Any, bias: Tensor | None, softcap: float | None, loss: Loss
) -> _Head:
    """The output layer with its rows, (N, D), in the dtype of autocast if that is on."""
    if loss.dim != -1:
        raise ValueError(
            f"linear_loss has the classes last: the loss must have dim=-1, not {loss.dim}"
        )
    if loss.weight is not None and loss.weight.requires_grad:
        raise ValueError("linear_loss computes no gradient for class weights: detach them")
    input, weight, bias = _check_layer(_LAYER, input, weight, bias)
    _checks.check_logits(input, -1)
    return _Head(input.reshape(-1, input.shape[-1]), weight, bias, softcap)


_LAYER = ("input", "linear_weight", "linear_bias")
_TEACHER_LAYER = ("the teacher's hidden states", "weight", "bias")


def _check_teacher(
    teacher: Any,
    loss: Loss,
    target: Tensor,
    rows: torch.Size,
    classes: int,
) -> tuple[Any, ...]:
    """The teacher's logits, (N, V), or its output layer, with the rows of the input; or ().

    For a loss with stored classes: these and their log-probabilities, (N, k).
    """
    loss.check_teacher(teacher is not None)
    if teacher is None:
        return ()
    if loss.teacher_is_stored:
        if not isinstance(teacher, tuple | list) or len(teacher) != 2:
            raise _checks.TeacherError(
                "teacher_logits must be the pair (indices, log_probabilities)"
            )
        indices = _checks.local("indices", teacher[0])
        log_t = _checks.local("log_probabilities", teacher[1])
        valid = None if target.is_floating_point() else target != loss.ignore_index
        return stored_rows(indices, log_t, target, rows, classes, valid)
    want = f"for input of shape {(*rows, 'D')} and {classes} classes"
    if isinstance(teacher, Tensor):
        teacher = _checks.local("teacher_logits", teacher)
        if teacher.shape != (*rows, classes):
            raise _checks.TeacherError(
                f"teacher_logits must have shape {(*rows, classes)} {want}, "
                f"got {tuple(teacher.shape)}"
            )
        return (teacher.detach().reshape(-1, classes),)
    if isinstance(teacher, TeacherHead):
        teacher = tuple(x for x in teacher[:3] if x is not None)
    several = isinstance(teacher, tuple | list)
    if not several or not 2 <= len(teacher) <= 3:
        found = f"{len(teacher)} tensors" if several else type(teacher).__name__
        raise _checks.TeacherError(
            "teacher_logits must be logits, or hidden states, weight and perhaps bias of the "
            f"teacher's output layer, got {found}"
        )
    hidden, weight, *bias = _teacher_layer(teacher)
    if hidden.shape[:-1] != rows or len(weight) != classes:
        raise _checks.TeacherError(
            f"the teacher's hidden states must have shape {(*rows, 'E')} and its weight "
            f"{(classes, 'E')} {want}, got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    layer = _check_layer(_TEACHER_LAYER, hidden, weight, bias[0] if bias else None)
    hidden, weight = layer[0].reshape(-1, layer[0].shape[-1]), layer[1]
    return (hidden, weight) if layer[2] is None else (hidden, weight, layer[2])


def _teacher_weight(teacher: Teacher) -> Any:
    """The weight of a teacher's output layer, if that is given."""
    if not isinstance(teacher, tuple | list) or len(teacher) < 2:
        return None
    return as_weight("teacher_weight", teacher[1], constant=True)


def _teacher_layer(teacher: tuple[Any, ...]) -> list[Any]:
    """Hidden states, weight and perhaps bias, as plain tensors without a graph."""
    found = [teacher[0], _teacher_weight(teacher), *teacher[2:]]
    for i, name in enumerate(("teacher_hidden", "teacher_weight", "teacher_bias")[: len(found)]):
        x = found[i]
        if isinstance(x, QuantizedWeight) and i == 1:
            continue
        if isinstance(x, LowRankWeight):
            raise _checks.TeacherError(
                f"{name} cannot be a LowRankWeight: merge the adapter into a plain tensor "
                "(merge_and_unload() of PEFT)"
            )
        _checks.check_tensor(name, x, "pass linear.weight, and linear.bias after it")
        found[i] = _checks.local(name, x).detach()
    return found


def _choose(
    loss: Loss,
    head: _Head,
    target: Tensor,
    teacher: tuple[Any, ...],
    teacher_softcap: float | None,
) -> FastRows | _AutogradLoss | _TaughtRows:
    """The loss on the backend that serves the call."""
    stored = bool(teacher) and loss.teacher_is_stored
    layer = teacher if len(teacher) > 1 and not stored else ()
    reason = loss.reference_only(*teacher)
    if layer and torch.compiler.is_compiling():  # an operator has no such argument
        reason = "this loss"
    logits = head.input.new_empty(0, len(head.weight), dtype=head.dtype)
    backend = choose(loss, logits, target[:0], reason)
    if backend == "reference":
        plain = loss.having(reduction="none", impl="reference")
        return _AutogradLoss(plain, teacher, teacher_softcap)
    if layer:
        bias = layer[2] if len(layer) > 2 else None
        taught = _Head(layer[0], layer[1], bias, teacher_softcap)
        return _TaughtRows(FastRows(loss, backend), taught)
    if stored:
        index, log_t = teacher
        return FastRows(loss, backend, log_t, index)
    source = teacher[0] if teacher else loss.class_row(len(head.weight))
    return FastRows(loss, backend, None if source is None else source.to(head.input.device))


def _eager(head: _Head, rows: ChunkRows, most: int, mean: Mean, reduction: str) -> Tensor:
    tensors = (head.input, head.weight, head.bias)
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
        values = _run(head, rows, most)[0]
    elif reduction == "none" or head.input.dtype in LATE_GRADIENT:
        values = _GradientsLater.apply(*tensors, head.softcap, rows, most)
    else:
        return _GradientsWithValue.apply(*tensors, head.softcap, rows, most, mean)
    return mean.weigh(values) if reduction == "none" else mean.reduce(values)


@disable_compile
def _eagerly(*args: Any, **options: Any) -> Any:
    return linear_loss(*args, **options)


# ------------------------------------------------------------------ classes split over processes


def splittable(loss: nn.Module) -> Loss:
    """The loss that computes (the current one of a warm-up), if it works on parts of rows."""
    active = _active(loss)
    if isinstance(active, Loss) and active.rowwise:
        computing = active.current()
        computing = computing.without_teacher() if computing.teacher_optional else computing
        if computing.reference_only() is None:
            split.check_formula(computing)
            return computing
    raise ValueError(
        f"{active!r} cannot work on logits that are split over processes: it has no fused "
        "backend. Gather the logits or the weight first: full_tensor() of a DTensor"
    )


@disable_compile
def split_linear_loss(
    shard: split.LocalHead,
    loss: nn.Module,
    softcap: float | None,
    options: LinearLossOptions | None,
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    return_metrics: ReturnMetrics = False,
) -> Any:
    """:func:`linear_loss` on this process's classes; see :mod:`labo.heads.parallel`."""
    _check_softcap(softcap)
    _check_extras(z_loss, return_metrics)
    member = splittable(loss)
    member = member.having(z_loss=member.z_loss + z_loss)
    input, target, reduction = shard.input, shard.target, member.reduction
    head = _lay_out(input, shard.weight, shard.bias, softcap, member)
    split.check_columns(input, target, -1)
    late = reduction == "none" or head.input.dtype in LATE_GRADIENT
    labels = target.reshape(-1).long()
    member = member.having(weight=split.replicated("weight", member.weight))
    row = split.class_row(member, len(head.weight), head.input.device, shard.group)
    keep = late and torch.is_grad_enabled()
    rows = split.SplitRows(member, labels, shard.group, row, keep)
    total = rows.divisor()
    weights = _check_token_weight(token_weight, input, labels, member.ignore_index)
    if weights is not None:
        total = weighted_total(weights, labels, member.ignore_index, member.weight)
    mean = Mean(total if reduction == "mean" else 1.0, weights)
    # The chunks must be the same on all processes, because each of them communicates.
    copies = 1 + (softcap is not None)
    row_bytes = max(1, shard.widest) * head.dtype.itemsize * copies
    most = _check_options(options).most_rows(row_bytes)
    with torch.autocast(input.device.type, enabled=False):
        chunked = _rows(rows, labels, bool(return_metrics))
        value = _eager(head, chunked, most, mean, reduction)
    classes = 0
    if return_metrics:
        classes = split.all_classes(len(head.weight), labels.device, shard.group)
    statistics = chunked.statistics
    return _finish(value, statistics, member, labels, classes, input.shape[:-1], return_metrics)


# ------------------------------------------------------------------ low-rank adapters


def _adapted(
    adapter: LowRankWeight,
    head: _Head,
    rows: ChunkRows,
    most: int,
    mean: Mean,
    reduction: str,
) -> Tensor:
    """As :func:`_eager`, for an output layer with an adapter."""
    layer = (head.input, head.weight, head.bias, head.softcap)
    size = max((part.stop - part.start for part in _chunks(len(head.input), most)), default=1)
    if reduction == "none" or head.input.dtype in LATE_GRADIENT:
        values = adapted_loss(adapter, *layer, rows, size, None)
        return mean.weigh(values) if reduction == "none" else mean.reduce(values)
    return adapted_loss(adapter, *layer, rows, size, mean)


# ------------------------------------------------------------------ torch.compile


def _compiled(
    head: _Head,
    target: Tensor,
    loss: FastRows | _AutogradLoss,
    most: int,
    mean: Mean,
    reduction: str,
    measure: bool,
) -> tuple[Tensor, Tensor]:
    """One operator, which runs the chunks: the graph does not depend on their number.

    Returns the value and the statistics of the rows.
    """
    tensors = (head.input, head.weight, head.bias)
    fixed = (head.softcap, target, most, measure)
    if isinstance(loss, _AutogradLoss):
        values, found = linear_autograd_op(*tensors, *fixed, *loss.pack())
    elif reduction == "none" or head.input.dtype in LATE_GRADIENT:
        values, found = linear_rows_op(*tensors, *fixed, *loss.pack())
    else:
        divisor = mean.divisor
        if not isinstance(divisor, Tensor):
            divisor = torch.full((), divisor, dtype=wide(head.input.dtype), device=target.device)
        grad = torch.is_grad_enabled()
        needs = [grad and x is not None and x.requires_grad for x in tensors]
        value, found, *_ = linear_loss_op(
            *tensors, *fixed, *loss.pack(), divisor, mean.token_weight, needs
        )
        return value, found.detach()
    value = mean.weigh(values) if reduction == "none" else mean.reduce(values)
    return value, found.detach()


# The arguments that all operators begin with, and how they are used.
_HEAD_SCHEMA = (
    "Tensor input, Tensor weight, Tensor? bias, float? softcap, Tensor target, int most_rows, "
    "bool measure"
)
_HEAD = 7  # their number


def _run_operator(
    head: Sequence[Any],
    loss: _Rows,
    factor: float | Tensor | None = None,
    needs: Sequence[bool] = _NOTHING,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Values, statistics (empty if nobody asked for them) and gradients."""
    input, weight, bias, softcap, target, most, measure = head
    rows = _rows(loss, target, measure)
    values, *grads = _run(_Head(input, weight, bias, softcap), rows, most, factor, needs)
    found = rows.statistics
    return values, _no_statistics(input) if found is None else found, tuple(grads)


def _no_statistics(like: Tensor, rows: Any = 0) -> Tensor:
    return like.new_empty(rows, metrics.COLUMNS, dtype=torch.float64)


def _fake_statistics(arguments: Sequence[Any]) -> Tensor:
    input, measure = arguments[0], arguments[_HEAD - 1]
    return _no_statistics(input, len(input) if measure else 0)


def _present(like: Tensor, grads: Iterable[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """An operator returns tensors only: an empty one for a gradient that is not needed."""
    d_input, d_weight, d_bias = (like.new_empty(0) if grad is None else grad for grad in grads)
    return d_input, d_weight, d_bias


def _empty_gradients(
    input: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (input.shape, weight.shape, weight.shape[:1])
    kept = zip(shapes, needs, strict=True)
    return _present(input, (input.new_empty(shape) if need else None for shape, need in kept))


def _values_operator(name: str, schema: str, build: Callable[..., _Rows]) -> Any:
    """An operator for the value of each row, (N,), whose backward pass computes them again.

    It also returns the statistics of the rows.

    Args:
        name: of the operator.
        schema: of the arguments that describe the loss.
        build: from those arguments to the loss.
    """

    @torch.library.custom_op(
        f"labo::{name}", mutates_args=(), schema=f"({_HEAD_SCHEMA}, {schema}) -> (Tensor, Tensor)"
    )
    def values_op(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _run_operator(arguments[:_HEAD], build(*arguments[_HEAD:]))[:2]

    @values_op.register_fake
    def _(*arguments: Any) -> tuple[Tensor, Tensor]:
        input = arguments[0]
        values = input.new_empty(input.shape[0], dtype=wide(input.dtype))
        return values, _fake_statistics(arguments)

    @torch.library.custom_op(
        f"labo::{name}_backward",
        mutates_args=(),
        schema=(
            f"({_HEAD_SCHEMA}, {schema}, Tensor upstream, bool[] needs) -> (Tensor, Tensor, Tensor)"
        ),
    )
    def backward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *described, upstream, needs = arguments
        head, loss = described[:_HEAD], build(*described[_HEAD:])
        return _present(head[0], _run_operator(head, loss, upstream, needs)[2])

    @backward_op.register_fake
    def _(input: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _empty_gradients(input, weight, needs=rest[-1])

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        leaves, ctx.tree = tree_flatten(inputs)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in leaves))
        ctx.plain = [None if isinstance(x, Tensor) else x for x in leaves]

    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        both = zip(ctx.saved_tensors, ctx.plain, strict=True)
        inputs = tree_unflatten([x if y is None else y for x, y in both], ctx.tree)
        needs = list(ctx.needs_input_grad[:3])
        grads = zip(backward_op(*inputs, upstream, needs), needs, strict=True)
        others = tree_map(lambda _: None, tuple(inputs[3:]))
        return (*(x if needed else None for x, needed in grads), *others)

    values_op.register_autograd(backward, setup_context=save)
    return values_op, backward_op


linear_rows_op, linear_rows_backward_op = _values_operator(
    "linear_rows", ROW_LOSS_SCHEMA, FastRows.unpack
)
linear_autograd_op, linear_autograd_backward_op = _values_operator(
    "linear_autograd", "Tensor[] tensors, str loss", _AutogradLoss.unpack
)


@torch.library.custom_op(
    "labo::linear_loss",
    mutates_args=(),
    schema=(
        f"({_HEAD_SCHEMA}, {ROW_LOSS_SCHEMA}, Tensor divisor, Tensor? token_weight, bool[] needs)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def linear_loss_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reduced loss, the statistics of the rows, and the gradients for input, weight and bias.

    What is not needed is empty.
    """
    *described, divisor, token_weight, needs = arguments
    head, loss = described[:_HEAD], FastRows.unpack(*described[_HEAD:])
    mean = Mean(divisor, token_weight)
    factor = mean.factor(len(head[0])) if any(needs) else None
    values, found, grads = _run_operator(head, loss, factor, needs)
    return mean.reduce(values), found, *_present(head[0], grads)


@linear_loss_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    input, weight, *_, needs = arguments
    value = input.new_empty((), dtype=wide(input.dtype))
    return value, _fake_statistics(arguments), *_empty_gradients(input, weight, needs)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs, ctx.others = inputs[-1], (*tree_map(lambda _: None, tuple(inputs[3:-1])), None)
    ctx.save_for_backward(*output[2:])


def _return_gradients(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    kept = zip(ctx.saved_tensors, ctx.needs, strict=True)
    grads = ((grad * upstream).to(grad.dtype) if needed else None for grad, needed in kept)
    return (*grads, *ctx.others)


linear_loss_op.register_autograd(_return_gradients, setup_context=_save_gradients)
