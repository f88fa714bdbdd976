"""The snippets of docs/other_libraries.md, against stubs with the signatures of the frameworks.

The signatures were read in the sources of litgpt 0.5.13 (litgpt/utils.py), nanochat
(nanochat/gpt.py) and axolotl (integrations/base.py).
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import labo
from labo.integrations.huggingface import RegularizationCallback
from labo.integrations.huggingface.head import is_fused
from scripts import execute
from tiny_models import V, build, by_hand, collate, examples


@pytest.fixture
def run(monkeypatch):
    return partial(execute, monkeypatch)


def test_litgpt(run):
    def chunked_cross_entropy(logits, targets, chunk_size=128, ignore_index=-100):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    stub = {"chunked_cross_entropy": chunked_cross_entropy}
    scope = run("litgpt", litgpt__pretrain=stub)
    loss = scope["script"].chunked_cross_entropy
    logits, targets = torch.randn(2, 6, V), torch.randint(V, (2, 6))
    targets[0, 0] = -100
    expected = labo.LABOLoss(tau=1.25)(logits, targets)
    torch.testing.assert_close(loss(logits, targets), expected)
    torch.testing.assert_close(loss(list(logits.split(3, 1)), targets), expected)
    with torch.no_grad():
        torch.testing.assert_close(
            loss(logits, targets, chunk_size=0), chunked_cross_entropy(logits, targets)
        )


def test_nanochat(run):
    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(vocab_size=V)
            self.wte = nn.Embedding(V, 8)
            self.lm_head = nn.Linear(8, V + 3, bias=False)

        def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
            logits = self.lm_head(self.wte(idx))[..., : self.config.vocab_size]
            logits = 15 * torch.tanh(logits / 15)
            if targets is None:
                return logits
            flat = logits.view(-1, logits.size(-1))
            return nn.functional.cross_entropy(
                flat, targets.view(-1), ignore_index=-1, reduction=loss_reduction
            )

    torch.manual_seed(0)
    model, plain = GPT(), GPT.forward
    idx, targets = torch.randint(V, (2, 5)), torch.randint(V, (2, 5))
    targets[1, 2] = -1
    run("nanochat", nanochat__gpt={"GPT": GPT})
    logits = model(idx)
    assert torch.equal(logits, plain(model, idx))
    expected = labo.LABOLoss(ignore_index=-1)(logits, targets)
    torch.testing.assert_close(model(idx, targets), expected)
    with torch.no_grad():
        for reduction in ("mean", "none"):
            ours = model(idx, targets, loss_reduction=reduction)
            torch.testing.assert_close(ours, plain(model, idx, targets, None, reduction))


def test_axolotl(run):
    class BasePlugin:
        def post_model_build(self, cfg, model): ...

        def add_callbacks_post_trainer(self, cfg, trainer):
            return []

    plugin = run("axolotl", axolotl__integrations__base={"BasePlugin": BasePlugin})["LABOPlugin"]()
    model, batch = build("Llama"), collate(examples(3))
    expected = by_hand(model, batch, labo.LABOLoss(tau=1.25))
    plugin.post_model_build({}, model)
    assert is_fused(model)
    torch.testing.assert_close(model(**batch).loss, expected)
    (callback,) = plugin.add_callbacks_post_trainer({}, None)
    assert isinstance(callback, RegularizationCallback)
