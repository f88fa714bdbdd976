"""The analysis of a translation model: BLEU, calibration of tokens, frequency, lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..analysis.groups import Group, Member, Variant, paired_numbers
from ..analysis.reading import Floats, Integers, Run
from ..analysis.task import TaskOption
from ..analysis.views import view
from ..tables import Cell, Column, Row, Table, filled
from ..text.analysis import TokenAnalysis, forced_view
from .alignment import matched_tokens
from .bleu import bleu_metric, bootstrap_bleu
from .confidence import chosen_probabilities
from .frequency import PARTS, bleu_by_part, frequency_parts, rule
from .records import Translations, read_translations


def _sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError
    return sizes


def _size(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


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
        return bootstrap_bleu(records.hypotheses, records.references, bleu_signature(run))

    def scoring(self, results: Mapping[str, Any]) -> dict[str, str]:
        signature = _signature(results)
        return {} if signature is None else {"sacreBLEU": signature}

    # ------------------------------------------------------------------ one run

    def views(self, records: Translations, split: str, notes: list[str]) -> dict[str, Any]:
        made = {"forced": forced_view(records.forced), "decoded": decoded_view(records)}
        for name, found in made.items():
            if found is None:
                notes.append(f"the {split} records have no {name} tokens")
        return {name: found for name, found in made.items() if found is not None}

    def findings(
        self, run: Run, records: Translations, notes: list[str], **options: Any
    ) -> dict[str, Any]:
        part_size: int | None = options.get("part_size")
        signature = bleu_signature(run)
        metric = bleu_metric(signature)
        hypotheses, references = records.hypotheses, records.references
        parts = frequency_parts(records.frequency, part_size)
        part_bleu = bleu_by_part(hypotheses, references, parts, signature)
        names = np.array([sentence.pair for sentence in records.sentences])
        pairs = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
        pair_bleu = bleu_by_part(hypotheses, references, pairs, signature)
        return {
            "bleu": float(metric.corpus_score(hypotheses, [references]).score),
            "bleu_signature": str(metric.get_signature()),
            "pairs": {name: {"bleu": pair_bleu[name]} for name in pairs},
            "frequency": {
                "rule": rule(part_size),
                "left_over": len(records) - sum(len(index) for index in parts.values()),
                **{
                    part: {
                        "examples": len(index),
                        "mean_frequency": _mean(records.frequency[index]),
                        "bleu": part_bleu[part],
                    }
                    for part, index in parts.items()
                },
            },
            "confidence": chosen_probabilities(records.probabilities, parts),
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
        found = document["frequency"]
        columns = [Column(part, part, "BLEU") for part in PARTS]
        for reference in found["references"]:
            columns += [
                Column(f"delta_{reference}_{part}", part, f"Δ {reference}", signed=True)
                for part in PARTS
            ]
        rows = []
        for row in found["rows"]:
            cells = {part: Cell(row["bleu"][part]) for part in PARTS}
            for reference, differences in row["differences"].items():
                cells |= {
                    f"delta_{reference}_{part}": Cell(value) for part, value in differences.items()
                }
            rows.append(Row(row["method"], cells))
        sizes = ", ".join(
            f"{part} {size} (mean count {found['mean_frequency'][part] or 0:.0f})"
            for part, size in found["sizes"].items()
        )
        notes = [f"{found['rule']} by token frequency: {sizes}"]
        if found["left_over"]:
            notes.append(f"{found['left_over']} sentences are in no part")
        caption = "BLEU by frequency of the source tokens"
        return [Table(caption, filled(columns, rows), rows, notes=notes)]


ANALYSIS = TranslationAnalysis()


def _signature(results: Mapping[str, Any]) -> str | None:
    found = results.get("sacrebleu")
    signature = found.get("bleu") if isinstance(found, Mapping) else None
    return signature if isinstance(signature, str) else None


def bleu_signature(run: Run) -> str | None:
    """The sacrebleu signature of the scores in ``results.json``."""
    return _signature(run.results or {})


def _mean(values: Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None


# ------------------------------------------------------------------ views


def decoded_view(records: Translations) -> dict[str, Any] | None:
    """A VIEW of the tokens of the output, right if aligned with the reference; None without any."""
    units = np.repeat(np.arange(len(records)), [len(p) for p in records.probabilities])
    if len(units) == 0:
        return None
    right = [matched_tokens(s.tokens, s.forced.tokens) for s in records.sentences]
    return view(np.concatenate(records.probabilities), np.concatenate(right), units)


def _lengths(records: Translations, notes: list[str]) -> dict[str, Any] | None:
    lengths = [sentence.lengths for sentence in records.sentences]
    beams = set.intersection(*(set(found or ()) for found in lengths))
    if not beams:
        notes.append(
            "the records have no output lengths by beam size: "
            "labo evaluate RUN beams=1,5,20 writes them"
        )
        return None
    by_beam = {beam: np.array([found[beam] for found in lengths if found]) for beam in beams}
    return length_bias(by_beam, np.array([s.reference_length for s in records.sentences]))


def length_bias(lengths: Mapping[str, Integers], reference: Integers) -> dict[str, Any]:
    """For every beam size the output length relative to the reference, summed over sentences.

    A wider beam finds more probable outputs. With label smoothing these are shorter (Liang et al.
    2022), which a comparison at one beam size does not show.
    """
    total = int(reference.sum())
    return {
        "beams": {
            beam: {"ratio": float(lengths[beam].sum() / total) if total else None}
            for beam in sorted(lengths, key=int)
        }
    }


# ------------------------------------------------------------------ variants by part


def _frequency(group: Group, part_size: int | None) -> dict[str, Any]:
    """By the frequencies of the first reference: the parts are the same sentences for all runs."""
    first = next(iter(group.references[0].members.values()))
    records: Translations = first.records(group.split)
    parts = frequency_parts(records.frequency, part_size)
    scores = {member: _part_bleu(member, group.split, parts) for member in group.members}

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
        "rule": rule(part_size),
        "references": [reference.label for reference in group.references],
        "sizes": {part: len(index) for part, index in parts.items()},
        "left_over": len(records) - sum(len(index) for index in parts.values()),
        "mean_frequency": {part: _mean(records.frequency[index]) for part, index in parts.items()},
        "rows": rows,
    }


def _part_bleu(
    member: Member, split: str, parts: Mapping[str, Integers]
) -> dict[str, float | None]:
    records: Translations = member.records(split)
    signature = bleu_signature(member.run)
    return bleu_by_part(records.hypotheses, records.references, parts, signature)
