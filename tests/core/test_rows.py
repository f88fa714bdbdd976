"""Rows of logits: strides, offsets and expanded dimensions change nothing; the largest logits.

Every tensor argument of every loss is given as a view of some layout, and the result is compared
with that of contiguous copies. The memory around a view holds values that would be noticed.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import labo
from backends import ONE_CALL, on_backend
from labo import functional as F
from labo.rows import largest
from loss_cases import CASES, MODULES, REPRESENTATIVES, draws

LAYOUTS = ["contiguous", "sliced", "offset", "transposed", "expanded", "all expanded", "negated"]


def poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return math.nan
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def arranged(x: Tensor, layout: str) -> Tensor:
    """The values of ``x`` in a layout; the expanded ones repeat some of them."""
    if layout == "sliced":
        around = torch.full([2 * n + 1 for n in x.shape], poison(x.dtype), dtype=x.dtype)
        view = around[tuple(slice(1, None, 2) for _ in x.shape)]
    elif layout == "offset":
        around = torch.full((x.numel() + 5,), poison(x.dtype), dtype=x.dtype)
        view = around[3 : 3 + x.numel()].view(x.shape)
    elif layout == "transposed":
        view = torch.full(x.shape[::-1], poison(x.dtype), dtype=x.dtype).permute(
            *range(x.dim())[::-1]
        )
    elif layout == "expanded" and x.numel():
        return x[:1].clone().expand(x.shape)
    elif layout == "all expanded" and x.numel():
        return x.reshape(-1)[:1].reshape([1] * x.dim()).clone().expand(x.shape)
    elif layout == "negated" and x.dtype in (torch.float32, torch.float64):
        view = torch.complex(torch.full_like(x, math.nan), -x).conj().imag
        assert view.is_neg()
        return view
    else:
        return x.clone(memory_format=torch.contiguous_format)
    return view.copy_(x)


quick = settings(max_examples=12, deadline=None)
layouts = st.sampled_from(LAYOUTS)


def distribution(x: Tensor, layout: str) -> Tensor:
    """Rows of probabilities: expanding a row over its classes makes it uniform."""
    x = torch.full_like(x, 1 / x.shape[-1]) if layout == "all expanded" else x
    return arranged(x, layout)


def vector_of_probabilities(x: Tensor, layout: str) -> Tensor:
    return distribution(x, "all expanded" if layout == "expanded" else layout)


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [t.resolve_neg().clone(memory_format=torch.contiguous_format) for t in tensors]


def value_and_gradient(function, logits: Tensor, *others):
    """With the upstream gradients of unequal rows."""
    leaf = logits.detach().requires_grad_()
    value = function(leaf, *others)
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    (slope,) = torch.autograd.grad(value, leaf, upstream)
    return value.detach(), slope


def assert_layout_does_not_matter(function, logits, *others) -> None:
    for reduction in ("none", "mean"):

        def run(*tensors, r=reduction):
            return value_and_gradient(lambda *t: function(*t, reduction=r), *tensors)

        expected = run(*clones([logits, *others]))
        tolerance = 1e-10 if logits.dtype == torch.float64 else 2e-5
        found = run(logits, *others)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def problem(seed: int, rows: int, classes: int, dtype: torch.dtype):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=random, dtype=torch.float64).to(dtype)
    target = torch.randint(classes, (rows,), generator=random)
    weight = (torch.rand(classes, generator=random, dtype=torch.float64) + 0.1).to(dtype)
    return logits, target, weight


sizes = st.tuples(st.integers(0, 1000), st.integers(1, 5), st.integers(2, 9))
kinds = st.lists(layouts, min_size=4, max_size=4)


def extra_arguments(case, logits: Tensor, layout: str) -> list[Tensor]:
    arranger = distribution if case.name == "ols" else arranged
    if case.name.startswith("topk") and layout == "all expanded":
        layout = "expanded"  # the stored classes of a row must be different ones
    return [arranger(x, layout) for x in case.extra(logits)]


# One loss of each kind, and every other kind of argument.
ARGUMENTS = [CASES[name] for name in ("topk-bucket", "connet", "ols", "mls", "wls", "beta-ls")]


@pytest.mark.parametrize("case", REPRESENTATIVES + ARGUMENTS, ids=lambda case: case.name)
@quick
@given(sizes, kinds, st.booleans())
def test_any_layout_of_any_argument(case, size, kind, soft):
    logits, target, weight = problem(*size, torch.float64)
    if soft and case.linear:
        target = distribution(logits.flip(0).softmax(-1), kind[1])
    else:
        target = arranged(target, kind[1])
    extra = extra_arguments(case, logits, kind[3])

    def call(z, t, w, *more, reduction):
        return case(z, t, weight=w, extra=more, reduction=reduction)

    assert_layout_does_not_matter(
        call, arranged(logits, kind[0]), target, arranged(weight, kind[2]), *extra
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [
        ("ls", "blocked", torch.float32),
        ("ls", "native", torch.float32),
        ("labo", "blocked", torch.float32),
        ("labo", "blocked", torch.bfloat16),
        ("labo", "native", torch.float32),
        ("labo", "native", torch.bfloat16),
        ("labo", "triton", torch.float32),
    ],
)
@settings(max_examples=12, deadline=None)
@given(sizes, kinds, st.booleans(), st.booleans())
def test_any_layout_on_the_fast_backends(name, backend, dtype, size, kind, weighted, ignored):
    logits, target, weight = problem(*size, dtype)
    if ignored:
        target[::2] = -100

    def call(z, t, w, *, reduction):
        weight = w if weighted else None
        return ONE_CALL[name](z, t, weight=weight, impl=impl, reduction=reduction)

    with on_backend(backend) as impl:
        assert_layout_does_not_matter(
            call,
            arranged(logits, kind[0]),
            arranged(target, kind[1]),
            arranged(weight.float(), kind[2]),
        )


@pytest.mark.parametrize("impl", ["auto", "reference", "blocked", "native"])
def test_the_target_that_is_out_of_range_is_that_of_the_view(impl):
    logits = torch.randn(4, 5)
    labels = torch.tensor([[0, 9], [1, 9], [2, 9], [3, 9]])
    assert F.labo_loss(logits, labels[:, 0], impl=impl).isfinite()
    with pytest.raises(IndexError, match="target 9 at position 0"):
        F.labo_loss(logits, labels[:, 1], impl=impl)
    labels[2, 0] = 7
    with pytest.raises(IndexError, match="target 7 at position 2"):
        F.labo_loss(logits, labels[:, 0], impl=impl)


# ------------------------------------------------------------------ the rest of the arguments


@quick
@given(sizes, kinds, layouts)
def test_any_layout_of_smoothing_and_strengths(size, kind, last):
    logits, target, _ = problem(*size, torch.float64)
    p = distribution(logits.flip(-1).softmax(-1), kind[2])
    alpha = arranged(torch.linspace(0.1, 0.9, len(target), dtype=torch.float64), kind[3])
    beta = arranged(torch.linspace(0.0, 2.0, len(target), dtype=torch.float64), last)

    def call(z, t, q, a, b, *, reduction):
        return F.smoothed_cross_entropy(z, t, q, alpha=a, beta=b, reduction=reduction)

    assert_layout_does_not_matter(
        call, arranged(logits, kind[0]), arranged(target, kind[1]), p, alpha, beta
    )


@quick
@given(sizes, kinds)
def test_any_layout_of_prior_and_draws(size, kind):
    logits, target, _ = problem(*size, torch.float64)
    prior = vector_of_probabilities(logits[0].softmax(-1), kind[2])
    fixed = arranged(logits, kind[0]), arranged(target, kind[1])
    assert_layout_does_not_matter(
        lambda z, t, u, **r: F.generalized_entropy_loss(z, t, prior=u, **r), *fixed, prior
    )
    assert_layout_does_not_matter(
        lambda z, t, ema, b, **r: F.beta_smoothing_loss(z, t, ema, draws=b, **r),
        *fixed,
        arranged(logits.sin(), kind[2]),
        arranged(draws(logits).double(), kind[3]),
    )


# ------------------------------------------------------------------ linear_loss


@pytest.mark.parametrize("name", ["labo", "logitnorm", "mls", "kd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@quick
@given(sizes, st.lists(layouts, min_size=8, max_size=8), st.booleans(), st.booleans())
def test_any_layout_in_linear_loss(name, dtype, size, kind, weighted, as_layer):
    # With all rows of the weight alike, and all biases, the logits of a row are equal up to
    # rounding. LogitNorm at its small tau amplifies that rounding: the exact gradient is 0, in
    # float32 it is 4e-3 and in float64 3e-12, for the layer and the loss apart as well.
    assume(name != "logitnorm" or not {kind[2], kind[3]} <= {"expanded", "all expanded"})
    hidden, target, weight = problem(*size, dtype)
    width, classes = hidden.shape[1], hidden.shape[1]
    matrix = torch.randn(classes, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = torch.linspace(-1, 1, classes, dtype=dtype)
    tensors = [
        arranged(hidden, kind[0]),
        arranged(target, kind[1]),
        arranged(matrix, kind[2]),
        arranged(bias, kind[3]),
        arranged(weight, kind[4]),
        arranged(hidden.cos(), kind[5]),
        arranged(matrix.cos(), kind[6]),
        arranged(bias.cos(), kind[7]),
    ]

    def call(x, t, m, b, w, teacher, teacher_matrix, teacher_bias, *, reduction):
        loss = MODULES[name](classes)
        loss.reduction, loss.weight = reduction, w if weighted else None
        given = None
        if name == "kd":
            given = (teacher, teacher_matrix, teacher_bias) if as_layer else teacher
        options = labo.LinearLossOptions(batch_chunk_size=2)
        return labo.linear_loss(x, m, t, loss, linear_bias=b, teacher_logits=given, options=options)

    assert_layout_does_not_matter(call, *tensors)


def test_gradients_of_a_strided_output_layer():
    """The gradient of the weight and the bias too, not of the hidden states alone."""
    torch.manual_seed(0)
    hidden, target = torch.randn(6, 4), torch.randint(5, (12,))[::2]
    matrix, bias = torch.randn(4, 10).T[::2], torch.randn(10)[1::2]
    results = []
    for tensors in (
        (hidden.T.contiguous().T, matrix, bias),
        (hidden, matrix.clone(), bias.clone()),
    ):
        leaves = [t.detach().requires_grad_() for t in tensors]
        loss = labo.linear_loss(
            leaves[0], leaves[1], target, labo.LABOLoss(), linear_bias=leaves[2]
        )
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results)


@settings(max_examples=40)
@given(
    st.integers(1, 2000),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1 << 16),
)
def test_largest_logits(classes, k, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(3, classes, generator=generator)).round().to(dtype)  # with ties
    logits[1, : classes // 2] = -math.inf
    wanted = logits.sort(1, descending=True).values[:, :k]
    assert torch.equal(largest(logits, k), wanted)
    twice = torch.stack([logits, logits], 2)[..., 0]  # strided
    assert torch.equal(largest(twice, k), wanted)
