"""From a raw line to subwords, and from the output of a model back to text.

First a :class:`Pipeline` with the steps of the public recipes, in their order: straight
apostrophes, Moses punctuation normalisation, removal of non-printing characters, Moses
tokenization, lower case.

Then byte-pair encoding of one of two kinds. *Bytes*, for running text: the symbols are the 256
bytes, so that any text is restored exactly. *Words*, for text with spaces between tokens: the
symbols are characters, and the last one of a word has the mark </w>, as in subword-nmt. A character
that did not occur in the training text becomes <unk>.

The trainer of ``tokenizers`` numbers marked characters in the order of a hash table, so that ties,
and with them the merges, differ from run to run. Here it is given words in which the last character
is replaced by another code point, without a mark; alphabets without marks keep their order.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from ..config import Section
from ..errors import DataError
from .parallel import read_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "SPECIAL_TOKENS",
    "Merges",
    "Pipeline",
    "Size",
    "TextOptions",
    "encode",
    "languages_without_moses_rules",
    "learn_merges",
    "make_tokenizer",
    "read_codes",
    "restrict",
]

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # with fairseq's ids, 0 to 3
MARK = "</w>"
_LONGEST = 1024  # tokens; only noted in the tokenizer, which cuts nothing
_PRIVATE_USE = 0xF0000
_MOST_COUNTED = 4_000_000  # different words, about 100 bytes each
_MOST_LEARNED = 1_000_000  # different words, about 1000 bytes each in the trainer
_LONGEST_LEARNED = 1000  # characters of a word; the trainer's time grows with their square
_FINAL_PERIOD = re.compile(r"([^\s.])\.$")
_LAST_CHARACTER = re.compile(r"\S(?!\S)")

Lines = Callable[[], Iterable[str]]  # text that can be read more than once


class TextOptions(Section):
    """Steps applied to every line. Without any, only leading and trailing spaces are removed."""

    moses: bool = Field(False, description="Tokenize with the Moses tokenizer.")
    tokenized: bool = Field(False, description="The text is Moses-tokenized already.")
    aggressive_hyphens: bool = Field(
        False, description="Let the Moses tokenizer split at hyphens: a @-@ b."
    )
    normalize_punctuation: bool = Field(
        False, description="Normalize punctuation as the Moses script does."
    )
    remove_nonprinting: bool = Field(False, description="Replace control characters by spaces.")
    straight_apostrophes: bool = Field(
        False, description="Replace typographic apostrophes by straight ones."
    )
    lowercase: bool = Field(False, description="Convert all text to lower case.")

    @model_validator(mode="after")
    def _consistent(self) -> TextOptions:
        if self.moses and self.tokenized:
            raise ValueError("moses tokenizes, so the text must not be tokenized already")
        if self.aggressive_hyphens and not self.moses:
            raise ValueError("aggressive_hyphens is an option of moses")
        return self

    @property
    def spaced(self) -> bool:
        """Whether tokens are separated by single spaces, as opposed to running text."""
        return self.moses or self.tokenized


class Pipeline:
    """The steps of :class:`TextOptions` for one language pair.

    Example:
        >>> pipeline = Pipeline(TextOptions(moses=True, lowercase=True), "de", "en")
        >>> pipeline.target("It's the Devil's advocate.")
        'it &apos;s the devil &apos;s advocate .'
        >>> pipeline.restore("it &apos;s the devil &apos;s advocate .")
        "it's the devil's advocate."
    """

    def __init__(self, options: TextOptions, source_language: str, target_language: str) -> None:
        self.options = options
        self.source = _forward(options, source_language)
        """Raw source line to what the subword model sees."""
        self.target = _forward(options, target_language)
        """Likewise for the target."""
        self.restore = _backward(options, target_language)
        """The output of a model to plain text."""
        self.restore_source = _backward(options, source_language)
        """Likewise for a source line."""


def _forward(options: TextOptions, language: str) -> Callable[[str], str]:
    steps: list[Callable[[str], str]] = []
    if options.straight_apostrophes:
        steps.append(lambda line: line.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    if options.normalize_punctuation:
        from sacremoses import MosesPunctNormalizer

        # The published data was made by the Perl script; this switch gives its results.
        steps.append(MosesPunctNormalizer(language, perl_parity=True).normalize)
    if options.remove_nonprinting:
        steps.append(_printable)
    if options.moses:
        from sacremoses import MosesTokenizer

        tokenizer, aggressive = MosesTokenizer(language), options.aggressive_hyphens
        steps.append(lambda line: tokenizer.tokenize(line, aggressive, return_str=True))
        # The Perl script always treats the last period as the end of the sentence.
        steps.append(lambda line: _FINAL_PERIOD.sub(r"\1 .", line))
    if options.lowercase:
        steps.append(str.lower)
    # At the end, because normalisation and lower case can produce spaces.
    steps.append((lambda line: " ".join(line.split())) if options.spaced else str.strip)

    def run(line: str) -> str:
        for step in steps:
            line = step(line)
        return line

    return run


def _backward(options: TextOptions, language: str) -> Callable[[str], str]:
    if not options.spaced:
        return str.strip
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(language)
    return lambda line: detokenizer.detokenize(line.split())


def languages_without_moses_rules(languages: Iterable[str]) -> set[str]:
    """Those of the languages that the Moses tokenizer treats like English."""
    from sacremoses.corpus import NonbreakingPrefixes

    # Chinese, Japanese and Korean have rules of another sort.
    return set(languages) - set(NonbreakingPrefixes().available_langs) - {"ja", "ko"}


def _printable(line: str) -> str:
    """The line with control characters replaced by spaces."""
    if line.isprintable():
        return line
    return "".join(" " if unicodedata.category(c).startswith("C") else c for c in line)


# ------------------------------------------------------------------ subwords


@dataclass(frozen=True)
class Size:
    """How far to merge: until the vocabulary has so many types, or for so many merges."""

    vocabulary: int | None = None
    merges: int | None = None


@dataclass(frozen=True)
class Merges:
    """A byte-pair encoding.

    Attributes:
        words: the kind: words, or bytes.
        alphabet: the symbols that are not made by a merge.
        merges: pairs of symbols, the first to be merged first.
    """

    words: bool
    alphabet: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]

    def types(self) -> list[str]:
        """All symbols: the alphabet, then what each merge makes."""
        return list(dict.fromkeys([*self.alphabet, *(a + b for a, b in self.merges)]))


def learn_merges(lines: Lines, *, words: bool, size: Size, reserved: int) -> Merges:
    """Learn a byte-pair encoding; the same text gives the same.

    The memory it takes grows with the number of different words. It learns from the most frequent
    million of them, and from words of at most 1000 characters; longer ones are cut, or left out
    where tokens are separated by spaces.

    Args:
        lines: the training text, which is read twice.
        words: the kind: words, or bytes.
        size: how far to merge; pairs that occur once are never merged.
        reserved: how many types of the vocabulary are special tokens and tags.

    Raises:
        DataError: the alphabet alone is larger than the vocabulary.
    """
    inventory = _take_inventory(lines())
    text = _without_endless_words(inventory.frequent(lines()), words)
    if not words:
        from tokenizers.pre_tokenizers import ByteLevel

        alphabet = sorted(ByteLevel.alphabet())
        merges = _run_trainer(text, alphabet, size, reserved, byte_level=True)
        return Merges(False, tuple(alphabet), tuple(merges))
    inner = inventory.inner
    free = (chr(code) for code in count(_PRIVATE_USE) if chr(code) not in inner)
    stand_ins = dict(zip(sorted(inventory.last), free, strict=False))
    marked = {code: character + MARK for character, code in stand_ins.items()}
    swapped = (_LAST_CHARACTER.sub(lambda m: stand_ins[m[0]], line) for line in text)
    learned = _run_trainer(swapped, sorted({*inner, *marked}), size, reserved, byte_level=False)

    def unswap(symbol: str) -> str:
        return symbol[:-1] + marked.get(symbol[-1], symbol[-1])

    alphabet = sorted({*inner, *marked.values()})
    return Merges(True, tuple(alphabet), tuple((unswap(a), unswap(b)) for a, b in learned))


def _run_trainer(
    lines: Iterable[str], alphabet: Sequence[str], size: Size, reserved: int, *, byte_level: bool
) -> list[tuple[str, str]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if size.merges is not None:
        vocabulary = len(alphabet) + size.merges
    else:
        assert size.vocabulary is not None
        vocabulary = size.vocabulary - reserved
    if vocabulary < len(alphabet):
        raise DataError(
            f"a vocabulary of {size.vocabulary} cannot hold the {len(alphabet)} symbols of the "
            f"alphabet and {reserved} special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if byte_level
        else pre_tokenizers.WhitespaceSplit()
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]


@dataclass(frozen=True)
class _Inventory:
    """The words of a text, with their counts, and the characters inside and at the end of words."""

    counts: Counter[str]
    inner: set[str]
    last: set[str]

    def frequent(self, lines: Iterable[str]) -> Iterable[str]:
        """The lines, without rare words if there are more words than the trainer can hold."""
        if len(self.counts) <= _MOST_LEARNED:
            return lines
        ranked = sorted(self.counts, key=lambda word: (-self.counts[word], word))
        kept = set(ranked[:_MOST_LEARNED])
        self.counts.clear()  # before the trainer needs the memory
        return (" ".join(word for word in line.split() if word in kept) for line in lines)


def _without_endless_words(lines: Iterable[str], words: bool) -> Iterator[str]:
    """The lines with every word short enough for the trainer."""
    for line in lines:
        if len(line) <= _LONGEST_LEARNED:
            yield line
        elif words:
            yield " ".join(word for word in line.split() if len(word) <= _LONGEST_LEARNED)
        elif max(map(len, line.split()), default=0) <= _LONGEST_LEARNED:
            yield line
        else:
            starts = range(0, len(line), _LONGEST_LEARNED)
            yield from (line[start : start + _LONGEST_LEARNED] for start in starts)


def _take_inventory(lines: Iterable[str]) -> _Inventory:
    """Count the words of a text of any size. If there are too many, the rarest are dropped."""
    inventory = _Inventory(Counter(), set(), set())
    floor = 0

    def note_characters(words: Iterable[str]) -> None:
        for word in words:
            inventory.inner.update(word[:-1])
            inventory.last.add(word[-1])

    for line in lines:
        inventory.counts.update(line.split())
        if len(inventory.counts) > _MOST_COUNTED:
            floor += 1
            note_characters(inventory.counts)
            kept = {word: n for word, n in inventory.counts.items() if n > floor}
            inventory.counts.clear()
            inventory.counts.update(kept)
    note_characters(inventory.counts)
    return inventory


def read_codes(path: Path, lines: Lines) -> Merges:
    """Published merges, as subword-nmt writes them (format 0.2), plain or gzipped.

    Args:
        path: the file.
        lines: the training text; its characters are part of the alphabet.

    Raises:
        DataError: it is no such file.
    """
    rows = read_lines(path)
    if next(rows, "").split() != ["#version:", "0.2"]:
        raise DataError(f"{path}:1: merges of subword-nmt begin with '#version: 0.2'")
    merges: dict[tuple[str, str], None] = {}  # of a pair that is given twice, the first counts
    for number, row in enumerate(rows, 2):
        match row.split():
            case [first, second]:
                merges[first, second] = None
            case _:
                raise DataError(f"{path}:{number}: not a merge of two symbols: {row!r}")
    merged = {a + b for a, b in merges}
    inventory = _take_inventory(lines())
    alphabet = {symbol for pair in merges for symbol in pair if symbol not in merged}
    alphabet |= inventory.inner | {character + MARK for character in inventory.last}
    return Merges(True, tuple(sorted(alphabet)), tuple(merges))


def restrict(merges: Merges, used: Collection[str]) -> Merges:
    """Only the types that a text uses, and those that they are merged from.

    The text is split as before. An alphabet of bytes stays complete.
    """
    needed = set(used)
    for first, second in reversed(merges.merges):
        if first + second in needed:
            needed.update((first, second))
    return Merges(
        merges.words,
        tuple(s for s in merges.alphabet if s in needed or not merges.words),
        tuple((a, b) for a, b in merges.merges if a + b in needed),
    )


def _avoid(merges: Merges, names: Collection[str]) -> Merges:
    """Without merges that make a reserved name, such as </s> in a text, or that need one."""
    known = set(merges.alphabet)
    kept = []
    for first, second in merges.merges:
        if first in known and second in known and first + second not in names:
            known.add(first + second)
            kept.append((first, second))
    return Merges(merges.words, merges.alphabet, tuple(kept))


def make_tokenizer(merges: Merges, tags: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that ends each text with </s>.

    Ids: the special tokens, the tags, the types. Text that looks like a special token is split like
    any other text. A tag at the start of a text is the tag.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    bos, pad, eos, unk = SPECIAL_TOKENS
    reserved = [*SPECIAL_TOKENS, *tags]
    merges = _avoid(merges, reserved)
    vocabulary = {name: index for index, name in enumerate([*reserved, *merges.types()])}
    mark = {"end_of_word_suffix": MARK} if merges.words else {}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges.merges), unk_token=unk, **mark))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, normalized=False, rstrip=True) for tag in tags])
    if merges.words:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.BPEDecoder(suffix=MARK)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, vocabulary[eos])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=_LONGEST,
    )


def encode(tokenizer: PreTrainedTokenizerFast, lines: Sequence[str]) -> Iterator[list[int]]:
    """The ids of each line, </s> last."""
    return (e.ids for e in tokenizer.backend_tokenizer.encode_batch_fast(list(lines)))
