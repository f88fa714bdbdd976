"""The native backend on GPUs: Triton kernels.

Write ``u = z - max z`` for a row of logits, ``l = log softmax(z)`` and ``p = exp(l)``. Every mode
is a cross entropy with the label ``P_hat = (1 - alpha) onehot(y) + alpha P``, where ``P = q / Q``
comes from unnormalized masses ``q`` and their sum ``Q``:

    ====  ==============  =====================  ==========================
    mode  method          q_j                    alpha
    ====  ==============  =====================  ==========================
    0     cross entropy   none                   0
    1     LS              constant if z_j > -inf given
    2     LABO            exp(u_j / tau)         given
    3     LABO, adaptive  exp(u_j / tau)         1 - rho H(p) / log K
    ====  ==============  =====================  ==========================

U and K count the classes that are not masked.

With class weights ``w`` (all one when there are none), and the KL term in modes 2 and 3 only,

    value    = -sum_j w_j P_hat_j l_j + w_y alpha tau KL(P || U)
    gradient = (sum_k w_k P_hat_k) p - w * P_hat,    P and alpha held fixed.

The forward kernel reads a row once. It keeps the sums from block to block under a running maximum
and stores five numbers per row. From these the backward kernel computes any block of the gradient
independently. Neither stores anything else of size K, and neither uses atomics.

As in every backend, 0 * inf = 0, and u is finite where z is: a difference that overflows is the
lowest finite number.

The other losses, and logits whose columns are split over processes, have two kernels in common:
one gives the sums that a formula asks for, the other its gradient (:mod:`labo.fast.formula`).
"""

# The arguments of a kernel have no Python types, and triton.jit and torch.cuda.device_of have none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import sums as row_sums
from ..sums import Passes
from .columns import COEFFICIENTS, SUMS, RowInputs
from .kernel import Kernel

# Of a formula, see `labo.fast.formula`.
UNIFORM, TEMPERED, BEYOND_MARGIN, FROM_ROW, FROM_TABLE, FROM_TEACHER = map(
    tl.constexpr, range(row_sums.UNIFORM, row_sums.FROM_TEACHER + 1)
)
COUNT, UE, R, QU, QD = map(
    tl.constexpr, (row_sums.COUNT, row_sums.UE, row_sums.R, row_sums.QU, row_sums.QD)
)
WQU, TOP, OTHERS, UR, EMIX = map(
    tl.constexpr, (row_sums.WQU, row_sums.TOP, row_sums.OTHERS, row_sums.UR, row_sums.EMIX)
)
RD, QMIX = map(tl.constexpr, (row_sums.RD, row_sums.QMIX))

LS, LABO, ADAPTIVE = map(tl.constexpr, (1, 2, 3))

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)
# The unit of q, except that of LABO: with it the sum of q u over a row does not overflow.
MASS = tl.constexpr(2.0**-24)

# Columns of the statistics: max z, 1 / sum exp(u), alpha, 1 / Q, sum_k w_k P_hat_k.
STATISTICS = 5

LOG2_E = tl.constexpr(math.log2(math.e))

# A kernel keeps a block of logits, its exponentials and its weights in registers. The kernels of a
# formula need up to 111 of them at 8 logits a thread. Without a limit ptxas prefers fewer with a
# few bytes spilled (tests/core/fast/test_kernels_compile.py).
MAX_BLOCK = 8192
LOGITS_PER_THREAD = 32
MAX_FORMULA_BLOCK = 4096
FORMULA_LOGITS_PER_THREAD = 8
MAX_REGISTERS = 128
HIP = torch.version.hip is not None


@triton.jit
def _finite(u):
    """The lowest finite number for -inf. NaN stays, which a maximum need not ensure."""
    return tl.where(u < LOWEST, LOWEST, u)


@triton.jit
def _moved(products, masses, shrink, d):
    """The sum of u q after every u has changed by d, and every q by the factor ``shrink``.

    In this order a large d, after a block of classes masked with a large finite number, does not
    overflow: its factor is 0 then.
    """
    return shrink * products + (shrink * d) * masses


@triton.jit
def _exp(x):
    """exp(x): GPUs have an instruction for powers of 2."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _in_lanes(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """A block as (repeats, lanes, vector): what a thread loads is in one lane.

    Sums over the first and the last axis then need no other thread.
    """
    return tl.reshape(x, [x.shape[0] // (LANES * VECTOR), LANES, VECTOR])


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=0)


@triton.jit
def _per_lane(x):
    return x[None, :, None]


@triton.jit
def _add_block(
    sums,
    logits,
    weight,
    start,
    K,
    inv_tau,
    MODE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The sums of every lane with those of the next block, under its running maximum."""
    top, lowest, s1, ue, q_sum, uq_sum, wq_sum, wuq_sum = sums
    cols = start + tl.arange(0, BLOCK)
    if WHOLE:
        z = tl.load(logits + cols)
    else:
        z = tl.load(logits + cols, mask=cols < K, other=-float("inf"))
    z = _in_lanes(z, LANES, VECTOR).to(tl.float32)

    # A maximum that grows from `top` by -d shifts every u so far by d. While `top` is -inf
    # nothing has been summed, and any finite d will do; -inf - -inf must not occur.
    new_top = tl.maximum(top, tl.max(tl.max(z, axis=2), axis=0))
    origin = tl.where(new_top == -float("inf"), 0.0, new_top)
    d = tl.where(top == -float("inf"), 0.0, _finite(top - origin))
    top = new_top

    u = z - _per_lane(origin)
    e = tl.exp2(u * LOG2_E)
    shrink = _exp(d)
    if MODE == ADAPTIVE:
        # A maximum may lose a NaN, but e has it too. The product is 0 for a masked class.
        of_ue = _lane_sum(tl.maximum(u, LOWEST) * e)
        ue = _moved(ue, s1, shrink, d) + of_ue
    s1 = shrink * s1 + _lane_sum(e)

    if MODE >= LS:
        if MODE == LS:
            masked = z == -float("inf")
            q = tl.where(masked, 0.0, MASS)
            uq = tl.where(masked, 0.0, _finite(u)) * MASS
            q_shrink = 1.0
        else:
            q = tl.exp2(u * (inv_tau * LOG2_E))
            uq = tl.maximum(u, LOWEST) * q
            q_shrink = _exp(d * inv_tau)
            lowest = tl.minimum(lowest, tl.min(tl.min(z, axis=2), axis=0))
        # Only plain LS and the KL of weighted LABO need sum u q: weighted LS needs sum w u q,
        # and in plain LABO it cancels between the cross entropy and the KL.
        if (MODE == LS) != HAS_WEIGHT:
            uq_sum = _moved(uq_sum, q_sum, q_shrink, d) + _lane_sum(uq)
        if HAS_WEIGHT:
            w = tl.load(weight + cols, mask=cols < K, other=0.0)
            w = _in_lanes(w, LANES, VECTOR).to(tl.float32)
            wuq_sum = _moved(wuq_sum, wq_sum, q_shrink, d) + _lane_sum(w * uq)
            wq_sum = q_shrink * wq_sum + _lane_sum(w * q)
        q_sum = q_shrink * q_sum + _lane_sum(q)
    return top, lowest, s1, ue, q_sum, uq_sum, wq_sum, wuq_sum


@triton.jit
def _row_sums(
    logits,
    weight,
    K,
    inv_tau,
    MODE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The maximum of a row and the sums of e, ue, q, uq, wq and wuq, in one pass, and the count.

    Every lane has a running maximum of its own, and threads meet only at the end. Sums that the
    mode does not need are 0.
    """
    zeros = tl.zeros([LANES], tl.float32)
    infinite = zeros + float("inf")
    # The maximum, the minimum, and the sums of e^u, u e^u, q, u q, w q and w u q.
    sums = (-infinite, infinite, zeros, zeros, zeros, zeros, zeros, zeros)
    whole = K // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        sums = _add_block(
            sums, logits, weight, start, K, inv_tau, MODE, HAS_WEIGHT, BLOCK, LANES, VECTOR, True
        )
    for start in range(whole, K, BLOCK):  # the rest, if there is one
        sums = _add_block(
            sums, logits, weight, start, K, inv_tau, MODE, HAS_WEIGHT, BLOCK, LANES, VECTOR, False
        )
    tops, lowest, s1, ue, q_sum, uq_sum, wq_sum, wuq_sum = sums

    top = tl.max(tops, axis=0)
    origin = tl.where(top == -float("inf"), 0.0, top)
    d = tl.where(tops == -float("inf"), 0.0, _finite(tops - origin))
    shrink = _exp(d)
    q_shrink = tl.full([LANES], 1.0, tl.float32) if MODE <= LS else _exp(d * inv_tau)
    ue = tl.sum(_moved(ue, s1, shrink, d), axis=0)
    uq_sum = tl.sum(_moved(uq_sum, q_sum, q_shrink, d), axis=0)
    wuq_sum = tl.sum(_moved(wuq_sum, wq_sum, q_shrink, d), axis=0)
    s1 = tl.sum(shrink * s1, axis=0)
    q_sum = tl.sum(q_shrink * q_sum, axis=0)
    wq_sum = tl.sum(q_shrink * wq_sum, axis=0)

    count = 1.0 * K  # of the classes that are not masked
    if MODE > LS and tl.min(lowest, axis=0) == -float("inf"):
        # To count in the pass above would cost every row for the few that have masked classes.
        counts = zeros
        for start in range(0, K, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = tl.load(logits + cols, mask=cols < K, other=-float("inf")).to(tl.float32)
            present = tl.where(z == -float("inf"), 0.0, 1.0)
            counts += _lane_sum(_in_lanes(present, LANES, VECTOR))
        count = tl.sum(counts, axis=0)
    return top, s1, ue, q_sum, uq_sum, wq_sum, wuq_sum, count


@triton.jit
def _statistics_kernel(
    logits,
    target,
    weight,
    values,
    statistics,
    row_stride,
    K,
    alpha,
    tau,
    inv_tau,
    rho,
    ignore_index,
    MODE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Value and statistics of one row, in one pass under running maxima."""
    row = tl.program_id(0).to(tl.int64)
    values += row
    statistics += row * WIDTH
    y = tl.load(target + row)
    if y == ignore_index:
        # The logits of an ignored row are never read: they may hold anything.
        tl.store(values, 0.0)
        for i in tl.static_range(WIDTH):
            tl.store(statistics + i, 0.0)
        return
    logits += row * row_stride
    top, s1, ue, q_sum, uq_sum, wq_sum, wuq_sum, count = _row_sums(
        logits, weight, K, inv_tau, MODE, HAS_WEIGHT, BLOCK, LANES, VECTOR
    )

    # A target outside [0, K) is taken as NaN, not read from memory, and makes the whole row NaN.
    known = (y >= 0) & (y < K)
    z_y = tl.load(logits + y, mask=known, other=float("nan")).to(tl.float32)
    u_y = tl.where(z_y == -float("inf"), z_y, _finite(z_y - top))
    w_y = 1.0
    if HAS_WEIGHT:
        w_y = tl.load(weight + y, mask=known, other=0.0).to(tl.float32)

    log_s1 = tl.log(s1)
    if MODE == ADAPTIVE:
        # s1 >= 1 (it includes the maximum) and ue <= 0, so that rounding cannot make H(p) negative.
        alpha = 1.0 - rho * (log_s1 - ue / s1) / tl.where(count > 1.0, tl.log(count), 1.0)

    # value = label_weight log s1 - sum_j w_j P_hat_j u_j + w_y alpha tau KL(P || U)
    hit = (1.0 - alpha) * w_y
    label_weight = hit
    inv_q = 0.0
    rest = 0.0
    if MODE >= LS:
        inv_q = 1.0 / q_sum
        if HAS_WEIGHT:
            label_weight += alpha * wq_sum * inv_q
            rest = -wuq_sum * inv_q
            if MODE != LS:
                rest += w_y * (uq_sum * inv_q - tau * tl.log(q_sum / count))
        elif MODE == LS:
            rest = -uq_sum * inv_q
        else:
            rest = -tau * tl.log(q_sum / count)
    if not HAS_WEIGHT:
        label_weight = 1.0
    # A masked target costs +inf, unless its share of the label is 0: 0 * -inf = 0.
    hit_u = tl.where((hit == 0.0) & (u_y == -float("inf")), 0.0, hit * u_y)

    tl.store(values, label_weight * log_s1 - hit_u + alpha * rest)
    tl.store(statistics, top)
    tl.store(statistics + 1, 1.0 / s1)
    tl.store(statistics + 2, alpha)
    tl.store(statistics + 3, inv_q)
    tl.store(statistics + 4, label_weight)


@triton.jit
def _gradient_kernel(
    logits,
    target,
    weight,
    statistics,
    row_factor,
    out,
    factor_stride,
    row_stride,
    out_stride,
    K,
    blocks,
    inv_tau,
    ignore_index,
    MODE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of the gradient of one row."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    inside = cols < K
    out += row * out_stride + cols
    y = tl.load(target + row)
    if y == ignore_index:
        tl.store(out, tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty), mask=inside)
        return

    statistics += row * WIDTH
    top = tl.load(statistics)
    inv_s1 = tl.load(statistics + 1)
    alpha = tl.load(statistics + 2)
    # The gradient of an unknown target is NaN, as its value is.
    known = (y >= 0) & (y < K)
    factor = tl.where(known, tl.load(row_factor + row * factor_stride), float("nan"))

    of_p = factor * inv_s1
    of_q = 0.0
    if HAS_WEIGHT:
        of_p *= tl.load(statistics + 4)
    if MODE >= LS:
        of_q = factor * alpha * tl.load(statistics + 3)

    z = tl.load(logits + row * row_stride + cols, mask=inside, other=-float("inf")).to(tl.float32)
    u = z - top
    g = of_p * tl.exp2(u * LOG2_E)
    if MODE >= LS:
        if MODE == LS:
            share = tl.where(z == -float("inf"), 0.0, of_q * MASS)
        else:
            share = of_q * tl.exp2(u * (inv_tau * LOG2_E))
        if HAS_WEIGHT:
            share *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        g -= share
    if (y >= first) & (y < first + BLOCK):
        hit = factor * (1.0 - alpha)
        if HAS_WEIGHT:
            hit *= tl.load(weight + y, mask=known, other=0.0).to(tl.float32)
        g = tl.where(cols == y, g - hit, g)
    tl.store(out, g.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _teacher_at(source, top, cols, masked):
    """A teacher's logits minus their maximum, finite; 0 where the student's class is masked."""
    t = tl.load(source + cols, mask=~masked, other=0.0).to(tl.float32)
    return tl.where(masked, 0.0, _finite(t - top))


@triton.jit
def _taus(row_tau, row, inv_tau, ROW_TAU: tl.constexpr):
    """One over the temperatures of the logits and of the teacher's: of all rows, or of this one."""
    own = inv_tau
    taught = inv_tau
    if ROW_TAU:
        own = 1.0 / tl.load(row_tau + 2 * row)
        taught = 1.0 / tl.load(row_tau + 2 * row + 1)
    return own, taught


@triton.jit
def _masses(source, u, v, cols, masked, inv_tau, inv_source_tau, margin, MASSES: tl.constexpr):
    """The masses q of a formula; 0 for masked classes."""
    if MASSES == TEMPERED:
        q = tl.exp(u * inv_tau)
    elif MASSES == FROM_TEACHER:
        q = tl.exp(v * inv_source_tau)
    elif MASSES == BEYOND_MARGIN:
        q = tl.where(-u > margin, 1.0, 0.0)
    elif MASSES == UNIFORM:
        q = tl.where(masked, 0.0, 1.0)
    else:
        q = tl.load(source + cols, mask=~masked, other=0.0).to(tl.float32)
    return tl.where(masked, 0.0, q)


@triton.jit
def _logs_of_mixture(x):
    """log(1 + exp(x)) and log(1 + exp(-x)): max(+-x, 0) + 2 artanh(w / (2 + w)), w = exp(-|x|)."""
    w = tl.exp(-tl.abs(x))
    t = w / (2.0 + w)
    square = t * t
    series = 2.0 / 11 + square * (2.0 / 13)
    series = 2.0 / 7 + square * (2.0 / 9 + square * series)
    series = 2.0 + square * (2.0 / 3 + square * (2.0 / 5 + square * series))
    return tl.where(x < 0.0, 0.0, x) + t * series, tl.where(x > 0.0, 0.0, -x) + t * series


@triton.jit
def _taught_at(source, source_top, cols, masked, u, inv_tau):
    """r, q and d of a teacher; d is -inf where the teacher alone has masked a class."""
    t = tl.load(source + cols, mask=~masked, other=0.0).to(tl.float32)
    v = tl.where(masked, 0.0, (t - source_top) * inv_tau)
    tempered = u * inv_tau
    q = tl.where(masked, 0.0, tl.exp(v))
    return tl.exp(tempered), q, v - tl.where(masked, 0.0, tempered)


@triton.jit
def _share(x):
    """1 / (1 + exp(x))."""
    w = tl.exp(-tl.abs(x))
    return tl.where(x > 0.0, w, 1.0) / (1.0 + w)


@triton.jit
def _mixture_sums_kernel(
    logits,
    target,
    source,
    mixture,
    sums,
    rows,
    row_stride,
    source_stride,
    K,
    inv_tau,
    ignore_index,
    ASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last five sums of a row, whose maximum is known: those of a teacher, or the others."""
    row = tl.program_id(0).to(tl.int64)
    sums += row + (WIDTH - 5) * rows
    mixture += 3 * row
    rmix_sum = 0.0
    qmix_sum = 0.0
    qs_sum = 0.0
    mix_sum = 0.0
    emix_sum = 0.0
    if tl.load(target + row) != ignore_index:
        top = tl.load(mixture)
        shift = tl.load(mixture + 1)
        for start in range(0, K, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = tl.load(logits + row * row_stride + cols, mask=cols < K, other=-float("inf"))
            u = _finite(z.to(tl.float32) - top)
            if QMIX & ASKED:
                taught = source + row * source_stride
                masked = z == -float("inf")
                r, q, d = _taught_at(taught, tl.load(mixture + 2), cols, masked, u, inv_tau)
                x = _finite(d + shift)
                log_above, log_below = _logs_of_mixture(x)
                rmix_sum += tl.sum(r * (MASS * log_above), axis=0)
                qmix_sum += tl.sum(q * (MASS * log_below), axis=0)
                qs_sum += tl.sum(q * (MASS * _share(x)), axis=0)
            else:
                log_above, log_below = _logs_of_mixture(_finite(u + shift))
                mix_sum += tl.sum(log_above, axis=0)
                emix_sum += tl.sum(tl.exp(u) * log_below, axis=0)
    tl.store(sums, rmix_sum)
    tl.store(sums + 1 * rows, qmix_sum)
    tl.store(sums + 2 * rows, qs_sum)
    tl.store(sums + 3 * rows, mix_sum)
    tl.store(sums + 4 * rows, emix_sum)


@triton.jit
def _formula_sums_kernel(
    logits,
    target,
    weight,
    source,
    row_tau,
    sums,
    rows,
    row_stride,
    source_stride,
    K,
    inv_tau,
    margin,
    ignore_index,
    ASKED: tl.constexpr,
    MASSES: tl.constexpr,
    ROW_TAU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of a formula over one row, in one pass under running maxima."""
    row = tl.program_id(0).to(tl.int64)
    sums += row
    y = tl.load(target + row)
    if y == ignore_index:
        for i in tl.static_range(WIDTH):
            tl.store(sums + i * rows, 0.0)
        return
    logits += row * row_stride
    inv_tau, inv_source_tau = _taus(row_tau, row, inv_tau, ROW_TAU)
    if MASSES == FROM_TABLE:
        source += tl.minimum(tl.maximum(y, 0), K - 1) * source_stride
    elif MASSES >= FROM_ROW:
        source += row * source_stride
    top, source_top, top_at = -float("inf"), -float("inf"), 0
    count, e_sum, ue_sum, r_sum, ur_sum = 0.0, 0.0, 0.0, 0.0, 0.0
    q_sum, qu_sum, qd_sum, wq_sum, wqu_sum = 0.0, 0.0, 0.0, 0.0, 0.0
    rd_sum = 0.0
    if MASSES == BEYOND_MARGIN:
        # Which classes are beyond the margin follows from the maximum of the whole row.
        for start in range(0, K, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = tl.load(logits + cols, mask=cols < K, other=-float("inf")).to(tl.float32)
            top_at = tl.where(tl.max(z, axis=0) > top, start + tl.argmax(z, axis=0), top_at)
            top = tl.maximum(top, tl.max(z, axis=0))
    for start in range(0, K, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(logits + cols, mask=cols < K, other=-float("inf")).to(tl.float32)
        if OTHERS & ASKED:
            z = tl.where(cols == y, -float("inf"), z)
        masked = z == -float("inf")
        # As in _add_block, a maximum that grows by -d shifts every u so far by d.
        if TOP & ASKED:
            top_at = tl.where(tl.max(z, axis=0) > top, start + tl.argmax(z, axis=0), top_at)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        origin = tl.where(new_top == -float("inf"), 0.0, new_top)
        d = tl.where(top == -float("inf"), 0.0, _finite(top - origin))
        top = new_top
        u = _finite(z - origin)
        finite_u = tl.where(masked, 0.0, u)
        e = tl.exp(u)
        shrink = tl.exp(d)
        if COUNT & ASKED:
            count += tl.sum(tl.where(masked, 0.0, 1.0), axis=0)
        if UE & ASKED:
            ue_sum = _moved(ue_sum, e_sum, shrink, d) + tl.sum(finite_u * e, axis=0)
        e_sum = shrink * e_sum + tl.sum(e, axis=0)
        if R & ASKED:
            r = tl.exp(u * inv_tau)
            r_shrink = tl.exp(d * inv_tau)
            if UR & ASKED:
                of_ur = tl.sum(finite_u * (MASS * r), axis=0)
                ur_sum = _moved(ur_sum, MASS * r_sum, r_shrink, d) + of_ur
            if not (RD & ASKED):
                r_sum = r_shrink * r_sum + tl.sum(r, axis=0)
        if MASSES > 0:
            v = finite_u
            dv = 0.0
            q_shrink = 1.0
            if MASSES == TEMPERED:
                q_shrink = tl.exp(d * inv_tau)
            if MASSES == FROM_TEACHER:
                t = tl.load(source + cols, mask=~masked, other=-float("inf")).to(tl.float32)
                new_source_top = tl.maximum(source_top, tl.max(t, axis=0))
                source_origin = tl.where(new_source_top == -float("inf"), 0.0, new_source_top)
                grown = _finite(source_top - source_origin)
                dv = tl.where(source_top == -float("inf"), 0.0, grown)
                source_top = new_source_top
                v = _teacher_at(source, source_origin, cols, masked)
                q_shrink = tl.exp(dv * inv_source_tau)
            q = _masses(source, u, v, cols, masked, inv_tau, inv_source_tau, margin, MASSES)
            q *= MASS
            if QU & ASKED:
                qu_sum = _moved(qu_sum, q_sum, q_shrink, d) + tl.sum(finite_u * q, axis=0)
            if QD & ASKED:
                difference = _finite(v * inv_source_tau) - _finite(finite_u * inv_tau)
                grown = _finite(dv * inv_source_tau) - _finite(d * inv_tau)
                qd_sum = _moved(qd_sum, q_sum, q_shrink, grown)
                qd_sum += tl.sum(difference * q, axis=0)
            if RD & ASKED:
                r, _, of_r = _taught_at(source, source_origin, cols, masked, u, inv_tau)
                r_shrink = tl.exp(d * inv_tau)
                grown = _finite(dv * inv_source_tau) - _finite(d * inv_tau)
                moved = _moved(rd_sum, MASS * r_sum, r_shrink, grown)
                rd_sum = tl.where(r_shrink == 0.0, 0.0, moved)
                rd_sum += tl.sum(r * tl.where(r == 0.0, 0.0, MASS * of_r), axis=0)
                r_sum = r_shrink * r_sum + tl.sum(r, axis=0)
            if WQU & ASKED:
                w = tl.load(weight + cols, mask=cols < K, other=0.0).to(tl.float32)
                wqu_sum = _moved(wqu_sum, wq_sum, q_shrink, d)
                wqu_sum += tl.sum(w * finite_u * q, axis=0)
                wq_sum = q_shrink * wq_sum + tl.sum(w * q, axis=0)
            q_sum = q_shrink * q_sum + tl.sum(q, axis=0)
    tl.store(sums, top)
    tl.store(sums + rows, source_top)
    tl.store(sums + 2 * rows, 1.0 * top_at)
    z_y = tl.load(logits + y, mask=(y >= 0) & (y < K), other=0.0).to(tl.float32)
    u_y = z_y - tl.where(top == -float("inf"), 0.0, top)
    u_y = _finite(tl.where(u_y > HIGHEST, HIGHEST, u_y))
    tl.store(sums + 3 * rows, tl.where(z_y == -float("inf"), z_y, u_y))
    tl.store(sums + 4 * rows, count)
    tl.store(sums + 5 * rows, e_sum)
    tl.store(sums + 6 * rows, ue_sum)
    tl.store(sums + 7 * rows, r_sum)
    tl.store(sums + 8 * rows, ur_sum)
    tl.store(sums + 9 * rows, q_sum)
    tl.store(sums + 10 * rows, qu_sum)
    tl.store(sums + 11 * rows, qd_sum)
    tl.store(sums + 12 * rows, wq_sum)
    tl.store(sums + 13 * rows, wqu_sum)
    tl.store(sums + 14 * rows, rd_sum)


@triton.jit
def _coefficient(coefficients, COLUMN: tl.constexpr):
    return tl.load(coefficients + COLUMN).to(tl.float32)


@triton.jit
def _formula_gradient_kernel(
    logits,
    target,
    weight,
    source,
    row_tau,
    mixture,
    coefficients,
    out,
    row_stride,
    source_stride,
    out_stride,
    K,
    blocks,
    inv_tau,
    margin,
    ignore_index,
    ASKED: tl.constexpr,
    MASSES: tl.constexpr,
    ROW_TAU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of the gradient of one row, from the coefficients of its formula."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    cols = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < K
    out += row * out_stride + cols
    y = tl.load(target + row)
    if y == ignore_index:
        tl.store(out, tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty), mask=inside)
        return
    if MASSES == FROM_TABLE:
        source += tl.minimum(tl.maximum(y, 0), K - 1) * source_stride
    elif MASSES >= FROM_ROW:
        source += row * source_stride
    coefficients += row * WIDTH
    inv_tau, inv_source_tau = _taus(row_tau, row, inv_tau, ROW_TAU)
    z = tl.load(logits + row * row_stride + cols, mask=inside, other=-float("inf")).to(tl.float32)
    if OTHERS & ASKED:
        z = tl.where(cols == y, -float("inf"), z)
    masked = z == -float("inf")
    u = _finite(z - _coefficient(coefficients, 0))
    of_e = _coefficient(coefficients, 2)
    if UE & ASKED:
        of_e += _coefficient(coefficients, 3) * tl.where(masked, 0.0, u)
    if EMIX & ASKED:
        _, log_below = _logs_of_mixture(_finite(u + tl.load(mixture + 3 * row + 1)))
        of_e += _coefficient(coefficients, 9) * tl.where(masked, 0.0, log_below)
    g = of_e * tl.exp(u)
    if R & ASKED:
        g += _coefficient(coefficients, 4) * tl.exp(u * inv_tau)
    if (RD | QMIX) & ASKED:
        source_top = _coefficient(coefficients, 1)
        r, q, d = _taught_at(source, source_top, cols, masked, u, inv_tau)
        if RD & ASKED:
            g += _coefficient(coefficients, 13) * (r * tl.where(r == 0.0, 0.0, d))
        if QMIX & ASKED:
            x = _finite(d + tl.load(mixture + 3 * row + 1))
            log_above, _ = _logs_of_mixture(x)
            g += _coefficient(coefficients, 14) * r * log_above
            g += _coefficient(coefficients, 15) * q * _share(x)
    if UR & ASKED:
        linear = _coefficient(coefficients, 7) + _coefficient(coefficients, 8) * u
        g += tl.where(masked, 0.0, linear)
    if MASSES > 0:
        v = u
        if MASSES == FROM_TEACHER:
            v = _teacher_at(source, _coefficient(coefficients, 1), cols, masked)
        q = _masses(source, u, v, cols, masked, inv_tau, inv_source_tau, margin, MASSES)
        of_q = _coefficient(coefficients, 5)
        if WQU & ASKED:
            w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
            of_q += _coefficient(coefficients, 6) * w
        g += of_q * q
    if TOP & ASKED:
        at_top = cols == _coefficient(coefficients, 11).to(tl.int32)
        g = tl.where(at_top, _coefficient(coefficients, 12), g)
    g = tl.where(cols == y, _coefficient(coefficients, 10), g)
    tl.store(out, g.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _targets_kernel(
    target, weight, total, good, rows, K, ignore_index, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """How many targets count, or the sum of their weights, and whether each is a class."""
    counted = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        index = start + tl.arange(0, BLOCK)
        y = tl.load(target + index, mask=index < rows, other=ignore_index)
        counts = y != ignore_index
        known = (y >= 0) & (y < K)
        bad |= tl.where(counts & ~known, 1, 0)
        if WEIGHTED:
            counted += tl.load(weight + y, mask=counts & known, other=0.0).to(tl.float32)
        else:
            counted += tl.where(counts, 1.0, 0.0)
    sum_of_all = tl.sum(counted, axis=0)
    tl.store(total, tl.where(sum_of_all == 0.0, float("inf"), sum_of_all))
    tl.store(good, tl.max(bad, axis=0) == 0)


@triton.jit
def _moments_kernel(
    logits,
    student,
    moments,
    rows,
    row_stride,
    student_stride,
    K,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean (or 0), sum of squared distances from it, and number of the classes not masked.

    The moments of a block are in units of its largest entry, whose squares do not overflow. Those
    of two parts make those of both, in float64 (Chan et al. 1979).
    """
    row = tl.program_id(0).to(tl.int64)
    zero = tl.sum(tl.zeros([BLOCK], tl.float64), axis=0)
    mean = zero
    squares = zero
    count = zero
    for start in range(0, K, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(logits + row * row_stride + cols, mask=cols < K, other=-float("inf"))
        z = z.to(tl.float32)
        masked = z == -float("inf")
        if student is not None:
            of_student = student + row * student_stride + cols
            masked |= tl.load(of_student, mask=cols < K, other=0.0).to(tl.float32) == -float("inf")
        present = tl.where(masked, 0.0, 1.0)
        z = tl.where(masked, 0.0, z)
        unit = tl.maximum(tl.max(tl.abs(z), axis=0), 1e-30)
        z = z / unit
        n = tl.sum(present, axis=0)
        center = 0.0
        if CENTERED:
            center = tl.sum(z, axis=0) / tl.maximum(n, 1.0)
        distance = (z - center) * present
        of_block = tl.sum(distance * distance, axis=0)
        # From here on single numbers.
        unit_64 = unit.to(tl.float64)
        n_64 = n.to(tl.float64)
        apart = unit_64 * center - mean
        total = count + n_64
        share = tl.where(total == 0.0, 0.0, n_64 / total)
        squares += unit_64 * unit_64 * of_block
        if CENTERED:
            squares += apart * apart * count * share
            mean += apart * share
        count = total
    tl.store(moments + row, mean)
    tl.store(moments + rows + row, squares)
    tl.store(moments + 2 * rows + row, count)


# ------------------------------------------------------------------ launches


# One program counts so many targets in a few microseconds.
MOST_TARGETS = 1 << 16


def count_targets(
    target: Tensor, classes: int, ignore_index: int, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a mean divides by, inf for 0, and whether all targets are classes; in one launch."""
    total, good = target.new_empty((), dtype=torch.float32), target.new_empty((), dtype=torch.bool)
    weight = None if weight is None else weight.contiguous()
    given = (target.contiguous(), weight, total, good, len(target), classes, ignore_index)
    _launch(_targets_kernel, 1, given, WEIGHTED=weight is not None, BLOCK=4096, num_warps=8)
    return total, good


def masked_moments(
    logits: Tensor, centered: bool, student: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Center, sum of squares and count of each row, (N,) float64; see `labo.fast.spread`."""
    logits = _unit_stride(logits)
    rows, classes = logits.shape
    moments = logits.new_empty((3, rows), dtype=torch.float64)
    stride = 0
    if student is not None:
        student = _unit_stride(student)
        stride = student.stride(0)
    if rows:
        block, options = _tile(classes)
        given = (logits, student, moments, rows, logits.stride(0), stride, classes)
        _launch(_moments_kernel, rows, given, CENTERED=centered, BLOCK=block, **options)
    return moments[0], moments[1], moments[2]


def row_statistics(
    logits: Tensor, target: Tensor, kernel: Kernel, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Value of every row, and what its gradient needs, in one pass over the logits.

    One program processes one row, so the order of summation is fixed and the rows do not affect
    each other. A target that is neither ``ignore_index`` nor in ``[0, K)`` gives NaN.

    Returns:
        Values ``(N,)`` and statistics ``(N, 5)``, both float32. The statistics are ``max z``,
        ``1 / sum exp(u)``, ``alpha``, ``1 / Q`` and ``sum_k w_k P_hat_k``; zeros where ignored.
    """
    logits, target, weight = _checked(logits, target, weight)
    rows, classes = logits.shape
    values = logits.new_empty(rows, dtype=torch.float32)
    statistics = logits.new_empty((rows, STATISTICS), dtype=torch.float32)
    if rows:
        block, options = _own_tile(classes, weight is not None)
        options |= _lanes(logits, block, options["num_warps"])
        alpha = float(kernel.alpha) if kernel.mode else 0.0
        numbers = (alpha, float(kernel.tau), 1.0 / kernel.tau, float(kernel.rho), ignore_index)
        given = (logits, target, weight, values, statistics, logits.stride(0), classes, *numbers)
        of_loss = {"MODE": kernel.mode, "HAS_WEIGHT": weight is not None, "WIDTH": STATISTICS}
        _launch(_statistics_kernel, rows, given, **of_loss, BLOCK=block, **options)
    return values, statistics


def row_gradient(
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    row_factor: Tensor,
    kernel: Kernel,
    weight: Tensor | None,
    ignore_index: int,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of ``sum_i row_factor_i value_i`` with respect to the logits.

    Given the statistics the gradient is elementwise, so every block of columns is a program: few
    long rows still fill the device, and writing over the logits is safe because a program reads
    only the logits that it overwrites. Ignored rows are exactly zero.

    ``row_factor`` has the gradient of the loss with respect to each value, ``(N,)``. ``out`` has
    unit stride along ``K`` and may be ``logits`` itself; without it the result is a new tensor.
    """
    logits, target, weight = _checked(logits, target, weight)
    if out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    else:
        _check(out)
        if out.shape != logits.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, logits {tuple(logits.shape)}")
    rows, classes = logits.shape
    shape = (rows, STATISTICS)
    statistics = _expect("statistics", statistics, logits, shape, torch.float32).contiguous()
    # With the stride 0 of a number for all rows.
    row_factor = _expect("row_factor", row_factor, logits, (rows,)).float()
    if rows:
        block, options = _own_tile(classes, weight is not None, each_masked=classes % 16 != 0)
        strides = (row_factor.stride(0), logits.stride(0), out.stride(0))
        blocks = triton.cdiv(classes, block)
        sizes = (*strides, classes, blocks, 1.0 / kernel.tau, ignore_index)
        given = (logits, target, weight, statistics, row_factor, out, *sizes)
        of_loss = {"MODE": kernel.mode, "HAS_WEIGHT": weight is not None, "WIDTH": STATISTICS}
        _launch(_gradient_kernel, rows * blocks, given, **of_loss, BLOCK=block, **options)
    return out


def sums(logits: Tensor, given: RowInputs) -> Tensor:
    """The sums of every row; see `labo.fast.formula`."""
    target, plan, weight, ignore_index, source = given
    logits, target, weight = _checked(logits, target, weight)
    rows, classes = logits.shape
    columns = logits.new_empty((len(SUMS), rows), dtype=torch.float64)
    if classes == 0:
        columns.zero_()[0] = -math.inf
    elif rows:
        block, options = _tile(classes)
        options |= {"WIDTH": len(SUMS), "BLOCK": block}
        source, source_stride = _source(source, plan, rows, classes)
        if plan.mixture is not None:
            sizes = (rows, logits.stride(0), source_stride, classes, 1.0 / plan.tau)
            tensors = (logits, target, source, _columns(plan.mixture, 3), columns)
            of_mixture = (*tensors, *sizes, ignore_index)
            _launch(_mixture_sums_kernel, rows, of_mixture, ASKED=plan.asked, **options)
            if plan.asked & row_sums.QMIX:
                columns[SUMS.index("rmix") : SUMS.index("mix")].div_(MASS.value)
            return columns.T
        strides = (logits.stride(0), source_stride)
        numbers = (classes, 1.0 / plan.tau, float(plan.margin), ignore_index)
        of_rows = (weight, source, _columns(plan.row_tau, 2), columns)
        arguments = (logits, target, *of_rows, rows, *strides, *numbers)
        _launch(_formula_sums_kernel, rows, arguments, **_of_formula(plan), **options)
    if plan.masses or plan.asked & row_sums.UR:
        columns[SUMS.index("ur") : SUMS.index("mix")].div_(MASS.value)
    return columns.T


def gradient(logits: Tensor, given: RowInputs, coefficients: Tensor, out: Tensor) -> Tensor:
    """The gradient of every row, written to ``out``; see `labo.fast.formula`."""
    target, plan, weight, ignore_index, source = given
    logits, target, weight = _checked(logits, target, weight)
    _check(out)
    rows, classes = logits.shape
    if out.numel():
        block, options = _tile(classes)
        blocks = triton.cdiv(classes, block)
        options |= {"WIDTH": len(COEFFICIENTS), "BLOCK": block}
        source, source_stride = _source(source, plan, rows, classes)
        of_rows = (_columns(plan.row_tau, 2), _columns(plan.mixture, 3), coefficients.contiguous())
        sizes = (logits.stride(0), source_stride, out.stride(0), classes, blocks)
        numbers = (1.0 / plan.tau, float(plan.margin), ignore_index)
        arguments = (logits, target, weight, source, *of_rows, out, *sizes, *numbers)
        _launch(_formula_gradient_kernel, rows * blocks, arguments, **_of_formula(plan), **options)
    return out


def _launch(kernel: Any, programs: int, arguments: tuple[Any, ...], **options: Any) -> None:
    """Launch on the device of the first argument.

    The grid has one axis: the second one ends at 65535, and with one axis the programs go through
    memory in order.
    """
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **options)


def _of_formula(plan: Passes) -> dict[str, Any]:
    """The options by which a kernel is compiled for a formula."""
    return {"ASKED": plan.asked, "MASSES": plan.masses, "ROW_TAU": plan.row_tau is not None}


def _columns(of_rows: tuple[Tensor, ...] | None, count: int) -> Tensor | None:
    """The first numbers of each row, (N, count): temperatures, or those of a mixture."""
    return None if of_rows is None else torch.stack(of_rows[:count], 1).float()


def _unit_stride(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def _checked(
    logits: Tensor, target: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What every kernel takes, once it is known to be what the kernels take it for."""
    logits = _unit_stride(logits)
    _check(logits)
    rows, classes = logits.shape
    target = _expect("target", target, logits, (rows,), torch.int64).contiguous()
    if weight is not None:
        weight = _expect("weight", weight, logits, (classes,)).contiguous()
    return logits, target, weight


def _source(
    source: Tensor | None, plan: Passes, rows: int, classes: int
) -> tuple[Tensor | None, int]:
    """What the masses of a formula come from, and the stride of its rows; 0 for the same row."""
    if source is None:
        return None, 0
    shapes = {row_sums.FROM_ROW: (classes,), row_sums.FROM_TABLE: (classes, classes)}
    shape = shapes.get(plan.masses, (rows, classes))
    if source.shape != shape:
        raise ValueError(f"source must have shape {shape}, got {tuple(source.shape)}")
    if source.dim() == 1:
        return source.contiguous(), 0
    source = _unit_stride(source)
    return source, source.stride(0)


def _check(matrix: Tensor) -> None:
    """Refuse logits that the kernels would misread."""
    if matrix.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"expected float32, bfloat16 or float16, got {matrix.dtype}")
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        raise ValueError(f"expected unit stride along the classes, got {matrix.stride(1)}")


def _expect(
    name: str, x: Tensor, logits: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
) -> Tensor:
    """A tensor, once it is known to be what the kernels take it for."""
    if x.shape != shape or x.device != logits.device or (dtypes and x.dtype not in dtypes):
        raise ValueError(
            f"{name} must be {dtypes or 'a tensor'} of shape {shape} on {logits.device}, "
            f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )
    return x


def _tile(
    classes: int, most: int | None = None, per_thread: int = FORMULA_LOGITS_PER_THREAD
) -> tuple[int, dict[str, int]]:
    """Block size and launch options for rows of ``classes`` logits; of a formula if not told."""
    block = min(triton.next_power_of_2(classes), most or MAX_FORMULA_BLOCK)
    warps = max(1, block // (_warp() * per_thread))
    return block, {"num_warps": warps} | ({} if HIP else {"maxnreg": MAX_REGISTERS})


def _own_tile(
    classes: int, weighted: bool, each_masked: bool = False
) -> tuple[int, dict[str, int]]:
    """As `_tile`, for the losses with kernels of their own.

    Weights need registers too. So do the addresses and masks of logits that are not loaded in
    groups, because the rows are not aligned.
    """
    if weighted:
        return _tile(classes, MAX_BLOCK // 2, LOGITS_PER_THREAD // 4)
    if each_masked:
        return _tile(classes, MAX_BLOCK // 2, LOGITS_PER_THREAD // 2)
    return _tile(classes, MAX_BLOCK, LOGITS_PER_THREAD)


def _lanes(logits: Tensor, block: int, num_warps: int) -> dict[str, int]:
    """How the threads share a block: each loads 16 bytes at a time where rows are aligned.

    The order of summation follows from the shape and the dtype alone.
    """
    size = logits.element_size()
    lanes = min(block, _warp() * num_warps)
    vector = 16 // size if logits.shape[1] * size % 16 == 0 else 1
    return {"LANES": lanes, "VECTOR": min(vector, block // lanes)}


def _warp() -> int:
    return 64 if HIP else 32
