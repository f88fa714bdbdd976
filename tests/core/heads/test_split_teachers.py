"""Losses with a teacher whose columns are split over processes, against one process (split.py)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import labo
from gloo import World
from probes import LargestTensor

SIZES = [[19, 4], [9, 3, 11], [10, 0, 13]]
ROWS, WIDTH = 12, 6


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


def example(classes: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
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
    value.backward(torch.full_like(value, 1.7))
    return value.detach(), leaf.grad


def columns_case(
    world: World, name: str, sizes: list[int], scale: float, in_float32: float = 3e-5
) -> None:
    logits, taught, target = example(sum(sizes), scale)
    if name == "reverse":  # infinite where the teacher alone has masked a class, see below
        taught[(taught == -math.inf) & (logits != -math.inf)] = -50 * scale
    weights = torch.rand(sum(sizes), dtype=torch.float64) + 0.5
    for weight in (None, weights):
        for reduction in ("mean", "none"):
            loss = LOSSES[name](weight=weight, reduction=reduction)
            for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, in_float32)):
                rounded = [x.to(dtype) for x in (logits, taught)]
                value, grad = dense(loss, rounded[0].double(), target, rounded[1].double())
                mine, theirs = (world.share(x, 1, sizes).clone() for x in rounded)
                leaf = mine.requires_grad_()
                found = labo.parallel.logits_loss(
                    leaf, target, loss, teacher_logits=theirs, group=world.group
                )
                found.backward(torch.full_like(found, 1.7))
                unit = max(1.0, float(value.abs().max()))
                close(found / unit, value / unit, tolerance)
                slope = max(1.0, float(grad.abs().max()))
                close(leaf.grad / slope, world.share(grad, 1, sizes) / slope, tolerance)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_columns_of_a_teacher(processes, name, sizes):
    processes.run(len(sizes), columns_case, name, sizes, 3.0)


# Whole rows in float32 have the same error for KL(p || t): differences of logits are factors there.
@pytest.mark.parametrize(
    ("name", "in_float32"), [("kd", 3e-5), ("reverse", 3e-4), ("jsd", 3e-5), ("dkd", 3e-5)]
)
def test_large_logits(processes, name, in_float32):
    processes.run(2, columns_case, name, [19, 4], 300.0, in_float32)


def masked_by_the_teacher_case(world: World) -> None:
    """KL(p || t) is infinite if p has such a class, and not if p underflows there."""
    logits, taught = torch.randn(2, 2, 10, dtype=torch.float64)
    taught[:, 2] = -math.inf
    logits[1, :5] -= 5000.0
    loss, target = diverging("reverse", reduction="none"), torch.tensor([7, 8])
    value, grad = dense(loss, logits, target, taught)
    assert value.isinf().tolist() == [True, False]
    mine, theirs = (world.share(x, 1).clone() for x in (logits, taught))
    leaf = mine.requires_grad_()
    found = labo.parallel.logits_loss(leaf, target, loss, teacher_logits=theirs, group=world.group)
    found.sum().backward()
    close(found, value)
    close(1.7 * leaf.grad[1], world.share(grad, 1)[1])


def test_classes_that_the_teacher_alone_has_masked(processes):
    processes.run(2, masked_by_the_teacher_case)


def stored_case(world: World, tail: str, sizes: list[int]) -> None:
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
            found.backward(torch.full_like(found, 1.7))
            close(found, value, tolerance)
            close(leaf.grad, world.share(grad, 1, sizes), tolerance)
            assert torch.equal(leaf.detach().nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_stored_classes(processes, tail, sizes):
    processes.run(len(sizes), stored_case, tail, sizes)


def dtensor_case(world: World, name: str) -> None:
    logits, taught, target = example(23)
    taught.masked_fill_(taught == -math.inf, -150.0)
    loss = LOSSES[name]()
    value, grad = dense(loss, logits, target, taught)
    leaf, theirs = (distribute_tensor(x, world.mesh, [Shard(1)]) for x in (logits, taught))
    leaf.requires_grad_()
    with CommDebugMode() as counted:
        found = loss(leaf, target, theirs)
    assert counted.get_total_counts() == (3 if name == "jsd" else 2)
    found.backward(torch.full_like(found, 1.7))
    close(found, value)
    close(leaf.grad.full_tensor(), grad)
    with torch.no_grad():
        close(labo.parallel.logits_loss(leaf, target, loss, teacher_logits=theirs), value)
    moved = [x.unsqueeze(0).movedim(-1, 1) for x in (logits, taught)]
    moved = [distribute_tensor(x, world.mesh, [Shard(1)]) for x in moved]
    close(LOSSES[name](dim=1)(moved[0], target.unsqueeze(0), moved[1]), value)
    whole = distribute_tensor(taught, world.mesh, [Replicate()])
    for wrong in (taught, whole, distribute_tensor(taught, world.mesh, [Shard(0)])):
        with pytest.raises(ValueError, match=r"_logits must be a DTensor whose classes are split"):
            loss(leaf, target, wrong)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["kd", "reverse", "jsd", "dkd", "ps-kd"])
def test_dtensors(processes, name, size):
    processes.run(size, dtensor_case, name)


def stored_dtensor_case(world: World) -> None:
    logits, taught, target = example(23)
    stored = taught.nan_to_num(0.0).log_softmax(-1).topk(5)
    loss = labo.TopKDistillationLoss()
    value, grad = dense(loss, logits, target, stored.indices, stored.values)
    leaf = distribute_tensor(logits, world.mesh, [Shard(1)]).requires_grad_()
    found = loss(leaf, target, stored.indices, stored.values)
    found.backward(torch.full_like(found, 1.7))
    close(found, value)
    close(leaf.grad.full_tensor(), grad)
    with pytest.raises(ValueError, match="an entry of indices is not below the 23 classes"):
        loss(leaf, target, stored.indices + 23, stored.values)


def test_stored_classes_beside_dtensors(processes):
    processes.run(2, stored_dtensor_case)


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


def head_case(world: World, name: str, sizes: list[int]) -> None:
    hidden, weight, theirs, taught, bias, target = head_example(sum(sizes))
    logits = nn.functional.linear(theirs, taught, bias)
    options = labo.LinearLossOptions(batch_chunk_size=5)
    top = logits.log_softmax(-1).topk(4)
    part = [world.share(x, 0, sizes) for x in (taught, bias)]
    teachers = {
        "logits": world.share(logits, 2, sizes),
        "layer": (theirs, *part),
        "head": labo.TeacherHead(theirs, *part, softcap=2.0),
    }
    for reduction in ("mean", "none"):
        for how, softcap in (("logits", None), ("layer", 3.0), ("head", None)):
            if name == "stored":
                loss = labo.TopKDistillationLoss(tail="labo", reduction=reduction)
                whole, given = (top.indices, top.values), (top.indices, top.values)
            else:
                loss, given = LOSSES[name](reduction=reduction), teachers[how]
                whole = (2 * torch.tanh(logits / 2),) if how == "head" else (logits,)
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
                options=options,
            )
            found.sum().backward()
            close(found, value)
            close(mine[0].grad, grads[0])
            close(mine[1].grad, world.share(grads[1], 0, sizes))
            assert metrics.targets == (target != -100).sum()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["kd", "reverse", "jsd", "dkd", "ps-kd", "stored"])
def test_output_layers(processes, name, sizes):
    processes.run(len(sizes), head_case, name, sizes)


def dtensor_head_case(world: World) -> None:
    hidden, weight, theirs, taught, bias, target = head_example(23)
    logits = nn.functional.linear(theirs, taught, bias)
    loss = LOSSES["kd"]()
    value, grads = wanted_of(loss, hidden, weight, target, (logits,), None)

    def placed(x: Tensor, how) -> Tensor:
        return distribute_tensor(x, world.mesh, [how])

    parts = [placed(x, Shard(0)) for x in (taught, bias)]
    for teacher in (
        placed(logits, Shard(2)),
        (theirs, *parts),
        labo.TeacherHead(placed(theirs, Replicate()), *parts),
    ):
        leaf = placed(weight, Shard(0)).requires_grad_()
        found = labo.linear_loss(hidden, leaf, target, loss, teacher_logits=teacher)
        found.backward()
        close(found, value)
        close(leaf.grad.full_tensor(), grads[1])
    for wrong in (logits, (theirs, taught), (theirs, parts[0], bias), placed(logits, Shard(0))):
        with pytest.raises(ValueError, match="must be a DTensor whose classes are split as those"):
            labo.linear_loss(hidden, leaf, target, loss, teacher_logits=wrong)
    with pytest.raises(ValueError, match="DistillationLoss needs teacher_logits"):
        labo.linear_loss(hidden, leaf, target, loss)
    with pytest.raises(ValueError, match="a loss that needs the norm or standard deviation"):
        labo.linear_loss(
            hidden,
            leaf,
            target,
            labo.DistillationLoss(standardize=True),
            teacher_logits=placed(logits, Shard(2)),
        )


@pytest.mark.parametrize("size", [2, 3])
def test_output_layers_as_dtensors(processes, size):
    processes.run(size, dtensor_head_case)


def no_logits_case(world: World) -> int:
    hidden, theirs = torch.randn(2, 64, 4)
    weight, taught = (world.share(torch.randn(500, 4), 0).clone() for _ in range(2))
    target = torch.randint(500, (64,))
    options = labo.LinearLossOptions(batch_chunk_size=8)
    with LargestTensor() as probe:
        labo.parallel.linear_loss(
            hidden,
            weight.requires_grad_(),
            target,
            labo.DistillationLoss(),
            teacher_logits=(theirs, taught),
            group=world.group,
            options=options,
        ).backward()
    return probe.largest


def test_logits_of_a_teacher_never_exist(processes):
    assert max(processes.run(2, no_logits_case)) < 64 * 250


def test_wrong_teachers_of_plain_columns():
    logits, target = torch.randn(3, 8), torch.tensor([0, 1, -100])

    def refused(sentence: str, loss: nn.Module, **given) -> None:
        with pytest.raises(ValueError, match=sentence):
            labo.parallel.logits_loss(logits, target, loss, **given)

    refused("DistillationLoss needs teacher_logits", labo.DistillationLoss())
    refused("LABOLoss takes no teacher logits", labo.LABOLoss(), teacher_logits=logits)
    refused(
        "teacher_logits must have the shape of the logits",
        labo.DistillationLoss(),
        teacher_logits=logits[:, :5],
    )
    refused("needs indices and log_prob", labo.TopKDistillationLoss())
    # Without a teacher, as in the first epoch.
    value = labo.parallel.logits_loss(logits, target, labo.PSKDLoss(epochs=2))
    torch.testing.assert_close(value, nn.functional.cross_entropy(logits, target))
