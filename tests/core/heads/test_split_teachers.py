"""Losses with a teacher whose columns are split over processes, against one process (split.py)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import labo
from columns import (
    CUTS,
    UPSTREAM,
    close,
    columns_are_whole,
    dense,
    dense_head,
    dtensor_is_whole,
    head_example,
    head_is_whole,
)
from gloo import World, on_processes

each_cut = pytest.mark.parametrize("sizes", CUTS, ids=str)
ROWS = 12


def diverging(divergence: str, tau: float = 1.0, **options) -> nn.Module:
    return labo.DistillationLoss(alpha=0.7, tau=tau, divergence=divergence, **options)


LOSSES = {
    "kd": lambda **shared: labo.DistillationLoss(alpha=0.7, tau=3.0, **shared),
    "kd-elementwise": lambda **shared: labo.DistillationLoss(kl_reduction="elementwise", **shared),
    "kd-z": lambda **shared: labo.DistillationLoss(z_loss=1e-2, **shared),
    "reverse": lambda **shared: diverging("reverse", tau=2.0, **shared),
    "jsd": lambda **shared: diverging("jsd", tau=3.0, z_loss=1e-2, **shared),
    "skew": lambda **shared: diverging("skew", tau=0.7, mixture=0.3, **shared),
    "skew_reverse": lambda **shared: diverging("skew_reverse", **shared),
    "dkd": lambda **shared: labo.DecoupledDistillationLoss(tau=2.0, warmup_epochs=1, **shared),
    "cs-kd": lambda **shared: labo.CSKDLoss(**shared),
    "ps-kd": lambda **shared: labo.PSKDLoss(epochs=2, **shared),
}
TAILS = ("bucket", "uniform", "labo", "drop", "renormalize")


def example(classes: int = 23, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, teacher logits, targets: ignored rows, and masked classes of either model."""
    logits, taught = torch.randn(2, ROWS, classes, dtype=torch.float64) * scale
    target = torch.randint(classes, (ROWS,))
    target[:2] = torch.tensor([0, classes - 1])
    logits[3, 1:3] = taught[3, 2:5] = -math.inf
    logits[4, : classes // 2] = -math.inf  # all of the first process, or almost
    taught[6, : classes // 2] = -math.inf
    target[3:7] = classes - 1
    target[[7, -1]] = -100
    logits[7] = taught[7] = math.nan
    taught -= 50 * scale  # below the 0 that a process without columns might take for a maximum
    return logits, taught, target


def of_a_teacher(world: World, name: str, sizes, scale=3.0, in_float32=3e-5) -> None:
    logits, taught, target = example(sum(sizes), scale)
    if name == "reverse":  # infinite where the teacher alone has masked a class, see below
        taught[(taught == -math.inf) & (logits != -math.inf)] = -50 * scale
    weights = torch.rand(sum(sizes), dtype=torch.float64) + 0.5
    for weight, reduction in ((None, "mean"), (weights, "none"), (weights, "mean")):
        loss = LOSSES[name](weight=weight, reduction=reduction)
        for dtype in (torch.float64, torch.float32):
            both = (logits.to(dtype), target, sizes, taught.to(dtype))
            columns_are_whole(world, loss, *both, in_float32=in_float32)


@pytest.mark.parametrize("name", LOSSES)
@on_processes(3)
def test_columns_of_a_teacher(world: World, name) -> None:
    for sizes in CUTS:
        of_a_teacher(world, name, sizes)


# Whole rows in float32 have the same error for KL(p || t): differences of logits are factors there.
@pytest.mark.parametrize(
    ("name", "in_float32"), [("kd", 3e-5), ("reverse", 3e-4), ("jsd", 3e-5), ("dkd", 3e-5)]
)
@on_processes(2)
def test_large_logits(world: World, name, in_float32) -> None:
    of_a_teacher(world, name, [19, 4], 300.0, in_float32)


@on_processes(2)
def test_classes_that_the_teacher_alone_has_masked(world: World) -> None:
    """KL(p || t) is infinite if p has such a class, and not if p underflows there."""
    logits, taught = torch.randn(2, 2, 10, dtype=torch.float64)
    taught[:, 2] = -math.inf
    logits[1, :5] -= 5000.0
    loss, target = diverging("reverse", reduction="none"), torch.tensor([7, 8])
    value, grad = dense(loss, logits, target, taught)
    assert value.isinf().tolist() == [True, False]
    leaf, theirs = (world.share(x, 1).clone() for x in (logits, taught))
    leaf.requires_grad_()
    found = labo.parallel.logits_loss(leaf, target, loss, teacher_logits=theirs, group=world.group)
    found.sum().backward()
    close(found, value)
    close(UPSTREAM * leaf.grad[1], world.share(grad, 1)[1])


@each_cut
@pytest.mark.parametrize("tail", TAILS)
@on_processes(3)
def test_stored_classes(world: World, tail, sizes) -> None:
    logits, taught, target = example(sum(sizes))
    top = taught.nan_to_num(0.0).log_softmax(-1).topk(5)
    index, log_t = top.indices.clone(), top.values
    index[2, 3:] = -1  # padding
    target[2] = index[2, 0]  # the target is stored
    weights = torch.rand(sum(sizes), dtype=torch.float64) + 0.5
    for weight in (None, weights):
        loss = labo.TopKDistillationLoss(tail=tail, weight=weight, reduction="none")
        for dtype in (torch.float64, torch.float32):
            both = (logits.to(dtype), target, sizes, index, log_t)
            columns_are_whole(world, loss, *both, in_float32=3e-5)


@pytest.mark.parametrize("name", ["kd", "jsd", "ps-kd"])
@on_processes(3)
def test_dtensors(world: World, name) -> None:
    logits, taught, target = example()
    taught.masked_fill_(taught == -math.inf, -150.0)
    loss = LOSSES[name]()
    collectives = 3 if name == "jsd" else 2
    dtensor_is_whole(world, loss, logits, target, taught, collectives=collectives)
    leaf, theirs = (world.placed(x, Shard(1)) for x in (logits, taught))
    value = loss(logits, target, taught)
    close(labo.parallel.logits_loss(leaf, target, loss, teacher_logits=theirs), value)
    moved = [x.unsqueeze(0).movedim(-1, 1) for x in (logits, taught)]
    dtensor_is_whole(world, LOSSES[name](dim=1), moved[0], target.unsqueeze(0), moved[1])
    for wrong in (taught, world.placed(taught, Replicate()), world.placed(taught, Shard(0))):
        with pytest.raises(ValueError, match=r"_logits must be a DTensor whose classes are split"):
            loss(leaf, target, wrong)


@on_processes(2)
def test_stored_classes_beside_dtensors(world: World) -> None:
    logits, taught, target = example()
    stored = taught.nan_to_num(0.0).log_softmax(-1).topk(5)
    loss = labo.TopKDistillationLoss()
    dtensor_is_whole(world, loss, logits, target, stored.indices, stored.values)
    leaf = world.placed(logits, Shard(1))
    with pytest.raises(ValueError, match="an entry of indices is not below the 23 classes"):
        loss(leaf, target, stored.indices + 23, stored.values)


# ------------------------------------------------------------------ output layers


@each_cut
@pytest.mark.parametrize("name", ["kd", "jsd", "ps-kd", "stored"])
@on_processes(3)
def test_output_layers(world: World, name, sizes) -> None:
    hidden, weight, _, target = head_example(sum(sizes))
    theirs, taught, bias, _ = head_example(sum(sizes))
    logits = nn.functional.linear(theirs, taught, bias)
    top = logits.log_softmax(-1).topk(4)
    stored, part = (top.indices, top.values), [world.share(x, 0, sizes) for x in (taught, bias)]
    cases = [
        (None, (logits,), world.share(logits, 2, sizes)),
        (3.0, (logits,), (theirs, *part)),
        (None, (2 * torch.tanh(logits / 2),), labo.TeacherHead(theirs, *part, softcap=2.0)),
    ]
    for reduction in ("mean", "none"):
        loss = LOSSES[name](reduction=reduction) if name != "stored" else None
        loss = loss or labo.TopKDistillationLoss(tail="labo", reduction=reduction)
        for softcap, whole, given in cases if name != "stored" else [(3.0, stored, stored)]:
            head_is_whole(world, loss, [hidden, weight], target, sizes, softcap, whole, given)


@on_processes(3)
def test_output_layers_as_dtensors(world: World) -> None:
    hidden, weight, _, target = head_example(23)
    theirs, taught, bias, _ = head_example(23)
    logits = nn.functional.linear(theirs, taught, bias)
    loss, standard = LOSSES["kd"](), labo.DistillationLoss(standardize=True)
    value, grads = dense_head(loss, [hidden, weight], target, None, (logits,), upstream=1.0)
    columns = world.placed(logits, Shard(2))
    parts = [world.placed(x, Shard(0)) for x in (taught, bias)]
    replicated = world.placed(theirs, Replicate())
    for teacher in (columns, (theirs, *parts), labo.TeacherHead(replicated, *parts)):
        leaf = world.placed(weight, Shard(0)).requires_grad_()
        found = labo.linear_loss(hidden, leaf, target, loss, teacher_logits=teacher)
        found.backward()
        close(found, value)
        close(leaf.grad.full_tensor(), grads[1])
    wrong_split = "must be a DTensor whose classes are split as those"
    for sentence, refused, teacher in (
        (wrong_split, loss, logits),
        (wrong_split, loss, (theirs, taught)),
        (wrong_split, loss, (theirs, parts[0], bias)),
        (wrong_split, loss, world.placed(logits, Shard(0))),
        ("DistillationLoss needs teacher_logits", loss, None),
        ("a loss that needs the norm or standard deviation", standard, columns),
    ):
        with pytest.raises(ValueError, match=sentence):
            labo.linear_loss(hidden, leaf, target, refused, teacher_logits=teacher)


def test_wrong_teachers_of_plain_columns():
    logits, target = torch.randn(3, 8), torch.tensor([0, 1, -100])
    for sentence, loss, given in (
        ("DistillationLoss needs teacher_logits", labo.DistillationLoss(), None),
        ("LABOLoss takes no teacher logits", labo.LABOLoss(), logits),
        ("must have the shape of the logits", labo.DistillationLoss(), logits[:, :5]),
        ("needs indices and log_prob", labo.TopKDistillationLoss(), None),
    ):
        with pytest.raises(ValueError, match=sentence):
            labo.parallel.logits_loss(logits, target, loss, teacher_logits=given)
    # Without a teacher, as in the first epoch.
    value = labo.parallel.logits_loss(logits, target, labo.PSKDLoss(epochs=2))
    torch.testing.assert_close(value, nn.functional.cross_entropy(logits, target))
