"""Byte-pair encoding: learned from text, read from a file, made into a tokenizer.

There are two kinds. *Bytes*, for running text: the symbols are the 256 bytes, so any text survives
and comes back exactly. *Words*, for text with a space between tokens: the symbols are characters,
the last of a word carries the mark </w>, as in subword-nmt; a character never seen is <unk>.

The trainer of ``tokenizers`` numbers the marked characters in the order of a hash table, which
makes its ties, and so its merges, differ from run to run. Here it is shown words whose last
character is another code point instead, and no mark; alphabets without marks it keeps in order.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DataError
from ..run.files import Document, read_json
from .records import read_lines

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # with fairseq's ids, 0 to 3
MARK = "</w>"
_LONGEST = 1024  # tokens; what tokenizers say of themselves, nothing is cut
_PRIVATE_USE = 0xF0000
_MOST_COUNTED = 4_000_000  # different words, about 100 bytes each
_MOST_LEARNED = 1_000_000  # different words, about 1000 bytes each in the trainer
_MOST_GROWTH = 10_000  # by replacements, one after the other
_LONGEST_LEARNED = 1000  # characters of a word; the trainer's time grows with their square
_LAST_CHARACTER = re.compile(r"\S(?!\S)")

Lines = Callable[[], Iterable[str]]  # text that can be read more than once


@dataclass(frozen=True)
class Size:
    """How far to merge: until the vocabulary has so many types, or for so many merges."""

    vocabulary: int | None = None
    merges: int | None = None


@dataclass(frozen=True)
class Merges:
    """A byte-pair encoding of words or bytes: symbols that no merge makes, and merges in order."""

    words: bool
    alphabet: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]

    def types(self) -> list[str]:
        """All symbols: the alphabet, then what each merge makes."""
        return list(dict.fromkeys([*self.alphabet, *(a + b for a, b in self.merges)]))


def learn_merges(lines: Lines, *, words: bool, size: Size, reserved: int) -> Merges:
    """Learn a byte-pair encoding; the same text, which is read twice, gives the same.

    The memory it takes grows with the number of different words. It learns from the most frequent
    million of them, and from words of at most 1000 characters; longer ones are cut, or left out
    where tokens are separated by spaces. Pairs that occur once are never merged. ``reserved`` types
    of the vocabulary are special tokens and tags.
    """
    inventory = _Inventory(lines())
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


class _Inventory:
    """The words of a text of any size, and the characters inside and at the end of words.

    If there are too many words, the rarest are not counted.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.counts: Counter[str] = Counter()
        self.inner: set[str] = set()
        self.last: set[str] = set()
        floor = 0
        for line in lines:
            self.counts.update(line.split())
            if len(self.counts) > _MOST_COUNTED:
                floor += 1
                self._note_characters()
                for word in [word for word, n in self.counts.items() if n <= floor]:
                    del self.counts[word]
        self._note_characters()

    def _note_characters(self) -> None:
        for word in self.counts:
            self.inner.update(word[:-1])
            self.last.add(word[-1])

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


def read_codes(path: Path, lines: Lines) -> Merges:
    """Published merges, as subword-nmt writes them (format 0.2), plain or gzipped.

    The characters of the training text are part of the alphabet.
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
    inventory = _Inventory(lines())
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


def make_tokenizer(
    merges: Merges,
    tags: Sequence[str],
    *,
    frame: Literal["end", "begin"] = "end",
    split_special_tokens: bool = True,
) -> PreTrainedTokenizerFast:
    """A tokenizer that ends each text with </s>, or begins it with <s> (``frame``).

    Ids: the special tokens, the tags, the types. A tag at the head of a text is the tag. What looks
    like a special token in a text is split like any other text; a chat template needs
    ``split_special_tokens=False``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    unk = SPECIAL_TOKENS[-1]
    reserved = [*SPECIAL_TOKENS, *tags]
    merges = _avoid(merges, reserved)
    vocabulary = {name: index for index, name in enumerate([*reserved, *merges.types()])}
    mark = {"end_of_word_suffix": MARK} if merges.words else {}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges.merges), unk_token=unk, **mark))
    if merges.words:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.BPEDecoder(suffix=MARK)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    return finish_tokenizer(tokenizer, tags, frame=frame, split_special_tokens=split_special_tokens)


def finish_tokenizer(
    tokenizer: Tokenizer,
    tags: Sequence[str],
    *,
    frame: Literal["end", "begin"] = "end",
    split_special_tokens: bool = True,
) -> PreTrainedTokenizerFast:
    """Add special tokens, tags and the frame to a tokenizer that has them in its vocabulary."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    bos, pad, eos, unk = SPECIAL_TOKENS
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, normalized=False, rstrip=True) for tag in tags])
    added = eos if frame == "end" else bos
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}" if frame == "end" else f"{bos} $A",
        special_tokens=[(added, SPECIAL_TOKENS.index(added))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        split_special_tokens=split_special_tokens,
        clean_up_tokenization_spaces=False,
        model_max_length=_LONGEST,
    )


def encode(tokenizer: PreTrainedTokenizerFast, lines: Sequence[str]) -> Iterator[list[int]]:
    """The ids of each line, </s> last."""
    with panics_refused():
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(list(lines))
    return (e.ids for e in encoded)


@contextmanager
def panics_refused(folder: Path | None = None) -> Iterator[None]:
    """Within, a panic of the Rust library ``tokenizers`` becomes a DataError.

    It panics on tokenizer files that are valid JSON but do not fit together. A folder whose
    tokenizer would make much of a little text is refused.
    """
    if folder is not None and (folder / "tokenizer.json").is_file():
        _refuse_growth(folder / "tokenizer.json")
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the files of the tokenizer do not fit together ({error})") from error


def _refuse_growth(path: Path) -> None:
    """Refuse a tokenizer whose replacements multiply the length of a text."""
    document = read_json(path, Document).model_dump()
    for part in ("normalizer", "decoder"):
        growth = _growth(document.get(part))
        if growth > _MOST_GROWTH:
            raise DataError(f"{path}: its {part} makes a text {growth} times as long")


def _growth(part: Any) -> int:
    """How many times as long a part of a tokenizer can make a text."""
    if not isinstance(part, dict):
        return 1
    inside = part.get("normalizers") or part.get("decoders")
    if isinstance(inside, list):
        return math.prod(map(_growth, inside))
    content, pattern = part.get("content"), part.get("pattern")
    if not isinstance(content, str):
        return 1
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    # An expression can also match between any two characters.
    return -(-len(content) // len(replaced)) or 1 if replaced else 1 + len(content)
