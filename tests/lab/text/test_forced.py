"""Statistics of reference tokens, and the temperature that is fitted to them."""

from __future__ import annotations

import pytest
import torch

from labo.lab.analysis.calibration import fit_temperature
from labo.lab.text import forced
from labo.lab.text.head import Head


@pytest.fixture
def tokens():
    """States, an output layer and the targets it was made to like a little."""
    torch.manual_seed(0)
    head = Head(torch.randn(300, 16), torch.randn(40, 16) * 0.4)
    logits = head.states @ head.weight.T
    return head, torch.distributions.Categorical(logits=logits * 1.7).sample()


def test_the_losses_are_those_of_the_tempered_distributions(tokens, monkeypatch):
    head, target = tokens
    log_p = (head.states @ head.weight.T).double().log_softmax(-1)
    expected = [
        torch.nn.functional.cross_entropy(beta * log_p, target, reduction="sum")
        for beta in forced.BETAS
    ]
    monkeypatch.setattr(forced, "_LOGITS_AT_ONCE", 40 * 7)  # blocks, the last one smaller
    found = forced.losses_by_beta(head, target)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-4)


def test_the_temperature_is_that_of_an_exact_search(tokens):
    head, target = tokens
    log_p = (head.states @ head.weight.T).double().log_softmax(-1)
    exact = fit_temperature(log_p.numpy(), target.numpy())
    found = forced.best_temperature(forced.losses_by_beta(head, target))
    assert found == pytest.approx(exact, rel=2e-3)
    assert found == pytest.approx(1 / 1.7, rel=0.2)


def test_a_model_that_is_always_right_has_no_temperature(tokens):
    head, _ = tokens
    target = (head.states @ head.weight.T).argmax(-1)
    assert forced.best_temperature(forced.losses_by_beta(head, target)) is None


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
