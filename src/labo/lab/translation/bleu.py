"""Corpus scores of translations, all computed by sacrebleu.

There are two BLEU scores. *sacreBLEU* is computed on detokenized text and can be compared between
papers. *Tokenized* BLEU is computed on the Moses tokens the model was trained on; fairseq-generate
prints it and the paper reports it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from ..analysis.reading import Floats
from ..analysis.significance import example_draws
from ..errors import RequestError
from .text import Pipeline

_UNKNOWN = "<unk>"
# fairseq replaces <unk> in a reference by this, so that no hypothesis matches it.
_UNMATCHED = "<<unk>>"


def scores(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool
) -> dict[str, float]:
    """``bleu`` and ``chrf`` of detokenized text, from 0 to 100.

    Example:
        >>> found = scores(["the cat sat on the mat"], ["the cat sat on a mat"], lowercase=False)
        >>> {name: round(value, 1) for name, value in found.items()}
        {'bleu': 53.7, 'chrf': 72.1}
    """
    bleu, chrf = _metrics(lowercase)
    return {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
    }


def scores_with_tokens(
    hypotheses: Sequence[str], references: Sequence[str], pipelines: Sequence[Pipeline]
) -> dict[str, float]:
    """``bleu``, ``chrf`` and ``tokenized_bleu`` of plain text, given the pipeline of each line."""
    found = scores(hypotheses, references, pipelines[0].options.lowercase)
    sides = (
        [pipeline.tokens(line) for pipeline, line in zip(pipelines, lines, strict=True)]
        for lines in (hypotheses, references)
    )
    return found | {"tokenized_bleu": tokenized_bleu(*sides)}


def signatures(lowercase: bool) -> dict[str, str]:
    """The sacrebleu signatures of what ``scores`` computes: ``bleu`` and ``chrf``.

    Example:
        >>> signatures(lowercase=True)["bleu"].rpartition("|")[0]
        'nrefs:1|case:lc|eff:no|tok:13a|smooth:exp'
    """
    signed = {}
    for name, metric in zip(("bleu", "chrf"), _metrics(lowercase), strict=True):
        metric.corpus_score([""], [[""]])  # the signature includes the number of references seen
        signed[name] = str(metric.get_signature())
    return signed


def tokenized_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU-4 of text whose tokens are split by spaces, without smoothing, from 0 to 100.

    An ``<unk>`` in a reference matches nothing.

    Example:
        >>> round(tokenized_bleu(["a b c d <unk> f"], ["a b c d <unk> f"]), 1)
        53.7
    """
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    matchable = [
        " ".join(_UNMATCHED if token == _UNKNOWN else token for token in line.split())
        for line in references
    ]
    return metric.corpus_score(hypotheses, [matchable]).score


def bleu_metric(signature: str | None = None) -> BLEU:
    """sacrebleu's BLEU with the tokenization and casing of a signature.

    Example:
        >>> bleu_metric("nrefs:1|case:lc|eff:no|tok:intl|smooth:exp").lowercase
        True
    """
    parts = dict(part.split(":", 1) for part in (signature or "").split("|") if ":" in part)
    tokenizer = parts.get("tok")
    if tokenizer is not None and tokenizer not in BLEU.TOKENIZERS:
        raise RequestError(f"sacrebleu has no tokenizer {tokenizer!r} (signature {signature})")
    # force: no warning about text that looks tokenized
    return BLEU(lowercase=parts.get("case") == "lc", tokenize=tokenizer, force=True)


def bootstrap_bleu(
    hypotheses: Sequence[str], references: Sequence[str], signature: str | None = None
) -> Floats:
    """(1 + B,) corpus BLEU of all sentences and of each draw of the bootstrap over sentences.

    Example:
        >>> text = ["one two three four five", "six seven eight nine ten"]
        >>> bootstrap_bleu(text, text).shape, round(float(bootstrap_bleu(text, text)[0]), 6)
        ((1001,), 100.0)
    """
    metric = bleu_metric(signature)
    # Corpus BLEU is a function of sums over sentences: those of a draw are products of matrices.
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        score = metric.corpus_score([hypothesis], [[reference]])
        rows.append([score.sys_len, score.ref_len, *score.counts, *score.totals])
    every = np.ones((1, len(rows)), dtype=np.int64)
    sums = np.concatenate([every, example_draws(len(rows))]).astype(np.float64) @ np.array(rows)
    order = metric.max_ngram_order
    scores = [
        BLEU.compute_bleu(
            correct=row[2 : 2 + order],
            total=row[2 + order :],
            sys_len=row[0],
            ref_len=row[1],
            smooth_method=metric.smooth_method,
            smooth_value=metric.smooth_value,
            effective_order=metric.effective_order,
            max_ngram_order=order,
        ).score
        for row in sums.astype(np.int64).tolist()
    ]
    return np.array(scores)


def _metrics(lowercase: bool) -> tuple[BLEU, CHRF]:
    # force: no warning about text that looks tokenized
    return BLEU(lowercase=lowercase, force=True), CHRF(lowercase=lowercase)
