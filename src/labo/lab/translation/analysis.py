"""The analysis of one split of a translation model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis.reading import Forced, Run, Tempered, Translations, floored_log, read_translations
from ..analysis.views import verdict, view
from .alignment import matched_tokens
from .confidence import chosen_probabilities
from .frequency import bleu_by_part, bleu_metric, frequency_parts, rule
from .lengths import length_bias


def translation_split(
    run: Run, split: str, part_size: int | None, notes: list[str]
) -> dict[str, Any]:
    """A SPLIT, as :mod:`labo.lab.analysis.run` describes it.

    Args:
        run: the run.
        split: "valid" or "test".
        part_size: sentences of each part by frequency; thirds if not given.
        notes: gets a sentence for what could not be done.
    """
    records, signature = read_translations(run, split), bleu_signature(run)
    metric = bleu_metric(signature)
    views = {}
    for name, made in {"forced": forced_view(records), "decoded": decoded_view(records)}.items():
        if made is None:
            notes.append(f"the {split} records hold no {name} token")
        else:
            views[name] = made
    temperature = None
    if split == "test" and "forced" in views:
        temperature, after = _tempered(run, records, notes)
        views |= {} if after is None else {"forced_after": after}
    hypotheses, references = records.hypotheses, records.references
    parts = frequency_parts(records.frequency, part_size)
    part_bleu = bleu_by_part(hypotheses, references, parts, signature)
    names = np.array([sentence.pair for sentence in records.sentences])
    pairs = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
    pair_bleu = bleu_by_part(hypotheses, references, pairs, signature)
    said = {
        "forced": "given the reference so far",
        "decoded": "on its own output",
        "forced_after": "after one temperature, given the reference so far,",
    }
    return {
        "examples": len(records),
        "views": views,
        "temperature": temperature,
        "verdict": f"{run.method['name']}: "
        + "; ".join(f"{said[name]} it {verdict(made)}" for name, made in views.items()),
        "bleu": float(metric.corpus_score(hypotheses, [references]).score),
        "bleu_signature": str(metric.get_signature()),
        "pairs": {
            name: {"examples": len(index), "bleu": pair_bleu[name]} for name, index in pairs.items()
        },
        "frequency": {
            "rule": rule(part_size),
            "left_over": len(records) - sum(len(index) for index in parts.values()),
            **{
                part: {
                    "examples": len(index),
                    "mean_frequency": mean_or_none(records.frequency[index]),
                    "bleu": part_bleu[part],
                }
                for part, index in parts.items()
            },
        },
        "confidence": chosen_probabilities(records.probabilities, parts),
        "lengths": _lengths(records, notes),
    }


def bleu_signature(run: Run) -> str | None:
    """How the run itself was scored."""
    signature = ((run.results or {}).get("sacrebleu") or {}).get("bleu")
    return None if signature is None else str(signature)


def forced_view(records: Translations) -> dict[str, Any] | None:
    """A VIEW of the reference tokens, each given the true ones before it; None without any."""
    forced = [sentence.forced for sentence in records.sentences]
    if not any(one.tokens for one in forced):
        return None
    entropy = float(np.concatenate([one.entropy for one in forced]).mean())
    return _token_view(forced, forced, {"entropy": entropy})


def _token_view(
    forced: Sequence[Forced],
    said: Sequence[Forced | Tempered],
    further: Mapping[str, float],
) -> dict[str, Any]:
    """A VIEW of what was said of reference tokens."""
    units = np.repeat(np.arange(len(forced)), [len(one.tokens) for one in forced])
    confidence = np.concatenate([one.confidence for one in said])
    right = np.concatenate([one.right for one in forced])
    return view(confidence, right, units, {"nll": _nll(said), **further})


def _nll(said: Sequence[Forced | Tempered]) -> float:
    return float(-floored_log(np.concatenate([one.probabilities for one in said])).mean())


def _tempered(
    run: Run, records: Translations, notes: list[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The temperature that the evaluation fitted, and a VIEW of what it makes of the records."""
    forced = [sentence.forced for sentence in records.sentences]
    tempered = [one.tempered for one in forced if one.tempered]
    if len(tempered) < len(forced):
        notes.append(
            "the records have no temperature: labo evaluate writes one, if one from 1/8 to 8 fits"
        )
        return None, None
    valid = read_translations(run, "valid").sentences if "valid" in run.splits() else []
    before = [sentence.forced for sentence in valid]
    after = [one.tempered for one in before if one.tempered]
    temperature = {
        "value": tempered[0].temperature,
        "fitted_on": "valid",
        "examples": len(valid) or None,
        "nll_before": _nll(before) if before else None,
        "nll_after": _nll(after) if after else None,
    }
    return temperature, _token_view(forced, tempered, {})


def decoded_view(records: Translations) -> dict[str, Any] | None:
    """A VIEW of the tokens that were put out, right if aligned with the reference."""
    units = np.repeat(np.arange(len(records)), [len(p) for p in records.probabilities])
    if len(units) == 0:
        return None
    right = [matched_tokens(s.tokens, s.forced.tokens) for s in records.sentences]
    return view(np.concatenate(records.probabilities), np.concatenate(right), units)


def mean_or_none(values: Any) -> float | None:
    """The mean, or None of nothing."""
    return float(np.mean(values)) if len(values) else None


def _lengths(records: Translations, notes: list[str]) -> dict[str, Any] | None:
    lengths = [sentence.lengths for sentence in records.sentences]
    beams = set.intersection(*(set(found or ()) for found in lengths))
    if not beams:
        notes.append("output lengths by beam size are not in the records")
        return None
    by_beam = {beam: np.array([found[beam] for found in lengths if found]) for beam in beams}
    return length_bias(by_beam, np.array([s.reference_length for s in records.sentences]))
