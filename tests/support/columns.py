"""Losses whose columns are split over processes, compared with one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import labo
from gloo import World

UPSTREAM = 1.7  # the gradient that arrives at the loss
# Of three processes, of which one may have nothing.
CUTS = [[9, 3, 11], [10, 0, 13]]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-3}
CHUNKS = labo.LinearLossOptions(batch_chunk_size=5)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in tensors]


def dense(
    loss: nn.Module, logits: Tensor, target: Tensor, *teacher: Tensor, upstream: float = UPSTREAM
) -> tuple[Tensor, Tensor]:
    """Value and gradient in one process."""
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, target, *teacher)
    value.backward(torch.full_like(value, upstream))
    return value.detach(), leaf.grad


def columns_are_whole(
    world: World,
    loss: nn.Module,
    logits: Tensor,
    target: Tensor,
    sizes: list[int],
    *teacher: Tensor,
    in_float32: float = 2e-5,
) -> None:
    """Value and gradient of columns in parts of these sizes; half types give float32 values.

    ``teacher`` are logits, which are split as well, or indices and values of stored classes.
    """
    value, grad = dense(loss, *wide(logits, target, *teacher))
    mine = world.share(logits, 1, sizes).clone().requires_grad_()
    before = mine.detach().clone()
    theirs = world.share(teacher[0], 1, sizes).clone() if len(teacher) == 1 else teacher or None
    found = labo.parallel.logits_loss(mine, target, loss, teacher_logits=theirs, group=world.group)
    assert found.dtype == torch.promote_types(logits.dtype, torch.float32)
    found.backward(torch.full_like(found, UPSTREAM))
    unit, slope = (max(1.0, float(x.abs().max())) for x in (value, grad))
    tolerance = TOLERANCE | {torch.float32: in_float32}
    close(found / unit, value / unit, tolerance[found.dtype])
    close(mine.grad / slope, world.share(grad, 1, sizes) / slope, tolerance[logits.dtype])
    assert torch.equal(mine.detach().nan_to_num(), before.nan_to_num())


def dtensor_is_whole(
    world: World,
    loss: nn.Module,
    logits: Tensor,
    target: Tensor,
    *teacher: Tensor,
    dim: int = 1,
    collectives: int | None = None,
) -> None:
    """The same of DTensors, with any number of collectives in the forward pass or with so many."""
    value, grad = dense(loss, logits, target, *teacher)
    leaf = world.placed(logits, Shard(dim)).requires_grad_()
    theirs = [world.placed(x, Shard(dim)) for x in teacher] if len(teacher) == 1 else teacher
    with CommDebugMode() as counted:
        found = loss(leaf, target, *theirs)
    assert collectives in (None, counted.get_total_counts())
    assert type(found) is Tensor
    found.backward(torch.full_like(found, UPSTREAM))
    close(found, value, TOLERANCE[logits.dtype])
    assert leaf.grad.placements == (Shard(dim),)
    close(leaf.grad.full_tensor(), grad, TOLERANCE[logits.dtype])
    with torch.no_grad():
        again = loss(leaf, world.placed(target, Replicate()), *theirs)
        close(again, value, TOLERANCE[logits.dtype])


def head_example(classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias of an output layer, and targets."""
    hidden = torch.randn(3, 4, 6, dtype=torch.float64)
    weight, bias = torch.randn(classes, 6).double(), torch.randn(classes).double()
    target = torch.randint(classes, (3, 4))
    target[0, :2] = torch.tensor([classes - 1, -100])
    target[1] = 0
    return hidden, weight, bias, target


def dense_head(
    loss: nn.Module,
    tensors: list[Tensor],
    target: Tensor,
    softcap: float | None = None,
    teacher: tuple[Tensor, ...] = (),
    upstream: float = UPSTREAM,
) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients of hidden states, weight and bias, if there is one."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    logits = nn.functional.linear(*leaves)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    value = loss(logits, target, *teacher)
    value.backward(torch.full_like(value, upstream))
    return value.detach(), [x.grad for x in leaves]


def head_is_whole(
    world: World,
    loss: nn.Module,
    tensors: list[Tensor],
    target: Tensor,
    sizes: list[int],
    softcap: float | None = None,
    teacher: tuple[Tensor, ...] = (),
    theirs: object = None,
) -> None:
    """The loss of an output layer whose rows are split; ``theirs`` is this process's teacher."""
    value, grads = dense_head(loss, wide(*tensors), target, softcap, teacher)
    mine = [tensors[0], *(world.share(x, 0, sizes) for x in tensors[1:])]
    mine = [x.clone().requires_grad_() for x in mine]
    found, metrics = labo.parallel.linear_loss(
        mine[0],
        mine[1],
        target,
        loss,
        linear_bias=mine[2] if len(mine) > 2 else None,
        softcap=softcap,
        teacher_logits=theirs,
        return_metrics=True,
        group=world.group,
        options=CHUNKS,
    )
    found.backward(torch.full_like(found, UPSTREAM))
    tolerance = TOLERANCE[tensors[0].dtype]
    close(found, value, tolerance)
    assert metrics.targets == (target != -100).sum()
    size = max(1.0, float(grads[1].abs().max()))
    wanted = [grads[0], *(world.share(x, 0, sizes) for x in grads[1:])]
    for ours, other in zip(mine, wanted, strict=True):
        close(ours.grad / size, other / size, tolerance)
