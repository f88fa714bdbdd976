"""The records of a translation model, one per sentence, and their analysis.

BLEU, calibration of tokens, parts by word frequency, output lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..analysis.groups import Group, Variant, paired_numbers
from ..analysis.reading import Booleans, Floats, Integers, RecordLine, Run, record_lines
from ..analysis.task import TaskOption
from ..analysis.views import view
from ..tables import Cell, Column, Row, Table, filled
from ..text.analysis import Forced, TokenAnalysis, digest, forced_view, read_forced
from .bleu import bootstrap_bleu
from .frequency import PARTS, bleu_by_part, chosen_probabilities, frequency_parts


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


def _size(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _sizes(text: str) -> list[int]:
    return [_size(size) for size in text.split(",")]


class TranslationAnalysis(TokenAnalysis):
    """BLEU and chrF; tokens of the reference and of the output; parts by word frequency."""

    headline = Column("bleu", "BLEU", better=1)
    scores = (
        Column("chrf", "chrF", better=1),
        Column("nll", "NLL", digits=3, better=-1),
        Column("length_ratio", "length ratio", digits=3),
    )
    measures = (
        headline,
        Column("nll", "NLL", digits=3),
        Column("forced_ece", "ECE forced", digits=3),
        Column("forced_ece_after", "after T", digits=3),
        Column("temperature", "T", digits=3),
        Column("decoded_ece", "ECE decoded", digits=3),
        Column("underconfidence", "underconfidence", digits=3, signed=True),
        Column("confidence_on_errors", "confidence on errors", digits=3),
        Column("decoded_aurc", "AURC decoded", digits=3),
        Column("length_ratio_1", "length, beam 1", digits=3),
        Column("length_ratio_5", "beam 5", digits=3),
        Column("length_ratio_20", "beam 20", digits=3),
    )
    unit = "reference tokens"
    circumstances: ClassVar = {
        "forced": "given the reference so far",
        "decoded": "on its own output",
        "forced_after": "after one temperature, given the reference so far,",
    }
    evaluate_options = (
        TaskOption("beams", "beam sizes to measure output lengths at, as in beams=1,5,20", _sizes),
    )
    analyze_options = (
        TaskOption(
            "part_size",
            "sentences of each part by word frequency, as in part_size=2400; thirds if not given",
            _size,
        ),
    )

    def read_records(self, run: Run, split: str) -> Translations:
        return read_translations(run, split)

    def bootstrap_scores(self, run: Run, records: Translations) -> Floats:
        return bootstrap_bleu(records.hypotheses, records.references, _signature(run.results))

    def scoring(self, results: Mapping[str, Any]) -> dict[str, str]:
        signature = _signature(results)
        return {} if signature is None else {"sacreBLEU": signature}

    # ------------------------------------------------------------------ one run

    def views(self, records: Translations, split: str, notes: list[str]) -> dict[str, Any]:
        views = {"forced": forced_view(records.forced), "decoded": decoded_view(records)}
        missing = [name for name, one in views.items() if one is None]
        notes += [f"the {split} records have no {name} tokens" for name in missing]
        return {name: one for name, one in views.items() if one is not None}

    def findings(
        self, run: Run, records: Translations, notes: list[str], **options: Any
    ) -> dict[str, Any]:
        parts = frequency_parts(records.frequency, options.get("part_size"))
        names = np.array([sentence.pair for sentence in records])
        pairs = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
        bleu = _bleu(run, records, {"all": np.arange(len(records)), **parts, **pairs})
        probabilities = [sentence.probabilities for sentence in records]
        return {
            "bleu": bleu["all"],
            "pairs": {name: {"bleu": bleu[name]} for name in pairs},
            "frequency": {
                part: {
                    "examples": len(index),
                    "mean_frequency": _mean(records.frequency[index]),
                    "bleu": bleu[part],
                }
                for part, index in parts.items()
            },
            "confidence": chosen_probabilities(probabilities, parts),
            "lengths": _lengths(records, notes),
        }

    def measure(self, split: Mapping[str, Any]) -> dict[str, float | None]:
        views = split["views"]
        forced, decoded = views.get("forced", {}), views.get("decoded", {})
        beams = (split["lengths"] or {}).get("beams", {})
        return {
            "bleu": split["bleu"],
            "nll": forced.get("nll"),
            "forced_ece": forced.get("ece"),
            "forced_ece_after": views.get("forced_after", {}).get("ece"),
            "temperature": split["temperature"],
            "decoded_ece": decoded.get("ece"),
            "decoded_aurc": decoded.get("selective", {}).get("aurc"),
            "confidence_on_errors": decoded.get("confidence_on_errors"),
            "underconfidence": decoded.get("underconfidence"),
            **{
                f"length_ratio_{beam}": beams.get(beam, {}).get("ratio")
                for beam in ("1", "5", "20")
            },
        }

    # ------------------------------------------------------------------ several runs

    def compare_group(self, group: Group, **options: Any) -> dict[str, Any]:
        return {"frequency": _frequency(group, options.get("part_size"))}

    def group_tables(self, document: Mapping[str, Any]) -> list[Table]:
        frequency = document["frequency"]
        columns = [Column(part, part, "BLEU") for part in PARTS]
        columns += [
            Column(f"delta_{reference}_{part}", part, f"Δ {reference}", signed=True)
            for reference in frequency["references"]
            for part in PARTS
        ]
        rows = []
        for row in frequency["rows"]:
            cells = {part: Cell(row["bleu"][part]) for part in PARTS}
            for reference, differences in row["differences"].items():
                cells |= {
                    f"delta_{reference}_{part}": Cell(value) for part, value in differences.items()
                }
            rows.append(Row(row["method"], cells))
        sizes = ", ".join(
            f"{part} {size} (mean count {frequency['mean_frequency'][part] or 0:.0f})"
            for part, size in frequency["sizes"].items()
        )
        notes = [f"{frequency['rule']} by token frequency: {sizes}"]
        if frequency["left_over"]:
            notes.append(f"{frequency['left_over']} sentences are in no part")
        caption = "BLEU by frequency of the source tokens"
        return [Table(caption, filled(columns, rows), rows, notes=notes)]


ANALYSIS = TranslationAnalysis()


def _signature(results: Mapping[str, Any] | None) -> str | None:
    """The sacrebleu signature of the BLEU in ``results.json``."""
    signatures = (results or {}).get("sacrebleu")
    signature = signatures.get("bleu") if isinstance(signatures, Mapping) else None
    return signature if isinstance(signature, str) else None


def _mean(values: Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None


# ------------------------------------------------------------------ views


def decoded_view(records: Translations) -> dict[str, Any] | None:
    """A VIEW of the tokens of the output, right if aligned with the reference; None without any."""
    units = np.repeat(np.arange(len(records)), [len(s.tokens) for s in records])
    if len(units) == 0:
        return None
    right = np.concatenate([matched_tokens(s.tokens, s.forced.tokens) for s in records])
    return view(np.concatenate([s.probabilities for s in records]), right, units)


def matched_tokens(hypothesis: Sequence[str], reference: Sequence[str]) -> Booleans:
    """(len(hypothesis),) the tokens that a minimum edit-distance alignment matches.

    A decoded token has no label. As in inference calibration (Wang et al. 2020) it counts as right
    if an alignment of minimum edit distance (insertion, deletion, substitution, cost 1 each)
    matches it with an equal token of the reference. Wang et al. use TER, which can also shift
    blocks of words at cost 1. Here nothing is shifted, so a right word at a wrong position counts
    as wrong. Of several such alignments one with the most matches is chosen, of several of these
    always the same one.

    Example:
        >>> matched_tokens("the black cat sat".split(), "the cat sat down".split()).tolist()
        [True, False, True, True]
    """
    ids = {token: index for index, token in enumerate(dict.fromkeys([*hypothesis, *reference]))}
    ours, theirs = [ids[token] for token in hypothesis], np.array([ids[t] for t in reference], int)
    # One cost for both criteria: an edit costs more than all matches together can save.
    edit = min(len(ours), len(theirs)) + 1
    ahead = edit * np.arange(len(theirs) + 1)
    cost = np.empty((len(ours) + 1, len(theirs) + 1), dtype=np.int64)
    cost[0] = ahead
    for i, token in enumerate(ours, 1):
        row = cost[i - 1] + edit
        row[1:] = np.minimum(row[1:], cost[i - 1, :-1] + np.where(theirs == token, -1, edit))
        # An insertion comes from the left in the same row: a running minimum.
        cost[i] = np.minimum.accumulate(row - ahead) + ahead

    matched = np.zeros(len(ours), dtype=bool)
    i, j = len(ours), len(theirs)
    while i and j:
        equal = ours[i - 1] == theirs[j - 1]
        if cost[i, j] == cost[i - 1, j - 1] + (-1 if equal else edit):
            i, j = i - 1, j - 1
            matched[i] = equal
        elif cost[i, j] == cost[i - 1, j] + edit:
            i -= 1
        else:
            j -= 1
    return matched


def _lengths(records: Translations, notes: list[str]) -> dict[str, Any] | None:
    """For every beam size the output length relative to the reference, summed over sentences.

    A wider beam finds more probable outputs. With label smoothing these are shorter (Liang et al.
    2022), which a comparison at one beam size does not show.
    """
    beams = set.intersection(*(set(sentence.lengths) for sentence in records))
    if not beams:
        notes.append(
            "the records have no output lengths by beam size: "
            "labo evaluate RUN beams=1,5,20 writes them"
        )
        return None
    total = sum(sentence.reference_length for sentence in records)
    lengths = {beam: sum(s.lengths[beam] for s in records) for beam in sorted(beams, key=int)}
    ratios = {beam: length / total if total else None for beam, length in lengths.items()}
    return {"beams": {beam: {"ratio": ratio} for beam, ratio in ratios.items()}}


# ------------------------------------------------------------------ variants by part


def _frequency(group: Group, part_size: int | None) -> dict[str, Any]:
    """By the frequencies of the first reference: the parts are the same sentences for all runs."""
    first = next(iter(group.references[0].members.values()))
    records: Translations = first.records(group.split)
    parts = frequency_parts(records.frequency, part_size)
    scores = {m: _bleu(m.run, m.records(group.split), parts) for m in group.members}

    def numbers(variant: Variant, part: str) -> list[float]:
        return list(variant.numbers(lambda member: scores[member][part]).values())

    def difference(variant: Variant, reference: Variant, part: str) -> float | None:
        paired = paired_numbers(variant, reference, lambda member: scores[member][part])
        return _mean(np.array(list(paired.values())))

    rows = [
        {
            "method": variant.label,
            "bleu": {part: _mean(np.array(numbers(variant, part))) for part in parts},
            "differences": {
                reference.label: {part: difference(variant, reference, part) for part in parts}
                for reference in group.references
                if reference is not variant
            },
        }
        for variant in group.variants
    ]
    return {
        "rule": "thirds" if part_size is None else f"slices of {part_size}",
        "references": [reference.label for reference in group.references],
        "sizes": {part: len(index) for part, index in parts.items()},
        "left_over": len(records) - sum(len(index) for index in parts.values()),
        "mean_frequency": {part: _mean(records.frequency[index]) for part, index in parts.items()},
        "rows": rows,
    }


def _bleu(
    run: Run, records: Translations, parts: Mapping[str, Integers]
) -> dict[str, float | None]:
    signature = _signature(run.results)
    return bleu_by_part(records.hypotheses, records.references, parts, signature)
