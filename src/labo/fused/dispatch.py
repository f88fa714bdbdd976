"""Chooses the backend for a loss on logits and connects it to autograd and ``torch.compile``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._rows import row_sum, wide
from .._stored import stored_rows
from . import algebra, blocked, native, shards
from .algebra import FormulaSpec
from .spec import RowSpec, Spec, as_formula


def backends() -> dict[str, str]:
    """The backends that are available here, or the reason why one is not.

    Returns:
        A sentence for each of "reference", "blocked", "native (CPU)" and "native (CUDA)".

    Example:
        >>> backends()["reference"]
        'available'
    """
    cpu = native.unavailable()
    cuda = _triton_unavailable()
    return {
        "reference": "available",
        "blocked": "available",
        "native (CPU)": f"unavailable: {cpu}" if cpu else f"available ({native.instruction_set()})",
        "native (CUDA)": f"unavailable: {cuda}" if cuda else "available (triton)",
    }


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _triton_unavailable() -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def _native_refuses(logits: Tensor) -> str | None:
    """Why no native kernel can take these logits, or None."""
    if logits.is_cpu:
        return native.refuses(logits)
    if logits.is_cuda:
        if logits.dtype == torch.float64:
            return "the Triton kernels take float32, bfloat16 and float16, not torch.float64"
        return _triton_unavailable()
    return f"there is no native kernel for {logits.device.type} tensors"


def _fused_refuses(logits: Tensor, target: Tensor, weight: Tensor | None) -> str | None:
    """Why the reference must serve this call, or None."""
    if target.is_floating_point():
        return "class probabilities as targets"
    if weight is not None and weight.requires_grad:
        return "class weights that require a gradient"
    if torch.compiler.is_compiling():
        return None
    if not _checks.is_plain(logits, target):
        return "tensor subclasses and torch.func transforms"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return None


def choose(
    impl: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    inplace: bool = False,
    reference_only: str | None = None,
) -> str:
    """The backend that serves a call: "reference", "blocked" or "native".

    "auto" takes the fastest one that supports the call. float64 goes to the reference, which alone
    can be differentiated twice. So do probability targets, tensor subclasses and ``torch.func``.

    Args:
        impl: the backend that the caller asked for, checked.
        logits: its logits.
        target: its target.
        weight: its class weights.
        inplace: whether the gradient is to be written over the logits.
        reference_only: an option of the loss that only the reference supports.
    """
    _checks.check_tensors(logits, target)
    if _checks.is_dtensor(logits) and not all(p.is_replicate() for p in logits.placements):  # type: ignore[attr-defined]
        return _choose_parallel(impl, target, inplace, reference_only)
    reason = reference_only or _fused_refuses(logits, target, weight)
    if impl == "auto":
        backend = "reference" if reason else _fastest(logits, inplace)
    else:
        backend = impl
        if impl == "native":
            reason = reason or _native_refuses(logits)
    if backend == "reference":
        if inplace:
            why = f" ({reason})" if reason else ""
            raise ValueError(f"inplace=True is not possible with the reference{why}")
    elif reason:
        raise ValueError(f'impl="{impl}" does not support {reason}; use impl="auto"')
    return backend


def _choose_parallel(impl: str, target: Tensor, inplace: bool, reference_only: str | None) -> str:
    """For logits that are split over processes: "parallel", which has no options."""
    reason = reference_only or (
        "class probabilities as targets" if target.is_floating_point() else None
    )
    reason = reason or ("inplace=True" if inplace else None)
    reason = reason or (f'impl="{impl}"' if impl != "auto" else None)
    if reason:
        raise ValueError(
            f"logits that are split over processes do not go with {reason}: change that, or "
            "gather the logits first with logits.full_tensor()"
        )
    return "parallel"


def _fastest(logits: Tensor, inplace: bool) -> str:
    if _native_refuses(logits) is None:
        return "native"
    # A compiler fuses the plain formula well, and only that can be differentiated twice.
    plain = logits.dtype == torch.float64 or torch.compiler.is_compiling()
    return "reference" if plain and not inplace else "blocked"


ROW_LOSS_SCHEMA = (
    "Tensor? class_weight, Tensor? source, Tensor? stored, int ignore_index, str backend, str loss"
)


class RowLoss(NamedTuple):
    """A loss of :mod:`labo.fused.spec` on a backend: all its arguments but logits and target.

    ``source`` is what the masses of a formula come from, see :mod:`labo.fused.algebra`. With stored
    classes it has their log-probabilities, (N, k), and ``stored`` has the classes, -1 for none.
    """

    weight: Tensor | None
    ignore_index: int
    backend: str
    spec: Spec
    source: Tensor | None = None
    stored: Tensor | None = None

    @classmethod
    def unpack(
        cls,
        weight: Tensor | None,
        source: Tensor | None,
        stored: Tensor | None,
        ignore_index: int,
        backend: str,
        described: str,
    ) -> RowLoss:
        """The inverse of :meth:`pack`."""
        name, *numbers = described.split(" ")
        parameters = [float(x) for x in numbers]
        if name.isdecimal():
            return cls(weight, ignore_index, backend, RowSpec(int(name), *parameters), source)
        *own, z_loss = parameters
        spec = FormulaSpec(name, tuple(own), z_loss)
        return cls(weight, ignore_index, backend, spec, source, stored)

    def pack(self) -> tuple[Any, ...]:
        """The arguments of an operator, as ``ROW_LOSS_SCHEMA`` declares them.

        The loss is a text: the name of a formula, or the number of a mode, and the parameters.
        """
        spec = self.spec
        if isinstance(spec, FormulaSpec):
            name, numbers = spec.name, [*spec.parameters, spec.z_loss]
        else:
            name, numbers = f"{spec.mode}", [*spec[1:]]
        # float, because torch.compile may have made a variable of a number
        described = " ".join([name, *[f"{float(x)!r}" for x in numbers]])
        return (self.weight, self.source, self.stored, self.ignore_index, self.backend, described)

    def for_chunk(self, part: slice) -> RowLoss:
        """The loss for some of the rows: with what a teacher gives for them, if there is one."""
        spec, source = self.spec, self.source
        if source is None or not isinstance(spec, FormulaSpec):
            return self
        if self.stored is not None:
            return self._replace(source=source[part], stored=self.stored[part])
        by_row = algebra.FORMULAS[spec.name].masses == algebra.FROM_TEACHER
        return self._replace(source=source[part]) if by_row else self

    def rows(
        self,
        logits: Tensor,
        target: Tensor,
        factor: float | Tensor | None = None,
        out: Tensor | None = None,
        statistics: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Values and gradients; the contract is in :mod:`labo.fused.spec`.

        A loss that :meth:`measures` also fills ``statistics``, (N, 5), with those of
        :mod:`labo.fused.metrics`.
        """
        rows: Callable[..., tuple[Tensor, Tensor | None]] = blocked.rows
        if isinstance(self.spec, FormulaSpec):
            backend = self._module(logits)
            rows = partial(algebra.rows, backend, source=self.source, stored=self.stored)
        elif self.backend == "native":
            rows = native.rows if logits.is_cpu else _triton_rows
        if statistics is not None:
            rows = partial(rows, statistics=statistics)
        multiplier = self.spec.multiplier if isinstance(self.spec, RowSpec) else 1.0
        if multiplier != 1 and factor is not None:
            factor = factor * multiplier
        values, grad = rows(
            logits,
            target,
            self.spec,
            weight=self.weight,
            ignore_index=self.ignore_index,
            factor=factor,
            out=out,
        )
        return values if multiplier == 1 else values * multiplier, grad

    def measures(self, logits: Tensor) -> bool:
        """Whether :meth:`rows` gives the statistics of the rows in the same pass."""
        if isinstance(self.spec, FormulaSpec):
            return algebra.FORMULAS[self.spec.name].measures
        return self.backend == "native" and logits.is_cpu

    def _module(self, logits: Tensor) -> ModuleType:
        """The backend of a formula."""
        if self.backend != "native":
            return blocked
        return native if logits.is_cpu else _triton_module()

    def reduce(self, values: Tensor, reduction: str, divisor: float | Tensor) -> Tensor:
        """Values (N,) to the result, without a graph."""
        if reduction == "none":
            return values
        if self.backend == "native" and isinstance(divisor, float) and values.is_cpu:
            return native.total(values, divisor)
        return row_sum(values) / divisor


def _triton_module() -> ModuleType:
    from . import kernels

    return kernels


def _triton_rows(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    from . import kernels

    if logits.stride(1) != 1 and logits.shape[1] > 1:
        logits = logits.contiguous()
    shared: dict[str, Any] = {"mode": spec.mode, "ignore_index": ignore_index, "weight": weight}
    values, statistics = kernels.row_statistics(
        logits, target, alpha=spec.alpha, tau=spec.tau, rho=spec.rho, **shared
    )
    if factor is None:
        return values, None
    if not isinstance(factor, Tensor):
        factor = torch.full_like(values, factor)
    grad = kernels.row_gradient(
        logits, target, statistics, factor.float(), tau=spec.tau, out=out, **shared
    )
    return values, grad


def denominator(
    dtype: torch.dtype, target: Tensor, classes: int, ignore_index: int, weight: Tensor | None
) -> float | Tensor:
    """Check the targets, (N,) int64, and return what a mean divides by; inf if that would be 0.

    It is a number on the CPU, where it can be read at no cost. Elsewhere it is a tensor, so that
    nothing waits. ``dtype`` is that of the logits.
    """
    if weight is not None:
        weight = weight.detach().to(wide(dtype))
    if _checks.can_read(target) and native.unavailable() is None:
        return native.denominator(target, classes, ignore_index, weight) or math.inf
    _checks.check_range(target, classes, ignore_index)
    valid = target != ignore_index
    if weight is None:
        counts = valid.to(wide(dtype))
    else:
        counts = weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0.0)
    total = row_sum(counts)
    total = total.masked_fill(total == 0, math.inf)
    return float(total) if _checks.can_read(total) else total


# ------------------------------------------------------------------ autograd


# A factor that comes with the backward pass, such as that of a GradScaler, must be in the gradient
# before it is rounded to float16, whose range is small. The gradient of these types is therefore
# computed in the backward pass.
LATE_GRADIENT = (torch.float16,)


class _Call(NamedTuple):
    """What is constant in a call: one argument for autograd to look at instead of many."""

    target: Tensor
    loss: RowLoss
    divisor: float | Tensor
    reduction: str
    inplace: bool


_SECOND_BACKWARD = (
    "a second backward pass through this loss: its gradient was handed out by the first one. "
    'Compute the loss again, or use impl="reference"'
)


class _GradientWithValue(torch.autograd.Function):
    """Value and gradient in the forward pass, times the upstream gradient in the backward pass.

    The gradient includes the factor of the mean, so that usually nothing is left to do.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call) -> Tensor:
        factor = 1 / call.divisor
        if isinstance(factor, Tensor):
            factor = factor.expand(len(call.target))
        out = logits if call.inplace else None
        values, ctx.grad = call.loss.rows(logits, call.target, factor, out)
        return call.loss.reduce(values, call.reduction, call.divisor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative()
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError(_SECOND_BACKWARD)
        return times_upstream(grad, upstream), None


class _GradientLater(torch.autograd.Function):
    """Values of the rows in the forward pass, their gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call) -> Tensor:
        # Saved, so that autograd notices if they are changed before the backward pass.
        loss = call.loss
        ctx.save_for_backward(logits, call.target, loss.weight, loss.source, loss.stored)
        ctx.call = call
        return call.loss.rows(logits, call.target)[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None]:
        _refuse_second_derivative()
        call = ctx.call
        if call is None:
            raise RuntimeError(_SECOND_BACKWARD)
        logits, target, *_ = ctx.saved_tensors
        if call.inplace:
            ctx.call = None  # the logits are gone
        return call.loss.rows(logits, target, upstream, logits if call.inplace else None)[1], None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fused losses are differentiable once: for a gradient of their gradient "
            '(create_graph=True) use impl="reference"'
        )


def times_upstream(grad: Tensor, upstream: Tensor) -> Tensor:
    """A gradient that may be changed, times the upstream gradient (per row, or one number)."""
    if upstream.dim() == 0 and upstream.is_cpu and upstream.item() == 1:
        return grad
    if upstream.dim() == 1:
        upstream = upstream.unsqueeze(-1)
    return grad.mul_(upstream)


def row_loss(
    logits: Tensor,
    target: Tensor,
    spec: Spec | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    dim: int,
    impl: str,
    inplace: bool,
    *,
    reference_only: str = "this option of the loss",
    source: Callable[[], Tensor] | None = None,
    stored: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """The loss by a fused backend, or None if the reference has to compute it.

    Arguments as in :mod:`labo.functional`, where the plain values are checked.

    Args:
        spec: the loss; None if only the reference has it, because of ``reference_only``.
        source: checks and returns what the masses of a formula come from.
        stored: stored classes and their log-probabilities, (..., k), not yet checked.
    """
    only = reference_only if spec is None else None
    backend = choose(impl, logits, target, weight, inplace, only)
    if backend == "reference" or spec is None:
        return None
    if backend == "parallel":
        shards.check_formula(as_formula(spec))
        shared = (weight, ignore_index, reduction, dim)
        class_row = None if source is None else source()
        return shards.row_loss(logits, target, spec, *shared, class_row=class_row)
    _checks.check_logits(logits, dim)
    _checks.check_target(logits.shape, target, dim)
    classes = logits.shape[dim]
    _checks.check_weight(weight, classes)
    if weight is not None or target.device != logits.device:
        _checks.check_devices(logits, target=target, weight=weight)
    # Every view is a node in the graph, and at small sizes the time goes into nodes.
    flat, labels = logits, target
    if logits.dim() != 2 or dim == 0 or dim == -2:
        flat, labels = logits.movedim(dim, -1).reshape(-1, classes), target.reshape(-1)
    if labels.dtype != torch.int64:
        labels = labels.long()
    total = denominator(logits.dtype, labels, classes, ignore_index, weight)
    divisor = total if reduction == "mean" else 1.0
    loss = RowLoss(weight, ignore_index, backend, spec, None if source is None else source())
    if stored is not None:
        valid = labels != ignore_index
        index, log_t = stored_rows(*stored, logits, target.shape, classes, valid)
        loss = loss._replace(source=log_t, stored=index)
    with_grad = logits.requires_grad and torch.is_grad_enabled()
    late = logits.dtype in LATE_GRADIENT
    if inplace:
        _check_inplace(logits)
    if torch.compiler.is_compiling():
        values, _ = rows_op(flat, labels, with_grad and not late, *loss.pack())
        value = values if reduction == "none" else row_sum(values) / divisor
    elif not with_grad:
        value = loss.reduce(loss.rows(flat, labels)[0], reduction, divisor)
    else:
        call = _Call(labels, loss, divisor, reduction, inplace)
        if inplace:
            # The kernels write behind autograd's back. This counts as a change of the logits, so
            # that the backward pass of an operation that saved them raises.
            logits.detach()[:0].zero_()
        if late:
            values = _GradientLater.apply(flat, call)
            value = values if reduction == "none" else row_sum(values) / divisor
        else:
            value = _GradientWithValue.apply(flat, call)
    return value.reshape(target.shape) if reduction == "none" else value


def _check_inplace(logits: Tensor) -> None:
    if torch.compiler.is_compiling():
        raise ValueError("inplace=True is for eager mode; torch.compile plans buffers itself")
    if _shares_memory_with_leaf(logits):
        raise ValueError(
            "inplace=True writes the gradient over the logits: they must be the output of a layer, "
            "not a leaf that requires a gradient, nor a view of one"
        )
    if not logits.is_contiguous():
        raise ValueError("inplace=True needs contiguous logits with the classes last")


def _shares_memory_with_leaf(logits: Tensor) -> bool:
    """Whether the logits are in the memory of a leaf that requires a gradient.

    A view has one input, and so has each view before it: only such a chain can end in the same
    memory.
    """
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        return True
    node: Any = logits.grad_fn
    while node is not None:
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            memory: int = leaf.untyped_storage().data_ptr()
            # Tensors without elements have no memory, which they do not share.
            return memory != 0 and memory == logits.untyped_storage().data_ptr()
        inputs = [before for before, _ in node.next_functions if before is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return False


# ------------------------------------------------------------------ torch.compile


@torch.library.custom_op(
    "labo::rows",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, bool with_grad, {ROW_LOSS_SCHEMA}) -> (Tensor, Tensor)",
)
def rows_op(logits: Tensor, target: Tensor, with_grad: bool, *loss: Any) -> tuple[Tensor, Tensor]:
    """Values (N,) and gradient (N, K). Without ``with_grad`` the latter is (0, K)."""
    values, grad = RowLoss.unpack(*loss).rows(logits, target, 1.0 if with_grad else None)
    return values, logits.new_empty(0, logits.shape[1]) if grad is None else grad


@rows_op.register_fake
def _(logits: Tensor, target: Tensor, with_grad: bool, *loss: Any) -> tuple[Tensor, Tensor]:
    count, classes = logits.shape
    values = logits.new_empty(count, dtype=wide(logits.dtype))
    return values, logits.new_empty(count if with_grad else 0, classes)


@torch.library.custom_op(
    "labo::rows_backward",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor upstream, {ROW_LOSS_SCHEMA}) -> Tensor",
)
def rows_backward_op(logits: Tensor, target: Tensor, upstream: Tensor, *loss: Any) -> Tensor:
    """The gradient of sum_i upstream_i value_i, (N, K)."""
    _, grad = RowLoss.unpack(*loss).rows(logits, target, upstream)
    assert grad is not None
    return grad


@rows_backward_op.register_fake
def _(logits: Tensor, target: Tensor, upstream: Tensor, *loss: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_for_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.with_grad, *given = inputs
    tensors, ctx.loss = given[:3], given[3:]
    if ctx.with_grad:
        ctx.save_for_backward(output[1])
    else:
        ctx.save_for_backward(logits, target, *tensors)


def _rows_gradient(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.with_grad:
        (grad,) = ctx.saved_tensors
        grad = (grad * upstream.unsqueeze(-1)).to(grad.dtype)
    else:
        logits, target, *tensors = ctx.saved_tensors
        grad = rows_backward_op(logits, target, upstream, *tensors, *ctx.loss)
    return (grad, None, None, *(None,) * 3, *(None for _ in ctx.loss))


rows_op.register_autograd(_rows_gradient, setup_context=_save_for_rows)
