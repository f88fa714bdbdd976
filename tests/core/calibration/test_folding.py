"""A temperature folded into a model: calibrated probabilities exactly, or a refusal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

import labo
from labo.calibration import fold_temperature
from tiny_models import V, build

T = 0.7
HIDDEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)) * 3


def assert_folded(logits, folded):
    torch.testing.assert_close(folded.softmax(-1), (logits / T).softmax(-1))
    assert not torch.allclose(folded, logits)


# ------------------------------------------------------------------ plain layers


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_at_the_end_of_a_sequence(bias):
    layer = nn.Linear(8, 6, bias=bias)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(layer))
    before = model(HIDDEN)
    assert fold_temperature(model, T) is model
    assert_folded(before, model(HIDDEN))
    assert layer.weight.requires_grad


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_an_output_layer_with_its_loss(softcap):
    head = labo.LinearLoss(8, 6, labo.CrossEntropyLoss(), bias=True, softcap=softcap)
    before = head.logits(HIDDEN)
    target = torch.tensor([0, 1, 2, 3, 4])
    fold_temperature(head, T)
    assert_folded(before, head.logits(HIDDEN))
    loss = nn.functional.cross_entropy(before / T, target)
    torch.testing.assert_close(head(HIDDEN, target), loss)


def test_a_fitted_temperature_folded_in_leaves_nothing_to_fit():
    torch.manual_seed(0)
    layer, hidden = nn.Linear(8, 6), torch.randn(500, 8)
    target = torch.distributions.Categorical(logits=layer(hidden) * 1.6).sample()
    fit = labo.calibration.fit_temperature(layer(hidden), target)
    fold_temperature(layer, fit.temperature)
    again = labo.calibration.fit_temperature(layer(hidden), target)
    assert again.temperature == pytest.approx(1, abs=1e-5)
    assert again.nll_before == pytest.approx(fit.nll_after, rel=1e-6)


def test_half_precision_is_rounded_once():
    layer = nn.Linear(8, 6, dtype=torch.bfloat16)
    weight = layer.weight.detach().clone()
    fold_temperature(layer, T)
    assert torch.equal(layer.weight, (weight.float() / T).bfloat16())


# ------------------------------------------------------------------ language models

BERT = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
APART = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": V}


def masked_bert():
    return BertForMaskedLM(BertConfig(**BERT))


def hyper_clova():
    """A family that multiplies by what Granite divides by."""
    model = build("Granite", logits_scaling=3.0)
    forward = type(model).forward

    class Multiplies(GraniteForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = forward(self, *args, **kwargs)
            outputs.logits = outputs.logits * self.config.logits_scaling**2
            return outputs

    model.__class__ = Multiplies
    return model


FOLDED = {
    "llama": lambda: build("Llama", tied=False),
    "cohere, tied": lambda: build("Cohere", logit_scale=0.25),
    "cohere, not tied": lambda: build("Cohere", tied=False, logit_scale=0.25),
    "granite, tied": lambda: build("Granite", logits_scaling=3.0),
    "a multiplier of the same name": hyper_clova,
    "gemma, not tied": lambda: build("Gemma2", tied=False),
    "marian, not tied": lambda: build("Marian", tied=False, **APART),
}


def built(make):
    torch.manual_seed(0)
    return make().eval()


def logits_of(model):
    tokens = torch.tensor([[3, 7, 9, 11, 4], [5, 6, 7, 8, 2]])
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", FOLDED)
def test_a_language_model(name, tmp_path):
    model = built(FOLDED[name])
    before = logits_of(model)
    modes = [module.training for module in model.train().modules()]
    assert fold_temperature(model, T) is model
    assert [module.training for module in model.modules()] == modes
    assert_folded(before, logits_of(model.eval()))
    if name != "a multiplier of the same name":  # a class that only this module has
        model.save_pretrained(tmp_path)
        assert_folded(before, logits_of(type(model).from_pretrained(tmp_path).eval()))


def refused(model, error, sentence, **options):
    """The model is refused, and as it was."""
    kept, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict())
    with pytest.raises(error, match=sentence):
        fold_temperature(model, T, **options)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("make", "embeddings"),
    [
        (lambda: build("GPT2"), "transformer.wte"),
        (lambda: build("Llama"), "model.embed_tokens"),
        (lambda: build("Gemma2"), "model.embed_tokens"),
        (lambda: build("Marian"), "model.shared"),
        (masked_bert, "bert.embeddings.word_embeddings"),
    ],
    ids=["gpt2", "llama", "gemma", "marian", "bert"],
)
def test_tied_embeddings_without_a_scale_are_refused(make, embeddings):
    refused(built(make), ValueError, f"also that of {embeddings} .tied embeddings.*no logit scale")


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Gemma2", "Marian", "T5", "Bert"])
def test_tied_embeddings_that_are_untied(family, tmp_path):
    model = built(masked_bert if family == "Bert" else lambda: build(family))
    before, inputs = logits_of(model), model.get_input_embeddings().weight.clone()
    fold_temperature(model, T, untie=True).save_pretrained(tmp_path)
    assert_folded(before, logits_of(model))
    assert torch.equal(model.get_input_embeddings().weight, inputs)
    assert_folded(before, logits_of(type(model).from_pretrained(tmp_path).eval()))


class Squared(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits**2
        return outputs


def squared(tied):
    model = build("Llama", tied=tied)
    model.__class__ = Squared
    return model


def test_untying_is_undone_for_a_model_that_is_refused():
    model = built(lambda: squared(tied=True))
    tied = copy.deepcopy(model.all_tied_weights_keys)
    refused(model, ValueError, "do not come out divided", untie=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.all_tied_weights_keys == tied


def test_a_scale_is_preferred_to_untying():
    model = built(FOLDED["cohere, tied"])
    fold_temperature(model, T, untie=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_unknown_use_of_the_logits_is_refused():
    refused(squared(tied=False), ValueError, "the logits of Squared do not come out divided")
    model = build("Cohere")
    model.logit_scale = 5.0  # no longer what the config says: saving would lose it
    refused(model, ValueError, "do not come out divided")


# ------------------------------------------------------------------ refusals


def test_a_classifier_must_name_its_layer():
    model = BertForSequenceClassification(BertConfig(**BERT))
    refused(model, TypeError, r"names no output layer.*model\.classifier")
    tokens = torch.tensor([[3, 7, 9]])
    model.eval()
    before = model(tokens).logits
    fold_temperature(model.classifier, T)
    assert_folded(before, model(tokens).logits)


@pytest.mark.parametrize("model", [nn.Conv2d(1, 2, 3), nn.Sequential(), nn.Sequential(nn.ReLU())])
def test_no_output_layer(model):
    with pytest.raises(TypeError, match=r"cannot tell which layer of \w+ makes the logits"):
        fold_temperature(model, T)


class _Sharded(torch.Tensor):
    """Stands for DTensor and for the weights of quantization libraries."""


def layer_with(weight=None, **attributes):
    layer = nn.Linear(8, 6)
    if weight is not None:
        layer.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def with_old_weight_norm():
    layer = nn.Linear(8, 6)
    weight = layer._parameters.pop("weight")
    layer.weight_v, layer.weight = nn.Parameter(weight), weight * 2.0
    return layer


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (nn.Linear(8, 6, device="meta"), "not in memory"),
        (parametrizations.weight_norm(nn.Linear(8, 6)), "ParametrizedLinear, not an nn.Linear"),
        (with_old_weight_norm(), "computed from other parameters"),
        (layer_with(torch.zeros(6, 8).as_subclass(_Sharded)), "sharded or quantized .*_Sharded"),
        (layer_with(torch.zeros(0)), r"sharded or quantized .*shape \(0,\)"),
        (layer_with(torch.zeros(6, 8, dtype=torch.int8)), "quantized .torch.int8"),
        (nn.modules.linear.NonDynamicallyQuantizableLinear(8, 6), "not an nn.Linear"),
    ],
    ids=["meta", "weight_norm", "computed", "subclass", "flat", "int8", "other type"],
)
def test_layers_that_cannot_be_divided(layer, sentence):
    with pytest.raises(ValueError, match=sentence):
        fold_temperature(layer, T)


def test_an_adapted_output_layer_is_refused():
    peft = pytest.importorskip("peft")
    options = {"task_type": "CAUSAL_LM", "r": 2}
    model = peft.get_peft_model(
        build("Llama", tied=False), peft.LoraConfig(**options, target_modules=["lm_head"])
    )
    with pytest.raises(ValueError, match=r"not an nn\.Linear: an adapter must be merged"):
        fold_temperature(model, T)
    model = peft.get_peft_model(
        built(FOLDED["llama"]), peft.LoraConfig(**options, target_modules=["q_proj"])
    ).eval()
    before = logits_of(model)
    assert_folded(before, logits_of(fold_temperature(model, T)))


def test_tied_weights_of_any_module():
    model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"also that of 0 \(tied embeddings\)"):
        fold_temperature(model, T)
    before, tokens = model[0].weight.clone(), torch.arange(6)
    logits = model(tokens)
    assert_folded(logits, fold_temperature(model, T, untie=True)(tokens))
    assert torch.equal(model[0].weight, before)


def test_a_wrong_temperature():
    with pytest.raises(ValueError, match="temperature must be a finite number above 0"):
        fold_temperature(nn.Linear(8, 6), 0)
