"""The router losses of mixtures of experts, and the z-loss of Bamba, as the models add them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from transformers import Seq2SeqTrainingArguments

import labo
from labo.integrations import huggingface as hf
from tiny_models import (
    SIZES,
    SPECIAL,
    V,
    arguments,
    assert_same,
    assert_step,
    build,
    by_hand,
    collate,
    examples,
    gradients,
    make_trainer,
    targets_and_logits,
    trained,
)

regularized = partial(make_trainer, "regularized")

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# A coefficient that is large enough to be seen.
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
FULL_ATTENTION = {"layer_types": ["full_attention"], "linear_num_value_heads": 2}
CAUSAL = {
    "Mixtral": {},
    "Qwen2Moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {"moe_intermediate_size": 16},
    "Qwen3Next": {"moe_intermediate_size": 16, **FULL_ATTENTION, "linear_num_key_heads": 2},
    "Olmoe": {},
    "FlexOlmo": {},
    "GraniteMoe": {},
    "GraniteMoeShared": {"shared_intermediate_size": 16},
    "Phimoe": {},
    "JetMoe": {"aux_loss_coef": 0.7, "kv_channels": 8},
    "GptOss": {},
    "MiniMaxM2": {"rotary_dim": 4},
    "Doge": {"is_moe": True, "num_experts": 16},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
}


def mixture(family: str):
    """A tiny mixture of experts that returns its router logits."""
    torch.manual_seed(0)
    if family == "SwitchTransformers":
        config = transformers.SwitchTransformersConfig(
            **{"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4},
            **{"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
            **{"num_experts": 4, "router_aux_loss_coef": 0.7, "router_z_loss_coef": 0.3},
            **{"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0},
        )
        return transformers.SwitchTransformersForConditionalGeneration(config)
    known = {"vocab_size": V, **SIZES, **SPECIAL, **EXPERTS, **ROUTER, **CAUSAL[family]}
    config = getattr(transformers, f"{family}Config")(**known)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()  # without dropout; the loss does not depend on the mode


@pytest.mark.parametrize("family", CAUSAL)
def test_cross_entropy_is_the_models_own_loss(family, tmp_path):
    model, batch = mixture(family), collate(examples(3))
    own = model(**batch)
    expected, plain = own.loss, nn.CrossEntropyLoss()(*targets_and_logits(model, batch))
    assert expected > plain + 0.1
    trainer = make_trainer(
        "regularized", copy.deepcopy(model), labo.CrossEntropyLoss(), arguments(tmp_path)
    )
    value = trainer.compute_loss(trainer.model, batch)
    fused = hf.fuse_head(copy.deepcopy(model), labo.CrossEntropyLoss())
    for ours, of in ((value, trainer.model), (fused(**batch).loss, fused)):
        torch.testing.assert_close(ours, expected)
        expected_gradients = torch.autograd.grad(
            expected, trained(model), allow_unused=True, retain_graph=True
        )
        assert_same(gradients(of, ours), expected_gradients, rtol=1e-3, atol=1e-5)
    with torch.no_grad():  # evaluation is without them
        torch.testing.assert_close(fused(**batch).loss, plain)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), plain)


def test_switch_transformers_has_four_of_them(tmp_path):
    model, batch = mixture("SwitchTransformers"), collate(examples(3, True))
    batch["output_router_logits"] = True
    expected = model(**batch).loss
    args = arguments(tmp_path, Seq2SeqTrainingArguments)
    trainer = regularized(copy.deepcopy(model), labo.CrossEntropyLoss(), args)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    fused = hf.fuse_head(copy.deepcopy(model), labo.CrossEntropyLoss())
    torch.testing.assert_close(fused(**batch).loss, expected)


def test_a_router_loss_that_is_not_returned_is_refused(tmp_path):
    """NLLB-MoE computes it together with its own loss only."""
    config = transformers.NllbMoeConfig(
        **{"vocab_size": V, "d_model": 32, "num_experts": 4, "router_aux_loss_coef": 0.7},
        **{f"{end}_layers": 1 for end in ("encoder", "decoder")},
        **{f"{end}_ffn_dim": 48 for end in ("encoder", "decoder")},
        **{f"{end}_attention_heads": 4 for end in ("encoder", "decoder")},
        **{f"{end}_sparse_step": 1 for end in ("encoder", "decoder")},
        output_router_logits=True,
        **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
    )
    model = transformers.NllbMoeForConditionalGeneration(config)
    batch = collate(examples(2, True))
    batch["decoder_input_ids"] = batch["labels"].clamp(min=0)
    args = arguments(tmp_path, Seq2SeqTrainingArguments)
    trainer = regularized(model, labo.LABOLoss(), args)
    with pytest.raises(ValueError, match="set output_router_logits=False"):
        trainer.compute_loss(model, batch)
    model.config.output_router_logits = False
    assert trainer.compute_loss(model, batch).requires_grad
    returns_tuples = make_trainer(
        "regularized", mixture("Mixtral"), labo.LABOLoss(), arguments(tmp_path)
    )
    logits, labels = torch.randn(2, 5, V), torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="set output_router_logits=False"):
        returns_tuples.compute_loss_func((logits,), labels)


def test_a_router_asked_for_by_the_batch(tmp_path):
    model, batch = build("Mixtral"), collate(examples(2))
    plain = by_hand(model, batch, labo.LABOLoss())
    router = model.router_aux_loss_coef * model(**batch, output_router_logits=True).aux_loss
    fused = hf.fuse_head(copy.deepcopy(model), labo.LABOLoss())
    torch.testing.assert_close(fused(**batch).loss, plain)
    value = fused(**batch, output_router_logits=True).loss
    torch.testing.assert_close(value, plain + router)
    trainer = regularized(model, labo.LABOLoss(), arguments(tmp_path))
    value = trainer.compute_loss(model, {**batch, "output_router_logits": True})
    torch.testing.assert_close(value, plain + router)


@pytest.mark.parametrize("way", ["regularized", "fused"])
def test_accumulation_does_not_multiply_the_router_loss(way, tmp_path):
    """Each micro-batch adds its router loss in proportion to its targets."""
    data = examples(8)

    def by(model, batch, loss):
        parts = [collate(data[i : i + 2]) for i in range(0, 8, 2)]
        counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        routers = [model.router_aux_loss_coef * model(**part).aux_loss for part in parts]
        values = [by_hand(model, part, loss) for part in parts]
        weighted = zip(values, routers, counts, strict=True)
        return sum((value + router) * count for value, router, count in weighted) / sum(counts)

    assert_step(way, mixture("Mixtral"), labo.LABOLoss(), data, tmp_path, accumulate=4, by=by)


def test_class_weights_do_not_weigh_the_router_loss(tmp_path):
    model, batch = mixture("Mixtral"), collate(examples(3))
    weight = torch.linspace(0.5, 2, V)
    router = model.router_aux_loss_coef * model(**batch).aux_loss
    logits, target = targets_and_logits(model, batch)
    labels = labo.LABOLoss(weight=weight, reduction="sum")(logits, target)
    expected = labels / len(target) + router
    trainer = regularized(model, labo.LABOLoss(weight=weight), arguments(tmp_path))
    items = trainer._get_num_items_in_batch([batch], "cpu")
    value = trainer.compute_loss(model, batch, num_items_in_batch=items)
    torch.testing.assert_close(value, expected)


def test_the_z_loss_of_bamba(tmp_path):
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1}
    config = transformers.BambaConfig(
        **{"vocab_size": V, **SIZES, **SPECIAL, **sizes, "z_loss_coefficient": 0.01},
        attn_layer_indices=[0],
    )
    model, batch = transformers.BambaForCausalLM(config).eval(), collate(examples(2))
    trainer = regularized(model, labo.CrossEntropyLoss(), arguments(tmp_path))
    torch.testing.assert_close(trainer.compute_loss(model, batch), model(**batch).loss)
    with pytest.raises(ValueError, match="the loss of BambaForCausalLM is not the cross entropy"):
        hf.fuse_head(copy.deepcopy(model), labo.CrossEntropyLoss())
