"""Losses and heads whose columns or parameters are split over processes, against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import labo
import layers
from columns import (
    CHUNKS,
    CUTS,
    close,
    columns_are_whole,
    dense,
    dense_head,
    dtensor_is_whole,
    head_example,
    head_is_whole,
)
from gloo import World, on_processes
from labo.fast import blocked, formula, kernels, native
from labo.fast.formula import coefficients_of
from labo.heads import split as shards
from labo.heads.quantized import QuantizedWeight
from probes import LargestTensor

# Without a GPU the Triton kernels run in the interpreter, which conftest.py chooses.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LOSSES = {
    "base": lambda **shared: labo.CrossEntropyLoss(**shared),
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
    "tf-reg": lambda k, **shared: labo.TFRegLoss(mode="paper", alpha=0.5, **shared),
    "mls": lambda k, **shared: labo.MaskedLabelSmoothingLoss(torch.arange(k) % 3 != 1, **shared),
}
REDUCTIONS = ("mean", "sum", "none")

each_loss = pytest.mark.parametrize("name", LOSSES)


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


# ------------------------------------------------------------------ logits


@each_loss
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@on_processes(3)
def test_columns_of_plain_logits(world: World, name, sizes) -> None:
    """In float64; the narrower types are those of the backends."""
    for scale in (3.0, 1000.0):
        logits, target = example(sum(sizes), scale=scale)
        for weight in (None, torch.rand(sum(sizes), dtype=torch.float64) + 0.5):
            for reduction in REDUCTIONS:
                loss = LOSSES[name](weight=weight, reduction=reduction)
                columns_are_whole(world, loss, logits, target, sizes)


@pytest.mark.parametrize("name", FORMULA_LOSSES)
@on_processes(2)
def test_losses_that_are_formulas(world: World, name) -> None:
    """Columns of logits, plain and as DTensors, and rows of a weight."""
    sizes, classes = [19, 4], 23
    logits, target = example(classes)
    logits[6, [2, classes - 1]] = 30.0  # a tie of the largest logits of two processes
    hidden, matrix = torch.randn(12, 6, dtype=torch.float64), torch.randn(classes, 6).double()
    for weight in (None, torch.rand(classes, dtype=torch.float64) + 0.5):
        loss = FORMULA_LOSSES[name](classes, weight=weight, reduction="none")
        for dtype in (torch.float64, torch.float32):
            columns_are_whole(world, loss, logits.to(dtype), target, sizes)
        close(loss(world.placed(logits, Shard(1)), target), loss(logits, target))
        head_is_whole(world, loss, [hidden, matrix], target, sizes)
        head = world.share(matrix, 0, sizes)
        frozen = QuantizedWeight(lambda first, last, head=head: head[first:last], head.shape)
        found = labo.parallel.linear_loss(hidden, frozen, target, loss, group=world.group)
        close(found, loss(hidden @ matrix.T, target))


@each_loss
@pytest.mark.parametrize("classes", [23, 5, 2])
@on_processes(3)
def test_dtensor_logits(world: World, name, classes) -> None:
    """Also with fewer columns than processes."""
    logits, target = example(classes) if classes > 2 else (torch.randn(4, 2), torch.arange(4) % 2)
    for reduction in REDUCTIONS:
        dtensor_is_whole(world, LOSSES[name](reduction=reduction), logits.double(), target)


@on_processes(2)
def test_layouts(world: World) -> None:
    """Sequences, and classes in dimension 1."""
    logits, target = torch.randn(2, 5, 13, dtype=torch.float64), torch.randint(13, (2, 5))
    for dim in (-1, 1):
        loss = labo.LABOLoss(dim=dim, reduction="none")
        dtensor_is_whole(world, loss, logits.movedim(-1, dim), target, dim=dim % 3)


@each_loss
@on_processes(2)
def test_a_masked_target(world: World, name) -> None:
    """An infinite value, in one process as in many."""
    logits, target = torch.randn(3, 8), torch.tensor([1, 6, 3])
    logits[0, 1] = logits[1, 6] = -math.inf
    loss = LOSSES[name](reduction="none")
    assert loss(logits, target)[:2].isinf().all()
    dtensor_is_whole(world, loss, logits, target)


@on_processes(2)
def test_nothing_counts(world: World) -> None:
    logits = torch.randn(3, 8, dtype=torch.float64)
    for rows, target in ((3, torch.full((3,), -100)), (0, torch.empty(0, dtype=torch.long))):
        leaf = world.placed(logits[:rows], Shard(1)).requires_grad_()
        value = labo.LABOLoss()(leaf, target)
        value.backward()
        assert value.item() == 0
        assert leaf.grad.to_local().eq(0).all()


@on_processes(3)
def test_two_collectives_forward_and_none_backward(world: World) -> None:
    logits, target = example()
    leaf = world.placed(logits, Shard(1)).requires_grad_()
    forward, backward = CommDebugMode(), CommDebugMode()
    with forward:
        value = labo.LABOLoss(weight=torch.rand(23))(leaf, target)
    with backward:
        value.backward()
    counts = {str(kind): count for kind, count in forward.get_comm_counts().items()}
    assert sum(counts.values()) == 2
    assert "all_reduce" in next(iter(counts)).replace("allreduce", "all_reduce")
    assert backward.get_total_counts() == 0


def test_no_coefficients_where_no_gradient_is_asked_for(monkeypatch):
    made = []

    def recorded(*arguments):
        made.append(coefficients_of(*arguments))
        return made[-1]

    monkeypatch.setattr(formula, "coefficients_of", recorded)
    logits, target = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 1, -100])
    hidden, loss = torch.randn(3, 4), labo.LABOLoss(reduction="none")
    with torch.no_grad():
        labo.parallel.logits_loss(logits, target, loss)
        labo.parallel.linear_loss(hidden, torch.randn(8, 4), target, loss)
    assert not made
    labo.parallel.logits_loss(logits, target, loss).sum().backward()
    assert len(made) == 1


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


def alike(many: nn.Module, one: nn.Module) -> None:
    for found, wanted in zip(gradients(many), gradients(one), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("how", ["local output", "DTensor", "loss_parallel"])
@on_processes(3)
def test_parallelize_module_and_loss_parallel(world: World, how) -> None:
    x, (_, target) = torch.randn(12, 4, dtype=torch.float64), example()
    loss, one = labo.LABOLoss(), speaker()
    loss(one(x), target).backward()
    many = speaker(world, how == "local output")
    logits = many(x)
    if how == "local output":
        labo.parallel.logits_loss(logits, target, loss, group=world.group).backward()
    elif how == "DTensor":
        loss(logits, target).backward()
    else:
        with loss_parallel():
            loss(logits, target).backward()
    alike(many, one)


@on_processes(2)
def test_replicated_logits(world: World) -> None:
    """Every loss takes replicated DTensors."""
    logits, target = example()
    logits[5] = 0.0
    whole = world.placed(logits, Replicate())
    for loss in (labo.LABOLoss(), labo.FocalLoss(), labo.ConfidencePenaltyLoss()):
        leaf = whole.detach().requires_grad_()
        value, grad = dense(loss, logits, target, upstream=1.0)
        found = loss(leaf, target)
        found.backward()
        close(found, value)
        close(leaf.grad.full_tensor(), grad)
    teacher = labo.DistillationLoss()
    close(teacher(whole, target, whole), teacher(logits, target, logits))


@on_processes(2)
def test_what_is_refused(world: World) -> None:
    logits, target = torch.randn(4, 10), torch.tensor([0, 1, 2, 9])
    columns, rows = (world.placed(logits, Shard(dim)) for dim in (1, 0))
    partial = DTensor.from_local(logits, world.mesh, [Partial()])
    split_target = DTensor.from_local(target, world.mesh, [Shard(0)])
    labo_loss, mine = labo.LABOLoss(), world.share(logits, 1)
    for message, loss, x, y in (
        ("split over the classes .dim=-1. along one mesh", labo_loss, rows, target),
        ("split over the classes .dim=-1. along one mesh", labo_loss, partial, target),
        ("do not go with this loss", labo.KRLSLoss(10), columns, target),
        ("do not go with alpha_grad=True", labo.LABOLoss(alpha_grad=True), columns, target),
        ("needs a margin below the", labo.MarginSmoothingLoss(), columns, target),
        ("needs the norm or standard deviation", labo.LogitNormLoss(), columns, target),
        ("needs the largest logits", labo.EAFTLoss(top_k=2), columns, target),
        ("do not go with class probabilities", labo_loss, columns, logits.softmax(1)),
        ('do not go with impl="native"', labo.LABOLoss(impl="native"), columns, target),
        ("do not go with inplace=True", labo.LABOLoss(inplace=True), columns, target),
        ("target must be a plain", labo_loss, columns, split_target),
        (r"target 10 at position 0 is outside \[0, 10\)", labo_loss, columns, target + 10),
        (r"weight must have shape \(10,\)", labo.LABOLoss(weight=torch.ones(5)), columns, target),
    ):
        with pytest.raises(ValueError, match=message):
            loss(x, y)
    for message, loss, x, y in (
        ("cannot work on logits that are split", labo.LABOLoss(alpha_grad=True), mine, target),
        ("class-index target must have shape", labo_loss, mine, target[:2]),
        ("brings its own processes", labo_loss, columns, target),
    ):
        with pytest.raises(ValueError, match=message):
            labo.parallel.logits_loss(x, y, loss, group=world.group)


@on_processes(2)
def test_compiled(world: World) -> None:
    logits, target = example()
    loss = labo.LABOLoss()
    leaf = world.placed(logits, Shard(1)).requires_grad_()
    compiled = torch.compile(lambda x, y: loss(x, y) * 2, backend="eager")
    value, grad = dense(loss, logits, target, upstream=2.0)
    found = compiled(leaf, target)
    found.backward()
    close(found, 2 * value)
    close(leaf.grad.full_tensor(), grad)


# ------------------------------------------------------------------ backends


@each_loss
@pytest.mark.parametrize("backend", ["blocked", "native", "kernels"])
@on_processes(2)
def test_backends(world: World, backend, name) -> None:
    """Parts of 23 and 50 columns, of 0 and 73, and of which one is masked."""
    module = {"blocked": blocked, "native": native, "kernels": kernels}[backend]
    device = DEVICE if backend == "kernels" else "cpu"
    logits, target = (x.to(device) for x in example(73))
    weights = torch.rand(73, device=device) + 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "backend_of", lambda _: module)
        for dtype, weight in ((torch.float32, None), (torch.bfloat16, weights)):
            loss = LOSSES[name](weight=weight, reduction="none")
            for sizes in ([23, 50], [0, 73], [24, 49]):
                columns_are_whole(world, loss, logits.to(dtype), target, sizes)


# ------------------------------------------------------------------ output layer and loss


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("base", torch.float64, [11, 12, 0]),
        ("ls", torch.float32, [19, 4, 0]),
        ("labo", torch.float64, [9, 0, 14]),
        ("labo", torch.float32, [19, 3, 1]),
        ("labo-fixed", torch.float64, [11, 11, 1]),
    ],
)
@on_processes(3)
def test_rows_of_a_plain_weight(world: World, name, dtype, sizes) -> None:
    hidden, weight, bias, target = head_example(sum(sizes))
    tensors = [x.to(dtype) for x in (hidden, weight, bias)]
    class_weights = torch.rand(sum(sizes)).double() + 0.5
    for reduction, softcap, class_weight in (
        ("mean", None, class_weights),
        ("mean", 3.0, None),
        ("sum", None, None),
        ("none", 3.0, class_weights),
    ):
        loss = LOSSES[name](reduction=reduction, weight=class_weight)
        head_is_whole(world, loss, tensors, target, sizes, softcap)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden_as", ["plain", "replicated", "sequence"])
@on_processes(3)
def test_dtensor_weight(world: World, bias, hidden_as) -> None:
    hidden, weight, offset, target = head_example(23)
    loss, parameters = labo.LABOLoss(), [weight, offset] if bias else [weight]
    value, grads = dense_head(loss, [hidden, *parameters], target, upstream=0.7)
    leaves = [world.placed(x, Shard(0)).requires_grad_() for x in parameters]
    placement = {"plain": None, "replicated": Replicate(), "sequence": Shard(1)}[hidden_as]
    leaf = hidden.clone() if placement is None else world.placed(hidden, placement)
    leaf.requires_grad_()
    found = labo.linear_loss(
        leaf, leaves[0], target, loss, linear_bias=leaves[1] if bias else None, options=CHUNKS
    )
    found.backward(torch.tensor(0.7, dtype=torch.float64))
    close(found, value)
    for x, wanted in zip((leaf, *leaves), grads, strict=True):
        grad = x.grad
        if isinstance(grad, DTensor):
            assert grad.placements == x.placements or hidden_as == "replicated"
            grad = grad.full_tensor()
        close(grad, wanted)


@on_processes(3)
def test_linear_loss_module_after_parallelize_module(world: World) -> None:
    hidden, _, _, target = head_example(23)
    models = []
    for _ in range(2):
        torch.manual_seed(2)
        models.append(labo.LinearLoss(6, 23, labo.LABOLoss(), bias=True, dtype=torch.float64))
    one, many = models
    parallelize_module(many, world.mesh, {"linear": ColwiseParallel()})
    close(many(hidden, target), one(hidden, target))
    one(hidden, target).backward()
    many(hidden, target).backward()
    alike(many, one)


@on_processes(2)
def test_metrics_token_weights_and_z_loss(world: World) -> None:
    x, weight, bias, target = layers.problem()
    token_weight = torch.linspace(0.5, 2, layers.N, dtype=torch.float64)
    token_weight[target == -100] = math.nan  # does not matter
    sizes = [2, layers.V - 2]
    shard, shard_bias = (world.share(t, 0, sizes) for t in (weight, bias))
    options = {
        "softcap": 3.0,
        "token_weight": token_weight,
        "z_loss": 0.2,
        "return_metrics": True,
        "options": layers.SMALL,
    }
    for reduction in ("mean", "none"):
        loss = labo.LABOLoss(reduction=reduction)
        results = []
        for call, head in (
            (labo.parallel.linear_loss, {"linear_weight": shard, "linear_bias": shard_bias}),
            (labo.linear_loss, {"linear_weight": weight, "linear_bias": bias}),
        ):
            group = {"group": world.group} if call is labo.parallel.linear_loss else {}
            leaf = x.clone().requires_grad_()
            value, metrics = call(leaf, target=target, loss=loss, **head, **group, **options)
            value.sum().backward()
            results.append((value.detach(), leaf.grad, tuple(metrics)))
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("taught", [False, True])
@on_processes(2)
def test_a_sharded_head_never_has_its_logits(world: World, taught) -> None:
    """Nor those of a teacher."""
    hidden, theirs = torch.randn(2, 64, 4)
    weight, other = (world.share(torch.randn(500, 4), 0).clone() for _ in range(2))
    loss = labo.DistillationLoss() if taught else labo.LABOLoss()
    options = {"options": labo.LinearLossOptions(batch_chunk_size=8), "group": world.group}
    options["teacher_logits"] = (theirs, other) if taught else None
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    with LargestTensor() as probe:
        target = torch.randint(500, (64,))
        labo.parallel.linear_loss(*tensors, target, loss, **options).backward()
    assert probe.largest < 64 * 250


@on_processes(2)
def test_collectives_of_a_sharded_head(world: World) -> None:
    """Two for each of four chunks, one for the gradient of the hidden states."""
    hidden, weight, target = torch.randn(64, 4), torch.randn(50, 4), torch.randint(50, (64,))
    mine = world.placed(weight, Shard(0)).requires_grad_()
    hidden.requires_grad_()
    options = labo.LinearLossOptions(batch_chunk_size=16)
    labo.linear_loss(hidden, mine, target, labo.LABOLoss(), options=options)  # checks the targets
    for reduction in ("mean", "none"):
        loss = labo.LABOLoss(reduction=reduction)
        forward, backward = CommDebugMode(), CommDebugMode()
        with forward:
            value = labo.linear_loss(hidden, mine, target, loss, options=options)
        with backward:
            value.sum().backward()
        assert (forward.get_total_counts(), backward.get_total_counts()) == (8, 1)


@on_processes(2)
def test_gradients_that_nobody_needs(world: World) -> None:
    hidden, weight, _, target = head_example(23)
    mine = world.placed(weight, Shard(0)).requires_grad_()
    with CommDebugMode() as counted:
        labo.linear_loss(hidden, mine, target, labo.LABOLoss()).backward()
    wanted = dense_head(labo.LABOLoss(), [hidden, weight], target, upstream=1.0)[1][1]
    close(mine.grad.full_tensor(), wanted)
    assert hidden.grad is None
    assert counted.get_total_counts() <= 3
    with torch.no_grad():
        found = labo.linear_loss(hidden, mine, target, labo.LABOLoss())
    close(found, labo.linear_loss(hidden, weight, target, labo.LABOLoss()))


@on_processes(2)
def test_what_a_sharded_head_refuses(world: World) -> None:
    hidden, weight, bias, target = head_example(24)
    rows = world.placed(weight, Shard(0))
    columns = world.placed(weight, Shard(1))
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
            split = low | {name: world.placed(x, placement)}
            with pytest.raises(ValueError, match=rf"{name} of a LowRank.*gather_weight\({name}\)"):
                labo.LowRankWeight(**split, scale=1.0)
    shards._SAME_ROWS.discard(world.mesh.get_group().group_name)  # of these processes only
    with pytest.raises(ValueError, match=r"have different targets.*gather_weight"):
        labo.linear_loss(hidden, rows, (target + world.rank).clamp(0, 23), loss)
    with pytest.raises(ValueError, match=r"have different targets.*gather_weight"):
        labo.linear_loss(hidden[: 1 + world.rank], rows, target[: 1 + world.rank], loss)
    close(
        labo.linear_loss(hidden, rows, target, loss), labo.linear_loss(hidden, weight, target, loss)
    )


@on_processes(2)
def test_replicated_targets_and_token_weights(world: World) -> None:
    """What there is for each row may be a replicated DTensor, whatever the weight is."""
    hidden, weight, _, target = head_example(24)
    loss, token_weight = labo.LABOLoss(), torch.linspace(0.5, 2, target.numel()).view_as(target)
    whole = [world.placed(x, Replicate()) for x in (target, token_weight)]
    wanted = labo.linear_loss(hidden, weight, target, loss, token_weight=token_weight)
    close(labo.linear_loss(hidden, weight, whole[0], loss, token_weight=whole[1]), wanted)
    close(labo.linear_loss(hidden, weight, target, loss, token_weight=whole[1]), wanted)
    mine = world.share(weight, 0)
    found = labo.parallel.linear_loss(
        hidden, mine, whole[0], loss, token_weight=whole[1], group=world.group
    )
    close(found, wanted)
    split = [world.placed(x, Shard(0)) for x in (target, token_weight)]
    with pytest.raises(ValueError, match=r"target must be .*use target.full_tensor\(\)$"):
        labo.linear_loss(hidden, weight, split[0], loss)
    with pytest.raises(ValueError, match=r"use token_weight.full_tensor\(\)$"):
        labo.linear_loss(hidden, weight, target, loss, token_weight=split[1])


@on_processes(2)
def test_teachers_as_dtensors(world: World) -> None:
    """Replicated DTensors of a teacher are taken, split ones are refused in one line."""
    hidden, weight, bias, target = head_example(24)
    layer = (hidden.sin(), weight.cos(), bias)
    logits = nn.functional.linear(*layer)
    loss, stored = labo.DistillationLoss(), labo.TopKDistillationLoss()
    top = logits.log_softmax(-1).topk(3)

    def value(loss, teacher):
        return labo.linear_loss(hidden, weight, target, loss, teacher_logits=teacher)

    wanted = value(loss, logits)
    close(value(loss, world.placed(logits, Replicate())), wanted)
    close(value(loss, tuple(world.placed(x, Replicate()) for x in layer)), wanted)
    pair = (top.indices, top.values)
    close(value(stored, tuple(world.placed(x, Replicate()) for x in pair)), value(stored, pair))
    split = world.placed(layer[1], Shard(0))
    with pytest.raises(ValueError, match=r"teacher_weight must be .*teacher_weight.full_tensor"):
        value(loss, (layer[0], split))
    with pytest.raises(ValueError, match=r"teacher_logits must be .*teacher_logits.full_tensor"):
        value(loss, world.placed(logits, Shard(0)))


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


def shard(world: World, model: Model, how: str, mesh: Any = None) -> Model:
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": mesh or world.mesh}
    if how == "apart":
        fully_shard(model.head, **options)
    if how == "apart, linear":  # LinearLoss calls no forward of its layer, which then stays split
        fully_shard(model.head.linear, **options)
    fully_shard(model, reshard_after_forward=True if how == "resharded" else None, **options)
    return model


def outside(model: Model, tokens: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The loss computed outside of the model, with its parameter."""
    hidden, weight = model(tokens), model.head.linear.weight
    return labo.linear_loss(hidden, weight, target, labo.LABOLoss(), **options)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(
    ("how", "tied"),
    [
        ("root", False),
        ("root", True),
        ("resharded", False),
        ("resharded", True),
        ("apart", False),
        ("apart, linear", False),
    ],
)
@on_processes(3)
def test_fsdp2(world: World, how, tied, inside) -> None:
    """A rank without targets keeps step; gradients are the mean over ranks, and split."""
    batch = batches(world.size)[world.rank]
    model = shard(world, build(tied), how)

    def losses() -> list[Tensor]:
        if inside:
            return [model(*batch)]
        value = outside(model, *batch)
        assert isinstance(model.head.linear.weight, DTensor) == (how != "root")
        return [value]

    for found, wanted in zip(two_steps(model, losses), one_process(world.size, tied), strict=True):
        close(found, wanted)


@on_processes(2)
def test_fsdp2_weight_is_gathered_once(world: World) -> None:
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
    assert (forward.get_total_counts(), backward.get_total_counts()) == (1, 1)


@on_processes(2)
def test_fsdp2_gradient_divide_factor(world: World) -> None:
    batch = batches(world.size)[world.rank]
    found = []
    for loss in (Model.__call__, outside):
        model = shard(world, build(False), "apart")
        for module in (model, model.head):
            module.set_gradient_divide_factor(1.0)
        loss(model, *batch).backward()
        found.append(gradients(model))
    for a, b in zip(*found, strict=True):
        close(a, b)


@on_processes(2)
def test_fsdp2_hybrid(world: World) -> None:
    """A mesh of replicas and shards."""
    from torch.distributed.device_mesh import DeviceMesh

    batch = batches(world.size)[world.rank]
    for shape in ((1, 2), (2, 1)):
        mesh = DeviceMesh("cpu", torch.arange(2).reshape(shape), mesh_dim_names=("replica", "part"))
        model = shard(world, build(True), "resharded", mesh)
        found = two_steps(model, lambda model=model: [outside(model, *batch)])
        for ours, wanted in zip(found, one_process(2, True), strict=True):
            close(ours, wanted)


@on_processes(3)
def test_gather_weight(world: World) -> None:
    """A weight of data-parallel processes that FSDP2 knows nothing of, on a mesh it works on."""
    other = shard(world, build(False), "root")
    other.set_gradient_divide_factor(1.0)
    hidden, weight, _, _ = head_example(23)
    targets = [
        torch.randint(23, (3, 4), generator=torch.Generator().manual_seed(rank))
        for rank in range(world.size)
    ]
    leaf = world.placed(weight, Shard(0)).requires_grad_()
    whole = labo.parallel.gather_weight(leaf)
    labo.linear_loss(hidden, whole, targets[world.rank], labo.LABOLoss()).backward()
    wanted = torch.zeros_like(weight)
    for target in targets:
        _, grads = dense_head(labo.LABOLoss(), [hidden, weight], target, upstream=1.0)
        wanted += grads[1] / world.size
    assert leaf.grad.placements == (Shard(0),)
    close(leaf.grad.full_tensor(), wanted)


def named(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, a tied one under each of its names."""
    found = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().clone() for name, parameter in found}


@pytest.mark.parametrize("how", ["tied", "one unit", "layer in a unit of its own"])
@pytest.mark.parametrize("original", [True, False])
@on_processes(2)
def test_fsdp1(world: World, how, original) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrapped(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            process_group=world.group,
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )

    tokens, target = batches(world.size)[world.rank]
    model = build(how == "tied")
    if how == "layer in a unit of its own":
        model.head = wrapped(model.head)
    model = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, target).backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        found = named(model)
    one, data = build(how == "tied"), batches(world.size)
    two_steps(one, lambda: [one(*batch) / world.size for batch in data])
    wanted = named(one)
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        close(found[name], parameter)
    with pytest.raises(ValueError, match="FullyShardedDataParallel"):
        labo.linear_loss(
            torch.randn(4, 6).double(), next(model.parameters()), target[0], labo.LABOLoss()
        )
