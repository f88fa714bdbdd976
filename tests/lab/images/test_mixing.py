"""Label regularizers and mixed labels: mixup and CutMix."""

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
K = 10
# So that no term is 0 for logits of a few units.
SETTINGS = {
    "acls": ["method.margin=1.0"],
    "mbls": ["method.margin=1.0"],
    "r-drop": ["method.label=smoothed", "method.alpha=0.3"],
}


def test_the_methods_that_mix():
    assert set(MIXES) == {
        *("base", "ls", "labo", "als", "acls", "cp", "ger", "kd", "tf-kd-self", "r-drop"),
        *("maxsup", "mbls", "poly", "logitnorm", "eaft"),
    }


@cache
def task(method: str, way: str) -> ImageTask:
    settings = [f"method={method}", *SETTINGS.get(method, ()), f"data.{way}=1.0"]
    if METHODS[method].teacher is Frozen:
        settings.append("method.teacher=unused")
    return ImageTask(load_recipe("digits", settings))


def built(method: str) -> nn.Module:
    """The loss as a run builds it, but for the reduction."""
    hyper = task(method, "mixup").recipe.method
    known = {*inspect.signature(METHODS[method].loss).parameters, *METHODS[method].fields}
    given = {name: value for name, value in hyper.items() if name in known}
    return METHODS[method].loss(**given, reduction="none")


def inputs(method: str, count: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits, and the third argument of the loss, if it takes one."""
    torch.manual_seed(0)
    z, t = 2 * torch.randn(2, count, K).double()
    takes = METHODS[method].teacher in (Frozen, SecondPass)
    return z.requires_grad_(), (t,) if takes else ()


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
@pytest.mark.parametrize("method", MIXES)
def test_the_loss_of_a_mixed_label_is_the_mean_of_those_of_its_classes(method, way):
    """Value and gradient, on a batch as the loop makes it. The losses of classes: tests/core."""
    chosen, loss = task(method, way), built(method)
    target = chosen.batch(chosen.global_batch(0, 0), 0).target.double()
    assert ((target > 0).sum(-1) == 2).double().mean() > 0.5
    z, second = inputs(method, len(target))
    value = loss(z, target, *second)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    classes = torch.arange(K).expand(len(target), K).unbind(1)
    expected = sum(target[:, k] * loss(z, y, *second) for k, y in enumerate(classes))
    (wanted,) = torch.autograd.grad(expected.sum(), z)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", MIXES)
def test_an_unmixed_label_is_the_class_itself(method):
    """With mix_probability below 1 some batches have plain labels: the same loss."""
    loss, labels = built(method), torch.arange(K)
    z, second = inputs(method, K)
    soft = loss(z, F.one_hot(labels, K).double(), *second)
    torch.testing.assert_close(loss(z, labels, *second), soft, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_other_methods_are_refused(way):
    with pytest.raises(RequestError, match=r"method cs-kd does not support data\.mixup"):
        load_recipe("digits", ["method=cs-kd", f"data.{way}=0.8"])


def test_a_loss_that_mixes_takes_a_batch_without_targets():
    """A process without samples of its own looks on with targets that are ignored."""
    chosen = task("labo", "mixup")
    batch = chosen.batch(torch.tensor([3]), 0).without_targets()
    loss: nn.Module = METHODS["labo"].loss(reduction="sum")
    assert loss(torch.randn(1, K), batch.target) == 0
