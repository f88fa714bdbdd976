"""Checks of parallel text: earlier processing, wrong pairs, swapped sides, what leaks."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from babel import Locale
from babel.core import get_global


class Markup(NamedTuple):
    """A sort of earlier processing."""

    looks: str
    evidence: str
    remedy: str
    pattern: re.Pattern[str]


SUBWORDS = Markup(
    "split into subwords",
    "@@ or ▁",
    "--join-subwords joins them first",
    re.compile(r"@@(?=\s|$)|▁"),
)
TOKENIZED = Markup(
    "tokenized",
    "&apos; or @-@",
    "--tokenized takes it as such",
    re.compile(r"&(?:apos|quot|#91|#93|#124);|(?:^|\s)@[-/]@(?=\s|$)"),
)
_SHARE = 0.01  # of the lines with a mark, from which on the text counts as marked

# The scripts of ISO 15924 by the first words of the Unicode names of their letters. The text of a
# language whose script is not listed is not checked.
_SCRIPTS = {
    "Arab": "ARABIC",
    "Armn": "ARMENIAN",
    "Beng": "BENGALI",
    "Cyrl": "CYRILLIC",
    "Deva": "DEVANAGARI",
    "Ethi": "ETHIOPIC",
    "Geor": "GEORGIAN",
    "Grek": "GREEK",
    "Gujr": "GUJARATI",
    "Guru": "GURMUKHI",
    "Hans": "CJK",
    "Hant": "CJK",
    "Hebr": "HEBREW",
    "Jpan": "CJK HIRAGANA KATAKANA KATAKANA-HIRAGANA",
    "Khmr": "KHMER",
    "Knda": "KANNADA",
    "Kore": "HANGUL CJK",
    "Laoo": "LAO",
    "Latn": "LATIN",
    "Mlym": "MALAYALAM",
    "Mymr": "MYANMAR",
    "Sinh": "SINHALA",
    "Taml": "TAMIL",
    "Telu": "TELUGU",
    "Thai": "THAI",
}

# The most frequent words of running text. Only words that two languages do not share tell them
# apart.
_STOP_WORDS = {
    language: frozenset(words.split())
    for language, words in {
        "cs": "je se na že to v s z do jsem ale jak by si pro tak jsou které jeho nebo také už",
        "de": "der die das und ist nicht ein eine ich sie mit den von zu es auf für dem im sich",
        "en": "the and of to is that it you was for are with this have not be on at we they",
        "es": "el la los las y que en un una es por con para no se del lo está pero como",
        "fr": "le la les et est un une des du dans que qui pour pas il elle sur au avec ce",
        "it": "il lo gli e di che è un una per non con sono della del la si nel anche ma",
        "nl": "de het een en van is dat niet op te zijn voor met die er aan ik hij ook maar",
        "pl": "i w na nie się z do to że jest jak ale po co tak za od przez są dla",
        "pt": "o a os as e que em um uma é não para com por do da no na se mais",
        "ru": "и в не на что я вы он как это по но они мы из же за для был так",
        "sv": "och att det som en ett är på inte för av med den till han jag har om de var",
    }.items()
}
_ENOUGH = 20  # sentences with a telling word, on each side
_CLEAR = 4  # times as many words of the other language
_WORD = re.compile(r"[^\W\d_]+")


# ------------------------------------------------------------------ processed before


def markup(lines: Sequence[str]) -> tuple[Markup, float] | None:
    """How lines were processed before, and the share of the lines that show it.

    Text counts as processed if at least two lines and 1 % of them have a mark of it.

    Example:
        >>> markup(["it &apos;s low .", "a well @-@ known man"]) == (TOKENIZED, 1.0)
        True
        >>> markup(["It's low.", "A well-known man."])
    """
    for kind in (SUBWORDS, TOKENIZED):
        marked = sum(1 for line in lines if kind.pattern.search(line))
        if marked >= 2 and marked >= _SHARE * len(lines):
            return kind, marked / len(lines)
    return None


def join_subwords(line: str) -> str:
    """A line without the marks of subword-nmt and SentencePiece.

    Example:
        >>> join_subwords("a lo@@ w@@ er bow"), join_subwords("▁a ▁lo w er ▁bow")
        ('a lower bow', 'a lower bow')
    """
    if "▁" in line:
        return "".join(line.split()).replace("▁", " ").strip()
    return re.sub(r"@@(?:\s+|$)", "", line)


# ------------------------------------------------------------------ one sentence


@lru_cache(maxsize=64)
def _expected(language: str) -> list[str]:
    likely = get_global("likely_subtags")
    tag = likely.get(language) or likely.get(language.partition("_")[0]) or ""
    return _SCRIPTS.get(tag.split("_")[1] if "_" in tag else "", "").split()


@lru_cache(maxsize=1 << 16)
def _script(character: str) -> str:
    """The script of a letter; nothing for other characters."""
    if not character.isalpha():
        return ""
    return unicodedata.name(character, "").partition(" ")[0]


def wrong_script(line: str, language: str) -> bool:
    """Whether most letters of a line are of another script than the language is written in.

    Example:
        >>> wrong_script("Добрый день", "en"), wrong_script("Добрый день", "ru")
        (True, False)
    """
    expected = _expected(language)
    if not expected or (line.isascii() and expected == ["LATIN"]):
        return False
    letters: Counter[str] = Counter()
    for character, count in Counter(line).items():
        letters[_script(character)] += count
    del letters[""]
    return 2 * sum(letters[name] for name in expected) < letters.total()


def sentence_key(language: str, text: str) -> int:
    """64 bits that identify a sentence of a language."""
    digest = blake2b(f"{language}\t{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# ------------------------------------------------------------------ many sentences

Keys = npt.NDArray[np.uint64]  # (N,), of :func:`sentence_key`


def pair_keys(source: Keys, target: Keys) -> Keys:
    """(N,), what identifies pairs of sentences."""
    return source * np.uint64(0x9E3779B97F4A7C15) ^ target


def duplicates(source: Keys, target: Keys) -> npt.NDArray[np.bool_]:
    """(N,), whether the same pair occurs before."""
    repeated = np.ones(len(source), dtype=bool)
    repeated[np.unique(pair_keys(source, target), return_index=True)[1]] = False
    return repeated


def overlap(train: Sequence[Keys], held_out: Sequence[Keys]) -> dict[str, int]:
    """How many pairs of a split have their source, target or both in the training split.

    The splits are given as the keys of their sources and those of their targets.
    """
    columns = ([*keys, pair_keys(*keys)] for keys in (held_out, train))
    named = zip(("source", "target", "pair"), *columns, strict=True)
    return {name: int(np.isin(held, seen).sum()) for name, held, seen in named}


def sentence_groups(source: Keys, target: Keys) -> npt.NDArray[np.int64]:
    """(N,), the group of each pair: the number of the first pair in it.

    Two pairs are in one group if they have a sentence in common, directly or through other pairs.
    """
    size = len(source)
    labels = np.arange(size)
    if not size:
        return labels
    keys = np.unique(np.concatenate([source, target]), return_inverse=True)[1]
    order = keys.argsort(kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    while True:
        # Each sentence takes the smallest label of its pairs, each pair that of its sentences.
        smallest = np.minimum.reduceat(labels[order % size], starts)
        smaller = np.minimum(smallest[keys[:size]], smallest[keys[size:]])
        if np.array_equal(smaller, labels):
            return labels
        labels = smaller


def hold_out(groups: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.bool_]:
    """(N,), the pairs of every n-th group, in the order of the first pairs of the groups.

    Groups of more than n pairs are not counted and not held out: a large one would make up most of
    the held-out split.

    Example:
        >>> hold_out(np.array([0, 1, 0, 3, 4, 3]), 2).tolist()
        [False, True, False, False, True, False]
    """
    if n == 0:
        return np.zeros(len(groups), dtype=bool)
    names, sizes = np.unique(groups, return_counts=True)
    candidates = names[sizes <= n]
    return np.isin(groups, candidates[n - 1 :: n])


# ------------------------------------------------------------------ languages


@lru_cache(maxsize=64)
def _base(code: str) -> str:
    """The language of a code without script and territory: "de" for "de_AT" and "deu_Latn"."""
    language = re.split(r"[-_]", code)[0].lower()
    return get_global("language_aliases").get(language, language)


def language_name(code: str) -> str:
    """The English name of a language; the code itself if Babel does not know it.

    Example:
        >>> language_name("de"), language_name("pt_BR"), language_name("deu_Latn")
        ('German', 'Portuguese', 'German')
    """
    return Locale("en").languages.get(_base(code), code)


def look_swapped(pairs: Iterable[Sequence[str]], source: str, target: str) -> bool:
    """Whether sources are clearly in the language of the targets, and targets in that of sources.

    False if it is not clear, if a language has no table of words, or if both are the same.

    Example:
        >>> pairs = [("the dog is not here", "der Hund ist nicht hier")] * 20
        >>> look_swapped(pairs, "de", "en"), look_swapped(pairs, "en", "de")
        (True, False)
    """
    languages = _base(source), _base(target)
    if languages[0] == languages[1] or not set(languages) <= _STOP_WORDS.keys():
        return False
    of_source, of_target = (_STOP_WORDS[language] for language in languages)
    votes = [Counter[str](), Counter[str]()]  # sentences of each side, by the language they are in
    for pair in pairs:
        for sentence, vote in zip(pair, votes, strict=True):
            words = _WORD.findall(sentence.lower())
            balance = sum((word in of_source) - (word in of_target) for word in words)
            if balance:
                vote["source" if balance > 0 else "target"] += 1
    expected = zip(votes, ("source", "target"), ("target", "source"), strict=True)
    return all(
        vote[other] >= _ENOUGH and vote[other] > _CLEAR * vote[own] for vote, own, other in expected
    )
