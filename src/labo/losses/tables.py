"""Smoothing by what is collected or learned: tables of classes, and a confidence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks, smoothing
from .._checks import TeacherError
from ..fields import NOT_NEGATIVE, POSITIVE, UNIT
from ..loss import Loss, hyper, state
from ..rows import Rows, exact, kl_divergence, row_sum, spread, times, upcast
from ..sums import FROM_TABLE, RowSums


def _check_table(table: Tensor, logits: Tensor) -> Tensor:
    """The table, once it is known to fit the logits, (N, K)."""
    _checks.check_devices(logits, table=table)
    num_classes = logits.shape[1]
    if table.shape != (num_classes, num_classes):
        raise ValueError(
            f"table must have shape ({num_classes}, {num_classes}), got {tuple(table.shape)}"
        )
    return table


class OnlineLabelSmoothingLoss(Loss):
    r"""Online label smoothing (OLS): soft labels from the model's own correct predictions.

    :math:`w_h\,\mathrm{CE} + w_s\,\mathrm{CE}(S_y, p)` with row y of a class table S; a row of
    zeros adds nothing.

    The Module collects the table. In training mode each call adds the correct predictions to the
    row of their class. After each epoch, ``end_epoch()`` makes their means the table of the next
    epoch. A class without a correct prediction gets a uniform row. Mixed labels (probabilities) use
    the table and do not change it. Under ``torch.distributed`` the sums are added up over the
    processes.

    Example:
        >>> loss = OnlineLabelSmoothingLoss(4)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target)
        tensor(0.2247)
        >>> loss.end_epoch()
        >>> loss.table[0]
        tensor([0.6381, 0.2347, 0.0954, 0.0318])

    Reference:
        Zhang et al. 2021, Delving Deep into Label Smoothing.
    """

    name, function_name, rowwise = "ols", "online_label_smoothing_loss", False
    inputs = ("table",)
    per_process = ("sums", "counts")  # buffers that add up over the processes

    num_classes: int = hyper(
        kw_only=False,
        module_only=True,
        doc="K; the table has K x K entries, so this is for images rather than vocabularies",
    )
    hard_weight: float = hyper(
        default=0.5,
        within=NOT_NEGATIVE,
        doc="w_h; the authors use 0.5 on CIFAR, 1 for fine-grained data",
    )
    soft_weight: float = hyper(default=0.5, within=NOT_NEGATIVE, doc="w_s, likewise")
    first_table: str = hyper(
        default="zeros",
        choices=("zeros", "uniform"),
        module_only=True,
        doc='"zeros" (their CIFAR code: the first epoch is half the cross entropy) or "uniform" '
        "(their code for fine-grained data)",
    )
    freeze_above: float | None = hyper(
        default=None,
        module_only=True,
        doc="keep a row once its largest entry reaches this (0.88 in their code for fine-grained "
        "data), until an epoch without a correct prediction of its class, which makes it uniform "
        "again",
    )
    table: Tensor = state(init=False)
    sums: Tensor = state(init=False)
    counts: Tensor = state(init=False)

    def value(self, row: RowSums) -> Tensor:
        mass = row.masses(FROM_TABLE)
        soft = mass.cross_entropy() / mass.q.masked_fill(mass.q == 0, 1.0)
        return times(self.hard_weight, row.nll()) + self.soft_weight * soft

    def reference_only(self, *inputs: Any) -> str | None:
        return "a table that requires a gradient" if inputs[0].requires_grad else None

    def mass_source(self, logits: Tensor, *inputs: Any) -> Tensor:
        return _check_table(inputs[0], logits)

    def make_state(self) -> None:
        shape = (self.num_classes, self.num_classes)
        first = 0.0 if self.first_table == "zeros" else 1 / self.num_classes
        self.register_buffer("table", torch.full(shape, first))
        self.register_buffer("sums", torch.zeros(shape))
        self.register_buffer("counts", torch.zeros(self.num_classes, dtype=torch.int64))

    def _apply(self, fn: Any, recurse: bool = True) -> OnlineLabelSmoothingLoss:
        """Move the buffers; a cast to half leaves the sums in float32, where they can grow."""
        super()._apply(fn, recurse)
        for name in ("table", "sums"):
            setattr(self, name, upcast(getattr(self, name)))
        return self

    def own_inputs(self) -> tuple[Any, ...]:
        return (self.table.clone(),)  # for the graph: end_epoch() changes the table in place

    def forward(
        self, logits: Tensor, target: Tensor, teacher_logits: Tensor | None = None
    ) -> Tensor:
        loss = super().forward(logits, target, teacher_logits)
        if self.training and not target.is_floating_point():
            self._collect(logits.detach(), target)
        return loss

    @torch.no_grad()
    def _collect(self, logits: Tensor, target: Tensor) -> None:
        rows = Rows(logits, target, ignore_index=self.ignore_index, dim=self.dim)
        right = rows.logits.argmax(-1) == rows.target
        if rows.valid is not None:
            right = right & rows.valid
        predictions = torch.softmax(rows.logits, -1).to(self.sums.dtype)
        self.sums.index_add_(0, rows.target, predictions * right.unsqueeze(-1))
        self.counts.index_add_(0, rows.target, right.to(self.counts.dtype))

    @torch.no_grad()
    def end_epoch(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.sums)
            torch.distributed.all_reduce(self.counts)
        seen = self.counts.unsqueeze(-1)
        means = self.sums / seen.clamp(min=1)
        if self.freeze_above is not None:
            frozen = self.table.amax(-1, keepdim=True) >= self.freeze_above
            means = torch.where(frozen, self.table, means)
        # Frozen rows too: the authors make any row without a correct prediction uniform.
        self.table.copy_(means.masked_fill(seen == 0, 1 / len(self.table)))
        self.sums.zero_()
        self.counts.zero_()


class KRLSLoss(Loss):
    r"""KR-LS (knowledge refinery): a learned table of the similarities between classes.

    Without the entry of the true class, :math:`p_{res} = \mathrm{softmax}(z_{\ne y})` and
    :math:`q_{res} = \mathrm{softmax}(S_{y,\ne y})`:

    .. math:: \mathrm{CE} + \alpha\,\mathrm{KL}(p_{res} \Vert q_{res})

    trains the network with q_res held constant. In the same backward pass the table S, (K, K)
    logits whose diagonal is not used, learns from :math:`\alpha\,\mathrm{KL}(q_{res} \Vert
    p_{res})` with p_res held constant. That term adds nothing to the value. The authors released no
    code: the order of the KL and what is detached follow the published algorithm. The method is
    experimental.

    The Module has the table: pass ``table`` to the optimizer. We suggest a parameter group of its
    own without weight decay; the authors do not say.

    Example:
        >>> loss = KRLSLoss(4)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])).detach()
        tensor(0.5757)

    Reference:
        Ding et al. 2021, Knowledge Refinery: Learning from Decoupled Label.
    """

    name, function_name, linear, rowwise = "kr-ls", "kr_ls_loss", False, False
    inputs = ("table",)

    num_classes: int = hyper(kw_only=False, module_only=True, doc="K")
    alpha: float = hyper(default=0.5, within=UNIT, doc="strength, in [0, 1]")
    order: str = hyper(
        default="pq",
        choices=("pq", "qp"),
        doc='"pq" for KL(p_res || q_res) as above, "qp" for KL(q_res || p_res)',
    )
    table: nn.Parameter = state(init=False)

    def on_rows(self, rows: Rows, table: Tensor) -> Tensor:
        _check_table(table, rows.logits)
        p_res, absent, alone = rows.without_label()
        table_rows = table.to(rows.logits.dtype)[rows.target]
        q_res = torch.log_softmax(table_rows.masked_fill(absent, -math.inf), -1)
        held = q_res.detach()
        ordered = (p_res, held) if self.order == "pq" else (held, p_res)
        residual = kl_divergence(*ordered)
        update = kl_divergence(q_res, p_res.detach())
        learn = update - update.detach()
        penalty = self.alpha * (residual + learn).masked_fill(alone, 0.0)
        return rows.nll(rows.log_probabilities()) + rows.weigh(penalty)

    def make_state(self) -> None:
        self.table = nn.Parameter(torch.zeros(self.num_classes, self.num_classes))

    def own_inputs(self) -> tuple[Any, ...]:
        return (self.table,)


class ConNetLoss(Loss):
    r"""ConNet-LS: a learned confidence decides how much to smooth, and may ask for the label.

    Called as ``loss(logits, target, states)``, with hidden states of the model, (..., D): the
    authors average the outputs of the first three decoder layers. The confidence of a row is
    sigmoid(linear(state)); pass ``network`` to the optimizer. With a confidence :math:`c` in (0, 1)
    for each row and its mean :math:`\bar c` over the rows that count,

    .. math::
        p' = c\,p + (1-c)\,\mathrm{onehot}(y), \qquad
        \epsilon = \alpha \exp(1 - c/\bar c),

    .. math::
        -(1-\epsilon) \log p'_y - \frac{\epsilon}{K-1} \sum_{j \ne y} \log p'_j - \lambda \log c

    A low confidence makes a wrong prediction cheaper, raises the smoothing, and costs
    :math:`-\lambda\log c`. Gradients flow through everything, the mean included. Call ``step()``
    after each optimizer step: the price of a low confidence falls as lam exp(-t / decay_steps).
    Under ``torch.distributed`` the mean confidence is that of all processes.

    The function takes the logits of the confidence, (...), in place of the states, ``trusted``,
    (...) bool, rows with c = 1 in p', so that the label does not help them, and
    ``mean_confidence``, the mean of c, if it is over more rows than these.

    Example:
        >>> loss = ConNetLoss(2, lam=0.0).eval()
        >>> states = torch.zeros(1, 2)
        >>> _ = loss.network.bias.data.fill_(torch.tensor(0.9).logit())
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), states).detach()
        tensor(0.6069)

    Reference:
        Lu et al. 2022, Learning Confidence for Transformer-based Neural Machine Translation.
    """

    name, function_name, linear, rowwise = "connet", "connet_loss", False, False
    smooths = True
    teacher_argument = "states"
    inputs = ("confidence",)

    features: int = hyper(kw_only=False, module_only=True, doc="D, the size of a state")
    alpha: float = hyper(default=0.1, within=UNIT, doc="smoothing of a row of mean confidence")
    lam: float | Tensor = hyper(
        default=30.0, within=NOT_NEGATIVE, doc="lambda, the price of a low confidence at the start"
    )
    decay_steps: float = hyper(
        default=30_000,
        within=POSITIVE,
        module_only=True,
        doc="steps in which lambda falls to 1/e; 30000 or 6000 in the authors' settings",
    )
    trust: float = hyper(
        default=0.5,
        within=UNIT,
        module_only=True,
        doc="probability that the label does not help a row, in training mode",
    )
    network: nn.Linear = state(init=False)
    steps: Tensor = state(init=False)

    def on_rows(
        self,
        rows: Rows,
        confidence: Tensor,
        *,
        trusted: Tensor | None = None,
        mean_confidence: Tensor | None = None,
    ) -> Tensor:
        given = (confidence,) if trusted is None else (confidence, trusted)
        if any(not isinstance(x, Tensor) or x.shape != rows.shape for x in given):
            raise TeacherError(
                f"confidence and trusted must have the shape {tuple(rows.shape)} of the samples, "
                f"got {[tuple(x.shape) if isinstance(x, Tensor) else x for x in given]}"
            )
        _checks.check_devices(rows.logits, confidence=confidence, trusted=trusted)
        u = confidence.reshape(-1).to(rows.logits.dtype)
        if rows.valid is not None:
            u = u.masked_fill(~rows.valid, 0.0)
        mean = mean_confidence
        if mean is None:
            counted = torch.ones_like(u) if rows.valid is None else rows.valid.to(u.dtype)
            mean = row_sum(u.sigmoid() * counted) / row_sum(counted).clamp(min=1)
        epsilon = self.alpha * (1 - u.sigmoid() / mean.clamp(min=1e-20)).exp()
        log_mixed = _with_hints(rows, u, None if trusted is None else trusted.reshape(-1))
        others = smoothing.others(rows.logits, rows.target)
        hard, soft = rows.nll(log_mixed), rows.cross_entropy(others, log_mixed)
        price = -self.lam * nn.functional.logsigmoid(u)
        return times(1 - epsilon, hard) + times(epsilon, soft) + rows.weigh(price)

    def make_state(self) -> None:
        self.network = nn.Linear(self.features, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def current(self) -> Loss:
        left = torch.exp(-self.steps.to(exact(self.steps.device)) / self.decay_steps)
        return self.having(lam=self.lam * left)

    def step(self) -> None:
        """Count one optimizer step."""
        self.steps += 1

    def confidences(
        self, target: Tensor, states: Tensor | None, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """What :func:`labo.functional.connet_loss` takes, for rows that it gets in parts.

        Args:
            target: (...) class indices.
            states: (..., D).
            draws: (...) random numbers in [0, 1); rows with one below ``trust`` are trusted.

        Returns:
            The logits of the confidence, (...); the trusted rows, (...), in training mode; and the
            mean confidence of the rows that count.
        """
        if not isinstance(states, Tensor) or states.shape[:-1] != target.shape:
            raise TeacherError(
                "ConNetLoss needs states: hidden states of the model, of the shape "
                f"{(*target.shape, 'D')}"
            )
        layer = [parameter.to(states.dtype) for parameter in self.network.parameters()]
        confidence = nn.functional.linear(states, *layer).squeeze(-1)
        counts = (target != self.ignore_index).to(confidence.dtype)
        total = torch.stack([(confidence.sigmoid() * counts).sum(), counts.sum()])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from torch.distributed.nn.functional import all_reduce

            total = all_reduce(total)
        trusted = None
        if self.training:
            draws = torch.rand_like(confidence) if draws is None else draws
            trusted = draws < self.trust
        return confidence, trusted, total[0] / total[1].clamp(min=1)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        states: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Tensor:
        return self.of_rows(logits, target, *self.confidences(target, states, draws))

    def of_rows(
        self,
        logits: Tensor,
        target: Tensor,
        confidence: Tensor,
        trusted: Tensor | None,
        mean_confidence: Tensor,
    ) -> Tensor:
        """The loss of some of the rows, given what :meth:`confidences` returns for all."""
        known = {"trusted": trusted, "mean_confidence": mean_confidence}
        return self.current().compute(logits, target, confidence, **known)


def _with_hints(rows: Rows, u: Tensor, trusted: Tensor | None) -> Tensor:
    """log(c p + (1 - c) onehot(y)), (M, K), with c = sigmoid(u), or 1 in trusted rows."""
    log_c, log_hint = (nn.functional.logsigmoid(x) for x in (u, -u))
    if trusted is not None:
        log_c, log_hint = log_c.masked_fill(trusted, 0.0), log_hint.masked_fill(trusted, -math.inf)
    log_p = rows.log_probabilities() + spread(log_c, rows.num_classes)
    hinted = torch.logaddexp(rows.pick(log_p), log_hint)
    return torch.where(rows.label() > 0, spread(hinted, rows.num_classes), log_p)
