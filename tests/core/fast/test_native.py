"""The C kernel, and the blocks that serve where it cannot: shapes, instruction sets, memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import labo
from backends import (
    BACKENDS,
    ONE_CALL,
    assert_no_worse_than_naive,
    each_backend,
    each_one_call,
    hard_rows,
    sample,
)
from labo.fast import blocked, native
from labo.fast.kernel import CROSS_ENTROPY, Kernel
from loss_cases import CASES, both

SHAPES = [(5, 1), (3, 2), (4, 7), (2, 16), (6, 17), (3, 130), (5, 1000), (2, 33_000)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def no_worse(case, impl, logits, target, **arguments):
    """Each entry of the gradient, at most the factor of a row, is rounded once."""
    counted = max(1, int((target != -100).sum()))
    factor = 1 / counted if arguments.get("reduction") == "mean" else 1
    rounding = {"value_rounding": 2e-6, "rounding": 2 * factor * torch.finfo(logits.dtype).eps}
    assert_no_worse_than_naive(case, impl, logits, target, **rounding, **arguments)


@pytest.fixture(params=["avx512", "avx2", "portable"])
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


@each_one_call
@each_backend
@each_dtype
def test_error_is_that_of_the_naive_computation(case, impl, dtype):
    for shape in SHAPES:
        logits, target = sample(*shape, dtype=dtype)
        target[0] = -100
        weight = torch.rand(shape[1])
        for reduction in ("none", "sum", "mean"):
            no_worse(case, impl, logits, target, reduction=reduction)
        no_worse(case, impl, logits, target, weight=weight)


@each_dtype
def test_every_instruction_set(isa, dtype):
    """The kernels of one call, and the sums that the formulas ask for."""
    for shape in SHAPES[2:-1]:
        logits, target = sample(*shape, dtype=dtype)
        for case in ONE_CALL.values():
            for weight in (None, torch.rand(shape[1])):
                no_worse(case, "native", logits, target, weight=weight)
    logits, target = hard_rows(1037, dtype)
    for name in [
        "kd",
        "dkd",
        "dkd-standardized",
        "logitnorm",
        "mbls",
        "maxsup",
        "cp",
        "ols",
        "ps-kd",
        "ger",
    ]:
        case = CASES[name]
        extra = (torch.randn(logits.shape),) if case.has_teacher else case.extra(logits)
        arguments = {"extra": extra, "weight": torch.rand(1037), "reduction": "none"}
        assert_no_worse_than_naive(case, "native", logits, target, **arguments)


@each_one_call
@each_backend
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 5), st.integers(1, 40), st.booleans())
def test_any_small_shape(case, impl, seed, rows, classes, transposed):
    logits, target = sample(rows, classes, seed=seed)
    if transposed:
        logits = logits.T.contiguous().T
    expected = both(case, logits, target, impl="reference")
    torch.testing.assert_close(
        both(case, logits, target, impl=impl), expected, rtol=1e-5, atol=2e-6
    )


@each_backend
def test_a_sum_beyond_float32_is_infinite(impl):
    logits = torch.tensor([[3e38, -3e38], [3e38, -3e38]])
    value = ONE_CALL["base"](logits, torch.tensor([1, 1]), impl=impl, reduction="sum")
    assert value == torch.inf


FAST = ["labo", "cp", "logitnorm", "dkd-standardized", "topk-labo"]
ON_ROWS = ["kr-ls", "r-drop", "labo-grad"]


@pytest.mark.parametrize(
    ("name", "impl", "classes"),
    [
        *((name, impl, 40_000) for name in FAST for impl in BACKENDS),
        *((name, "reference", 300) for name in ON_ROWS),
    ],
)
def test_bits_depend_on_the_row_alone(name, impl, classes):
    """Not on the threads, the neighbours, or the index in the batch."""
    case, (logits, target) = CASES[name], sample(5, classes)
    target += target < 9
    extra = case.extra(logits)
    logits[3, :9] = -torch.inf
    threads = torch.get_num_threads()

    def run(part):
        leaf = logits[part].clone().requires_grad_()
        given = case.take(extra, part)
        value = case(leaf, target[part], extra=given, impl=impl, reduction="none")
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    try:
        torch.set_num_threads(1)
        value, slope = run(slice(None))
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for part in (slice(0, 1), slice(2, 5), slice(None)):
                torch.testing.assert_close(run(part), (value[part], slope[part]), rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=40)
@given(
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.0, 1.0, -1e5]),
    st.sampled_from(["avx512", "avx2", "portable"]),
    st.integers(0, 1 << 16),
)
def test_moments(classes, dtype, shift, isa, seed):
    """The mean and the squared distances, also where the mean is far larger than those."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(5, 2 * classes, generator=generator) + shift).to(dtype)[:, ::2]
    exact = logits.double()
    close = {"rtol": 1e-6, "atol": 1e-5}
    usual = native.instruction_set()
    native.select_instruction_set(isa)
    try:
        center, squares = native.moments(logits, True)
        mean = exact.mean(1)
        torch.testing.assert_close(center, mean, **close)
        wanted = (exact - mean.unsqueeze(1)).square().sum(1)
        torch.testing.assert_close(squares, wanted, **close)
        center, squares = native.moments(logits, False)
        assert not center.any()
        torch.testing.assert_close(squares, exact.square().sum(1), **close)
    finally:
        native.select_instruction_set(usual)
    alike = logits[:, :1].expand(5, 37)
    assert (native.moments(alike, True)[1] >= 0).all()
    logits[0, 0] = -torch.inf
    assert native.moments(logits, True)[1].isfinite().tolist() == [False, *[True] * 4]


def test_kernel_checks_its_arguments():
    """A pointer that C would misread is refused in Python."""
    logits, target = sample(4, 9)
    storage = torch.empty(60)
    for wrong, sentence in (
        ({"target": target[:3]}, r"target must be torch.int64 of shape \(4,\)"),
        ({"target": target.int()}, r"target must be torch.int64 .*, got torch.int32"),
        ({"target": target.to("meta")}, "target must be .* on the CPU, got .* on meta"),
        ({"weight": torch.ones(8)}, r"weight must be torch.float32 of shape \(9,\)"),
        ({"factor": torch.ones(3)}, r"row_scale must be torch.float32 of shape \(4,\)"),
        ({"factor": 1.0, "out": torch.empty(4, 8)}, "grad must be"),
        ({"factor": 1.0, "out": torch.empty(9, 4).T}, "grad must be contiguous"),
        ({"factor": 1.0, "out": torch.empty(4, 9).bfloat16()}, "grad must be torch.float32"),
        ({"factor": 1.0, "out": torch.empty(1, 9).expand(4, 9)}, "rows that overlap"),
        (
            {"logits": storage[:36].view(4, 9), "factor": 1.0, "out": storage[3:39].view(4, 9)},
            "must be the logits themselves or not overlap",
        ),
    ):
        arguments = {"logits": logits, "target": target} | wrong
        with pytest.raises(ValueError, match=sentence):
            native.rows(kernel=Kernel(CROSS_ENTROPY), **arguments)


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


@each_dtype
def test_a_gradient_in_memory_without_pages(dtype):
    """Its pages come in pieces. Values are those of touched memory; nothing else changes."""
    logits, target = sample(700, 5003, dtype=dtype)
    target[:3] = -100
    around = torch.zeros(700, 5100, dtype=dtype)  # calloc: no page is touched
    out = around[:, 40:5043]
    kernel = Kernel(3, tau=1.25, rho=0.5)
    values, _ = native.rows(logits, target, kernel, factor=0.5, out=out)
    touched = logits.clone()
    wanted, grad = native.rows(touched, target, kernel, factor=0.5, out=touched)
    assert torch.equal(values, wanted)
    assert torch.equal(out, grad)
    assert around[:, :40].count_nonzero() == around[:, 5043:].count_nonzero() == 0


# ------------------------------------------------------------------ blocks


def test_moments_of_blocks():
    logits = torch.randn(5, 300) + 1000
    center, squares = blocked.moments(logits, True)
    torch.testing.assert_close(center, logits.double().mean(1), rtol=1e-6, atol=0)
    center, squares = blocked.moments(logits, False)
    assert not center.any()
    torch.testing.assert_close(squares, logits.double().square().sum(1), rtol=1e-6, atol=0)


@each_one_call
def test_float64_is_that_of_the_reference(case):
    logits, target = sample(40, 6, dtype=torch.float64)
    weight = torch.rand(6, dtype=torch.float64) + 0.1
    for arguments in ({}, {"weight": weight}):
        ours, truth = (
            both(case, logits, target, impl=impl, **arguments) for impl in ("blocked", "reference")
        )
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["labo", "fl", "kd", "topk-labo"])
def test_several_blocks_are_one(name, monkeypatch):
    case = CASES[name]
    logits, target = sample(9, 50)
    fixed = {"extra": case.extra(logits), "impl": "blocked", "reduction": "none"}
    whole = both(case, logits, target, **fixed)
    monkeypatch.setitem(blocked._BLOCK_BYTES, "cpu", 2 * 50 * 4)
    assert len(list(blocked.blocks(logits))) > 3
    torch.testing.assert_close(both(case, logits, target, **fixed), whole, rtol=0, atol=0)
