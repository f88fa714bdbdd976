"""Folders of pre-trained translation models as one finds them, but tiny: a family each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from labo.lab.translation.options import choose
from labo.lab.translation.prepare import prepare

GERMAN = ["null", "eins", "zwei", "drei", "vier", "elf", "zehn", "acht"]
ENGLISH = ["zero", "one", "two", "three", "four", "eleven", "ten", "eight"]
FAMILIES = ["marian", "t5", "t5-1.1", "bart", "mbart", "nllb"]
LANGUAGES = {"mbart": ("de_DE", "en_XX"), "nllb": ("deu_Latn", "eng_Latn")}


def pair_of(family: str) -> str:
    return "-".join(LANGUAGES.get(family, ("de", "en")))


def sentences(number: int, seed: int = 0) -> list[tuple[str, str]]:
    """Numbers in German and English, one to four of them."""
    draw = random.Random(seed)
    rows = ([draw.randrange(8) for _ in range(draw.randint(1, 4))] for _ in range(number))
    return [(" ".join(GERMAN[n] for n in row), " ".join(ENGLISH[n] for n in row)) for row in rows]


def write_corpus(folder: Path, family: str, number: int = 120) -> Path:
    """The files ``text.de`` and ``text.en``, named by the languages of the family."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = sorted(set(sentences(number)))
    random.Random(1).shuffle(rows)
    for language, lines in zip(pair_of(family).split("-"), zip(*rows, strict=True), strict=True):
        (folder / f"text.{language}").write_text("\n".join(lines) + "\n")
    return folder / "text"


def _pieces(special: list[str]) -> list[tuple[str, float]]:
    letters = sorted({*"".join([*GERMAN, *ENGLISH]), "▁"})
    words = [(f"▁{word}", -1.0) for word in dict.fromkeys([*GERMAN, *ENGLISH])]
    return [*((name, 0.0) for name in special), *words, *((letter, -9.0) for letter in letters)]


def _word_tokenizer(special: list[str], template: str, **names: str) -> PreTrainedTokenizerFast:
    """Words and letters, with special tokens first."""
    unk = special.index("<unk>")
    tokenizer = Tokenizer(models.Unigram(_pieces(special), unk, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    used = [(name, special.index(name)) for name in special if name in template.split()]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **names)


def tokenizer_of(family: str) -> Any:
    if family == "marian":
        special = ["</s>", "<unk>", "<pad>", ">>en<<"]
        return _word_tokenizer(special, "$A </s>", eos_token="</s>", pad_token="<pad>")
    if family == "bart":
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        return _word_tokenizer(special, "<s> $A </s>", **names)
    if family == "mbart":
        pieces = _pieces(["<s>", "<pad>", "</s>", "<unk>"])
        return transformers.MBartTokenizer(vocab=pieces, src_lang="en_XX", tgt_lang="ro_RO")
    if family == "nllb":
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        words = [f"▁{word}" for word in dict.fromkeys([*GERMAN, *ENGLISH])]
        merges = dict.fromkeys((w[:cut], w[cut]) for w in words for cut in range(1, len(w)))
        pieces = dict.fromkeys([*special, *sorted({*"".join(words)}), *(a + b for a, b in merges)])
        return transformers.NllbTokenizer(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=list(merges),
            additional_special_tokens=["deu_Latn", "eng_Latn"],
        )
    special = ["<pad>", "</s>", "<unk>"]
    return transformers.T5Tokenizer(vocab=_pieces(special), extra_ids=2)


def model_of(family: str, tokenizer: Any, **settings: Any) -> Any:
    """One layer each, no dropout, and logits large enough to matter."""
    torch.manual_seed(0)
    shared = {
        "vocab_size": len(tokenizer) + 3,  # more rows than types, as T5 has
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "d_model": 16,
    } | settings
    if family.startswith("t5"):
        config = transformers.T5Config(
            **shared,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            initializer_factor=1.0 if family == "t5" else 0.3,
            tie_word_embeddings=family == "t5",
        )
        return transformers.T5ForConditionalGeneration(config)
    name, kind = {
        "marian": ("MarianConfig", "MarianMTModel"),
        "bart": ("BartConfig", "BartForConditionalGeneration"),
        "mbart": ("MBartConfig", "MBartForConditionalGeneration"),
        "nllb": ("M2M100Config", "M2M100ForConditionalGeneration"),
    }[family]
    sizes = {
        f"{end}_{size}": number
        for end in ("encoder", "decoder")
        for size, number in (("layers", 1), ("ffn_dim", 24), ("attention_heads", 2))
    }
    sizes |= {"decoder_layers": 2, "max_position_embeddings": 64, "dropout": 0.0}
    sizes |= {"attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    start = shared["pad_token_id"] if family == "marian" else shared["eos_token_id"]
    config = getattr(transformers, name)(**shared, **sizes, decoder_start_token_id=start)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model


def save_pretrained(folder: Path, family: str, **settings: Any) -> Path:
    tokenizer = tokenizer_of(family)
    model_of(family, tokenizer, **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_adapters_agree(task, model, start: Path, out: Path, tolerance: float, **inputs) -> None:
    """Given other adapters, the model, its merged weights and what PEFT loads have one output."""
    unchanged = model.inside(**inputs).logits
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    expected = model.inside(**inputs).logits
    assert not torch.allclose(unchanged, expected, atol=1e-2)
    weights, files = task.model_files(model, model.state_dict())
    (out / "adapter").mkdir()
    for name, content in files.items():
        if name.startswith("adapter/"):
            (out / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    merged, started = (type(model.inside).from_pretrained(start).eval() for _ in range(2))
    assert not merged.load_state_dict(weights, strict=False).unexpected_keys
    merged.tie_weights()
    apart = PeftModel.from_pretrained(started, out / "adapter").eval()
    for plain in (merged, apart):
        found = plain(**inputs).logits
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def prepare_corpus(out: Path, family: str, **options) -> Path:
    """The corpus of a family, prepared."""
    text = str(write_corpus(out.parent / "raw", family))
    settings = {"pair": [pair_of(family)], "train": [text], "holdout": 8, "holdout_test": 8}
    prepare(choose(None, settings | options), out)
    return out
