"""Losses, rows and comparisons for the tests of the fast backends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from labo import functional as F
from loss_cases import LOSS_CASES, LossCase, both, triton_for_native

BACKENDS = ["blocked", "native"]
each_backend = pytest.mark.parametrize("impl", BACKENDS)
# For ``on_backend``.
each_of_four = pytest.mark.parametrize("backend", ["reference", *BACKENDS, "triton"])


@contextmanager
def on_backend(backend: str) -> Iterator[str]:
    """What ``impl`` must be; the Triton kernels take the place of the C kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == "triton":
            triton_for_native(patch)
        yield "native" if backend == "triton" else backend


# The losses that have a kernel of one call, with other than default hyper-parameters.
ONE_CALL = {
    "base": LossCase("base", F.cross_entropy_loss),
    "ls": LossCase("ls", F.label_smoothing_loss, {"alpha": 0.2}),
    "labo": LossCase("labo", F.labo_loss, {"tau": 1.3}),
    "labo-fixed": LossCase("labo-fixed", F.labo_loss, {"alpha": 0.4, "tau": 0.8}),
}
each_one_call = pytest.mark.parametrize("case", ONE_CALL.values(), ids=lambda case: case.name)

_Z_LOSS = [
    LossCase("base-z", F.cross_entropy_loss, {"z_loss": 1e-3}),
    LossCase("labo-z", F.labo_loss, {"z_loss": 1e-3}),
    LossCase("labo-fixed-z", F.labo_loss, {"alpha": 0.3, "z_loss": 1e-3}),
    LossCase("fl-z", F.focal_loss, {"z_loss": 1e-3}),
    LossCase("z", F.z_loss, {"lam": 1e-3}),
]
_REFERENCE_ONLY = {"labo-grad", "held-labo", "held-labo-multiplied", "gem-logsigmoid"}


def _has_formula(case: LossCase) -> bool:
    return "value" in vars(getattr(case.function, "loss", object))


# Every loss whose value is a formula of sums, so that it has a fast backend.
FORMULAS = [
    case for case in LOSS_CASES if _has_formula(case) and case.name not in _REFERENCE_ONLY
] + _Z_LOSS
each_formula = pytest.mark.parametrize("case", FORMULAS, ids=lambda case: case.name)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator)
    return logits.to(dtype), torch.randint(shape[-1], shape[:-1], generator=generator)


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


def assert_no_worse_than_naive(
    case: LossCase,
    impl: str,
    logits: Tensor,
    target: Tensor,
    *,
    value_rounding: float = 4e-6,
    rounding: float | None = None,
    **arguments: object,
) -> tuple[Tensor, Tensor]:
    """The error against float64 is that of the reference in the same dtype, plus some rounding."""
    exact, exact_slope = both(case, logits.double(), target, impl="reference", **arguments)
    naive, naive_slope = both(case, logits, target, impl="reference", **arguments)
    value, slope = both(case, logits, target, impl=impl, **arguments)
    scale = exact.abs().clamp(min=1)
    assert ((value - exact).abs() / scale <= (naive - exact).abs() / scale + value_rounding).all()
    size = exact_slope.abs().amax(-1, keepdim=True).clamp(min=1)
    error, usual = ((x - exact_slope).abs() / size for x in (slope, naive_slope))
    assert (error <= usual + (rounding or 4 * torch.finfo(logits.dtype).eps)).all()
    return value, slope


def assert_rounded_once(slope: Tensor, exact: Tensor) -> None:
    """Each entry is the exact one, computed in float32 and rounded to float16."""
    assert slope.dtype == torch.float16
    limits = torch.finfo(torch.float16)
    spacing = exact.abs().clamp(min=limits.smallest_normal) * limits.eps
    error = (slope.double() - exact).abs()
    assert (error <= 0.51 * spacing + 1e-6 * exact.abs().max()).all()
