"""What the scripts of the page work on: samples for the explorer, sentences for the browser.

Both are kept small. A vocabulary of 32 000 tokens is embedded as its likeliest tokens and the rest
in groups of nearly equal logits; sentences are chosen evenly over the split until a budget is full.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..analysis.reading import Translations, read_examples, read_translations
from .gather import TRANSLATION, Group

_NAMED = 100  # classes of a sample that are embedded one by one
_WIDTH = 0.02  # of a group of logits: an error of 2e-5 of its probability at most
_SENTENCES = 200
_BUDGET = 1_500_000  # characters of all sentences of the page
_EXAMPLES = 60


# ------------------------------------------------------------------ the explorer


def explorer_data(groups: Sequence[Group]) -> dict[str, Any] | None:
    """The samples of every run with ``records/examples.json``; None if there is none.

    Args:
        groups: all groups of the report. LABO's samples come first, as they are what it is about.
    """
    examples: list[dict[str, Any]] = []
    variants = [(group, variant) for group in groups for variant in group.variants]
    for group, variant in sorted(variants, key=lambda pair: pair[1].name != "labo"):
        entry = variant.entries[0]  # one seed of each method is enough to look at
        content = read_examples(entry.run) or {"examples": []}
        for example in content["examples"]:
            if not math.isfinite(example["logits"][example["target"]]):
                continue  # a masked target has no label
            sample = _sample(example, content["classes"], group.task == TRANSLATION)
            examples.append(sample | {"title": example["title"], "run": entry.run.name})
    return {"examples": examples[:_EXAMPLES]} if examples else None


def _sample(example: Mapping[str, Any], classes: Sequence[str], are_tokens: bool) -> dict[str, Any]:
    """A sample with its classes in falling order; the target is always among those named."""
    logits = {i: float(logit) for i, logit in enumerate(example["logits"])}
    present = {i: logit for i, logit in logits.items() if math.isfinite(logit)}  # -inf is masked
    order = sorted(present, key=lambda i: (-present[i], i))
    named = order[:_NAMED]
    if example["target"] not in named:
        named.append(example["target"])
    tail: dict[int, list[float]] = {}
    for i in order[_NAMED:]:
        if i != example["target"]:
            tail.setdefault(round(present[i] / _WIDTH), []).append(present[i])
    image = example.get("image")
    return {
        "K": len(classes),
        "classes": [token_name(classes[i]) if are_tokens else classes[i] for i in named],
        "logits": [round(logits[i], 5) for i in named],
        "tail": [[round(sum(ls) / len(ls), 5), len(ls)] for ls in tail.values()],
        "target": named.index(example["target"]),
        "image": image if isinstance(image, str) and image.startswith("data:image/") else None,
        "context": example.get("context"),
    }


# ------------------------------------------------------------------ the sentence browser


def sentence_data(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """For each translation group with records what its sentence browser shows.

    Returns:
        group title -> {"runs": [{name, colour}], "total": n, "split", "sentences": [{source,
        reference, outputs: [{run, text, tokens: [[text, probability]]}]}]}.
    """
    found = {}
    translated = [
        group
        for group in groups
        if group.task == TRANSLATION and any(entry.split(group.split) for entry in group.entries)
    ]
    for group in translated:
        found[group.title] = _browser(group, _BUDGET // len(translated))
    return found


def _browser(group: Group, budget: int) -> dict[str, Any]:
    runs: list[dict[str, str]] = []
    outputs: list[Translations] = []
    for variant in group.variants:
        for entry in variant.entries:
            if entry.split(group.split):
                records = read_translations(entry.run, group.split)
                if outputs and records.fingerprint() != outputs[0].fingerprint():
                    continue  # of other sentences: they cannot stand beside these
                outputs.append(records)
                runs.append({"name": entry.run.name, "colour": variant.colour})
    total = len(outputs[0])
    count = min(total, _SENTENCES)
    while True:
        sentences = [_sentence(outputs, i * total // count) for i in range(count)]
        if count == 1 or len(json.dumps(sentences, ensure_ascii=False)) <= budget:
            return {"runs": runs, "total": total, "split": group.split, "sentences": sentences}
        count //= 2


def _sentence(outputs: Sequence[Translations], index: int) -> dict[str, Any]:
    first = outputs[0].sentences[index]
    spoken = []
    for run, records in enumerate(outputs):
        sentence = records.sentences[index]
        pairs = zip(readable(sentence.tokens), sentence.probabilities.tolist(), strict=True)
        tokens = [[text, round(p, 3)] for text, p in pairs]
        spoken.append({"run": run, "text": sentence.hypothesis, "tokens": tokens})
    return {"source": first.source, "reference": first.reference, "outputs": spoken}


# ------------------------------------------------------------------ tokens as text

# Byte-level BPE writes each byte as a character: printable ones as themselves, the others as those
# from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
_WORD_END = "</w>"


def readable(tokens: Sequence[str]) -> list[str]:
    """Tokens as pieces of text that, joined, read as the sentence.

    A character whose bytes are spread over several tokens stands with the last of them.

    Example:
        >>> readable(["Ein", "\u0120M\u00c3\u00a4d", "chen", "</s>"])
        ['Ein', ' Mäd', 'chen', '</s>']
        >>> readable(["ein</w>", "Mäd", "chen</w>", "</s>"])
        ['ein ', 'Mäd', 'chen ', '</s>']
    """
    if any(token.endswith(_WORD_END) for token in tokens):
        return [_without_mark(token) for token in tokens]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = []
    for token in tokens:
        spelled = [_BYTES.get(character) for character in token]
        pieces.append(token if None in spelled else decoder.decode(bytes(spelled)))  # type: ignore[arg-type]
    return pieces


def _without_mark(token: str) -> str:
    return f"{token.removesuffix(_WORD_END)} " if token.endswith(_WORD_END) else token


def token_name(token: str) -> str:
    """A token by itself, with a dot where it has a space: the beginning or end of a word."""
    return readable([token])[0].replace(" ", "·") or token
