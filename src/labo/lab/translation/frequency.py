r"""Sentences of frequent and of rare words: the paper's frequency score and BLEU per part.

.. math:: F(x) = \frac1N \sum_i f(x_i)

with f(x_i) the count of a source token in the training corpus. In order of falling F the sentences
are cut into the parts most, medium and least. The paper cuts slices of 2400, which leaves 83
sentences of its validation set over, and makes the last part of its test set 450 short; equal
thirds are the default here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis.reading import Floats, Integers

PARTS = ("most", "medium", "least")


def frequency_score(tokens: Sequence[int], counts: Sequence[int] | Integers) -> float:
    """F(x) of one sentence.

    Args:
        tokens: ids of the source tokens, at least one.
        counts: of each id, over the training corpus.

    Example:
        >>> frequency_score([0, 2, 2], counts=[100, 50, 10])
        40.0
    """
    return float(np.asarray(counts)[np.asarray(tokens)].mean())


def frequency_parts(scores: Floats, size: int | None = None) -> dict[str, Integers]:
    """Cut sentences into most, medium and least frequent.

    Args:
        scores: (N,) F(x) of each sentence.
        size: sentences of a part, literally as in the paper (2400): what is left over is dropped,
            and the last part may be short. Equal thirds if not given.

    Returns:
        part -> indices of its sentences, in order of falling score; of equal scores the first
        comes first.

    Example:
        >>> frequency_parts(np.array([5.0, 9.0, 7.0, 1.0, 9.0]))
        {'most': array([1, 4]), 'medium': array([2, 0]), 'least': array([3])}
    """
    order = np.argsort(-scores, kind="stable")
    if size is None:
        cut = np.array_split(order, len(PARTS))
    else:
        cut = [order[size * part : size * (part + 1)] for part in range(len(PARTS))]
    return dict(zip(PARTS, cut, strict=True))


def rule(size: int | None) -> str:
    """How :func:`frequency_parts` cut, in words."""
    return "thirds" if size is None else f"slices of {size}"


def bleu_metric(signature: str | None = None) -> Any:
    """sacrebleu's BLEU, tokenizing and casing as the signature of a run says.

    Args:
        signature: such as "nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:2.6.0".

    Example:
        >>> bleu_metric("nrefs:1|case:lc|eff:no|tok:intl|smooth:exp").lowercase
        True
    """
    from sacrebleu.metrics.bleu import BLEU

    said = dict(part.split(":", 1) for part in (signature or "").split("|") if ":" in part)
    # force: no remark about text that looks tokenized
    return BLEU(lowercase=said.get("case") == "lc", tokenize=said.get("tok"), force=True)


def bleu_by_part(
    hypotheses: Sequence[str],
    references: Sequence[str],
    parts: Mapping[str, Integers],
    signature: str | None = None,
) -> dict[str, float | None]:
    """Corpus BLEU of each part of the sentences; None of a part without any.

    Args:
        hypotheses: (N,).
        references: (N,).
        parts: name -> indices, as from :func:`frequency_parts`.
        signature: as for :func:`bleu_metric`.

    Example:
        >>> text = ["one two three four", "five six seven eight", "a b c d"]
        >>> parts = frequency_parts(np.array([3.0, 2.0, 1.0]))
        >>> bleu_by_part(text[:2] + ["w x y z"], text, parts)["least"]
        0.0
    """
    metric = bleu_metric(signature)

    def score(index: Integers) -> float | None:
        if len(index) == 0:
            return None
        chosen = [hypotheses[i] for i in index]
        return float(metric.corpus_score(chosen, [[references[i] for i in index]]).score)

    return {part: score(index) for part, index in parts.items()}


def differences(
    ours: Mapping[str, float | None], theirs: Mapping[str, float | None]
) -> dict[str, float | None]:
    """ours - theirs, part by part; None where one of them is.

    Example:
        >>> differences({"most": 40.5, "least": None}, {"most": 40.0, "least": 33.0})
        {'most': 0.5, 'least': None}
    """
    return {
        part: None if value is None or (other := theirs.get(part)) is None else value - other
        for part, value in ours.items()
    }
