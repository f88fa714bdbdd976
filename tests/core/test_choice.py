"""What ``impl="auto"`` takes by the number of classes, and what a loss loads and moves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import labo
from labo.fast import dispatch
from labo.sums import Traced


def half_logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).mul(3).half().requires_grad_()


def gradient(loss: torch.nn.Module, logits: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    target = torch.arange(len(logits)) % logits.shape[1]
    (grad,) = torch.autograd.grad(loss(logits, target) * scale, logits)
    return grad


@pytest.mark.parametrize("build", [labo.LABOLoss, labo.FocalLoss])
def test_float16_with_few_classes_takes_the_kernel_on_a_copy(build):
    logits, target = half_logits(6, 40), torch.arange(6)
    loss = build()
    copy = logits.detach().float().requires_grad_()
    assert torch.equal(loss(logits, target), build(impl="native")(copy, target))
    assert torch.equal(gradient(loss, logits), gradient(build(impl="native"), copy).half())


def test_the_scale_of_a_grad_scaler_is_in_the_gradient_before_it_is_rounded():
    logits, loss = half_logits(64, 40), labo.LABOLoss(multiplier=1e-6)
    copy = logits.detach().float().requires_grad_()
    assert not gradient(loss, logits).any()  # below the smallest number of float16
    scaled = gradient(loss, logits, scale=2.0**16)
    assert scaled.any()
    assert torch.equal(scaled, gradient(loss, copy, scale=2.0**16).half())


def test_many_classes_in_float16_are_not_copied(monkeypatch):
    monkeypatch.setattr(dispatch, "_COPIED_CLASSES", 39)
    logits, target = half_logits(6, 40), torch.arange(6)
    blocked = labo.FocalLoss(impl="blocked")(logits, target)
    assert torch.equal(labo.FocalLoss()(logits, target), blocked)


@pytest.mark.parametrize(("classes", "impl"), [(128, "reference"), (129, "native")])
def test_a_stored_teacher_with_few_classes_goes_to_the_reference(classes, impl):
    stored = torch.randn(64, classes).log_softmax(-1).topk(4)
    logits, target = torch.randn(64, classes), torch.arange(64)
    given = (logits, target, stored.indices, stored.values)
    values = {
        name: labo.TopKDistillationLoss(impl=name, reduction="none")(*given)
        for name in ("auto", "reference", "native")
    }
    assert torch.equal(values["auto"], values[impl])
    assert not torch.equal(values["reference"], values["native"])  # so that it tells them apart


def test_a_row_made_of_numbers_goes_to_the_device_of_the_logits():
    loss = labo.LabelSmoothingLoss(convention="joeynmt", padding_idx=0)
    logits = torch.empty(2, 4, device="meta")
    assert loss.mass_source(logits).device == logits.device


def test_a_row_made_of_a_field_is_refused_by_its_name():
    logits = torch.empty(2, 4, device="meta")
    masked = labo.MaskedLabelSmoothingLoss(torch.tensor([True, True, False, True]))
    with pytest.raises(ValueError, match="mask is on cpu, the logits are on meta"):
        masked.mass_source(logits)
    grouped = labo.WeightedLabelSmoothingLoss(torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="groups is on cpu, the logits are on meta"):
        grouped.mass_source(logits)


def test_a_formula_with_an_unknown_sum_says_so():
    with pytest.raises(AttributeError, match="the sums of a row have no 'log_k'"):
        _ = Traced(labo.CrossEntropyLoss(), weighted=False).log_k


LINES = """
import sys
from pathlib import Path
import labo
labo.LABOLoss
files = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "labo"]
print(sum(len(Path(file).read_text().splitlines()) for file in files))
print(*sorted(name for name in sys.modules if name.startswith("labo.")))
"""


def test_labo_loads_no_other_family_and_few_lines():
    printed = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True)
    lines, names = printed.stdout.splitlines()
    assert int(lines) <= 4200
    loaded = set(names.split())
    assert "labo.losses.labo" in loaded
    heavy = {"labo.losses.teachers", "labo.linear", "labo.calibration", "labo.heads.split"}
    assert not loaded & heavy
