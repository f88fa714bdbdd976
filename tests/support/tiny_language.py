"""Documents, a tokenizer and a language model small enough for tests."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from labo.lab.language_modeling.documents import Part, RawDocument
from labo.lab.language_modeling.model import causal_config, fresh_model
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


def save_causal(
    folder: Path, positions: int, *, preset: str = "gpt2-tiny", kind: str = "text"
) -> Path:
    """A folder as a run leaves it in ``best``, of a model with opinions of its own."""
    torch.manual_seed(0)
    tokenizer, size = learned_tokenizer(chat=kind == "chat"), {"width": 16, "layers": 2, "heads": 2}
    config = causal_config(
        preset, len(tokenizer), positions=positions, begin=0, end=2, pad=1, dimensions=size
    )
    begin = None if kind == "chat" else 0
    config.labo = {"task": "language_modeling", "kind": kind, "begin": begin, "end": 2}
    causal = fresh_model(config).causal
    with torch.no_grad():
        for parameter in causal.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    causal.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def log_probabilities(
    causal: Any, ids: Sequence[int], learned: Sequence[bool], block: int
) -> list[float]:
    """Those of the learned tokens of a document, from all logits of a plain model, by blocks."""
    found = []
    for first in range(0, len(ids) - 1, block):
        inputs = torch.tensor([ids[first : min(first + block, len(ids) - 1)]])
        log_p = causal(inputs).logits[0].double().log_softmax(-1)
        for row, place in enumerate(range(first + 1, first + 1 + inputs.shape[1])):
            if learned[place]:
                found.append(float(log_p[row, ids[place]]))
    return found


def _prepare(folder: Path, documents: list[RawDocument], **options: Any) -> Path:
    tokenizer = options.pop("tokenizer", None)
    chosen = Tokenization(**{"holdout": 5, "holdout_test": 5} | options)
    prepare_documents(folder, {"train": documents}, chosen, tokenizer=tokenizer)
    return folder
