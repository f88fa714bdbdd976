"""Pure PyTorch: rows in blocks that stay in the cache, the gradient computed with the value.

Any device, any floating dtype. One (N, K) buffer at most, for the gradient; none in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._rows import row_sum, upcast
from .spec import CROSS_ENTROPY, LABEL_SMOOTHING, LABO_ADAPTIVE, RowSpec

# Bytes of one block of float32 rows, of which three are alive at a time. On two cores with 1 MB of
# second-level cache each, 2 to 4 MB measured best, 1 MB a tenth slower. A GPU must be filled.
_BLOCK_BYTES = {"cpu": 2 << 20}
_BLOCK_BYTES_ELSEWHERE = 64 << 20

# Stands for -inf where it meets 0: exp(_LOWEST) is 0, and so is _LOWEST * 0.
_LOWEST = -1e30


def by_autograd(
    loss: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    target: Tensor,
    factor: float | Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of any row-wise loss, for a block that is small enough to spare copies.

    Args:
        loss: (logits, target) to values (N,).
        logits: (N, K).
        target: (N,) or (N, K).
        factor: as in :mod:`labo.fused.spec`.
        out: likewise.
    """
    if factor is None:
        with torch.no_grad():
            return loss(logits, target), None
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        values = loss(leaf, target)
        upstream = factor if isinstance(factor, Tensor) else torch.full_like(values, factor)
        (grad,) = torch.autograd.grad(values, leaf, upstream.to(values.dtype))
    return values.detach(), grad if out is None else out.copy_(grad)


def rows(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of rows; see :mod:`labo.fused.spec` for the contract."""
    count, classes = logits.shape
    dtype = upcast(logits[:0]).dtype
    values = torch.empty(count, dtype=dtype, device=logits.device)
    if factor is not None and out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad = None if factor is None else out
    budget = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES_ELSEWHERE)
    size = min(count, max(1, budget // (4 * classes)))
    scratch = torch.empty(3, size, classes, dtype=dtype, device=logits.device)
    for start in range(0, count, size or 1):
        part = slice(start, start + size)
        z, y, to = logits[part], target[part], None if grad is None else grad[part]
        f = factor[part] if isinstance(factor, Tensor) else factor
        if weight is not None:
            values[part], _ = by_autograd(
                lambda z, y: spec.reference(z, y, weight, ignore_index), z, y, f, to
            )
            continue
        block = _Block(z, y, spec, ignore_index, scratch)
        values[part] = block.values
        if to is not None and f is not None:
            block.write_gradient(to, f)
    return values, grad


class _Block:
    """One block of rows: e = exp(u) and the smoothing mass q = exp(u / tau), with u = z - max z."""

    def __init__(
        self, logits: Tensor, target: Tensor, spec: RowSpec, ignore_index: int, scratch: Tensor
    ) -> None:
        u, e, product = scratch[:, : len(logits)]
        classes = logits.shape[1]
        self.mode = spec.mode
        self.valid = target != ignore_index
        # On the CPU looking is free; elsewhere it would wait for the device.
        self.all_valid = logits.device.type == "cpu" and bool(self.valid.all())
        self.y = target.masked_fill(~self.valid, 0).unsqueeze(1)
        # The maximum in the wide type makes the subtraction wide, with no copy of half logits.
        torch.sub(logits, logits.amax(1, keepdim=True).to(u.dtype), out=u)
        u_y = u.gather(1, self.y).squeeze(1)
        if spec.mode == LABO_ADAPTIVE:
            u.clamp_(min=_LOWEST)
        self.e = torch.exp(u, out=e)
        self.s = row_sum(self.e)
        log_s = self.s.log()
        self.alpha: float | Tensor = spec.alpha
        if spec.mode == CROSS_ENTROPY:
            values = log_s - u_y
        elif spec.mode == LABEL_SMOOTHING:
            self.count, mean = self._uniform(u, product)
            values = log_s - (1 - spec.alpha) * u_y - spec.alpha * mean
        else:
            if spec.mode == LABO_ADAPTIVE:
                entropy = log_s - row_sum(torch.mul(u, self.e, out=product)) / self.s
                self.alpha = 1 - spec.rho * entropy / (math.log(classes) if classes > 1 else 1.0)
            self.q = u.mul_(1 / spec.tau).exp_()
            self.q_sum = row_sum(self.q)
            optimum = spec.tau * (self.q_sum.log() - math.log(classes))
            values = log_s - (1 - self.alpha) * u_y - self.alpha * optimum
        self.values = values.masked_fill(~self.valid, 0.0)

    def _uniform(self, u: Tensor, buffer: Tensor) -> tuple[int | Tensor, Tensor]:
        """How many classes there are (K, or per row what is not masked), and their mean u."""
        classes = u.shape[1]
        total = row_sum(u)
        self.masked: Tensor | None = None
        if u.device.type == "cpu" and not bool(total.isneginf().any()):
            return classes, total / classes
        self.masked = u == -math.inf
        count = classes - row_sum(self.masked.to(u.dtype))
        return count, row_sum(buffer.copy_(u).masked_fill_(self.masked, 0.0)) / count

    def write_gradient(self, grad: Tensor, factor: float | Tensor) -> None:
        """factor * (p - P_hat) into ``grad``; the entry of the label before any rounding."""
        f = factor * self.valid.to(self.e.dtype)
        g = grad if grad.dtype == self.e.dtype else self.e
        self.e.mul_((f / self.s).unsqueeze(1))
        if self.mode == CROSS_ENTROPY:
            if g is grad:
                grad.copy_(self.e)
        elif self.mode == LABEL_SMOOTHING:
            share = (f * self.alpha / self.count).unsqueeze(1)
            torch.sub(self.e, share, out=g)
            if self.masked is not None:
                g.masked_fill_(self.masked, 0.0)
        else:
            share = (f * self.alpha / self.q_sum).unsqueeze(1)
            torch.addcmul(self.e, self.q, share, value=-1, out=g)
        g.scatter_add_(1, self.y, (-f * (1 - self.alpha)).unsqueeze(1))
        if not self.all_valid:
            g.masked_fill_(~self.valid.unsqueeze(1), 0.0)
        if g is not grad:
            grad.copy_(g)


# ------------------------------------------------------------------ columns split over processes


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows whose copies in the wide type stay in the cache."""
    count, classes = logits.shape
    budget = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES_ELSEWHERE)
    size = max(1, budget // (4 * max(1, classes)))
    return (slice(start, start + size) for start in range(0, count, size))


def _masses(z: Tensor, u: Tensor, spec: RowSpec) -> Tensor:
    """The unnormalised smoothing distribution q."""
    if spec.mode == LABEL_SMOOTHING:
        return (z != -math.inf).to(u.dtype)
    return torch.exp(u / spec.tau)


def shard_sums(
    logits: Tensor, target: Tensor, spec: RowSpec, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """The sums of every row over a shard of its columns; see :mod:`labo.fused.shards`."""
    sums = torch.zeros(len(logits), 7, dtype=torch.float64, device=logits.device)
    if logits.shape[1] == 0:
        sums[:, 0] = -math.inf
        return sums
    for part in _blocks(logits):
        z = upcast(logits[part])
        top = z.amax(1, keepdim=True)
        # Finite, so that 0 * u is 0 for a masked class.
        u = (z - top.masked_fill(top == -math.inf, 0.0)).clamp_(min=torch.finfo(z.dtype).min)
        e = u.exp()
        found = {0: top.squeeze(1), 1: row_sum(e)}
        if spec.mode == LABO_ADAPTIVE:
            found[2] = row_sum(u * e)
        if spec.mode != CROSS_ENTROPY:
            q = _masses(z, u, spec)
            found[3] = row_sum(q)
            if spec.mode == LABEL_SMOOTHING or weight is not None:
                found[4] = row_sum(u * q)
            if weight is not None:
                q *= weight.to(q.dtype)
                found |= {5: row_sum(q), 6: row_sum(u * q)}
        for column, value in found.items():
            sums[part, column] = value.to(sums.dtype)
    return sums.masked_fill_((target == ignore_index).unsqueeze(1), 0.0)


def shard_gradient(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    weight: Tensor | None,
    ignore_index: int,
    results: Tensor,
    out: Tensor | None,
) -> Tensor:
    """The gradient of a shard from sums over all of them; see :mod:`labo.fused.shards`."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    classes = logits.shape[1]
    if classes == 0:
        return grad
    for part in _blocks(logits):
        z, y = upcast(logits[part]), target[part].unsqueeze(1)
        top, from_e, from_q, at_target = results[part].to(z.dtype).unsqueeze(2).unbind(1)
        u = z - top
        g = u.exp() * from_e
        if spec.mode != CROSS_ENTROPY:
            q = _masses(z, u, spec)
            if weight is not None:
                q *= weight.to(q.dtype)
            g.addcmul_(q, from_q, value=-1)
        here, column = (y >= 0) & (y < classes), y.clamp(0, classes - 1)
        g.scatter_(1, column, torch.where(here, at_target, g.gather(1, column)))
        grad[part] = g.masked_fill_(y == ignore_index, 0.0)
    return grad
