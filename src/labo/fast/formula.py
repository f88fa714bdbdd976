r"""Value and gradient of a formula of row sums, by any fast backend.

A backend gives the sums of e, u e, r, u r, q, u q, (v - u) q / tau, w q and w u q that the formula
uses (:mod:`labo.sums`), where w are class weights. With sums over the classes other than the target
m and the teacher's maximum are those of the other classes. The formula makes the value of a row of
them, of u_y and of m, in float64 and in plain PyTorch. Its derivatives for the sums, by autograd,
are the coefficients of the gradient, because the derivative of each sum for z_j is known (the
maximum m is a constant in u, which changes no gradient):

===============  =====================
sum              derivative
===============  =====================
e                e_j
u e              (1 + u_j) e_j
r                r_j / tau
u q              q_j
(v - u) q / tau  -q_j / tau
w u q            w_j q_j
emix             e_j log(1 + exp(-x_j))
===============  =====================

The backend writes the gradient, times a factor, in a second pass.

No backend knows about stored classes: both passes read logits in which they are masked (in the
buffer of the gradient, never in the logits of the caller), and their entries are added to the 0
that is the gradient of a masked class. The maximum of the sums is then that of the other classes,
while u_y, u_stored and ``top`` have the maximum of all classes.

The sums of a mixture take a second call, because s is known after the first one. Both logs are held
constant, as the masses are. With a temperature of each row the sums of u r and u q give the
derivative for the temperature, and the gradient gets a term that is linear in the logits.

The functions of a backend are

- ``sums(logits, target, plan, weight, ignore_index, source)``: (N, 15) float64, the columns as
  :data:`SUMS`. Sums that were not asked for may hold anything; ignored rows are 0. With
  ``plan.mixture`` only "mix" and "emix" are computed.
- ``gradient(logits, target, plan, weight, ignore_index, source, coefficients, out)``: from the
  (N, 13) float64 ``coefficients``, the columns as :data:`COEFFICIENTS`. A target that is not a
  class has no entry. Ignored rows are 0.
- ``moments(logits, centered)``, only on the CPU: :data:`labo.fast.spread.Moments`.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import autograd_enabled
from ..rows import largest, wide
from ..sums import (
    BEYOND_MARGIN,
    DEVIATION,
    EMIX,
    FROM_TEACHER,
    NO_MASSES,
    OTHERS,
    TEMPERED,
    TOP,
    UE,
    UR,
    Formula,
    FoundSums,
    Passes,
    RowTau,
    passes_of,
    value_of,
)
from .columns import COEFFICIENTS, MIXED, SUMS
from .spread import spread

# What a formula is differentiated for.
_VARIABLES = ("e", "ue", "r", "qu", "qd", "wqu", "emix", "u_y", "u_top", "tau", "u_stored")


def plan_of(loss: Any, weighted: bool) -> Passes:
    """What the passes compute for a loss. Known for losses with the same hyper-parameters."""
    key = (type(loss), weighted, loss.z_loss != 0, *loss.plan_key())
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MOST_PLANS:  # a schedule that changes a number with every step
            _PLANS.clear()
        plan = _PLANS[key] = passes_of(loss, weighted)
    return plan


_PLANS: dict[Any, Passes] = {}
_MOST_PLANS = 1000


def rows(
    backend: ModuleType,
    logits: Tensor,
    target: Tensor,
    loss: Formula,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
    source: Tensor | None = None,
    stored: Tensor | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of rows by a backend; the contract is in :mod:`labo.fast.dispatch`.

    Args:
        source: what the masses come from, see :mod:`labo.sums`; None if they come from the logits.
            With stored classes: their log-probabilities, (N, k).
        stored: (N, k) stored classes, -1 for padding.
        statistics: (N, 5) float64, filled as by :func:`labo.metrics.row_statistics`, for a plan
            that measures them.
    """
    plan = plan_of(loss, weight is not None)
    if statistics is not None:
        plan = plan._replace(asked=plan.asked | UE)
    if plan.spread is not None:
        how = (plan.spread == DEVIATION, getattr(backend, "moments", None))
        own = spread(logits, *how)
        taught = own if source is None else spread(source, *how, logits, own)
        sizes = (plan.tau * own.size, plan.tau * taught.size)
        plan = plan._replace(row_tau=RowTau(*sizes, own.center, plan.tau * own.slope))
    if weight is not None:
        weight = weight.detach().to(wide(logits.dtype))
    ignored = target == ignore_index
    # On the CPU values can be read at no cost. Elsewhere that would wait for the device.
    some_ignored = not logits.is_cpu or bool(ignored.any())
    y = target.masked_fill(ignored, 0) if some_ignored else target
    z_y = logits.gather(1, y.unsqueeze(1)).squeeze(1).double()
    z_largest = largest(logits, plan.top_k).double() if plan.top_k else None
    z_stored = log_t = None
    if stored is not None and source is not None:
        z_stored, log_t, source = entries_of(logits, stored), source.double(), None
        logits = out = _without_stored(logits, stored, out)
    fixed = (logits, target, plan, weight, ignore_index, source)
    limits = torch.finfo(wide(logits.dtype) if plan.row_tau is None else torch.float64)
    sums = _by_name(plan, backend.sums(*fixed), z_y, limits)
    if statistics is not None:
        torch.stack(statistics_of(sums), 1, out=statistics)
        statistics.masked_fill_(ignored.unsqueeze(1), 0.0)
    if z_stored is not None and log_t is not None:
        sums |= {"log_t": log_t, **_apart(sums, z_y, z_stored, limits)}
    if z_largest is not None:
        sums["u_largest"] = u_of(z_largest, sums["top"].unsqueeze(1), limits)
    if plan.asked & EMIX:
        plan = plan.mixed(sums, sums["top"])
        fixed = (logits, target, plan, weight, ignore_index, source)
        again = _by_name(plan, backend.sums(*fixed), z_y, limits)
        sums |= {name: again[name] for name in MIXED}
    sums |= masses_of(plan, y, sums.get("sums_u_y", sums["u_y"]), source, sums["source_top"])
    w_y = 1.0 if weight is None else weight[y].double()
    values, slopes = differentiate(loss, plan, sums, w_y, y, logits.shape[1], factor, stored)
    values = values.masked_fill(ignored, 0.0) if some_ignored else values
    values = values.to(wide(logits.dtype))
    if slopes is None:
        return values, None
    if some_ignored:
        slopes = Slopes(*(x.masked_fill(ignored.unsqueeze(1), 0.0) for x in slopes))
    if out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad: Tensor = backend.gradient(*fixed, slopes.coefficients, out)
    if stored is not None:
        _add_entries(grad, stored, slopes.entries)
    return values, grad


class Slopes(NamedTuple):
    """The gradient of a formula: the coefficients, and the entries of the stored classes."""

    coefficients: Tensor  # (N, 13)
    entries: Tensor  # (N, k)


def entries_of(logits: Tensor, index: Tensor) -> Tensor:
    """Some logits of each row, float64, from (N, k) indices; -inf for a negative index."""
    z = logits.gather(1, index.clamp(min=0)).double()
    return z.masked_fill(index < 0, -math.inf)


def _without_stored(logits: Tensor, index: Tensor, out: Tensor | None) -> Tensor:
    """The logits with the stored classes masked, in the buffer of the gradient."""
    if out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if out is not logits:
        out.copy_(logits)
    return _add_entries(out, index, torch.full(index.shape, -math.inf, device=index.device))


def _add_entries(rows: Tensor, index: Tensor, entries: Tensor) -> Tensor:
    """Add ``entries`` to the rows, in place, at the (N, k) indices that are not negative."""
    entries = entries.masked_fill(index < 0, 0.0).to(rows.dtype)
    return rows.scatter_add_(1, index.clamp(min=0), entries)


def _by_name(plan: Passes, sums: Tensor, z_y: Tensor, limits: torch.finfo) -> dict[str, Tensor]:
    """The sums by name, and u_y."""
    # Columns in one piece: elementwise functions of PyTorch may round strided ones differently.
    named = dict(zip(SUMS, sums.T.contiguous().unbind(), strict=True))
    if plan.asked & OTHERS:  # without other classes any finite maximum serves
        for name in ("top", "source_top"):
            named[name] = named[name].masked_fill(named[name] == -math.inf, 0.0)
    return named | {"u_y": u_of(z_y, named["top"], limits)}


def statistics_of(sums: dict[str, Tensor]) -> list[Tensor]:
    """The columns of the statistics of rows, from the sums of e and u e, the maximum and u_y."""
    log_e, u_y = sums["e"].log(), sums["u_y"]
    entropy = (log_e - sums["ue"] / sums["e"]).clamp(min=0.0)
    correct = (u_y >= 0) & ~sums["e"].isnan()
    return [log_e - u_y, entropy, correct.double(), sums["top"], log_e]


def _apart(
    sums: dict[str, Tensor], z_y: Tensor, z_stored: Tensor, limits: torch.finfo
) -> dict[str, Tensor]:
    """With stored classes: what has the maximum of all classes, and what has that of the sums."""
    here = sums["top"]
    top = torch.maximum(here, z_stored.amax(1))
    top = top.masked_fill(top == -math.inf, 0.0)
    here = torch.where(here == -math.inf, top, here)  # without other classes any number serves
    return {
        "top": top,
        "u_y": u_of(z_y, top, limits),
        "u_stored": u_of(z_stored, top.unsqueeze(1), limits),
        "gap": u_of(here, top, limits),
        "sums_top": here,
        "sums_u_y": u_of(z_y, here, limits),
    }


def u_of(z: Tensor, top: Tensor, limits: torch.finfo) -> Tensor:
    """u of single logits, float64: -inf if one is masked, else within the limits."""
    u = z - top
    if limits.bits == 64 or (u.is_cpu and _within(u, limits)):
        return u
    return torch.where(z.isinf(), z, u.clamp(limits.min, limits.max))


def _within(u: Tensor, limits: torch.finfo) -> bool:
    """Whether nothing has to be clamped; NaN says no."""
    return u.numel() == 0 or bool(u.abs().amax() <= limits.max)


def masses_of(
    plan: Passes, y: Tensor, u_y: Tensor, source: Tensor | None, source_top: Tensor
) -> dict[str, Tensor]:
    """q of the target, and v with a teacher; (N,) float64."""
    if plan.masses == NO_MASSES:
        return {}
    if plan.masses == TEMPERED:
        return {"q_y": (u_y / plan.tau).exp()}
    masked = u_y == -math.inf
    if plan.masses == BEYOND_MARGIN:
        return {"q_y": (-u_y > plan.margin).double().masked_fill(masked, 0.0)}
    if source is None:
        return {"q_y": (~masked).double()}
    if plan.masses == FROM_TEACHER:
        v_y = source.gather(1, y.unsqueeze(1)).squeeze(1).double() - source_top
        v_y = v_y.masked_fill(masked, -math.inf)
        tau = plan.tau if plan.row_tau is None else plan.row_tau.source_tau
        return {"q_y": (v_y / tau).exp(), "v_y": v_y}
    mass = (source[y] if source.dim() == 1 else source[y, y]).double()
    return {"q_y": mass.masked_fill(masked, 0.0)}


def differentiate(
    loss: Formula,
    plan: Passes,
    sums: dict[str, Tensor],
    w_y: float | Tensor,
    y: Tensor,
    classes: int | Tensor,
    factor: float | Tensor | None,
    stored: Tensor | None = None,
) -> tuple[Tensor, Slopes | None]:
    """The values of a formula, (N,), and the slopes of sum_i factor_i value_i.

    Args:
        loss, plan: the formula and what it uses.
        sums: the sums, u_y, q_y and v_y, and u_stored and log_t with stored classes.
        w_y: the class weights of the targets, or 1.0.
        y: the targets.
        classes: K.
        factor: None for values only.
        stored: (N, k) stored classes.
    """
    zero = torch.zeros_like(sums["e"])
    sums = sums | {"u_top": zero}
    if plan.row_tau is not None:
        sums |= {"tau": plan.row_tau.tau, "source_tau": plan.row_tau.source_tau}
    elif "tau" in plan.used:
        sums |= dict.fromkeys(("tau", "source_tau"), zero.new_full((), plan.tau))
    if factor is None:
        with torch.no_grad():
            return value_of(loss, FoundSums(loss, sums, w_y, classes)), None
    variables = [name for name in _VARIABLES if name in plan.used]
    if plan.row_tau is None and "tau" in variables:
        variables.remove("tau")
    with autograd_enabled():
        leaves = [sums[name].detach().requires_grad_() for name in variables]
        sums |= dict(zip(variables, leaves, strict=True))
        values = value_of(loss, FoundSums(loss, sums, w_y, classes))
        upstream = factor.double() if isinstance(factor, Tensor) else torch.full_like(zero, factor)
        grads = torch.autograd.grad(values, leaves, upstream, allow_unused=True)
    slopes = {name: x for name, x in zip(variables, grads, strict=True) if x is not None}
    coefficients = _coefficients(plan, sums, slopes, w_y, y)
    if stored is None:
        return values.detach(), Slopes(coefficients, zero.new_empty(len(zero), 0))
    # A target that is stored has no entry among the coefficients. It is in no sum.
    targets = stored == y.unsqueeze(1)
    at_target = coefficients[:, COEFFICIENTS.index("at_target")]
    at_target.masked_fill_(targets.any(1), 0.0)
    of_y = slopes.get("u_y", zero).unsqueeze(1)
    return values.detach(), Slopes(coefficients, slopes["u_stored"] + of_y * targets)


def _coefficients(
    plan: Passes,
    sums: dict[str, Tensor],
    slopes: dict[str, Tensor],
    w_y: float | Tensor,
    y: Tensor,
) -> Tensor:
    """The coefficients of the gradient from the derivatives for the sums; only those not 0."""
    u_y, top = (sums.get(f"sums_{name}", sums[name]).detach() for name in ("u_y", "top"))
    zero = torch.zeros_like(u_y)
    masked_y = u_y == -math.inf if plan.asked & (UE | UR | EMIX) else None

    def of(name: str) -> Tensor:
        return slopes.get(name, zero)

    tau = plan.tau if plan.row_tau is None else plan.row_tau.tau
    c = {"top": top, "source_top": sums["source_top"]}
    c["from_e"] = of("e") + slopes["ue"] if "ue" in slopes else of("e")
    c["from_ue"], c["from_wq"], c["from_emix"] = of("ue"), of("wqu"), of("emix")
    c["from_r"] = slopes["r"] / tau if "r" in slopes else zero
    c["from_q"] = of("qu") - slopes["qd"] / tau if "qd" in slopes else of("qu")
    c["at_target"], c["at_top"] = of("u_y"), zero
    if plan.row_tau is not None and masked_y is not None:
        of_tau = of("tau") - of("r") * sums["ur"] / tau**2
        if "qd" in slopes:
            of_tau = of_tau + slopes["qd"] * sums["qu"].detach() / tau**2
        c["from_u"] = of_tau * plan.row_tau.slope
        c["from_one"] = c["from_u"] * (top - plan.row_tau.center)
        linear = c["from_one"] + c["from_u"] * u_y
        c["at_target"] = c["at_target"] + linear.masked_fill(masked_y, 0.0)
    if not plan.asked & OTHERS:
        e_y = u_y.exp()
        terms = [c["from_e"] * e_y]
        if "ue" in slopes and masked_y is not None:
            terms.append(slopes["ue"] * (u_y * e_y).masked_fill(masked_y, 0.0))
        if "r" in slopes:
            terms.append(c["from_r"] * (u_y / tau).exp())
        if plan.mixture is not None and masked_y is not None:
            log_y = torch.logaddexp(zero, -(u_y + plan.mixture.shift))
            terms.append(of("emix") * (e_y * log_y).masked_fill(masked_y, 0.0))
        if plan.masses != NO_MASSES:
            from_q = c["from_q"] + slopes["wqu"] * w_y if "wqu" in slopes else c["from_q"]
            terms.append(from_q * sums["q_y"])
        c["at_target"] = sum(terms, c["at_target"])
    if plan.asked & TOP:
        c["top_at"], of_top = sums["top_at"], of("u_top")
        c["at_target"] = c["at_target"] + of_top.masked_fill(c["top_at"] != y, 0.0)
        at_top = c["from_e"] + c["from_r"] + of_top
        c["at_top"] = at_top if plan.masses == BEYOND_MARGIN else at_top + c["from_q"]
    else:
        c["top_at"] = zero - 1
    return torch.stack([c.get(name, zero) for name in COEFFICIENTS], 1)
