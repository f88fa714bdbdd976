"""Choosing a backend, its place in autograd, gradients in place, and the operators."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch._dynamo.testing

import labo
from backends import (
    BACKENDS,
    ONE_CALL,
    assert_rounded_once,
    each_backend,
    sample,
)
from labo import functional as F
from labo.fast import blocked, dispatch, native
from labo.loss import Loss
from loss_cases import CASES, MODULES, REPRESENTATIVES, both, gradient
from probes import LargestTensor, is_fused

K = 6


# ------------------------------------------------------------------ choosing a backend


def test_auto_takes_what_fits():
    logits, target = sample(4, 9)
    loss = labo.LABOLoss()
    assert dispatch.choose(loss, logits, target, None) == "native"
    assert dispatch.choose(loss, logits.bfloat16(), target, None) == "native"
    assert dispatch.choose(loss, logits.half(), target, None) == "blocked"
    assert dispatch.choose(loss, logits.double(), target, None) == "reference"
    assert dispatch.choose(loss, logits, logits.softmax(-1), None) == "reference"
    with torch.autograd.forward_ad.dual_level():
        assert dispatch.choose(loss, logits, target, None) == "reference"
    logits.requires_grad_()
    assert is_fused(F.focal_loss(logits, target))
    # the plain formula can be differentiated twice
    (slope,) = torch.autograd.grad(
        F.focal_loss(logits, target, impl="reference"), logits, create_graph=True
    )
    slope.square().sum().backward()


def half_logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).mul(3).half().requires_grad_()


def half_gradient(loss: torch.nn.Module, logits: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    target = torch.arange(len(logits)) % logits.shape[1]
    (grad,) = torch.autograd.grad(loss(logits, target) * scale, logits)
    return grad


@pytest.mark.parametrize("build", [labo.LABOLoss, labo.FocalLoss])
def test_float16_with_few_classes_takes_the_kernel_on_a_copy(build):
    logits, target = half_logits(6, 40), torch.arange(6)
    loss = build()
    copy = logits.detach().float().requires_grad_()
    assert torch.equal(loss(logits, target), build(impl="native")(copy, target))
    assert torch.equal(
        half_gradient(loss, logits), half_gradient(build(impl="native"), copy).half()
    )


def test_the_scale_of_a_grad_scaler_is_in_the_gradient_before_it_is_rounded():
    logits, loss = half_logits(64, 40), labo.LABOLoss(multiplier=1e-6)
    copy = logits.detach().float().requires_grad_()
    assert not half_gradient(loss, logits).any()  # below the smallest number of float16
    scaled = half_gradient(loss, logits, scale=2.0**16)
    assert scaled.any()
    assert torch.equal(scaled, half_gradient(loss, copy, scale=2.0**16).half())


def test_many_classes_in_float16_are_not_copied(monkeypatch):
    monkeypatch.setattr(dispatch, "_COPIED_CLASSES", 39)
    logits, target = half_logits(6, 40), torch.arange(6)
    blocked = labo.FocalLoss(impl="blocked")(logits, target)
    assert torch.equal(labo.FocalLoss()(logits, target), blocked)


@pytest.mark.parametrize(("classes", "impl"), [(128, "reference"), (129, "native")])
@pytest.mark.parametrize(
    "build", [labo.TopKDistillationLoss, partial(labo.EAFTLoss, top_k=5)], ids=["stored", "top_k"]
)
def test_few_classes_go_to_the_reference_where_that_is_as_fast(build, classes, impl):
    stored = torch.randn(64, classes).log_softmax(-1).topk(4)
    given = (torch.randn(64, classes), torch.arange(64))
    values = {}
    for name in ("auto", "reference", "native"):
        loss = build(impl=name, reduction="none")
        extra = (stored.indices, stored.values) if loss.teacher_is_stored else ()
        values[name] = loss(*given, *extra)
    assert torch.equal(values["auto"], values[impl])
    assert not torch.equal(values["reference"], values["native"])  # so that it tells them apart


def test_without_the_kernel_blocks_serve(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "not built")
    logits, target = sample(4, 9)
    assert dispatch.choose(labo.LABOLoss(), logits, target, None) == "blocked"
    assert labo.backends()["native (CPU)"] == "unavailable: not built"
    torch.testing.assert_close(
        F.labo_loss(logits, target), F.labo_loss(logits, target, impl="reference")
    )
    target[1] = 9
    with pytest.raises(IndexError, match="target 9 at position 1"):
        F.labo_loss(logits, target)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_mean_without_the_c_helper(monkeypatch, compiled):
    """PyTorch adds up the weights, on other devices and under torch.compile, in float64."""
    monkeypatch.setattr(native, "unavailable", lambda: "not built")
    logits, target = sample(400, K, dtype=torch.float64)
    weight = torch.tensor([0.1, 0.3, 0.7, 1.1, 0.9, 1.3], dtype=torch.float64)

    def loss(z):
        return F.cross_entropy_loss(z, target, weight=weight, impl="blocked")

    torch._dynamo.reset()
    run = torch.compile(loss, backend="eager") if compiled else loss
    expected = torch.nn.functional.cross_entropy(logits, target, weight)
    torch.testing.assert_close(run(logits), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_class_weights_are_added_up_in_float32(dtype):
    """1000 weights of about 1: in bfloat16 their sum would be off by a percent."""
    logits, target = sample(1000, K)
    weight = torch.tensor([0.9, 1.1, 1.05, 0.95, 1.0, 1.2]).to(dtype)
    expected = torch.nn.functional.cross_entropy(logits, target, weight.float())
    for impl in ("reference", *BACKENDS):
        value = F.cross_entropy_loss(logits, target, weight=weight, impl=impl)
        torch.testing.assert_close(value, expected)
    loss = labo.CrossEntropyLoss(weight=weight)
    torch.testing.assert_close(labo.linear_loss(logits, torch.eye(K), target, loss), expected)


def test_what_a_backend_refuses():
    logits, target = sample(4, 9)
    prior = torch.ones(9) / 9
    for wrong, sentence in (
        ({"impl": "fast"}, "unknown impl 'fast'"),
        ({"impl": "native", "alpha_grad": True}, "does not support alpha_grad=True"),
        ({"impl": "blocked", "alpha_grad": True}, "does not support alpha_grad=True"),
        (
            {"impl": "native", "logits": logits.double()},
            r"takes float32 and bfloat16, not torch\.fl",
        ),
        ({"impl": "native", "target": logits.softmax(-1)}, "class probabilities as targets"),
        ({"inplace": True, "logits": logits.T.contiguous().T}, "contiguous"),
        ({"inplace": True, "impl": "reference"}, "not possible with the reference"),
        (
            {"inplace": True, "target": logits.softmax(-1)},
            r"not possible with the reference \(class probabilities",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            F.labo_loss(**{"logits": logits, "target": target} | wrong)
    with pytest.raises(ValueError, match="does not support a prior"):
        F.generalized_entropy_loss(logits, target, prior=prior, impl="native")


@each_backend
def test_what_every_backend_refuses(impl):
    logits, target = sample(4, 9)
    weight = torch.rand(9, requires_grad=True)
    with pytest.raises(ValueError, match="does not support class weights that require a gradient"):
        F.labo_loss(logits, target, weight=weight, impl=impl)
    F.labo_loss(logits, target, weight=weight).backward()  # the reference gives them one
    assert weight.grad is not None
    with pytest.raises(ValueError, match="target is on meta, the logits are on cpu"):
        F.labo_loss(logits, target.to("meta"), impl=impl)
    with pytest.raises(ValueError, match="weight is on meta, the logits are on cpu"):
        F.labo_loss(logits, target, weight=torch.ones(9, device="meta"), impl=impl)
    for bad in (9, -1, 2**62, -(2**62)):
        target[2] = bad
        with pytest.raises(IndexError, match=f"target {bad} at position 2 is outside"):
            F.labo_loss(logits, target, impl=impl)


# ------------------------------------------------------------------ gradients


@each_backend
@pytest.mark.parametrize("function", [F.labo_loss, F.focal_loss])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward(impl, function, reduction):
    """As with ``F.cross_entropy``: the gradients of both passes are added, with their factors."""
    logits, target = sample(4, 9)
    leaf = logits.clone().requires_grad_()
    loss = function(leaf, target, impl=impl, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    (3 * loss).backward()
    torch.testing.assert_close(leaf.grad, 4 * once)
    for dtype in (torch.float32, torch.float16):
        output = logits.to(dtype).requires_grad_() * 1
        used = "auto" if dtype == torch.float16 else impl
        loss = function(output, target, impl=used, inplace=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second backward pass through a loss with inpl"):
            loss.backward()


@pytest.mark.parametrize(
    ("impl", "owner", "function"),
    [("native", dispatch, "times_upstream"), ("blocked", blocked, "gradient")],
)
def test_gradient_is_handed_out_not_copied(impl, owner, function, monkeypatch):
    """Autograd copies a gradient that someone else still holds: a worker thread, say."""
    logits, target = sample(64, 20_000)  # enough for several threads
    made, keep = [], getattr(owner, function)

    def spy(*arguments):
        grad = keep(*arguments)
        made.append(grad.data_ptr())
        return grad

    monkeypatch.setattr(owner, function, spy)
    leaf = logits.requires_grad_()
    F.labo_loss(leaf, target, impl=impl).backward()
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == made[0]


@each_backend
def test_gradient_of_the_gradient_is_refused(impl):
    logits, target = sample(4, 9)
    leaf = logits.requires_grad_()
    loss = F.labo_loss(leaf, target, impl=impl)
    with pytest.raises(RuntimeError, match=r'create_graph=True.* use impl="reference"'):
        torch.autograd.grad(loss, leaf, create_graph=True)


@each_backend
def test_no_gradient_is_computed_where_none_is_wanted(impl):
    logits, target = sample(2000, 3000)
    assert not F.labo_loss(logits, target, impl=impl).requires_grad
    logits.requires_grad_()
    with torch.no_grad(), LargestTensor() as seen:
        assert not F.labo_loss(logits, target, impl=impl).requires_grad
    assert seen.largest < logits.numel() / 2


def test_no_buffer_of_a_wider_type():
    """The gradient of bfloat16 logits takes its own size, also with a float32 factor per row."""
    logits, target = sample(64, 60_000, dtype=torch.bfloat16)
    logits.requires_grad_()
    with torch.profiler.profile(profile_memory=True) as seen:
        values = F.labo_loss(logits, target, reduction="none")
        (values * torch.linspace(0.5, 1, 64)).sum().backward()
    largest = max(event.cpu_memory_usage for event in seen.events())
    assert logits.nbytes <= largest < 1.1 * logits.nbytes


def test_backward_notices_changed_tensors():
    """Where the gradient is computed in the backward pass: in blocks, say."""
    for changed in (0, 1):
        logits, target = sample(8, 24, dtype=torch.float16)
        tensors = [logits.requires_grad_() * 1, target]
        loss = F.labo_loss(*tensors, impl="blocked")
        with torch.no_grad():
            tensors[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ------------------------------------------------------------------ gradients in place


@pytest.mark.parametrize("name", ["base", "labo"])
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_place_is_the_same_and_needs_no_buffer(name, impl, dtype):
    if dtype == torch.float16 and impl == "native":
        impl = "auto"
    # With fewer classes float16 takes another backend if it is not in place.
    case, (logits, target) = ONE_CALL[name], sample(1200, 5000, dtype=dtype)
    expected, expected_slope = both(case, logits, target, impl=impl)
    largest = {}
    for inplace in (False, True):
        output = logits.clone().requires_grad_() * 1
        with LargestTensor() as seen:
            value = case(output, target, impl=impl, inplace=inplace)
            (slope,) = torch.autograd.grad(value, output)
        largest[inplace] = seen.largest
        assert torch.equal(value.double(), expected)
        assert torch.equal(slope.double(), expected_slope)
        assert torch.equal(output.detach(), slope) == inplace
        assert (slope.data_ptr() == output.data_ptr()) == inplace
    assert largest[False] == logits.numel()
    # the blocked backend has three buffers for a block of rows
    assert largest[True] <= (3 * 2 << 20) // 4 < logits.numel() / 2


@each_backend
def test_in_place_tells_those_who_saved_the_logits(impl):
    """tanh keeps its output for the backward pass: overwriting it must raise, not corrupt."""
    logits, target = sample(4, 9)
    leaf = logits.requires_grad_()
    loss = F.labo_loss(leaf.tanh(), target, impl=impl, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Same(torch.autograd.Function):
    """A function that hands on its input, as wrappers of modules do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        return upstream


SHARING = {
    "itself": lambda leaf: leaf,
    "view": lambda leaf: leaf.view(2, 2, 9),
    "slice": lambda leaf: leaf[1:3],
    "views of views": lambda leaf: leaf.view(36)[9:].view(3, 9),
    "squeezed": lambda leaf: leaf.unsqueeze(0).squeeze(0),
    "chunk": lambda leaf: leaf.chunk(2)[0],
    "unsafe chunk": lambda leaf: torch.unsafe_chunk(leaf, 2)[0],
    "reshaped": lambda leaf: leaf.reshape(1, 4, 9),
    "function": Same.apply,
    "function of a view": lambda leaf: Same.apply(leaf[1:3]).view(2, 9),
    "transposed twice": lambda leaf: leaf.T.T,
}


@pytest.mark.parametrize("how", SHARING)
def test_in_place_refuses_the_memory_of_a_leaf(how):
    """It would overwrite a parameter."""
    logits, _ = sample(4, 9)
    for leaf in (torch.nn.Parameter(logits.clone()), logits.clone().requires_grad_()):
        shared = SHARING[how](leaf)
        target = torch.zeros(shared.shape[:-1], dtype=torch.long)
        with pytest.raises(ValueError, match="not a leaf that requires a gradient, nor a view of"):
            F.labo_loss(shared, target, inplace=True)
        assert torch.equal(leaf, logits)


def test_in_place_accepts_views_of_the_output_of_a_layer():
    logits, target = sample(4, 9)
    leaf = logits.clone().requires_grad_()
    for output in (leaf * 1, (leaf * 1).view(2, 2, 9), (leaf + 0)[:2], leaf.clone().view(4, 9)):
        rows = target[: output.shape[:-1].numel()].view(output.shape[:-1])
        F.labo_loss(output, rows, inplace=True).backward()
    assert torch.equal(leaf, logits)


@each_backend
def test_in_place_without_rows(impl):
    """Tensors without elements have no memory, so these share none."""
    leaf = torch.empty(0, 9, requires_grad=True)
    loss = F.labo_loss(leaf * 1, torch.empty(0, dtype=torch.long), impl=impl, inplace=True)
    loss.backward()
    assert loss == 0
    assert leaf.grad.shape == (0, 9)


@each_backend
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_place_without_a_gradient_changes_nothing(impl, mode):
    """As in an evaluation: no gradient is computed, so none is written over the logits."""
    logits, target = sample(4, 9)
    output = logits.clone().requires_grad_() * 1
    for some in (output, logits.clone())[mode is torch.enable_grad :]:
        with mode():
            value = F.labo_loss(some, target, impl=impl, inplace=True)
        assert torch.equal(some, logits)
        assert torch.equal(value, F.labo_loss(logits, target, impl=impl))


# ------------------------------------------------------------------ float16 under a loss scale


SCALE = 65536.0  # that of a GradScaler at the start


@pytest.mark.parametrize(
    ("case", "run"),
    [
        *((case, run) for case in ONE_CALL.values() for run in ("blocked", "auto", "in place")),
        (ONE_CALL["labo"], "compiled"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_float16_gradient_has_the_loss_scale_before_it_is_rounded(case, run):
    logits, target = sample(16384, 24, dtype=torch.float16)
    target[5] = -100
    weight = torch.rand(24)

    def scaled(z, **arguments):
        return SCALE * case(z, target, weight=weight, **arguments)

    exact = gradient(lambda z: scaled(z, impl="reference"), logits.double())
    torch._dynamo.reset()
    step = {
        "blocked": lambda z: scaled(z, impl="blocked"),
        "auto": scaled,
        "compiled": torch.compile(lambda z: scaled(z, impl="blocked"), backend="aot_eager"),
        "in place": lambda z: scaled(z * 1, impl="blocked", inplace=True),
    }[run]
    assert_rounded_once(gradient(step, logits), exact)


def test_large_scale_overflows_to_infinity():
    """As a GradScaler expects: it then lowers the scale."""
    logits, target = sample(4, 24, dtype=torch.float16)
    slope = gradient(lambda z: 1e9 * F.labo_loss(z, target), logits)
    assert slope.isinf().any()
    assert not slope.isnan().any()
    assert math.isfinite(F.labo_loss(logits, target).item())


# ------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("loss", [labo.CrossEntropyLoss(), labo.LABOLoss(tau=1.3)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_check(loss, dtype):
    logits, target = sample(4, 9, dtype=dtype)
    target[1] = -100
    packed = dispatch.FastRows(loss, "native").pack()
    torch.library.opcheck(dispatch.rows_op, (logits, target, True, *packed))
    torch.library.opcheck(dispatch.rows_op, (logits.requires_grad_(), target, False, *packed))
    _, sums = dispatch.rows_op(logits.detach(), target, False, *packed)
    upstream = torch.rand(4)
    torch.library.opcheck(
        dispatch.rows_backward_op, (logits.detach(), target, sums, upstream, *packed)
    )


def compiled_counter(backend):
    torch._dynamo.reset()
    return torch._dynamo.testing.CompileCounterWithBackend(backend)


def times_compiled(step, draw, marked, lengths, *parameters):
    """How often a step is compiled without a graph break; its values and gradients are right.

    ``draw`` makes logits or hidden states, targets and what else there is, of a length.
    """
    compiles = compiled_counter("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=compiles)
    for length in lengths:
        x, target, extra = draw(length)
        leaf = x.requires_grad_()
        if marked:
            for tensor in (leaf, target, *(x for x in extra if x.shape[0] == length)):
                torch._dynamo.mark_dynamic(tensor, 0)
        pair = []
        for run in (compiled, step):
            value = run(leaf, target, extra)
            pair.append((value.detach(), *torch.autograd.grad(value, (leaf, *parameters))))
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
    return compiles.frame_count


def compile_loss(case, marked):
    def draw(length):
        logits, target = torch.randn(length, K), torch.randint(K, (length,))
        target[2] = -100
        return logits, target, case.extra(logits)

    lengths = (5, 7, 64, 33_000, 3)  # sums over more than 2^15 rows are split elsewhere
    return times_compiled(lambda z, t, extra: case(z, t, extra=extra), draw, marked, lengths)


@pytest.mark.parametrize(
    "case", [*REPRESENTATIVES, CASES["topk-bucket"], CASES["connet"]], ids=lambda case: case.name
)
def test_a_loss_is_compiled_once_for_all_lengths(case):
    assert compile_loss(case, marked=True) == 1


def test_a_loss_is_compiled_twice_if_the_length_is_not_marked():
    """PyTorch has to find out that the length changes."""
    assert compile_loss(CASES["labo"], marked=False) == 2


@pytest.mark.parametrize(("name", "reduction"), [("labo", "mean"), ("cp", "none")])
def test_a_layer_and_its_loss_compile_to_one_graph(name, reduction):
    """By inductor; ignored rows give the eager result, and wrong targets raise."""
    layer = torch.nn.Linear(6, 9)
    x, target = torch.randn(5, 6), torch.tensor([1, -100, 3, 8, 0])

    def step(x, target):
        return CASES[name](layer(x), target, reduction=reduction).sum()

    eager = gradient(lambda x: step(x, target), x)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(gradient(lambda x: compiled(x, target), x), eager)
    with pytest.raises(RuntimeError):
        compiled(x, torch.full_like(target, 9))


def compile_linear_loss(name, reduction, marked):
    """In some numbers of chunks."""
    loss = MODULES[name](K)
    loss.reduction = reduction
    weight = torch.randn(K, 4, requires_grad=True)
    options = labo.LinearLossOptions(batch_chunk_size=16)

    def step(x, target, extra):
        teacher = extra[0] if extra else None
        value = labo.linear_loss(x, weight, target, loss, teacher_logits=teacher, options=options)
        return value.sum()

    def draw(length):
        extra = (torch.randn(length, K),) if name == "kd" else ()
        return torch.randn(length, 4), torch.randint(K, (length,)), extra

    return times_compiled(step, draw, marked, (5, 7, 64, 3), weight)


@pytest.mark.parametrize("name", ["labo", "kd"])
def test_linear_loss_is_compiled_once_for_all_lengths(name):
    assert compile_linear_loss(name, "mean", marked=True) == 1


def test_linear_loss_is_compiled_twice_if_the_length_is_not_marked():
    assert compile_linear_loss("cp", "none", marked=False) == 2


@pytest.mark.parametrize(("name", "attribute"), [("cp", "beta"), ("mls", "alpha")])
def test_compiled_linear_loss_follows_a_changed_hyper_parameter(name, attribute):
    """An operator gets the loss as text: what it says must not be that of the first call."""
    torch._dynamo.reset()
    loss = MODULES[name](K)
    x, weight, target = torch.randn(9, 4), torch.randn(K, 4), torch.randint(K, (9,))
    compiled = torch.compile(
        lambda x: labo.linear_loss(x, weight, target, loss), fullgraph=True, backend="aot_eager"
    )
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


def operator_call(loss, logits):
    """The arguments of the operator in the graph, and the compiled loss."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    value = torch.compile(loss, fullgraph=True, backend=backend)(logits)
    (call,) = [node for node in graphs[0].graph.nodes if "labo.rows" in str(node.target)]
    return call.args, value


@pytest.mark.parametrize(("name", "impl"), [("kd", "native"), ("labo", "blocked")])
def test_the_gradient_is_rounded_once(name, impl):
    """The operator stores no gradient, where value and gradient take two passes anyway."""
    case, logits = CASES[name], torch.randn(32, 50).bfloat16()
    target, extra = torch.randint(50, (32,)), case.extra(logits)

    def loss(z):
        return case(z, target, extra=extra, impl=impl, reduction="sum") / 3

    leaf = logits.clone().requires_grad_()
    arguments, value = operator_call(loss, leaf)
    assert arguments[2] is False
    assert torch.equal(torch.autograd.grad(value, leaf)[0], gradient(loss, logits))


def test_no_gradient_is_computed_under_no_grad():
    """The operator has with_grad=False, and returns no gradient."""
    target = torch.randint(K, (4,))
    with torch.no_grad():
        arguments, _ = operator_call(
            lambda z: F.labo_loss(z, target), torch.randn(4, K, requires_grad=True)
        )
    assert arguments[2] is False
