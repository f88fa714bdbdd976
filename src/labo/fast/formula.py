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
r (v - u) / tau  r_j (d_j - 1) / tau
===============  =====================

With the share s_j = 1 / (1 + exp(x_j)) of the prediction in its mixture with a teacher, tau times
the derivatives of rmix and qmix are r_j log(1 + exp(x_j)) - c (q_j s_j - p_j qs) and
q_j s_j - p_j qs, where c = exp(x_j) r_j / q_j is the same for all classes and qs is the sum of q s.

The backend writes the gradient in a second pass, in the backward pass: what comes from upstream,
such as the factor of a GradScaler, is in the coefficients before anything is rounded.

No backend knows about stored classes: both passes read logits in which they are masked (in the
buffer of the gradient, never in the logits of the caller), and their entries are added to the 0
that is the gradient of a masked class. The maximum of the sums is then that of the other classes,
while u_y, u_stored and ``top`` have the maximum of all classes.

The sums of a mixture take a second call, because s is known after the first one. Both logs are held
constant, as the masses are. With a temperature of each row the sums of u r and u q give the
derivative for the temperature, and the gradient gets a term that is linear in the logits.

The functions of a backend are, with ``given`` a :class:`RowInputs`,

- ``sums(logits, given)``: float64, with the columns :data:`SUMS`. Sums that were not asked for may
  hold anything; ignored rows are 0. With ``plan.mixture`` only the sums of that mixture are
  computed.
- ``gradient(logits, given, coefficients, out)``: from the float64 ``coefficients``, the columns as
  :data:`COEFFICIENTS`, written to ``out``. A target that is not a class has no entry. Ignored rows
  are 0.
- ``moments(logits, centered)``, only on the CPU: the mean of each row, or 0, and the sum of its
  squared distances from that; (N,) float64. The sum is not finite where classes are masked.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import sums as row_sums
from .._torch import autograd_enabled
from ..rows import exact, largest, u_of, wide
from ..sums import FoundSums, Passes, RowTau, passes_of, value_of
from .columns import COEFFICIENTS, MIXED, MIXED_TEACHER, SUMS, RowInputs

# What a formula is differentiated for.
_VARIABLES = (
    *("e", "ue", "r", "qu", "qd", "wqu", "emix", "rd", "rmix", "qmix"),
    *("u_y", "u_top", "tau", "u_stored"),
)


def plan_of(loss: Any, weighted: bool) -> Passes:
    """What the passes compute for a loss. Known for losses with the same hyper-parameters."""
    key = (type(loss), weighted, loss.z_loss != 0, *loss.plan_key())
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MOST_PLANS:  # a schedule that changes a number with every step
            _PLANS.clear()
        tensors = (x for x in loss.values().values() if isinstance(x, Tensor))
        device = next((x.device for x in tensors), None)
        plan = _PLANS[key] = passes_of(loss, weighted, device)
    return plan


_PLANS: dict[Any, Passes] = {}
_MOST_PLANS = 1000


# The sums that have to be asked for; the others are always there.
_ASKED = {
    **{
        "top_at": row_sums.TOP,
        "count": row_sums.COUNT,
        "ue": row_sums.UE,
        "r": row_sums.R,
        "ur": row_sums.UR,
        "qu": row_sums.QU,
        "qd": row_sums.QD,
    },
    **{"wq": row_sums.WQU, "wqu": row_sums.WQU, "mix": row_sums.EMIX, "emix": row_sums.EMIX},
    **{"rd": row_sums.RD, "rmix": row_sums.QMIX, "qmix": row_sums.QMIX, "qs": row_sums.QMIX},
}


@lru_cache
def columns_asked(asked: int, masses: int) -> tuple[tuple[str, int], ...]:
    """The names and places of the sums that a plan asks for."""
    there = {name for name in SUMS if name not in _ASKED or asked & _ASKED[name]}
    if masses == row_sums.NO_MASSES:
        there -= {"q", "source_top"}
    return tuple((name, i) for i, name in enumerate(SUMS) if name in there)


SECOND_BACKWARD = (
    "a second backward pass through a loss with inplace=True: the first one wrote its gradient "
    "over the logits. Compute the loss again, or leave inplace out"
)


def refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fused losses are differentiable once: for a gradient of their gradient "
            '(create_graph=True) use impl="reference"'
        )


def variables_of(plan: Passes) -> tuple[str, ...]:
    """The sums that a formula is differentiated for."""
    fixed_tau = plan.row_tau is None
    used = (name for name in _VARIABLES if name in plan.used)
    return tuple(name for name in used if not (fixed_tau and name == "tau"))


class FormulaRows:
    """The rows of a formula on a backend; the contract is in :mod:`labo.fast.dispatch`.

    Args:
        backend: the module with the two passes.
        loss: the formula.
        source: what the masses come from, see :mod:`labo.sums`; None if they come from the logits.
            With stored classes: their log-probabilities, (N, k).
        stored: (N, k) stored classes, -1 for padding.
        out: where the gradient is written, (N, K); may be the logits. None for a new tensor.
        some_ignored: whether some rows are ignored, if the caller knows.
    """

    def __init__(
        self,
        backend: ModuleType,
        loss: Any,
        target: Tensor,
        source: Tensor | None = None,
        stored: Tensor | None = None,
        out: Tensor | None = None,
        some_ignored: bool | None = None,
    ) -> None:
        self.some_ignored = some_ignored
        self.backend, self.loss, self.target = backend, loss, target
        self.weight, self.ignore_index = loss.weight, loss.ignore_index
        self.plan = plan_of(loss, self.weight is not None)
        self.stored, self.out = stored, out
        self.source = source if stored is None else None
        self.log_t = None if stored is None else source
        # The logits with the stored classes masked, in the buffer of the gradient.
        self._masked: Tensor | None = None
        self._overwritten = False  # whether the logits may hold the gradient
        # What the backend gave, (N, 16) for each call, and what it gave before for the same rows.
        self.backend_sums: list[Tensor] = []
        self.known_sums: list[Tensor] = []

    def values(self, logits: Tensor, statistics: Tensor | None = None) -> Tensor:
        """The values, (N,) float64, differentiable for the logits; 0 for ignored rows.

        ``statistics``, (N, 5) float64, is filled as by :func:`labo.metrics.row_statistics`, for a
        plan that measures them.
        """
        w_y = self._first_pass(logits.detach(), statistics)
        sums = self.sums
        if logits.requires_grad and torch.is_grad_enabled():
            names = variables_of(self.plan)
            with_graph = _SecondPass.apply(logits, self, names, *(sums[name] for name in names))
            sums = sums | dict(zip(names, with_graph, strict=True))
        values = value_of(self.loss, FoundSums(self.loss, sums, w_y, self.classes))
        return values if self.ignored is None else values.masked_fill(self.ignored, 0.0)

    def rows(
        self, logits: Tensor, factor: float | Tensor | None, statistics: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Values, and the gradient of sum_i factor_i value_i, for a loop over chunks."""
        dtype = wide(logits.dtype)
        if factor is None:
            with torch.no_grad():
                return self.values(logits, statistics).to(dtype), None
        with autograd_enabled():
            leaf = logits.detach().requires_grad_()
            values = self.values(leaf, statistics)
            if isinstance(factor, Tensor):
                given = factor.to(values.dtype)
            else:
                given = values.new_full((), factor)
            (grad,) = torch.autograd.grad(values, leaf, given.expand_as(values))
        return values.detach().to(dtype), grad

    def _first_pass(self, logits: Tensor, statistics: Tensor | None) -> float | Tensor:
        """Finds the sums. Returns the class weights of the targets, or 1.0."""
        plan, target, wider = self.plan, self.target, exact(logits.device, logits.dtype)
        self.classes: int | Tensor = logits.shape[1]
        if statistics is not None:
            plan = plan._replace(asked=plan.asked | row_sums.UE)
        if plan.spread is not None:
            from .spread import spread

            how = (plan.spread == row_sums.DEVIATION, self.backend)
            own = spread(logits, *how)
            taught = own if self.source is None else spread(self.source, *how, logits, own)
            sizes = (plan.tau * own.size, plan.tau * taught.size)
            plan = plan._replace(row_tau=RowTau(*sizes, own.center, plan.tau * own.slope))
        if self.weight is not None:
            self.weight = self.weight.detach().to(wide(logits.dtype))
        y, self.ignored = target, None
        if self.some_ignored is not False:
            ignored = target == self.ignore_index
            # On the CPU values can be read at no cost. Elsewhere that would wait for the device.
            if self.some_ignored or not logits.is_cpu or bool(ignored.any()):
                y, self.ignored = target.masked_fill(ignored, 0), ignored
        self.y = y
        z_largest = largest(logits, plan.top_k).to(wider) if plan.top_k else None
        limits = torch.finfo(wide(logits.dtype) if plan.row_tau is None else wider)
        z_apart = None
        if self.stored is not None:
            z_apart = entries_of(logits, torch.cat([y.unsqueeze(1), self.stored], 1))
            logits = self._masked = self._without_stored(logits)
        sums = self._sums(logits, plan)
        if statistics is not None:
            torch.stack(statistics_of(sums), 1, out=statistics)
            if self.ignored is not None:
                statistics.masked_fill_(self.ignored.unsqueeze(1), 0.0)
        if z_apart is not None and self.log_t is not None:
            sums |= {"log_t": self.log_t.to(wider), **apart(sums, z_apart, limits)}
        if z_largest is not None:
            sums["u_largest"] = u_of(z_largest, sums["top"].unsqueeze(1), limits)
        if plan.asked & (row_sums.EMIX | row_sums.QMIX):
            plan = plan.mixed(sums, sums["top"])
            again = self._sums(logits, plan)
            names = MIXED_TEACHER if plan.asked & row_sums.QMIX else MIXED
            sums |= {name: again[name] for name in names}
        u_y = sums.get("sums_u_y", sums["u_y"])
        sums |= masses_of(plan, y, u_y, self.source, sums.get("source_top", u_y))
        self.w_y = 1.0 if self.weight is None else self.weight.index_select(0, y).to(wider)
        self.plan, self.sums = plan, sums | temperatures(plan, sums["e"])
        return self.w_y

    def _sums(self, logits: Tensor, plan: Passes) -> dict[str, Tensor]:
        call = len(self.backend_sums)
        if call < len(self.known_sums):
            self.backend_sums.append(self.known_sums[call])
        else:
            self.backend_sums.append(self.backend.sums(logits, self._given(plan)))
        return _by_name(plan, self.backend_sums[-1])

    def _given(self, plan: Passes) -> RowInputs:
        weight = self.weight if plan.asked & row_sums.WQU else None
        return RowInputs(self.target, plan, weight, self.ignore_index, self.source)

    def refuse_second_backward(self) -> None:
        """Raise if an earlier backward pass has overwritten the logits."""
        if self._overwritten:
            raise RuntimeError(SECOND_BACKWARD)
        self._overwritten = self.out is not None

    def gradient(self, logits: Tensor, slopes: dict[str, Tensor]) -> Tensor:
        """The gradient, written to ``out``; as the second pass of the formula."""
        coefficients = coefficients_of(self.plan, self.sums, slopes, self.w_y, self.y)
        stored, out = self.stored, self.out
        if stored is not None:
            entries = stored_entries(coefficients, slopes, stored, self.y)
            if self.ignored is not None:
                entries = entries.masked_fill(self.ignored.unsqueeze(1), 0.0)
            logits = out = self._without_stored(logits) if self._masked is None else self._masked
            self._masked = None  # overwritten below
        elif out is None:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad: Tensor = self.backend.gradient(logits, self._given(self.plan), coefficients, out)
        return grad if stored is None else add_entries(grad, stored, entries)

    def _without_stored(self, logits: Tensor) -> Tensor:
        """The logits with the stored classes masked, in the buffer of the gradient."""
        out, stored = self.out, self.stored
        assert stored is not None
        if out is None:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if out is not logits and out.data_ptr() != logits.data_ptr():
            out.copy_(logits)
        masked = torch.full(stored.shape, -math.inf, dtype=out.dtype, device=out.device)
        return add_entries(out, stored, masked)


def entries_of(logits: Tensor, index: Tensor) -> Tensor:
    """Some logits of each row, exact, from (N, k) indices; -inf for a negative index."""
    z = logits.gather(1, index.clamp(min=0)).to(exact(logits.device, logits.dtype))
    return z.masked_fill(index < 0, -math.inf)


def add_entries(rows: Tensor, index: Tensor, entries: Tensor) -> Tensor:
    """Add ``entries`` to the rows, in place, at the (N, k) indices that are not negative."""
    entries = entries.masked_fill(index < 0, 0.0).to(rows.dtype)
    return rows.scatter_add_(1, index.clamp(min=0), entries)


def stored_entries(
    coefficients: Tensor, slopes: dict[str, Tensor], stored: Tensor, y: Tensor
) -> Tensor:
    """The gradients of the stored classes, (N, k).

    A target that is stored has no entry among the coefficients. It is in no sum.
    """
    targets = stored == y.unsqueeze(1)
    at_target = coefficients[:, COEFFICIENTS.index("at_target")]
    at_target.masked_fill_(targets.any(1), 0.0)
    entries = slopes["u_stored"]
    return entries + slopes["u_y"].unsqueeze(1) * targets if "u_y" in slopes else entries


def _by_name(plan: Passes, sums: Tensor) -> dict[str, Tensor]:
    """The sums that were asked for, by name."""
    # Columns in one piece: elementwise functions of PyTorch may round strided ones differently.
    columns = sums.T.contiguous()
    named = {name: columns[i] for name, i in columns_asked(plan.asked, plan.masses)}
    if plan.asked & row_sums.OTHERS:  # without other classes any finite maximum serves
        for name in named.keys() & {"top", "source_top"}:
            named[name] = named[name].masked_fill(named[name] == -math.inf, 0.0)
    return named


def statistics_of(sums: dict[str, Tensor]) -> list[Tensor]:
    """The columns of the statistics of rows, from the sums of e and u e, the maximum and u_y."""
    log_e, u_y = sums["e"].log(), sums["u_y"]
    entropy = (log_e - sums["ue"] / sums["e"]).clamp(min=0.0)
    correct = (u_y >= 0) & ~sums["e"].isnan()
    return [log_e - u_y, entropy, correct.to(u_y.dtype), sums["top"], log_e]


def apart(sums: dict[str, Tensor], z: Tensor, limits: torch.finfo) -> dict[str, Tensor]:
    """With stored classes: what has the maximum of all classes, and what has that of the sums.

    ``z``, (N, 1 + k), has the logits of the target and of the stored classes.
    """
    here = sums["top"]
    top = torch.maximum(here, z.amax(1))
    top = top.masked_fill(top == -math.inf, 0.0)
    here = torch.where(here == -math.inf, top, here)  # without other classes any number serves
    u = u_of(z, top.unsqueeze(1), limits)
    return {
        "top": top,
        "u_y": u[:, 0].contiguous(),
        "u_stored": u[:, 1:].contiguous(),
        "gap": (here - top).clamp(min=limits.min),
        "sums_top": here,
        "sums_u_y": u_of(z[:, 0], here, limits),
    }


def masses_of(
    plan: Passes, y: Tensor, u_y: Tensor, source: Tensor | None, source_top: Tensor
) -> dict[str, Tensor]:
    """q of the target, and v with a teacher; (N,) float64."""
    if plan.masses == row_sums.NO_MASSES:
        return {}
    if plan.masses == row_sums.TEMPERED:
        return {"q_y": (u_y / plan.tau).exp()}
    masked = u_y == -math.inf
    if plan.masses == row_sums.BEYOND_MARGIN:
        return {"q_y": (-u_y > plan.margin).to(u_y.dtype).masked_fill(masked, 0.0)}
    if source is None:
        return {"q_y": (~masked).to(u_y.dtype)}
    if plan.masses == row_sums.FROM_TEACHER:
        v_y = source.gather(1, y.unsqueeze(1)).squeeze(1).to(u_y.dtype) - source_top
        v_y = v_y.masked_fill(masked, -math.inf)
        tau = plan.tau if plan.row_tau is None else plan.row_tau.source_tau
        return {"q_y": (v_y / tau).exp(), "v_y": v_y}
    mass = (source[y] if source.dim() == 1 else source[y, y]).to(u_y.dtype)
    return {"q_y": mass.masked_fill(masked, 0.0)}


def temperatures(plan: Passes, like: Tensor) -> dict[str, Tensor]:
    """The temperatures of the rows and of a teacher's, if the formula uses them, and u_top."""
    named = {"u_top": torch.zeros_like(like)} if plan.asked & row_sums.TOP else {}
    if plan.row_tau is not None:
        return named | {"tau": plan.row_tau.tau, "source_tau": plan.row_tau.source_tau}
    if "tau" in plan.used:
        named |= dict.fromkeys(("tau", "source_tau"), like.new_full((), plan.tau))
    return named


def coefficients_of(
    plan: Passes,
    sums: dict[str, Tensor],
    slopes: dict[str, Tensor],
    w_y: float | Tensor,
    y: Tensor,
) -> Tensor:
    """The coefficients of the gradient from the derivatives for the sums; only those not 0."""
    u_y, top = (sums.get(f"sums_{name}", sums[name]) for name in ("u_y", "top"))
    zero = torch.zeros_like(u_y)
    masked_y = (
        u_y == -math.inf
        if plan.asked & (row_sums.UE | row_sums.UR | row_sums.EMIX | row_sums.RD | row_sums.QMIX)
        else None
    )

    def of(name: str) -> Tensor:
        return slopes.get(name, zero)

    tau = plan.tau if plan.row_tau is None else plan.row_tau.tau
    c = {"top": top, "source_top": sums.get("source_top", zero)}
    c["from_e"] = of("e") + slopes["ue"] if "ue" in slopes else of("e")
    c["from_ue"], c["from_wq"], c["from_emix"] = of("ue"), of("wqu"), of("emix")
    c["from_r"] = slopes["r"] / tau if "r" in slopes else zero
    c["from_q"] = of("qu") - slopes["qd"] / tau if "qd" in slopes else of("qu")
    c["at_target"], c["at_top"] = of("u_y"), zero
    if plan.row_tau is not None and masked_y is not None:
        of_tau = of("tau") - of("r") * sums["ur"] / tau**2
        if "qd" in slopes:
            of_tau = of_tau + slopes["qd"] * sums["qu"] / tau**2
        c["from_u"] = of_tau * plan.row_tau.slope
        c["from_one"] = c["from_u"] * (top - plan.row_tau.center)
        linear = c["from_one"] + c["from_u"] * u_y
        c["at_target"] = c["at_target"] + linear.masked_fill(masked_y, 0.0)
    if plan.asked & (row_sums.RD | row_sums.QMIX):
        _taught(c, plan, sums, slopes)
    if not plan.asked & row_sums.OTHERS:
        e_y = u_y.exp()
        terms = [c["from_e"] * e_y]
        if "ue" in slopes and masked_y is not None:
            terms.append(slopes["ue"] * (u_y * e_y).masked_fill(masked_y, 0.0))
        if plan.asked & row_sums.R:
            terms.append(c["from_r"] * (u_y / tau).exp())
        if plan.asked & (row_sums.RD | row_sums.QMIX):
            terms.append(_taught_target(c, plan, sums, u_y))
        if plan.asked & row_sums.EMIX and plan.mixture is not None and masked_y is not None:
            log_y = torch.logaddexp(zero, -(u_y + plan.mixture.shift))
            terms.append(of("emix") * (e_y * log_y).masked_fill(masked_y, 0.0))
        if plan.masses != row_sums.NO_MASSES:
            from_q = c["from_q"] + slopes["wqu"] * w_y if "wqu" in slopes else c["from_q"]
            terms.append(from_q * sums["q_y"])
        c["at_target"] = sum(terms, c["at_target"])
    if plan.asked & row_sums.TOP:
        c["top_at"], of_top = sums["top_at"], of("u_top")
        c["at_target"] = c["at_target"] + of_top.masked_fill(c["top_at"] != y, 0.0)
        at_top = c["from_e"] + c["from_r"] + of_top
        c["at_top"] = at_top if plan.masses == row_sums.BEYOND_MARGIN else at_top + c["from_q"]
    return torch.stack([c.get(name, zero) for name in COEFFICIENTS], 1)


def _taught(
    c: dict[str, Tensor], plan: Passes, sums: dict[str, Tensor], slopes: dict[str, Tensor]
) -> None:
    """Add the coefficients of rd, rmix and qmix, whose derivatives are in this module."""
    if "rd" in slopes:
        c["from_rd"] = slopes["rd"] / plan.tau
        c["from_r"] = c["from_r"] - c["from_rd"]
    if plan.mixture is not None:
        zero = torch.zeros_like(sums["r"])
        of_rmix, of_qmix = slopes.get("rmix", zero), slopes.get("qmix", zero)
        c["from_rmix"] = of_rmix / plan.tau
        c["from_qs"] = (of_qmix - of_rmix * plan.mixture.shift.exp()) / plan.tau
        c["from_r"] = c["from_r"] - c["from_qs"] * sums["qs"] / sums["r"]


def _taught_target(
    c: dict[str, Tensor], plan: Passes, sums: dict[str, Tensor], u_y: Tensor
) -> Tensor:
    """What these coefficients give the target."""
    d, r = (sums["v_y"] - u_y) / plan.tau, (u_y / plan.tau).exp()
    entry = torch.zeros_like(u_y)
    if "from_rd" in c:
        entry = c["from_rd"] * r * d.masked_fill(r == 0, 0.0)
    if plan.mixture is not None:
        x = (d + plan.mixture.shift).masked_fill(u_y == -math.inf, 0.0)
        entry = entry + c["from_rmix"] * r * torch.logaddexp(torch.zeros_like(x), x)
        entry = entry + c["from_qs"] * sums["q_y"] * torch.sigmoid(-x)
    return entry


class _SecondPass(torch.autograd.Function):
    """The sums as they are; autograd brings the derivatives for them to the second pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: FormulaRows, names: tuple[str, ...], *sums: Tensor
    ) -> tuple[Tensor, ...]:
        # Saved, so that autograd notices if they are changed before the backward pass.
        ctx.save_for_backward(logits, rows.target, rows.weight, rows.source, rows.stored)
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.names = rows, names
        return sums

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        ctx.rows.refuse_second_backward()  # before PyTorch finds that they have changed
        logits, *_ = ctx.saved_tensors
        known = {n: x for n, x in zip(ctx.names, slopes, strict=True) if x is not None}
        return (ctx.rows.gradient(logits, known), None, None, *(None for _ in slopes))
