"""The losses that are formulas of sums: each backend against the reference in float64."""

from __future__ import annotations

import decimal
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import labo
from conftest import LOSS_CASES, LossCase, triton_for_native
from labo import functional as F
from labo.fast import blocked, dispatch, native
from labo.loss import Loss, hyper
from labo.rows import largest
from labo.sums import RowSums
from probes import is_fused


# Losses with these options are left to the reference.
def has_formula(function) -> bool:
    """Whether the value of the loss is a formula of sums."""
    return "value" in vars(getattr(function, "loss", object))


REFERENCE_ONLY = {"labo-grad", "labo-held", "labo-held-multiplied", "gem-logsigmoid"}
CASES = [
    case for case in LOSS_CASES if has_formula(case.function) and case.name not in REFERENCE_ONLY
]
Z_LOSS = [
    LossCase("ce-z", F.cross_entropy_loss, {"z_loss": 1e-3}),
    LossCase("ls-z", F.label_smoothing_loss, {"z_loss": 1e-3}),
    LossCase("labo-z", F.labo_loss, {"z_loss": 1e-3}),
    LossCase("labo-fixed-z", F.labo_loss, {"alpha": 0.3, "z_loss": 1e-3}),
    LossCase("fl-z", F.focal_loss, {"z_loss": 1e-3}),
    LossCase("z", F.z_loss, {"lam": 1e-3}),
]
BACKENDS = ["blocked", "native"]

each_case = pytest.mark.parametrize("case", CASES + Z_LOSS, ids=lambda case: case.name)
each_backend = pytest.mark.parametrize("impl", BACKENDS)


def hard_rows(classes: int = 135, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Ordinary rows, and rows with masked classes, large logits, a sure prediction, NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, classes, generator=generator)
    target = torch.randint(3, classes, (7,), generator=generator)
    logits[1, : classes // 3] = -math.inf
    target[1] = classes - 1
    logits[2] *= 1000
    logits[3, target[3]] = 40.0
    logits[4] = math.nan
    target[4] = -100
    logits[5, 1] = logits[5].max() + 2  # the maximum, and not the target
    return logits.to(dtype), target


def both(case: LossCase, logits: Tensor, target: Tensor, extra: tuple[Tensor, ...], **arguments):
    """Values of the rows, and their gradients with a different factor each."""
    leaf = logits.detach().requires_grad_()
    value = case(leaf, target, extra=extra, reduction="none", **arguments)
    upstream = torch.linspace(-1, 2, len(target)).to(value.dtype)
    (slope,) = torch.autograd.grad(value, leaf, upstream)
    return value.detach().double(), slope.double()


@each_case
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda x: str(x)[6:])
def test_values_and_gradients(case, impl, dtype):
    """The error is that of the reference in the same dtype, plus some rounding."""
    logits, target = hard_rows(dtype=dtype)
    extra = case.extra(logits.nan_to_num().clamp(-50, 50))
    weight = torch.linspace(0, 2, logits.shape[1])
    for used in (None, weight):
        exact, exact_slope = both(
            case, logits.double(), target, extra, impl="reference", weight=used
        )
        naive, naive_slope = both(case, logits, target, extra, impl="reference", weight=used)
        value, slope = both(case, logits, target, extra, impl=impl, weight=used)
        scale = exact.abs().clamp(min=1)
        assert ((value - exact).abs() / scale <= (naive - exact).abs() / scale + 4e-6).all()
        size = exact_slope.abs().amax(1, keepdim=True).clamp(min=1)
        step = 4 * torch.finfo(dtype).eps
        error = (slope - exact_slope).abs() / size
        assert (error <= (naive_slope - exact_slope).abs() / size + step).all()
        assert slope[4].count_nonzero() == 0
        assert slope[1, : logits.shape[1] // 3].count_nonzero() == 0


@each_case
@each_backend
def test_not_finite(case, impl):
    """Rows with a masked target, a NaN, a +inf and no class agree with the reference."""
    logits, target = torch.randn(4, 20), torch.arange(4)
    extra = case.extra(logits)
    logits[0, 0] = -math.inf
    logits[1, 7] = math.nan
    logits[2, 9] = math.inf
    logits[3] = -math.inf
    value = case(logits, target, extra=extra, impl=impl, reduction="none")
    expected = case(logits, target, extra=extra, impl="reference", reduction="none")
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=2e-6, equal_nan=True)
    assert value[1:3].isnan().all()


@each_case
def test_layouts_in_place_and_half_types(case):
    logits, target = hard_rows()
    logits, target = logits[[0, 3, 5]], target[[0, 3, 5]]
    extra = case.extra(logits)
    value, slope = both(case, logits, target, extra, impl="native")
    strided = torch.stack([logits, logits], 2)[:, :, 0]
    for found, expected in zip(both(case, strided, target, extra), (value, slope), strict=True):
        assert torch.equal(found, expected)
    output = logits.clone().requires_grad_() * 1
    found = case(output, target, extra=extra, inplace=True, reduction="none")
    (over,) = torch.autograd.grad(found, output, torch.linspace(-1, 2, 3))
    assert over.data_ptr() == output.data_ptr()
    assert torch.equal(over.double(), slope)
    half, half_slope = both(case, logits.half(), target, extra)
    exact, exact_slope = both(case, logits.half().double(), target, extra, impl="reference")
    torch.testing.assert_close(half, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half_slope, exact_slope, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_every_instruction_set(isa):
    usual = native.instruction_set()
    names = {
        "kd",
        "dkd",
        "dkd-standardized",
        "logitnorm",
        "mbls",
        "maxsup",
        "cp",
        "ols",
        "pskd",
        "ger",
    }
    logits, target = hard_rows(1037)
    teacher = torch.randn(logits.shape)
    try:
        assert native.select_instruction_set("portable")
        if not native.select_instruction_set(isa):
            return
        for case in CASES:
            if case.name in names:
                extra = (teacher,) if case.has_teacher else case.extra(logits)
                weight = torch.rand(1037)
                value, slope = both(case, logits, target, extra, impl="native", weight=weight)
                exact = both(case, logits.double(), target, extra, impl="reference", weight=weight)
                torch.testing.assert_close(value, exact[0], rtol=4e-6, atol=4e-6)
                torch.testing.assert_close(slope, exact[1], rtol=4e-6, atol=4e-6)
    finally:
        native.select_instruction_set(usual)


def test_a_teacher_in_another_dtype_and_masked_for_the_student():
    """A class that the student has masked does not count, however large its teacher's logit."""
    logits, target = torch.randn(3, 40), torch.tensor([1, 2, 3])
    logits[:, 30:] = -math.inf
    teacher = torch.randn(3, 40)
    teacher[:, 35] = 1e4
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        given = teacher.to(dtype)
        for impl in BACKENDS:
            value = F.distillation_loss(logits, target, given, impl=impl)
            expected = F.distillation_loss(logits.double(), target, given.double())
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_decoupled_distillation_of_sure_rows():
    """The target far above and far below the others, the only class, and a one-hot teacher."""
    logits, target = torch.randn(5, 40), torch.tensor([3, 37, 17, 5, 6])
    teacher = torch.randn(5, 40)
    logits[0, 3], teacher[1, 37] = 900.0, 500.0
    logits[2, 17] = teacher[2, 17] = -900.0
    logits[3], teacher[4] = -math.inf, -math.inf
    logits[3, 5], teacher[4, 6] = 2.0, 1.0
    case = next(case for case in CASES if case.name == "dkd")
    for tau in (1.0, 4.0):
        wide = (logits.double(), target, (teacher.double(),))
        exact, exact_slope = both(case, *wide, tau=tau, impl="reference")
        assert exact.isfinite().all()
        for impl in BACKENDS:
            value, slope = both(case, logits, target, (teacher,), tau=tau, impl=impl)
            torch.testing.assert_close(value, exact, rtol=2e-6, atol=1e-6)
            torch.testing.assert_close(slope, exact_slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tail", ["bucket", "uniform", "labo", "drop", "renormalize"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    classes=st.integers(1, 40),
    share=st.floats(0, 1),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
    sure=st.booleans(),
    z_loss=st.sampled_from([0.0, 1e-3]),
)
def test_stored_classes(tail, seed, classes, share, scale, sure, z_loss):
    """Any number of stored classes, up to all; targets, masks and padding anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    rows, k = 6, max(1, round(share * classes))
    logits = scale * (uniform(rows, classes) - 0.5)
    order = uniform(rows, classes).argsort(1)
    indices, log_t = order[:, :k], uniform(rows, classes).log_softmax(1)[:, :k]
    target = torch.randint(classes, (rows,), generator=generator)
    if sure:  # the stored classes have almost all of the mass
        log_t = log_t.log_softmax(1) - 1e-6
        logits.scatter_add_(1, indices, torch.full(indices.shape, 60.0))
    masked = uniform(rows, classes) < 0.2
    masked.scatter_(1, target.unsqueeze(1), False)
    logits.masked_fill_(masked, -math.inf)
    indices = indices.masked_fill(uniform(rows, k) < 0.2, -1)
    target[0], logits[0], indices[0] = -100, math.nan, classes + 5
    weight = torch.linspace(0.5, 2, classes) if seed % 2 else None
    case = LossCase("topk", F.topk_distillation_loss, {"tail": tail, "z_loss": z_loss})
    arguments = (target, (indices, log_t))
    before = logits.clone()
    exact, exact_slope = both(case, logits.double(), *arguments, impl="reference", weight=weight)
    naive, naive_slope = both(case, logits, *arguments, impl="reference", weight=weight)
    for impl in BACKENDS:
        value, slope = both(case, logits, *arguments, impl=impl, weight=weight)
        error, usual = ((x - exact).abs() / exact.abs().clamp(min=1) for x in (value, naive))
        assert (error <= usual + 1e-6).all()
        error, usual = ((x - exact_slope).abs() for x in (slope, naive_slope))
        assert (error <= usual + 2e-6).all()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_stored_classes_that_have_almost_all_of_the_mass():
    """The mass of the others, 2e-21, keeps its digits in the value and in the gradient."""
    logits, target = torch.zeros(1, 50), torch.tensor([0])
    logits[0, :4] = 50.0
    indices, log_t = torch.arange(4).unsqueeze(0), torch.full((1, 4), 0.2).log()
    case = LossCase("topk", F.topk_distillation_loss, {"alpha": 1.0, "tail": "bucket"})
    exact, exact_slope = both(case, logits.double(), target, (indices, log_t), impl="reference")
    for impl in BACKENDS:
        value, slope = both(case, logits, target, (indices, log_t), impl=impl)
        torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(slope, exact_slope, rtol=1e-6, atol=0)
        assert slope[0, 4:].count_nonzero() == 46


def test_other_classes_far_below_the_stored_ones():
    """The lowest finite number as a mask: the stored classes keep their differences."""
    logits, target = torch.full((1, 50), torch.finfo(torch.float32).min), torch.tensor([1])
    logits[0, :4] = torch.tensor([1.0, 2.0, 0.5, 0.0])
    indices, log_t = torch.arange(4).unsqueeze(0), torch.full((1, 4), 0.25).log()
    case = LossCase("topk", F.topk_distillation_loss, {"tail": "renormalize"})
    masked = logits[:, :4].double()
    exact, exact_slope = both(case, masked, target, (indices, log_t), impl="reference")
    for impl in BACKENDS:
        value, slope = both(case, logits, target, (indices, log_t), impl=impl)
        torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(slope[:, :4], exact_slope, rtol=1e-6, atol=1e-7)


def test_ties_of_the_maximum():
    """The first of several largest logits gets the gradient of the maximum, as in the reference."""
    logits, target = torch.zeros(2, 2000), torch.tensor([3, 0])
    logits[:, 1500:1510] = 2.0
    for function in (F.max_suppression_loss, F.margin_smoothing_loss):
        case = LossCase("tie", function, {"lam": 0.5})
        _, expected = both(case, logits.double(), target, (), impl="reference")
        for impl in BACKENDS:
            _, slope = both(case, logits, target, (), impl=impl)
            torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["cp", "logitnorm", "dkd-standardized", "topk-labo"])
def test_rows_do_not_depend_on_their_neighbours_or_threads(name):
    logits, target = torch.randn(64, 9000), torch.randint(100, 9000, (64,))
    case = next(case for case in CASES if case.name == name)
    extra = case.extra(logits)
    logits[41, :9] = -math.inf
    value, slope = both(case, logits, target, extra)
    upstream = torch.linspace(-1, 2, 64)
    for row in (0, 40):
        part = slice(row, row + 1)
        leaf = logits[part].clone().requires_grad_()
        alone = case(leaf, target[part], extra=case.take(extra, part), reduction="none")
        (grad,) = torch.autograd.grad(alone, leaf, upstream[row : row + 1])
        assert torch.equal(alone.detach().double(), value[row : row + 1])
        assert torch.equal(grad.double(), slope[row : row + 1])


@each_backend
@pytest.mark.parametrize("alpha", [1e-25, 1e-9, 0.3, 0.7, 1 - 1e-9])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_generalized_entropy_near_its_ends(alpha, scale, impl):
    """D = KL(U || m) / alpha + KL(p || m) / (1 - alpha), in numbers of 40 digits."""
    decimal.getcontext().prec = 40
    logits = scale * torch.tensor([[1.5, 0.25, -1.0, 0.5, -2.0]])
    z, a = [decimal.Decimal(x) for x in logits[0].tolist()], decimal.Decimal(alpha)
    p = [(x - z[0]).exp() for x in z]
    p = [x / sum(p) for x in p]
    u = decimal.Decimal(1) / len(p)
    m = [(1 - a) * u + a * x for x in p]
    of_u = sum(u * (u / x).ln() for x in m) / a
    of_p = sum(x * (x / y).ln() for x, y in zip(p, m, strict=True)) / (1 - a)
    exact = float(-p[0].ln() + decimal.Decimal("0.7") * (of_u + of_p))
    found = F.generalized_entropy_loss(logits, torch.tensor([0]), alpha=alpha, impl=impl)
    assert float(found) == pytest.approx(exact, rel=1e-6)


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
    usual = native.instruction_set()
    native.select_instruction_set(isa)
    try:
        for moments in (native.moments, blocked.moments):
            tolerance = {"rtol": 1e-6, "atol": 1e-5}
            center, squares = moments(logits, True)
            wanted = exact.mean(1)
            torch.testing.assert_close(center, wanted, **tolerance)
            wanted = (exact - wanted.unsqueeze(1)).square().sum(1)
            if moments is native.moments:
                torch.testing.assert_close(squares, wanted, **tolerance)
            center, squares = moments(logits, False)
            assert not center.any()
            torch.testing.assert_close(squares, exact.square().sum(1), **tolerance)
    finally:
        native.select_instruction_set(usual)
    alike = logits[:, :1].expand(5, 37)
    assert (native.moments(alike, True)[1] >= 0).all()
    logits[0, 0] = -math.inf
    assert native.moments(logits, True)[1].isfinite().tolist() == [False, *[True] * 4]


def test_what_is_fused():
    """Losses with ``impl`` are fused by default, and refuse options that are not."""
    logits, target = torch.randn(3, 9, requires_grad=True), torch.tensor([0, 1, 2])
    assert is_fused(F.focal_loss(logits, target))
    with pytest.raises(ValueError, match="does not support a prior"):
        F.generalized_entropy_loss(logits, target, prior=torch.ones(9) / 9, impl="native")
    # the plain formula can be differentiated twice
    value = F.focal_loss(logits, target, impl="reference")
    (slope,) = torch.autograd.grad(value, logits, create_graph=True)
    slope.square().sum().backward()


def test_an_operator_names_a_formula():
    for loss in (labo.FocalLoss(gamma=2.0, z_loss=1e-4), labo.LABOLoss(weight=torch.ones(3))):
        rows = dispatch.FastRows.unpack(*dispatch.FastRows(loss, "blocked").pack())
        assert (type(rows.loss), rows.backend) == (type(loss), "blocked")
        assert rows.loss.values() == loss.values()


def test_a_new_formula_needs_no_kernel():
    """The example of docs/add_a_method.md."""

    class Generalized(Loss):
        gamma: float = hyper(default=0.7, doc="from cross entropy to the probability of an error")

        def value(self, row: RowSums) -> Tensor:
            return row.weigh(-torch.expm1(self.gamma * row.log_p_y()) / self.gamma)

    logits, target = torch.randn(4, 50, requires_grad=True), torch.arange(4)
    p = logits.softmax(-1)[torch.arange(4), target]
    expected = (1 - p**0.7) / 0.7
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    for impl in ("reference", *BACKENDS):
        value = Generalized(impl=impl, reduction="sum")(logits, target)
        torch.testing.assert_close(value.detach(), expected.detach().sum())
        torch.testing.assert_close(torch.autograd.grad(value, logits)[0], slope)


@each_case
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which is the interpreter
def test_triton(case, monkeypatch):
    """The Triton kernels, by the interpreter where there is no GPU."""
    triton_for_native(monkeypatch)
    kernels = dispatch._triton_module()
    for name in ("MAX_BLOCK", "MAX_FORMULA_BLOCK"):
        monkeypatch.setattr(kernels, name, 64)  # several blocks for a row
    logits, target = hard_rows()
    extra = case.extra(logits.nan_to_num().clamp(-50, 50))
    for weight in (None, torch.linspace(0, 2, logits.shape[1])):
        exact, exact_slope = both(
            case, logits.double(), target, extra, impl="reference", weight=weight
        )
        naive, naive_slope = both(case, logits, target, extra, impl="reference", weight=weight)
        value, slope = both(case, logits, target, extra, impl="native", weight=weight)
        scale = exact.abs().clamp(min=1)
        assert ((value - exact).abs() / scale <= (naive - exact).abs() / scale + 4e-6).all()
        size = exact_slope.abs().amax(1, keepdim=True).clamp(min=1)
        error = (slope - exact_slope).abs() / size
        assert (error <= (naive_slope - exact_slope).abs() / size + 1e-6).all()
