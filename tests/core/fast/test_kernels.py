"""The Triton kernels against the reference in float64, and their buffers.

Without a GPU the kernels run under Triton's interpreter, which conftest.py chooses.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backends import (
    FORMULAS,
    ONE_CALL,
    assert_no_worse_than_naive,
    assert_rounded_once,
    each_one_call,
    hard_rows,
    on_backend,
    sample,
)
from labo import functional as F
from labo.fast import dispatch
from labo.fast.kernel import Kernel
from loss_cases import CASES, DEVICE, LossCase, both, gradient

kernels = pytest.importorskip("labo.fast.kernels", reason="Triton is not installed")

# The interpreter is NumPy, which warns of the NaN and infinities that the tests feed it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN, IGNORE = math.inf, math.nan, -100


@pytest.fixture
def _instead_of_the_c_kernel():
    with on_backend("triton"):
        yield


as_backend = pytest.mark.usefixtures("_instead_of_the_c_kernel")


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Several blocks for a row."""
    for name in ("MAX_BLOCK", "MAX_FORMULA_BLOCK"):
        monkeypatch.setattr(kernels, name, size)


# ------------------------------------------------------------------ as a backend of the losses

_WEIGHTED = [CASES[name] for name in ("labo", "fl", "kd", "ols")]


@as_backend
@pytest.mark.parametrize(
    ("case", "weighted"),
    [*((case, False) for case in FORMULAS), *((case, True) for case in _WEIGHTED)],
    ids=lambda x: "weighted" * x if isinstance(x, bool) else x.name,
)
def test_every_loss(case, weighted, monkeypatch):
    small_blocks(monkeypatch, 64)
    logits, target = hard_rows()
    weight = torch.linspace(0, 2, logits.shape[1]) if weighted else None
    extra = case.extra(logits.nan_to_num().clamp(-50, 50))
    arguments = {"extra": extra, "weight": weight, "reduction": "none"}
    assert_no_worse_than_naive(case, "native", logits, target, rounding=1e-6, **arguments)


SHAPES = [(0, 7), (1, 1), (3, 2), (3, 3), (5, 7), (3, 17), (3, 130), (2, 5000)]


@as_backend
@each_one_call
@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [(torch.float32, SHAPES), (torch.bfloat16, [(5, 130)]), (torch.float16, [(5, 130)])],
    ids=["fp32", "bf16", "fp16"],
)
def test_shapes_and_dtypes(case, dtype, shapes):
    """All arithmetic is float32: the values lose nothing, the gradient is rounded just once."""
    # A device rounds to nearest; the interpreter cuts bfloat16 off, and may lose a whole unit.
    cut_off = torch.finfo(dtype).eps if (DEVICE, dtype) == ("cpu", torch.bfloat16) else 0
    for shape in shapes:
        logits, target = sample(*shape, dtype=dtype)
        target[3:4] = IGNORE
        for weight in (None, torch.rand(shape[1]) + 0.1):
            fixed = {"weight": weight, "reduction": "none", "rounding": 1e-6 + cut_off}
            value, slope = assert_no_worse_than_naive(case, "native", logits, target, **fixed)
            assert (value.shape, slope.shape) == (shape[:1], shape)


@as_backend
@pytest.mark.parametrize(
    "case",
    [
        LossCase("ls", F.label_smoothing_loss, {"alpha": 0.0}),
        LossCase("ls", F.label_smoothing_loss, {"alpha": 1.0}),
        *(LossCase("labo", F.labo_loss, {"alpha": alpha, "tau": 1.7}) for alpha in (0.0, 1.0)),
        *(LossCase("labo", F.labo_loss, {"alpha": 0.3, "tau": tau}) for tau in (0.25, 1.0, 8.0)),
        LossCase("labo", F.labo_loss, {"rho": 0.0}),
        LossCase("labo", F.labo_loss, {"rho": 1.0, "tau": 0.25}),
    ],
    ids=lambda case: f"{case.name} {case.hyper}",
)
def test_ends_of_the_settings(case):
    logits, target = sample(3, 17)
    for weight in (None, torch.rand(17) + 0.1):
        fixed = {"weight": weight, "reduction": "none"}
        assert_no_worse_than_naive(case, "native", logits, target, rounding=1e-6, **fixed)


@as_backend
@pytest.mark.parametrize(
    ("name", "weighted"),
    [("base", False), ("ls", True), ("labo", True), ("labo-fixed", False)],
)
def test_sums_survive_every_move_of_the_maximum(name, weighted, monkeypatch):
    """Many models mask with a large finite number; the maximum then grows by that much at once."""
    case = ONE_CALL[name]
    small_blocks(monkeypatch, 32)
    logits, _ = sample(14, 130)
    rising, lowest = torch.linspace(-30, 30, 130), torch.finfo(torch.float32).min
    logits[0] += rising
    logits[1] -= rising
    logits[2, :50] = -INF  # whole blocks before the first class that is present
    logits[3, 20:] = -INF  # whole blocks after the last
    logits[4] = 2.0
    logits[5, :50], logits[6, :50], logits[7, 50:] = lowest, -1e30, lowest
    logits[8] = -INF
    logits[8, 60] = 0.5  # the target alone is left
    logits[9] += 1e4
    logits[10] -= 1e4
    logits[11, ::2], logits[11, 1::2] = 1e4, -1e4
    logits[12] = -1e4
    logits[12, 5] = 1e4
    logits[13, ::3] = -INF
    target = torch.full((14,), 60)
    target[[3, 7]], target[13] = 5, 61
    weight = torch.rand(130) + 0.1 if weighted else None
    fixed = {"weight": weight, "reduction": "none"}
    exact = both(case, logits.double(), target, impl="reference", **fixed)
    value, slope = both(case, logits, target, impl="native", **fixed)
    torch.testing.assert_close((value, slope), exact, rtol=1e-5, atol=1e-5)
    assert (slope[logits == -INF] == 0).all()


@as_backend
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float16_gradient_has_the_loss_scale_before_it_is_rounded(compiled):
    """Few rows, as the interpreter is slow, but a wide spread of probabilities."""
    logits, target = sample(12, 24, dtype=torch.float16)
    weight = torch.rand(24)

    def scaled(z, impl="native"):
        return 65536 * CASES["labo"](z, target, weight=weight, impl=impl)

    exact = gradient(lambda z: scaled(z, "reference"), logits.double())
    torch._dynamo.reset()
    slope = gradient(torch.compile(scaled, backend="aot_eager") if compiled else scaled, logits)
    assert_rounded_once(slope, exact)


# ------------------------------------------------------------------ what only a kernel is given

MODES = ("ce", "ls", "labo", "adaptive")


def run(
    mode: str, logits: Tensor, target: Tensor, factor: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Values and gradient of rows with class weights, times a factor of each row."""
    weight = torch.linspace(0.1, 1.1, logits.shape[1])
    fixed = (Kernel(MODES.index(mode), 0.3, 1.7, 0.8), weight.to(DEVICE), IGNORE)
    values, statistics = kernels.row_statistics(logits, target, *fixed)
    return values, kernels.row_gradient(logits, target, statistics, factor, *fixed, out)


def rows(
    count: int, classes: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    logits, target = sample(count, classes, dtype=dtype)
    return logits.to(DEVICE), target.to(DEVICE), torch.linspace(0.5, 1.5, count).to(DEVICE)


@pytest.mark.parametrize(("mode", "block"), [*((mode, 8) for mode in MODES), ("labo", 4096)])
def test_broken_and_ignored_rows_are_alone(mode, block, monkeypatch):
    """A broken row is NaN, an ignored one 0 whatever it holds; others do not change a bit."""
    small_blocks(monkeypatch, block)
    logits, target, factor = rows(13, 20)
    sound = run(mode, logits, target, factor)
    logits[0, 3] = NAN
    logits[1] = NAN
    logits[2, 15] = INF
    logits[3] = -INF
    logits[4, 19], logits[4, 2], target[4] = NAN, -INF, 2
    # An unknown target. Read as an offset, the larger ones would leave the address space.
    target[5:9] = torch.tensor([20, -1, 2**60, -(2**60)])
    logits[9], logits[10], logits[11] = NAN, INF, -INF
    target[9:12] = IGNORE
    values, slope = run(mode, logits, target, factor)
    assert values[:9].isnan().all()
    assert slope[:9].isnan().any(1).all()
    assert slope[5:9].isnan().all()
    assert values[9:12].count_nonzero() == slope[9:12].count_nonzero() == 0
    for other in (sound, run(mode, logits[12:], target[12:], factor[12:])):
        assert torch.equal(other[0][-1], values[12])
        assert torch.equal(other[1][-1], slope[12])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_place_and_strided(dtype, monkeypatch):
    small_blocks(monkeypatch, 16)
    logits, target, _ = rows(4, 50, dtype)
    target[1] = IGNORE
    factor = torch.tensor(0.7, device=DEVICE).expand(4)
    values, slope = run("adaptive", logits, target, factor)
    assert slope.dtype == dtype

    wide = torch.full((4, 60), 7.0, device=DEVICE, dtype=dtype)
    out = wide[:, 3:53]
    strided = torch.stack([target, target + 1], 1)[:, 0]
    assert run("adaptive", logits, strided, factor.contiguous(), out)[1] is out
    assert torch.equal(out, slope)
    assert (wide[:, :3] == 7).all()
    assert (wide[:, 53:] == 7).all()

    wide[:, 3:53] = logits
    found, over = run("adaptive", out, target, factor, out)
    assert over is out
    assert torch.equal(found, values)
    assert torch.equal(over, slope)


def test_refuses_what_it_would_misread():
    logits, target, factor = rows(3, 7)
    for wrong, error in ((logits.double(), TypeError), (logits.t(), ValueError)):
        with pytest.raises(error):
            run("ce", wrong, target, factor)
    with pytest.raises(ValueError, match="shape"):
        run("ce", logits, target, factor, logits.new_empty(3, 8))


# ------------------------------------------------------------------ the targets

# One launch counts them, adds up their weights and finds those that are no class.


def count(target, classes, weight=None):
    target = torch.tensor(target, device=DEVICE)
    total, good = kernels.count_targets(target, classes, -100, weight)
    return total.item(), good.item()


def test_targets_that_count():
    assert count([0, 3, -100, 1], 4) == (3.0, True)
    assert count([-100, -100], 4) == (math.inf, True)  # a mean of nothing is 0
    assert count([2] * 9000 + [-100] * 5, 4) == (9000.0, True)  # several blocks


@pytest.mark.parametrize("bad", [4, -1, 1 << 40, -(1 << 62)])
@pytest.mark.parametrize("at", [0, 5000])
def test_a_target_that_is_no_class(bad, at):
    target = [1] * 5001
    target[at] = bad
    total, good = count(target, 4, torch.ones(4, device=DEVICE))
    assert not good
    assert total == 5000.0  # its weight is not read


def test_weights_of_the_targets():
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0], device=DEVICE)
    assert count([0, 1, 1, -100], 4, weight) == (4.5, True)
    assert count([2, 2], 4, weight) == (math.inf, True)


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_denominator(weighted):
    weight = torch.rand(7) if weighted else None
    target = torch.randint(7, (50,)).masked_fill(torch.rand(50) < 0.3, -100)
    wanted = dispatch.denominator(torch.float32, target, 7, -100, weight)
    given = None if weight is None else weight.to(DEVICE)
    total, _ = kernels.count_targets(target.to(DEVICE), 7, -100, given)
    assert total.item() == pytest.approx(wanted, rel=1e-6)
