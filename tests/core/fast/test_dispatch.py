"""torch.compile: one graph for all lengths, marked dynamic or found to be."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import labo
from conftest import LOSS_CASES, MODULES, each_kind
from labo.loss import Loss

LENGTHS = [5, 7, 64, 33_000, 3]  # sums over more than 2^15 rows are split elsewhere
K = 6


def counter(backend):
    torch._dynamo.reset()
    return torch._dynamo.testing.CompileCounterWithBackend(backend)


def dynamic(*tensors):
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


def compile_for_all_lengths(case, marked):
    """How often a loss is compiled."""
    compiles = counter("eager")
    compiled = torch.compile(
        lambda z, t, extra: case(z, t, extra=extra), fullgraph=True, backend=compiles
    )
    for length in LENGTHS:
        logits, target = torch.randn(length, K, requires_grad=True), torch.randint(K, (length,))
        extra = case.extra(logits)
        if marked:
            dynamic(logits, target, *(x for x in extra if x.shape[0] == length))
        value = compiled(logits, target, extra)
        torch.testing.assert_close(value, case(logits, target, extra=extra), rtol=1e-4, atol=1e-5)
    return compiles.frame_count


@each_kind
def test_a_loss_is_compiled_once_for_all_lengths(case):
    assert compile_for_all_lengths(case, marked=True) == 1


@pytest.mark.parametrize("name", ["labo", "cp", "kd"])
def test_a_loss_is_compiled_twice_if_the_length_is_not_marked(name):
    """PyTorch has to find out that the length changes."""
    (case,) = [case for case in LOSS_CASES if case.name == name]
    assert compile_for_all_lengths(case, marked=False) == 2


def compile_linear_loss(name, reduction, marked):
    """How often it is compiled, for some lengths and numbers of chunks."""
    compiles = counter("aot_eager")
    loss = MODULES[name](K)
    loss.reduction = reduction
    weight = torch.randn(K, 4, requires_grad=True)
    options = labo.LinearLossOptions(batch_chunk_size=16)

    def step(x, target, teacher):
        value = labo.linear_loss(x, weight, target, loss, teacher_logits=teacher, options=options)
        return value.sum()

    compiled = torch.compile(step, fullgraph=True, backend=compiles)
    for length in (5, 7, 64, 3):
        x, target = torch.randn(length, 4), torch.randint(K, (length,))
        teacher = torch.randn(length, K) if name == "kd" else None
        results = []
        for run in (compiled, step):
            leaf = x.clone().requires_grad_()
            if marked:
                dynamic(leaf, target, *([] if teacher is None else [teacher]))
            value = run(leaf, target, teacher)
            results.append((value.detach(), *torch.autograd.grad(value, (leaf, weight))))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return compiles.frame_count


@pytest.mark.parametrize("name", ["ls", "labo", "fl", "mls", "kd"])
def test_linear_loss_is_compiled_once_for_all_lengths(name):
    assert compile_linear_loss(name, "mean", marked=True) == 1


@pytest.mark.parametrize("name", ["labo", "cp", "kd"])
def test_linear_loss_is_compiled_twice_if_the_length_is_not_marked(name):
    assert compile_linear_loss(name, "none", marked=False) == 2


@pytest.mark.parametrize("name", ["cp", "wls", "mls", "ger"])
def test_compiled_linear_loss_follows_a_changed_hyper_parameter(name):
    """An operator gets the loss as text: what it says must not be that of the first call."""
    torch._dynamo.reset()
    loss = MODULES[name](K)
    x, weight, target = torch.randn(9, 4), torch.randn(K, 4), torch.randint(K, (9,))
    compiled = torch.compile(
        lambda x: labo.linear_loss(x, weight, target, loss), fullgraph=True, backend="aot_eager"
    )
    attribute = "beta" if hasattr(loss, "beta") else "alpha"
    seen = set()
    for value in (0.1, 0.4, 0.7):
        setattr(loss, attribute, value)
        result = compiled(x)
        torch.testing.assert_close(result, labo.linear_loss(x, weight, target, loss))
        seen.add(result.item())
    assert len(seen) == 3


def test_compiled_linear_loss_tells_losses_of_one_name_apart():
    """Two classes of the same name, as in a notebook whose cell is run again."""

    def make(factor):
        class Penalty(Loss):
            def value(self, row):
                return factor * (row.top + row.log_e)

        return Penalty()

    x, weight, target = torch.randn(9, 4), torch.randn(K, 4), torch.randint(K, (9,))
    values = []
    for loss in (make(1.0), make(3.0)):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, loss=loss: labo.linear_loss(x, weight, target, loss), backend="aot_eager"
        )
        values.append(compiled(x))
        torch.testing.assert_close(values[-1], labo.linear_loss(x, weight, target, loss))
    torch.testing.assert_close(values[1], 3 * values[0])


@pytest.mark.parametrize(
    ("name", "impl"), [("cp", "native"), ("kd", "native"), ("labo", "blocked")]
)
def test_the_gradient_is_rounded_once(name, impl):
    """The operator stores no gradient, where value and gradient take two passes anyway."""
    (case,) = [case for case in LOSS_CASES if case.name == name]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    logits, target = torch.randn(32, 50).bfloat16(), torch.randint(50, (32,))
    extra = case.extra(logits)

    def loss(z):
        return case(z, target, extra=extra, impl=impl, reduction="sum") / 3

    grads = []
    for run in (torch.compile(loss, fullgraph=True, backend=backend), loss):
        leaf = logits.clone().requires_grad_()
        grads += torch.autograd.grad(run(leaf), leaf)
    (call,) = [node for node in graphs[0].graph.nodes if "labo.rows" in str(node.target)]
    assert call.args[2] is False
    assert torch.equal(*grads)


def test_no_gradient_is_computed_under_no_grad():
    """The operator has with_grad=False, and returns no gradient."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    logits, target = torch.randn(4, K, requires_grad=True), torch.randint(K, (4,))
    compiled = torch.compile(labo.functional.labo_loss, backend=backend)
    with torch.no_grad():
        compiled(logits, target)
    (call,) = [node for node in graphs[0].graph.nodes if "labo.rows" in str(node.target)]
    assert call.args[2] is False
