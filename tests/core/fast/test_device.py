"""Every loss on every device that is here, against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

import labo
from loss_cases import LOSS_CASES, MODULES, compute_on, each_kind

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 6e-3}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])


def close(found, wanted, dtype):
    size = wanted.abs().max().clamp(min=1e-3)
    assert (found.detach().double().cpu() - wanted).abs().max() <= TOLERANCE[dtype] * size


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
@each_dtype
def test_a_loss(case, dtype, device):
    logits = (2 * torch.randn(6, 1000)).to(dtype)
    target = torch.randint(1000, (6,))
    target[1] = -100
    extra = tuple(
        x.to(dtype) if x.is_floating_point() and x.dim() > 1 else x for x in case.extra(logits)
    )
    results = []
    for place, kind in ((device, dtype), ("cpu", torch.float64)):
        moved = tuple(x.to(place, kind) if x.is_floating_point() else x.to(place) for x in extra)
        leaf = logits.to(place, kind).requires_grad_()
        value = case(leaf, target.to(place), extra=moved)
        results.append((value, *torch.autograd.grad(value, leaf)))
    for found, wanted in zip(*results, strict=True):
        close(found, wanted.detach(), dtype)


@pytest.mark.parametrize("name", [n for n in MODULES if MODULES[n](8).rowwise and n != "kr-ls"])
def test_a_module_in_linear_loss(name, device):
    """With its buffers, such as an epoch or a mask, on the device."""
    hidden, weight, target = torch.randn(6, 16), torch.randn(50, 16), torch.randint(50, (6,))
    teacher = torch.randn(6, 50)
    results = []
    for place, kind in ((device, torch.float32), ("cpu", torch.float64)):
        loss = MODULES[name](50).to(place)
        if hasattr(loss, "end_epoch"):
            loss.end_epoch()
        leaves = [x.to(place, kind).requires_grad_() for x in (hidden, weight)]
        given = teacher.to(place, kind) if loss.teacher_argument else None
        if loss.teacher_is_stored:
            stored = given.log_softmax(-1).topk(4)
            given = stored.indices, stored.values
        value = labo.linear_loss(*leaves, target.to(place), loss, teacher_logits=given)
        results.append((value, *torch.autograd.grad(value, leaves)))
    for found, wanted in zip(*results, strict=True):
        close(found, wanted.detach(), torch.float32)


@each_kind
def test_any_test_can_let_its_losses_compute_on_a_device(case, monkeypatch):
    """As ``--device`` does. A meta tensor has no value, so that the way back to the CPU fails."""
    compute_on("meta", monkeypatch)
    with pytest.raises(NotImplementedError, match="meta"):
        case(torch.randn(6, 50), torch.randint(50, (6,)), weight=torch.rand(50))
