"""BPE-dropout: another segmentation of the same text each time it is seen.

Provilkov et al. (2020): while the merges of a word are made, each possible merge is left out with
probability p, anew at each step. With p = 0 the segmentation is the usual one, with p = 1 it is the
characters or bytes. The dropout of ``tokenizers`` draws from a generator that cannot be seeded;
here the draws are given, so that a run can be repeated and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from random import Random
from typing import TYPE_CHECKING

from ..errors import RequestError
from .subwords import MARK
from .token_text import SPACE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class BpeDropout:
    """Segments encoded sentences anew; each merge is left out with probability ``p``.

    The tokenizer is of :func:`labo.lab.text.subwords.make_tokenizer`, or of a SentencePiece model
    of the type bpe.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, p: float) -> None:
        self.p = p
        document = json.loads(tokenizer.backend_tokenizer.to_str())
        model = document["model"]
        if model["type"] != "BPE":
            raise RequestError(f"BPE-dropout needs a byte-pair encoding, not {model['type']}")
        vocabulary: dict[str, int] = model["vocab"]
        pairs = [tuple(merge) for merge in model["merges"]]
        # (left, right) -> (rank, what they make)
        self._merges = {
            (vocabulary[a], vocabulary[b]): (rank, vocabulary[a + b])
            for rank, (a, b) in enumerate(pairs)
        }
        self._made_from: dict[int, tuple[int, int]] = {}
        for pair, (_, made) in self._merges.items():
            self._made_from.setdefault(made, pair)
        self._atoms = lru_cache(maxsize=None)(self._expand)
        self._names = {index: name for name, index in vocabulary.items()}
        self._special = frozenset(tokenizer.backend_tokenizer.get_added_tokens_decoder())
        self._words = model.get("end_of_word_suffix") == MARK
        self._spaces = "Metaspace" in json.dumps(document["pre_tokenizer"])
        self._tokenizer = tokenizer.backend_tokenizer
        self._pieces = lru_cache(maxsize=1 << 15)(self._split_bytes)

    def __call__(self, ids: Sequence[int], draws: Random) -> list[int]:
        """The ids of a sentence in another segmentation. Special tokens and tags stay."""
        segmented: list[int] = []
        for is_special, stretch in groupby(ids, key=self._special.__contains__):
            if is_special:
                segmented += stretch
            else:
                for word in self._split(stretch):
                    segmented += self._segment(word, draws)
        return segmented

    def _expand(self, index: int) -> tuple[int, ...]:
        """What a token is made of if all merges are left out."""
        if index not in self._made_from:
            return (index,)
        first, second = self._made_from[index]
        return (*self._atoms(first), *self._atoms(second))

    def _split(self, ids: Iterable[int]) -> list[tuple[int, ...]]:
        """The atoms of each word; merges are made within words only."""
        atoms = [atom for index in ids for atom in self._atoms(index)]
        names = [self._names[atom] for atom in atoms]
        if self._words:
            cuts = [end for end, name in enumerate(names, 1) if name.endswith(MARK)]
        elif self._spaces:
            cuts = [start for start, name in enumerate(names) if name.startswith(SPACE)]
        else:
            return self._pieces(tuple(atoms))
        return [tuple(atoms[a:b]) for a, b in pairwise([0, *cuts, len(atoms)])]

    def _split_bytes(self, atoms: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Bytes, cut as the tokenizer cuts a text before it encodes it."""
        text = self._tokenizer.decoder.decode([self._names[atom] for atom in atoms])
        words, start = [], 0
        for piece, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text):
            words.append(atoms[start : start + len(piece)])  # a character for each byte
            start += len(piece)
        return [*words, atoms[start:]]

    def _segment(self, word: Sequence[int], draws: Random) -> list[int]:
        symbols, p, merges = list(word), self.p, self._merges
        while len(symbols) > 1:
            best: tuple[int, int, int] | None = None  # rank, position, what it makes
            for position, pair in enumerate(pairwise(symbols)):
                merge = merges.get(pair)
                if merge is None or draws.random() < p:
                    continue
                if best is None or merge[0] < best[0]:
                    best = (merge[0], position, merge[1])
            if best is None:
                break
            _, position, made = best
            symbols[position : position + 2] = [made]
        return symbols
