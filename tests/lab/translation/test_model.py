"""The translation models: their size, their output layer, and what is saved of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

from labo.lab.translation.model import (
    EOS,
    MODEL_PRESETS,
    PAD,
    TranslationModel,
    fresh_translator,
    marian_config,
)

TINY = {"width": 16, "ffn": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 1}


def dimensions(preset: str) -> dict[str, int]:
    sizes = dict(MODEL_PRESETS[preset])
    layers = sizes.pop("layers")
    return sizes | {"encoder_layers": layers, "decoder_layers": layers}


def tiny(
    embeddings: str = "shared", fixnorm: bool = False, dropout: float = 0.0
) -> TranslationModel:
    torch.manual_seed(0)
    vocabularies = (40, 40) if embeddings == "shared" else (40, 30)
    config = marian_config(vocabularies, **TINY, embeddings=embeddings, dropout=dropout)
    return fresh_translator(config, fixnorm=fixnorm).eval()


SOURCE = torch.tensor([[5, 6, 7, EOS], [8, EOS, PAD, PAD]])
PREFIX = torch.tensor([[EOS, 9, 10], [EOS, 11, PAD]])


@pytest.mark.parametrize(
    ("preset", "vocabularies", "embeddings", "parameters"),
    [
        # recipes.md, sections 1 and 3
        ("iwslt", (8848, 6632), "decoder", 39_469_056),
        ("iwslt", (10152, 10152), "shared", 36_741_120),
        ("base", (32768, 32768), "shared", 60_915_712),
        ("small", (6000, 6000), "shared", 7_065_600),
        ("tiny", (2000, 2000), "shared", 2 * (198_272 + 264_576) + 2000 * 128),
    ],
)
def test_parameter_counts(preset, vocabularies, embeddings, parameters):
    config = marian_config(vocabularies, **dimensions(preset), embeddings=embeddings)
    with torch.device("meta"):
        model = MarianMTModel(config)
    learned = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert learned == parameters


@pytest.mark.parametrize("embeddings", ["shared", "decoder", "separate"])
@pytest.mark.parametrize("fixnorm", [False, True])
def test_what_is_saved_is_a_plain_marian_model(embeddings, fixnorm, tmp_path):
    model = tiny(embeddings, fixnorm)
    weights = model.plain_weights()
    assert not any("embed_positions" in name for name in weights)
    assert ("lm_head.weight" in weights) == (embeddings == "separate")
    plain = model.plain()
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    states, weight, *_ = model(SOURCE, SOURCE != PAD, PREFIX)
    again = loaded(input_ids=SOURCE, attention_mask=SOURCE != PAD, decoder_input_ids=PREFIX)
    torch.testing.assert_close(states @ weight.T, again.logits)


def test_fixnorm_uses_directions_only():
    model = tiny(fixnorm=True)
    before, weight, *_ = model(SOURCE, SOURCE != PAD, PREFIX)
    torch.testing.assert_close(weight.norm(dim=-1), torch.ones(len(weight)))
    with torch.no_grad():
        model.marian.model.shared.weight.mul_(torch.rand(40, 1) + 0.5)
    after, *_ = model(SOURCE, SOURCE != PAD, PREFIX)
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)


def test_fixnorm_learns_through_the_division():
    model = tiny(fixnorm=True).train()
    states, weight, *_ = model(SOURCE, SOURCE != PAD, PREFIX)
    F.cross_entropy(
        (states @ weight.T).flatten(0, 1), torch.tensor([9, 10, 2, 11, 2, 2])
    ).backward()
    embeddings = model.marian.model.shared.weight
    radial = (embeddings.grad * embeddings).sum(-1)
    torch.testing.assert_close(radial, torch.zeros(40), rtol=0, atol=1e-6)
    assert embeddings.grad.abs().sum() > 0


def test_the_start_is_fairseqs():
    torch.manual_seed(0)
    config = marian_config((5000, 5000), **(TINY | {"width": 64, "ffn": 128}))
    model = fresh_translator(config).marian
    embeddings = model.model.shared.weight
    assert embeddings[PAD].eq(0).all()
    assert embeddings.std().item() == pytest.approx(64**-0.5, rel=0.02)
    query = model.model.encoder.layers[0].self_attn.q_proj
    bound = (6 / (64 + 64)) ** 0.5 / 2**0.5
    assert query.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert query.bias.eq(0).all()
