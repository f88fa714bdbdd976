"""A translation model small enough for tests, and the folder it lies in."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import MarianMTModel, PreTrainedTokenizerFast

from labo.lab.run.files import write_json
from labo.lab.text.batching import padded_rows
from labo.lab.text.subwords import Merges, make_tokenizer
from labo.lab.translation.decoding import generation_config
from labo.lab.translation.model import EOS, NUM_SPECIAL, PAD, fresh_translator, marian_config
from labo.lab.translation.options import Decode

POSITIONS = 40
VOCABULARY = 24


def random_model(
    source: int = VOCABULARY,
    target: int = VOCABULARY,
    *,
    embeddings: str = "shared",
    seed: int = 0,
    ending: float = 1.0,
) -> MarianMTModel:
    """A model with opinions of its own, and a bias to end its sentences."""
    torch.manual_seed(seed)
    config = marian_config(
        (source, target),
        width=16,
        ffn=32,
        heads=2,
        encoder_layers=1,
        decoder_layers=2,
        embeddings=embeddings,
        positions=POSITIONS,
    )
    model = fresh_translator(config).marian
    model.final_logits_bias.normal_()
    model.final_logits_bias[0, EOS] = ending
    return model.eval()


def sentences(number: int, *, seed: int = 0, longest: int = 12) -> list[list[int]]:
    """Token ids, </s> last, of all lengths."""
    draw = random.Random(seed)
    return [
        [draw.randrange(NUM_SPECIAL, VOCABULARY) for _ in range(draw.randint(0, longest))] + [EOS]
        for _ in range(number)
    ]


@functools.cache
def trained_model(embeddings: str = "shared") -> MarianMTModel:
    """A model that has begun to learn to say a sentence backwards: right about most of it."""
    model = random_model(embeddings=embeddings)
    model.final_logits_bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        sources = sentences(32, seed=step, longest=6)
        targets = [[*reversed(ids[:-1]), EOS] for ids in sources]
        source, target = padded_rows(sources, PAD), padded_rows(targets, PAD)
        prefix = torch.cat([torch.full((len(target), 1), EOS), target[:, :-1]], 1)
        mask = (source != PAD).long()
        logits = model(source, attention_mask=mask, decoder_input_ids=prefix).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def byte_tokenizer(*tags: str) -> PreTrainedTokenizerFast:
    """Any text, mostly one token per byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = (("a", "b"), ("Ġ", "t"), ("Ġt", "h"))
    return make_tokenizer(Merges(False, tuple(sorted(ByteLevel.alphabet())), merges), tags)


def word_tokenizer(words: str) -> PreTrainedTokenizerFast:
    """Words made of these letters, one token per letter; ten letters make ``VOCABULARY``."""
    alphabet = [*words, *(f"{letter}</w>" for letter in words)]
    return make_tokenizer(Merges(True, tuple(alphabet), ()), ())


def save_folder(
    folder: Path,
    model: MarianMTModel,
    tokenizer: PreTrainedTokenizerFast,
    target_tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    pairs: tuple[dict[str, Any], ...] = ({"source": "de", "target": "en", "tag": None},),
    text: dict[str, Any] | None = None,
    decode: Decode | None = None,
) -> Path:
    """A model folder as a run leaves it in ``best``."""
    decode = decode or Decode()
    model.config.labo = {
        "task": "translation",
        "num_classes": model.config.decoder_vocab_size,
        "pairs": list(pairs),
        "text": text or {},
        "decode": decode.model_dump(mode="json"),
    }
    model.generation_config = generation_config(decode, model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if target_tokenizer is not None:
        target_tokenizer.save_pretrained(folder / "target_tokenizer")
    return folder


def byte_folder(folder: Path, *, seed: int = 0, **facts: Any) -> Path:
    """A folder whose model babbles bytes."""
    tags = dict.fromkeys(pair["tag"] for pair in facts.get("pairs", ()) if pair["tag"])
    tokenizer = byte_tokenizer(*tags)
    return save_folder(
        folder, random_model(len(tokenizer), len(tokenizer), seed=seed), tokenizer, **facts
    )


def image_folder(folder: Path) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", {"task": "image_classification", "num_classes": 10})
    return folder
