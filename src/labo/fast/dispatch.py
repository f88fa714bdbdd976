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
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .._torch import forward_mode
from ..fields import describe, described
from ..rows import SPLIT, exact, row_sum, wide
from ..sums import EMIX
from . import formula, native, trust
from .columns import COEFFICIENTS, SUMS
from .kernel import Kernel


def backends() -> dict[str, str]:
    """The backends that are available here, or the reason why one is not.

    Returns:
        A sentence for each of "reference", "blocked", "native (CPU)" and "native (CUDA)". The last
        one also lists the losses whose kernels were compared with the plain formula here, at their
        first use, and those whose kernels are not used because they differ.

    Example:
        >>> backends()["reference"]
        'available'
    """
    cpu = native.unavailable()
    cuda = _triton_unavailable()
    compared = trust.checked()
    checked = f"; {compared}" if compared else ""
    return {
        "reference": "available",
        "blocked": "available",
        "native (CPU)": f"unavailable: {cpu}" if cpu else f"available ({native.instruction_set()})",
        "native (CUDA)": f"unavailable: {cuda}" if cuda else f"available (triton{checked})",
    }


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _triton_unavailable() -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def _native_refuses(logits: Tensor, loss: Any = None) -> str | None:
    """Why no native kernel can take these logits, or compute this loss of them; None if one can."""
    if logits.is_cpu:
        return native.refuses(logits)
    if logits.is_cuda:
        if logits.dtype == torch.float64:
            return "the Triton kernels take float32, bfloat16 and float16, not torch.float64"
        unavailable = _triton_unavailable()
        return trust.refuses(loss, logits) if unavailable is None and loss else unavailable
    return f"there is no native kernel for {logits.device.type} tensors"


def _fused_refuses(logits: Tensor, target: Tensor, weight: Tensor | None) -> str | None:
    """Why the reference must serve this call, or None."""
    if target.is_floating_point():
        return "class probabilities as targets"
    if weight is not None and weight.requires_grad:
        return "class weights that require a gradient"
    if not _checks.is_plain(logits, target):
        compiling = torch.compiler.is_compiling()
        return None if compiling else "tensor subclasses and torch.func transforms"
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
        backend = "reference" if reason else _fastest(loss, logits)
    else:
        backend = impl
        if impl == "native":
            reason = reason or _native_refuses(logits, loss)
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


def _fastest(loss: Any, logits: Tensor) -> str:
    if _native_refuses(logits, loss) is None:
        return "native"
    # A compiler fuses the plain formula well, and only that can be differentiated twice.
    plain = logits.dtype == torch.float64 or torch.compiler.is_compiling()
    return "reference" if plain and not loss.inplace else "blocked"


# The C kernel takes no float16. A float32 copy of the logits and the kernel are several times as
# fast as blocks; with more classes than this the memory of the copy is worth saving.
_COPIED_CLASSES = 4096


def for_few_classes(loss: Any, backend: str, logits: Tensor, classes: int) -> tuple[str, Tensor]:
    """The backend and the logits that "auto" takes, by the number of classes.

    Not by the number of rows: the bits of a row depend on that row alone.
    """
    if classes <= loss.few_classes():
        return "reference", logits
    copied = logits.is_cpu and logits.dtype == torch.float16 and classes <= _COPIED_CLASSES
    if backend == "blocked" and copied and native.unavailable() is None:
        return "native", logits.float()
    return backend, logits


ROW_LOSS_SCHEMA = "Tensor[] tensors, str backend, str loss"


class FastRows:
    """A loss on a backend, with what its masses come from.

    ``source`` is a row of classes, a table or a teacher's logits, see :mod:`labo.sums`. With stored
    classes it has their log-probabilities, (N, k), and ``stored`` has the classes, -1 for none.
    """

    def __init__(
        self, loss: Any, backend: str, source: Tensor | None = None, stored: Tensor | None = None
    ) -> None:
        self.loss, self.backend, self.source, self.stored = loss, backend, source, stored
        # The kernel of the loss, if it has one on this backend.
        self.kernel: Kernel | None = loss.kernel() if backend == "native" else None

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
        kernel = self.kernel
        if kernel is None:
            return self._formula(logits, target, out).rows(logits, factor, statistics)
        if not self.in_one_pass(logits):
            values, sums = self.values_and_sums(logits, target)
            if factor is None:
                return values, None
            if not isinstance(factor, Tensor):
                factor = values.new_full((), factor).expand_as(values)
            return values, self.gradient(logits, target, sums, factor, out)
        if factor is not None:
            factor = kernel.scaled(factor)
        given = (self.loss.weight, self.loss.ignore_index, factor, out, statistics)
        values, grad = native.rows(logits, target, kernel, *given)
        return kernel.scaled(values), grad

    def _formula(
        self, logits: Tensor, target: Tensor, out: Tensor | None, some_ignored: bool | None = None
    ) -> formula.FormulaRows:
        given = (target, self.source, self.stored, out, some_ignored)
        return formula.FormulaRows(self._module(logits), self.loss, *given)

    def values(
        self, logits: Tensor, target: Tensor, inplace: bool, some_ignored: bool | None
    ) -> Tensor:
        """The values, (N,), differentiable for the logits, with the gradient in a second pass."""
        out = logits.detach() if inplace else None
        if self.kernel is None:
            return self._formula(logits, target, out, some_ignored).values(logits)
        values: Tensor = _KernelValues.apply(logits, target, self, out)
        return values

    def values_and_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The values, (N,), and what :meth:`gradient` needs to know of each row, (N, n)."""
        kernel = self.kernel
        if self.in_one_pass(logits):
            return self.rows(logits, target)[0], self.sums_like(logits)
        if kernel is not None:
            fixed = (kernel, self.loss.weight, self.loss.ignore_index)
            values, statistics = _triton_module().row_statistics(logits, target, *fixed)
            return kernel.scaled(values), statistics
        rows = self._formula(logits, target, None)
        values, _ = rows.rows(logits, None)
        return values, torch.cat(rows.backend_sums, 1)

    def sums_like(self, logits: Tensor) -> Tensor:
        """A tensor as the second one of :meth:`values_and_sums`; no columns without two passes."""
        if self.in_one_pass(logits):
            return logits.new_empty(logits.shape[0], 0)
        if self.kernel is not None:
            return logits.new_empty(logits.shape[0], native.STATISTICS, dtype=torch.float32)
        plan = formula.plan_of(self.loss, self.loss.weight is not None)
        width = len(SUMS) * (2 if plan.asked & EMIX else 1)
        return logits.new_empty(logits.shape[0], width, dtype=exact(logits.device, logits.dtype))

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        sums: Tensor,
        factor: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The gradient of sum_i factor_i value_i, (N, K), also written to ``out``."""
        kernel = self.kernel
        grad: Tensor | None
        if self.in_one_pass(logits):
            _, grad = self.rows(logits, target, factor, out)
        elif kernel is not None:
            fixed = (kernel, self.loss.weight, self.loss.ignore_index, out)
            grad = _triton_module().row_gradient(
                logits, target, sums, kernel.scaled(factor), *fixed
            )
        else:
            rows = self._formula(logits, target, out)
            rows.known_sums = list(sums.split(len(SUMS), 1))
            _, grad = rows.rows(logits, factor)
        assert grad is not None
        return grad

    def reduced(self, values: Tensor, divisor: float | Tensor) -> Tensor:
        """Values (N,) of a C kernel to the result, without a graph."""
        return values if self.loss.reduction == "none" else native.total(values, float(divisor))

    def in_one_pass(self, logits: Tensor) -> bool:
        """Whether value and gradient come from one pass over the logits."""
        return self.kernel is not None and logits.is_cpu

    def measures(self, logits: Tensor) -> bool:
        """Whether :meth:`rows` gives the statistics of the rows in the same pass."""
        if self.kernel is None:
            return formula.plan_of(self.loss, self.loss.weight is not None).measures
        return self.in_one_pass(logits)

    def _module(self, logits: Tensor) -> ModuleType:
        """The backend of a formula."""
        if self.backend != "native":
            return _blocked_module()
        return native if logits.is_cpu else _triton_module()


def backend_of(logits: Tensor) -> ModuleType:
    """The fastest backend for these logits, with the functions of :mod:`labo.fast.formula`."""
    if _native_refuses(logits) is None:
        return native if logits.is_cpu else _triton_module()
    return _blocked_module()


def _blocked_module() -> ModuleType:
    from . import blocked

    return blocked


def _triton_module() -> ModuleType:
    from . import kernels

    return kernels


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
    if target.is_cuda and _checks.is_plain(target) and _triton_unavailable() is None:
        kernels = _triton_module()
        if len(target) <= kernels.MOST_TARGETS:
            counted, good = kernels.count_targets(target, classes, ignore_index, weight)
            _checks.check_range(target, classes, ignore_index, good)
            return counted if weight is None else counted.to(weight.dtype)
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
# before it is rounded to float16, whose range is small. A gradient of these types is therefore
# computed in the backward pass. The kernels that compute it in one pass take none of them.
LATE_GRADIENT = (torch.float16,)


class _GradientWithValue(torch.autograd.Function):
    """Value and gradient in one pass, times the upstream gradient in the backward pass.

    The gradient includes the factor of the mean, so that usually nothing is left to do. For a
    second backward pass it is computed again. What is constant is one argument, because autograd
    looks at each.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, constant: tuple[FastRows, Tensor, float | Tensor]
    ) -> Tensor:
        rows, target, divisor = ctx.constant = constant
        ctx.inplace = rows.loss.inplace
        if not ctx.inplace:
            ctx.save_for_backward(logits)
        out = logits if ctx.inplace else None
        values, ctx.grad = rows.rows(logits, target, 1 / divisor, out)
        return rows.reduced(values, divisor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None]:
        formula.refuse_second_derivative()
        grad, ctx.grad = ctx.grad, None
        if grad is not None:
            return times_upstream(grad, upstream), None
        if ctx.inplace:
            raise RuntimeError(formula.SECOND_BACKWARD)
        (logits,) = ctx.saved_tensors
        rows, target, divisor = ctx.constant
        factor = (upstream / divisor).expand(len(logits))
        return rows.rows(logits, target, factor)[1], None


class _KernelValues(torch.autograd.Function):
    """Values by a Triton kernel, and in the backward pass their gradient, by another one."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, rows: FastRows, out: Tensor | None
    ) -> Tensor:
        values, sums = rows.values_and_sums(logits, target)
        ctx.rows, ctx.out, ctx.spent = rows, out, False
        ctx.save_for_backward(logits, target, rows.loss.weight, sums)
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        formula.refuse_second_derivative()
        if ctx.spent:
            raise RuntimeError(formula.SECOND_BACKWARD)
        ctx.spent = ctx.out is not None
        logits, target, _, sums = ctx.saved_tensors
        return ctx.rows.gradient(logits, target, sums, upstream, ctx.out), None, None, None


def times_upstream(grad: Tensor, upstream: Tensor) -> Tensor:
    """A gradient that may be changed, times the upstream gradient (per row, or one number)."""
    if upstream.dim() == 0 and upstream.is_cpu and upstream.item() == 1:
        return grad
    if upstream.dim() == 0:
        return grad.mul_(upstream)
    # In blocks, because PyTorch copies what it multiplies to the wider of two types.
    for part in _blocked_module().blocks(grad):
        grad[part].mul_(upstream[part].unsqueeze(-1))
    return grad


def fast_loss(rows: FastRows, logits: Tensor, flat: Tensor, labels: Tensor) -> Tensor:
    """The reduced loss by a fast backend.

    Args:
        rows: the loss.
        logits: as the caller gave them.
        flat: (N, K), the logits as rows.
        labels: (N,) int64, not yet checked.
    """
    loss, in_one_pass = rows.loss, rows.in_one_pass(flat)
    reduction, inplace = loss.reduction, loss.inplace
    compiling = torch.compiler.is_compiling()
    with_grad = logits.requires_grad and torch.is_grad_enabled()
    fixed = (labels, flat.shape[1], loss.ignore_index)
    if in_one_pass and not compiling and loss.weight is None:  # the shortest way for small logits
        total: float | Tensor = native.denominator(*fixed, None) or math.inf
    else:
        total = denominator(logits.dtype, *fixed, loss.weight)
    divisor = total if reduction == "mean" else 1.0
    if inplace:
        _check_inplace(logits)
    if compiling:
        values, _ = rows_op(flat, labels, with_grad and in_one_pass, *rows.pack())
        return values if reduction == "none" else row_sum(values) / divisor
    if inplace and with_grad:
        # The kernels write behind autograd's back. This counts as a change of the logits, so that
        # the backward pass of an operation that saved them raises.
        logits.detach()[:0].zero_()
    if in_one_pass:
        if with_grad:
            result: Tensor = _GradientWithValue.apply(flat, (rows, labels, divisor))
            return result
        return rows.reduced(rows.rows(flat, labels)[0], divisor)
    counted = isinstance(total, float) and loss.weight is None
    some_ignored = bool(total != len(labels)) if counted else None
    values = rows.values(flat, labels, inplace and with_grad, some_ignored)
    if reduction == "mean" and some_ignored is False and len(values) < SPLIT:
        values = values.mean()  # the bits of a sum and a division, as one node
    elif reduction != "none":
        values = row_sum(values) / divisor
    return values.to(wide(flat.dtype))


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


# Compiled graphs are cached on disk by the names of their operators. A version of labo with other
# columns must not find the graphs of this one.
_COLUMNS = f"{len(SUMS)}_{len(COEFFICIENTS)}"


@torch.library.custom_op(
    f"labo::rows_and_sums_{_COLUMNS}",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, bool with_grad, {ROW_LOSS_SCHEMA}) -> (Tensor, Tensor)",
)
def rows_op(logits: Tensor, target: Tensor, with_grad: bool, *loss: Any) -> tuple[Tensor, Tensor]:
    """Values (N,) and gradient (N, K), or without ``with_grad`` what its computation needs, (N, n).

    The caller asks for the gradient only where it comes with the values in one pass, in the C
    kernels. Elsewhere the backward operator computes it from the logits and the sums of the rows,
    with the upstream factor before the only rounding and no (N, K) buffer between the passes.
    """
    rows = FastRows.unpack(*loss)
    if not with_grad:
        return rows.values_and_sums(logits, target)
    values, grad = rows.rows(logits, target, 1.0)
    assert grad is not None
    return values, grad


@rows_op.register_fake
def _(logits: Tensor, target: Tensor, with_grad: bool, *loss: Any) -> tuple[Tensor, Tensor]:
    values = logits.new_empty(logits.shape[0], dtype=wide(logits.dtype))
    if with_grad:
        return values, torch.empty_like(logits, memory_format=torch.contiguous_format)
    return values, FastRows.unpack(*loss).sums_like(logits)


@torch.library.custom_op(
    f"labo::rows_from_sums_{_COLUMNS}",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor sums, Tensor upstream, "
    f"{ROW_LOSS_SCHEMA}) -> Tensor",
)
def rows_backward_op(
    logits: Tensor, target: Tensor, sums: Tensor, upstream: Tensor, *loss: Any
) -> Tensor:
    """The gradient of sum_i upstream_i value_i, (N, K)."""
    return FastRows.unpack(*loss).gradient(logits, target, sums, upstream)


@rows_backward_op.register_fake
def _(logits: Tensor, target: Tensor, sums: Tensor, upstream: Tensor, *loss: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_for_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.with_grad, tensors, *ctx.loss = inputs
    ctx.tensors = len(tensors)
    if ctx.with_grad:
        ctx.save_for_backward(output[1])
    else:
        ctx.save_for_backward(logits, target, output[1], *tensors)


def _rows_gradient(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
    if ctx.with_grad:
        (grad,) = ctx.saved_tensors
        grad = (grad * upstream.unsqueeze(-1)).to(grad.dtype)
    else:
        logits, target, sums, *tensors = ctx.saved_tensors
        grad = rows_backward_op(logits, target, sums, upstream, tensors, *ctx.loss)
    return (grad, None, None, [None] * ctx.tensors, None, None)


rows_op.register_autograd(_rows_gradient, setup_context=_save_for_rows)
