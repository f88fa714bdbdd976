"""Losses with a teacher whose columns are split over processes, against one process (split.py)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import labo
from gloo import World, on_processes
from probes import LargestTensor

# Of three processes, of which one may have nothing.
each_cut = pytest.mark.parametrize("sizes", [[9, 3, 11], [10, 0, 13]], ids=str)
ROWS, WIDTH, UPSTREAM = 12, 6, 1.7


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


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


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


def dense(loss: nn.Module, logits: Tensor, target: Tensor, *teacher: Tensor):
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, target, *teacher)
    value.backward(torch.full_like(value, UPSTREAM))
    return value.detach(), leaf.grad


def columns_are_whole(world: World, name: str, sizes, scale=3.0, in_float32=3e-5) -> None:
    logits, taught, target = example(sum(sizes), scale)
    if name == "reverse":  # infinite where the teacher alone has masked a class, see below
        taught[(taught == -math.inf) & (logits != -math.inf)] = -50 * scale
    weights = torch.rand(sum(sizes), dtype=torch.float64) + 0.5
    for weight, reduction in ((None, "mean"), (weights, "none"), (weights, "mean")):
        loss = LOSSES[name](weight=weight, reduction=reduction)
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, in_float32)):
            rounded = [x.to(dtype) for x in (logits, taught)]
            value, grad = dense(loss, rounded[0].double(), target, rounded[1].double())
            leaf, theirs = (world.share(x, 1, sizes).clone() for x in rounded)
            leaf.requires_grad_()
            found = labo.parallel.logits_loss(
                leaf, target, loss, teacher_logits=theirs, group=world.group
            )
            found.backward(torch.full_like(found, UPSTREAM))
            unit, slope = (max(1.0, float(x.abs().max())) for x in (value, grad))
            close(found / unit, value / unit, tolerance)
            close(leaf.grad / slope, world.share(grad, 1, sizes) / slope, tolerance)


@pytest.mark.parametrize("name", LOSSES)
@on_processes(3)
def test_columns_of_a_teacher(world: World, name) -> None:
    for sizes in ([9, 3, 11], [10, 0, 13]):
        columns_are_whole(world, name, sizes)


# Whole rows in float32 have the same error for KL(p || t): differences of logits are factors there.
@pytest.mark.parametrize(
    ("name", "in_float32"), [("kd", 3e-5), ("reverse", 3e-4), ("jsd", 3e-5), ("dkd", 3e-5)]
)
@on_processes(2)
def test_large_logits(world: World, name, in_float32) -> None:
    columns_are_whole(world, name, [19, 4], 300.0, in_float32)


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
        value, grad = dense(loss, logits, target, index, log_t)
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-5)):
            leaf = world.share(logits, 1, sizes).to(dtype).requires_grad_()
            before = leaf.detach().clone()
            found = labo.parallel.logits_loss(
                leaf, target, loss, teacher_logits=(index, log_t), group=world.group
            )
            found.backward(torch.full_like(found, UPSTREAM))
            close(found, value, tolerance)
            close(leaf.grad, world.share(grad, 1, sizes), tolerance)
            assert torch.equal(leaf.detach().nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("name", ["kd", "jsd", "ps-kd"])
@on_processes(2, 3)
def test_dtensors(world: World, name) -> None:
    logits, taught, target = example()
    taught.masked_fill_(taught == -math.inf, -150.0)
    loss = LOSSES[name]()
    value, grad = dense(loss, logits, target, taught)
    leaf, theirs = (world.placed(x, Shard(1)) for x in (logits, taught))
    leaf.requires_grad_()
    with CommDebugMode() as counted:
        found = loss(leaf, target, theirs)
    assert counted.get_total_counts() == (3 if name == "jsd" else 2)
    found.backward(torch.full_like(found, UPSTREAM))
    close(found, value)
    close(leaf.grad.full_tensor(), grad)
    with torch.no_grad():
        close(labo.parallel.logits_loss(leaf, target, loss, teacher_logits=theirs), value)
    moved = [world.placed(x.unsqueeze(0).movedim(-1, 1), Shard(1)) for x in (logits, taught)]
    close(LOSSES[name](dim=1)(moved[0], target.unsqueeze(0), moved[1]), value)
    for wrong in (taught, world.placed(taught, Replicate()), world.placed(taught, Shard(0))):
        with pytest.raises(ValueError, match=r"_logits must be a DTensor whose classes are split"):
            loss(leaf, target, wrong)


@on_processes(2)
def test_stored_classes_beside_dtensors(world: World) -> None:
    logits, taught, target = example()
    stored = taught.nan_to_num(0.0).log_softmax(-1).topk(5)
    loss = labo.TopKDistillationLoss()
    value, grad = dense(loss, logits, target, stored.indices, stored.values)
    leaf = world.placed(logits, Shard(1)).requires_grad_()
    found = loss(leaf, target, stored.indices, stored.values)
    found.backward(torch.full_like(found, UPSTREAM))
    close(found, value)
    close(leaf.grad.full_tensor(), grad)
    with pytest.raises(ValueError, match="an entry of indices is not below the 23 classes"):
        loss(leaf, target, stored.indices + 23, stored.values)


# ------------------------------------------------------------------ output layers


def head_example(classes: int) -> tuple[Tensor, ...]:
    hidden, theirs = torch.randn(2, 3, 4, WIDTH, dtype=torch.float64)
    weight, taught = torch.randn(2, classes, WIDTH, dtype=torch.float64)
    bias = torch.randn(classes, dtype=torch.float64)
    target = torch.randint(classes, (3, 4))
    target[0, :2] = torch.tensor([classes - 1, -100])
    return hidden, weight, theirs, taught, bias, target


def wanted_of(loss, hidden, weight, target, teacher, softcap):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    logits = nn.functional.linear(*leaves)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    value = loss(logits, target, *teacher)
    value.sum().backward()
    return value.detach(), [x.grad for x in leaves]


@each_cut
@pytest.mark.parametrize("name", ["kd", "jsd", "ps-kd", "stored"])
@on_processes(3)
def test_output_layers(world: World, name, sizes) -> None:
    hidden, weight, theirs, taught, bias, target = head_example(sum(sizes))
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
            value, grads = wanted_of(loss, hidden, weight, target, whole, softcap)
            mine = [hidden.clone(), world.share(weight, 0, sizes).clone()]
            for x in mine:
                x.requires_grad_()
            found, metrics = labo.parallel.linear_loss(
                mine[0],
                mine[1],
                target,
                loss,
                softcap=softcap,
                teacher_logits=given,
                return_metrics=True,
                group=world.group,
                options=labo.LinearLossOptions(batch_chunk_size=5),
            )
            found.sum().backward()
            close(found, value)
            close(mine[0].grad, grads[0])
            close(mine[1].grad, world.share(grads[1], 0, sizes))
            assert metrics.targets == (target != -100).sum()


@on_processes(2, 3)
def test_output_layers_as_dtensors(world: World) -> None:
    hidden, weight, theirs, taught, bias, target = head_example(23)
    logits = nn.functional.linear(theirs, taught, bias)
    loss, standard = LOSSES["kd"](), labo.DistillationLoss(standardize=True)
    value, grads = wanted_of(loss, hidden, weight, target, (logits,), None)
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


@on_processes(2)
def test_logits_of_a_teacher_never_exist(world: World) -> None:
    hidden, theirs = torch.randn(2, 64, 4)
    weight, taught = (world.share(torch.randn(500, 4), 0).clone() for _ in range(2))
    target, loss = torch.randint(500, (64,)), labo.DistillationLoss()
    options = {"options": labo.LinearLossOptions(batch_chunk_size=8), "group": world.group}
    with LargestTensor() as probe:
        labo.parallel.linear_loss(
            hidden,
            weight.requires_grad_(),
            target,
            loss,
            teacher_logits=(theirs, taught),
            **options,
        ).backward()
    assert probe.largest < 64 * 250


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
