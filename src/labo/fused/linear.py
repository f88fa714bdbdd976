"""Output layer and loss in one: the (N, V) logits never exist.

The rows go through in chunks. A chunk's logits are computed into one small buffer, turned into
their gradient in place, multiplied into the gradients of hidden states, weight and bias, and
forgotten. With LABO, label smoothing and cross entropy a chunk goes through the fastest layer there
is; any other row-wise loss of the library goes through autograd, a chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .. import _checks
from .._rows import row_sum, upcast
from ..losses import Warmup, _Loss
from . import shards
from .adapted import LowRankWeight, adapted_loss
from .blocked import by_autograd
from .dispatch import choose, denominator, run_rows, times_upstream
from .spec import RowSpec

# About how many buffers of the size of a chunk of logits autograd keeps at once.
_AUTOGRAD_COPIES = 8


@dataclass(frozen=True)
class LinearLossOptions:
    """How :func:`linear_loss` cuts its rows.

    Attributes:
        batch_chunk_size: rows per chunk; None derives them from the budget.
        memory_budget: bytes for the logits of one chunk and what is made of them. Each chunk reads
            and writes the whole gradient of the weight, so few large chunks are faster.
    """

    batch_chunk_size: int | None = None
    memory_budget: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("batch_chunk_size", "memory_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value!r}")

    def chunk_rows(self, rows: int, bytes_per_row: int) -> int:
        """Rows per chunk, evened out so that the last chunk is not a small one."""
        if self.batch_chunk_size is not None:
            return self.batch_chunk_size
        most = max(1, self.memory_budget // bytes_per_row)
        return max(1, math.ceil(rows / max(1, math.ceil(rows / most))))


@dataclass(frozen=True)
class _Head:
    """The output layer: hidden states (N, D), weight (V, D), bias (V,), and a cap or none."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None = None

    def logits(self, part: slice, out: Tensor | None = None) -> Tensor:
        """(rows of the chunk, V)."""
        rows = self.input[part]
        if self.bias is None:
            logits = torch.mm(rows, self.weight.T, out=out)
        else:
            logits = torch.addmm(self.bias, rows, self.weight.T, out=out)
        return logits if self.softcap is None else _cap(logits, self.softcap, out=logits)


def _cap(logits: Tensor, softcap: float, out: Tensor | None = None) -> Tensor:
    """Softcap tanh(z / softcap)."""
    scaled = torch.div(logits, softcap, out=out)
    return torch.mul(torch.tanh(scaled, out=out), softcap, out=out)


def _cap_slope(capped: Tensor, softcap: float, out: Tensor) -> Tensor:
    """The derivative of the cap, 1 - tanh^2, from what it returned."""
    torch.div(capped, softcap, out=out)
    return out.square_().neg_().add_(1)


# (logits, chunk, factor, out) -> (values, gradient): a loss as the chunk loop sees it.
_Rows = Callable[[Tensor, slice, "float | Tensor | None", Tensor], tuple[Tensor, "Tensor | None"]]


def _run(
    head: _Head,
    rows: _Rows,
    chunk: int,
    factor: float | Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Values (N,), and the gradients asked for of sum_i factor_i value_i, chunk by chunk."""
    count, classes = len(head.input), len(head.weight)
    accurate = upcast(head.input[:0]).dtype
    values = head.input.new_empty(count, dtype=accurate)
    d_input = torch.empty_like(head.input) if needs[0] else None
    d_weight = None
    if needs[1]:  # the first chunk writes it, the others add to it
        make = torch.empty_like if count else torch.zeros_like
        d_weight = make(head.weight, dtype=accurate, memory_format=torch.contiguous_format)
    d_bias = head.weight.new_zeros(classes, dtype=accurate) if needs[2] else None
    buffer = head.input.new_empty(min(chunk, count), classes)
    slopes = None if head.softcap is None or factor is None else torch.empty_like(buffer)
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
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
            torch.mm(grad, head.weight, out=d_input[part])
        if d_weight is not None:
            _add_product(d_weight, grad, head.input[part], first=start == 0)
        if d_bias is not None:
            d_bias += grad.sum(0, dtype=accurate)
    if d_weight is not None:
        d_weight = d_weight.to(head.weight.dtype)
    if d_bias is not None:
        d_bias = d_bias.to(head.weight.dtype)
    return values, d_input, d_weight, d_bias


def _add_product(total: Tensor, grad: Tensor, rows: Tensor, *, first: bool) -> None:
    """total += grad^T rows; for half types the sum over chunks stays in float32."""
    if total.dtype != grad.dtype:
        product = grad.T @ rows
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(grad.T, rows, out=total)
    else:
        total.addmm_(grad.T, rows)


class _LinearLoss(torch.autograd.Function):
    """Eager mode. Mean and sum: gradients in the forward pass. None: computed again in backward,
    when the gradient from above is known.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        rows: _Rows,
        chunk: int,
        divisor: float | Tensor,
        reduction: str,
    ) -> Tensor:
        head = _Head(input, weight, bias, softcap)
        needs = (*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2])
        if reduction == "none":
            ctx.save_for_backward(input, weight, bias)
            ctx.again = (softcap, rows, chunk, needs)
            return _run(head, rows, chunk, None, (False, False, False))[0]
        factor = None
        if any(needs):
            factor = 1 / divisor
            if isinstance(factor, Tensor):
                factor = factor.expand(len(input))
        values, *ctx.grads = _run(head, rows, chunk, factor, needs)
        return row_sum(values) / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if upstream.dim() == 1:
            softcap, rows, chunk, needs = ctx.again
            input, weight, bias = ctx.saved_tensors
            head = _Head(input, weight, bias, softcap)
            grads = _run(head, rows, chunk, upstream, needs)[1:]
            return (*grads, *(None,) * 5)
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "a second backward pass through linear_loss: its gradients were handed out by the "
                'first one. Compute the loss again, or use reduction="none"'
            )
        scaled = (None if grad is None else times_upstream(grad, upstream) for grad in grads)
        return (*scaled, *(None,) * 5)


def linear_loss(
    input: Tensor,
    linear_weight: Tensor | LowRankWeight,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    second: Tensor | tuple[Tensor, ...] | None = None,
    impl: str = "auto",
    options: LinearLossOptions | None = None,
) -> Tensor:
    """``loss(F.linear(input, linear_weight, linear_bias), target)`` without the logits.

    Memory grows with N + V instead of N V. Gradients for the hidden states, the weight and the bias
    are computed in the forward pass, and only for those that require one. The loss's own
    ``reduction``, ``ignore_index`` and ``weight`` hold. Names follow ``F.linear_cross_entropy``.

    Args:
        input: (..., D) hidden states.
        linear_weight: (V, D). A DTensor that is split over the classes is used where it is (see
            :mod:`labo.fused.parallel`), one that FSDP2 has split is gathered. Or a
            :class:`labo.LowRankWeight`, for a layer with a LoRA or DoRA adapter.
        target: (...) class indices or (..., V) class probabilities.
        loss: any row-wise loss Module of the library, or a :class:`labo.Warmup` of two.
        linear_bias: (V,).
        softcap: if given, the logits are softcap tanh(z / softcap), as in Gemma 2.
        second: for a loss with a second set of logits (distillation): those logits, (..., V), or
            the hidden states and output layer (input, weight[, bias]) of the teacher, whose logits
            are then computed by chunks too, without a cap; held fixed.
        impl: the layer for LABO, label smoothing and cross entropy, as for the losses.
        options: chunk size or memory budget.

    Returns:
        The reduced loss, or (...) if the loss has ``reduction="none"``.

    Example:
        >>> from labo import LABOLoss
        >>> hidden, head = torch.ones(3, 2), torch.eye(4, 2)
        >>> linear_loss(hidden, head, torch.tensor([0, 1, 1]), LABOLoss(tau=1.25))
        tensor(1.2238)
    """
    _checks.check_hyper(impl=impl)
    _check_softcap(softcap)
    if any(map(_checks.is_dtensor, (input, linear_weight, linear_bias))):
        local = shards.local_head(input, linear_weight, linear_bias, target)
        if local.group is not None and (second is not None or impl != "auto"):
            raise ValueError("a split linear_weight goes with neither a teacher nor impl=")
        if local.group is not None:
            return sharded_linear_loss(local, loss, softcap, options)
        input, linear_weight, linear_bias, target = local[:4]
    while isinstance(loss, Warmup):
        loss = loss.active
    if not isinstance(loss, _Loss) or not loss.rowwise:
        raise ValueError(
            f"linear_loss takes a row-wise loss of labo, not {type(loss).__name__}: its value for "
            "a row must depend on that row alone"
        )
    adapter = None
    if isinstance(linear_weight, LowRankWeight):
        if torch.compiler.is_compiling():
            return _eagerly(
                input,
                linear_weight,
                target,
                loss,
                linear_bias=linear_bias,
                softcap=softcap,
                second=second,
                impl=impl,
                options=options,
            )
        adapter, linear_weight = linear_weight, linear_weight.base
    head, labels = _check(input, linear_weight, linear_bias, softcap, target, loss)
    classes = len(head.weight)
    spec = None if second is not None or target.is_floating_point() else loss.spec()
    layer = choose(
        impl, head.input.new_empty(0, classes), labels[:0], unless=None if spec else "this loss"
    )
    rows = _fast_rows(labels, loss.weight, spec, loss.ignore_index, layer) if spec else None
    if rows is None or layer == "reference":
        spec, rows = None, _generic_rows(loss, labels, second)
    if target.is_floating_point():
        total: float | Tensor = float(max(1, len(labels)))
    else:
        total = denominator(labels, classes, loss.ignore_index, loss.weight)
    divisor = total if loss.reduction == "mean" else 1.0
    copies = (1 if spec else _AUTOGRAD_COPIES) + (softcap is not None)
    row_bytes = classes * head.input.element_size() * copies
    chunk = (options or LinearLossOptions()).chunk_rows(len(head.input), row_bytes)
    with torch.autocast(input.device.type, enabled=False):
        if adapter is not None:
            head_and_loss = (head.input, head.weight, head.bias, softcap, rows)
            value = adapted_loss(adapter, *head_and_loss, chunk, divisor, loss.reduction)
        elif not torch.compiler.is_compiling():
            value = _LinearLoss.apply(
                head.input, head.weight, head.bias, softcap, rows, chunk, divisor, loss.reduction
            )
        elif spec is None:
            value = _checkpointed(head, labels, loss, chunk, divisor, second)
        else:
            value = _operator(head, labels, loss, spec, layer, chunk, divisor)
    return value.reshape(input.shape[:-1]) if loss.reduction == "none" else value


class LinearLoss(nn.Module):
    """An output layer that ends in its loss: ``nn.Linear`` and any row-wise loss, by chunks.

    The parameters are those of ``nn.Linear``. See :func:`linear_loss`.

    Args:
        in_features: D.
        num_classes: V.
        loss: any row-wise loss Module of the library, or a :class:`labo.Warmup` of two.
        bias: whether there is a bias.
        softcap, impl, options: as for :func:`linear_loss`.
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
        impl: str = "auto",
        options: LinearLossOptions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_softcap(softcap)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.loss = loss
        self.softcap = softcap
        self.impl = impl
        self.options = options

    def forward(
        self, input: Tensor, target: Tensor, second: Tensor | tuple[Tensor, ...] | None = None
    ) -> Tensor:
        return linear_loss(
            input,
            self.linear.weight,
            target,
            self.loss,
            linear_bias=self.linear.bias,
            softcap=self.softcap,
            second=second,
            impl=self.impl,
            options=self.options,
        )

    def logits(self, input: Tensor) -> Tensor:
        """The logits, (..., V), for when they are wanted: evaluation, decoding."""
        result: Tensor = self.linear(input)
        return result if self.softcap is None else _cap(result, self.softcap)


def _check_softcap(softcap: float | None) -> None:
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be a number above 0 or None, got {softcap!r}")


def _check(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    target: Tensor,
    loss: _Loss,
) -> tuple[_Head, Tensor]:
    """The head with its rows laid out, and the flat targets."""
    head = _lay_out(input, weight, bias, softcap, loss)
    _checks.check_weight(loss.weight, len(weight))
    _checks.check_target(torch.Size((*input.shape[:-1], len(weight))), target, -1)
    if target.is_floating_point():
        return head, target.reshape(-1, len(weight))
    return head, target.reshape(-1).long()


def _lay_out(
    input: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, loss: _Loss
) -> _Head:
    """The head with its rows laid out, in autocast's dtype if that is on."""
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        hint = ""
        if weight.dim() == 1:
            hint = (
                "; FullyShardedDataParallel and ZeRO-3 flatten parameters outside of the forward "
                "pass of their module: use a LinearLoss inside of the wrapped model"
            )
        raise ValueError(
            "linear_weight must have shape (V, D) for input of shape (..., D), got "
            f"{tuple(weight.shape)} and {tuple(input.shape)}{hint}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_bias must have shape ({len(weight)},), got {tuple(bias.shape)}")
    if loss.dim != -1:
        raise ValueError(
            f"linear_loss puts the classes last: the loss must have dim=-1, not {loss.dim}"
        )
    device = input.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if len({x.dtype for x in (input, weight, bias) if x is not None}) > 1:
        raise ValueError(
            f"input ({input.dtype}), linear_weight ({weight.dtype}) and linear_bias must have one "
            "dtype, unless autocast is on"
        )
    _checks.check_logits(input, -1)
    return _Head(input.reshape(-1, input.shape[-1]), weight, bias, softcap)


def _fast_rows(
    target: Tensor, weight: Tensor | None, spec: RowSpec, ignore_index: int, layer: str
) -> _Rows:
    """LABO, label smoothing or cross entropy as the chunk loop sees it."""
    return lambda logits, part, factor, out: run_rows(
        layer, logits, target[part], spec, weight, ignore_index, factor, out
    )


def _generic_rows(loss: _Loss, target: Tensor, second: Tensor | tuple[Tensor, ...] | None) -> _Rows:
    """Any other loss as the chunk loop sees it."""

    def rows(
        logits: Tensor, part: slice, factor: float | Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        extra = _second_rows(second, part)
        return by_autograd(
            lambda z, y: loss.values(z, y, *extra), logits, target[part], factor, out
        )

    return rows


def _second_rows(second: Tensor | tuple[Tensor, ...] | None, part: slice) -> tuple[Tensor, ...]:
    """The second set of logits for a chunk: cut out, or computed by the teacher's output layer."""
    if second is None:
        return ()
    if isinstance(second, Tensor):
        return (second.reshape(-1, second.shape[-1])[part],)
    hidden, weight, *bias = (x.detach() for x in second)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return (_Head(rows, weight, bias[0] if bias else None).logits(part),)


@_disable_dynamo  # as torch.compiler.disable, which would import the compiler here
def _eagerly(*args: Any, **options: Any) -> Tensor:
    return linear_loss(*args, **options)


# ------------------------------------------------------------------ classes split over processes


def loss_and_spec(loss: nn.Module) -> tuple[_Loss, RowSpec]:
    """The loss that computes (the current one of a warm-up), if it works on parts of rows."""
    while isinstance(loss, Warmup):
        loss = loss.active
    spec = loss.spec() if isinstance(loss, _Loss) else None
    if not isinstance(loss, _Loss) or spec is None:
        raise ValueError(
            f"{loss!r} cannot work on logits that are split over processes. CrossEntropyLoss, "
            'LabelSmoothingLoss with convention="torch" and LABOLoss without alpha_grad can. For '
            "other losses, gather the logits or the weight first: full_tensor() of a DTensor"
        )
    return loss, spec


@_disable_dynamo  # as torch.compiler.disable, which would import the compiler here
def sharded_linear_loss(
    shard: shards.LocalHead,
    loss: nn.Module,
    softcap: float | None,
    options: LinearLossOptions | None,
) -> Tensor:
    """:func:`linear_loss` on this process's classes; see :mod:`labo.fused.parallel`."""
    _check_softcap(softcap)
    member, spec = loss_and_spec(loss)
    input, target, reduction = shard.input, shard.target, member.reduction
    head = _lay_out(input, shard.weight, shard.bias, softcap, member)
    shards.check_columns(input, target, -1)
    rows = shards.Rows(
        spec,
        target.reshape(-1).long(),
        shards.replicated("weight", member.weight),
        member.ignore_index,
        shard.group,
        keep=reduction == "none",
    )
    divisor = rows.divisor() if reduction == "mean" else 1.0
    # The same chunks on all processes, or they would wait for each other in vain.
    row_bytes = max(1, shard.widest) * head.input.element_size() * (1 + (softcap is not None))
    chunk = (options or LinearLossOptions()).chunk_rows(len(head.input), row_bytes)
    with torch.autocast(input.device.type, enabled=False):
        value: Tensor = _LinearLoss.apply(
            head.input, head.weight, head.bias, softcap, rows, chunk, divisor, reduction
        )
    return value.reshape(input.shape[:-1]) if reduction == "none" else value


# ------------------------------------------------------------------ torch.compile


def _checkpointed(
    head: _Head,
    target: Tensor,
    loss: _Loss,
    chunk: int,
    divisor: float | Tensor,
    second: Tensor | tuple[Tensor, ...] | None,
) -> Tensor:
    """Any loss in a graph: chunks whose logits are computed again in the backward pass."""

    def values(rows: Tensor, labels: Tensor, *extra: Tensor) -> Tensor:
        logits = nn.functional.linear(rows, head.weight, head.bias)
        if head.softcap is not None:
            logits = _cap(logits, head.softcap)
        return loss.values(logits, labels, *extra)

    parts = []
    for start in range(0, len(head.input), chunk):
        part = slice(start, start + chunk)
        tensors = (head.input[part], target[part], *_second_rows(second, part))
        parts.append(checkpoint(values, *tensors, use_reentrant=False))
    joined = torch.cat(parts)
    return joined if loss.reduction == "none" else row_sum(joined) / divisor


def _operator(
    head: _Head,
    target: Tensor,
    loss: _Loss,
    spec: RowSpec,
    layer: str,
    chunk: int,
    divisor: float | Tensor,
) -> Tensor:
    """LABO, label smoothing or cross entropy in a graph: one operator."""
    tensors = (head.input, head.weight, head.bias, target, loss.weight)
    fixed = (head.softcap, *spec, loss.ignore_index, layer, chunk)
    if loss.reduction == "none":
        return linear_rows_op(*tensors, *fixed)
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, device=head.input.device)
    needs = [x is not None and x.requires_grad for x in tensors[:3]]
    return linear_loss_op(*tensors, *fixed, divisor, needs)[0]


@torch.library.custom_op("labo::linear_loss", mutates_args=())
def linear_loss_op(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    softcap: float | None,
    mode: int,
    alpha: float,
    tau: float,
    rho: float,
    ignore_index: int,
    layer: str,
    chunk: int,
    divisor: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reduced loss with its gradients for input, weight and bias; empty if not needed."""
    rows = _fast_rows(target, class_weight, RowSpec(mode, alpha, tau, rho), ignore_index, layer)
    factor = (1 / divisor).expand(len(input)) if any(needs) else None
    values, *grads = _run(_Head(input, weight, bias, softcap), rows, chunk, factor, needs)
    return row_sum(values) / divisor, *_all_there(input, grads)


def _all_there(like: Tensor, grads: Iterable[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """An operator returns tensors only: an empty one for a gradient that is not needed."""
    d_input, d_weight, d_bias = (like.new_empty(0) if grad is None else grad for grad in grads)
    return d_input, d_weight, d_bias


def _gradients_like(
    input: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (input.shape, weight.shape, weight.shape[:1])
    kept = zip(shapes, needs, strict=True)
    return _all_there(input, (input.new_empty(shape) if need else None for shape, need in kept))


@linear_loss_op.register_fake
def _(
    input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    value = input.new_empty((), dtype=_accurate(input))
    return value, *_gradients_like(input, weight, needs=rest[-1])


def _accurate(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-1]
    ctx.save_for_backward(*output[1:])


def _give_gradients(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    kept = zip(ctx.saved_tensors, ctx.needs, strict=True)
    grads = ((grad * upstream).to(grad.dtype) if needed else None for grad, needed in kept)
    return (*grads, *(None,) * 12)


linear_loss_op.register_autograd(_give_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("labo::linear_rows", mutates_args=())
def linear_rows_op(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    softcap: float | None,
    mode: int,
    alpha: float,
    tau: float,
    rho: float,
    ignore_index: int,
    layer: str,
    chunk: int,
) -> Tensor:
    """The value of each row, (N,)."""
    rows = _fast_rows(target, class_weight, RowSpec(mode, alpha, tau, rho), ignore_index, layer)
    head = _Head(input, weight, bias, softcap)
    return _run(head, rows, chunk, None, (False, False, False))[0]


@linear_rows_op.register_fake
def _(input: Tensor, *rest: Any) -> Tensor:
    return input.new_empty(len(input), dtype=_accurate(input))


@torch.library.custom_op("labo::linear_rows_backward", mutates_args=())
def linear_rows_backward_op(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    softcap: float | None,
    mode: int,
    alpha: float,
    tau: float,
    rho: float,
    ignore_index: int,
    layer: str,
    chunk: int,
    upstream: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum_i upstream_i value_i for input, weight and bias; empty if not needed."""
    rows = _fast_rows(target, class_weight, RowSpec(mode, alpha, tau, rho), ignore_index, layer)
    _, *grads = _run(_Head(input, weight, bias, softcap), rows, chunk, upstream, needs)
    return _all_there(input, grads)


@linear_rows_backward_op.register_fake
def _(
    input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients_like(input, weight, needs=rest[-1])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.fixed = inputs[5:]


def _compute_again(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = linear_rows_backward_op(*ctx.saved_tensors, *ctx.fixed, upstream, needs)
    kept = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (*kept, *(None,) * 10)


linear_rows_op.register_autograd(_compute_again, setup_context=_keep_inputs)
