r"""The blocked backend: pure PyTorch, in blocks of rows that fit into the cache.

Any device, any floating dtype. The gradient is computed together with the value. It takes one
buffer of the size of the logits, or none in place.

With u = z - max z, e = exp(u) and unnormalised smoothing masses q (1 for label smoothing,
exp(u / tau) for LABO), a row has the value

.. math::
    \Big(\sum_k w_k \hat P_k\Big) \log \sum_j e_j - \sum_j w_j \hat P_j u_j
    + w_y \alpha \tau\, \mathrm{KL}(P \Vert U), \qquad P_j = q_j / \sum_k q_k

with the KL term for LABO only, and the gradient :math:`(\sum_k w_k \hat P_k)\, p - w \hat P`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._rows import row_sum, times, wide
from .algebra import (
    BEYOND_MARGIN,
    COEFFICIENTS,
    COUNT,
    FROM_ROW,
    FROM_TABLE,
    FROM_TEACHER,
    NO_MASSES,
    OTHERS,
    QD,
    QU,
    SUMS,
    TEMPERED,
    TOP,
    UE,
    UR,
    WQU,
    Passes,
    R,
    RowMixture,
)
from .spec import CROSS_ENTROPY, LABEL_SMOOTHING, LABO_ADAPTIVE, RowSpec

# Bytes of one buffer of a block, of which three or four are in use at a time. On two cores with
# 1 MB of L2 cache each, 2 to 4 MB were fastest and 1 MB a tenth slower. A GPU needs larger blocks.
_BLOCK_BYTES = {"cpu": 2 << 20}
_BLOCK_BYTES_ELSEWHERE = 64 << 20


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
    """Values and gradients of rows; the contract is in :mod:`labo.fused.spec`."""
    count, classes = logits.shape
    dtype = wide(logits.dtype)
    values = torch.empty(count, dtype=dtype, device=logits.device)
    if factor is not None and out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad = None if factor is None else out
    if weight is not None:
        weight = weight.detach().to(dtype)
    budget = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES_ELSEWHERE)
    size = min(count, max(1, budget // (4 * classes)))
    buffers = 3 if weight is None else 4
    scratch = torch.empty(buffers, size, classes, dtype=dtype, device=logits.device)
    for start in range(0, count, size or 1):
        part = slice(start, start + size)
        block = _Block(logits[part], target[part], spec, weight, ignore_index, scratch)
        values[part] = block.values
        if grad is not None and factor is not None:
            block.write_gradient(grad[part], factor[part] if isinstance(factor, Tensor) else factor)
    return values, grad


class _Block:
    """One block of rows.

    Attributes:
        values: (N,), the values.
        e: (N, K), exp(u), and its sums ``s``, (N,).
        q: (N, K), exp(u / tau) times the class weights, for LABO.
        q_sum: (N,), the sums of q without the class weights.
        alpha: the weight of P in the label.
        hit: w_y (1 - alpha), what the label gives to class y beyond its share of P.
        label_weight: sum_k w_k P_hat_k; 1 without class weights, and then not set.
    """

    label_weight: float | Tensor

    def __init__(
        self,
        logits: Tensor,
        target: Tensor,
        spec: RowSpec,
        weight: Tensor | None,
        ignore_index: int,
        scratch: Tensor,
    ) -> None:
        u, self.e, *self.buffers = scratch[:, : len(logits)]
        self.mode = spec.mode
        self.weight = weight
        self.classes = logits.shape[1]
        self.lowest = torch.finfo(u.dtype).min
        self.valid = target != ignore_index
        # On the CPU values can be read at no cost. Elsewhere that would wait for the device.
        self.readable = logits.device.type == "cpu"
        self.all_valid = self.readable and bool(self.valid.all())
        y = target if self.all_valid else target.masked_fill(~self.valid, 0)
        self.y = y.unsqueeze(1)
        # With the maximum in the wide type the difference is wide, without a copy of half logits.
        torch.sub(logits, logits.amax(1, keepdim=True).to(u.dtype), out=u)
        u_y = self._at_target(logits, u)
        torch.exp(u, out=self.e)
        self.s = row_sum(self.e)
        log_s = self.s.log()

        self.alpha: float | Tensor = spec.alpha
        w_y: float | Tensor = 1.0 if weight is None else weight[y]
        mean_w: float | Tensor = 1.0  # sum_j w_j P_j
        rest: float | Tensor = 0.0  # sum_j w_j P_j u_j, minus tau KL(P || U) w_y for LABO
        if spec.mode == CROSS_ENTROPY:
            self.alpha = 0.0
        elif spec.mode == LABEL_SMOOTHING:
            mean_w, rest = self._uniform(logits, u)
        else:
            if spec.mode == LABO_ADAPTIVE:
                entropy = log_s - self._sum_times_u(self.e, u) / self.s
                largest = math.log(self.classes) if self.classes > 1 else 1.0
                self.alpha = 1 - spec.rho * entropy / largest
            mean_w, rest = self._tempered(u, spec.tau, w_y)
        self.hit = w_y * (1 - self.alpha)
        values = log_s
        if weight is not None:
            self.label_weight = self.hit + self.alpha * mean_w
            values = self.label_weight * log_s
        values = values - (self.hit * u_y if self.finite_y else times(self.hit, u_y))
        if spec.mode != CROSS_ENTROPY:
            values = values - self.alpha * rest
        self.values = values if self.all_valid else values.masked_fill(~self.valid, 0.0)

    def _at_target(self, logits: Tensor, u: Tensor) -> Tensor:
        """u_y, (N,): -inf if class y is masked, otherwise finite."""
        u_y = u.gather(1, self.y).squeeze(1)
        self.finite_y = self.readable and u_y.amin().item() > -math.inf
        if self.finite_y:
            return u_y
        masked = logits.gather(1, self.y).squeeze(1) == -math.inf
        return u_y.clamp(min=self.lowest).masked_fill(masked, -math.inf)

    def _sum_times_u(self, x: Tensor, u: Tensor) -> Tensor:
        """sum_j x_j u_j, (N,), for x that is 0 where u is -inf. The products stay in a buffer."""
        return row_sum(torch.clamp(u, min=self.lowest, out=self.buffers[0]).mul_(x))

    def _uniform(self, logits: Tensor, u: Tensor) -> tuple[float | Tensor, Tensor]:
        """P over the classes that are not masked: sum_j w_j P_j and sum_j w_j P_j u_j."""
        self.masked: Tensor | None = None
        self.count: int | Tensor = self.classes
        total = row_sum(u)
        if self.readable and total.amin().item() > -math.inf:
            if self.weight is None:
                return 1.0, total / self.classes
            products = torch.mul(u, self.weight, out=self.buffers[0])
            return row_sum(self.weight) / self.classes, row_sum(products) / self.classes
        self.masked = logits == -math.inf
        self.count = self.classes - row_sum(self.masked.to(u.dtype))
        p = (~self.masked).to(u.dtype) / self.count.unsqueeze(1)
        if self.weight is not None:
            p.mul_(self.weight)
        # P is a factor of each term, not of the sum: the sum alone could overflow.
        rest = self._sum_times_u(p, u)
        return (1.0 if self.weight is None else row_sum(p)), rest

    def _tempered(
        self, u: Tensor, tau: float, w_y: float | Tensor
    ) -> tuple[float | Tensor, Tensor]:
        """P = softmax(z / tau): sum_j w_j P_j, and sum_j w_j P_j u_j minus the KL term."""
        out = u if self.weight is None else self.buffers[1]
        self.q = torch.mul(u, 1 / tau, out=out).exp_()
        self.q_sum = row_sum(self.q)
        optimum = tau * (self.q_sum.log() - math.log(self.classes))
        if self.weight is None:
            return 1.0, optimum  # sum_j P_j u_j cancels
        mean_u = self._sum_times_u(self.q, u) / self.q_sum
        mean_wu = row_sum(self.buffers[0].mul_(self.weight)) / self.q_sum
        mean_w = row_sum(self.q.mul_(self.weight)) / self.q_sum
        return mean_w, mean_wu - w_y * (mean_u - optimum)

    def write_gradient(self, grad: Tensor, factor: float | Tensor) -> None:
        """Write factor ((sum_k w_k P_hat_k) p - w P_hat) to ``grad``, rounded once."""
        f = factor if isinstance(factor, Tensor) else torch.full_like(self.s, factor)
        if not self.all_valid:
            f = f * self.valid.to(self.e.dtype)
        g = grad if grad.dtype == self.e.dtype else self.e
        of_p = f if self.weight is None else f * self.label_weight
        self.e.mul_((of_p / self.s).unsqueeze(1))
        if self.mode == CROSS_ENTROPY:
            if g is grad:
                grad.copy_(self.e)
        elif self.mode == LABEL_SMOOTHING:
            share = (f * self.alpha / self.count).unsqueeze(1)
            if self.weight is None:
                torch.sub(self.e, share, out=g)
            else:
                torch.addcmul(self.e, self.weight, share, value=-1, out=g)
            if self.masked is not None:
                g.masked_fill_(self.masked, 0.0)
        else:
            share = (f * self.alpha / self.q_sum).unsqueeze(1)
            torch.addcmul(self.e, self.q, share, value=-1, out=g)
        g.scatter_add_(1, self.y, (-f * self.hit).unsqueeze(1))
        if not self.all_valid:
            g.masked_fill_(~self.valid.unsqueeze(1), 0.0)
        if g is not grad:
            grad.copy_(g)


# ------------------------------------------------------------------ formulas


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows whose copies in the wide type stay in the cache."""
    count, classes = logits.shape
    budget = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES_ELSEWHERE)
    size = max(1, budget // (4 * max(1, classes)))
    return (slice(start, start + size) for start in range(0, count, size))


def _rows_of(logits: Tensor, target: Tensor, plan: Passes, part: slice) -> Tensor:
    """The logits of a block in the wide type; -inf for a target that is left out."""
    z = logits[part].to(wide(logits.dtype))
    if plan.asked & OTHERS:
        classes = torch.arange(logits.shape[1], device=logits.device)
        z = z.masked_fill(classes == target[part].unsqueeze(1), -math.inf)
    return z


def _taus(plan: Passes, part: slice, dtype: torch.dtype) -> tuple[float | Tensor, float | Tensor]:
    """The temperatures of the logits and of the teacher's: numbers, or (N, 1) for a block."""
    if plan.row_tau is None:
        return plan.tau, plan.tau
    tau, source_tau = (x[part].to(dtype).unsqueeze(1) for x in plan.row_tau[:2])
    return tau, source_tau


def _over_tau(z: Tensor, top: Tensor, tau: float | Tensor) -> Tensor:
    """u / tau, from halves, whose difference does not overflow."""
    return (z / 2 - top / 2).mul_(2 / tau)


def _masses(
    plan: Passes,
    z: Tensor,
    u: Tensor,
    source: Tensor | None,
    source_top: Tensor | None,
    source_tau: float | Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The masses q, 0 for masked classes, and the logits v of a teacher minus ``source_top``."""
    masked = z == -math.inf
    v = None
    if plan.masses == TEMPERED:
        return torch.exp(u / plan.tau), None
    if plan.masses == BEYOND_MARGIN:
        q = (-u > plan.margin).to(u.dtype)
    elif source is None or source_top is None:
        q = torch.ones_like(u)
    elif plan.masses == FROM_TEACHER:
        v = _finite(source - source_top).masked_fill_(masked, 0.0)
        q = torch.exp(v / source_tau)
    else:
        q = source.expand_as(u)
    return q.masked_fill(masked, 0.0), v


def _mixture_of(mixture: RowMixture, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """u and x of a block, as :mod:`labo.fused.algebra` has them; finite."""
    top, shift = (of_rows[part].to(z.dtype).unsqueeze(1) for of_rows in mixture)
    u = _finite(z - top)
    return u, _finite(u + shift)


def _finite(u: Tensor) -> Tensor:
    """In place: the lowest finite number for -inf, so that 0 * u is 0 for a masked class."""
    return u.clamp_(min=torch.finfo(u.dtype).min)


def _source_rows(
    source: Tensor | None, plan: Passes, part: slice, target: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """What the masses of a block of rows come from."""
    if source is None or plan.masses == FROM_ROW:
        return None if source is None else source.to(dtype)
    if plan.masses == FROM_TABLE:
        return source[target[part].clamp(0, len(source) - 1)].to(dtype)
    return source[part].to(dtype)


def sums(
    logits: Tensor,
    target: Tensor,
    plan: Passes,
    weight: Tensor | None,
    ignore_index: int,
    source: Tensor | None = None,
) -> Tensor:
    """The sums of every row; see :mod:`labo.fused.algebra`."""
    all_sums = torch.zeros(len(logits), len(SUMS), dtype=torch.float64, device=logits.device)
    if logits.shape[1] == 0:
        all_sums[:, 0] = -math.inf
        return all_sums
    if plan.mixture is not None:
        for part in _blocks(logits):
            z = _rows_of(logits, target, plan, part)
            u, x = _mixture_of(plan.mixture, z, part)
            zero = x.new_zeros(())
            sums_of = {
                "mix": torch.logaddexp(zero, x),
                "emix": u.exp_().mul_(torch.logaddexp(zero, -x)),
            }
            for name, terms in sums_of.items():
                all_sums[part, SUMS.index(name)] = row_sum(terms).double()
        return all_sums.masked_fill_((target == ignore_index).unsqueeze(1), 0.0)
    for part in _blocks(logits):
        z = _rows_of(logits, target, plan, part)
        tau, source_tau = _taus(plan, part, z.dtype)
        top = z.amax(1, keepdim=True)
        found = {"top": top.squeeze(1)}
        top = top.masked_fill(top == -math.inf, 0.0)
        u = _finite(z - top)
        e = u.exp()
        found["e"] = row_sum(e)
        if plan.asked & TOP:
            found["top_at"] = z.argmax(1)
        if plan.asked & COUNT:
            found["count"] = row_sum((z != -math.inf).to(z.dtype))
        if plan.asked & UE:
            found["ue"] = row_sum(u * e)
        if plan.asked & R:
            r = _over_tau(z, top, tau).exp_()
            found["r"] = row_sum(r)
            if plan.asked & UR:
                found["ur"] = _product_sum(u, r)
        if plan.masses != NO_MASSES:
            t, t_top = _source_rows(source, plan, part, target, z.dtype), torch.zeros_like(top)
            if t is not None and plan.masses == FROM_TEACHER:
                t_top = t.masked_fill(z == -math.inf, -math.inf).amax(1, keepdim=True)
                found["source_top"] = t_top.squeeze(1)
                t_top = t_top.masked_fill(t_top == -math.inf, 0.0)
            q, v = _masses(plan, z, u, t, t_top, source_tau)
            d = None if v is None else _finite(v / source_tau) - _finite(_over_tau(z, top, tau))
            found |= _mass_sums(plan, u, d, q, weight)
        for name, value in found.items():
            all_sums[part, SUMS.index(name)] = value.to(all_sums.dtype)
    return all_sums.masked_fill_((target == ignore_index).unsqueeze(1), 0.0)


def _mass_sums(
    plan: Passes, u: Tensor, d: Tensor | None, q: Tensor, weight: Tensor | None
) -> dict[str, Tensor]:
    found = {"q": row_sum(q)}
    if plan.asked & QU:
        found["qu"] = _product_sum(u, q)
    if plan.asked & QD and d is not None:
        found["qd"] = _product_sum(d, q)
    if plan.asked & WQU and weight is not None:
        wq = q * weight.to(q.dtype)
        found |= {"wq": row_sum(wq), "wqu": _product_sum(u, wq)}
    return found


def moments(logits: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """See :data:`labo.fused.spread.Moments`."""
    found = torch.zeros(2, len(logits), dtype=torch.float64, device=logits.device)
    for part in _blocks(logits):
        x = logits[part].to(wide(logits.dtype)).contiguous()  # bits depend on the strides
        if centered:
            center = row_sum(x) / x.shape[1]
            found[0, part] = center.double()
            x = x - center.unsqueeze(1)
        found[1, part] = row_sum(x * x).double()
    return found[0], found[1]


def _product_sum(u: Tensor, q: Tensor) -> Tensor:
    """sum_j u_j q_j. The unit is a factor of each term, because the sum could overflow."""
    unit = 1 / q.shape[1]
    return row_sum(u * (q * unit)).double() / unit


def gradient(
    logits: Tensor,
    target: Tensor,
    plan: Passes,
    weight: Tensor | None,
    ignore_index: int,
    source: Tensor | None,
    coefficients: Tensor,
    out: Tensor,
) -> Tensor:
    """The gradient of every row, written to ``out``; see :mod:`labo.fused.algebra`."""
    classes = logits.shape[1]
    if classes == 0:
        return out
    for part in _blocks(logits):
        z, y = _rows_of(logits, target, plan, part), target[part].unsqueeze(1)
        c = dict(
            zip(COEFFICIENTS, coefficients[part].to(z.dtype).unsqueeze(2).unbind(1), strict=True)
        )
        tau, source_tau = _taus(plan, part, z.dtype)
        u = _finite(z - c["top"])
        g = u.exp()
        g.mul_(c["from_e"] + c["from_ue"] * u if plan.asked & UE else c["from_e"])
        if plan.asked & R:
            g.addcmul_(_over_tau(z, c["top"], tau).exp_(), c["from_r"])
        if plan.mixture is not None:
            _, x = _mixture_of(plan.mixture, z, part)
            # In this order a masked class has 0 times a finite number.
            g.addcmul_(u.exp().mul_(torch.logaddexp(x.new_zeros(()), -x)), c["from_emix"])
        if plan.asked & UR:
            g += (c["from_one"] + c["from_u"] * u).masked_fill_(z == -math.inf, 0.0)
        if plan.masses != NO_MASSES:
            t = _source_rows(source, plan, part, target, z.dtype)
            q, _ = _masses(plan, z, u, t, c["source_top"], source_tau)
            of_q = c["from_q"]
            if plan.asked & WQU and weight is not None:
                of_q = of_q + c["from_wq"] * weight.to(q.dtype)
            g.addcmul_(q, of_q)
        if plan.asked & TOP:
            # From float64: float32 has no room for a large index.
            top_at = coefficients[part, COEFFICIENTS.index("top_at")].long().unsqueeze(1)
            _put(g, top_at, c["at_top"])
        _put(g, y, c["at_target"])
        out[part] = g.masked_fill_(y == ignore_index, 0.0)
    return out


def _put(rows: Tensor, index: Tensor, entry: Tensor) -> None:
    """Write an entry to each row, (N, 1), where its index is a class."""
    classes = rows.shape[1]
    here, column = (index >= 0) & (index < classes), index.clamp(0, classes - 1)
    rows.scatter_(1, column, torch.where(here, entry, rows.gather(1, column)))
