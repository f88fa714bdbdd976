"""Documents, a tokenizer and a language model small enough for tests."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from labo.lab.language_modeling.documents import Part, RawDocument
from labo.lab.language_modeling.model import causal_config
from labo.lab.language_modeling.options import Tokenization
from labo.lab.language_modeling.prepare import prepare_documents
from labo.lab.language_modeling.tokenizers import learn_tokenizer

ANIMALS = ["dog", "cat", "fox", "owl", "über-bär"]
VERBS = ["sees", "follows", "knows"]


def _sentences(number: int) -> list[str]:
    draw = random.Random(0)
    return [
        f"{n}: the {draw.choice(ANIMALS)} {draw.choice(VERBS)} the {draw.choice(ANIMALS)}"
        + ".\nAnd then?" * draw.randint(0, 3)
        for n in range(number)
    ]


SENTENCES = _sentences(40)
CHAT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]


@functools.cache
def learned_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    return learn_tokenizer(lambda: [s + "\n" for s in SENTENCES], 300, chat=chat)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare_texts(folder: Path, texts: list[str] = SENTENCES, **options: Any) -> Path:
    """A folder of documents, each fifth held out; the vocabulary is learned unless one is given."""
    documents = [RawDocument.of_text(f"{n}", s) for n, s in enumerate(texts)]
    return _prepare(folder, documents, **options)


def prepare_prompts(folder: Path, texts: list[str] = SENTENCES, **options: Any) -> Path:
    """A folder of prompts with completions, in the tokens of :func:`learned_tokenizer`."""
    documents = [
        RawDocument(f"{n}", "prompt", (Part(f"say {s}: ", False), Part(s[:12], True)))
        for n, s in enumerate(texts)
    ]
    return _prepare(folder, documents, **{"tokenizer": learned_tokenizer()} | options)


def few_documents(folder: Path, kind: str) -> Path:
    """Fourteen texts or prompts, a long and a short one among them, to store predictions for."""
    texts = [*SENTENCES[:12], "\n".join(SENTENCES[12:16]), "x"]
    if kind == "text":
        return prepare_texts(folder, texts, tokenizer=learned_tokenizer())
    return prepare_prompts(folder, [text[:9] for text in texts])


def save_causal(folder: Path, positions: int) -> Path:
    """A Hugging Face folder of a model with opinions, and of :func:`learned_tokenizer`."""
    torch.manual_seed(3)
    tokenizer, size = learned_tokenizer(), {"width": 16, "layers": 1, "heads": 2}
    config = causal_config("gpt2-tiny", len(tokenizer), positions=positions, dimensions=size)
    causal = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in causal.parameters():
            parameter.mul_(4)
    causal.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _prepare(folder: Path, documents: list[RawDocument], **options: Any) -> Path:
    tokenizer = options.pop("tokenizer", None)
    chosen = Tokenization(**{"holdout": 5, "holdout_test": 5} | options)
    prepare_documents(folder, {"train": documents}, chosen, tokenizer=tokenizer)
    return folder
