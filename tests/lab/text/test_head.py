"""Losses of hidden states: chunks of logits give what all logits give."""

from __future__ import annotations

import torch

import labo
from labo.lab.text import head
from labo.lab.text.head import Head, head_loss


def test_r_drop_by_chunks_is_that_of_all_logits(monkeypatch):
    """Value and the gradients of both passes and of the output layer, with a chunk of two rows."""
    monkeypatch.setattr(head, "_CHUNK_BYTES", 2 * 2 * 5 * 8)
    target = torch.tensor([0, 4, -100, 2, 2])
    loss = labo.RDropLoss(label="labo", reduction="sum")

    def both(compute):
        torch.manual_seed(0)
        leaves = [torch.randn(*shape).double() for shape in ((10, 3), (5, 3), (5,))]
        states, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        value = compute(*Head(states, weight, bias, softcap=2.0).chunk(2))
        value.backward()
        return value.detach(), states.grad, weight.grad, bias.grad

    found = both(lambda first, second: head_loss(loss, first, target, second))
    whole = both(
        lambda first, second: loss(first.logits(first.states), target, second.logits(second.states))
    )
    torch.testing.assert_close(found, whole)


def test_connet_by_chunks_is_that_of_all_logits(monkeypatch):
    """Value and the gradients of states, inner states, output layer and confidence network."""
    monkeypatch.setattr(head, "_CHUNK_BYTES", 2 * 5 * 8)
    target, draws = torch.tensor([0, 4, -100, 2, 2]), torch.linspace(0, 1, 5)
    loss = labo.ConNetLoss(3, reduction="sum").double()

    def both(compute):
        torch.manual_seed(0)
        leaves = [torch.randn(*shape).double() for shape in ((5, 3), (5, 3), (5, 3))]
        states, weight, inner = (leaf.requires_grad_() for leaf in leaves)
        loss.zero_grad()
        value = compute(Head(states, weight, inner=inner))
        value.backward()
        learned = [parameter.grad.clone() for parameter in loss.parameters()]
        return value.detach(), states.grad, weight.grad, inner.grad, *learned

    found = both(lambda head: head_loss(loss, head, target, None, draws))
    whole = both(lambda head: loss(head.logits(head.states), target, head.inner, draws))
    torch.testing.assert_close(found, whole)
