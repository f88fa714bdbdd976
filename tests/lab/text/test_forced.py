"""Statistics of reference tokens."""

from __future__ import annotations

import pytest
import torch

from labo.lab.text import forced
from labo.lab.text.head import Head


@pytest.fixture
def tokens():
    """States, an output layer and the targets it was made to like a little."""
    torch.manual_seed(0)
    head = Head(torch.randn(300, 16), torch.randn(40, 16) * 0.4)
    logits = head.states @ head.weight.T
    return head, torch.distributions.Categorical(logits=logits * 1.7).sample()


def test_blocks_are_the_logits_of_all_tokens_in_order(tokens, monkeypatch):
    head, target = tokens
    monkeypatch.setattr(forced, "_LOGITS_AT_ONCE", 40 * 7)  # blocks, the last one smaller
    found = list(forced.blocks(head, target))
    assert [len(labels) for _, labels in found] == [7] * 42 + [6]
    torch.testing.assert_close(torch.cat([x for x, _ in found]), head.states @ head.weight.T)
    assert torch.equal(torch.cat([labels for _, labels in found]), target)


def test_tempered_statistics(tokens, monkeypatch):
    head, target = tokens
    monkeypatch.setattr(forced, "_LOGITS_AT_ONCE", 40 * 7)
    found = forced.token_statistics(head, target, temperature=0.5)
    p = (head.states @ head.weight.T / 0.5).softmax(-1)
    torch.testing.assert_close(found["tempered_confidence"], p.amax(-1))
    torch.testing.assert_close(found["tempered_nll"], -p[torch.arange(300), target].log())
    plain = forced.token_statistics(head, target)
    assert set(plain) == {"nll", "entropy", "confidence", "right"}
    assert torch.equal(plain["confidence"], found["confidence"])


def test_rivals(tokens):
    head, target = tokens
    p = (head.states @ head.weight.T).softmax(-1).sort(-1).values
    torch.testing.assert_close(forced.rival_probabilities(head, target), p[:, -2])
