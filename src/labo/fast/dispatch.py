"""Chooses the backend for a loss on logits and connects it to autograd and ``torch.compile``.

Every fast backend computes a formula of row sums in two passes (:mod:`labo.fast.formula`). Cross
entropy, label smoothing and LABO also have kernels of their own in C and Triton, which take one
call (:class:`Kernel`). What computes rows has one contract:

``rows(logits, target, ..., *, weight, ignore_index, factor, out) -> (values, grad)``

- ``logits``: (N, K); ``target``: (N,) int64, checked before; ``weight``: (K,) class weights.
- ``factor``: None for values only. For the gradient too: the number, or the (N,) numbers, that it
  is multiplied with before it is rounded to the dtype of the logits.
- ``out``: where the gradient is written, (N, K) of the dtype of the logits. May be ``logits``. A
  buffer that is given may be overwritten also if there is no gradient.
- ``values``: (N,), at least float32. The value and the gradient of an ignored row are 0, whatever
  its logits are.

The rules, which the reference follows too:

- A class whose logit is -inf is masked. It has no part in a smoothing distribution, and its
  gradient is 0 unless it is the label.
- 0 * inf = 0. A masked label costs infinity, unless its share 1 - alpha (in the precision of the
  computation) or its class weight is 0: then it costs nothing. 0 * NaN is NaN.
- The mean divides by the sum of the weights of the labels. If that is 0, because no row counts or
  because all labels have weight 0, the mean and its gradient are 0.
- The computation uses u = z - max z in at least float32. Where z is finite u is too: if the
  difference overflows, it is the lowest finite number. Such a class is not masked.
- A row with a NaN or a +inf, or with all classes masked, has the value NaN.
- The bits of a row depend on that row alone.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._torch import forward_mode
from ..fields import describe, described
from ..rows import row_sum, wide
from ..sums import FROM_TEACHER
from . import blocked, formula, native
from .kernel import Kernel


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
    if forward_mode():
        return "forward-mode differentiation"
    return None


def choose(loss: Any, logits: Tensor, target: Tensor, reference_only: str | None) -> str:
    """The backend that serves a call: "reference", "blocked", "native" or "parallel".

    "auto" takes the fastest one that supports the call. float64 goes to the reference, which alone
    can be differentiated twice. So do probability targets, tensor subclasses and ``torch.func``.

    Args:
        loss: with the backend that the caller asked for, ``impl``.
        logits: as given.
        target: as given.
        reference_only: what the loss was given that only the reference supports.
    """
    impl, inplace = loss.impl, loss.inplace
    if _checks.is_dtensor(logits) and not all(p.is_replicate() for p in logits.placements):  # type: ignore[attr-defined]
        return _choose_parallel(impl, target, inplace, reference_only)
    reason = reference_only or _fused_refuses(logits, target, loss.weight)
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


ROW_LOSS_SCHEMA = "Tensor[] tensors, str backend, str loss"


class FastRows(NamedTuple):
    """A loss on a backend, with what its masses come from.

    ``source`` is a row of classes, a table or a teacher's logits, see :mod:`labo.sums`. With stored
    classes it has their log-probabilities, (N, k), and ``stored`` has the classes, -1 for none.
    """

    loss: Any
    backend: str
    source: Tensor | None = None
    stored: Tensor | None = None

    @property
    def weight(self) -> Tensor | None:
        weight: Tensor | None = self.loss.weight
        return weight

    @property
    def ignore_index(self) -> int:
        return int(self.loss.ignore_index)

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], backend: str, text: str) -> FastRows:
        """The inverse of :meth:`pack`."""
        kind, values = described(text, tensors)
        given = (values.pop("source", None), values.pop("stored", None))
        return cls(kind.bare(values), backend, *given)  # type: ignore[attr-defined]

    def pack(self) -> tuple[list[Tensor], str, str]:
        """The arguments of an operator, as ``ROW_LOSS_SCHEMA`` declares them."""
        given = {"source": self.source, "stored": self.stored}
        values = self.loss.values() | {name: x for name, x in given.items() if x is not None}
        text, tensors = describe(self.loss._registered, values)
        return tensors, self.backend, text

    def for_chunk(self, part: slice) -> FastRows:
        """The loss for some of the rows: with what a teacher gives for them, if there is one."""
        source = self.source
        if source is None:
            return self
        if self.stored is not None:
            return self._replace(source=source[part], stored=self.stored[part])
        plan = formula.plan_of(self.loss, self.weight is not None)
        return self._replace(source=source[part]) if plan.masses == FROM_TEACHER else self

    def rows(
        self,
        logits: Tensor,
        target: Tensor,
        factor: float | Tensor | None = None,
        out: Tensor | None = None,
        statistics: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Values and gradients; the contract is in the module.

        A loss that :meth:`measures` also fills ``statistics``, (N, 5), with those of
        :mod:`labo.metrics`.
        """
        shared: dict[str, Any] = {"weight": self.weight, "ignore_index": self.ignore_index}
        shared |= {"out": out} if statistics is None else {"out": out, "statistics": statistics}
        kernel = self._kernel()
        if kernel is None:
            taught: dict[str, Any] = {"source": self.source, "stored": self.stored}
            rest = shared | taught | {"factor": factor}
            return formula.rows(self._module(logits), logits, target, self.loss, **rest)
        multiplier = kernel.multiplier
        if multiplier != 1 and factor is not None:
            factor = factor * multiplier
        rows = native.rows if logits.is_cpu else _triton_rows
        values, grad = rows(logits, target, kernel, factor=factor, **shared)
        return values if multiplier == 1 else values * multiplier, grad

    def _kernel(self) -> Kernel | None:
        """The kernel of the loss, if it has one on this backend."""
        kernel: Kernel | None = self.loss.kernel() if self.backend == "native" else None
        return kernel

    def measures(self, logits: Tensor) -> bool:
        """Whether :meth:`rows` gives the statistics of the rows in the same pass."""
        if self._kernel() is None:
            return formula.plan_of(self.loss, self.weight is not None).measures
        return logits.is_cpu

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


def backend_of(logits: Tensor) -> ModuleType:
    """The fastest backend for these logits, with the functions of :mod:`labo.fast.formula`."""
    if _native_refuses(logits) is None:
        return native if logits.is_cpu else _triton_module()
    return blocked


def _triton_module() -> ModuleType:
    from . import kernels

    return kernels


def _triton_rows(
    logits: Tensor,
    target: Tensor,
    kernel: Kernel,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    from . import kernels

    if logits.stride(1) != 1 and logits.shape[1] > 1:
        logits = logits.contiguous()
    shared: dict[str, Any] = {"mode": kernel.mode, "ignore_index": ignore_index, "weight": weight}
    values, statistics = kernels.row_statistics(
        logits, target, alpha=kernel.alpha, tau=kernel.tau, rho=kernel.rho, **shared
    )
    if factor is None:
        return values, None
    if not isinstance(factor, Tensor):
        factor = torch.full_like(values, factor)
    grad = kernels.row_gradient(
        logits, target, statistics, factor.float(), tau=kernel.tau, out=out, **shared
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
    rows: FastRows
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
        values, ctx.grad = call.rows.rows(logits, call.target, factor, out)
        return call.rows.reduce(values, call.reduction, call.divisor)

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
        rows = call.rows
        ctx.save_for_backward(logits, call.target, rows.weight, rows.source, rows.stored)
        ctx.call = call
        return call.rows.rows(logits, call.target)[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None]:
        _refuse_second_derivative()
        call = ctx.call
        if call is None:
            raise RuntimeError(_SECOND_BACKWARD)
        logits, target, *_ = ctx.saved_tensors
        if call.inplace:
            ctx.call = None  # the logits are gone
        return call.rows.rows(logits, target, upstream, logits if call.inplace else None)[1], None


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


def fast_loss(rows: FastRows, logits: Tensor, flat: Tensor, labels: Tensor) -> Tensor:
    """The reduced loss by a fast backend.

    Args:
        rows: the loss.
        logits: as the caller gave them.
        flat: (N, K), the logits as rows.
        labels: (N,) int64, not yet checked.
    """
    loss, classes = rows.loss, flat.shape[1]
    reduction, inplace = loss.reduction, loss.inplace
    total = denominator(logits.dtype, labels, classes, loss.ignore_index, loss.weight)
    divisor = total if reduction == "mean" else 1.0
    with_grad = logits.requires_grad and torch.is_grad_enabled()
    late = logits.dtype in LATE_GRADIENT
    if inplace:
        _check_inplace(logits)
    if torch.compiler.is_compiling():
        values, _ = rows_op(flat, labels, with_grad and not late, *rows.pack())
        return values if reduction == "none" else row_sum(values) / divisor
    if not with_grad:
        return rows.reduce(rows.rows(flat, labels)[0], reduction, divisor)
    call = _Call(labels, rows, divisor, reduction, inplace)
    if inplace:
        # The kernels write behind autograd's back. This counts as a change of the logits, so that
        # the backward pass of an operation that saved them raises.
        logits.detach()[:0].zero_()
    if not late:
        result: Tensor = _GradientWithValue.apply(flat, call)
        return result
    values = _GradientLater.apply(flat, call)
    return values if reduction == "none" else row_sum(values) / divisor


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
    values, grad = FastRows.unpack(*loss).rows(logits, target, 1.0 if with_grad else None)
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
    _, grad = FastRows.unpack(*loss).rows(logits, target, upstream)
    assert grad is not None
    return grad


@rows_backward_op.register_fake
def _(logits: Tensor, target: Tensor, upstream: Tensor, *loss: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_for_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.with_grad, tensors, *ctx.loss = inputs
    ctx.tensors = len(tensors)
    if ctx.with_grad:
        ctx.save_for_backward(output[1])
    else:
        ctx.save_for_backward(logits, target, *tensors)


def _rows_gradient(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
    if ctx.with_grad:
        (grad,) = ctx.saved_tensors
        grad = (grad * upstream.unsqueeze(-1)).to(grad.dtype)
    else:
        logits, target, *tensors = ctx.saved_tensors
        grad = rows_backward_op(logits, target, upstream, tensors, *ctx.loss)
    return (grad, None, None, [None] * ctx.tensors, None, None)


rows_op.register_autograd(_rows_gradient, setup_context=_save_for_rows)
