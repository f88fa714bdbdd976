r"""The sums over a row of logits that the value of a loss is a formula of.

For a row of logits z with the maximum m, over the classes that are not masked,

.. math:: u = z - m, \qquad e = \exp(u), \qquad r = \exp(u / \tau)

and masses q, which are held constant and make a distribution P = q / sum(q):

==================  ===============================================================================
masses              q_j
==================  ===============================================================================
``UNIFORM``         1
``TEMPERED``        r_j
``BEYOND_MARGIN``   1 if -u_j > margin, else 0
``FROM_ROW``        entry j of one row for all samples, such as a mask, (K,)
``FROM_TABLE``      entry j of the row of the target in a table, (K, K)
``FROM_TEACHER``    exp(v_j / tau), where v is a teacher's logits minus their maximum, (N, K)
==================  ===============================================================================

A loss writes its value with the attributes of :class:`RowSums`. Three classes provide them:

- :class:`PlainSums` computes a sum when it is used, in plain PyTorch: any derivative, any dtype,
  class probabilities as labels. This is the reference.
- :class:`Traced` notes which sums a formula uses. :func:`passes_of` calls the formula with it,
  once, to know what the two passes of a fast backend have to compute.
- :class:`FoundSums` has the sums that a fast backend has found (:mod:`labo.fast.formula`).

Some losses take the logs of a mixture m = (1 - a) U + a p with the uniform distribution U. For n
classes and x = u + s, s = log(a n / ((1 - a) sum(e))), they are

.. math:: \log m = \log \tfrac{1 - a}{n} + \log(1 + e^x) = \log p + \log a + \log(1 + e^{-x})

Others take the logs of a mixture m = b P + (1 - b) p of the masses of a teacher and the prediction,
both at the temperature tau. With d = v / tau - u / tau and x = d + s, s = log(b sum(r) / ((1 - b)
sum(q))),

.. math:: \log m = \log p + \log(1 - b) + \log(1 + e^x) = \log P + \log b + \log(1 + e^{-x})

and the share of the prediction in the mixture is (1 - b) p / m = 1 / (1 + e^x).

Some losses divide the logits of a row by their norm or standard deviation. In the sums that is a
temperature of the row, and another one for a teacher (:class:`RowTau`).

*Stored* classes are k classes of each row, whose numbers log t_j come from a teacher. They are in
no sum, so that what is summed over the other classes keeps its digits when the stored ones have
almost all of the mass. The formula gets their u, (N, k), one by one.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .rows import (
    Rows,
    exact,
    largest,
    log_or_none,
    log_sum,
    over_tau,
    row_sum,
    shifted,
    spread_of,
    times,
)

NO_MASSES, UNIFORM, TEMPERED, BEYOND_MARGIN, FROM_ROW, FROM_TABLE, FROM_TEACHER = range(7)
COUNT, UE, R, QU, QD, WQU, TOP, OTHERS, UR, EMIX, RD, QMIX = (1 << i for i in range(12))
# What the logits of a row are divided by: their norm, or their standard deviation.
NORM, DEVIATION = "norm", "deviation"


class RowTau(NamedTuple):
    """Temperatures of the rows, of their logits and of the teacher's; (N,) float64.

    d tau / d z_j = slope (z_j - center).
    """

    tau: Tensor
    source_tau: Tensor
    center: Tensor
    slope: Tensor


class RowMixture(NamedTuple):
    """The maximum of each row, s, and the maximum of a teacher; (N,) float64."""

    top: Tensor
    shift: Tensor
    source_top: Tensor


class Passes(NamedTuple):
    """What the two passes of a fast backend over the logits compute."""

    asked: int  # COUNT | UE | ...
    masses: int = NO_MASSES
    tau: float = 1.0
    margin: float = 0.0
    row_tau: RowTau | None = None  # in place of tau
    top_k: int = 0  # how many of the largest logits
    odds: float = 0.0  # a / (1 - a), where a is the share of p in a mixture, with QMIX of P
    mixture: RowMixture | None = None  # known after the first sums
    spread: str | None = None  # NORM or DEVIATION, which row_tau is made of
    stored: bool = False  # whether there are stored classes
    used: frozenset[str] = frozenset()  # the attributes of RowSums that the formula uses

    @property
    def measures(self) -> bool:
        """Whether all classes are in the sums, so that they give the statistics of a row."""
        return not (self.stored or self.asked & OTHERS)

    def mixed(self, sums: dict[str, Tensor], top: Tensor) -> Passes:
        """With the mixture of rows whose first sums are known."""
        ratio = sums["r"] / sums["q"] if self.asked & QMIX else sums["count"] / sums["e"]
        taught = sums.get("source_top", top)
        return self._replace(mixture=RowMixture(top, (self.odds * ratio).log(), taught))


class Formula(Protocol):
    """A loss whose value is a formula of the sums."""

    z_loss: float
    leaves_out_target: ClassVar[bool]
    teacher_is_stored: ClassVar[bool]

    def value(self, row: RowSums) -> Tensor:
        """The value of each row, (N,)."""


class RowSums:
    """What the value of a row is made of: (N,) tensors, float64 where the device has it.

    With class probabilities as labels (the reference only) what belongs to the target has a row for
    each class, (K, N), and the value is averaged over the label. "Constant" means no gradient.
    """

    top: Tensor  # the largest logit; constant
    count: Tensor  # the number of classes that are not masked; constant
    e: Tensor  # the sum of exp(u)
    ue: Tensor  # the sum of u exp(u)
    u_y: Tensor  # u of the target; -inf if it is masked
    u_top: Tensor  # 0, with the gradient of the largest logit
    r: Tensor  # the sum of exp(u / tau), after `tempered`
    tau: Tensor  # the temperature of r: that of `tempered`, times the spread of the row
    source_tau: Tensor  # the temperature of a teacher
    q: Tensor  # the sum of the masses; constant
    qu: Tensor  # the sum of q u
    qd: Tensor  # the sum of q (v / source_tau - u / tau)
    q_y: Tensor  # q of the target; constant
    v_y: Tensor  # the teacher's v of the target; -inf if it is masked; constant
    mix: Tensor  # the sum of log(1 + exp(x)), after `mixture`
    emix: Tensor  # the sum of e log(1 + exp(-x)), after `mixture`
    rd: Tensor  # the sum of r d, d = v / tau - u / tau; 0 d = 0
    rmix: Tensor  # the sum of r log(1 + exp(x)), after `teacher_mixture`
    qmix: Tensor  # the sum of q log(1 + exp(-x)), after `teacher_mixture`
    u_stored: Tensor  # u of the stored classes, (N, k); -inf if masked or padding
    log_t: Tensor  # the teacher's log-probabilities of the stored classes, (N, k); constant
    gap: Tensor  # the largest of the classes that are not stored minus the largest of all
    u_largest: Tensor  # u of the largest logits, (N, k), after `largest`; constant

    w_y: float | Tensor  # the class weight of the target, or 1.0

    def __init__(self, loss: Formula, w_y: float | Tensor, classes: int | Tensor) -> None:
        self.others, self.stored = loss.leaves_out_target, loss.teacher_is_stored
        self.w_y, self.weighted = w_y, isinstance(w_y, Tensor)
        self.num_classes = classes
        self._log_e: Tensor | None = None
        self._log_p_y: Tensor | None = None

    def __getattr__(self, name: str) -> Tensor:
        if name not in _ATTRIBUTES:
            raise AttributeError(f"the sums of a row have no {name!r}")
        return self._sum(name)

    def _sum(self, name: str) -> Tensor:
        """The attribute of this name."""
        raise NotImplementedError(name)

    def _set(self, **settings: Any) -> None:
        """What `tempered`, `masses`, `mixture` and `largest` were called with."""

    # What a formula decides about the sums; the attributes named above follow.

    def tempered(self, tau: float, spread: str | None = None) -> Tensor:
        """The sum r of exp(u / tau); with ``spread`` of the logits divided by it."""
        self._set(tau=tau, spread=spread)
        return self.r

    def masses(
        self, kind: int, tau: float = 1.0, margin: float = 0.0, spread: str | None = None
    ) -> RowSums:
        """The row itself, with the sums of these masses; P = q / sum(q)."""
        settings: dict[str, Any] = {"masses": kind}
        if kind in (TEMPERED, FROM_TEACHER):
            settings |= {"tau": tau, "spread": spread}
        if kind == BEYOND_MARGIN:
            settings["margin"] = margin
        self._set(**settings)
        return self

    def mixture(self, alpha: float) -> None:
        """The sums of the logs of (1 - alpha) U + alpha p."""
        self._set(odds=alpha / (1 - alpha))

    def teacher_mixture(self, b: float) -> None:
        """The sums of the logs of b P + (1 - b) softmax(z / tau), P from a teacher."""
        self._set(odds=b / (1 - b))

    def largest(self, k: int) -> Tensor:
        """u of the k largest logits."""
        self._set(top_k=k)
        return self.u_largest

    @property
    def classes(self) -> Tensor:
        """K, a tensor without dimensions."""
        if isinstance(self.num_classes, Tensor):
            return self.num_classes.to(self.e.dtype)
        return self.e.new_full((), self.num_classes)

    @property
    def wq(self) -> Tensor:
        """The sum of w q, where w are the class weights."""
        return self._sum("wq" if self.weighted else "q")

    @property
    def wqu(self) -> Tensor:
        """The sum of w q u."""
        return self._sum("wqu" if self.weighted else "qu")

    @property
    def log_e(self) -> Tensor:
        """The log of the sum of e over all classes, also those that are not in the sums."""
        if self._log_e is None:
            if self.stored:
                rest = log_or_none(self.e) + self.gap
                self._log_e = log_sum(torch.cat([rest.unsqueeze(-1), self.u_stored], -1))
            elif self.others:
                self._log_e = torch.logaddexp(log_or_none(self.e), self.u_y)
            else:
                self._log_e = self.e.log()
        return self._log_e

    def log_p_y(self) -> Tensor:
        """The log-probability of the target."""
        if self._log_p_y is None:
            if self.others:  # exact also where p_y is almost 1
                rest = log_or_none(self.e)
                self._log_p_y = torch.nn.functional.logsigmoid(self.u_y - rest)
            else:
                self._log_p_y = self.u_y - self.log_e
        return self._log_p_y

    def nll(self) -> Tensor:
        """w_y (-log p_y)."""
        return self.weigh(-self.log_p_y())

    def weigh(self, penalty: Tensor) -> Tensor:
        """A term that is not a sum over the label, times the weight of the target."""
        return times(self.w_y, penalty) if self.weighted else penalty

    def cross_entropy(self) -> Tensor:
        """-sum_j w_j q_j log p_j, not yet divided by the sum of q."""
        return self.wq * self.log_e - self.wqu

    def entropy(self) -> Tensor:
        """H(p), in nats."""
        return self.log_e - self.ue / self.e

    def distillation(self) -> Tensor:
        """KL(P || softmax(z / tau)) with the masses of a teacher."""
        return self.qd / self.q - self.q.log() + self.r.log()


_ATTRIBUTES = frozenset(RowSums.__annotations__)


def value_of(loss: Formula, row: RowSums) -> Tensor:
    """The value of each row, with the z-loss of the loss: z_loss (log sum exp z)^2."""
    value = loss.value(row)
    if loss.z_loss:
        value = value + row.weigh(loss.z_loss * (row.top + row.log_e).square())
    return value


# ------------------------------------------------------------------ which sums a formula uses


_BITS = {
    **{"count": COUNT, "ue": UE, "r": R, "qu": QU, "qd": QD, "wq": WQU, "wqu": WQU},
    **{"u_top": TOP, "mix": EMIX, "emix": EMIX, "rd": RD | R, "rmix": QMIX | R, "qmix": QMIX | R},
}
_OF_MASSES = frozenset({"q", "qu", "qd", "wq", "wqu", "rd", "rmix", "qmix"})


class Traced(RowSums):
    """Notes what a formula uses. Every sum is 1."""

    def __init__(self, loss: Formula, weighted: bool, device: torch.device | None) -> None:
        one = torch.ones(1, dtype=torch.float32, device=device)
        super().__init__(loss, one if weighted else 1.0, 2)
        self.used: set[str] = set()
        self.settings: dict[str, Any] = {}
        self._one = one

    def _sum(self, name: str) -> Tensor:
        self.used.add(name)
        return self._one.unsqueeze(1) if name in _BY_CLASS else self._one

    def _set(self, **settings: Any) -> None:
        for name, value in settings.items():
            if self.settings.setdefault(name, value) != value:
                raise ValueError(f"a formula has one {name}, not {self.settings[name]} and {value}")


_BY_CLASS = ("u_stored", "log_t", "u_largest")


@torch.no_grad()
def passes_of(loss: Formula, weighted: bool, device: torch.device | None = None) -> Passes:
    """What the passes of a fast backend compute for a loss, whose tensors are on ``device``."""
    row = Traced(loss, weighted, device)
    value_of(loss, row)
    settings = row.settings
    if "odds" in settings:
        row.used |= {"r", "q"} if row.used & {"rmix", "qmix"} else {"count", "e"}
    asked = 0
    for name in row.used:
        asked |= _BITS.get(name, 0)
    if loss.leaves_out_target:
        asked |= OTHERS
    if settings.get("spread") is not None:  # for the derivative of the temperature
        asked |= UR | QU if asked & QD else UR
    if not row.used & _OF_MASSES:
        settings.pop("masses", None)
    return Passes(asked, stored=loss.teacher_is_stored, used=frozenset(row.used), **settings)


# ------------------------------------------------------------------ the reference


class PlainSums(RowSums):
    """The sums in plain PyTorch, each computed when it is first used.

    Args:
        loss: whose formula uses them.
        rows: logits and labels.
        source: what the masses come from: a row of classes, a table, or a teacher's logits as
            :meth:`labo.rows.Rows.teacher` gives them.
        stored: (N, k) stored classes, -1 for padding, and their log-probabilities.
    """

    def __init__(
        self,
        loss: Formula,
        rows: Rows,
        source: Tensor | None = None,
        stored: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.dtype = exact(rows.logits.device, rows.logits.dtype)
        w_y: float | Tensor = 1.0
        if rows.weight is not None:
            w_y = (rows.weight.unsqueeze(1) if rows.soft else rows.weight[rows.target]).to(
                self.dtype
            )
        super().__init__(loss, w_y, rows.num_classes)
        self.rows, self.source = rows, source
        self._known: dict[str, Tensor] = {}
        if stored is not None:
            self.index, self._known["log_t"] = stored[0], stored[1].to(self.dtype)
        self._settings: dict[str, Any] = {"tau": 1.0}
        z = rows.shifted
        left_out = self._left_out(z)
        inside = z if left_out is None else z.masked_fill(left_out, -math.inf)
        top = inside.detach().amax(-1, keepdim=True)
        # Without classes any finite number serves.
        self._top = self._summed_top = top.masked_fill(top == -math.inf, 0.0)
        if self.stored:
            self._top = z.detach().amax(-1, keepdim=True)
        self._u = inside - self._summed_top
        self._masked = inside == -math.inf

    def _left_out(self, z: Tensor) -> Tensor | None:
        """(M, K) bool, the classes that are in no sum; None if all are."""
        if self.others:
            return self.rows.is_label()
        if not self.stored:
            return None
        # Padding is written to a column that is then left out.
        column = self.index.masked_fill(self.index < 0, z.shape[-1])
        inside = column.new_zeros(len(column), z.shape[-1] + 1, dtype=torch.bool)
        return inside.scatter(-1, column, True)[:, :-1]

    def _set(self, **settings: Any) -> None:
        self._settings |= settings

    def _sum(self, name: str) -> Tensor:
        if name not in self._known:
            self._known[name] = self._compute(name)
        return self._known[name]

    def _compute(self, name: str) -> Tensor:
        u, rows, settings = self._u, self.rows, self._settings
        match name:
            case "top":
                top = rows.logits.detach().amax(-1)
                moved = rows.shifted.detach().amax(-1) - self._top.squeeze(-1)
                return torch.where(top == -math.inf, top, top - moved).to(self.dtype)
            case "count":
                return self._total((~self._masked).to(u.dtype))
            case "exp_u":
                return u.exp()
            case "e":
                return self._total(self._sum("exp_u"))
            case "ue":
                return self._total(self._sum("exp_u") * self._finite(u))
            case "u_y":
                return self._of_target(rows.shifted - self._top)
            case "u_top":
                # Of several largest logits the first gets the whole gradient; amax would share it.
                return u.max(-1).values.to(self.dtype)
            case "gap":
                return (self._summed_top - self._top).squeeze(-1).to(self.dtype)
            case "tau":
                return self._temperature(rows.logits)
            case "source_tau":
                return self._temperature(self._given)
            case "r":
                return self._total(self._over_tau(u, self.tau).exp())
            case "v_y":
                # Of a target that is in no sum, relative to the largest of the teacher's others.
                return self._of_target(shifted(self._given) - self._teacher_top())
            case "mix":
                return self._total(self._finite(log_1_exp(self._x())))
            case "emix":
                return self._total(self._sum("exp_u") * log_1_exp(-self._x()))
            case "rd":
                r, _, d = self._difference()
                return self._products(d.masked_fill(r == 0, 0.0), r)
            case "rmix":
                r, _, d = self._difference()
                return self._products(log_1_exp(d + self._teacher_shift()), r)
            case "qmix":
                _, q, d = self._difference()
                below = log_1_exp(-d - self._teacher_shift())
                return self._products(below.masked_fill(q == 0, 0.0), q)
            case "u_largest":
                top_k = largest(rows.shifted.detach(), settings["top_k"])
                return (top_k - self._top).to(self.dtype)
            case "u_stored":
                z = rows.shifted.gather(-1, self.index.clamp(min=0)) - self._top
                return z.masked_fill(self.index < 0, -math.inf).to(self.dtype)
            case _:
                self._find_masses()
                return self._known[name]

    def _total(self, x: Tensor) -> Tensor:
        return row_sum(x).to(self.dtype)

    def _products(self, x: Tensor, y: Tensor) -> Tensor:
        """sum_j x_j y_j. The unit is a factor of each term, because the sum could overflow."""
        unit = 1 / x.shape[-1]
        return self._total(x * (y * unit)) / unit

    def _finite(self, x: Tensor) -> Tensor:
        """0 for masked classes, so that 0 x is 0."""
        return x.masked_fill(self._masked, 0.0)

    def _of_target(self, x: Tensor) -> Tensor:
        """The entries of the target, (M,), or of every class, (K, M), for soft labels."""
        return (x.T if self.rows.soft else self.rows.pick(x)).to(self.dtype)

    @property
    def _given(self) -> Tensor:
        assert self.source is not None
        return self.source

    def _temperature(self, logits: Tensor) -> Tensor:
        tau, spread = self._settings["tau"], self._settings.get("spread")
        if spread is None:
            return self.e.new_full((), tau)
        masked = self.rows.logits == -math.inf
        return tau * spread_of(logits, masked, spread == DEVIATION).to(self.dtype)

    def _over_tau(self, u: Tensor, tau: Tensor) -> Tensor:
        """u / tau, from halves, which do not overflow; -inf where u is."""
        if self._settings.get("spread") is None:
            return u / self._settings["tau"]
        return over_tau(u, tau.to(u.dtype).unsqueeze(-1))

    def _x(self) -> Tensor:
        shift = (self._settings["odds"] * self.count / self.e).log()
        return self._finite(self._u) + shift.to(self._u.dtype).unsqueeze(-1)

    def _teacher_shift(self) -> Tensor:
        """x - d of a mixture with a teacher, (M, 1)."""
        shift = (self._settings["odds"] * self.r / self.q).log()
        return shift.to(self._u.dtype).unsqueeze(-1)

    def _difference(self) -> tuple[Tensor, Tensor, Tensor]:
        """r, q and d, (M, K). Where the teacher alone has masked a class, d is -inf."""
        v = shifted(self._given).masked_fill(self._masked, -math.inf) - self._teacher_top()
        of_teacher, u = self._over_tau(v, self.source_tau), self._over_tau(self._u, self.tau)
        return u.exp(), of_teacher.exp(), self._finite(of_teacher) - self._finite(u)

    # masses

    def _q(self) -> tuple[Tensor, Tensor | None]:
        """The masses, (M, K), 0 for masked classes, and the v of a teacher."""
        kind, v = self._settings["masses"], None
        if kind == TEMPERED:
            return self._over_tau(self._u.detach(), self.tau).exp(), None
        if kind == BEYOND_MARGIN:
            q = (-self._u.detach() > self._settings["margin"]).to(self._u.dtype)
        elif self.source is None:
            q = torch.ones_like(self._u)
        elif kind == FROM_TEACHER:
            masked_too = shifted(self.source).masked_fill(self._masked, -math.inf)
            v = masked_too - self._teacher_top()
            q = self._over_tau(v, self.source_tau).exp()
        elif kind == FROM_TABLE:
            q = self.source.to(self._u.dtype)[self.rows.target]
        else:
            q = self.source.to(self._u.dtype).expand_as(self._u)
        return self._finite(q), v

    def _teacher_top(self) -> Tensor:
        """The largest of the teacher's logits that are in the sums, (M, 1)."""
        top = shifted(self._given).masked_fill(self._masked, -math.inf).amax(-1, keepdim=True)
        return top.masked_fill(top == -math.inf, 0.0)

    def _find_masses(self) -> None:
        if self._settings["masses"] == FROM_TABLE and self.rows.soft:
            self._find_mixed_table()
            return
        (q, v), u = self._q(), self._finite(self._u)
        weight = self.rows.weight
        self._known |= {"q": self._total(q), "qu": self._products(u, q)}
        if not (self.others or self.stored):
            self._known["q_y"] = self._of_target(q)
        if weight is not None:
            weighted = q * weight
            self._known |= {"wq": self._total(weighted), "wqu": self._products(u, weighted)}
        if v is not None:
            of_teacher = self._over_tau(v, self.source_tau).masked_fill(v == -math.inf, 0.0)
            of_model = self._over_tau(u, self.tau)
            self._known["qd"] = self._products(of_teacher - of_model, q)

    def _find_mixed_table(self) -> None:
        """The sums for every class as label, (K, M): the row of each class in the table."""
        table, weight = self._given.to(self._u.dtype), self.rows.weight
        u, present = self._finite(self._u).T, (~self._masked).to(self._u.dtype).T
        with torch.autocast(u.device.type, enabled=False):
            products = {"q": table @ present, "qu": table @ u}
            if weight is not None:
                weighted = table * weight
                products |= {"wq": weighted @ present, "wqu": weighted @ u}
        self._known |= {name: product.to(self.dtype) for name, product in products.items()}

    def averaged(self, values: Tensor) -> Tensor:
        """The value of each row, (M,), in the dtype of the rows."""
        if self.rows.soft:
            label = self.rows.target.to(values.dtype)
            values = row_sum(times(label, values.T).contiguous())
        return values.to(self.rows.logits.dtype)


def log_1_exp(x: Tensor) -> Tensor:
    """log(1 + exp(x)). The bits of softplus depend on where an element lies in memory."""
    return -torch.nn.functional.logsigmoid(-x)


class FoundSums(RowSums):
    """The sums that a fast backend has found, by name."""

    def __init__(
        self, loss: Formula, sums: dict[str, Tensor], w_y: float | Tensor, classes: int | Tensor
    ) -> None:
        super().__init__(loss, w_y, classes)
        self.sums = sums

    def _sum(self, name: str) -> Tensor:
        return self.sums[name]
