"""Label regularizers and mixed labels: every method that takes them, against its definition."""

from __future__ import annotations

import inspect
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labo.lab.errors import RequestError
from labo.lab.images.task import ImageTask
from labo.lab.methods import METHODS, methods_for
from labo.lab.recipes import load_recipe
from labo.lab.teachers import Frozen, SecondPass

HERE = methods_for("image_classification")
MIXES = [name for name in HERE if METHODS[name].mixes]
ALPHA, TAU, BETA = 0.3, 1.5, 0.4
K = 10


def test_the_methods_that_mix():
    """Whoever adds one adds its definition below."""
    assert set(MIXES) == set(DEFINITIONS)


def soft_cross_entropy(log_p: Tensor, target: Tensor) -> Tensor:
    return -(target * log_p).sum(-1)


def base(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    return soft_cross_entropy(z.log_softmax(-1), q)


def label_smoothing(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    return soft_cross_entropy(z.log_softmax(-1), (1 - ALPHA) * q + ALPHA / K)


def confidence_penalty(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    return soft_cross_entropy(log_p, q) + BETA * (log_p.exp() * log_p).sum(-1)


def distillation(z: Tensor, q: Tensor, t: Tensor) -> Tensor:
    teacher, student = (t / TAU).softmax(-1), (z / TAU).log_softmax(-1)
    kl = (teacher * (teacher.log() - student)).sum(-1)
    return (1 - ALPHA) * soft_cross_entropy(z.log_softmax(-1), q) + ALPHA * TAU**2 * kl


def generalized_entropy(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    """The skew Jensen divergence of the prediction and the uniform distribution, at a half."""
    log_p = z.log_softmax(-1)
    p, u = log_p.exp(), torch.full_like(z, 1 / K)
    m = (p + u) / 2
    entropies = [-(x * x.log()).sum(-1) for x in (m, p, u)]
    divergence = 4 * (entropies[0] - entropies[1] / 2 - entropies[2] / 2)
    return soft_cross_entropy(log_p, q) + BETA * divergence


def labo(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    """The two stages: the best smoothing distribution for these logits, then the loss with it."""
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    alpha = (1 - 0.5 * entropy / torch.log(torch.tensor(float(K)))).detach().unsqueeze(-1)
    star = (z / TAU).softmax(-1).detach()
    mixed = (1 - alpha) * q + alpha * star
    divergence = (star * (star.log() + torch.log(torch.tensor(float(K))))).sum(-1)
    return soft_cross_entropy(log_p, mixed) + alpha.squeeze(-1) * TAU * divergence


def max_suppression(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    return base(z, q, z) + 0.1 * (z.amax(-1) - z.mean(-1))


def margin_smoothing(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    excess = z.amax(-1, keepdim=True) - z - 1.0
    return base(z, q, z) + 0.1 * excess.clamp(min=0).mean(-1)


def poly1(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    return base(z, q, z) + 2 * (q * (1 - z.softmax(-1))).sum(-1)


def logit_norm(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    return base(z / (z.norm(dim=-1, keepdim=True) + 1e-7) / TAU, q, z)


def entropy_weighted(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    log_p = z.detach().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy / torch.log(torch.tensor(float(K))) * base(z, q, z)


def r_drop(z: Tensor, q: Tensor, t: Tensor) -> Tensor:
    p, r = z.softmax(-1), t.softmax(-1)
    symmetric = ((p - r) * (p.log() - r.log())).sum(-1) / 2
    return (label_smoothing(z, q, t) + label_smoothing(t, q, t)) / 2 + BETA * symmetric


def adaptive_smoothing(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    alpha = (1 - 0.5 * entropy / torch.log(torch.tensor(float(K)))).detach().unsqueeze(-1)
    return soft_cross_entropy(log_p, (1 - alpha) * q + alpha / K)


def conditional_smoothing(z: Tensor, q: Tensor, _: Tensor) -> Tensor:
    largest, top = z.detach().amax(-1, keepdim=True), z.argmax(-1)
    over = (z - 1.0).clamp(min=0).square().gather(-1, top.unsqueeze(-1)).squeeze(-1)
    below = (largest - z - 1.0).clamp(min=0).square().sum(-1)  # 0 for the largest
    return base(z, q, z) + 0.1 * (over + 0.1 / (K - 1) * below)


DEFINITIONS = {
    "als": (adaptive_smoothing, []),
    "acls": (conditional_smoothing, ["method.margin=1.0"]),
    "r-drop": (
        r_drop,
        [f"method.lam={BETA}", "method.label=smoothed", f"method.alpha={ALPHA}"],
    ),
    "base": (base, []),
    "maxsup": (max_suppression, []),
    "mbls": (margin_smoothing, ["method.margin=1.0"]),
    "poly": (poly1, []),
    "logitnorm": (logit_norm, [f"method.tau={TAU}"]),
    "eaft": (entropy_weighted, []),
    "ls": (label_smoothing, [f"method.alpha={ALPHA}"]),
    "cp": (confidence_penalty, [f"method.beta={BETA}"]),
    "kd": (distillation, [f"method.alpha={ALPHA}", f"method.tau={TAU}"]),
    "tf-kd-self": (distillation, [f"method.alpha={ALPHA}", f"method.tau={TAU}"]),
    "ger": (generalized_entropy, [f"method.beta={BETA}", "method.alpha=0.5"]),
    "labo": (labo, [f"method.tau={TAU}"]),
}


@cache
def task(method: str, way: str) -> ImageTask:
    settings = [f"method={method}", *DEFINITIONS[method][1], f"data.{way}=1.0"]
    if METHODS[method].teacher is Frozen:
        settings.append("method.teacher=unused")
    return ImageTask(load_recipe("digits", settings))


def built(method: str) -> nn.Module:
    """The loss as a run builds it."""
    hyper = task(method, "mixup").recipe.method
    known = {*inspect.signature(METHODS[method].loss).parameters, *METHODS[method].fields}
    given = {name: value for name, value in hyper.items() if name in known}
    return METHODS[method].loss(**given, reduction="sum")


def second(method: str, t: Tensor) -> tuple[Tensor, ...]:
    """The third argument of the loss, if it takes one."""
    return (t,) if METHODS[method].teacher in (Frozen, SecondPass) else ()


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
@pytest.mark.parametrize("method", MIXES)
def test_the_loss_of_mixed_labels_is_its_definition(method, way):
    """Value and gradient, on a batch as the loop makes it."""
    chosen = task(method, way)
    loss = built(method)
    batch = chosen.batch(chosen.global_batch(0, 0), 0)
    assert batch.target.is_floating_point()
    mixed = ((batch.target > 0).sum(-1) == 2).float().mean()
    assert mixed > 0.5
    torch.manual_seed(0)
    z = (2 * torch.randn(len(batch.target), K)).double().requires_grad_()
    t = torch.randn(len(batch.target), K).double()
    target = batch.target.double()
    value = loss(z, target, *second(method, t))
    (gradient,) = torch.autograd.grad(value, z)
    expected = DEFINITIONS[method][0](z, target, t).sum()
    (wanted,) = torch.autograd.grad(expected, z)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", MIXES)
def test_an_unmixed_label_is_the_class_itself(method):
    """With mix_probability below 1 some batches have plain labels: the same loss."""
    definition, _ = DEFINITIONS[method]
    labels = torch.arange(K)
    torch.manual_seed(0)
    z, t = torch.randn(2, K, K).double()
    loss = built(method)
    one_hot = F.one_hot(labels, K).double()
    plain = loss(z, labels, *second(method, t))
    soft = loss(z, one_hot, *second(method, t))
    torch.testing.assert_close(plain, soft, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plain, definition(z, one_hot, t).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_labels_have_the_shares_of_the_pixels(way):
    chosen = task("base", way)
    index = chosen.global_batch(0, 0)
    batch = chosen.batch(index, 0).to("cpu")
    labels = chosen.labels[index]
    assert torch.allclose(batch.target.sum(-1), torch.ones(len(index)))
    own = batch.target.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    share = float(own.min())  # of the sample itself, where the other one is of another class
    assert ((own - share).abs() < 1e-6).logical_or(own > 1 - 1e-6).all()
    plain = chosen._views(index, 0, index, "augment").to("cpu")
    if way == "cutmix":
        kept = (batch.inputs == plain).all(1).float().mean((1, 2))
        assert kept.min() >= share - 1e-6  # pixels of the patch may be alike by chance
    else:
        moved = (batch.inputs - share * plain) / (1 - share)
        found = (moved.unsqueeze(1) - plain).abs().flatten(2).amax(-1).min(1)
        assert found.values.max() < 1e-3
        other = labels[found.indices]
        expected = share * F.one_hot(labels, K) + (1 - share) * F.one_hot(other, K)
        torch.testing.assert_close(batch.target, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [name for name in HERE if name not in MIXES])
@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_other_methods_are_refused(method, way):
    teacher = ["method.teacher=unused"] if METHODS[method].teacher is Frozen else []
    with pytest.raises(RequestError, match=f"method {method} does not support data.mixup"):
        load_recipe("digits", [f"method={method}", f"data.{way}=0.8", *teacher])


def test_a_loss_that_mixes_takes_a_batch_without_targets():
    """A process without samples of its own looks on with targets that are ignored."""
    chosen = task("labo", "mixup")
    batch = chosen.batch(torch.tensor([3]), 0).without_targets()
    loss: nn.Module = METHODS["labo"].loss(reduction="sum")
    assert loss(torch.randn(1, K), batch.target) == 0
