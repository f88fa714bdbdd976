"""LABO with a warm-up in a Seq2SeqTrainer: English numbers to German, from scratch.

    $ python examples/seq2seq_trainer.py
    300 steps, NLL 0.221, 100 of 100 right
    nine hundred twenty one: neun hundert ein und zwanzig

German puts the ones before the tens, so the model must learn to swap them. The evaluation loss is
the plain negative log-likelihood, whatever the training loss is.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import labo
from labo.integrations.huggingface import regularize

ONES = "one=ein two=zwei three=drei four=vier five=fünf six=sechs seven=sieben eight=acht nine=neun"
TENS = "twenty=zwanzig thirty=dreißig forty=vierzig fifty=fünfzig sixty=sechzig seventy=siebzig"
TINY: dict[str, Any] = {"d_model": 64, "max_position_embeddings": 16, "scale_embedding": True}
TINY |= {"init_std": 0.1, "dropout": 0.0, "pad_token_id": 0, "eos_token_id": 1}
TINY |= {"decoder_start_token_id": 1, "forced_eos_token_id": 1}
for end in ("encoder", "decoder"):
    TINY |= {f"{end}_layers": 1, f"{end}_ffn_dim": 128, f"{end}_attention_heads": 4}


def pairs() -> list[tuple[str, str]]:
    """Numbers from 121 to 979 that have hundreds, tens and ones."""
    ones, tens = ([pair.split("=") for pair in both.split()] for both in (ONES, TENS))
    return [
        (f"{h} hundred {t} {o}", f"{hundert} hundert {eins} und {zehn}")
        for h, hundert in ones
        for t, zehn in tens
        for o, eins in ones
    ]


def word_tokenizer(lines: list[str]) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "</s>", "<unk>"]
    words.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=special))
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(arguments).steps
    set_seed(0)
    phrases = random.Random(0).sample(pairs(), k=len(pairs()))
    tokenizer = word_tokenizer([line for pair in phrases for line in pair])
    data: Any = [
        {"input_ids": tokenizer(source).input_ids, "labels": tokenizer(target).input_ids}
        for source, target in phrases
    ]
    model = MarianMTModel(MarianConfig(vocab_size=len(tokenizer), **TINY))
    before, after = labo.LabelSmoothingLoss(alpha=0.1), labo.LABOLoss(tau=1.05)
    loss = labo.Warmup(before, after, steps=steps // 3)
    with tempfile.TemporaryDirectory() as out:
        trainer = Seq2SeqTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(
                out,
                max_steps=steps,
                per_device_train_batch_size=16,
                gradient_accumulation_steps=2,
                learning_rate=3e-3,
                predict_with_generate=True,
                generation_max_length=12,
                dataloader_pin_memory=False,
                disable_tqdm=True,
                report_to="none",
                save_strategy="no",
            ),
            train_dataset=data[100:],
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        )
        regularize(trainer, loss)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        result: Any = trainer.predict(data[:100])
    said = tokenizer.batch_decode(result.predictions, skip_special_tokens=True)
    right = sum(ours == target for ours, (_, target) in zip(said, phrases, strict=False))
    print(f"{loss.steps_done} steps, NLL {result.metrics['test_loss']:.3f}, {right} of 100 right")
    print(f"{phrases[0][0]}: {said[0]}")


if __name__ == "__main__":
    main()
