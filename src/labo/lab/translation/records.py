"""The records of a translation model: one per sentence, as ``labo evaluate`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..analysis.reading import Floats, RecordLine, Run, record_lines
from ..text.analysis import Forced, digest, read_forced


@dataclass(frozen=True, eq=False)
class Sentence:
    """One record."""

    pair: str
    source: str
    reference: str
    hypothesis: str
    tokens: list[str]
    probabilities: Floats  # one per token
    frequency: float
    forced: Forced
    lengths: Mapping[str, int] | None
    reference_length: int | None


@dataclass(frozen=True, eq=False)
class Translations:
    """The records of a split."""

    sentences: list[Sentence]

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def hypotheses(self) -> list[str]:
        return [sentence.hypothesis for sentence in self.sentences]

    @property
    def references(self) -> list[str]:
        return [sentence.reference for sentence in self.sentences]

    @property
    def probabilities(self) -> list[Floats]:
        """Of the tokens of each hypothesis."""
        return [sentence.probabilities for sentence in self.sentences]

    @property
    def forced(self) -> list[Forced]:
        """Predictions of the tokens of each reference."""
        return [sentence.forced for sentence in self.sentences]

    @property
    def frequency(self) -> Floats:
        """(sentences,) F(x)."""
        return np.array([sentence.frequency for sentence in self.sentences])

    def fingerprint(self) -> str:
        """Equal for two runs that translated the same sentences."""
        return digest([(s.pair, s.source, s.reference) for s in self.sentences])


def read_translations(run: Run, split: str) -> Translations:
    """The records of a split, checked."""
    return Translations([_sentence(line) for line in record_lines(run, split)])


def _sentence(line: RecordLine) -> Sentence:
    tokens, forced = line.texts("tokens"), line.section("forced")
    lengths = None
    if line.content.get("lengths") is not None:
        section = line.section("lengths")
        for beam in section.content:
            if not beam.isdecimal():
                raise section.wrong(f"{beam!r} is not a beam size")
        lengths = {beam: section.integer(beam) for beam in section.content}
    return Sentence(
        pair=line.text("pair"),
        source=line.text("source"),
        reference=line.text("reference"),
        hypothesis=line.text("hypothesis"),
        tokens=tokens,
        probabilities=line.numbers("probabilities", len(tokens), high=1),
        frequency=line.number("frequency"),
        forced=read_forced(forced),
        lengths=lengths,
        reference_length=None if lengths is None else line.integer("reference_length"),
    )
