"""The fused backends on logits: the values and gradients of the reference, and autograd."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import labo
from conftest import gradient
from labo import functional as F
from labo.fast import blocked, dispatch, native
from labo.fast.kernel import CROSS_ENTROPY, Kernel
from probes import LargestTensor

LOSSES = {
    "ce": (F.cross_entropy_loss, {}),
    "ls": (F.label_smoothing_loss, {"alpha": 0.2}),
    "labo": (F.labo_loss, {"tau": 1.3}),
    "labo-fixed": (F.labo_loss, {"alpha": 0.4, "tau": 0.8}),
}
OPERATORS = {
    "ce": labo.CrossEntropyLoss(),
    "ls": labo.LabelSmoothingLoss(alpha=0.2),
    "labo": labo.LABOLoss(tau=1.3),
    "labo-fixed": labo.LABOLoss(alpha=0.4, tau=0.8),
}
BACKENDS = ["blocked", "native"]
ISAS = ["avx512", "avx2", "portable"]

each_loss = pytest.mark.parametrize("name", LOSSES)
each_backend = pytest.mark.parametrize("impl", BACKENDS)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator)
    return logits.to(dtype), torch.randint(shape[-1], shape[:-1], generator=generator)


def call(name: str, logits, target, **arguments):
    function, hyper = LOSSES[name]
    return function(logits, target, **hyper, **arguments)


def both(name: str, logits, target, *, upstream=None, **arguments):
    """Value and gradient."""
    leaf = logits.detach().clone().requires_grad_()
    value = call(name, leaf, target, **arguments)
    (slope,) = torch.autograd.grad(value, leaf, upstream)
    return value.detach(), slope


@pytest.fixture
def isa(request):
    """An instruction set of the C kernel, put back afterwards."""
    usual = native.instruction_set()
    if not native.select_instruction_set(request.param):
        pytest.skip(f"this machine or build has no {request.param}")
    yield request.param
    native.select_instruction_set(usual)


def test_native_kernel_is_there():
    """It is built when this checkout is installed. Without it the rest would test nothing."""
    assert native.unavailable() is None
    assert labo.backends()["native (CPU)"].startswith("available (")
    assert set(labo.backends()) == {"reference", "blocked", "native (CPU)", "native (CUDA)"}


def assert_no_worse_than_naive(name, logits, target, impl, **arguments):
    """The error against float64 is that of the reference in the same dtype, plus some rounding."""
    exact, exact_slope = both(name, logits.double(), target, impl="reference", **arguments)
    naive, naive_slope = both(name, logits, target, impl="reference", **arguments)
    value, slope = both(name, logits, target, impl=impl, **arguments)
    scale = exact.abs().clamp(min=1)
    error = ((value - exact).abs() / scale).max()
    assert error <= ((naive - exact).abs() / scale).max() + 2e-6
    # p and P_hat are at most the factor of a row, and each is rounded once
    factor = 1 / max(1, int((target != -100).sum())) if arguments.get("reduction") == "mean" else 1
    rounding = 2 * factor * torch.finfo(logits.dtype).eps
    error = (slope - exact_slope).abs().max()
    assert error <= (naive_slope - exact_slope).abs().max() + rounding


@each_loss
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(5, 1), (3, 2), (4, 7), (2, 16), (6, 17), (3, 130), (5, 1000), (2, 33_000)], ids=str
)
def test_error_is_that_of_the_naive_computation(name, impl, dtype, shape):
    logits, target = sample(*shape, dtype=dtype)
    target[0] = -100
    for reduction in ("mean", "sum", "none"):
        if reduction == "none":
            arguments = {"upstream": torch.linspace(-1, 2, len(target))}
            exact = {"upstream": torch.linspace(-1, 2, len(target)).double()}
            value, slope = both(name, logits, target, impl=impl, reduction="none", **arguments)
            expected, expected_slope = both(
                name, logits.double(), target, impl="reference", reduction="none", **exact
            )
            torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=2e-5)
            step = torch.finfo(dtype).eps
            torch.testing.assert_close(slope.double(), expected_slope, rtol=2 * step, atol=4 * step)
        else:
            assert_no_worse_than_naive(name, logits, target, impl, reduction=reduction)


@each_loss
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set(name, isa, dtype):
    for shape in ((4, 7), (3, 130), (5, 1000), (2, 5003)):
        logits, target = sample(*shape, dtype=dtype)
        assert_no_worse_than_naive(name, logits, target, "native")
        assert_no_worse_than_naive(name, logits, target, "native", weight=torch.rand(shape[1]))


@each_loss
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_weights(name, impl, dtype):
    logits, target = sample(6, 50, dtype=dtype)
    weight = torch.rand(50)
    weight[3] = 0
    target[:2] = torch.tensor([3, -100])
    for reduction in ("mean", "sum"):
        assert_no_worse_than_naive(name, logits, target, impl, weight=weight, reduction=reduction)


@each_loss
@each_backend
def test_masked_large_and_nan(name, impl):
    logits, target = sample(6, 40)
    target[:] = torch.tensor([1, 2, 3, 4, -100, 6])
    logits[0, 5:9] = -math.inf
    logits[1, 7] = 1e4
    logits[2] -= 1e4
    logits[3, 8] = math.nan
    logits[4] = math.nan  # ignored
    value, slope = both(name, logits, target, impl=impl, reduction="none", upstream=torch.ones(6))
    expected, expected_slope = both(
        name, logits, target, impl="reference", reduction="none", upstream=torch.ones(6)
    )
    assert value.isnan().tolist() == [False, False, False, True, False, False]
    assert slope[3].isnan().all()
    assert slope[4].count_nonzero() == 0
    assert slope[0, 5:9].count_nonzero() == 0
    keep = [0, 1, 2, 4, 5]
    torch.testing.assert_close(value[keep], expected[keep], rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(slope[keep], expected_slope[keep], rtol=1e-4, atol=1e-5)


@each_loss
@each_backend
def test_masked_target_is_infinite(name, impl):
    logits, target = sample(1, 8)
    logits[0, target[0]] = -math.inf
    assert call(name, logits, target, impl=impl) == math.inf


@each_loss
@each_backend
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 5), st.integers(1, 40), st.booleans())
def test_any_small_shape(name, impl, seed, rows, classes, transposed):
    logits, target = sample(rows, classes, seed=seed)
    if transposed:
        logits = logits.T.contiguous().T
    expected = both(name, logits, target, impl="reference")
    for value, other in zip(both(name, logits, target, impl=impl), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=2e-6)


@each_loss
@each_backend
def test_leading_dimensions_and_layout(name, impl):
    logits, target = sample(2, 3, 4, 11)
    target[0, 1] = -100
    value = call(name, logits, target, impl=impl, reduction="none")
    assert value.shape == target.shape
    torch.testing.assert_close(
        value, call(name, logits, target, impl="reference", reduction="none")
    )
    channels = logits.movedim(-1, 1)
    torch.testing.assert_close(
        call(name, channels, target, dim=1, impl=impl, reduction="none"), value
    )
    scalar = call(name, logits[0, 0, 0], target[0, 0, 0], impl=impl)
    torch.testing.assert_close(scalar, value[0, 0, 0])


@each_loss
@each_backend
def test_all_ignored_and_no_rows(name, impl):
    for rows in (0, 3):
        logits, target = sample(rows, 5)
        value, slope = both(name, logits, torch.full_like(target, -100), impl=impl)
        assert value == 0
        assert slope.count_nonzero() == 0


@each_loss
@each_backend
def test_none_under_any_upstream_gradient(name, impl):
    logits, target = sample(5, 9)
    upstream = torch.tensor([0.0, 2.0, -1.5, 3.0, 0.5])
    arguments = {"reduction": "none", "upstream": upstream}
    _, slope = both(name, logits, target, impl=impl, **arguments)
    _, expected = both(name, logits, target, impl="reference", **arguments)
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-6)
    assert slope[0].count_nonzero() == 0


@each_loss
@each_backend
def test_scaled_loss(name, impl):
    logits, target = sample(4, 9)
    slope = gradient(lambda z: 7 * call(name, z, target, impl=impl) / 2, logits)
    expected = gradient(lambda z: 7 * call(name, z, target, impl="reference") / 2, logits)
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-6)


@each_loss
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_place_is_the_same_and_needs_no_buffer(name, impl, dtype):
    if dtype == torch.float16 and impl == "native":
        impl = "auto"
    logits, target = sample(2000, 3000, dtype=dtype)
    expected, expected_slope = both(name, logits, target, impl=impl)
    largest = {}
    for inplace in (False, True):
        output = logits.clone().requires_grad_() * 1
        with LargestTensor() as seen:
            value = call(name, output, target, impl=impl, inplace=inplace)
            (slope,) = torch.autograd.grad(value, output)
        largest[inplace] = seen.largest
        assert torch.equal(value, expected)
        assert torch.equal(slope, expected_slope)
        assert torch.equal(output.detach(), expected_slope) == inplace
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
@pytest.mark.parametrize("parameter", [False, True])
@each_backend
def test_in_place_refuses_the_memory_of_a_leaf(how, parameter, impl):
    """It would overwrite a parameter."""
    logits, _ = sample(4, 9)
    leaf = torch.nn.Parameter(logits.clone()) if parameter else logits.clone().requires_grad_()
    shared = SHARING[how](leaf)
    target = torch.zeros(shared.shape[:-1], dtype=torch.long)
    with pytest.raises(ValueError, match="not a leaf that requires a gradient, nor a view of one"):
        F.labo_loss(shared, target, impl=impl, inplace=True)
    assert torch.equal(leaf, logits)


@each_backend
def test_in_place_accepts_views_of_the_output_of_a_layer(impl):
    logits, target = sample(4, 9)
    leaf = logits.clone().requires_grad_()
    for output in (leaf * 1, (leaf * 1).view(2, 2, 9), (leaf + 0)[:2], leaf.clone().view(4, 9)):
        rows = target[: output.shape[:-1].numel()].view(output.shape[:-1])
        F.labo_loss(output, rows, impl=impl, inplace=True).backward()
    assert torch.equal(leaf, logits)


@each_backend
def test_a_sum_beyond_float32_is_infinite(impl):
    logits = torch.tensor([[3e38, -3e38], [3e38, -3e38]])
    assert (
        F.cross_entropy_loss(logits, torch.tensor([1, 1]), impl=impl, reduction="sum") == math.inf
    )


@each_backend
def test_in_place_without_rows(impl):
    """Tensors without elements have no memory, so these share none."""
    leaf = torch.empty(0, 9, requires_grad=True)
    loss = F.labo_loss(leaf * 1, torch.empty(0, dtype=torch.long), impl=impl, inplace=True)
    loss.backward()
    assert loss == 0
    assert leaf.grad.shape == (0, 9)


@each_backend
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_place_without_a_gradient_changes_nothing(impl, mode):
    """As in an evaluation: no gradient is computed, so none is written over the logits."""
    logits, target = sample(4, 9)
    output = logits.clone().requires_grad_() * 1
    for some in (output, logits.clone()):
        with mode():
            value = F.labo_loss(some, target, impl=impl, inplace=True)
        assert torch.equal(some, logits)
        assert torch.equal(value, F.labo_loss(logits, target, impl=impl))
    plain = logits.clone()
    F.labo_loss(plain, target, impl=impl, inplace=True)  # nothing requires a gradient
    assert torch.equal(plain, logits)


@each_backend
def test_no_gradient_is_computed_without_grad_mode(impl):
    logits, target = sample(2000, 3000)
    logits.requires_grad_()
    with torch.no_grad(), LargestTensor() as seen:
        F.labo_loss(logits, target, impl=impl)
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


def test_in_place_refuses():
    logits, target = sample(4, 9)
    with pytest.raises(ValueError, match="contiguous"):
        F.labo_loss(logits.T.contiguous().T, target, inplace=True)
    with pytest.raises(ValueError, match="not possible with the reference"):
        F.labo_loss(logits, target, impl="reference", inplace=True)
    with pytest.raises(ValueError, match=r"not possible with the reference \(class probabilities"):
        F.labo_loss(logits, logits.softmax(-1), inplace=True)


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
    loss = function(logits.clone().requires_grad_() * 1, target, impl=impl, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through a loss with inplace"):
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
    loss = F.labo_loss(leaf, target, impl="reference")
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    assert slope.requires_grad


@each_backend
def test_no_gradient_wanted_none_made(impl):
    logits, target = sample(4, 9)
    loss = F.labo_loss(logits, target, impl=impl)
    assert not loss.requires_grad
    with torch.no_grad():
        assert not F.labo_loss(logits.requires_grad_(), target, impl=impl).requires_grad


@each_loss
@each_backend
def test_bits_depend_on_the_row_alone(name, impl):
    """Not on the threads, the neighbours, or the index in the batch."""
    logits, target = sample(5, 70_000)
    threads = torch.get_num_threads()
    ones = torch.ones(5)
    try:
        torch.set_num_threads(1)
        value, slope = both(name, logits, target, impl=impl, reduction="none", upstream=ones)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for part in (slice(0, 1), slice(2, 5), slice(None)):
                again, again_slope = both(
                    name,
                    logits[part],
                    target[part],
                    impl=impl,
                    reduction="none",
                    upstream=ones[part],
                )
                assert torch.equal(again, value[part])
                assert torch.equal(again_slope, slope[part])
    finally:
        torch.set_num_threads(threads)


@each_backend
def test_class_weights_that_require_a_gradient(impl):
    """Only the reference gives them one."""
    logits, target = sample(4, 9)
    weight = torch.rand(9, requires_grad=True)
    with pytest.raises(ValueError, match="does not support class weights that require a gradient"):
        F.labo_loss(logits, target, weight=weight, impl=impl)
    F.labo_loss(logits, target, weight=weight).backward()
    assert weight.grad is not None


@each_backend
def test_refuses_tensors_on_other_devices(impl):
    logits, target = sample(4, 9)
    with pytest.raises(ValueError, match="target is on meta, the logits are on cpu"):
        F.labo_loss(logits, target.to("meta"), impl=impl)
    with pytest.raises(ValueError, match="weight is on meta, the logits are on cpu"):
        F.labo_loss(logits, target, weight=torch.ones(9, device="meta"), impl=impl)


# ------------------------------------------------------------------ choosing a backend


def test_auto_takes_what_fits():
    logits, target = sample(4, 9)
    assert dispatch.choose(labo.LABOLoss(), logits, target, None) == "native"
    assert dispatch.choose(labo.LABOLoss(), logits.bfloat16(), target, None) == "native"
    assert dispatch.choose(labo.LABOLoss(), logits.half(), target, None) == "blocked"
    assert dispatch.choose(labo.LABOLoss(), logits.double(), target, None) == "reference"
    assert dispatch.choose(labo.LABOLoss(), logits, logits.softmax(-1), None) == "reference"
    with torch.autograd.forward_ad.dual_level():
        assert dispatch.choose(labo.LABOLoss(), logits, target, None) == "reference"


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"impl": "fast"}, "unknown impl 'fast'"),
        ({"impl": "native", "alpha_grad": True}, "does not support alpha_grad=True"),
        ({"impl": "blocked", "alpha_grad": True}, "does not support alpha_grad=True"),
    ],
)
def test_refuses_what_a_backend_does_not_support(arguments, sentence):
    logits, target = sample(4, 9)
    with pytest.raises(ValueError, match=sentence):
        F.labo_loss(logits, target, **arguments)


def test_refuses_what_the_kernel_cannot_take():
    logits, target = sample(4, 9)
    with pytest.raises(ValueError, match=r"takes float32 and bfloat16, not torch\.float64"):
        F.labo_loss(logits.double(), target, impl="native")
    with pytest.raises(ValueError, match="class probabilities as targets"):
        F.labo_loss(logits, logits.softmax(-1), impl="native")
    with pytest.raises(ValueError, match="alpha_grad=True"):
        F.labo_loss(logits, target, alpha_grad=True, impl="native")


@each_backend
def test_out_of_range_targets_raise(impl):
    logits, target = sample(4, 9)
    for bad in (9, -1, 2**62, -(2**62)):
        target[2] = bad
        with pytest.raises(IndexError, match=f"target {bad} at position 2 is outside"):
            F.labo_loss(logits, target, impl=impl)


def test_kernel_checks_its_arguments():
    """A pointer that C would misread is refused in Python."""
    logits, target = sample(4, 9)
    kernel = Kernel(CROSS_ENTROPY)
    storage = torch.empty(60)
    for wrong, sentence in (
        ({"target": target[:3]}, r"target must be torch.int64 of shape \(4,\)"),
        ({"target": target.int()}, r"target must be torch.int64 .*, got torch.int32"),
        ({"target": target.to("meta")}, "target must be .* on the CPU, got .* on meta"),
        ({"weight": torch.ones(8)}, r"weight must be torch.float32 of shape \(9,\)"),
        ({"factor": torch.ones(3)}, r"factor must be torch.float32 of shape \(4,\)"),
        ({"factor": 1.0, "out": torch.empty(4, 8)}, "out must be"),
        ({"factor": 1.0, "out": torch.empty(9, 4).T}, "out must be contiguous"),
        ({"factor": 1.0, "out": torch.empty(4, 9).bfloat16()}, "out must be torch.float32"),
        ({"factor": 1.0, "out": torch.empty(1, 9).expand(4, 9)}, "rows that overlap"),
        (
            {"logits": storage[:36].view(4, 9), "factor": 1.0, "out": storage[3:39].view(4, 9)},
            "must be the logits themselves or not overlap",
        ),
    ):
        arguments = {"logits": logits, "target": target} | wrong
        with pytest.raises(ValueError, match=sentence):
            native.rows(kernel=kernel, **arguments)


def test_kernel_refuses_a_tensor_whose_memory_was_freed():
    """As sharded training does with the parameters that are not in use."""
    logits, target = sample(4, 9)
    logits.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="logits has no memory"):
        native.rows(logits, target, Kernel(CROSS_ENTROPY))


def test_forked_child_has_threads_of_its_own():
    """A pool inherited through fork has no threads: the child would wait for ever."""
    script = """
import os, torch, labo
logits, target = torch.randn(64, 8192), torch.randint(8192, (64,))
expected = labo.functional.labo_loss(logits, target)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(labo.functional.labo_loss(logits, target), expected) else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    # fork in a threaded process warns on newer Pythons; that is what is being tested
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        timeout=120,
        check=False,
    )
    assert run.returncode == 0


@pytest.mark.skipif(native.unavailable() is not None, reason="the C kernel is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_in_memory_without_pages(dtype):
    """Its pages come in pieces. Values are those of touched memory; nothing else changes."""
    logits, target = sample(700, 5003, dtype=dtype)
    target[:3] = -100
    around = torch.zeros(700, 5100, dtype=dtype)  # calloc: no page is touched
    out = around[:, 40:5043]
    found = native.rows(logits, target, Kernel(3, tau=1.25, rho=0.5), factor=0.5, out=out)
    touched = logits.clone()
    values, grad = native.rows(
        touched, target, Kernel(3, tau=1.25, rho=0.5), factor=0.5, out=touched
    )
    assert torch.equal(found[0], values)
    assert torch.equal(out, grad)
    assert around[:, :40].count_nonzero() == around[:, 5043:].count_nonzero() == 0


# ------------------------------------------------------------------ torch.compile


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_grad", [True, False])
def test_operator_check(name, dtype, with_grad):
    logits, target = sample(4, 9, dtype=dtype)
    target[1] = -100
    loss = dispatch.FastRows(OPERATORS[name], "native").pack()
    torch.library.opcheck(dispatch.rows_op, (logits, target, with_grad, *loss))
    torch.library.opcheck(dispatch.rows_op, (logits.requires_grad_(), target, with_grad, *loss))
    _, sums = dispatch.rows_op(logits.detach(), target, False, *loss)
    torch.library.opcheck(
        dispatch.rows_backward_op, (logits.detach(), target, sums, torch.rand(4), *loss)
    )


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_model_has_no_graph_break(name, reduction):
    """A layer and its loss in one graph; ignored rows give the eager result."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 9)
    x, target = torch.randn(5, 6), torch.tensor([1, -100, 3, 8, 0])

    def step(x, target):
        return call(name, layer(x), target, reduction=reduction).sum()

    eager = gradient(lambda x: step(x, target), x)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(gradient(lambda x: compiled(x, target), x), eager)
