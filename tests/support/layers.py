"""A small output layer for the tests of linear_loss, and the metrics of its logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import labo

N, D, V = 13, 6, 11  # rows, width, classes
SMALL = labo.LinearLossOptions(batch_chunk_size=4)


def problem(
    dtype: torch.dtype = torch.float64, rows: int = N, classes: int = V, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which one is ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(classes, D, generator=generator, dtype=torch.float64)
    bias = torch.randn(classes, generator=generator, dtype=torch.float64)
    target = torch.randint(classes, (rows,), generator=generator)
    target[rows // 3] = -100
    return x.to(dtype), weight.to(dtype), bias.to(dtype), target


def gradients(
    function: Callable[..., Tensor], *tensors: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Value and gradients; rows that are not reduced have different upstream gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    value = function(*leaves)
    if value.dim() and upstream is None:
        upstream = torch.linspace(0, 2, value.numel(), dtype=value.dtype).view_as(value)
    return value.detach(), *torch.autograd.grad(value, leaves, upstream)


def measured(logits: Tensor, target: Tensor, loss: nn.Module) -> dict[str, Tensor]:
    """Every metric of every row, from the logits in float64; 0 where a row does not count."""
    log_p = logits.double().log_softmax(-1)
    valid = target != -100
    y = target.clamp(min=0).unsqueeze(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    alpha = getattr(loss, "alpha", 0.0)
    if alpha == "adaptive":
        alpha = 1 - loss.rho * entropy / math.log(logits.shape[-1])
    rows = {
        "targets": torch.ones_like(entropy),
        "nll": -log_p.gather(-1, y).squeeze(-1),
        "entropy": entropy,
        "correct": (logits.gather(-1, y).squeeze(-1) == logits.amax(-1)).double(),
        "alpha": torch.zeros_like(entropy) + alpha,
        "z_squared": logits.double().logsumexp(-1).square(),
    }
    return {name: value.masked_fill(~valid, 0.0) for name, value in rows.items()}
