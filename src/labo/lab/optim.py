"""The optimizer of a recipe, and its learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import Optim


def build_optimizer(optim: Optim, model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
    """The optimizer. Parameters of the loss (KR-LS) form a separate group without weight decay.

    Parameters that do not require a gradient are left out.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [] if optim.decay_vectors else [p for p in trained if p.dim() < 2]
    decayed = trained if optim.decay_vectors else [p for p in trained if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    if learned := list(loss.parameters()):
        groups.append({"params": learned, "weight_decay": 0.0})
    if optim.name == "sgd":
        return torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov
        )
    kind = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
    # Fused: one pass over the parameters and their states instead of a dozen. (DTensors have no
    # fused SGD, which takes few passes anyway.)
    return kind(groups, lr=optim.lr, betas=optim.betas, fused=True)


def learning_rate(optim: Optim, step: int, epoch: int, total: int) -> float:
    """The learning rate after so many steps and epochs of a run with ``total`` steps."""
    if step < optim.warmup_steps:
        return optim.warmup_from + (optim.lr - optim.warmup_from) * step / optim.warmup_steps
    if optim.schedule == "step":
        return optim.lr * optim.gamma ** sum(epoch >= milestone for milestone in optim.milestones)
    if optim.schedule == "cosine":
        progress = (step - optim.warmup_steps) / max(total - optim.warmup_steps, 1)
        return optim.lr * 0.5 * (1 + math.cos(math.pi * progress))
    if optim.schedule == "inverse_sqrt":
        return optim.lr * math.sqrt(optim.warmup_steps / step)
    return optim.lr
