"""A quantized output layer: values and gradients of the dequantized one, by blocks of classes."""

from __future__ import annotations

import pytest
import torch

import labo
from eighths import Eighths
from labo.heads import quantized
from probes import LargestTensor

N, D, V = 12, 8, 21


@pytest.fixture
def problem(monkeypatch):
    monkeypatch.setattr(quantized, "_BLOCK_BYTES", 5 * D * 4)  # five classes
    torch.manual_seed(0)
    codes = torch.randint(-20, 20, (V, D), dtype=torch.int8)
    target = torch.randint(V, (N,))
    target[2] = -100
    return torch.randn(N, D), Eighths(codes), torch.randn(V), target


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", [labo.LABOLoss, labo.FocalLoss])
@pytest.mark.parametrize("mode", ["plain", "autocast"])
def test_equals_the_dequantized_layer(problem, loss, reduction, mode):
    x, weight, bias, target = problem

    def step(x, b, w):
        return labo.linear_loss(
            x,
            w,
            target,
            loss(reduction=reduction),
            linear_bias=b,
            softcap=5.0,
            z_loss=0.1,
            options=labo.LinearLossOptions(batch_chunk_size=5),
        ).sum()

    results = []
    for given in (weight, weight.dequantize()):
        leaves = [t.clone().requires_grad_() for t in (x, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            value = step(*leaves, given)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    tolerance = 2e-2 if mode == "autocast" else 1e-5
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_the_weight_is_never_whole(problem):
    x, weight, _, target = problem
    x.requires_grad_()
    with LargestTensor() as seen:
        labo.linear_loss(
            x, weight, target, labo.LABOLoss(), options=labo.LinearLossOptions(batch_chunk_size=2)
        ).backward()
    assert seen.largest < V * D


def test_a_weight_that_is_trained_is_refused(problem):
    x, weight, _, target = problem
    with pytest.raises(ValueError, match=r"linear_weight is quantized \(Eighths\).*freeze it"):
        labo.linear_loss(x, weight.requires_grad_(), target, labo.LABOLoss())


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (lambda w: lambda first, last: w, r"torch.float32 of shape \(21, 8\)"),
        (lambda w: lambda first, last: w[first:last].char(), "torch.int8 of shape"),
        (lambda w: lambda first, last: w[first:last].tolist(), "list"),
    ],
)
def test_blocks_that_are_not_the_rows_are_refused(problem, rows, found):
    x, weight, bias, target = problem
    wrong = labo.QuantizedWeight(rows(weight.dequantize()), (V, D))
    with pytest.raises(ValueError, match=rf"rows\(0, 5\).*of shape \(5, 8\), got {found}"):
        labo.linear_loss(x, wrong, target, labo.LABOLoss(), linear_bias=bias)


@pytest.mark.parametrize(
    ("amx", "limit", "vnni", "vendor", "wanted"),
    [
        (True, None, True, "GenuineIntel", True),
        (True, "AVX512_CORE_BF16", True, "GenuineIntel", False),
        (True, "avx512_core_amx", True, "GenuineIntel", True),
        (False, None, True, "GenuineIntel", False),
        (False, None, True, "AuthenticAMD", True),
        (False, None, False, "AuthenticAMD", False),
    ],
)
def test_which_processors_multiply_bfloat16(monkeypatch, amx, limit, vnni, vendor, wanted):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: vnni)
    monkeypatch.setattr(quantized.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(quantized, "_is_intel", lambda: vendor == "GenuineIntel")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert quantized._multiplies_bfloat16.__wrapped__() is wanted


@pytest.mark.parametrize("has_instructions", [True, False])
def test_products_of_bfloat16_on_processors_with_and_without_instructions(
    monkeypatch, has_instructions
):
    monkeypatch.setattr(quantized, "_multiplies_bfloat16", lambda: has_instructions)
    monkeypatch.setattr(quantized, "_BLOCK_BYTES", 256)  # several blocks
    torch.manual_seed(0)
    leaves = [torch.randn(7, 8), torch.randn(33, 8), torch.randn(33)]
    leaves = [x.bfloat16().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    target = torch.randint(33, (7,))
    value, expected = (
        labo.linear_loss(x, w, target, labo.LABOLoss(), linear_bias=b)
        for x, w, b in (leaves, exact)
    )
    value.backward()
    expected.backward()
    assert value.dtype == torch.float32
    tolerance = 2e-2 if has_instructions else 1e-6  # the logits are rounded, or are not
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=0)
    for ours, theirs in zip(leaves, exact, strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=3e-2, atol=3e-3)
