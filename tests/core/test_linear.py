"""Output layer and loss in one: equal to the two apart, without the logits."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import labo
from conftest import MODULES, gradient
from eighths import Eighths
from labo import linear
from labo.fast.dispatch import FastRows
from labo.heads import quantized
from probes import LargestTensor

N, D, V = 13, 6, 11
WITH_TEACHER = {"kd", "dkd", "cskd", "pskd"}
ROWWISE = [name for name in labo.LOSSES if labo.LOSSES[name].rowwise]
each_loss = pytest.mark.parametrize("name", ROWWISE)
SMALL = labo.LinearLossOptions(batch_chunk_size=4)


def problem(dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    target = torch.randint(V, (N,), generator=generator)
    target[3] = -100
    return x.to(dtype), weight.to(dtype), bias.to(dtype), target


def build(name: str, **settings):
    loss = MODULES[name](V)
    for key, value in settings.items():
        setattr(loss, key, value)
    return loss


def teacher(name: str) -> torch.Tensor | None:
    if name not in WITH_TEACHER:
        return None
    return torch.randn(N, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def apart(loss, x, weight, bias, target, teacher_logits=None):
    extra = () if teacher_logits is None else (teacher_logits,)
    return loss(torch.nn.functional.linear(x, weight, bias), target, *extra)


def gradients(function, *tensors, upstream=None):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    value = function(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves, upstream)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_layer_then_loss(name, reduction):
    x, weight, bias, target = problem()
    loss, teacher_logits = build(name, reduction=reduction), teacher(name)
    upstream = None if reduction != "none" else torch.linspace(0, 2, N, dtype=torch.float64)
    expected = gradients(
        lambda x, w, b: apart(loss, x, w, b, target, teacher_logits),
        x,
        weight,
        bias,
        upstream=upstream,
    )
    for options in (None, SMALL, labo.LinearLossOptions(batch_chunk_size=1)):
        result = gradients(
            lambda x, w, b, o=options: labo.linear_loss(
                x, w, target, loss, linear_bias=b, teacher_logits=teacher_logits, options=o
            ),
            x,
            weight,
            bias,
            upstream=upstream,
        )
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["labo", "ls", "ce", "cp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_the_naive_computation(name, dtype):
    x, weight, bias, target = problem(dtype)
    loss = build(name)
    exact = gradients(
        lambda x, w, b: apart(loss, x, w, b, target), x.double(), weight.double(), bias.double()
    )
    naive = gradients(lambda x, w, b: apart(loss, x, w, b, target), x, weight, bias)
    result = gradients(
        lambda x, w, b: labo.linear_loss(x, w, target, loss, linear_bias=b, options=SMALL),
        x,
        weight,
        bias,
    )
    for ours, theirs, truth in zip(result, naive, exact, strict=True):
        assert ours.dtype == theirs.dtype
        error, usual = ((r.double() - truth).abs().max() for r in (ours, theirs))
        assert error <= 1.5 * usual + 2 * torch.finfo(dtype).eps * truth.abs().max()


def test_true_class_entry_is_exact_in_bfloat16():
    """p_y - 1 cancels when the model is sure: in bfloat16 arithmetic nothing would be left."""
    hidden = torch.eye(2, dtype=torch.bfloat16)
    weight = torch.tensor([[9.0, 0.0], [0.0, 9.0]]).bfloat16()
    target = torch.tensor([0, 1])
    slope = gradient(lambda w: labo.linear_loss(hidden, w, target, labo.CrossEntropyLoss()), weight)
    exact = gradient(
        lambda w: torch.nn.functional.cross_entropy(hidden.double() @ w.T, target), weight.double()
    )
    torch.testing.assert_close(slope.double(), exact, rtol=1e-2, atol=0)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["labo", "ls", "ce", "cp", "kd"])
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
def test_only_the_gradients_that_are_needed_are_computed(name, wanted):
    x, weight, bias, target = problem()
    loss, teacher_logits = build(name), teacher(name)
    expected = gradients(
        lambda x, w, b: apart(loss, x, w, b, target, teacher_logits), x, weight, bias
    )[1:]
    tensors = [t.clone().requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)]

    def value():
        x, w, b = tensors
        return labo.linear_loss(x, w, target, loss, linear_bias=b, teacher_logits=teacher_logits)

    with Products() as products:
        result = value()
        if any(wanted):
            result.backward()
    assert products.count == 1 + wanted[0] + wanted[1]
    for tensor, w, truth in zip(tensors, wanted, expected, strict=True):
        assert (tensor.grad is not None) == w
        if w:
            torch.testing.assert_close(tensor.grad, truth)


@pytest.mark.parametrize("name", ["labo", "ls", "ce", "cp", "kd"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_gradient_is_computed_without_grad_mode(name, mode, reduction):
    """Although the weight requires one, as in every evaluation."""
    x, weight, bias, target = problem()
    loss, teacher_logits = build(name, reduction=reduction), teacher(name)
    weight.requires_grad_()
    expected = apart(loss, x, weight, bias, target, teacher_logits)
    with mode(), Products() as products, LargestTensor() as seen:
        value = labo.linear_loss(
            x,
            weight,
            target,
            loss,
            linear_bias=bias,
            teacher_logits=teacher_logits,
            options=labo.LinearLossOptions(batch_chunk_size=4),
        )
    assert products.count == 4
    assert seen.largest < weight.numel()  # nothing of the size of its gradient
    torch.testing.assert_close(value, expected)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_of_the_size_of_the_logits(name, reduction):
    """In forward and backward, and with a teacher given as an output layer."""
    rows, width, classes = 256, 8, 64
    torch.manual_seed(0)
    x = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (rows,))
    loss = MODULES[name](classes)
    loss.reduction = reduction
    teacher_logits = (x.detach().sin(), weight.detach().cos()) if name in WITH_TEACHER else None
    with LargestTensor() as seen:
        value = labo.linear_loss(
            x,
            weight,
            target,
            loss,
            teacher_logits=teacher_logits,
            options=labo.LinearLossOptions(batch_chunk_size=16),
        )
        value.sum().backward()
    # the hidden states, the weight, or a chunk of logits (three such are one buffer for a chunk)
    assert seen.largest <= max(rows * width, classes * width, 3 * 16 * classes)
    assert seen.largest < rows * classes / 4


@pytest.mark.parametrize("tail", ["bucket", "labo"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["reference", "fused"])
def test_stored_teacher(tail, reduction, compiled, dtype):
    x, weight, bias, target = problem(dtype)
    stored = teacher("kd").log_softmax(-1).topk(3)
    loss = labo.TopKDistillationLoss(tail=tail, reduction=reduction)
    upstream = None if reduction == "mean" else torch.linspace(0, 2, N, dtype=dtype)
    expected = gradients(
        lambda x, w, b: loss(torch.nn.functional.linear(x, w, b), target, *stored[::-1]),
        x,
        weight,
        bias,
        upstream=upstream,
    )

    def fused(x, w, b):
        return labo.linear_loss(
            x, w, target, loss, linear_bias=b, teacher_logits=(stored[1], stored[0]), options=SMALL
        )

    torch._dynamo.reset()
    call = torch.compile(fused, fullgraph=True, backend="aot_eager") if compiled else fused
    result = gradients(call, x, weight, bias, upstream=upstream)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_teacher_with_every_option(dtype):
    """Token weights, class weights, a cap, a z-loss and metrics, in every dtype, fused."""
    x, weight, bias, target = problem(dtype)
    stored = teacher("kd").log_softmax(-1).topk(3)[::-1]
    token_weight = torch.linspace(0, 2, N)

    def call(x, w, b):
        loss = labo.TopKDistillationLoss(weight=torch.linspace(0.5, 2, V).to(x.dtype))
        return labo.linear_loss(
            x,
            w,
            target,
            loss,
            linear_bias=b,
            softcap=3.0,
            teacher_logits=stored,
            token_weight=token_weight,
            z_loss=1e-2,
            return_metrics=True,
            options=SMALL,
        )

    scale = torch.tensor(1024.0)  # a loss scale, with which float16 does not underflow
    wide = (x.double(), weight.double(), bias.double())
    exact = gradients(lambda *t: call(*t)[0], *wide, upstream=scale.double())
    result = gradients(lambda *t: call(*t)[0], x, weight, bias, upstream=scale)
    for ours, truth in zip(result, exact, strict=True):
        error = (ours.double() - truth).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * truth.abs().max()
    found, expected = (call(*t)[1] for t in ((x, weight, bias), wide))
    assert found.targets == N - 1
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=8 * torch.finfo(dtype).eps, atol=1e-6)


def test_stored_teacher_refused():
    x, weight, _, target = problem()
    loss, stored = labo.TopKDistillationLoss(), torch.zeros(N, 2)
    for given, sentence in (
        (None, "needs indices and log_probabilities"),
        (stored, "must be the pair"),
        ((stored, stored), "indices must be integers"),
        ((stored[1:].long(), stored[1:]), r"must have shape \(13, 'k'\)"),
        ((stored.long(), stored - 1), "has a class twice"),
    ):
        with pytest.raises(ValueError, match=sentence):
            labo.linear_loss(x, weight, target, loss, teacher_logits=given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["reference", "fused"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", sorted(WITH_TEACHER))
def test_teacher_as_an_output_layer(name, reduction, dtype):
    x, weight, bias, target = problem(dtype)
    hidden, other, _, _ = problem(dtype, seed=5)
    loss = build(name, reduction=reduction)
    plain = hidden @ other.T
    for layer, logits in (
        ((hidden, other, bias), plain + bias),
        (labo.TeacherHead(hidden, other, softcap=1.5), 1.5 * torch.tanh(plain / 1.5)),
    ):
        by_layer, whole = (
            gradients(
                lambda x, w, t=teacher: labo.linear_loss(
                    x, w, target, loss, linear_bias=bias, teacher_logits=t, options=SMALL
                ).sum(),
                x,
                weight,
            )
            for teacher in (layer, logits)
        )
        torch.testing.assert_close(by_layer, whole)


def capped(loss, x, weight, bias, target, teacher_logits=None):
    """The output layer of Gemma 2, then the loss."""
    extra = () if teacher_logits is None else (teacher_logits,)
    logits = torch.nn.functional.linear(x, weight, bias)
    return loss(torch.tanh(logits / 1.5) * 1.5, target, *extra)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_softcap_equals_layer_cap_then_loss(name, reduction):
    x, weight, bias, target = problem()
    loss, teacher_logits = build(name, reduction=reduction), teacher(name)
    upstream = None if reduction != "none" else torch.linspace(0, 2, N, dtype=torch.float64)
    expected = gradients(
        lambda x, w, b: capped(loss, x, w, b, target, teacher_logits),
        x,
        weight,
        bias,
        upstream=upstream,
    )
    result = gradients(
        lambda x, w, b: labo.linear_loss(
            x,
            w,
            target,
            loss,
            linear_bias=b,
            softcap=1.5,
            teacher_logits=teacher_logits,
            options=SMALL,
        ),
        x,
        weight,
        bias,
        upstream=upstream,
    )
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["labo", "ls", "ce"])
def test_softcap_on_the_fused_backends(name):
    x, weight, bias, target = problem(torch.float32)
    expected = gradients(lambda x, w, b: capped(build(name), x, w, b, target), x, weight, bias)
    for impl in ("native", "blocked"):
        result = gradients(
            lambda x, w, b, i=impl: labo.linear_loss(
                x, w, target, build(name), linear_bias=b, softcap=1.5, impl=i, options=SMALL
            ),
            x,
            weight,
            bias,
        )
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ls", "cp"])
def test_softcap_gradcheck(name):
    x, weight, bias, target = problem()
    loss = build(name, reduction="none")
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda x, w, b: labo.linear_loss(
            x, w, target, loss, linear_bias=b, softcap=1.5, options=SMALL
        ),
        leaves,
    )


def test_leading_dimensions():
    x, weight, bias, target = problem(torch.float32)
    loss = build("labo", reduction="none")
    flat = labo.linear_loss(x, weight, target, loss, linear_bias=bias)
    shaped = labo.linear_loss(
        x.reshape(1, 13, D), weight, target.reshape(1, 13), loss, linear_bias=bias
    )
    assert shaped.shape == (1, 13)
    assert torch.equal(shaped[0], flat)


@pytest.mark.parametrize("name", ["labo", "cp"])
def test_class_probabilities(name):
    x, weight, bias, _ = problem()
    soft = torch.rand(N, V, dtype=torch.float64).softmax(-1)
    loss = build(name)
    torch.testing.assert_close(
        labo.linear_loss(x, weight, soft, loss, linear_bias=bias, options=SMALL),
        apart(loss, x, weight, bias, soft),
    )


@pytest.mark.parametrize("name", ["labo", "ls", "ce", "cp"])
def test_class_weights_and_other_ignore_index(name):
    x, weight, _, target = problem(torch.float32)
    loss = MODULES[name](V)
    loss.weight = torch.rand(V)
    loss.ignore_index = 2
    target[3] = 2
    expected = gradients(lambda x, w: apart(loss, x, w, None, target), x, weight)
    result = gradients(lambda x, w: labo.linear_loss(x, w, target, loss, options=SMALL), x, weight)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@each_loss
def test_nothing_to_count(name):
    x, weight, _, _ = problem()
    loss, teacher_logits = build(name), teacher(name)
    for rows in (0, N):
        part = None if teacher_logits is None else teacher_logits[:rows]
        value, d_x, d_weight = gradients(
            lambda x, w, n=rows, s=part: labo.linear_loss(
                x, w, torch.full((n,), -100), loss, teacher_logits=s
            ),
            x[:rows],
            weight,
        )
        assert value == 0
        assert d_x.count_nonzero() == 0
        assert d_weight.count_nonzero() == 0


def test_warmup_uses_the_loss_of_the_step():
    x, weight, _, target = problem(torch.float32)
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    before = labo.linear_loss(x, weight, target, loss)
    assert torch.equal(before, labo.linear_loss(x, weight, target, loss.before))
    loss.step()
    after = labo.linear_loss(x, weight, target, loss)
    assert torch.equal(after, labo.linear_loss(x, weight, target, loss.after))


def test_autocast_is_that_of_the_layer():
    x, weight, bias, target = problem(torch.float32)
    loss = labo.LABOLoss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = gradients(lambda x, w, b: apart(loss, x, w, b, target), x, weight, bias)
        result = gradients(
            lambda x, w, b: labo.linear_loss(x, w, target, loss, linear_bias=b), x, weight, bias
        )
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["labo", "cp"])
def test_bits_do_not_depend_on_threads(name):
    """With matrix products that are exact: those of PyTorch may depend on the threads.

    Each entry of a product, of the gradients too, is a sum with at most one term other than 0, and
    powers of two in the weight make that term exact before the bias is added.
    """
    torch.manual_seed(0)
    bias, target = torch.randn(4000), torch.randint(4000, (300,))
    x, weight = torch.zeros(300, 64), torch.zeros(4000, 64)
    column = torch.arange(64)
    x[torch.randperm(300)[:64], column] = torch.randn(64)
    weight[torch.randperm(4000)[:64], column] = 2.0 ** torch.randint(-1, 3, (64,))
    loss = MODULES[name](4000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(
                gradients(
                    lambda x, w, b: labo.linear_loss(x, w, target, loss, linear_bias=b),
                    x,
                    weight,
                    bias,
                )
            )
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_second_backward():
    x, weight, _, target = problem(torch.float32)
    x.requires_grad_()
    loss = labo.linear_loss(x, weight, target, labo.LABOLoss())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through linear_loss"):
        loss.backward()
    rows = labo.linear_loss(x, weight, target, labo.LABOLoss(reduction="none"))
    (first,) = torch.autograd.grad(rows.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(first, again)


def test_chunks_are_even():
    options = labo.LinearLossOptions(memory_budget=1000)
    assert options.most_rows(bytes_per_row=10) == 100
    assert options.most_rows(bytes_per_row=10_000) == 1
    assert labo.LinearLossOptions(batch_chunk_size=7).most_rows(10) == 7
    assert linear._chunks(101, 100) == [slice(0, 51), slice(51, 101)]
    assert linear._chunks(5, 1) == [slice(i, i + 1) for i in range(5)]
    assert linear._chunks(0, 7) == []


# ------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("name", ["labo", "cp"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_softcap_compiles_whole(name, reduction):
    x, weight, bias, target = problem(torch.float32)
    loss = build(name, reduction=reduction)

    def step(x, w, b):
        value = labo.linear_loss(x, w, target, loss, linear_bias=b, softcap=1.5, options=SMALL)
        return (value * torch.linspace(1, 2, N)).sum() if reduction == "none" else 3 * value

    expected = gradients(step, x, weight, bias)
    torch._dynamo.reset()
    result = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), x, weight, bias)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["labo", "ls", "ce", "cp", "kd"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiles_whole(name, reduction):
    x, weight, bias, target = problem(torch.float32)
    teacher_logits = teacher(name)
    teacher_logits = None if teacher_logits is None else teacher_logits.float()
    loss = build(name, reduction=reduction)

    def step(x, w, b):
        value = labo.linear_loss(
            x, w, target, loss, linear_bias=b, teacher_logits=teacher_logits, options=SMALL
        )
        return (value * torch.linspace(1, 2, N)).sum() if reduction == "none" else 3 * value

    expected = gradients(step, x, weight, bias)
    torch._dynamo.reset()
    result = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), x, weight, bias)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mode", "softcap", "z_loss"), [(0, None, 0.1), (1, None, 0.0), (2, None, 0.0), (3, 2.0, 0.0)]
)
def test_operator_check(dtype, mode, softcap, z_loss):
    x, weight, bias, target = problem(dtype)
    losses = (labo.CrossEntropyLoss, labo.LabelSmoothingLoss, labo.LABOLoss, labo.LABOLoss)
    loss = losses[mode](z_loss=z_loss)
    fixed = (softcap, target, 4, mode == 3, *FastRows(loss, "native").pack())
    token_weight = torch.rand(N) if mode == 3 else None
    mean = (torch.tensor(12.0), token_weight)
    for grad in (False, True):
        tensors = [t.clone().requires_grad_(grad) for t in (x, weight, bias)]
        needs = [grad] * 3
        torch.library.opcheck(linear.linear_loss_op, (*tensors, *fixed, *mean, needs))
        torch.library.opcheck(linear.linear_rows_op, (*tensors, *fixed))
    upstream = torch.rand(N)
    torch.library.opcheck(
        linear.linear_rows_backward_op,
        (x, weight, bias, *fixed, upstream, [True, False, True]),
    )


@pytest.mark.parametrize("name", ["cp", "kd", "mls"])
def test_operator_check_of_any_loss(name):
    x, weight, bias, target = problem(torch.float32)
    teacher_logits = teacher(name)
    given = () if teacher_logits is None else (teacher_logits,)
    loss = linear._AutogradLoss(build(name).having(reduction="none", impl="reference"), given)
    fixed = (None, target, 4, True, *loss.pack())
    for grad in (False, True):
        tensors = [t.clone().requires_grad_(grad) for t in (x, weight, bias)]
        torch.library.opcheck(linear.linear_autograd_op, (*tensors, *fixed))
    torch.library.opcheck(
        linear.linear_autograd_backward_op,
        (x, weight, bias, *fixed, torch.rand(N), [True, False, True]),
    )


# ------------------------------------------------------------------ the Module, and wrong use


def test_module_is_the_function():
    torch.manual_seed(0)
    head = labo.LinearLoss(D, V, labo.LABOLoss(), bias=True)
    x, target = torch.randn(2, 5, D), torch.randint(V, (2, 5))
    expected = head.loss(head.logits(x), target)
    torch.testing.assert_close(head(x, target), expected)
    head(x, target).backward()
    assert head.linear.weight.grad is not None
    twin = copy.deepcopy(head)
    twin.load_state_dict(head.state_dict())
    assert torch.equal(twin(x, target), head(x, target))
    assert "LABOLoss(tau=1.25" in repr(head)


def test_module_with_a_cap():
    torch.manual_seed(0)
    head = labo.LinearLoss(D, V, labo.LABOLoss(), softcap=0.5)
    x, target = 9 * torch.randn(2, 5, D), torch.randint(V, (2, 5))
    assert head.logits(x).abs().max() <= 0.5
    torch.testing.assert_close(head(x, target), head.loss(head.logits(x), target))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"loss": torch.nn.CrossEntropyLoss()}, ValueError, "takes a row-wise loss of labo"),
        ({"loss": labo.BetaSmoothingLoss()}, ValueError, "not BetaSmoothingLoss"),
        ({"loss": labo.KRLSLoss(V)}, ValueError, "not KRLSLoss"),
        ({"loss": labo.LABOLoss(dim=1)}, ValueError, "must have dim=-1"),
        ({"loss": labo.LABOLoss(weight=torch.ones(3))}, ValueError, "weight must have shape"),
        ({"input": torch.randn(N, D + 1)}, ValueError, r"linear_weight must have shape \(V, D\)"),
        ({"linear_bias": torch.randn(3)}, ValueError, "linear_bias must have shape"),
        ({"input": torch.randn(N, D).double()}, ValueError, "must have the same dtype"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"got \(3,\)"),
        ({"target": torch.full((N,), V)}, IndexError, r"target 11 at position 0 is outside"),
        ({"impl": "nativ"}, ValueError, "did you mean 'native'"),
        ({"softcap": 0.0}, ValueError, "softcap must be a number above 0"),
        (
            {"loss": labo.LABOLoss(alpha_grad=True), "impl": "native"},
            ValueError,
            "does not support",
        ),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_refuses(change, error, sentence, reduction):
    x, weight, bias, target = problem(torch.float32)
    call = {"input": x, "linear_weight": weight, "target": target, "loss": labo.LABOLoss()}
    call |= {"linear_bias": bias} | change
    call["loss"].reduction = reduction
    with pytest.raises(error, match=sentence):
        labo.linear_loss(**call)


@pytest.mark.parametrize("function", [labo.linear_loss, labo.parallel.linear_loss])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"z_loss": "1e-4"}, "z_loss must be a finite number of 0 or more, got '1e-4'"),
        ({"z_loss": None}, "z_loss must be a finite number of 0 or more, got None"),
        ({"z_loss": True}, "z_loss must be a finite number of 0 or more, got True"),
        ({"softcap": "30"}, "softcap must be a number above 0 or None, got '30'"),
        ({"softcap": True}, "softcap must be a number above 0 or None, got True"),
        ({"options": 64}, r"options must be a LinearLossOptions, got 64.*batch_chunk_size=64\)"),
        ({"loss": labo.LABOLoss}, r"loss must be a Module, got the class: write LABOLoss\("),
        (
            {"linear_weight": nn.Linear(D, V)},
            "linear_weight must be a tensor, got Linear: pass linear.weight, and linear.bias as",
        ),
        ({"linear_weight": None}, "linear_weight must be a tensor, got NoneType: pass linear.wei"),
        ({"input": {"logits": 1}}, "input must be a tensor, got dict: pass the hidden states"),
        ({"target": [0, 1]}, "target must be a tensor, got list: pass class indices"),
    ],
)
def test_arguments_of_the_wrong_type(function, change, sentence):
    x, weight, _, target = problem(torch.float32)
    call = {"input": x, "linear_weight": weight, "target": target, "loss": labo.LABOLoss()}
    with pytest.raises((TypeError, ValueError), match=sentence):
        function(**call | change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss": "labo"}, "takes a row-wise loss of labo, not str"),
        ({"loss": labo.LABOLoss}, "got the class"),
        ({"loss": nn.CrossEntropyLoss()}, "takes a row-wise loss of labo, not CrossEntropyLoss"),
        ({"z_loss": "1"}, "z_loss must be"),
        ({"softcap": "30"}, "softcap must be"),
        ({"options": 64}, "options must be"),
        ({"impl": "nativ"}, "did you mean 'native'"),
    ],
)
def test_module_refuses_at_construction(change, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        labo.LinearLoss(D, V, **{"loss": labo.LABOLoss()} | change)


def test_options_refuse():
    with pytest.raises(ValueError, match="batch_chunk_size must be 1 or more"):
        labo.LinearLossOptions(batch_chunk_size=0)
    with pytest.raises(ValueError, match="memory_budget must be 1 or more"):
        labo.LinearLossOptions(memory_budget=-1)


# ------------------------------------------------------------------ teachers


def shaped_problem():
    x, weight, _, _ = problem()
    x = torch.randn(3, 4, D, dtype=torch.float64)
    return x, weight, torch.randint(V, (3, 4)), torch.randn(3, 4, V, dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(WITH_TEACHER))
def test_refuses_a_teacher_of_other_rows(name):
    """The same number of rows is not enough: it may be unshifted, transposed or flat."""
    x, weight, target, logits = shaped_problem()
    loss = build(name)
    labo.linear_loss(x, weight, target, loss, teacher_logits=logits)
    wrong = (
        logits.transpose(0, 1),
        logits.reshape(12, V),
        torch.cat([logits, logits[:, :1]], 1),  # before the shift by one
        logits[:, :3],
        logits[..., :-1],
        logits[0],
    )
    for teacher_logits in wrong:
        for error in (TypeError, ValueError):
            with pytest.raises(error, match=r"teacher_logits must have shape \(3, 4, 11\)"):
                labo.linear_loss(x, weight, target, loss, teacher_logits=teacher_logits)
    hidden, matrix = torch.randn(3, 4, 5).double(), torch.randn(V, 5).double()
    labo.linear_loss(x, weight, target, loss, teacher_logits=(hidden, matrix))
    for layer in (
        (hidden.transpose(0, 1), matrix),
        (hidden[:, :3], matrix),
        (hidden.reshape(12, 5), matrix),
        (hidden, matrix[:-1]),
    ):
        with pytest.raises(ValueError, match=r"hidden states must have shape \(3, 4, 'E'\)"):
            labo.linear_loss(x, weight, target, loss, teacher_logits=layer)
    with pytest.raises(ValueError, match=r"weight must have shape \(V, D\) for the teacher's"):
        labo.linear_loss(x, weight, target, loss, teacher_logits=(hidden, matrix[:, :-1]))
    with pytest.raises(ValueError, match=r"bias must have shape \(11,\)"):
        labo.linear_loss(x, weight, target, loss, teacher_logits=(hidden, matrix, matrix[0]))
    with pytest.raises(ValueError, match="must have the same dtype"):
        labo.linear_loss(x, weight, target, loss, teacher_logits=(hidden.float(), matrix))
    with pytest.raises(ValueError, match="got 1 tensors"):
        labo.linear_loss(x, weight, target, loss, teacher_logits=(hidden,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_missing_and_unused_teachers_are_refused(reduction):
    x, weight, target, logits = shaped_problem()
    for name in ("kd", "cskd"):
        with pytest.raises(TypeError, match="needs teacher_logits: the logits of a teacher"):
            labo.linear_loss(x, weight, target, build(name, reduction=reduction))
    for name in ("labo", "ce", "cp"):
        with pytest.raises(TypeError, match="takes no teacher logits"):
            labo.linear_loss(
                x, weight, target, build(name, reduction=reduction), teacher_logits=logits
            )
    past = build("pskd", reduction=reduction)
    torch.testing.assert_close(
        labo.linear_loss(x, weight, target, past), past(x @ weight.T, target)
    )


def test_warmup_drops_the_teacher_of_the_loss_that_takes_none():
    x, weight, target, logits = shaped_problem()
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.DistillationLoss(), steps=2)
    before = labo.linear_loss(x, weight, target, loss, teacher_logits=logits)
    torch.testing.assert_close(before, loss.before(x @ weight.T, target))
    loss.step()
    after = labo.linear_loss(x, weight, target, loss, teacher_logits=logits)
    torch.testing.assert_close(after, loss.after(x @ weight.T, target, logits))


def test_teacher_under_autocast():
    """Its output layer is cast as the student's is."""
    x, weight, target, _ = shaped_problem()
    x, weight = x.float(), weight.float()
    hidden, matrix = torch.randn(3, 4, 5), torch.randn(V, 5)
    loss = labo.DistillationLoss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = labo.linear_loss(
            x, weight, target, loss, teacher_logits=(hidden.bfloat16(), matrix)
        )
        linear = torch.nn.functional.linear
        expected = loss(linear(x, weight), target, linear(hidden, matrix))
    torch.testing.assert_close(value, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["auto", "reference", "compiled"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["kd", "pskd"])
def test_a_quantized_teacher(monkeypatch, name, reduction, impl):
    """By blocks of classes, and equal to the dequantized one; whole nowhere."""
    monkeypatch.setattr(quantized, "_BLOCK_BYTES", 3 * 5 * 4)  # three classes
    x, weight, target, _ = shaped_problem()
    x, weight, hidden = x.float(), weight.float(), torch.randn(3, 4, 5)
    tensor = Eighths(torch.randint(-20, 20, (V, 5), dtype=torch.int8))
    dense, codes = tensor.dequantize(), tensor.codes
    function = labo.QuantizedWeight(lambda a, b: codes[a:b] / 8, (V, 5))
    loss, bias = build(name, reduction=reduction), torch.randn(V)
    backend = "auto" if impl == "compiled" else impl

    def step(x, given):
        head = labo.TeacherHead(hidden, given, bias, 3.0)
        return labo.linear_loss(
            x, weight, target, loss, teacher_logits=head, impl=backend, options=SMALL
        )

    compiled = torch.compile(step, backend="aot_eager") if impl == "compiled" else step
    results = []
    for call, given in ((step, dense), (compiled, function), (step, tensor.requires_grad_())):
        leaf = x.clone().requires_grad_()
        value = call(leaf, given)
        results.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-6)


def test_teachers_that_are_no_tensors():
    x, weight, target, _ = shaped_problem()
    hidden, matrix = torch.randn(3, 4, 5).double(), torch.randn(V, 5).double()
    low = labo.LowRankWeight(matrix, torch.ones(1, 5).double(), torch.ones(V, 1).double(), 1.0)
    for layer, sentence in (
        ((hidden, nn.Linear(5, V)), "teacher_weight must be a tensor, got Linear: pass linear.wei"),
        ((hidden, None), "teacher_weight must be a tensor, got NoneType"),
        ((hidden, matrix, nn.Linear(5, V)), "teacher_bias must be a tensor, got Linear"),
        ((nn.Linear(5, V), matrix), "teacher_hidden must be a tensor, got Linear"),
        ((hidden, low), "teacher_weight cannot be a LowRankWeight: merge the adapter"),
        (nn.Linear(5, V), "teacher_logits must be logits, or hidden states.*got Linear"),
    ):
        with pytest.raises(TypeError, match=sentence):
            labo.linear_loss(x, weight, target, labo.DistillationLoss(), teacher_logits=layer)


def test_refuses_class_weights_that_require_a_gradient():
    x, weight, _, target = problem()
    loss = build("ce", weight=torch.rand(V, dtype=torch.float64, requires_grad=True))
    with pytest.raises(ValueError, match="no gradient for class weights"):
        labo.linear_loss(x, weight, target, loss)
