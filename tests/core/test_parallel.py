"""Losses and heads whose columns or parameters are split over processes, against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import labo
from gloo import Processes, World
from labo.fast import blocked, kernels, native
from labo.fast.columns import SUMS
from labo.fast.formula import differentiate, entries_of, masses_of, plan_of, u_of
from labo.heads import split as shards
from labo.heads.quantized import QuantizedWeight

# Without a GPU the Triton kernels run in the interpreter, which conftest.py chooses.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LOSSES = {
    "ce": lambda **shared: labo.CrossEntropyLoss(**shared),
    "ls": lambda **shared: labo.LabelSmoothingLoss(alpha=0.2, **shared),
    "labo": lambda **shared: labo.LABOLoss(**shared),
    "labo-fixed": lambda **shared: labo.LABOLoss(alpha=0.3, tau=2.0, **shared),
}
# One for each kind of sum that a formula asks for.
FORMULA_LOSSES = {
    "fl": lambda k, **shared: labo.FocalLoss(gamma=2.0, **shared),
    "ls-z": lambda k, **shared: labo.LabelSmoothingLoss(z_loss=1e-2, **shared),
    "ls-fairseq": lambda k, **shared: labo.LabelSmoothingLoss(convention="fairseq", **shared),
    "cp": lambda k, **shared: labo.ConfidencePenaltyLoss(beta=0.5, **shared),
    "eaft": lambda k, **shared: labo.EAFTLoss(**shared),
    "ger": lambda k, **shared: labo.GeneralizedEntropyLoss(**shared),
    "maxsup": lambda k, **shared: labo.MaxSuppressionLoss(lam=0.5, **shared),
    "tfreg": lambda k, **shared: labo.TFRegLoss(mode="paper", alpha=0.5, **shared),
    "mls": lambda k, **shared: labo.MaskedLabelSmoothingLoss(torch.arange(k) % 3 != 1, **shared),
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-3}
REDUCTIONS = ("mean", "sum", "none")

each_loss = pytest.mark.parametrize("name", LOSSES)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda x: str(x)[6:])
each_size = pytest.mark.parametrize("size", [2, 3])


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    started = Processes(3, tmp_path_factory.mktemp("gloo"))
    yield started
    started.stop()


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float64) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def example(classes: int = 23, rows: int = 12, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits and targets: ignored rows, and masked classes in the first columns only."""
    logits = torch.randn(rows, classes, dtype=torch.float64) * scale
    target = torch.randint(classes, (rows,))
    target[:2] = torch.tensor([0, classes - 1])
    logits[3, 1:3] = -math.inf
    logits[4, : classes // 3] = -math.inf
    target[3:5] = classes - 1
    target[[5, -1]] = -100
    logits[5] = math.nan
    return logits, target


def dense(
    loss: nn.Module, logits: Tensor, target: Tensor, upstream: float
) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, target)
    value.backward(torch.full_like(value, upstream))
    return value.detach(), leaf.grad


# ------------------------------------------------------------------ logits


def logits_case(
    world: World, name: str, dtype: torch.dtype, scale: float, sizes: list[int]
) -> None:
    logits, target = example(sum(sizes), scale=scale)
    logits = logits.to(dtype)
    weights = torch.rand(sum(sizes), dtype=torch.float64) + 0.5
    for weight in (None, weights):
        for reduction in REDUCTIONS:
            loss = LOSSES[name](weight=weight, reduction=reduction)
            value, grad = dense(loss, logits.double(), target, upstream=1.7)
            mine = world.share(logits, 1, sizes).clone().requires_grad_()
            found = labo.parallel.logits_loss(mine, target, loss, group=world.group)
            assert found.dtype == torch.promote_types(dtype, torch.float32)
            found.backward(torch.full_like(found, 1.7))
            tolerance = max(1.0, float(value.abs().max()))
            close(found / tolerance, value / tolerance, min_dtype(dtype))
            close(mine.grad, world.share(grad, 1, sizes), dtype)


def min_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values come: half types are computed in float32."""
    return torch.promote_types(dtype, torch.float32)


@each_loss
@each_dtype
@pytest.mark.parametrize("scale", [3.0, 1000.0])
def test_columns_of_plain_logits(processes, name, dtype, scale):
    processes.run(2, logits_case, name, dtype, scale, [19, 4])


@pytest.mark.parametrize("sizes", [[12, 12], [9, 3, 11], [10, 0, 13]], ids=str)
@pytest.mark.parametrize("scale", [3.0, 1000.0])
def test_cuts_of_plain_logits(processes, scale, sizes):
    processes.run(len(sizes), logits_case, "labo", torch.float64, scale, sizes)


def formula_case(world: World, name: str, sizes: list[int]) -> None:
    """Columns of logits, plain and as DTensors, and rows of a weight."""
    classes = sum(sizes)
    logits, target = example(classes)
    logits[6, [2, classes - 1]] = 30.0  # a tie of the largest logits of two processes
    hidden, matrix = torch.randn(12, 6, dtype=torch.float64), torch.randn(classes, 6).double()
    for weight in (None, torch.rand(classes, dtype=torch.float64) + 0.5):
        loss = FORMULA_LOSSES[name](classes, weight=weight, reduction="none")
        value, grad = dense(loss, logits, target, upstream=1.7)
        for dtype in (torch.float64, torch.float32):
            mine = world.share(logits, 1, sizes).to(dtype).requires_grad_()
            found = labo.parallel.logits_loss(mine, target, loss, group=world.group)
            found.backward(torch.full_like(found, 1.7))
            close(found, value, dtype)
            close(mine.grad, world.share(grad, 1, sizes), dtype)
        columns = distribute_tensor(logits, world.mesh, [Shard(1)])
        close(loss(columns, target), value)
        head = world.share(matrix, 0, sizes).clone().requires_grad_()
        found = labo.parallel.linear_loss(hidden, head, target, loss, group=world.group)
        whole = matrix.clone().requires_grad_()
        wanted = loss(hidden @ whole.T, target)
        close(found, wanted)
        frozen = QuantizedWeight(lambda first, last, head=head: head[first:last], head.shape)
        close(labo.parallel.linear_loss(hidden, frozen, target, loss, group=world.group), wanted)
        (d_head,) = torch.autograd.grad(found.sum(), head)
        (d_whole,) = torch.autograd.grad(wanted.sum(), whole)
        close(d_head, world.share(d_whole, 0, sizes))


@pytest.mark.parametrize("name", FORMULA_LOSSES)
def test_losses_that_are_formulas(processes, name):
    processes.run(2, formula_case, name, [19, 4])


def dtensor_case(world: World, name: str, classes: int) -> None:
    logits, target = example(classes)
    for reduction in REDUCTIONS:
        loss = LOSSES[name](reduction=reduction)
        value, grad = dense(loss, logits, target, upstream=0.6)
        leaf = distribute_tensor(logits, world.mesh, [Shard(1)]).requires_grad_()
        found = loss(leaf, target)
        assert type(found) is Tensor
        found.backward(torch.full_like(found, 0.6))
        close(found, value)
        assert leaf.grad.placements == (Shard(1),)
        close(leaf.grad.full_tensor(), grad)
        with torch.no_grad():
            close(loss(leaf, distribute_tensor(target, world.mesh, [Replicate()])), value)


@each_loss
@each_size
def test_dtensor_logits(processes, name, size):
    processes.run(size, dtensor_case, name, 23)


@each_size
def test_fewer_columns_than_processes(processes, size):
    processes.run(size, dtensor_case, "labo", 5)
    processes.run(3, few_columns_case)


def few_columns_case(world: World) -> None:
    logits, target = torch.randn(4, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    leaf = distribute_tensor(logits, world.mesh, [Shard(1)])
    assert leaf.to_local().shape[1] == (1 if world.rank < 2 else 0)
    close(labo.LABOLoss()(leaf, target), labo.LABOLoss()(logits, target))


def layout_case(world: World) -> None:
    """Sequences, and classes in dimension 1."""
    logits, target = torch.randn(2, 5, 13, dtype=torch.float64), torch.randint(13, (2, 5))
    for dim in (-1, 1):
        loss = labo.LABOLoss(dim=dim, reduction="none")
        moved = logits.movedim(-1, dim)
        value, grad = dense(loss, moved, target, upstream=1.0)
        leaf = distribute_tensor(moved, world.mesh, [Shard(dim % 3)]).requires_grad_()
        found = loss(leaf, target)
        found.sum().backward()
        close(found, value)
        close(leaf.grad.full_tensor(), grad)


def test_layouts(processes):
    processes.run(2, layout_case)


def masked_target_case(world: World, name: str) -> None:
    """The target itself is masked: an infinite value, in one process as in many."""
    logits, target = torch.randn(3, 8), torch.tensor([1, 6, 3])
    logits[0, 1] = logits[1, 6] = -math.inf
    loss = LOSSES[name](reduction="none")
    value, grad = dense(loss, logits, target, upstream=1.0)
    assert value[:2].isinf().all()
    leaf = distribute_tensor(logits, world.mesh, [Shard(1)]).requires_grad_()
    found = loss(leaf, target)
    found.sum().backward()
    close(found, value, torch.float32)
    close(leaf.grad.full_tensor(), grad, torch.float32)


@each_loss
def test_a_masked_target(processes, name):
    processes.run(2, masked_target_case, name)


def nothing_counts_case(world: World) -> None:
    logits = torch.randn(3, 8, dtype=torch.float64)
    for rows, target in ((3, torch.full((3,), -100)), (0, torch.empty(0, dtype=torch.long))):
        leaf = distribute_tensor(logits[:rows], world.mesh, [Shard(1)]).requires_grad_()
        value = labo.LABOLoss()(leaf, target)
        value.backward()
        assert value.item() == 0
        assert leaf.grad.to_local().eq(0).all()


def test_nothing_counts(processes):
    processes.run(2, nothing_counts_case)


def collectives_case(world: World) -> tuple[dict, dict]:
    logits, target = example()
    leaf = distribute_tensor(logits, world.mesh, [Shard(1)]).requires_grad_()
    forward, backward = CommDebugMode(), CommDebugMode()
    with forward:
        value = labo.LABOLoss(weight=torch.rand(23))(leaf, target)
    with backward:
        value.backward()
    counts = forward.get_comm_counts(), backward.get_comm_counts()
    return tuple({str(k): n for k, n in found.items()} for found in counts)


@each_size
def test_two_collectives_forward_and_none_backward(processes, size):
    for forward, backward in processes.run(size, collectives_case):
        assert sum(forward.values()) == 2
        assert "all_reduce" in next(iter(forward)).replace("allreduce", "all_reduce")
        assert sum(backward.values()) == 0


def test_no_coefficients_where_no_gradient_is_asked_for(monkeypatch):
    differentiated = []

    def recorded(loss, *sums):
        differentiated.append(loss)
        return differentiate(loss, *sums)

    monkeypatch.setattr(shards, "differentiate", recorded)
    logits, target = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 1, -100])
    hidden, loss = torch.randn(3, 4), labo.LABOLoss(reduction="none")
    with torch.no_grad():
        labo.parallel.logits_loss(logits, target, loss)
        labo.parallel.linear_loss(hidden, torch.randn(8, 4), target, loss)
    assert not differentiated
    labo.parallel.logits_loss(logits, target, loss).sum().backward()
    assert len(differentiated) == 1


def underflow_case(world: World) -> None:
    """Known wrong elsewhere: the K of the shard in the smoothing, the log of a softmax of 0."""
    logits = torch.zeros(1, 8)
    logits[0, 0] = 300.0
    target, loss = torch.tensor([0]), labo.LabelSmoothingLoss(alpha=0.1)
    mine = world.share(logits, 1)
    found = labo.parallel.logits_loss(mine, target, loss, group=world.group)
    wanted = torch.nn.functional.cross_entropy(logits.double(), target, label_smoothing=0.1)
    close(found, wanted, torch.float32)
    p, k = logits.softmax(1), mine.shape[1]
    as_elsewhere = 0.9 * -p[0, 0].log() - 0.1 / k * (p + 1e-20).log().sum()
    assert abs(as_elsewhere - wanted) > 1


def test_smoothing_uses_the_whole_vocabulary(processes):
    processes.run(2, underflow_case)


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6, dtype=torch.float64)
        self.output = nn.Linear(6, 23, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(x).tanh())


def speaker(world: World | None = None, local: bool = False) -> Speaker:
    torch.manual_seed(1)
    model = Speaker()
    if world is not None:
        plan = {"output": ColwiseParallel(use_local_output=local)}
        parallelize_module(model, world.mesh, plan)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]


def parallelized_case(world: World, local: bool, context: bool) -> None:
    x, (_, target) = torch.randn(12, 4, dtype=torch.float64), example()
    loss, one = labo.LABOLoss(), speaker()
    loss(one(x), target).backward()
    many = speaker(world, local)
    logits = many(x)
    if local:
        value = labo.parallel.logits_loss(logits, target, loss, group=world.group)
        value.backward()
    elif context:
        with loss_parallel():
            value = loss(logits, target)
            value.backward()
    else:
        loss(logits, target).backward()
    for found, wanted in zip(gradients(many), gradients(one), strict=True):
        close(found, wanted)


@pytest.mark.parametrize(("local", "context"), [(True, False), (False, False), (False, True)])
@each_size
def test_parallelize_module_and_loss_parallel(processes, size, local, context):
    processes.run(size, parallelized_case, local, context)


def replicated_case(world: World) -> None:
    """Every loss takes replicated DTensors."""
    logits, target = example()
    logits[5] = 0.0
    whole = distribute_tensor(logits, world.mesh, [Replicate()])
    for loss in (labo.LABOLoss(), labo.FocalLoss(), labo.ConfidencePenaltyLoss()):
        leaf = whole.detach().requires_grad_()
        value, grad = dense(loss, logits, target, upstream=1.0)
        found = loss(leaf, target)
        found.backward()
        close(found, value)
        close(leaf.grad.full_tensor(), grad)
    teacher = labo.DistillationLoss()
    close(teacher(whole, target, whole), teacher(logits, target, logits))


def test_replicated_logits(processes):
    processes.run(2, replicated_case)


def refused_case(world: World) -> None:
    logits, target = torch.randn(4, 10), torch.tensor([0, 1, 2, 9])
    columns = distribute_tensor(logits, world.mesh, [Shard(1)])
    rows = distribute_tensor(logits, world.mesh, [Shard(0)])
    partial = DTensor.from_local(logits, world.mesh, [Partial()])
    soft = logits.softmax(1)

    def refused(message: str, loss: nn.Module, x: Tensor, y: Tensor = target) -> None:
        with pytest.raises(ValueError, match=message):
            loss(x, y)

    refused("split over the classes .dim=-1. along one mesh", labo.LABOLoss(), rows)
    refused("split over the classes .dim=-1. along one mesh", labo.LABOLoss(), partial)
    refused("do not go with this loss", labo.KRLSLoss(10), columns)
    refused("do not go with alpha_grad=True", labo.LABOLoss(alpha_grad=True), columns)
    refused("a loss that needs a margin below the", labo.MarginSmoothingLoss(), columns)
    refused("a loss that needs the norm or standard deviation", labo.LogitNormLoss(), columns)
    refused("a loss that needs the largest logits", labo.EAFTLoss(top_k=2), columns)
    refused("do not go with class probabilities", labo.LABOLoss(), columns, soft)
    refused('do not go with impl="native"', labo.LABOLoss(impl="native"), columns)
    refused("do not go with inplace=True", labo.LABOLoss(inplace=True), columns)
    refused(
        "target must be a plain",
        labo.LABOLoss(),
        columns,
        DTensor.from_local(target, world.mesh, [Shard(0)]),
    )
    refused(r"target 10 at position 0 is outside \[0, 10\)", labo.LABOLoss(), columns, target + 10)
    refused(r"weight must have shape \(10,\)", labo.LABOLoss(weight=torch.ones(5)), columns)
    mine = world.share(logits, 1)
    with pytest.raises(ValueError, match=r"LABOLoss.* cannot work on logits that are split"):
        labo.parallel.logits_loss(mine, target, labo.LABOLoss(alpha_grad=True), group=world.group)
    with pytest.raises(ValueError, match="a loss that needs teacher logits"):
        labo.parallel.logits_loss(mine, target, labo.DistillationLoss(), group=world.group)
    with pytest.raises(ValueError, match="a loss that needs stored classes of a teacher"):
        labo.parallel.logits_loss(mine, target, labo.TopKDistillationLoss(), group=world.group)
    with pytest.raises(ValueError, match="class-index target must have shape"):
        labo.parallel.logits_loss(mine, target[:2], labo.LABOLoss(), group=world.group)
    with pytest.raises(ValueError, match="brings its own processes"):
        labo.parallel.logits_loss(columns, target, labo.LABOLoss(), group=world.group)


def test_what_is_refused(processes):
    processes.run(2, refused_case)


def compiled_case(world: World) -> None:
    logits, target = example()
    loss = labo.LABOLoss()
    leaf = distribute_tensor(logits, world.mesh, [Shard(1)]).requires_grad_()
    compiled = torch.compile(lambda x, y: loss(x, y) * 2, backend="eager")
    value, grad = dense(loss, logits, target, upstream=2.0)
    found = compiled(leaf, target)
    found.backward()
    close(found, 2 * value)
    close(leaf.grad.full_tensor(), grad)


def test_compiled(processes):
    processes.run(2, compiled_case)


# ------------------------------------------------------------------ backends


def shards_of(
    module: Any, logits: Tensor, target: Tensor, loss: nn.Module, cut: int
) -> tuple[Tensor, Tensor]:
    """Value of each row, and gradient, of columns in two parts, in this process."""
    weight = loss.weight
    plan = plan_of(loss, weight is not None)
    parts, starts = (logits[:, :cut], logits[:, cut:]), (0, cut)
    weights = (None, None) if weight is None else (weight[:cut], weight[cut:])
    sums = [
        dict(zip(SUMS, module.sums(part, target, plan, w, -100).unbind(1), strict=True))
        for part, w in zip(parts, weights, strict=True)
    ]
    maximum = torch.maximum(sums[0]["top"], sums[1]["top"])
    first, second = (shards._shifted(x, x["top"], maximum, plan) for x in sums)
    valid = target != -100
    y = target.masked_fill(~valid, 0)
    found = {name: torch.zeros_like(maximum) for name in SUMS} | {"top": maximum}
    found |= {name: first[name] + second[name] for name in first}
    z_y = entries_of(logits, y.unsqueeze(1)).squeeze(1)
    found["u_y"] = u_of(z_y, maximum, torch.finfo(torch.float32))
    found |= masses_of(plan, y, found["u_y"], None, maximum)
    w_y = 1.0 if weight is None else weight[y].double()
    values, coefficients = differentiate(loss, plan, found, w_y, y, logits.shape[1])
    coefficients = coefficients.masked_fill(~valid.unsqueeze(1), 0.0)
    grads = []
    for part, w, start in zip(parts, weights, starts, strict=True):
        column = (target - start).masked_fill(~valid, -100)
        column = column.masked_fill((column >= part.shape[1]) | (valid & (column < 0)), 1 << 40)
        out = torch.empty_like(part, memory_format=torch.contiguous_format)
        grads.append(module.gradient(part, column, plan, w, -100, None, coefficients, out))
    return values.masked_fill(~valid, 0.0), torch.cat(grads, 1)


@each_loss
@pytest.mark.parametrize("backend", [blocked, native, kernels], ids=lambda x: x.__name__[11:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("weighted", [False, True])
def test_backends(backend, name, dtype, weighted):
    """Parts of 23 and 50 columns, of 0 and 73, and of which one is masked."""
    logits, target = example(73)
    device = DEVICE if backend is kernels else "cpu"
    logits = logits.to(device, dtype)
    target = target.to(device)
    weight = torch.rand(73, device=device) + 0.5 if weighted else None
    loss = LOSSES[name](weight=weight, reduction="none")
    value, grad = dense(loss, logits.double(), target, upstream=1.0)
    for cut in (23, 0, 73 // 3):
        values, grads = shards_of(backend, logits, target, loss, cut)
        close(values, value, torch.float32)
        close(grads, grad, dtype)


# ------------------------------------------------------------------ output layer and loss


def head_example(classes: int, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    hidden = torch.randn(3, 4, 6, dtype=torch.float64)
    weight, offset = torch.randn(classes, 6).double(), torch.randn(classes).double()
    target = torch.randint(classes, (3, 4))
    target[0, :2] = torch.tensor([classes - 1, -100])
    target[1] = 0
    return hidden, weight, offset if bias else None, target


def dense_head(loss, hidden, weight, bias, target, softcap, upstream):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = nn.functional.linear(*leaves)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    value = loss(logits, target)
    value.backward(torch.full_like(value, upstream))
    return value.detach(), [x.grad for x in leaves]


def head_case(world: World, name: str, dtype: torch.dtype, sizes: list[int]) -> None:
    hidden, weight, bias, target = (
        x.to(dtype) if x.is_floating_point() else x for x in head_example(sum(sizes))
    )
    options = labo.LinearLossOptions(batch_chunk_size=5)
    for reduction in REDUCTIONS:
        for softcap in (None, 3.0):
            for class_weight in (None, torch.rand(sum(sizes)).double() + 0.5):
                loss = LOSSES[name](reduction=reduction, weight=class_weight)
                wide = (
                    x.double() if x.is_floating_point() else x
                    for x in (hidden, weight, bias, target)
                )
                value, grads = dense_head(loss, *wide, softcap, upstream=1.3)
                mine = [
                    hidden.clone(),
                    world.share(weight, 0, sizes).clone(),
                    world.share(bias, 0, sizes).clone(),
                ]
                for x in mine:
                    x.requires_grad_()
                found = labo.parallel.linear_loss(
                    mine[0],
                    mine[1],
                    target,
                    loss,
                    linear_bias=mine[2],
                    softcap=softcap,
                    group=world.group,
                    options=options,
                )
                found.backward(torch.full_like(found, 1.3))
                tolerance = torch.float32 if dtype == torch.float32 else dtype
                close(found, value, tolerance)
                scale = max(1.0, float(grads[1].abs().max()))
                close(mine[0].grad / scale, grads[0] / scale, tolerance)
                close(mine[1].grad / scale, world.share(grads[1], 0, sizes) / scale, tolerance)
                close(mine[2].grad / scale, world.share(grads[2], 0, sizes) / scale, tolerance)


@each_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("sizes", [[11, 12], [19, 4], [9, 0, 14]], ids=str)
def test_rows_of_a_plain_weight(processes, name, dtype, sizes):
    processes.run(len(sizes), head_case, name, dtype, sizes)


def dtensor_head_case(world: World, bias: bool, hidden_as: str) -> None:
    hidden, weight, offset, target = head_example(23, bias)
    loss = labo.LABOLoss()
    value, grads = dense_head(loss, hidden, weight, offset, target, None, upstream=0.7)
    leaves = [
        distribute_tensor(x, world.mesh, [Shard(0)]).requires_grad_()
        for x in (weight, offset)
        if x is not None
    ]
    placements = {"plain": None, "replicated": Replicate(), "sequence": Shard(1)}[hidden_as]
    if placements is None:
        leaf = hidden.clone().requires_grad_()
    else:
        leaf = distribute_tensor(hidden, world.mesh, [placements]).requires_grad_()
    found = labo.linear_loss(
        leaf,
        leaves[0],
        target,
        loss,
        linear_bias=leaves[1] if bias else None,
        options=labo.LinearLossOptions(batch_chunk_size=5),
    )
    found.backward(torch.tensor(0.7, dtype=torch.float64))
    close(found, value)
    for x, wanted in zip((leaf, *leaves), grads, strict=True):
        grad = x.grad
        if isinstance(grad, DTensor):
            assert grad.placements == x.placements or hidden_as == "replicated"
            grad = grad.full_tensor()
        close(grad, wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden_as", ["plain", "replicated", "sequence"])
@each_size
def test_dtensor_weight(processes, size, bias, hidden_as):
    processes.run(size, dtensor_head_case, bias, hidden_as)


def module_case(world: World) -> None:
    """A LinearLoss whose layer was split by parallelize_module."""
    hidden, _, _, target = head_example(23)
    torch.manual_seed(2)
    one = labo.LinearLoss(6, 23, labo.LABOLoss(), bias=True, dtype=torch.float64)
    torch.manual_seed(2)
    many = labo.LinearLoss(6, 23, labo.LABOLoss(), bias=True, dtype=torch.float64)
    parallelize_module(many, world.mesh, {"linear": ColwiseParallel()})
    close(many(hidden, target), one(hidden, target))
    one(hidden, target).backward()
    many(hidden, target).backward()
    for found, wanted in zip(gradients(many), gradients(one), strict=True):
        close(found, wanted)


@each_size
def test_linear_loss_module_after_parallelize_module(processes, size):
    processes.run(size, module_case)


def no_logits_case(world: World) -> int:
    from probes import LargestTensor

    hidden, weight, target = torch.randn(64, 4), torch.randn(500, 4), torch.randint(500, (64,))
    mine = world.share(weight, 0).clone().requires_grad_()
    hidden.requires_grad_()
    with LargestTensor() as probe:
        labo.parallel.linear_loss(
            hidden,
            mine,
            target,
            labo.LABOLoss(),
            group=world.group,
            options=labo.LinearLossOptions(batch_chunk_size=8),
        ).backward()
    return probe.largest


def test_a_sharded_head_never_has_its_logits(processes):
    assert max(processes.run(2, no_logits_case)) < 64 * 250


def head_collectives_case(world: World) -> tuple[int, int]:
    hidden, weight, target = torch.randn(64, 4), torch.randn(50, 4), torch.randint(50, (64,))
    mine = distribute_tensor(weight, world.mesh, [Shard(0)]).requires_grad_()
    hidden.requires_grad_()
    options = labo.LinearLossOptions(batch_chunk_size=16)
    counts = []
    labo.linear_loss(hidden, mine, target, labo.LABOLoss(), options=options)  # checks the targets
    for reduction in ("mean", "none"):
        loss = labo.LABOLoss(reduction=reduction)
        forward, backward = CommDebugMode(), CommDebugMode()
        with forward:
            value = labo.linear_loss(hidden, mine, target, loss, options=options)
        with backward:
            value.sum().backward()
        counts += [forward.get_total_counts(), backward.get_total_counts()]
    return tuple(counts)


def test_collectives_of_a_sharded_head(processes):
    """Two for each of four chunks, one for the gradient of the hidden states."""
    assert processes.run(2, head_collectives_case) == [(8, 1, 8, 1)] * 2


def frozen_case(world: World) -> None:
    hidden, weight, _, target = head_example(23)
    mine = distribute_tensor(weight, world.mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as counted:
        labo.linear_loss(hidden, mine, target, labo.LABOLoss()).backward()
    wanted = dense_head(labo.LABOLoss(), hidden, weight, None, target, None, 1.0)[1][1]
    close(mine.grad.full_tensor(), wanted)
    assert hidden.grad is None
    assert counted.get_total_counts() <= 3
    with torch.no_grad():
        found = labo.linear_loss(hidden, mine, target, labo.LABOLoss())
    close(found, labo.linear_loss(hidden, weight, target, labo.LABOLoss()))


def test_gradients_that_nobody_needs(processes):
    processes.run(2, frozen_case)


def refused_head_case(world: World) -> None:
    hidden, weight, bias, target = head_example(24)
    rows = distribute_tensor(weight, world.mesh, [Shard(0)])
    columns = distribute_tensor(weight, world.mesh, [Shard(1)])
    loss = labo.LABOLoss()
    with pytest.raises(ValueError, match=r"split over the classes \(Shard\(0\)\)"):
        labo.linear_loss(hidden, columns, target, loss)
    with pytest.raises(ValueError, match="linear_bias must be a DTensor that is split as"):
        labo.linear_loss(hidden, rows, target, loss, linear_bias=bias)
    with pytest.raises(ValueError, match="cannot work on logits that are split"):
        labo.linear_loss(hidden, rows, target, labo.LABOLoss(alpha_grad=True))
    with pytest.raises(ValueError, match="a split linear_weight goes with"):
        labo.linear_loss(hidden, rows, target, loss, impl="native")
    with pytest.raises(ValueError, match="takes plain tensors"):
        labo.parallel.linear_loss(hidden, rows, target, loss)
    low = {"base": weight, "a": torch.ones(2, 6).double(), "b": torch.ones(24, 2).double()}
    for name, x in low.items():
        for placement in (Shard(0), Replicate()):
            split = low | {name: distribute_tensor(x, world.mesh, [placement])}
            with pytest.raises(ValueError, match=rf"{name} of a LowRank.*gather_weight\({name}\)"):
                labo.LowRankWeight(**split, scale=1.0)
    shards._SAME_ROWS.clear()
    with pytest.raises(ValueError, match=r"have different targets.*gather_weight"):
        labo.linear_loss(hidden, rows, (target + world.rank).clamp(0, 23), loss)
    with pytest.raises(ValueError, match=r"have different targets.*gather_weight"):
        labo.linear_loss(hidden[: 1 + world.rank], rows, target[: 1 + world.rank], loss)
    close(
        labo.linear_loss(hidden, rows, target, loss), labo.linear_loss(hidden, weight, target, loss)
    )


def test_what_a_sharded_head_refuses(processes):
    processes.run(2, refused_head_case)


def replicated_rows_case(world: World) -> None:
    """What there is for each row may be a replicated DTensor, whatever the weight is."""
    hidden, weight, _, target = head_example(24)
    loss, token_weight = labo.LABOLoss(), torch.linspace(0.5, 2, target.numel()).view_as(target)
    whole = [distribute_tensor(x, world.mesh, [Replicate()]) for x in (target, token_weight)]
    wanted = labo.linear_loss(hidden, weight, target, loss, token_weight=token_weight)
    close(labo.linear_loss(hidden, weight, whole[0], loss, token_weight=whole[1]), wanted)
    close(labo.linear_loss(hidden, weight, target, loss, token_weight=whole[1]), wanted)
    mine = world.share(weight, 0)
    found = labo.parallel.linear_loss(
        hidden, mine, whole[0], loss, token_weight=whole[1], group=world.group
    )
    close(found, wanted)
    split = [distribute_tensor(x, world.mesh, [Shard(0)]) for x in (target, token_weight)]
    with pytest.raises(ValueError, match=r"target must be .*use target.full_tensor\(\)$"):
        labo.linear_loss(hidden, weight, split[0], loss)
    with pytest.raises(ValueError, match=r"use token_weight.full_tensor\(\)$"):
        labo.linear_loss(hidden, weight, target, loss, token_weight=split[1])


def teacher_case(world: World) -> None:
    """Replicated DTensors of a teacher are taken, split ones are refused in one line."""
    hidden, weight, bias, target = head_example(24)
    layer = (hidden.sin(), weight.cos(), bias)
    logits = nn.functional.linear(*layer)
    loss, stored = labo.DistillationLoss(), labo.TopKDistillationLoss()
    top = logits.log_softmax(-1).topk(3)

    def value(loss, teacher):
        return labo.linear_loss(hidden, weight, target, loss, teacher_logits=teacher)

    def placed(x, placement):
        return distribute_tensor(x, world.mesh, [placement])

    wanted = value(loss, logits)
    close(value(loss, placed(logits, Replicate())), wanted)
    close(value(loss, tuple(placed(x, Replicate()) for x in layer)), wanted)
    pair = (top.indices, top.values)
    close(value(stored, tuple(placed(x, Replicate()) for x in pair)), value(stored, pair))
    split = placed(layer[1], Shard(0))
    with pytest.raises(ValueError, match=r"teacher_weight must be .*teacher_weight.full_tensor"):
        value(loss, (layer[0], split))
    with pytest.raises(ValueError, match=r"teacher_logits must be .*teacher_logits.full_tensor"):
        value(loss, placed(logits, Shard(0)))


def test_teachers_as_dtensors(processes):
    processes.run(2, teacher_case)


def test_replicated_targets_and_token_weights(processes):
    processes.run(2, replicated_rows_case)


# ------------------------------------------------------------------ sharded parameters: FSDP


class Model(nn.Module):
    """Embedding, body, head; the head's loss outside, or inside of the forward pass."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 6, dtype=torch.float64)
        self.body = nn.Linear(6, 6, dtype=torch.float64)
        self.head = labo.LinearLoss(6, 23, labo.LABOLoss(), dtype=torch.float64)
        if tied:
            self.head.linear.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Tensor:
        hidden = self.body(self.embedding(tokens)).tanh()
        return hidden if target is None else self.head(hidden, target)


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    """For each process: the second has one target, the third none."""
    found, rng = [], torch.Generator().manual_seed(0)
    for rank in range(size):
        tokens, target = torch.randint(23, (2, 4, 3), generator=rng)
        if rank:
            target[:] = -100
        if rank == 1:
            target[0, 0] = 5
        found.append((tokens, target))
    return found


def build(tied: bool) -> Model:
    torch.manual_seed(3)
    return Model(tied)


def two_steps(model: Model, losses) -> list[Tensor]:
    """Gradients of the second step: the first must have left right parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for loss in losses():
            loss.backward()
        found = gradients(model)
        optimizer.step()
    return found


def one_process(size: int, tied: bool) -> list[Tensor]:
    """The mean over processes, as data parallelism has it."""
    model, data = build(tied), batches(size)
    return two_steps(model, lambda: [model(*batch) / size for batch in data])


def shard(world: World, model: Model, how: str) -> Model:
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": world.mesh}
    if how == "apart":
        fully_shard(model.head, **options)
    if how == "apart, linear":
        fully_shard(model.head.linear, **options)
    fully_shard(model, reshard_after_forward=True if how == "resharded" else None, **options)
    return model


def fsdp2_case(world: World, how: str, tied: bool, inside: bool) -> None:
    tokens, target = batches(world.size)[world.rank]
    model = shard(world, build(tied), how)

    def losses() -> list[Tensor]:
        if inside:
            return [model(tokens, target)]
        hidden = model(tokens)
        weight = model.head.linear.weight
        assert isinstance(weight, DTensor) == (how != "root")
        return [labo.linear_loss(hidden, weight, target, labo.LABOLoss())]

    for found, wanted in zip(two_steps(model, losses), one_process(world.size, tied), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(
    ("how", "tied"),
    [("root", False), ("root", True), ("resharded", False), ("resharded", True), ("apart", False)],
)
@each_size
def test_fsdp2(processes, size, how, tied, inside):
    """A rank without targets keeps step; gradients are the mean over ranks, and split."""
    processes.run(size, fsdp2_case, how, tied, inside)


def linear_apart_case(world: World, inside: bool) -> None:
    """LinearLoss calls no forward of its layer, whose parameters then stay split."""
    fsdp2_case(world, "apart, linear", False, inside)


@pytest.mark.parametrize("inside", [True, False])
def test_fsdp2_layer_within_linear_loss(processes, inside):
    processes.run(2, linear_apart_case, inside)


def gathered_once_case(world: World) -> tuple[int, int]:
    tokens, target = batches(world.size)[world.rank]
    model = shard(world, build(False), "apart")
    hidden = model(tokens).detach()
    forward, backward = CommDebugMode(), CommDebugMode()
    options = labo.LinearLossOptions(batch_chunk_size=2)
    with forward:
        weight = model.head.linear.weight
        value = labo.linear_loss(hidden, weight, target, labo.LABOLoss(), options=options)
    with backward:
        value.backward()
    assert weight.grad.placements == (Shard(0),)
    return forward.get_total_counts(), backward.get_total_counts()


def test_fsdp2_weight_is_gathered_once(processes):
    assert processes.run(2, gathered_once_case) == [(1, 1)] * 2


def divide_factor_case(world: World) -> None:
    tokens, target = batches(world.size)[world.rank]
    found = []
    for inside in (True, False):
        model = shard(world, build(False), "apart")
        for module in (model, model.head):
            module.set_gradient_divide_factor(1.0)
        hidden = model(tokens)
        weight = model.head.linear.weight
        loss = labo.LABOLoss()
        value = model(tokens, target) if inside else labo.linear_loss(hidden, weight, target, loss)
        value.backward()
        found.append(gradients(model))
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_fsdp2_gradient_divide_factor(processes):
    processes.run(2, divide_factor_case)


def hybrid_case(world: World) -> None:
    """A mesh of replicas and shards."""
    from torch.distributed.device_mesh import DeviceMesh

    tokens, target = batches(world.size)[world.rank]
    for shape in ((1, 2), (2, 1)):
        mesh = DeviceMesh("cpu", torch.arange(2).reshape(shape), mesh_dim_names=("replica", "part"))
        world.mesh, kept = mesh, world.mesh
        model = shard(world, build(True), "resharded")
        world.mesh = kept

        def losses(model: Model = model) -> list[Tensor]:
            hidden = model(tokens)
            return [labo.linear_loss(hidden, model.head.linear.weight, target, labo.LABOLoss())]

        for found, wanted in zip(two_steps(model, losses), one_process(2, True), strict=True):
            close(found, wanted)


def test_fsdp2_hybrid(processes):
    processes.run(2, hybrid_case)


def explicit_gather_case(world: World) -> None:
    """A weight of data-parallel processes that FSDP2 knows nothing of, on a mesh it works on."""
    other = shard(world, build(False), "root")
    other.set_gradient_divide_factor(1.0)
    hidden, weight, _, _ = head_example(23)
    target = torch.randint(23, (3, 4), generator=torch.Generator().manual_seed(world.rank))
    leaf = distribute_tensor(weight, world.mesh, [Shard(0)]).requires_grad_()
    whole = labo.parallel.gather_weight(leaf)
    labo.linear_loss(hidden, whole, target, labo.LABOLoss()).backward()
    wanted = torch.zeros_like(weight)
    for rank in range(world.size):
        target = torch.randint(23, (3, 4), generator=torch.Generator().manual_seed(rank))
        grads = dense_head(labo.LABOLoss(), hidden, weight, None, target, None, 1.0)[1]
        wanted += grads[1] / world.size
    assert leaf.grad.placements == (Shard(0),)
    close(leaf.grad.full_tensor(), wanted)


@each_size
def test_gather_weight(processes, size):
    processes.run(size, explicit_gather_case)


def named(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, a tied one under each of its names."""
    found = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().clone() for name, parameter in found}


def fsdp1_case(world: World, tied: bool, original: bool, apart: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrapped(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            process_group=world.group,
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )

    tokens, target = batches(world.size)[world.rank]
    model = build(tied)
    if apart:
        model.head = wrapped(model.head)
    model = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, target).backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        found = named(model)
    one, data = build(tied), batches(world.size)
    two_steps(one, lambda: [one(*batch) / world.size for batch in data])
    wanted = named(one)
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        close(found[name], parameter)
    with pytest.raises(ValueError, match="FullyShardedDataParallel"):
        labo.linear_loss(
            torch.randn(4, 6).double(), next(model.parameters()), target[0], labo.LABOLoss()
        )


@pytest.mark.parametrize("how", ["tied", "one unit", "layer in a unit of its own"])
@pytest.mark.parametrize("original", [True, False])
def test_fsdp1(processes, how, original):
    processes.run(2, fsdp1_case, how == "tied", original, how == "layer in a unit of its own")
