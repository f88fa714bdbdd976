"""The work that is measured: LABO and label smoothing, and their alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import labo
from labo.fast.formula import plan_of
from labo.sums import Passes

from . import rivals

Work = Callable[[], object]


def naive_labo(logits: Tensor, target: Tensor, tau: float = 1.25, rho: float = 0.5) -> Tensor:
    """LABO as in the paper: compute the smoothing distribution, then the smoothed label."""
    log_p = logits.log_softmax(-1)
    with torch.no_grad():
        classes = logits.shape[-1]
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        alpha = 1 - rho * entropy / math.log(classes)
        p_star = (logits / tau).softmax(-1)
        label = alpha * p_star
        label.scatter_add_(1, target.unsqueeze(1), 1 - alpha)
        kl = (p_star * (classes * p_star).log()).sum(-1)
    return (-(label * log_p).sum(-1) + alpha.squeeze(1) * tau * kl).mean()


def torch_ls(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, label_smoothing=0.1)


def backward(loss: Callable[[], Tensor], *leaves: Tensor) -> Work:
    """A forward and backward pass, whose gradients are dropped."""

    def run() -> None:
        loss().backward()
        for leaf in leaves:
            leaf.grad = None

    return run


def _in_place(output: Tensor, target: Tensor) -> None:
    loss = labo.functional.labo_loss(output, target, inplace=True)
    torch.autograd.grad(loss, output)


def logits_losses(rows: int, classes: int, *, compiled: bool = True) -> dict[str, Work]:
    """Losses on logits of shape (rows, classes)."""
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, requires_grad=True)
    # Like the output of a layer: not a leaf, so that it can be overwritten. Each round reads the
    # values that the round before left, which takes the same time.
    output = logits.detach().clone().requires_grad_() * 1
    target = torch.randint(classes, (rows,))
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "torch LS": torch_ls,
        "torch CE": F.cross_entropy,
        "naive LABO": naive_labo,
        "labo native": labo.LABOLoss(impl="native"),
        "labo blocked": labo.LABOLoss(impl="blocked"),
        "labo LS native": labo.LabelSmoothingLoss(impl="native"),
    }
    if compiled:
        losses["torch LS compiled"] = torch.compile(torch_ls)
        losses["naive LABO compiled"] = torch.compile(naive_labo)
    work: dict[str, Work] = {
        name: backward(partial(loss, logits, target), logits) for name, loss in losses.items()
    }
    work["labo in place"] = partial(_in_place, output, target)
    work["allocate + copy"] = lambda: torch.empty_like(logits).copy_(logits.detach())
    return work


def gpu_losses(rows: int, classes: int) -> dict[str, Work]:
    """Losses on logits on a GPU: ours and those of other libraries, also compiled."""
    work = logits_losses(rows, classes)
    del work["labo blocked"]  # not for devices with kernels
    torch.manual_seed(0)
    logits, target = torch.randn(rows, classes), torch.randint(classes, (rows,))
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "labo CE": labo.CrossEntropyLoss(),
        "labo LABO compiled": torch.compile(labo.LABOLoss()),
        "labo LS compiled": torch.compile(labo.LabelSmoothingLoss()),
    }
    if logits.device.type != "cpu":
        of_others = rivals.on_logits()
        losses |= of_others
        losses |= {f"{name} compiled": torch.compile(loss) for name, loss in of_others.items()}
    # A copy, because some write over their logits.
    leaf = logits.requires_grad_()
    ours = {name: backward(partial(loss, leaf, target), leaf) for name, loss in losses.items()}
    return work | ours


def gpu_linear_losses(rows: int, width: int, classes: int) -> dict[str, Work]:
    """Output layer and loss on a GPU, also those of other libraries, and ours compiled."""
    more: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "labo.linear_loss CE": lambda x, w, y: labo.linear_loss(x, w, y, labo.CrossEntropyLoss()),
    }
    ls = labo.LabelSmoothingLoss()
    more["labo.linear_loss LS compiled"] = torch.compile(
        lambda x, w, y: labo.linear_loss(x, w, y, ls)
    )
    if torch.empty(0).device.type != "cpu":
        more |= rivals.linear()
    return linear_losses(rows, width, classes, more=more)


# Every row-wise loss without a teacher that has fused backends.
ROWWISE: dict[str, Callable[[int], nn.Module]] = {
    "FL": lambda classes: labo.FocalLoss(gamma=2.0),
    "AFL": lambda classes: labo.AntiFocalLoss(),
    "Poly-1": lambda classes: labo.Poly1Loss(),
    "LogitNorm": lambda classes: labo.LogitNormLoss(),
    "DFT": lambda classes: labo.DFTLoss(),
    "EAFT": lambda classes: labo.EAFTLoss(),
    "EAFT, top_k=20": lambda classes: labo.EAFTLoss(top_k=20),
    "CP": lambda classes: labo.ConfidencePenaltyLoss(),
    "MaxSup": lambda classes: labo.MaxSuppressionLoss(),
    "MbLS": lambda classes: labo.MarginSmoothingLoss(margin=2.0),
    "GER": lambda classes: labo.GeneralizedEntropyLoss(),
    "GER, alpha=0": lambda classes: labo.GeneralizedEntropyLoss(alpha=0.0),
    "TF-reg": lambda classes: labo.TFRegLoss(),
    "TF-reg, paper": lambda classes: labo.TFRegLoss(mode="paper"),
    "LS, fairseq": lambda classes: labo.LabelSmoothingLoss(convention="fairseq"),
    "LS, JoeyNMT": lambda classes: labo.LabelSmoothingLoss(convention="joeynmt", padding_idx=0),
    "MLS": lambda classes: labo.MaskedLabelSmoothingLoss(torch.arange(classes) % 3 != 1),
    "WLS": lambda classes: labo.WeightedLabelSmoothingLoss(torch.arange(classes) % 3),
    "LABO, z-loss": lambda classes: labo.LABOLoss(z_loss=1e-4),
}


def rowwise_losses(rows: int, classes: int) -> dict[str, Work]:
    """Every loss without a teacher, beside label smoothing of PyTorch."""
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, requires_grad=True)
    target = torch.randint(classes, (rows,))
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "torch LS": torch_ls,
        **{name: build(classes) for name, build in ROWWISE.items()},
    }
    return {name: backward(partial(loss, logits, target), logits) for name, loss in losses.items()}


def softened(logits: Tensor, teacher: Tensor, tau: float = 4.0) -> Tensor:
    """tau² KL at temperature tau, as it is usually written."""
    log_p, t = (logits / tau).log_softmax(-1), (teacher / tau).softmax(-1)
    return tau**2 * F.kl_div(log_p, t, reduction="batchmean")


def naive_kd(logits: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    """Distillation, alpha = 0.9."""
    return 0.1 * F.cross_entropy(logits, target) + 0.9 * softened(logits, teacher)


def naive_divergence(logits: Tensor, teacher: Tensor, divergence: str) -> Tensor:
    """Reverse KL divergence or JSD at temperature 1, as trainers write it."""
    log_p, log_t = logits.log_softmax(-1), teacher.log_softmax(-1)
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)
    if divergence == "reverse":
        return kl(log_t, log_p)
    log_m = torch.logaddexp(log_p, log_t) - math.log(2)
    return 0.5 * (kl(log_m, log_p) + kl(log_m, log_t))


def diverging(divergence: str) -> nn.Module:
    return labo.DistillationLoss(alpha=1.0, tau=1.0, divergence=divergence)


def naive_standardized_kd(logits: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    student, taught = (
        (z - z.mean(-1, keepdim=True)) / (1e-7 + z.std(-1, keepdim=True)) for z in (logits, teacher)
    )
    return 0.1 * F.cross_entropy(logits, target) + 0.9 * softened(student, taught)


def naive_cs_kd(logits: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + softened(logits, teacher)


def naive_ps_kd(logits: Tensor, target: Tensor, past: Tensor, alpha: float = 0.8) -> Tensor:
    label = alpha * past.softmax(-1)
    label.scatter_add_(1, target.unsqueeze(1), torch.full((len(target), 1), 1 - alpha))
    return F.cross_entropy(logits, label)


def naive_dkd(
    logits: Tensor, target: Tensor, teacher: Tensor, beta: float = 8.0, tau: float = 4.0
) -> Tensor:
    """Decoupled distillation as its authors write it, alpha = 1."""
    y = target.unsqueeze(1)
    p, t = (logits / tau).softmax(-1), (teacher / tau).softmax(-1)
    p_y, t_y = p.gather(1, y), t.gather(1, y)
    binary = torch.cat([p_y, 1 - p_y], 1), torch.cat([t_y, 1 - t_y], 1)
    of_target = F.kl_div(binary[0].log(), binary[1], reduction="batchmean")
    away = torch.zeros_like(teacher).scatter_(1, y, 1000.0)
    others = (logits / tau - away).log_softmax(-1), (teacher / tau - away).softmax(-1)
    of_others = F.kl_div(*others, reduction="batchmean")
    return F.cross_entropy(logits, target) + tau**2 * (of_target + beta * of_others)


def naive_stored(logits: Tensor, target: Tensor, stored: Tensor, log_t: Tensor) -> Tensor:
    """Distillation from stored classes, the others as one, alpha = 0.5."""
    log_p = logits.log_softmax(-1)
    log_rest = log_p.scatter(1, stored, -math.inf).logsumexp(-1)
    t = log_t.exp()
    mass = 1 - t.sum(-1)
    soft = (t * (log_t - log_p.gather(1, stored))).sum(-1) + mass * (mass.log() - log_rest)
    return 0.5 * F.nll_loss(log_p, target) + 0.5 * soft.mean()


def _stored_classes(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """64 classes of each row and their log-probabilities; a tenth of the mass is elsewhere."""
    k = min(64, classes)
    stored = (torch.randint(classes, (rows, 1)) + torch.arange(k)) % classes
    return stored, torch.randn(rows, k).log_softmax(-1) - 0.1


def teacher_losses(rows: int, classes: int) -> dict[str, Work]:
    """Losses with a teacher, the same in plain PyTorch, and label smoothing of PyTorch."""
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, requires_grad=True)
    teacher, target = torch.randn(rows, classes), torch.randint(classes, (rows,))
    stored, top = _stored_classes(rows, classes), labo.TopKDistillationLoss()
    losses: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "KD": labo.DistillationLoss(),
        "plain KD": naive_kd,
        "KD, standardized": labo.DistillationLoss(standardize=True),
        "plain KD, standardized": naive_standardized_kd,
        "reverse KL": diverging("reverse"),
        "plain reverse KL": lambda logits, _, teacher: naive_divergence(logits, teacher, "reverse"),
        "JSD": diverging("jsd"),
        "plain JSD": lambda logits, _, teacher: naive_divergence(logits, teacher, "jsd"),
        "CS-KD": labo.CSKDLoss(),
        "plain CS-KD": naive_cs_kd,
        "PS-KD": labo.PSKDLoss(epochs=1),
        "plain PS-KD": naive_ps_kd,
        "DKD": labo.DecoupledDistillationLoss(warmup_epochs=0),
        "plain DKD": naive_dkd,
        "64 stored classes": lambda logits, target, _: top(logits, target, *stored),
        "plain 64 stored classes": lambda logits, target, _: naive_stored(logits, target, *stored),
        "torch LS": lambda logits, target, _: torch_ls(logits, target),
    }
    given = logits, target, teacher
    return {name: backward(partial(loss, *given), logits) for name, loss in losses.items()}


def backend_pairs(rows: int, classes: int, dtype: torch.dtype = torch.float32) -> dict[str, Work]:
    """Losses of each kind with ``impl="auto"``, and the same with ``impl="reference"``."""
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, dtype=dtype, requires_grad=True)
    teacher, target = torch.randn(rows, classes), torch.randint(classes, (rows,))
    stored = teacher.log_softmax(-1).topk(min(8, classes))
    weight = torch.rand(classes)
    work: dict[str, Work] = {}

    def add(name: str, build: Callable[..., nn.Module], *extra: Tensor) -> None:
        for impl in ("auto", "reference"):
            loss = partial(build(impl=impl), logits, target, *extra)
            work[f"{name}, {impl}"] = backward(loss, logits)

    add("LABO", labo.LABOLoss)
    add("FL", partial(labo.FocalLoss, gamma=2.0))
    add("DFT, class weights", partial(labo.DFTLoss, weight=weight))
    add("EAFT, top_k=20", partial(labo.EAFTLoss, top_k=20))
    add("GER", labo.GeneralizedEntropyLoss)
    add("KD", labo.DistillationLoss, teacher)
    add("stored classes", labo.TopKDistillationLoss, stored.indices, stored.values)
    return work


def by_sums(classes: int) -> dict[str, nn.Module]:
    """One of the losses of ``ROWWISE`` for each set of sums, under the names of all that share it.

    The time of a loss depends on its sums alone.
    """
    names: dict[Passes, list[str]] = {}
    for name, build in ROWWISE.items():
        plan = plan_of(build(classes), weighted=False)
        same = plan._replace(tau=1.0, margin=0.0, used=frozenset())
        names.setdefault(same, []).append(name)
    return {" / ".join(same): ROWWISE[same[0]](classes) for same in names.values()}


def linear_rowwise_losses(rows: int, width: int, classes: int) -> dict[str, Work]:
    """Output layer and row-wise losses, beside the matrix products alone."""
    x, weight, target = _linear_inputs(rows, width, classes)
    work = {"three matrix products": three_products(x, weight)}
    for name, loss in by_sums(classes).items():
        work[name] = backward(partial(labo.linear_loss, x, weight, target, loss), x, weight)
    return work


def _linear_inputs(rows: int, width: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(classes, width) * 0.02).requires_grad_()
    return x, weight, torch.randint(classes, (rows,))


def three_products(x: Tensor, weight: Tensor) -> Work:
    """The matrix products of any output layer: logits, and two gradients."""
    x, weight = x.detach(), weight.detach()
    logits = x.new_empty(len(x), len(weight))
    d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        torch.mm(x, weight.T, out=logits)
        torch.mm(logits, weight, out=d_x)
        torch.mm(logits.T, x, out=d_weight)

    return run


def linear_losses(
    rows: int,
    width: int,
    classes: int,
    *,
    names: tuple[str, ...] | None = None,
    dtype: torch.dtype | None = None,
    more: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] | None = None,
) -> dict[str, Work]:
    """Output layer and loss: (rows, width) x (classes, width); of the default dtype if None."""
    x, weight, target = _linear_inputs(rows, width, classes)
    x, weight = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight))

    def layer_then_ls(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target, label_smoothing=0.1)

    losses: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "labo.linear_loss LABO": lambda x, w, y: labo.linear_loss(x, w, y, labo.LABOLoss()),
        "labo.linear_loss LABO, metrics": lambda x, w, y: labo.linear_loss(
            x, w, y, labo.LABOLoss(), return_metrics=True
        )[0],
        "labo.linear_loss LS": lambda x, w, y: labo.linear_loss(
            x, w, y, labo.LabelSmoothingLoss(alpha=0.1)
        ),
        "torch linear + LS": layer_then_ls,
        "torch linear + LS compiled": torch.compile(layer_then_ls),
        "naive linear + LABO": lambda x, w, y: naive_labo(F.linear(x, w), y),
    }
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        losses["torch linear_cross_entropy (CE)"] = lambda x, w, y: F.linear_cross_entropy(
            x, w, y, options=options()
        )

    losses |= more or {}
    work: dict[str, Work] = {}
    if names is None:
        work["three matrix products"] = three_products(x, weight)
    for name, loss in losses.items():
        if names is None or name in names:
            work[name] = backward(partial(loss, x, weight, target), x, weight)
    return work


def ignored_rows(rows: int, width: int, classes: int) -> dict[str, Work]:
    """Output layer and LABO where 60 % of the rows are ignored, as the prompts in fine-tuning."""
    x, weight, target = _linear_inputs(rows, width, classes)
    target[torch.randperm(rows)[: rows * 6 // 10]] = -100
    loss = partial(labo.linear_loss, x, weight, target, labo.LABOLoss())
    names = {"60 % ignored, dropped": True, "60 % ignored, kept": False}
    return {
        name: backward(partial(loss, options=labo.LinearLossOptions(drop_ignored=drop)), x, weight)
        for name, drop in names.items()
    }


def distillation(
    rows: int, width: int, classes: int, *, names: tuple[str, ...] | None = None
) -> dict[str, Work]:
    """Cross entropy and KL divergence to a teacher with an output layer of twice the width."""
    x, weight, target = _linear_inputs(rows, width, classes)
    with torch.no_grad():
        hidden, head = torch.randn(rows, 2 * width), torch.randn(classes, 2 * width) * 0.02
        stored = _stored_classes(rows, classes)

    def eager() -> Tensor:
        with torch.no_grad():
            teacher = F.linear(hidden, head).softmax(-1)
        log_q = F.linear(x, weight).log_softmax(-1)
        return 0.5 * F.nll_loss(log_q, target) + 0.5 * F.kl_div(
            log_q, teacher, reduction="batchmean"
        )

    def eager_divergence(divergence: str) -> Tensor:
        with torch.no_grad():
            teacher = F.linear(hidden, head)
        return naive_divergence(F.linear(x, weight), teacher, divergence)

    dense, top = labo.DistillationLoss(alpha=0.5, tau=1.0), labo.TopKDistillationLoss(alpha=0.5)
    losses: dict[str, Callable[[], Tensor]] = {
        "labo.linear_loss KD": lambda: labo.linear_loss(
            x, weight, target, dense, teacher_logits=(hidden, head)
        ),
        "labo.linear_loss top-64": lambda: labo.linear_loss(
            x, weight, target, top, teacher_logits=stored
        ),
        "torch linear + KD": eager,
    }
    given = (x, weight, target)
    for name, divergence in (("reverse KL", "reverse"), ("JSD", "jsd")):
        losses[f"labo.linear_loss {name}"] = partial(
            labo.linear_loss, *given, diverging(divergence), teacher_logits=(hidden, head)
        )
        losses[f"torch linear + {name}"] = partial(eager_divergence, divergence)
    return {
        name: backward(loss, x, weight)
        for name, loss in losses.items()
        if names is None or name in names
    }


# ------------------------------------------------------------------ whole training steps


def resnet_steps(batch: int) -> dict[str, Work]:
    """One step of CIFAR ResNet18, with cross entropy and with LABO."""
    from labo.lab.images.networks import CONVNETS

    torch.manual_seed(0)
    model = CONVNETS["resnet18"](100, 3)
    images, target = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))
    return _steps(model, (images,), target)


class _Translator(nn.Module):
    """A 512/1024/6+6 Transformer with its output layer."""

    def __init__(self, classes: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 512)
        self.body = nn.Transformer(512, 4, layers, layers, 1024, 0.0, batch_first=True)
        self.head = nn.Linear(512, classes, bias=False)

    def forward(self, source: Tensor, prefix: Tensor) -> Tensor:
        hidden = self.body(self.embedding(source), self.embedding(prefix))
        result: Tensor = self.head(hidden).flatten(0, 1)
        return result


def transformer_steps(tokens: int, classes: int, layers: int) -> dict[str, Work]:
    """One step of a Transformer on ``tokens`` target tokens."""
    torch.manual_seed(0)
    model = _Translator(classes, layers)
    shape = (max(1, tokens // 32), 32)
    source, prefix = torch.randint(classes, shape), torch.randint(classes, shape)
    return _steps(model, (source, prefix), torch.randint(classes, shape).flatten())


def _steps(model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor) -> dict[str, Work]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        optimizer.zero_grad()
        loss(model(*inputs), target).backward()
        optimizer.step()

    return {
        "torch CE": partial(step, F.cross_entropy),
        "torch LS": partial(step, torch_ls),
        "labo LABO": partial(step, labo.LABOLoss()),
    }
