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
    tokens: list[str]  # of the hypothesis
    probabilities: Floats  # one per token
    frequency: float  # F(x)
    forced: Forced  # predictions of the tokens of the reference
    lengths: Mapping[str, int]  # of outputs by beam size, if they were measured
    reference_length: int


class Translations(list[Sentence]):
    """The records of a split."""

    @property
    def hypotheses(self) -> list[str]:
        return [sentence.hypothesis for sentence in self]

    @property
    def references(self) -> list[str]:
        return [sentence.reference for sentence in self]

    @property
    def forced(self) -> list[Forced]:
        return [sentence.forced for sentence in self]

    @property
    def frequency(self) -> Floats:
        """(sentences,) F(x)."""
        return np.array([sentence.frequency for sentence in self])

    def fingerprint(self) -> str:
        """Equal for two runs that translated the same sentences."""
        return digest([(s.pair, s.source, s.reference) for s in self])


def read_translations(run: Run, split: str) -> Translations:
    """The records of a split, checked."""
    return Translations(map(_sentence, record_lines(run, split)))


def _sentence(line: RecordLine) -> Sentence:
    tokens = line.texts("tokens")
    lengths: dict[str, int] = {}
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
        forced=read_forced(line.section("forced")),
        lengths=lengths,
        reference_length=line.integer("reference_length") if lengths else 0,
    )
