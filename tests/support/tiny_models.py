"""Tiny untrained models of transformers, batches for them, and the loss computed by hand."""

from __future__ import annotations

import copy
import functools

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from labo.integrations import huggingface as hf

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
            **settings,
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


def bert(cls=transformers.BertForSequenceClassification, **settings):
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in list(SIZES)[:4]}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return cls(transformers.BertConfig(vocab_size=V, **sizes, **without, **settings))


def adapted(model, *modules: str, **settings):
    """With LoRA around some of its layers, which matters from the start."""
    torch.manual_seed(2)
    usual = {"r": 4, "target_modules": [*modules], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**(usual | settings)))


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
    pairs = zip(trained(model), slopes, strict=True)
    return [p if g is None else p - RATE * g for p, g in pairs]


def assert_same(ours, theirs, **tolerance):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


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


def kind_of_arguments(model):
    return Seq2SeqTrainingArguments if is_seq2seq(model) else TrainingArguments


def make_trainer(way, model, loss, args, data=None, teacher=None, **settings):
    """A Trainer that gets the loss in one of the two ways, or with None as way in neither."""
    settings = {"data_collator": collate, "train_dataset": data or [], **settings}
    cls = transformers.Seq2SeqTrainer if is_seq2seq(model) else transformers.Trainer
    if way is None:
        return cls(model=model, args=args, **settings)
    if way == "regularized":
        return hf.regularize(cls(model=model, args=args, **settings), loss, teacher=teacher)
    callbacks, model = [hf.RegularizationCallback(loss)], hf.fuse_head(model, loss, teacher=teacher)
    return cls(model=model, args=args, callbacks=callbacks, **settings)


def assert_step(way, model, loss, data, out, *, accumulate=1, by=by_hand, rows=collate, **settings):
    """One step of a Trainer, in micro-batches, is that of SGD on ``by(model, batch, loss)``.

    Args:
        way: as for ``make_trainer``, or a function of (model, loss, args, data, **settings).
    """
    expected = copy.deepcopy(model).train()
    slopes = gradients(expected, by(expected, rows(data), loss))
    args = arguments(
        out,
        kind_of_arguments(model),
        max_steps=1,
        per_device_train_batch_size=len(data) // accumulate,
        gradient_accumulation_steps=accumulate,
    )
    make = way if callable(way) else functools.partial(make_trainer, way)
    trainer = make(model, loss, args, data, data_collator=rows, **settings)
    trainer.train()
    assert_same(trained(model), stepped(expected, slopes), rtol=1e-4, atol=1e-5)
    pairs = zip(trained(model), trained(expected), strict=True)
    assert not all(torch.allclose(one, other) for one, other in pairs)
    return trainer
