"""Which tokens of a translation are right: those that are aligned with an equal reference token.

A decoded token has no label. As in inference calibration (Wang et al. 2020) it counts as right if
an alignment of minimum edit distance (insertion, deletion, substitution, cost 1 each) matches it
with an equal token of the reference. Wang et al. use TER, which can also shift blocks of words at
cost 1. Here nothing is shifted, so a right word at a wrong position counts as wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..analysis.reading import Booleans


def matched_tokens(hypothesis: Sequence[str], reference: Sequence[str]) -> Booleans:
    """(len(hypothesis),) the tokens that a minimum edit-distance alignment matches.

    Of several such alignments one with the most matches is chosen, of several of these always the
    same one.

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
