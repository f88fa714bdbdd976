"""Losses of hidden states: chunks of logits give what all logits give."""

from __future__ import annotations

import torch

import labo
from labo.lab.text import head
from labo.lab.text.head import Head, head_loss

TARGET = torch.tensor([0, 4, -100, 2, 2])


def value_and_slopes(compute, shapes, *parameters):
    """Of a function of random tensors, with the gradient of each and of further parameters."""
    torch.manual_seed(0)
    leaves = [torch.randn(*shape).double().requires_grad_() for shape in shapes]
    value = compute(*leaves)
    return value.detach(), *torch.autograd.grad(value, [*leaves, *parameters])


def test_r_drop_by_chunks_is_that_of_all_logits(monkeypatch):
    """Value and the gradients of both passes and of the output layer, with a chunk of two rows."""
    monkeypatch.setattr(head, "_CHUNK_BYTES", 2 * 2 * 5 * 8)
    loss = labo.RDropLoss(label="labo", reduction="sum")

    def by_chunks(*leaves):
        first, second = Head(*leaves, softcap=2.0).chunk(2)
        return head_loss(loss, first, TARGET, second)

    def whole(*leaves):
        first, second = Head(*leaves, softcap=2.0).chunk(2)
        return loss(first.logits(first.states), TARGET, second.logits(second.states))

    shapes = [(10, 3), (5, 3), (5,)]
    torch.testing.assert_close(value_and_slopes(by_chunks, shapes), value_and_slopes(whole, shapes))


def test_connet_by_chunks_is_that_of_all_logits(monkeypatch):
    """Value and the gradients of states, inner states, output layer and confidence network."""
    monkeypatch.setattr(head, "_CHUNK_BYTES", 2 * 5 * 8)
    loss, draws = labo.ConNetLoss(3, reduction="sum").double(), torch.linspace(0, 1, 5)

    def by_chunks(states, weight, inner):
        return head_loss(loss, Head(states, weight, inner=inner), TARGET, None, draws)

    def whole(states, weight, inner):
        return loss(states @ weight.T, TARGET, inner, draws)

    given = [(5, 3), (5, 3), (5, 3)], *loss.parameters()
    torch.testing.assert_close(value_and_slopes(by_chunks, *given), value_and_slopes(whole, *given))
