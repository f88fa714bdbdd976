"""The blocked backend: pure PyTorch, in blocks of rows that fit into the cache.

Any device, any floating dtype. See :mod:`labo.fast.formula` for the two functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import sums as row_sums
from ..rows import exact, row_sum, u_of, wide
from ..sums import Passes, RowMixture
from .columns import COEFFICIENTS, SUMS, RowInputs

# Bytes of one buffer of a block, of which three or four are in use at a time. On two cores with
# 1 MB of L2 cache each, 2 to 4 MB were fastest and 1 MB a tenth slower. A GPU needs larger blocks.
_BLOCK_BYTES = {"cpu": 2 << 20}
_BLOCK_BYTES_ELSEWHERE = 64 << 20


def blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows whose copies in the wide type stay in the cache."""
    count, classes = logits.shape
    budget = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES_ELSEWHERE)
    size = max(1, budget // (4 * max(1, classes)))
    return (slice(start, start + size) for start in range(0, count, size))


def _rows_of(logits: Tensor, target: Tensor, plan: Passes, part: slice) -> Tensor:
    """The logits of a block; -inf for a target that is left out.

    On the CPU in the wide type. Elsewhere an operation on two types reads the narrow one at no
    cost, and a copy would be one more pass.
    """
    z = logits[part]
    if logits.is_cpu:
        z = z.to(wide(logits.dtype))
    if plan.asked & row_sums.OTHERS:
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
    if plan.masses == row_sums.TEMPERED:
        return torch.exp(u / plan.tau), None
    if source is None or source_top is None:  # of each class the same, or 0
        there = z != -math.inf
        if plan.masses == row_sums.BEYOND_MARGIN:
            there &= u < -plan.margin
        return there.to(u.dtype), None
    v, masked = None, z == -math.inf
    if plan.masses == row_sums.FROM_TEACHER:
        v = _finite(source - source_top).masked_fill_(masked, 0.0)
        q = torch.exp(v / source_tau)
    else:
        q = source.expand_as(u)
    return q.masked_fill(masked, 0.0), v


def _taught(
    plan: Passes, z: Tensor, source: Tensor | None, top: Tensor, source_top: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """r, q and d of a block; d is -inf where the teacher alone has masked a class."""
    assert source is not None
    masked = z == -math.inf
    v = (source - source_top).div_(plan.tau).masked_fill_(masked, 0.0)
    u = _over_tau(z, top, plan.tau)
    r, q = u.exp(), v.exp().masked_fill_(masked, 0.0)
    return r, q, v.sub_(u.masked_fill_(masked, 0.0))


def _teacher_mixture(mixture: RowMixture, d: Tensor, part: slice) -> Tensor:
    """x = d + shift of a block, finite."""
    return _finite(d + mixture.shift[part].to(d.dtype).unsqueeze(1))


def _mixture_of(mixture: RowMixture, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """u and x of a block, as :mod:`labo.fast.formula` has them; finite."""
    top, shift = (x[part].to(wide(z.dtype)).unsqueeze(1) for x in mixture[:2])
    u = _finite(z - top)
    return u, _finite(u + shift)


def _finite(u: Tensor) -> Tensor:
    """In place: the lowest finite number for -inf, so that 0 * u is 0 for a masked class."""
    return u.clamp_(min=torch.finfo(u.dtype).min)


def _source_rows(
    source: Tensor | None, plan: Passes, part: slice, target: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """What the masses of a block of rows come from."""
    if source is None or plan.masses == row_sums.FROM_ROW:
        return None if source is None else source.to(dtype)
    if plan.masses == row_sums.FROM_TABLE:
        return source[target[part].clamp(0, len(source) - 1)].to(dtype)
    return source[part].to(dtype) if source.is_cpu else source[part]


def _uses_u(plan: Passes) -> bool:
    """Whether more than exp(u) is computed from u, so that 0 * u has to be 0."""
    return plan.masses != row_sums.NO_MASSES or bool(plan.asked & (row_sums.UE | row_sums.UR))


def sums(logits: Tensor, given: RowInputs) -> Tensor:
    """The sums of every row; see :mod:`labo.fast.formula`."""
    wider = exact(logits.device, logits.dtype)
    all_sums = torch.zeros(len(logits), len(SUMS), dtype=wider, device=logits.device)
    if logits.shape[1] == 0:
        all_sums[:, 0] = -math.inf
        return all_sums
    of_block = _sums if given.plan.mixture is None else _mixture_sums
    for part in blocks(logits):
        for name, column in of_block(logits, given, part).items():
            all_sums[part, SUMS.index(name)] = column.to(wider)
    return all_sums.masked_fill_((given.target == given.ignore_index).unsqueeze(1), 0.0)


def _sums(logits: Tensor, given: RowInputs, part: slice) -> dict[str, Tensor]:
    """The sums of a block of rows that a formula asks for."""
    target, plan, weight, _, source = given
    dtype, z = wide(logits.dtype), _rows_of(logits, target, plan, part)
    tau, source_tau = _taus(plan, part, dtype)
    top = z.amax(1, keepdim=True).to(dtype)
    named = {"top": top.squeeze(1)}
    top = top.masked_fill(top == -math.inf, 0.0)
    named["u_y"] = _u_of_target(logits[part], target[part], top, plan)
    u = z - top
    e = _finite(u).exp() if _uses_u(plan) else u.exp_()
    named["e"] = row_sum(e)
    if plan.asked & row_sums.TOP:
        named["top_at"] = z.argmax(1)
    if plan.asked & row_sums.COUNT:
        named["count"] = row_sum((z != -math.inf).to(dtype))
    if plan.asked & row_sums.UE:
        named["ue"] = row_sum(u * e)
    if plan.asked & row_sums.R:
        r = _over_tau(z, top, tau).exp_()
        named["r"] = row_sum(r)
        if plan.asked & row_sums.UR:
            named["ur"] = _product_sum(u, r)
    if plan.masses == row_sums.NO_MASSES:
        return named
    t, t_top = _source_rows(source, plan, part, target, dtype), torch.zeros_like(top)
    if t is not None and plan.masses == row_sums.FROM_TEACHER:
        t_top = t.masked_fill(z == -math.inf, -math.inf).amax(1, keepdim=True).to(dtype)
        named["source_top"] = t_top.squeeze(1)
        t_top = t_top.masked_fill(t_top == -math.inf, 0.0)
    q, v = _masses(plan, z, u, t, t_top, source_tau)
    named["q"] = row_sum(q)
    if plan.asked & row_sums.QU:
        named["qu"] = _product_sum(u, q)
    if plan.asked & row_sums.QD and v is not None:
        d = _finite(v / source_tau) - _finite(_over_tau(z, top, tau))
        named["qd"] = _product_sum(d, q)
    if plan.asked & row_sums.WQU and weight is not None:
        wq = q * weight.to(q.dtype)
        named |= {"wq": row_sum(wq), "wqu": _product_sum(u, wq)}
    if plan.asked & row_sums.RD:
        r, _, difference = _taught(plan, z, t, top, t_top)
        named["rd"] = _product_sum(difference.masked_fill_(r == 0, 0.0), r)
    return named


def _mixture_sums(logits: Tensor, given: RowInputs, part: slice) -> dict[str, Tensor]:
    """The sums of a block of rows whose mixture is known."""
    target, plan, _, _, source = given
    assert plan.mixture is not None
    dtype, z = wide(logits.dtype), _rows_of(logits, target, plan, part)
    if plan.asked & row_sums.QMIX:
        tops = (x[part].to(dtype).unsqueeze(1) for x in plan.mixture[::2])
        t = _source_rows(source, plan, part, target, dtype)
        r, q, difference = _taught(plan, z, t, *tops)
        x = _teacher_mixture(plan.mixture, difference, part)
        zero = x.new_zeros(())
        return {
            "rmix": _product_sum(torch.logaddexp(zero, x), r),
            "qmix": _product_sum(torch.logaddexp(zero, -x), q),
            "qs": row_sum(torch.sigmoid(-x) * q),
        }
    u, x = _mixture_of(plan.mixture, z, part)
    zero = x.new_zeros(())
    return {
        "mix": row_sum(torch.logaddexp(zero, x)),
        "emix": row_sum(u.exp_().mul_(torch.logaddexp(zero, -x))),
    }


def _u_of_target(logits: Tensor, target: Tensor, top: Tensor, plan: Passes) -> Tensor:
    """u of the target, (N,), exact; 0 for a target that is no class of these columns."""
    classes, wider = logits.shape[1], exact(logits.device, logits.dtype)
    z_y = logits.gather(1, target.clamp(0, classes - 1).unsqueeze(1)).squeeze(1).to(wider)
    limits = torch.finfo(wide(logits.dtype) if plan.row_tau is None else wider)
    u_y = u_of(z_y, top.squeeze(1).to(wider), limits)
    return u_y.masked_fill((target < 0) | (target >= classes), 0.0)


def moments(logits: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """See :mod:`labo.fast.formula`."""
    wider = exact(logits.device, logits.dtype)
    centers, squares = torch.zeros(2, len(logits), dtype=wider, device=logits.device)
    for part in blocks(logits):
        x = logits[part].to(wide(logits.dtype)).contiguous()  # bits depend on the strides
        if centered:
            center = row_sum(x) / x.shape[1]
            centers[part] = center.to(wider)
            x = x - center.unsqueeze(1)
        squares[part] = row_sum(x * x).to(wider)
    return centers, squares


def _product_sum(u: Tensor, q: Tensor) -> Tensor:
    """sum_j u_j q_j. The unit is a factor of each term, because the sum could overflow."""
    unit = 1 / q.shape[1]
    return row_sum(u * (q * unit)).to(exact(u.device, u.dtype)) / unit


def gradient(logits: Tensor, given: RowInputs, coefficients: Tensor, out: Tensor) -> Tensor:
    """The gradient of every row, written to ``out``; see :mod:`labo.fast.formula`."""
    target, plan, weight, ignore_index, source = given
    dtype = wide(logits.dtype)
    if logits.shape[1] == 0:
        return out
    for part in blocks(logits):
        z, y = _rows_of(logits, target, plan, part), target[part].unsqueeze(1)
        c = dict(
            zip(COEFFICIENTS, coefficients[part].to(dtype).unsqueeze(2).unbind(1), strict=True)
        )
        tau, source_tau = _taus(plan, part, dtype)
        u = z - c["top"]
        g = _finite(u).exp() if _uses_u(plan) or plan.mixture is not None else u.exp_()
        g.mul_(c["from_e"] + c["from_ue"] * u if plan.asked & row_sums.UE else c["from_e"])
        if plan.asked & row_sums.R:
            g.addcmul_(_over_tau(z, c["top"], tau).exp_(), c["from_r"])
        if plan.asked & (row_sums.RD | row_sums.QMIX):
            t = _source_rows(source, plan, part, target, dtype)
            r, q, d = _taught(plan, z, t, c["top"], c["source_top"])
            if plan.asked & row_sums.RD:
                g.addcmul_(r * c["from_rd"], d.masked_fill(r == 0, 0.0))
            if plan.mixture is not None:
                x = _teacher_mixture(plan.mixture, d, part)
                g.addcmul_(r * c["from_rmix"], torch.logaddexp(x.new_zeros(()), x))
                g.addcmul_(q * c["from_qs"], torch.sigmoid(-x))
        elif plan.mixture is not None:
            _, x = _mixture_of(plan.mixture, z, part)
            # In this order a masked class has 0 times a finite number.
            g.addcmul_(u.exp().mul_(torch.logaddexp(x.new_zeros(()), -x)), c["from_emix"])
        if plan.asked & row_sums.UR:
            g += (c["from_one"] + c["from_u"] * u).masked_fill_(z == -math.inf, 0.0)
        if plan.masses != row_sums.NO_MASSES:
            t = _source_rows(source, plan, part, target, dtype)
            q, _ = _masses(plan, z, u, t, c["source_top"], source_tau)
            of_q = c["from_q"]
            if plan.asked & row_sums.WQU and weight is not None:
                of_q = of_q + c["from_wq"] * weight.to(q.dtype)
            g.addcmul_(q, of_q)
        if plan.asked & row_sums.TOP:
            # From float64: float32 has no room for a large index.
            top_at = coefficients[part, COEFFICIENTS.index("top_at")].long().unsqueeze(1)
            _put(g, top_at, c["at_top"])
        _put(g, y, c["at_target"])
        out[part] = g
        out[part].masked_fill_(y == ignore_index, 0.0)
    return out


def _put(rows: Tensor, index: Tensor, entry: Tensor) -> None:
    """Write an entry to each row, (N, 1), where its index is a class."""
    classes = rows.shape[1]
    here, column = (index >= 0) & (index < classes), index.clamp(0, classes - 1)
    rows.scatter_(1, column, torch.where(here, entry, rows.gather(1, column)))
