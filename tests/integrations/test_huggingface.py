"""Hugging Face: the real Trainer and real model classes, tiny and untrained, on the CPU.

The bugs that others shipped here are tests: gradients that grow with accumulation, labels shifted
twice or not at all, a second smoothing that is dropped in silence, ignored rows under
``torch.compile``, evaluation by another loss than the one that is named.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import socket

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments, TrainingArguments

import labo
from labo.integrations import huggingface as hf
from probes import LargestTensor
from scripts import load_example

V = 61
RATE = 0.5
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODERS = ["Llama", "Qwen2", "Qwen3", "Gemma2", "Cohere", "Granite", "Mixtral"]
FAMILIES = ["GPT2", *DECODERS, "T5", "Marian", "Bart"]
each_family = pytest.mark.parametrize("family", FAMILIES)


def build(family: str, tied: bool = True, seed: int = 0, vocabulary: int = V, **settings):
    """A model without dropout, with random weights large enough for its logits to matter."""
    torch.manual_seed(seed)
    shared = {"vocab_size": vocabulary, "tie_word_embeddings": tied, **SPECIAL}
    if family == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=32, **shared)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = transformers.GPT2LMHeadModel(config)
    elif family == "T5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
        config = transformers.T5Config(
            **sizes, dropout_rate=0.0, decoder_start_token_id=0, **shared
        )
        model = transformers.T5ForConditionalGeneration(config)
        if not tied:  # this version of transformers shares the tensor all the same
            model.lm_head.weight = nn.Parameter(torch.randn(V, 32))
    elif family in ("Marian", "Bart"):
        sizes = {
            f"{end}_{name}": size
            for end in ("encoder", "decoder")
            for name, size in (("layers", 1), ("ffn_dim", 48), ("attention_heads", 4))
        }
        config = getattr(transformers, f"{family}Config")(
            d_model=32,
            max_position_embeddings=32,
            dropout=0.0,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
            **sizes,
            **shared,
        )
        name = {"Marian": "MarianMTModel", "Bart": "BartForConditionalGeneration"}[family]
        model = getattr(transformers, name)(config)
        model.final_logits_bias.normal_()
    else:
        config = getattr(transformers, f"{family}Config")(**SIZES, **shared, **settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    if family != "T5":  # which starts out that way
        with torch.no_grad():
            for parameter in trained(model):
                parameter.mul_(3)
    if family == "Gemma2":
        model.config.final_logit_softcapping = 0.5
    return model


def is_seq2seq(model) -> bool:
    return model.config.is_encoder_decoder


def examples(count: int, seq2seq: bool = False, seed: int = 1) -> list[dict]:
    """Sequences of 2 to 9 tokens, some without a target; as a data set."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: tuple = ()):
        return torch.randint(low, high, size, generator=generator)

    rows = []
    for index in range(count):
        ids = draw(3, V, (int(draw(4, 10)),)).tolist()
        labels = draw(3, V, (int(draw(2, 8)),)).tolist() if seq2seq else list(ids)
        hidden = index % 3
        labels[:hidden] = [-100] * min(hidden, len(labels))
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Padding and nothing else."""

    def padded(key: str, value: int) -> torch.Tensor:
        rows_of = [torch.tensor(row[key]) for row in rows]
        return nn.utils.rnn.pad_sequence(rows_of, batch_first=True, padding_value=value)

    mask = [{"ones": [1] * len(row["input_ids"])} for row in rows]
    ones = [torch.tensor(row["ones"]) for row in mask]
    return {
        "input_ids": padded("input_ids", 0),
        "attention_mask": nn.utils.rnn.pad_sequence(ones, batch_first=True),
        "labels": padded("labels", -100),
    }


def targets_and_logits(model, batch):
    """By hand, row by row: what is predicted where."""
    if is_seq2seq(model):
        logits, labels = model(**batch).logits, batch["labels"]
    else:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits, labels = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    kept = labels != -100
    return logits[kept], labels[kept]


def by_hand(model, batch, loss):
    return loss(*targets_and_logits(model, batch))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def gradients(model, value):
    return torch.autograd.grad(value, trained(model), allow_unused=True)


def stepped(model, slopes):
    """The parameters after a step of SGD with the learning rate of ``arguments``."""
    return [p - RATE * g for p, g in zip(trained(model), slopes, strict=True)]


def assert_same(ours, theirs, **tolerance):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


# ------------------------------------------------------------------ the fused head


@each_family
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fused_model_equals_the_model_and_the_loss_apart(family, tied):
    plain = build(family, tied).train()
    batch = collate(examples(3, is_seq2seq(plain)))
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    expected = by_hand(plain, batch, labo.LABOLoss())
    output = fused(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-5)
    assert_same(gradients(fused, output.loss), gradients(plain, expected), rtol=1e-3, atol=1e-5)
    head = plain.get_output_embeddings().weight
    assert (head is plain.get_input_embeddings().weight) == tied


@each_family
def test_evaluation_is_the_models_own_with_its_logits(family):
    plain = build(family).eval()
    batch = collate(examples(3, is_seq2seq(plain)))
    expected = plain(**batch)
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    output = fused(**batch)
    torch.testing.assert_close(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits)
    torch.testing.assert_close(output[0], expected.loss)
    as_tuple = fused(**batch, return_dict=False)
    assert torch.equal(as_tuple[1], expected.logits)


def test_the_cap_of_gemma_matters_here():
    plain = build("Gemma2")
    batch = collate(examples(3))
    capped = by_hand(plain, batch, labo.CrossEntropyLoss())
    plain.config.final_logit_softcapping = None
    assert abs(by_hand(plain, batch, labo.CrossEntropyLoss()) - capped) > 0.01


def test_a_forgotten_cap_would_be_noticed(monkeypatch):
    """With the cap of 30 that Gemma has, and untrained logits that are nowhere near it."""
    model = build("Gemma2")
    model.config.final_logit_softcapping = 30.0
    output_layer = hf._output_layer
    monkeypatch.setattr(
        hf, "_output_layer", lambda *given: dataclasses.replace(output_layer(*given), softcap=None)
    )
    with pytest.raises(ValueError, match="does not know what Gemma2ForCausalLM makes of its"):
        hf.fuse_head(model, labo.LABOLoss())


@pytest.mark.parametrize("family", ["GPT2", "Marian"])
def test_generation_and_undoing(family):
    model = build(family).eval()
    ids = collate(examples(2, True))["input_ids"][:, :3]
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    before, kind, kind_of_loss = model.generate(ids, **settings), type(model), model.loss_type
    names = set(vars(model))
    hf.fuse_head(model, labo.LABOLoss())
    assert isinstance(model, kind)
    assert torch.equal(model.generate(ids, **settings), before)
    hf.unfuse_head(model)
    assert type(model) is kind
    assert model.loss_type == kind_of_loss
    assert set(vars(model)) == names
    assert not model.get_output_embeddings()._forward_pre_hooks
    with pytest.raises(ValueError, match="not fused"):
        hf.unfuse_head(model)


def test_fused_training_stores_no_logits():
    """Also none in the model's own part, such as a bias added to every row."""
    for family in ("Llama", "Gemma2", "Marian"):
        model = build(family, tied=False, vocabulary=500)
        batch = collate(examples(40, is_seq2seq(model)))
        hf.fuse_head(model, labo.LABOLoss(), options=labo.LinearLossOptions(batch_chunk_size=16))
        with LargestTensor() as seen:
            model(**batch).loss.backward()
        assert seen.largest < batch["labels"].numel() * 500 / 4, family


def test_num_items_and_labels_that_are_shifted_already():
    model = hf.fuse_head(build("Llama"), labo.LABOLoss())
    batch = collate(examples(3))
    mean = model(**batch).loss
    count = int((batch["labels"][:, 1:] != -100).sum())
    torch.testing.assert_close(model(**batch, num_items_in_batch=7).loss, mean * count / 7)
    items = torch.tensor(7)
    torch.testing.assert_close(model(**batch, num_items_in_batch=items).loss, mean * count / 7)
    shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    assert torch.equal(model(**batch, shift_labels=shifted).loss, mean)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    nothing = model(**batch, num_items_in_batch=7).loss
    assert nothing == 0
    assert all(g is None or not g.any() for g in gradients(model, nothing))


def test_positional_inputs_and_leading_tuple():
    model = hf.fuse_head(build("GPT2"), labo.LABOLoss())
    batch = collate(examples(2))
    loss = model(batch["input_ids"], labels=batch["labels"], return_dict=False)[0]
    assert torch.equal(loss, model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)


def test_warmup_inside_a_fused_model():
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    plain = build("Llama")
    fused, batch = hf.fuse_head(copy.deepcopy(plain), loss), collate(examples(3))
    torch.testing.assert_close(fused(**batch).loss, by_hand(plain, batch, loss.before))
    loss.step()
    torch.testing.assert_close(fused(**batch).loss, by_hand(plain, batch, loss.after))
    assert not any("loss" in name for name in fused.state_dict())


def test_a_generic_loss_goes_through_too():
    plain, batch = build("Llama"), collate(examples(3))
    fused = hf.fuse_head(copy.deepcopy(plain), labo.ConfidencePenaltyLoss(beta=0.1))
    expected = by_hand(plain, batch, labo.ConfidencePenaltyLoss(beta=0.1))
    torch.testing.assert_close(fused(**batch).loss, expected)


def test_half_precision():
    plain = build("Llama").bfloat16()
    batch = collate(examples(3))
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    torch.testing.assert_close(
        fused(**batch).loss, by_hand(plain, batch, labo.LABOLoss()), rtol=1e-2, atol=1e-2
    )


def test_gradient_checkpointing_changes_nothing():
    plain = build("Llama").train()
    batch = collate(examples(3))
    expected = gradients(plain, by_hand(plain, batch, labo.LABOLoss()))
    fused = hf.fuse_head(plain, labo.LABOLoss())
    fused.gradient_checkpointing_enable()
    assert_same(gradients(fused, fused(**batch).loss), expected)


def test_compiled_with_ignored_rows_equals_eager():
    model, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(3))
    expected = model(**batch, num_items_in_batch=20).loss
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    value = compiled(**batch, num_items_in_batch=20).loss
    torch.testing.assert_close(value, expected)
    assert_same(gradients(model, value), gradients(model, expected))


def test_copies_are_models_of_their_own():
    model = hf.fuse_head(build("Llama"), labo.LABOLoss())
    batch = collate(examples(3))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert torch.equal(twin(**batch).loss, model(**batch).loss)
        with torch.no_grad():
            twin.get_output_embeddings().weight.zero_()
        assert not torch.equal(twin(**batch).loss, model(**batch).loss)


def test_saved_as_the_class_it_was(tmp_path):
    model = hf.fuse_head(build("Marian"), labo.LABOLoss())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.MarianMTModel
    assert_same(loaded.state_dict().values(), model.state_dict().values(), rtol=0, atol=0)


def test_a_resized_vocabulary_is_followed():
    plain = build("Llama", tied=False)
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    for model in (plain, fused):
        torch.manual_seed(3)
        model.resize_token_embeddings(V + 8, mean_resizing=False)
    batch = collate(examples(3))
    torch.testing.assert_close(fused(**batch).loss, by_hand(plain, batch, labo.LABOLoss()))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss": labo.DistillationLoss()}, "needs a teacher"),
        ({"loss": labo.CSKDLoss()}, "another sample"),
        ({"loss": labo.KRLSLoss(V)}, "parameters of its own"),
        ({"loss": labo.OnlineLabelSmoothingLoss(V)}, "takes a row-wise loss of labo"),
        ({"loss": nn.CrossEntropyLoss()}, "takes a row-wise loss of labo"),
        ({"loss": labo.LABOLoss(reduction="sum")}, 'must have reduction="mean"'),
        ({"loss": labo.LABOLoss(ignore_index=0)}, "counts every label but -100"),
        ({"loss": labo.LABOLoss(dim=1)}, "the classes come last"),
        (
            {"loss": labo.Warmup(labo.FocalLoss(reduction="none"), labo.LABOLoss(), 3)},
            'must have reduction="mean"',
        ),
    ],
)
def test_fuse_head_refuses_a_loss(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        hf.fuse_head(build("Llama"), **change)


def test_fuse_head_refuses_a_model():
    own_way = build("Llama")
    own_way.loss_function = lambda logits, labels, *_, **__: 2 * logits.logsumexp(-1).mean()
    with pytest.raises(ValueError, match="does not know what LlamaForCausalLM makes of its"):
        hf.fuse_head(own_way, labo.LABOLoss())
    config = build("Marian").config
    config.is_decoder, config.is_encoder_decoder = True, False
    unshifted = transformers.MarianForCausalLM(config)
    with pytest.raises(ValueError, match="cannot tell whether MarianForCausalLM"):
        hf.fuse_head(unshifted, labo.LABOLoss())
    with pytest.raises(ValueError, match="no loss of a router"):
        hf.fuse_head(build("Mixtral", output_router_logits=True), labo.LABOLoss())
    with pytest.raises(ValueError, match="with its weights in memory"):
        hf.fuse_head(build("Llama").to("meta"), labo.LABOLoss())
    replaced = build("Llama")
    replaced.forward = replaced.forward
    with pytest.raises(ValueError, match="was replaced"):
        hf.fuse_head(replaced, labo.LABOLoss())
    with pytest.raises(TypeError, match="takes a model of transformers, not Linear"):
        hf.fuse_head(nn.Linear(2, 2), labo.LABOLoss())
    twice = hf.fuse_head(build("Llama"), labo.LABOLoss())
    with pytest.raises(ValueError, match="fused already"):
        hf.fuse_head(twice, labo.LABOLoss())


def test_a_router_asked_for_later_is_refused():
    model = hf.fuse_head(build("Mixtral"), labo.LABOLoss())
    with pytest.raises(ValueError, match="no loss of a router"):
        model(**collate(examples(2)), output_router_logits=True)
    assert model(**collate(examples(2))).loss.requires_grad  # and the layer is as it was


# ------------------------------------------------------------------ PEFT


def adapted(model, **settings):
    torch.manual_seed(2)
    attention = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**attention, **settings))


@pytest.mark.parametrize("first", ["fuse", "adapt"])
@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["adapters", "and the head"])
def test_lora_models_are_fused(first, saved):
    plain = adapted(build("Llama", tied=False), modules_to_save=saved)
    if first == "adapt":
        fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    else:
        base = hf.fuse_head(build("Llama", tied=False), labo.LABOLoss())
        fused = adapted(base, modules_to_save=saved)
    batch = collate(examples(3))
    expected, value = by_hand(plain, batch, labo.LABOLoss()), fused(**batch).loss
    torch.testing.assert_close(value, expected)
    assert_same(gradients(fused, value), gradients(plain, expected))
    learning = [name for name, p in fused.named_parameters() if p.requires_grad]
    assert all("lora" in name or "modules_to_save" in name for name in learning)
    assert not hf._is_fused(hf.unfuse_head(fused))


def test_an_adapted_output_layer_is_refused_not_ignored():
    config = LoraConfig(r=4, target_modules=["lm_head"])
    with pytest.raises(ValueError, match="multiplies by the weight"):
        hf.fuse_head(get_peft_model(build("Llama", tied=False), config), labo.LABOLoss())
    later = get_peft_model(hf.fuse_head(build("Llama", tied=False), labo.LABOLoss()), config)
    with pytest.raises(ValueError, match="multiplies by the weight"):
        later(**collate(examples(2)))


# ------------------------------------------------------------------ the Trainer


def arguments(out, kind=TrainingArguments, **settings):
    usual = {
        "output_dir": str(out),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 64,
        "dataloader_pin_memory": False,
    }
    return kind(**(usual | settings))


WAYS = ["hook", "trainer", "fused"]
each_way = pytest.mark.parametrize("way", WAYS)


def make_trainer(way, model, loss, args, data=None, **settings):
    """A Trainer that gets the loss in one of the three ways."""
    seq2seq = getattr(model.config, "is_encoder_decoder", False)
    settings = {"data_collator": collate, "train_dataset": data or [], **settings}
    if seq2seq and way == "hook":
        settings["data_collator"] = lambda rows: with_decoder_inputs(model, collate(rows))
    name = "Seq2SeqTrainer" if seq2seq else "Trainer"
    if way == "trainer":
        return getattr(hf, f"Regularized{name}")(model=model, args=args, loss=loss, **settings)
    cls = getattr(transformers, name)
    settings["callbacks"] = [hf.RegularizationCallback(loss)]
    if way == "fused":
        return cls(model=hf.fuse_head(model, loss), args=args, **settings)
    function = hf.compute_loss_func(loss, model, args)
    return cls(model=model, args=args, compute_loss_func=function, **settings)


def with_decoder_inputs(model, batch):
    made = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    return {**batch, "decoder_input_ids": made}


def kind_of_arguments(model):
    return Seq2SeqTrainingArguments if is_seq2seq(model) else TrainingArguments


@each_way
@pytest.mark.parametrize("family", ["GPT2", "Llama", "T5", "Marian"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_is_that_of_the_whole_batch(way, family, accumulate, tmp_path):
    """One SGD step on 8 sequences of uneven lengths, in 1 or 4 pieces, against one by hand."""
    model = build(family)
    data = examples(8, is_seq2seq(model))
    expected = copy.deepcopy(model).train()
    slopes = gradients(expected, by_hand(expected, collate(data), labo.LABOLoss()))
    args = arguments(
        tmp_path,
        kind_of_arguments(model),
        max_steps=1,
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
    )
    make_trainer(way, model, labo.LABOLoss(), args, data).train()
    assert_same(trained(model), stepped(expected, slopes), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(next(model.parameters()), next(expected.parameters()))


@each_way
@pytest.mark.parametrize(
    ("family", "generate"), [("GPT2", False), ("Marian", False), ("Marian", True)]
)
def test_evaluation_loss_is_the_plain_nll(way, family, generate, tmp_path):
    model = build(family).eval()
    data = examples(6, is_seq2seq(model))
    with torch.no_grad():
        nll = by_hand(model, collate(data), nn.CrossEntropyLoss()).item()
    extra = {"predict_with_generate": True, "generation_max_length": 6} if generate else {}
    args = arguments(tmp_path, kind_of_arguments(model), **extra)
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=5)
    metrics = make_trainer(way, model, loss, args).evaluate(data)
    assert metrics["eval_loss"] == pytest.approx(nll, rel=1e-5)


@each_way
def test_metrics_see_the_logits(way, tmp_path):
    seen = []
    trainer = make_trainer(
        way,
        build("Llama"),
        labo.LABOLoss(),
        arguments(tmp_path),
        compute_metrics=lambda prediction: seen.append(prediction.predictions.shape) or {},
    )
    trainer.evaluate(examples(3))
    assert [shape[-1] for shape in seen] == [V]


@each_way
def test_two_smoothings_are_refused(way, tmp_path):
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 .* both configured"):
        make_trainer(way, build("Llama"), labo.LABOLoss(), args)


def test_labels_taken_from_a_fused_model_are_missed(tmp_path):
    """Without the callback nobody sees the arguments, but the model sees that something is off."""
    args = arguments(tmp_path, label_smoothing_factor=0.1, max_steps=1)
    model = hf.fuse_head(build("Llama"), labo.LABOLoss())
    settings = {"args": args, "train_dataset": examples(4), "data_collator": collate}
    with pytest.raises(ValueError, match="the Trainer took the labels away"):
        transformers.Trainer(model=model, **settings).train()
    with pytest.raises(ValueError, match="the loss is in the model already"):
        hf.compute_loss_func(labo.LABOLoss(), model, arguments(tmp_path))
    with pytest.raises(ValueError, match="the loss is in the model already"):
        hf.RegularizedTrainer(model=model, args=arguments(tmp_path), loss=labo.LABOLoss())


def test_one_loss_only(tmp_path):
    with pytest.raises(ValueError, match="either loss or compute_loss_func"):
        hf.RegularizedTrainer(
            model=build("Llama"),
            args=arguments(tmp_path),
            loss=labo.LABOLoss(),
            compute_loss_func=print,
        )


def test_a_warmup_without_its_callback_is_refused(tmp_path):
    model, args = build("Llama"), arguments(tmp_path, max_steps=1)
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=examples(4),
        data_collator=collate,
        compute_loss_func=hf.compute_loss_func(loss, model, args),
    )
    with pytest.raises(ValueError, match="nobody tells it about the steps"):
        trainer.train()
    fused = hf.fuse_head(build("Llama"), loss)
    with pytest.warns(UserWarning, match=r"callbacks=\[RegularizationCallback\(loss\)\]"):
        fused(**collate(examples(2)), num_items_in_batch=9)  # as the Trainer does
    fused(**collate(examples(2)))


def test_an_encoder_decoder_without_decoder_inputs_is_refused(tmp_path):
    """BART would make them of the source, in silence."""
    model, args = build("Bart"), arguments(tmp_path, max_steps=1)
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=examples(4, True),
        data_collator=collate,
        compute_loss_func=hf.compute_loss_func(labo.LABOLoss(), model, args),
    )
    with pytest.raises(ValueError, match="gets no decoder inputs"):
        trainer.train()


def test_the_usual_collator_of_translation(tmp_path):
    class Tokenizer:
        """As much of a tokenizer as DataCollatorForSeq2Seq asks for."""

        padding_side = "right"

        def pad(self, rows, **_):
            return collate([{**row, "labels": row.get("labels", [-100])} for row in rows])

    model = build("Marian")
    args = arguments(tmp_path, Seq2SeqTrainingArguments, max_steps=1)
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=examples(4, True),
        data_collator=DataCollatorForSeq2Seq(Tokenizer(), model=model),
        compute_loss_func=hf.compute_loss_func(labo.LABOLoss(), model, args),
    )
    assert trainer.train().training_loss > 0


def test_labels_the_hook_is_not_shown_are_refused(tmp_path):
    model, args = build("Llama"), arguments(tmp_path)
    hf.compute_loss_func(labo.LABOLoss(), model, args)
    batch = collate(examples(2))
    with pytest.raises(ValueError, match="the collator shifts the labels itself"):
        model(input_ids=batch["input_ids"], shift_labels=batch["labels"])


def test_shift_is_known_or_asked_for(tmp_path):
    config = build("Marian").config
    config.is_decoder, config.is_encoder_decoder = True, False
    model, args = transformers.MarianForCausalLM(config), arguments(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="say shift=False or shift=True"):
        hf.compute_loss_func(labo.LABOLoss(), model, args)
    function = hf.compute_loss_func(labo.LABOLoss(), model, args, shift=False)
    batch = collate(examples(2))
    outputs = model(input_ids=batch["input_ids"])
    kept = batch["labels"] != -100
    expected = labo.LABOLoss()(outputs.logits[kept], batch["labels"][kept])
    torch.testing.assert_close(function(outputs, batch["labels"]), expected)
    data = examples(2)
    settings = {"train_dataset": data, "data_collator": collate, "compute_loss_func": function}
    trainer = transformers.Trainer(model=model, args=args, **settings)
    assert trainer._get_num_items_in_batch([collate(data)], "cpu") == kept.sum()
    with pytest.raises(ValueError, match="cannot tell whether Linear"):
        hf.compute_loss_func(labo.LABOLoss(), nn.Linear(2, 2), args)


def test_hook_checks_what_it_is_given(tmp_path):
    function = hf.compute_loss_func(labo.LABOLoss(), build("Llama"), arguments(tmp_path))
    logits = torch.randn(2, 5, V)
    with pytest.raises(ValueError, match='the batches have no "labels"'):
        function({"logits": logits}, None)
    with pytest.raises(ValueError, match=r"labels of shape \(2, 4\) do not fit logits"):
        function({"logits": logits}, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="the labels of a causal model must be tokens"):
        function({"logits": logits}, logits.softmax(-1))
    with pytest.raises(TypeError, match="loss must be a Module"):
        hf.compute_loss_func(print, build("Llama"), arguments(tmp_path))


# ------------------------------------------------------------------ classifiers


def classifier(classes: int = 5):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_labels=classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def sentences(count: int, soft: bool = False) -> list[dict]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, V, (count, 6), generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    if soft:
        labels = torch.rand(count, 5, generator=generator).softmax(-1)
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


@pytest.mark.parametrize("case", ["indices", "probabilities", "class weights", "torch's own"])
def test_a_classifier_under_accumulation(case, tmp_path):
    soft = case == "probabilities"
    weight = torch.linspace(0.5, 2, 5)
    loss = labo.LABOLoss(weight=weight if case == "class weights" else None)
    if case == "torch's own":
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    data, model = sentences(8, soft), classifier()
    expected = copy.deepcopy(model).train()
    ids, labels = (torch.stack([row[key] for row in data]) for key in ("input_ids", "labels"))
    mean = loss(expected(input_ids=ids).logits, labels)
    if case == "class weights":  # the weighted sum over the number of targets
        mean = mean * weight[labels].sum() / 8
    slopes = gradients(expected, mean)
    args = arguments(
        tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    collator = transformers.default_data_collator
    make_trainer("hook", model, loss, args, data, data_collator=collator).train()
    assert_same(trained(model), stepped(expected, slopes), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ resuming


@each_way
def test_resuming_goes_on_with_the_warmup(way, tmp_path):
    """20 steps are 10 and 10, with a switch of the loss at step 14."""
    data = examples(24)

    def run(resume=None, **settings):
        model = build("Llama")
        loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=14)
        args = arguments(
            tmp_path,
            max_steps=20,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            train_sampling_strategy="random",
            **settings,
        )
        make_trainer(way, model, loss, args, data).train(resume_from_checkpoint=resume)
        return model, loss

    straight, loss = run(save_strategy="steps", save_steps=10)
    assert loss.steps_done == 20
    resumed, again = run(str(tmp_path / "checkpoint-10"))
    assert again.steps_done == 20
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    args = arguments(tmp_path, max_steps=20, gradient_accumulation_steps=2)
    other = make_trainer(way, build("Llama"), labo.LABOLoss(), args, data)
    with pytest.raises(ValueError, match="holds the state of another loss"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_resuming_restores_a_table(tmp_path):
    """Online label smoothing, from inside an epoch and from its last step (epochs have 6)."""
    data, collator = sentences(24), transformers.default_data_collator

    def run(resume=None):
        model, loss = classifier(), labo.OnlineLabelSmoothingLoss(5)
        args = arguments(tmp_path, num_train_epochs=3, save_strategy="steps", save_steps=3)
        trainer = make_trainer("hook", model, loss, args, data, data_collator=collator)
        trainer.train(resume_from_checkpoint=resume)
        return [*model.state_dict().values(), *loss.state_dict().values()]

    straight = run()
    for step in (3, 6, 9, 12):
        for one, other in zip(straight, run(str(tmp_path / f"checkpoint-{step}")), strict=True):
            assert torch.equal(one, other), step


def test_a_checkpoint_without_the_state_of_the_loss_is_refused(tmp_path):
    data = examples(8)
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    make_trainer("hook", build("Llama"), labo.LABOLoss(), args, data).train()
    state = tmp_path / "checkpoint-1" / "trainer_state.json"
    state.write_text(state.read_text().replace('"labo"', '"other"'))
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    trainer = make_trainer("hook", build("Llama"), loss, args, data)
    with pytest.raises(ValueError, match="checkpoint of step 1 holds no state of a loss"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    # a loss without a state has nothing to miss
    stateless = make_trainer("hook", build("Llama"), labo.LABOLoss(), args, data)
    stateless.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# ------------------------------------------------------------------ teachers


@pytest.mark.parametrize("family", ["Llama", "Marian"])
def test_a_teacher_under_accumulation(family, tmp_path):
    model, teacher = build(family), build(family, seed=7)
    data = examples(8, is_seq2seq(model))
    expected = copy.deepcopy(model).train()
    teacher_logits, _ = targets_and_logits(teacher, collate(data))
    logits, target = targets_and_logits(expected, collate(data))
    slopes = gradients(expected, labo.DistillationLoss()(logits, target, teacher_logits.detach()))
    args = arguments(
        tmp_path,
        kind_of_arguments(model),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    before = copy.deepcopy(teacher.state_dict())
    cls = hf.RegularizedSeq2SeqTrainer if is_seq2seq(model) else hf.RegularizedTrainer
    trainer = cls(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=collate,
        loss=labo.DistillationLoss(),
        teacher=teacher.train(),
    )
    trainer.train()
    assert_same(trained(model), stepped(expected, slopes), rtol=1e-4, atol=1e-5)
    assert not teacher.training
    assert_same(teacher.state_dict().values(), before.values(), rtol=0, atol=0)
    with torch.no_grad():
        nll = by_hand(model.eval(), collate(data), nn.CrossEntropyLoss()).item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(nll, rel=1e-5)


def test_a_warmup_to_a_teacher(tmp_path):
    """Label smoothing first, which listens to no teacher."""
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.DistillationLoss(), steps=2)
    trainer = hf.RegularizedTrainer(
        model=build("Llama"),
        args=arguments(tmp_path, max_steps=3),
        train_dataset=examples(12),
        data_collator=collate,
        loss=loss,
        teacher=build("Llama", seed=7),
    )
    trainer.train()
    assert loss.steps_done == 3
    with pytest.raises(ValueError, match="nobody tells it about the steps"):  # any longer
        trainer.compute_loss(trainer.model, collate(examples(2)))


def test_teachers_refused(tmp_path):
    shared = {"args": arguments(tmp_path, max_steps=1), "data_collator": collate}
    with pytest.raises(ValueError, match="DistillationLoss needs a teacher"):
        hf.RegularizedTrainer(model=build("Llama"), loss=labo.DistillationLoss(), **shared)
    other = {"model": build("Llama"), "teacher": build("Llama")}
    with pytest.raises(ValueError, match="LABOLoss does not listen to one"):
        hf.RegularizedTrainer(**other, loss=labo.LABOLoss(), **shared)
    other["teacher"].resize_token_embeddings(V + 3, mean_resizing=False)
    trainer = hf.RegularizedTrainer(
        **other, loss=labo.DistillationLoss(), train_dataset=examples(4), **shared
    )
    with pytest.raises(ValueError, match="the teacher knows 64 classes, the model 61"):
        trainer.train()


# ------------------------------------------------------------------ PEFT and processes


@each_way
def test_lora_trains_its_adapters_only(way, tmp_path):
    model = adapted(build("Llama"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = arguments(tmp_path, max_steps=2)
    make_trainer(way, model, labo.LABOLoss(), args, examples(8)).train()
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed
    assert changed == {name for name in before if "lora" in name}


def three_steps(way: str, family: str, out, batch_size: int):
    model = build(family)
    args = arguments(
        out,
        kind_of_arguments(model),
        max_steps=3,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
    )
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    make_trainer(way, model, loss, args, examples(24, is_seq2seq(model))).train()
    return model


CASES = [("hook", "GPT2"), ("trainer", "Marian"), ("fused", "Llama"), ("fused", "T5")]


def as_one_of_two(rank: int, port: int, out: str) -> None:
    """One of two processes: three steps of each case."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    torch.set_num_threads(1)
    for index, (way, family) in enumerate(CASES):
        model = three_steps(way, family, out, batch_size=2)
        torch.save(model.state_dict(), f"{out}/{index}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    """Three accumulated steps on uneven counts of targets, by two processes and by one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(as_one_of_two, (port, str(tmp_path)), nprocs=2)
    for index, (way, family) in enumerate(CASES):
        one = three_steps(way, family, tmp_path, batch_size=4).state_dict()
        for rank in range(2):
            two = torch.load(tmp_path / f"{index}-{rank}.pt")
            assert_same(two.values(), one.values(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ examples


@pytest.mark.parametrize(
    ("name", "tiny", "lines"),
    [("causal_lm", ["--steps", "4", "--size", "16"], 4), ("seq2seq_trainer", ["--steps", "3"], 1)],
)
def test_an_example_prints_what_it_shows(name, tiny, lines, capsys):
    """Numbers apart, and without the last line of the second: what it says after three steps."""
    example = load_example(name)
    example.main(tiny)
    shown = example.__doc__.partition(f"$ python examples/{name}.py\n")[2].splitlines()

    def form(text: list[str]) -> list[str]:
        return [" ".join(re.sub(r"\d+(\.\d+)?", "#", line).split()) for line in text[:lines]]

    assert form(capsys.readouterr().out.splitlines()) == form(shown)
