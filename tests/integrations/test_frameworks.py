"""The snippets of docs/language_models.md, against stubs with the signatures of the frameworks.

The signatures were read in the sources of torchtitan (components/loss.py), litgpt 0.5.13
(litgpt/utils.py), nanochat (nanochat/gpt.py) and axolotl (integrations/base.py).
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import labo
from labo.integrations.huggingface import RegularizationCallback
from labo.integrations.huggingface.head import is_fused
from scripts import ROOT
from tiny_models import V, build, by_hand, collate, examples

LINES = 30


def snippet(library: str) -> str:
    page = (ROOT / "docs/language_models.md").read_text()
    (code,) = re.findall(rf"<!-- needs {library} -->\n```py\n(.*?)```", page, re.DOTALL)
    assert code.count("\n") <= LINES
    return code


@pytest.fixture
def run(monkeypatch):
    """Execute a snippet with the modules it imports replaced by stubs; its names."""

    def execute(library: str, **modules):
        for name, content in modules.items():
            parts = name.split("__")
            for end in range(1, len(parts)):
                package = ModuleType(".".join(parts[:end]))
                package.__path__ = []
                monkeypatch.setitem(sys.modules, package.__name__, package)
            module = ModuleType(".".join(parts))
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
        scope: dict[str, object] = {}
        exec(compile(snippet(library), library, "exec"), scope)
        return scope

    return execute


def test_torchtitan(run):
    class BaseLoss(ABC):
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

        @abstractmethod
        def __init__(self, config, *, compile_config=None): ...

        def _maybe_compile(self, compile_config):
            self.compiled = compile_config is not None

        def __call__(self, pred, labels, global_valid_tokens=None, **kwargs):
            loss = self.fn(pred, labels)
            return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}

    loss_class = run("torchtitan", torchtitan__components__loss={"BaseLoss": BaseLoss})["LABO"]
    loss = loss_class(loss_class.Config(tau=2.0))
    logits, labels = torch.randn(6, V), torch.tensor([3, -100, 1, 0, 5, 9])
    value, metrics = loss(logits, labels, torch.tensor(5))
    torch.testing.assert_close(value, labo.LABOLoss(tau=2.0)(logits, labels))
    assert metrics == {}


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
