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

from labo.fast.kernel import Kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

# The interpreter is NumPy, which warns of the NaN and infinities that the tests feed it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CE, LS, LABO, ADAPTIVE = range(4)
IGNORE = -100
INF = math.inf
NAN = math.nan

modes = pytest.mark.parametrize("mode", [CE, LS, LABO, ADAPTIVE])
weighting = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


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


@pytest.mark.parametrize("classes", [1, 2, 3, 7, 17, 130, 1000, 5000])
@modes
@weighting
def test_definition(kernels: ModuleType, classes: int, mode: int, weighted: bool) -> None:
    batch = draw(3, classes, weighted)
    setting = Setting(mode)
    check(run(kernels, batch, setting), define(batch, setting))


@pytest.mark.parametrize("rows", [0, 1, 3, 5])
@modes
@weighting
def test_any_number_of_rows(kernels: ModuleType, rows: int, mode: int, weighted: bool) -> None:
    batch = draw(rows, 7, weighted)
    got = run(kernels, batch, Setting(mode))
    assert got.values.shape == (rows,)
    assert got.gradient.shape == (rows, 7)
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
@weighting
def test_ends_of_the_settings(kernels: ModuleType, setting: Setting, weighted: bool) -> None:
    batch = draw(3, 17, weighted)
    check(run(kernels, batch, setting), define(batch, setting))


@modes
@weighting
def test_sums_survive_every_move_of_the_maximum(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: int, weighted: bool
) -> None:
    monkeypatch.setattr(kernels, "MAX_BLOCK", 16)
    batch = draw(5, 130, weighted)
    rising = torch.linspace(-30, 30, 130, device=DEVICE)
    batch.logits[0] += rising
    batch.logits[1] -= rising
    batch.logits[2, :50] = -INF  # whole blocks before the first class that is present
    batch.logits[3, 20:] = -INF  # whole blocks after the last
    batch.logits[4] = 2.0
    batch.target.fill_(60)
    batch.target[3] = 5
    check(run(kernels, batch, Setting(mode)), define(batch, Setting(mode)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@weighting
def test_cross_entropy_of_torch(kernels: ModuleType, smoothing: float, weighted: bool) -> None:
    batch = draw(5, 17, weighted)
    batch.target[2] = IGNORE
    z = batch.logits.clone().requires_grad_()
    values = F.cross_entropy(
        z, batch.target, batch.weight, label_smoothing=smoothing, reduction="none"
    )
    (gradient,) = torch.autograd.grad(values, z, batch.factor)
    got = run(kernels, batch, Setting(LS if smoothing else CE, alpha=smoothing))
    torch.testing.assert_close(got.values, values.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.gradient, gradient, rtol=1e-5, atol=2e-6)


@modes
@weighting
def test_masked_classes(kernels: ModuleType, mode: int, weighted: bool) -> None:
    batch = draw(4, 17, weighted)
    batch.logits[:, ::3] = -INF
    batch.target.fill_(4)
    batch.logits[3] = -INF
    batch.logits[3, 4] = 0.5  # the target alone is left
    got = run(kernels, batch, Setting(mode))
    assert got.values.isfinite().all()
    assert (got.gradient[batch.logits == -INF] == 0).all()
    check(got, define(batch, Setting(mode)))


@modes
@weighting
def test_masked_target_costs_infinity(kernels: ModuleType, mode: int, weighted: bool) -> None:
    batch = draw(3, 7, weighted)
    batch.target.fill_(2)
    batch.logits[:, 2] = -INF
    got = run(kernels, batch, Setting(mode))
    assert (got.values == INF).all()
    check(got, define(batch, Setting(mode)))


def test_masked_target_without_a_share_costs_nothing(kernels: ModuleType) -> None:
    batch = draw(1, 3)
    batch.logits[0] = torch.tensor([0.0, -INF, -INF])
    batch.target.fill_(1)
    for setting in (Setting(LABO, alpha=1.0), Setting(ADAPTIVE)):  # no entropy: alpha = 1
        got = run(kernels, batch, setting)
        assert got.values.isfinite().all()
        check(got, define(batch, setting))


@modes
def test_classes_of_no_weight(kernels: ModuleType, mode: int) -> None:
    batch = draw(3, 7, weighted=True)
    batch.target.copy_(torch.tensor([2, 2, 5]))
    batch.weight[2] = 0.0
    batch.logits[1, 2] = -INF
    got = run(kernels, batch, Setting(mode))
    assert got.values.isfinite().all()
    check(got, define(batch, Setting(mode)))


@modes
@weighting
def test_ignored_rows_are_zero_whatever_they_hold(
    kernels: ModuleType, mode: int, weighted: bool
) -> None:
    batch = draw(5, 17, weighted)
    batch.logits[1] = NAN
    batch.logits[2] = INF
    batch.logits[4] = -INF
    batch.target[[1, 2, 4]] = IGNORE
    got = run(kernels, batch, Setting(mode))
    for row in (1, 2, 4):
        assert got.values[row] == 0
        assert (got.gradient[row] == 0).all()
    check(got, define(batch, Setting(mode)))


@modes
@weighting
@pytest.mark.parametrize("max_block", [8, 4096])
def test_broken_rows_are_nan_and_alone(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: int, weighted: bool, max_block: int
) -> None:
    monkeypatch.setattr(kernels, "MAX_BLOCK", max_block)
    batch = draw(6, 20, weighted)
    sound = run(kernels, batch, Setting(mode))
    batch.logits[0, 3] = NAN
    batch.logits[1] = NAN
    batch.logits[2, 15] = INF
    batch.logits[3] = -INF
    batch.logits[4, 19] = NAN
    batch.logits[4, batch.target[4]] = -INF
    got = run(kernels, batch, Setting(mode))
    assert got.values[:5].isnan().all()
    assert got.gradient[:5].isnan().any(1).all()
    assert torch.equal(got.values[5:], sound.values[5:])
    assert torch.equal(got.gradient[5:], sound.gradient[5:])


@modes
@weighting
def test_large_logits(kernels: ModuleType, mode: int, weighted: bool) -> None:
    batch = draw(4, 17, weighted)
    batch.logits[0] += 1e4
    batch.logits[1] -= 1e4
    batch.logits[2, ::2] = 1e4
    batch.logits[2, 1::2] = -1e4
    batch.logits[3] = -1e4
    batch.logits[3, 5] = 1e4
    got = run(kernels, batch, Setting(mode))
    assert got.values.isfinite().all()
    check(got, define(batch, Setting(mode)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@modes
@weighting
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
@weighting
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
@modes
@weighting
def test_in_place(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    mode: int,
    weighted: bool,
) -> None:
    monkeypatch.setattr(kernels, "MAX_BLOCK", 16)
    batch = draw(4, 50, weighted, dtype)
    batch.target[1] = IGNORE
    apart = run(kernels, batch, Setting(mode))

    wide = torch.full((4, 60), 7.0, device=DEVICE, dtype=dtype)
    out = wide[:, 3:53]
    beside = run(kernels, batch, Setting(mode), out=out)
    assert beside.gradient is out
    assert torch.equal(out, apart.gradient)
    assert (wide[:, :3] == 7).all()
    assert (wide[:, 53:] == 7).all()

    batch.logits = batch.logits.clone()
    over = run(kernels, batch, Setting(mode), out=batch.logits)
    assert over.gradient is batch.logits
    assert torch.equal(over.gradient, apart.gradient)


@modes
@weighting
def test_rows_are_independent(kernels: ModuleType, mode: int, weighted: bool) -> None:
    batch = draw(5, 130, weighted)
    together = run(kernels, batch, Setting(mode))
    for row in range(5):
        one = slice(row, row + 1)
        single = Batch(batch.logits[one], batch.target[one], batch.factor[one], batch.weight)
        alone = run(kernels, single, Setting(mode))
        assert torch.equal(alone.values, together.values[one])
        assert torch.equal(alone.gradient, together.gradient[one])


@modes
@weighting
def test_unknown_targets_are_nan_and_never_read(
    kernels: ModuleType, mode: int, weighted: bool
) -> None:
    batch = draw(5, 7, weighted)
    sound = run(kernels, batch, Setting(mode))
    # Read as an offset, the larger ones would leave the address space.
    batch.target[:4] = torch.tensor([7, -1, 2**60, -(2**60)])
    got = run(kernels, batch, Setting(mode))
    assert got.values[:4].isnan().all()
    assert got.gradient[:4].isnan().all()
    assert torch.equal(got.values[4:], sound.values[4:])
    assert torch.equal(got.gradient[4:], sound.gradient[4:])


def test_refuses_what_it_would_misread(kernels: ModuleType) -> None:
    batch = draw(3, 7)
    for logits, error in ((batch.logits.double(), TypeError), (batch.logits.t(), ValueError)):
        with pytest.raises(error):
            run(kernels, Batch(logits, batch.target, batch.factor, None), Setting(CE))
    with pytest.raises(ValueError, match="shape"):
        run(kernels, batch, Setting(CE), out=batch.logits.new_empty(3, 8))


@modes
@weighting
@pytest.mark.parametrize("mask", [-INF, torch.finfo(torch.float32).min, -1e30])
def test_a_whole_block_is_masked(kernels: ModuleType, mode: int, weighted: bool, mask: float):
    """Many models mask with a large finite number; the maximum then grows by that much at once."""
    batch = draw(3, 2 * kernels.MAX_BLOCK + 5, weighted)
    batch.logits[0, : kernels.MAX_BLOCK] = mask
    batch.logits[1, kernels.MAX_BLOCK :] = mask
    batch.logits[2, 3:] = mask
    batch.target[:] = torch.tensor([kernels.MAX_BLOCK + 1, 4, 2])
    setting = Setting(mode)
    got, wanted = run(kernels, batch, setting), define(batch, setting)
    torch.testing.assert_close(got.values.double(), wanted.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.gradient.double(), wanted.gradient, rtol=1e-4, atol=1e-6)
