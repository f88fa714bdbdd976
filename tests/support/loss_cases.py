"""LOSS_CASES, every loss with its arguments, and what the tests of the losses share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import labo
from defaults import with_defaults
from labo import functional as F
from labo.fast import dispatch
from labo.loss import Loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class LossCase:
    """A loss with what its tests need to know.

    extra: builds the arguments after (logits, target) from the logits: a teacher, a table, a mask.
    off: hyper-parameters at which it is plain cross entropy, or None.
    detached: parts of the value are held constant, so finite differences give another gradient.
    """

    name: str
    function: Callable[..., Tensor]
    hyper: dict[str, Any] = field(default_factory=dict)
    extra: Callable[[Tensor], tuple[Tensor, ...]] = lambda logits: ()
    off: dict[str, Any] | None = None
    rowwise: bool = True
    detached: bool = False
    shifts: bool = True  # adding a number to all logits of a row changes nothing
    worked: float | None = None  # the value for the sample A of support/worked.py, target 0

    def __call__(self, logits: Tensor, target: Tensor, **arguments: Any) -> Tensor:
        extra = arguments.pop("extra", None)
        if extra is None:
            extra = self.extra(logits)
        return self.function(logits, target, *extra, **(self.hyper | arguments))

    def take(self, extra: tuple[Tensor, ...], index: Any) -> tuple[Tensor, ...]:
        """The extra arguments for some of the rows: a teacher has rows, a table has classes."""
        return tuple(x[index] for x in extra) if self.has_teacher else extra

    @property
    def linear(self) -> bool:
        """Whether it takes class probabilities."""
        linear: bool = self.function.loss.linear
        return linear

    @property
    def has_teacher(self) -> bool:
        return self.extra in (teacher, stored_teacher, confidence)


def teacher(logits: Tensor) -> tuple[Tensor]:
    """Teacher logits: a fixed function of each row, so that rows may be permuted."""
    return ((logits.detach() * 0.5).sin(),)


def stored_teacher(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The three largest probabilities of that teacher, one of them padding."""
    top = teacher(logits)[0].log_softmax(-1).topk(min(3, logits.shape[-1]))
    indices = top.indices.clone()
    indices[..., 2:] = -1
    return indices, top.values


def table(logits: Tensor) -> tuple[Tensor]:
    k = logits.shape[-1]
    generator = torch.Generator().manual_seed(k)
    return (torch.randn(k, k, generator=generator, dtype=torch.float64),)


def soft_table(logits: Tensor) -> tuple[Tensor]:
    return (table(logits)[0].softmax(-1),)


def class_mask(logits: Tensor) -> tuple[Tensor]:
    return (torch.arange(logits.shape[-1]) % 3 != 1,)


def class_groups(logits: Tensor) -> tuple[Tensor]:
    return (torch.arange(logits.shape[-1]) % 3,)


def confidence(logits: Tensor) -> tuple[Tensor]:
    """The logits of a confidence: a fixed function of each row."""
    return (logits.detach()[..., 0].sin(),)


def draws(ema: Tensor) -> Tensor:
    rows = ema.shape[:-1].numel()
    return (0.2 + 0.7 * torch.arange(rows) / rows).reshape(ema.shape[:-1])


def beta_smoothing(logits: Tensor, target: Tensor, ema: Tensor, **arguments: Any) -> Tensor:
    """Beta smoothing with draws given, so that it is a function."""
    return F.beta_smoothing_loss(logits, target, ema, draws=draws(ema), **arguments)


beta_smoothing.loss = F.beta_smoothing_loss.loss


LOSS_CASES = [
    LossCase("base", F.cross_entropy_loss, off={}, worked=0.449313),
    LossCase("ls", F.label_smoothing_loss, off={"alpha": 0.0}, worked=0.596813),
    LossCase("ls-fairseq", F.label_smoothing_loss, {"convention": "fairseq"}, off={"alpha": 0.0}),
    LossCase(
        "ls-joeynmt",
        F.label_smoothing_loss,
        {"convention": "joeynmt", "padding_idx": 0},
        off={"alpha": 0.0},
    ),
    LossCase("labo", F.labo_loss, off={"alpha": 0.0}, detached=True),
    LossCase("labo-fixed", F.labo_loss, {"alpha": 0.3}, off={"alpha": 0.0}),
    LossCase("labo-multiplied", F.labo_loss, {"multiplier": 3.5}, detached=True),
    LossCase("labo-fixed-multiplied", F.labo_loss, {"alpha": 0.3, "multiplier": 0.25}),
    LossCase("held-labo-multiplied", F.held_labo_loss, {"multiplier": 3.5}, teacher),
    LossCase("held-labo", F.held_labo_loss, extra=teacher, off={"alpha": 0.0}),
    LossCase("labo-grad", F.labo_loss, {"alpha_grad": True}),
    LossCase("cp", F.confidence_penalty_loss, off={"beta": 0.0}),
    LossCase("cp-hinge", F.confidence_penalty_loss, {"threshold": 1.0}, off={"beta": 0.0}),
    LossCase("maxsup", F.max_suppression_loss, off={"lam": 0.0}, worked=0.596813),
    LossCase("mbls", F.margin_smoothing_loss, {"margin": 1.5}, off={"lam": 0.0}, worked=0.496813),
    LossCase("fl", F.focal_loss, {"gamma": 2.0}, off={"gamma": 0.0}),
    LossCase("fl-detached", F.focal_loss, {"detach_factor": True}, detached=True),
    LossCase("afl", F.anti_focal_loss, off={"gamma": 0.0}, detached=True),
    LossCase("afl-full", F.anti_focal_loss, {"detach_factor": False}),
    LossCase("poly", F.poly1_loss, off={"epsilon": 0.0}, worked=1.173180),
    LossCase("logitnorm", F.logit_norm_loss, {"tau": 1.0}, shifts=False, worked=0.883711),
    LossCase("dft", F.dft_loss, detached=True, worked=0.286692),
    LossCase("eaft", F.eaft_loss, off={"gamma": 0.0}, detached=True, worked=0.311364),
    LossCase(
        "eaft-top",
        F.eaft_loss,
        {"top_k": 2, "normalizer": None},
        off={"gamma": 0.0},
        detached=True,
        worked=0.261591,
    ),
    LossCase("gce", F.generalized_cross_entropy_loss, off={"gamma": 0.0}, worked=0.385514),
    LossCase("gem", F.gem_loss, detached=True, worked=-0.308276),
    LossCase("gem-logsigmoid", F.gem_loss, {"h": "logsigmoid"}, detached=True, worked=-0.152996),
    LossCase("zipf", F.zipf_smoothing_loss, {"lam": 1.0}, off={"lam": 0.0}, worked=0.562888),
    LossCase(
        "acls",
        F.acls_loss,
        {"margin": 1.0},
        off={"lam": 0.0},
        detached=True,
        shifts=False,
        worked=0.565346,
    ),
    LossCase("als", F.adaptive_smoothing_loss, detached=True, worked=1.413241),
    LossCase("als-past", F.prior_smoothing_loss, extra=teacher, detached=True),
    LossCase("ger", F.generalized_entropy_loss, off={"beta": 0.0}),
    LossCase("ger-low", F.generalized_entropy_loss, {"alpha": 0.01}),
    LossCase("ger-high", F.generalized_entropy_loss, {"alpha": 0.99}),
    LossCase("ger-cp", F.generalized_entropy_loss, {"alpha": 0.0}),
    LossCase("ger-ls", F.generalized_entropy_loss, {"alpha": 1.0}),
    LossCase("ger-euclidean", F.generalized_entropy_loss, {"generator": "euclidean"}),
    LossCase("tf-reg", F.tf_reg_loss, off={"alpha": 0.0}),
    LossCase("tf-reg-paper", F.tf_reg_loss, {"mode": "paper"}, off={"alpha": 0.0}),
    LossCase("kd", F.distillation_loss, extra=teacher, off={"alpha": 0.0}),
    LossCase("kd-elementwise", F.distillation_loss, {"kl_reduction": "elementwise"}, teacher),
    LossCase("kd-standardized", F.distillation_loss, {"standardize": True}, teacher),
    *(
        LossCase(
            f"kd-{divergence}",
            F.distillation_loss,
            {"divergence": divergence, "tau": 2.0, "tau_squared": divergence != "jsd"},
            teacher,
            off={"alpha": 0.0},
        )
        for divergence in ("reverse", "jsd", "skew", "skew_reverse")
    ),
    LossCase("dkd", F.decoupled_distillation_loss, extra=teacher, off={"multiplier": 0.0}),
    LossCase(
        "dkd-standardized",
        F.decoupled_distillation_loss,
        {"standardize": True, "tau": 2.0},
        teacher,
    ),
    *(
        LossCase(
            f"topk-{tail}",
            F.topk_distillation_loss,
            {"tail": tail},
            stored_teacher,
            off={"alpha": 0.0},
            detached=tail == "labo",
        )
        for tail in ("bucket", "uniform", "labo", "drop", "renormalize")
    ),
    *(
        LossCase(
            f"topk-{divergence}",
            F.topk_distillation_loss,
            {"divergence": divergence},
            stored_teacher,
            off={"alpha": 0.0},
        )
        for divergence in ("reverse", "jsd", "skew", "skew_reverse")
    ),
    LossCase("cs-kd", F.cs_kd_loss, extra=teacher, off={"lam": 0.0}),
    LossCase("ps-kd", F.ps_kd_loss, extra=teacher, off={"alpha": 0.0}),
    LossCase("beta-ls", beta_smoothing, extra=teacher, off={"alpha": 0.0}, rowwise=False),
    LossCase("ols", F.online_label_smoothing_loss, extra=soft_table),
    LossCase("kr-ls", F.kr_ls_loss, extra=table, off={"alpha": 0.0}),
    LossCase("kr-ls-qp", F.kr_ls_loss, {"order": "qp"}, table, off={"alpha": 0.0}),
    LossCase("mls", F.masked_label_smoothing_loss, extra=class_mask, off={"alpha": 0.0}),
    LossCase("wls", F.weighted_label_smoothing_loss, extra=class_groups, off={"alpha": 0.0}),
    LossCase("r-drop", F.r_drop_loss, {"label": "smoothed"}, teacher),
    LossCase("connet", F.connet_loss, {"lam": 0.5}, confidence, rowwise=False),
    LossCase("r-drop-labo", F.r_drop_loss, {"label": "labo"}, teacher, detached=True),
]

each_loss = pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)

# One loss of each kind, for properties that all losses have from one helper of src: shapes, dtypes
# of targets and logits, refusals, compilation. What depends on the formula runs on LOSS_CASES.
_KINDS = {
    "labo": "a kernel of one call, with a strength of each sample",
    "fl": "a formula of sums",
    "kd": "a formula with a teacher",
    "kr-ls": "on rows, with a table",
}
CASES = {case.name: case for case in LOSS_CASES}
REPRESENTATIVES = [CASES[name] for name in _KINDS]

each_kind = pytest.mark.parametrize("case", REPRESENTATIVES, ids=lambda case: case.name)

# Every entry of LOSSES with its defaults, as a function of the number of classes.
MODULES: dict[str, Callable[[int], torch.nn.Module]] = {
    name: partial(with_defaults, module) for name, module in labo.LOSSES.items()
}


def batch(seed: int, rows: int, classes: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits in float64 and targets."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


def gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """d loss / d logits."""
    leaf = logits.detach().clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(leaf), leaf)
    return result


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the Triton kernels for CPU tensors: computed on the GPU where there is one."""

    def run(*given: Any) -> Any:
        moved = tree_map(lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x, given)
        result = function(*moved)
        for own, copy in zip(given, moved, strict=True):
            if copy is result and own is not copy:  # written in place
                return own.copy_(copy)
        return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, result)

    return run


def triton_for_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``impl="native"`` use the Triton kernels for CPU tensors."""
    kernels = dispatch._triton_module()
    for name in ("row_statistics", "row_gradient", "sums", "gradient"):
        monkeypatch.setattr(kernels, name, on_device(getattr(kernels, name)))
    monkeypatch.setattr(dispatch.native, "sums", kernels.sums)
    monkeypatch.setattr(dispatch.native, "gradient", kernels.gradient)
    moments = on_device(kernels.masked_moments)
    monkeypatch.setattr(dispatch.native, "masked_moments", moments, raising=False)
    monkeypatch.setattr(dispatch.native, "refuses", lambda logits: None)
    monkeypatch.setattr(dispatch.FastRows, "in_one_pass", lambda rows, logits: False)


def both(case: LossCase, logits: Tensor, target: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Value and gradient in float64; rows have different upstream gradients."""
    leaf = logits.detach().clone().requires_grad_()
    value = case(leaf, target, **arguments)
    upstream = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    (slope,) = torch.autograd.grad(value, leaf, upstream if value.dim() else None)
    return value.detach().double(), slope.double()


def compute_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every loss move what it is given from the CPU to a device, and its value back."""
    plain = Loss.compute

    def compute(loss: Loss, logits: Any, *given: Any, **keywords: Any) -> Tensor:
        if type(logits) is not Tensor or not logits.is_cpu:
            return plain(loss, logits, *given, **keywords)
        (logits, *given), keywords, own = tree_map(
            lambda x: x.to(device) if isinstance(x, Tensor) and x.is_cpu else x,
            ((logits, *given), keywords, loss.values()),
        )
        return plain(loss.having(**own), logits, *given, **keywords).to("cpu")

    monkeypatch.setattr(Loss, "compute", compute)
