"""Which layer computes a loss on logits, and how it meets autograd and ``torch.compile``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._rows import row_sum
from . import blocked, native, shards
from .spec import RowSpec


def backends() -> dict[str, str]:
    """Which layers are available here, and why not.

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


def _fused_refuses(logits: Tensor, target: Tensor) -> str | None:
    """Why only the reference can do this, or None."""
    if target.is_floating_point():
        return "class probabilities as targets"
    if torch.compiler.is_compiling():
        return None
    if not _checks.is_plain(logits):
        return "tensor subclasses and torch.func transforms"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return None


def choose(
    impl: str, logits: Tensor, target: Tensor, inplace: bool = False, unless: str | None = None
) -> str:
    """The layer that serves a call: "reference", "blocked" or "native".

    "auto" takes the fastest that fits. float64 goes to the reference, which alone can be
    differentiated twice; so do probability targets, tensor subclasses and ``torch.func``.

    Args:
        impl: what the caller asked for, checked.
        logits: its logits.
        target: its target.
        inplace: whether the gradient shall go over the logits.
        unless: an option of the loss that only the reference has.
    """
    if _checks.is_dtensor(logits) and not all(p.is_replicate() for p in logits.placements):  # type: ignore[attr-defined]
        return _choose_parallel(impl, target, inplace, unless)
    reason = unless or _fused_refuses(logits, target)
    if impl == "auto":
        layer = "reference" if reason else _fastest(logits, inplace)
    elif impl == "native":
        layer = impl
        reason = reason or _native_refuses(logits)
    else:
        layer = impl
    if layer == "reference":
        if inplace:
            why = f" ({reason})" if reason else ""
            raise ValueError(f"inplace=True is not possible with the reference{why}")
    elif reason:
        raise ValueError(f'impl="{impl}" cannot serve this call: {reason}; use impl="auto"')
    return layer


def _choose_parallel(impl: str, target: Tensor, inplace: bool, unless: str | None) -> str:
    """For logits that are split over processes: "parallel", which has no options."""
    reason = unless or ("class probabilities as targets" if target.is_floating_point() else None)
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


def run_rows(
    impl: str,
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    weight: Tensor | None,
    ignore_index: int,
    factor: float | Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The contract of :mod:`labo.fused.spec`, by the named layer."""
    rows: Callable[..., tuple[Tensor, Tensor | None]] = blocked.rows
    if impl == "native":
        rows = native.rows if logits.is_cpu else _triton_rows
    return rows(
        logits, target, spec, weight=weight, ignore_index=ignore_index, factor=factor, out=out
    )


def _triton_rows(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    weight: Tensor | None,
    ignore_index: int,
    factor: float | Tensor | None,
    out: Tensor | None,
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
    target: Tensor, classes: int, ignore_index: int, weight: Tensor | None
) -> float | Tensor:
    """Check the targets, (N,), and give what a mean divides by; 1 if nothing counts.

    A number on the CPU, where it is free to know; a tensor elsewhere, so that nothing waits.
    """
    if _checks.values_at_hand(target) and native.unavailable() is None:
        return native.denominator(target, classes, ignore_index, weight) or 1.0
    _checks.check_range(target, classes, ignore_index)
    valid = target != ignore_index
    if weight is None:
        counts = valid.to(torch.float32)
    else:
        counts = weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0.0)
    total = row_sum(counts)
    total = total.masked_fill(total == 0, 1.0)
    return float(total) if _checks.values_at_hand(total) else total


# ------------------------------------------------------------------ autograd


class _Call(NamedTuple):
    """What is constant in a call: one argument for autograd to look at instead of eight."""

    target: Tensor
    weight: Tensor | None
    spec: RowSpec
    ignore_index: int
    divisor: float | Tensor
    reduction: str
    impl: str
    inplace: bool


class _RowLoss(torch.autograd.Function):
    """Eager mode: value and gradient in the forward pass, times what comes from above in backward.

    The gradient is made with the factor of the mean in it, so that as a rule nothing is left to do.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call) -> Tensor:
        factor = None
        if ctx.needs_input_grad[0]:
            factor = 1 / call.divisor
            if isinstance(factor, Tensor):
                factor = factor.expand(len(call.target))
        values, ctx.grad = run_rows(
            call.impl,
            logits,
            call.target,
            call.spec,
            call.weight,
            call.ignore_index,
            factor,
            logits if call.inplace else None,
        )
        if call.reduction == "none":
            return values
        if call.impl == "native" and isinstance(call.divisor, float) and values.is_cpu:
            return native.total(values, call.divisor)
        return row_sum(values) / call.divisor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused losses are differentiable once: for a gradient of their gradient "
                '(create_graph=True) use impl="reference"'
            )
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError(
                "a second backward pass through this loss: its gradient was handed out by the "
                'first one. Compute the loss again, or use impl="reference"'
            )
        return times_upstream(grad, upstream), None


@torch.library.custom_op("labo::rows", mutates_args=())
def rows_op(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    with_grad: bool,
    mode: int,
    alpha: float,
    tau: float,
    rho: float,
    ignore_index: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Under ``torch.compile``: values (N,) and gradient (N, K), or (0, K), as one operator."""
    spec = RowSpec(mode, alpha, tau, rho)
    factor = 1.0 if with_grad else None
    values, grad = run_rows(impl, logits, target, spec, weight, ignore_index, factor)
    return values, logits.new_empty(0, logits.shape[1]) if grad is None else grad


@rows_op.register_fake
def _(
    logits: Tensor, target: Tensor, weight: Tensor | None, with_grad: bool, *spec: float | str
) -> tuple[Tensor, Tensor]:
    count, classes = logits.shape
    accurate = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values = logits.new_empty(count, dtype=accurate)
    return values, logits.new_empty(count if with_grad else 0, classes)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _give_gradient(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (grad,) = ctx.saved_tensors
    return ((grad * upstream.unsqueeze(-1)).to(grad.dtype), *(None,) * 9)


rows_op.register_autograd(_give_gradient, setup_context=_keep_gradient)


def times_upstream(grad: Tensor, upstream: Tensor) -> Tensor:
    """A gradient that is ours to change, times the gradient from above (per row, or one number)."""
    if upstream.dim() == 0 and upstream.is_cpu and upstream.item() == 1:
        return grad
    if upstream.dim() == 1:
        upstream = upstream.unsqueeze(-1)
    return grad.mul_(upstream)


def row_loss(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    dim: int,
    impl: str,
    inplace: bool,
) -> Tensor:
    """A loss of the family by a fused layer; arguments as in ``functional``, where they are checked
    as far as they are plain values.
    """
    if impl == "parallel":
        shared = (weight, ignore_index, reduction, dim)
        return shards.row_loss(logits, target, spec, *shared)
    _checks.check_logits(logits, dim)
    _checks.check_target(logits.shape, target, dim)
    classes = logits.shape[dim]
    _checks.check_weight(weight, classes)
    if inplace:
        _check_inplace(logits)
    # Every view is a node in the graph, and at small sizes nodes are what costs.
    flat, labels = logits, target
    if logits.dim() != 2 or dim == 0 or dim == -2:
        flat, labels = logits.movedim(dim, -1).reshape(-1, classes), target.reshape(-1)
    if labels.dtype != torch.int64:
        labels = labels.long()
    total = denominator(labels, classes, ignore_index, weight)
    divisor = total if reduction == "mean" else 1.0
    if torch.compiler.is_compiling():
        values, _ = rows_op(flat, labels, weight, flat.requires_grad, *spec, ignore_index, impl)
        value = values if reduction == "none" else row_sum(values) / divisor
    else:
        call = _Call(labels, weight, spec, ignore_index, divisor, reduction, impl, inplace)
        value = _RowLoss.apply(flat, call)
    if inplace:
        # The kernel wrote behind autograd's back: whoever saved these logits must be told.
        logits.detach()[:0].zero_()
    return value.reshape(target.shape) if reduction == "none" else value


def _check_inplace(logits: Tensor) -> None:
    if torch.compiler.is_compiling():
        raise ValueError("inplace=True is for eager mode; torch.compile plans buffers itself")
    if logits.is_leaf and logits.requires_grad:
        raise ValueError(
            "inplace=True writes the gradient over the logits: they must be the output of a layer, "
            "not a leaf that requires a gradient"
        )
    if not logits.is_contiguous():
        raise ValueError("inplace=True needs contiguous logits with the classes last")
