"""A language model from a config of your own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from labo.lab.errors import RequestError
from labo.lab.language_modeling.task import LanguageModelingTask
from labo.lab.recipes import load_recipe
from labo.lab.train import train
from tiny_corpus import refused
from tiny_language import prepare_texts

MODULE = """
from transformers import MistralConfig, T5Config

def mistral(vocab_size, positions, layers=1, **tokens):
    return MistralConfig(vocab_size=vocab_size, max_position_embeddings=positions, hidden_size=16,
                         intermediate_size=20, num_hidden_layers=layers, num_attention_heads=2,
                         num_key_value_heads=1, **tokens)
def small_vocabulary(vocab_size, **rest): return mistral(9, **rest)
def short(positions, **rest): return mistral(positions=4, **rest)
def encoder(vocab_size, **rest): return T5Config(vocab_size=vocab_size, max_position_embeddings=99)
def nothing(**rest): return {}
"""


@pytest.fixture
def settings(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "configs", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    Path("configs.py").write_text(MODULE)
    prepare_texts(tmp_path / "data", vocabulary=290, holdout=4, holdout_test=5)
    found = ["data.name=prepared", f"data.path={tmp_path / 'data'}", "data.block=24"]
    return [*found, "train.batch_tokens=96", "model.preset=configs:mistral", "model.dropout=0"]


def test_a_model_of_your_own_is_trained_and_saved_as_a_plain_folder(settings):
    more = ["train.max_steps=2", "method=ls", "model.arguments={layers: 2}"]
    results = train(load_recipe("lm-manual", [*settings, *more]), "run")
    assert "~configs:mistral@" in results["signature"]
    model = AutoModelForCausalLM.from_pretrained("run/best")
    assert (model.config.model_type, model.config.num_hidden_layers) == ("mistral", 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("model.preset=configs:nothing", "must return a config of transformers, not dict"),
        ("model.preset=configs:small_vocabulary", r"with vocab_size=\d+, not 9"),
        ("model.preset=configs:short", r"max_position_embeddings of at least 24 .* not 4"),
        ("model.preset=configs:encoder", "encoder: no causal language model: Unrecognized"),
        ("model.width=8", "dimensions and dropout of a config of your own are its own"),
    ],
)
def test_what_does_not_fit_is_one_line(settings, more, message):
    with refused(message, RequestError):
        LanguageModelingTask(load_recipe("lm-manual", [*settings, more])).build_model()
