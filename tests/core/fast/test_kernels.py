"""The Triton kernels against the definition in float64.

Without a GPU the kernels run under Triton's interpreter, which conftest.py chooses.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from backends import (
    FORMULAS,
    assert_no_worse_than_naive,
    assert_rounded_once,
    hard_rows,
    sample,
)
from labo.fast.kernel import Kernel
from loss_cases import CASES, gradient, triton_for_native

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

# The interpreter is NumPy, which warns of the NaN and infinities that the tests feed it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CE, LS, LABO, ADAPTIVE = range(4)
IGNORE = -100
INF = math.inf
NAN = math.nan

# Each mode, and class weights with two of them.
modes = pytest.mark.parametrize(
    ("mode", "weighted"), [(CE, False), (LS, True), (LABO, False), (ADAPTIVE, True)]
)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from labo.fast import kernels

    return kernels


@dataclass(frozen=True)
class Setting:
    mode: int
    alpha: float = 0.3
    tau: float = 1.7
    rho: float = 0.8


@dataclass
class Batch:
    logits: Tensor
    target: Tensor
    factor: Tensor
    weight: Tensor | None


@dataclass
class Result:
    values: Tensor
    gradient: Tensor
    alpha: Tensor


def draw(
    rows: int, classes: int, weighted: bool = False, dtype: torch.dtype = torch.float32
) -> Batch:
    random = torch.Generator().manual_seed(0)
    return Batch(
        logits=(3 * torch.randn(rows, classes, generator=random)).to(DEVICE, dtype),
        target=torch.randint(classes, (rows,), generator=random).to(DEVICE),
        factor=(torch.rand(rows, generator=random) + 0.5).to(DEVICE),
        weight=(torch.rand(classes, generator=random) + 0.1).to(DEVICE) if weighted else None,
    )


def run(kernels: ModuleType, batch: Batch, setting: Setting, out: Tensor | None = None) -> Result:
    kernel = Kernel(setting.mode, setting.alpha, setting.tau, setting.rho)
    fixed = (kernel, batch.weight, IGNORE)
    values, statistics = kernels.row_statistics(batch.logits, batch.target, *fixed)
    given = (batch.logits, batch.target, statistics, batch.factor)
    gradient = kernels.row_gradient(*given, *fixed, out)
    assert values.dtype == statistics.dtype == torch.float32
    assert gradient.dtype == batch.logits.dtype
    return Result(values, gradient, statistics[:, 2])


def define(batch: Batch, setting: Setting, dtype: torch.dtype = torch.float64) -> Result:
    """The definition in two stages: build the label, then take the cross entropy with it."""
    z = batch.logits.detach().to(dtype).requires_grad_()
    n, k = z.shape
    counted = batch.target != IGNORE
    y = batch.target.where(counted, 0)
    w = z.new_ones(k) if batch.weight is None else batch.weight.to(dtype)
    log_p = z.log_softmax(1)
    count = (z != -INF).sum(1).to(dtype)

    with torch.no_grad():
        alpha = z.new_full((n, 1), setting.alpha)
        if setting.mode == CE:
            alpha = torch.zeros_like(alpha)
        if setting.mode == ADAPTIVE:
            entropy = -torch.xlogy(log_p.exp(), log_p.exp()).sum(1, keepdim=True)
            largest = count.log().masked_fill(count <= 1, 1.0).unsqueeze(1)
            alpha = 1 - setting.rho * entropy.clamp(min=0) / largest
        if setting.mode <= LS:
            present = (z != -INF).to(dtype)
            prior = present / present.sum(1, keepdim=True)
            divergence = z.new_zeros(n)
        else:
            prior = (z / setting.tau).softmax(1)
            divergence = count.log() + torch.xlogy(prior, prior).sum(1)
        label = (1 - alpha) * F.one_hot(y, k).to(dtype) + alpha * prior
        divergence = w[y] * alpha[:, 0] * setting.tau * divergence

    share = w * label
    terms = torch.where(share == 0, 0, share * log_p)
    values = (divergence - terms.sum(1)).where(counted, 0)
    (gradient,) = torch.autograd.grad(values, z, batch.factor.to(dtype))
    gradient = gradient.where(counted[:, None], 0)
    return Result(values.detach(), gradient, alpha[:, 0].where(counted, 0))


def check(got: Result, want: Result, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    close = {"rtol": rtol, "atol": atol, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(got.values, want.values, **close)
    torch.testing.assert_close(got.gradient, want.gradient, **close)
    torch.testing.assert_close(got.alpha, want.alpha, **close)


@pytest.mark.parametrize("mode", [CE, LS, LABO, ADAPTIVE])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_definition(kernels: ModuleType, mode: int, weighted: bool) -> None:
    for rows, classes in ((0, 7), (1, 1), (3, 2), (3, 3), (5, 7), (3, 17), (3, 130), (2, 5000)):
        batch = draw(rows, classes, weighted)
        got = run(kernels, batch, Setting(mode))
        assert got.values.shape == (rows,)
        assert got.gradient.shape == (rows, classes)
        check(got, define(batch, Setting(mode)))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(LS, alpha=0.0),
        Setting(LS, alpha=1.0),
        Setting(LABO, alpha=0.0),
        Setting(LABO, alpha=1.0),
        Setting(LABO, tau=0.25),
        Setting(LABO, tau=1.0),
        Setting(LABO, tau=8.0),
        Setting(ADAPTIVE, rho=0.0),
        Setting(ADAPTIVE, rho=1.0, tau=0.25),
    ],
    ids=str,
)
def test_ends_of_the_settings(kernels: ModuleType, setting: Setting) -> None:
    for weighted in (False, True):
        batch = draw(3, 17, weighted)
        check(run(kernels, batch, setting), define(batch, setting))


@modes
def test_sums_survive_every_move_of_the_maximum(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: int, weighted: bool
) -> None:
    """Many models mask with a large finite number; the maximum then grows by that much at once."""
    monkeypatch.setattr(kernels, "MAX_BLOCK", 32)
    batch = draw(8, 130, weighted)
    rising = torch.linspace(-30, 30, 130, device=DEVICE)
    batch.logits[0] += rising
    batch.logits[1] -= rising
    batch.logits[2, :50] = -INF  # whole blocks before the first class that is present
    batch.logits[3, 20:] = -INF  # whole blocks after the last
    batch.logits[4] = 2.0
    for row, mask in ((5, torch.finfo(torch.float32).min), (6, -1e30)):
        batch.logits[row, :50] = mask
    batch.logits[7, 50:] = torch.finfo(torch.float32).min
    batch.target.fill_(60)
    batch.target[[3, 7]] = 5
    check(run(kernels, batch, Setting(mode)), define(batch, Setting(mode)), atol=1e-5)


@modes
def test_masked_classes_and_large_logits(kernels: ModuleType, mode: int, weighted: bool) -> None:
    batch = draw(9, 17, weighted)
    batch.logits[:3, ::3] = -INF
    batch.target.fill_(4)
    batch.logits[3] = -INF
    batch.logits[3, 4] = 0.5  # the target alone is left
    batch.logits[4] += 1e4
    batch.logits[5] -= 1e4
    batch.logits[6, ::2], batch.logits[6, 1::2] = 1e4, -1e4
    batch.logits[7] = -1e4
    batch.logits[7, 5] = 1e4
    batch.logits[8, 4] = -INF  # the target
    got = run(kernels, batch, Setting(mode))
    assert got.values[:8].isfinite().all()
    assert got.values[8] == INF
    assert (got.gradient[:8][batch.logits[:8] == -INF] == 0).all()
    check(got, define(batch, Setting(mode)))


@modes
@pytest.mark.parametrize("max_block", [8, 4096])
def test_broken_and_ignored_rows_are_alone(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: int, weighted: bool, max_block: int
) -> None:
    """A broken row is NaN, an ignored one 0 whatever it holds; others do not change a bit."""
    monkeypatch.setattr(kernels, "MAX_BLOCK", max_block)
    batch = draw(13, 20, weighted)
    sound = run(kernels, batch, Setting(mode))
    batch.logits[0, 3] = NAN
    batch.logits[1] = NAN
    batch.logits[2, 15] = INF
    batch.logits[3] = -INF
    batch.logits[4, 19], batch.logits[4, 2], batch.target[4] = NAN, -INF, 2
    # An unknown target. Read as an offset, the larger ones would leave the address space.
    batch.target[5:9] = torch.tensor([20, -1, 2**60, -(2**60)])
    batch.logits[9], batch.logits[10], batch.logits[11] = NAN, INF, -INF
    batch.target[9:12] = IGNORE
    got = run(kernels, batch, Setting(mode))
    assert got.values[:9].isnan().all()
    assert got.gradient[:9].isnan().any(1).all()
    assert got.gradient[5:9].isnan().all()
    assert got.values[9:12].count_nonzero() == got.gradient[9:12].count_nonzero() == 0
    alone = Batch(*(x[12:] for x in (batch.logits, batch.target, batch.factor)), batch.weight)
    for other in (got, sound, run(kernels, alone, Setting(mode))):
        assert torch.equal(other.values[-1], got.values[12])
        assert torch.equal(other.gradient[-1], got.gradient[12])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@modes
def test_low_precision_storage(
    kernels: ModuleType, dtype: torch.dtype, mode: int, weighted: bool
) -> None:
    batch = draw(5, 130, weighted, dtype)
    batch.target[3] = IGNORE
    got, want = run(kernels, batch, Setting(mode)), define(batch, Setting(mode))
    naive = define(batch, Setting(mode), dtype)
    # All arithmetic is float32: the values lose nothing, the gradient is rounded just once.
    torch.testing.assert_close(got.values, want.values.float(), rtol=1e-5, atol=2e-6)
    error = (got.gradient.double() - want.gradient).abs()
    # A device rounds to nearest; the interpreter cuts bfloat16 off, and may lose a whole unit.
    units = 1.0 if DEVICE == "cpu" and dtype == torch.bfloat16 else 0.5
    assert (error <= units * torch.finfo(dtype).eps * want.gradient.abs() + 1e-6).all()
    assert error.sum() < (naive.gradient.double() - want.gradient).abs().sum()


@modes
def test_strided_rows(kernels: ModuleType, mode: int, weighted: bool) -> None:
    batch = draw(5, 23, weighted)
    batch.logits = batch.logits[:, 2:19]
    if weighted:
        batch.weight = batch.weight.repeat_interleave(2)[:34:2]
    batch.target = torch.tensor([0, 9, 16, 9, 3, 9, 7, 9, 11, 9], device=DEVICE)[::2]
    batch.factor = torch.tensor(0.7, device=DEVICE).expand(5)
    got = run(kernels, batch, Setting(mode))
    assert got.gradient.is_contiguous()
    check(got, define(batch, Setting(mode)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_place(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(kernels, "MAX_BLOCK", 16)
    batch = draw(4, 50, weighted=True, dtype=dtype)
    batch.target[1] = IGNORE
    apart = run(kernels, batch, Setting(ADAPTIVE))

    wide = torch.full((4, 60), 7.0, device=DEVICE, dtype=dtype)
    out = wide[:, 3:53]
    beside = run(kernels, batch, Setting(ADAPTIVE), out=out)
    assert beside.gradient is out
    assert torch.equal(out, apart.gradient)
    assert (wide[:, :3] == 7).all()
    assert (wide[:, 53:] == 7).all()

    batch.logits = batch.logits.clone()
    over = run(kernels, batch, Setting(ADAPTIVE), out=batch.logits)
    assert over.gradient is batch.logits
    assert torch.equal(over.gradient, apart.gradient)


def test_refuses_what_it_would_misread(kernels: ModuleType) -> None:
    batch = draw(3, 7)
    for logits, error in ((batch.logits.double(), TypeError), (batch.logits.t(), ValueError)):
        with pytest.raises(error):
            run(kernels, Batch(logits, batch.target, batch.factor, None), Setting(CE))
    with pytest.raises(ValueError, match="shape"):
        run(kernels, batch, Setting(CE), out=batch.logits.new_empty(3, 8))


# ------------------------------------------------------------------ as a backend of the losses


_WEIGHTED = [CASES[name] for name in ("labo", "fl", "kd", "ols")]


@pytest.mark.parametrize(
    ("case", "weighted"),
    [*((case, False) for case in FORMULAS), *((case, True) for case in _WEIGHTED)],
    ids=lambda x: "weighted" * x if isinstance(x, bool) else x.name,
)
def test_every_loss(case, weighted, monkeypatch):
    """Several blocks for a row."""
    triton_for_native(monkeypatch)
    from labo.fast import kernels

    for name in ("MAX_BLOCK", "MAX_FORMULA_BLOCK"):
        monkeypatch.setattr(kernels, name, 64)
    logits, target = hard_rows()
    weight = torch.linspace(0, 2, logits.shape[1]) if weighted else None
    extra = case.extra(logits.nan_to_num().clamp(-50, 50))
    arguments = {"extra": extra, "weight": weight, "reduction": "none"}
    assert_no_worse_than_naive(case, "native", logits, target, rounding=1e-6, **arguments)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float16_gradient_has_the_loss_scale_before_it_is_rounded(compiled, monkeypatch):
    """Few rows, as the interpreter is slow, but a wide spread of probabilities."""
    triton_for_native(monkeypatch)
    logits, target = sample(12, 24, dtype=torch.float16)
    weight = torch.rand(24)

    def scaled(z, impl="native"):
        return 65536 * CASES["labo"](z, target, weight=weight, impl=impl)

    exact = gradient(lambda z: scaled(z, "reference"), logits.double())
    torch._dynamo.reset()
    slope = gradient(torch.compile(scaled, backend="aot_eager") if compiled else scaled, logits)
    assert_rounded_once(slope, exact)
