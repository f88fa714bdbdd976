"""From a raw line to what the subword model sees, and from what a model says back to text.

A :class:`Pipeline` has the steps of the public recipes, in their order: straight apostrophes, Moses
punctuation normalisation, removal of what cannot be printed, Moses tokenization, lower case.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

from pydantic import Field, model_validator

from ..config import Section

_FINAL_PERIOD = re.compile(r"([^\s.])\.$")


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
        False,
        description="Replace typographic apostrophes by straight ones in validation and test text.",
    )
    lowercase: bool = Field(False, description="Convert all text to lower case.")

    @model_validator(mode="after")
    def _consistent(self) -> TextOptions:
        if self.moses and self.tokenized:
            raise ValueError("--moses tokenizes, so the text must not be --tokenized already")
        if self.aggressive_hyphens and not self.moses:
            raise ValueError("--aggressive-hyphens is an option of --moses")
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
        of_plain = options.model_copy(update={"moses": options.spaced, "tokenized": False})
        self.tokens = _forward(of_plain, target_language)
        """Plain target text, such as a restored output, to tokens. This differs from ``target`` if
        the corpus was tokenized already: its plain lines have no spaces between tokens."""


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
