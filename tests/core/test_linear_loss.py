"""Output layer and loss in one: equal to the two apart, without the logits."""

from __future__ import annotations

import copy

import pytest
import torch

import labo
from conftest import MODULES, gradient
from labo.fused import linear
from probes import LargestTensor

N, D, V = 13, 6, 11
SECOND = {"kd", "cskd", "pskd"}
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
    if name not in SECOND:
        return None
    return torch.randn(N, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def apart(loss, x, weight, bias, target, second=None):
    extra = () if second is None else (second,)
    return loss(torch.nn.functional.linear(x, weight, bias), target, *extra)


def gradients(function, *tensors, upstream=None):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    value = function(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves, upstream)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_layer_then_loss(name, reduction):
    x, weight, bias, target = problem()
    loss, second = build(name, reduction=reduction), teacher(name)
    upstream = None if reduction != "none" else torch.linspace(0, 2, N, dtype=torch.float64)
    expected = gradients(
        lambda x, w, b: apart(loss, x, w, b, target, second), x, weight, bias, upstream=upstream
    )
    for options in (None, SMALL, labo.LinearLossOptions(batch_chunk_size=1)):
        result = gradients(
            lambda x, w, b, o=options: labo.linear_loss(
                x, w, target, loss, linear_bias=b, second=second, options=o
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


@pytest.mark.parametrize("name", ["labo", "ls", "ce", "cp", "kd"])
def test_partial_gradients_skip_their_work(name, monkeypatch):
    x, weight, bias, target = problem()
    loss, second = build(name), teacher(name)
    expected = gradients(lambda x, w, b: apart(loss, x, w, b, target, second), x, weight, bias)[1:]
    seen = []
    run = linear._run

    def spy(*arguments):
        seen.append(arguments[-1])
        return run(*arguments)

    monkeypatch.setattr(linear, "_run", spy)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        tensors = [
            t.clone().requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)
        ]
        value = labo.linear_loss(
            tensors[0], tensors[1], target, loss, linear_bias=tensors[2], second=second
        )
        value.backward()
        assert seen[-1] == wanted
        for tensor, w, truth in zip(tensors, wanted, expected, strict=True):
            assert (tensor.grad is not None) == w
            if w:
                torch.testing.assert_close(tensor.grad, truth)
    with torch.no_grad():
        labo.linear_loss(x, weight, target, loss, linear_bias=bias, second=second)
    assert seen[-1] == (False, False, False)


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
    second = (x.detach().sin(), weight.detach().cos()) if name in SECOND else None
    with LargestTensor() as seen:
        value = labo.linear_loss(
            x,
            weight,
            target,
            loss,
            second=second,
            options=labo.LinearLossOptions(batch_chunk_size=16),
        )
        value.sum().backward()
    # the hidden states, the weight, or a chunk of logits (three such are one buffer for a chunk)
    assert seen.largest <= max(rows * width, classes * width, 3 * 16 * classes)
    assert seen.largest < rows * classes / 4


@pytest.mark.parametrize("name", sorted(SECOND))
def test_teacher_as_an_output_layer(name):
    x, weight, bias, target = problem()
    hidden, other, _, _ = problem(seed=5)
    loss = build(name)
    whole = labo.linear_loss(
        x, weight, target, loss, linear_bias=bias, second=hidden @ other.T + bias
    )
    by_layer = labo.linear_loss(
        x, weight, target, loss, linear_bias=bias, second=(hidden, other, bias), options=SMALL
    )
    torch.testing.assert_close(by_layer, whole)


def capped(loss, x, weight, bias, target, second=None):
    """The output layer of Gemma 2, then the loss."""
    extra = () if second is None else (second,)
    logits = torch.nn.functional.linear(x, weight, bias)
    return loss(torch.tanh(logits / 1.5) * 1.5, target, *extra)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_softcap_equals_layer_cap_then_loss(name, reduction):
    x, weight, bias, target = problem()
    loss, second = build(name, reduction=reduction), teacher(name)
    upstream = None if reduction != "none" else torch.linspace(0, 2, N, dtype=torch.float64)
    expected = gradients(
        lambda x, w, b: capped(loss, x, w, b, target, second), x, weight, bias, upstream=upstream
    )
    result = gradients(
        lambda x, w, b: labo.linear_loss(
            x, w, target, loss, linear_bias=b, softcap=1.5, second=second, options=SMALL
        ),
        x,
        weight,
        bias,
        upstream=upstream,
    )
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["labo", "ls", "ce"])
def test_softcap_in_the_fast_layers(name):
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
    loss, second = build(name), teacher(name)
    for rows in (0, N):
        part = None if second is None else second[:rows]
        value, d_x, d_weight = gradients(
            lambda x, w, n=rows, s=part: labo.linear_loss(
                x, w, torch.full((n,), -100), loss, second=s
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
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64), torch.randn(4000, 64) * 0.1
    target = torch.randint(4000, (300,))
    loss = MODULES[name](4000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(gradients(lambda x, w: labo.linear_loss(x, w, target, loss), x, weight))
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
    (second,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(first, second)


def test_chunks_are_even():
    options = labo.LinearLossOptions(memory_budget=1000)
    assert options.chunk_rows(rows=101, bytes_per_row=10) == 51
    assert options.chunk_rows(rows=5, bytes_per_row=10_000) == 1
    assert labo.LinearLossOptions(batch_chunk_size=7).chunk_rows(101, 10) == 7


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
    second = teacher(name)
    second = None if second is None else second.float()
    loss = build(name, reduction=reduction)

    def step(x, w, b):
        value = labo.linear_loss(x, w, target, loss, linear_bias=b, second=second, options=SMALL)
        return (value * torch.linspace(1, 2, N)).sum() if reduction == "none" else 3 * value

    expected = gradients(step, x, weight, bias)
    torch._dynamo.reset()
    result = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), x, weight, bias)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mode", "softcap"), [(0, None), (1, None), (2, None), (3, None), (3, 2.0)]
)
def test_operator_check(dtype, mode, softcap):
    x, weight, bias, target = problem(dtype)
    fixed = (softcap, mode, 0.3, 1.25, 0.5, -100, "native", 4)
    for grad in (False, True):
        tensors = [t.clone().requires_grad_(grad) for t in (x, weight, bias)]
        needs = [grad] * 3
        torch.library.opcheck(
            linear.linear_loss_op, (*tensors, target, None, *fixed, torch.tensor(12.0), needs)
        )
        torch.library.opcheck(linear.linear_rows_op, (*tensors, target, None, *fixed))
    upstream = torch.rand(N)
    torch.library.opcheck(
        linear.linear_rows_backward_op,
        (x, weight, bias, target, None, *fixed, upstream, [True, False, True]),
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
        ({"input": torch.randn(N, D).double()}, ValueError, "must have one dtype"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"got \(3,\)"),
        ({"target": torch.full((N,), V)}, IndexError, r"target 11 at position 0 is outside"),
        ({"impl": "nativ"}, ValueError, "did you mean 'native'"),
        ({"softcap": 0.0}, ValueError, "softcap must be a number above 0"),
        ({"loss": labo.FocalLoss(), "impl": "native"}, ValueError, "cannot serve this call"),
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


def test_options_refuse():
    with pytest.raises(ValueError, match="batch_chunk_size must be 1 or more"):
        labo.LinearLossOptions(batch_chunk_size=0)
    with pytest.raises(ValueError, match="memory_budget must be 1 or more"):
        labo.LinearLossOptions(memory_budget=-1)
