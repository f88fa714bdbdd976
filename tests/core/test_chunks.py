"""The chunks of linear_loss: their sizes, rows that are dropped, sums in float32 (chunks.py)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import labo
import layers
from labo import _checks, chunks, linear
from layers import D, V, gradients
from probes import Products

N = 20
DROP, KEEP = (
    labo.LinearLossOptions(batch_chunk_size=3, drop_ignored=drop) for drop in (True, False)
)
SMALL = labo.LinearLossOptions(batch_chunk_size=3)


# ------------------------------------------------------------------ sizes


def test_chunks_of_whole_tiles():
    assert chunks.cut(8192, 4096, 256) == [slice(0, 4096), slice(4096, 8192)]
    assert chunks.cut(5000, 4096, 256) == [slice(0, 2560), slice(2560, 5000)]
    assert chunks.cut(300, 4096, 256) == [slice(0, 300)]
    assert chunks.cut(101, 100) == [slice(0, 51), slice(51, 101)]
    assert chunks.cut(300, 100, 256) == [slice(0, 100), slice(100, 200), slice(200, 300)]
    assert chunks.cut(0, 256, 256) == chunks.cut(0, 7) == []


@pytest.mark.parametrize("rows", [1, 255, 4097, 8192])
@pytest.mark.parametrize("most", [1, 100, 512])
@pytest.mark.parametrize("multiple", [1, 256])
def test_every_row_is_in_one_chunk(rows, most, multiple):
    parts = chunks.cut(rows, most, multiple)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == rows
    sizes = [chunks.length(part) for part in parts]
    assert max(sizes) <= most
    if most % multiple == 0:
        assert all(size % multiple == 0 for size in sizes[:-1])


def test_on_cuda_the_chunk_follows_the_weight():
    """The logits of D rows take as much as the weight, whatever V is."""
    options = labo.LinearLossOptions()
    huge = 10**9  # bytes of a row, which do not matter

    def rows(width: int, copies: int) -> int:
        return options.most_rows(huge, linear.rows_of_weight(width, copies))

    assert rows(4096, 1) == 4096
    assert rows(5000, 1) == 4864
    assert rows(4096, 2) == 2048  # a cap, or a teacher
    assert rows(512, 1) == 1024
    assert labo.LinearLossOptions(memory_budget=5 * huge).most_rows(huge, 4096) == 5
    assert labo.LinearLossOptions(batch_chunk_size=7).most_rows(huge, 4096) == 7
    assert options.most_rows(1 << 20) == 96
    small = labo.LinearLossOptions(memory_budget=1000)
    assert (small.most_rows(10), small.most_rows(10_000)) == (100, 1)


def test_ignored_rows_are_dropped_on_the_cpu_unless_asked_otherwise():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert labo.LinearLossOptions().drops(cpu)
    assert not labo.LinearLossOptions().drops(cuda)
    assert labo.LinearLossOptions(drop_ignored=True).drops(cuda)
    assert not labo.LinearLossOptions(drop_ignored=False).drops(cpu)
    with pytest.raises(ValueError, match="drop_ignored must be True, False or None, got 'yes'"):
        labo.LinearLossOptions(drop_ignored="yes")


# ------------------------------------------------------------------ sums in float32


@pytest.mark.parametrize("adapted", [False, True])
def test_products_are_summed_in_float32(monkeypatch, adapted):
    """On CUDA the sum over chunks is part of the product. Here that product is made up."""
    calls = []

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        calls.append(("mm", out_dtype))
        return out.copy_(a.float() @ b.float())

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is c
        calls.append(("addmm", out_dtype))
        return out.add_(a.float() @ b.float())

    class Torch:
        def __getattr__(self, name: str):
            return getattr(torch, name)

    fake = Torch()
    fake.mm = lambda *x, **y: mm(*x, **y) if "out_dtype" in y else torch.mm(*x, **y)
    fake.addmm = lambda *x, **y: addmm(*x, **y) if "out_dtype" in y else torch.addmm(*x, **y)
    monkeypatch.setattr(chunks, "product_dtype", lambda x: x.dtype)
    torch.manual_seed(0)
    x, target = torch.randn(N, D).bfloat16(), torch.randint(V, (N,))
    weight = torch.randn(V, D).bfloat16().requires_grad_()
    b = torch.randn(V, 2).bfloat16().requires_grad_()
    head = labo.LowRankWeight(weight, torch.randn(2, D).bfloat16(), b, 0.5) if adapted else weight
    leaves = (weight, b) if adapted else (weight,)

    def gradients() -> tuple[Tensor, ...]:
        options = labo.LinearLossOptions(batch_chunk_size=5)
        loss = labo.linear_loss(x, head, target, labo.LABOLoss(), options=options)
        return torch.autograd.grad(loss, leaves)

    expected = gradients()
    monkeypatch.setattr(chunks, "torch", fake)
    monkeypatch.setattr(chunks, "_sums_in_product", lambda total: True)
    torch.testing.assert_close(gradients(), expected, rtol=2e-2, atol=2e-3)
    kinds = [kind for kind, dtype in calls if dtype == torch.float32]
    assert kinds == ["mm"] * len(leaves) + ["addmm"] * 3 * len(leaves)


# ------------------------------------------------------------------ rows that are dropped


def problem(dtype: torch.dtype = torch.float64):
    x, weight, bias, target = layers.problem(dtype, rows=N)
    return x, weight, bias, target.masked_fill(torch.arange(N) % 5 < 3, -100)


def teacher_of(kind: str, dtype: torch.dtype) -> Tensor | tuple[Tensor, Tensor]:
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    if kind == "logits":
        return logits.to(dtype)
    if kind == "stored":
        top = logits.log_softmax(-1).topk(3)
        return top.indices, top.values.to(dtype)
    hidden, weight, _, _ = problem(dtype)
    return hidden.sin(), weight.cos()


CASES = {
    "labo": (labo.LABOLoss, {}),
    "autograd": (lambda **shared: labo.LABOLoss(alpha_grad=True, **shared), {}),
    "formula": (labo.FocalLoss, {"softcap": 2.0}),
    "kd": (labo.DistillationLoss, {"teacher_logits": "logits"}),
    "kd, layer": (labo.DistillationLoss, {"teacher_logits": "layer"}),
    "top-k": (labo.TopKDistillationLoss, {"teacher_logits": "stored"}),
    "token weights": (labo.LABOLoss, {"token_weight": torch.linspace(0, 2, N)}),
}


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [
        ("mean", torch.float64),
        ("sum", torch.float32),
        ("none", torch.float16),
        ("mean", torch.float16),
        ("none", torch.float32),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_dropped_rows_change_nothing(name, reduction, dtype):
    x, weight, bias, target = problem(dtype)
    make, extras = CASES[name]
    loss = make(reduction=reduction, weight=torch.linspace(0.5, 2, V).to(dtype))
    if "teacher_logits" in extras:
        extras = {"teacher_logits": teacher_of(extras["teacher_logits"], dtype)}

    def call(options):
        def step(x, w, b):
            return labo.linear_loss(x, w, target, loss, linear_bias=b, options=options, **extras)

        return gradients(step, x, weight, bias)

    found, expected = call(DROP), call(KEEP)
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected, strict=True):
        unit = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours / unit, theirs / unit, rtol=tolerance, atol=tolerance)
    assert found[1][target == -100].count_nonzero() == 0
    for ours, theirs in zip(found, call(SMALL), strict=True):  # on the CPU this is the default
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("magnitude", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dropped_rows_of_an_adapted_layer(magnitude, reduction):
    x, weight, bias, target = problem()
    a, b = torch.randn(2, D).double(), torch.randn(V, 2).double()
    scale = (torch.rand(V).double() + 0.5,) if magnitude else ()

    def call(options):
        def loss(x, w, bias, a, b, *scale):
            adapted = labo.LowRankWeight(w, a, b, 0.5, *scale)
            made = labo.LABOLoss(reduction=reduction)
            return labo.linear_loss(x, adapted, target, made, linear_bias=bias, options=options)

        return gradients(loss, x, weight, bias, a, b, *scale)

    torch.testing.assert_close(call(DROP), call(KEEP))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["reference", "fused"])
@pytest.mark.parametrize("how", ["rows", True])
def test_metrics_of_dropped_rows(how, dtype):
    x, weight, _, target = problem(dtype)
    shape = (2, N // 2)
    x, target = x.reshape(*shape, D), target.reshape(shape)
    found, expected = (
        labo.linear_loss(x, weight, target, labo.LABOLoss(), return_metrics=how, options=options)
        for options in (DROP, KEEP)
    )
    torch.testing.assert_close(found[0], expected[0])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours.shape == (shape if how == "rows" else ())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dropped_rows_under_compile(reduction):
    x, weight, bias, target = problem(torch.float32)
    loss = labo.LABOLoss(reduction=reduction)

    def call(x, w, b):
        return labo.linear_loss(x, w, target, loss, linear_bias=b, options=DROP)

    expected = gradients(call, x, weight, bias)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x, weight, bias), expected)


def test_only_rows_that_count_are_multiplied():
    x, weight, _, target = problem()
    every = target.clamp(min=0)
    for options, labels, rows in (
        (DROP, target, 8),
        (SMALL, target, 8),
        (KEEP, target, N),
        (DROP, every, N),
    ):
        with Products() as seen:
            labo.linear_loss(x, weight, labels, labo.LABOLoss(), options=options)
        assert sum(shape[0] for shape in seen.shapes) == rows
    assert "index" not in seen.names  # nothing is copied if every row counts


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_in_a_dropped_row_matters(reduction):
    x, weight, bias, target = problem()
    x[target == -100] = math.nan
    loss = labo.LABOLoss(reduction=reduction)
    for labels in (target, torch.full_like(target, -100)):

        def step(x, w, b, labels=labels):
            return labo.linear_loss(x, w, labels, loss, linear_bias=b, options=DROP)

        found = gradients(step, x, weight, bias)
        assert all(t.isfinite().all() for t in found)
    assert all(t.count_nonzero() == 0 for t in found)


# ------------------------------------------------------------------ nothing waits for a device


class Waits(TorchDispatchMode):
    """What would wait for a GPU: reading a number, and making a tensor of numbers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool
            for x in torch.utils._pytree.tree_leaves(args[1:2])
        )
        if by_mask or name in ("_local_scalar_dense", "lift_fresh", "nonzero"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def test_the_probe_sees_what_waits():
    x = torch.zeros(4, 4)
    for wait in (
        lambda: x[:, [0, 1]],
        lambda: x.__setitem__((0, 0), 3.0),
        lambda: torch.tensor(1.0),
        lambda: int(x.sum()),
        lambda: x[x > 0],
    ):
        with Waits() as probe:
            wait()
        assert probe.seen


SHARDED = {
    "labo": lambda: (labo.LABOLoss(reduction="none"), None),
    "weighted": lambda: (labo.LABOLoss(weight=torch.rand(V), reduction="none"), None),
    "ger": lambda: (labo.GeneralizedEntropyLoss(reduction="none"), None),
    "maxsup": lambda: (labo.MaxSuppressionLoss(reduction="none"), None),
    "kd": lambda: (labo.DistillationLoss(reduction="none"), "logits"),
    "dkd": lambda: (labo.DecoupledDistillationLoss(reduction="none"), "layer"),
    "top-k": lambda: (labo.TopKDistillationLoss(reduction="none"), "stored"),
}


@pytest.mark.parametrize("name", SHARDED)
def test_shards_wait_for_no_device(monkeypatch, name):
    """Forward and backward, with metrics; ``can_read`` says what it says of a GPU's tensors."""
    x, weight, _, target = problem(torch.float32)
    loss, teacher = SHARDED[name]()
    given = None if teacher is None else teacher_of(teacher, torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    upstream = torch.rand(N)
    options = labo.LinearLossOptions(batch_chunk_size=8, drop_ignored=False)
    monkeypatch.setattr(_checks, "can_read", lambda tensor: False)
    with Waits() as probe:
        value, _ = labo.parallel.linear_loss(
            x,
            weight,
            target,
            loss,
            teacher_logits=given,
            return_metrics=True,
            options=options,
        )
        value.backward(upstream)
    assert probe.seen == []
