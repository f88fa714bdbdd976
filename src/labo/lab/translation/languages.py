"""Names of languages, and a check that the two sides of parallel text are not swapped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = ["language_name", "look_swapped"]

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


@lru_cache(maxsize=64)
def _base(code: str) -> str:
    """The language of a code without script and territory: "de" for "de_AT" and "deu_Latn"."""
    from babel.core import get_global

    language = re.split(r"[-_]", code)[0].lower()
    return get_global("language_aliases").get(language, language)


def language_name(code: str) -> str:
    """The English name of a language; the code itself if Babel does not know it.

    Example:
        >>> language_name("de"), language_name("pt_BR"), language_name("deu_Latn")
        ('German', 'Portuguese', 'German')
    """
    from babel import Locale

    return Locale("en").languages.get(_base(code), code)


def look_swapped(pairs: Iterable[Sequence[str]], source: str, target: str) -> bool:
    """Whether sources are clearly in the language of the targets, and targets in that of sources.

    Args:
        pairs: sentence pairs, each a source and a target.
        source: the language that sources should be in.
        target: the language that targets should be in.

    Returns:
        False if it is not clear, if a language is not one of those with a table of words, or if
        both are the same.

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
