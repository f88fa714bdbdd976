"""Corpus scores of translations, all computed by sacrebleu.

Two BLEUs that must not be mixed up: *sacreBLEU*, on detokenized text, which is comparable between
papers; and *tokenized* BLEU, on the Moses tokens the model was trained on, which is what
fairseq-generate prints and the paper reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from ..errors import RequestError

_UNKNOWN = "<unk>"
# What fairseq puts in the place of <unk> in a reference, so that no hypothesis matches it.
_UNMATCHED = "<<unk>>"


def scores(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool
) -> dict[str, float]:
    """BLEU and chrF of detokenized text, from 0 to 100.

    Args:
        hypotheses: what the model said, one line each.
        references: what it should have said.
        lowercase: whether case is to be ignored, as it must be for a model that has none.

    Returns:
        ``bleu`` and ``chrf``.

    Example:
        >>> found = scores(["the cat sat on the mat"], ["the cat sat on a mat"], lowercase=False)
        >>> {name: round(value, 1) for name, value in found.items()}
        {'bleu': 53.7, 'chrf': 72.1}
    """
    _check(hypotheses, references)
    bleu, chrf = _metrics(lowercase)
    return {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
    }


def signatures(lowercase: bool) -> dict[str, str]:
    """What ``scores`` computed, in sacrebleu's own words: ``bleu`` and ``chrf``.

    Example:
        >>> signatures(lowercase=True)["bleu"].rpartition("|")[0]
        'nrefs:1|case:lc|eff:no|tok:13a|smooth:exp'
    """
    found = {}
    for name, metric in zip(("bleu", "chrf"), _metrics(lowercase), strict=True):
        metric.corpus_score([""], [[""]])  # a metric knows how many references only afterwards
        found[name] = str(metric.get_signature())
    return found


def tokenized_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU-4 of text whose tokens are split by spaces, without smoothing, from 0 to 100.

    Args:
        hypotheses: tokenized (and lowercased, if the model is), subwords joined.
        references: likewise. An ``<unk>`` in them is matched by nothing.

    Example:
        >>> round(tokenized_bleu(["a b c d <unk> f"], ["a b c d <unk> f"]), 1)
        53.7
    """
    _check(hypotheses, references)
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    matchable = [
        " ".join(_UNMATCHED if token == _UNKNOWN else token for token in line.split())
        for line in references
    ]
    return metric.corpus_score(hypotheses, [matchable]).score


def _metrics(lowercase: bool) -> tuple[BLEU, CHRF]:
    # force: no remark about text that looks tokenized
    return BLEU(lowercase=lowercase, force=True), CHRF(lowercase=lowercase)


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not hypotheses:
        raise RequestError(
            f"{len(hypotheses)} hypotheses for {len(references)} references: BLEU needs as many of "
            "the one as of the other, and at least one"
        )
