"""The snippet for torchtitan, against a stub with the signatures of its 0.3.0."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import labo
from gloo import World
from scripts import execute


class BaseLoss:
    """As torchtitan has it: leaf losses set ``fn``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def __call__(self, pred, labels, global_valid_tokens=None):
        return self.fn(pred, labels) / global_valid_tokens, {}


def titan_case(world: World) -> None:
    """Each process has plain logits of its part of the classes, and the labels of all classes."""
    mesh = SimpleNamespace(get_group={"tp": world.group}.get)
    names = {"current_spmd_mesh": lambda: mesh, "spmd_mesh_size": {"tp": world.size}.get}
    with pytest.MonkeyPatch.context() as patch:
        kind = execute(
            patch,
            "torchtitan",
            torchtitan__components__loss={"BaseLoss": BaseLoss},
            torchtitan__distributed__spmd_types=names,
        )["LABO"]
    loss = kind(kind.Config(tau=2.0))
    logits, labels = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    labels[0, 2] = -100
    whole = logits.clone().requires_grad_()
    expected = labo.LABOLoss(tau=2.0)(whole, labels)
    expected.backward()
    mine = world.share(logits, -1).clone().requires_grad_()
    value, _ = loss(mine, labels, 11)
    value.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(mine.grad, world.share(whole.grad, -1))
    with torch.no_grad():
        plain = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(loss(mine, labels, 11)[0], plain)


def test_torchtitan(processes):
    processes.run(2, titan_case)
