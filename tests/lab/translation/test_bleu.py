"""BLEU and chrF: against sacrebleu's own command and against BLEU written out."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labo.lab.translation import bleu

HYPOTHESES = [
    "The dog bit the man.",
    "It wasn't surprising, &quot;he&quot; said.",
    "The man had just bitten him on 3.5 May",
]
REFERENCES = [
    "The dog bit the man.",
    "It was not unexpected, &quot;he&quot; said.",
    "the man had bitten the dog on 3.5 May.",
]


def plain_bleu(hypotheses: list[str], references: list[str]) -> float:
    """Corpus BLEU-4 as its paper defines it."""
    matched, total, lengths = [0] * 4, [0] * 4, [0, 0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        h, r = hypothesis.split(), reference.split()
        lengths = [lengths[0] + len(h), lengths[1] + len(r)]
        for n in range(4):
            said, wanted = (
                Counter(tuple(words[i : i + n + 1]) for i in range(len(words) - n))
                for words in (h, r)
            )
            matched[n] += sum((said & wanted).values())
            total[n] += sum(said.values())
    if 0 in matched:
        return 0.0
    precision = sum(math.log(m / t) for m, t in zip(matched, total, strict=True)) / 4
    return 100 * math.exp(precision + min(0, 1 - lengths[1] / lengths[0]))


sentence = st.lists(st.sampled_from(["a", "b", "c", "&apos;s", "@-@", "."]), max_size=9).map(
    " ".join
)


@given(st.lists(st.tuples(sentence, sentence), min_size=1, max_size=8))
def test_tokenized_bleu_is_bleu_written_out(lines):
    hypotheses, references = (list(side) for side in zip(*lines, strict=True))
    assert bleu.tokenized_bleu(hypotheses, references) == pytest.approx(
        plain_bleu(hypotheses, references)
    )


def test_tokenized_bleu_tokenizes_nothing():
    """With a tokenizer the full stop would be a word of its own, and five words would match."""
    assert bleu.tokenized_bleu(["a b c d."], ["a b c d."]) == pytest.approx(100)
    assert bleu.tokenized_bleu(["a b c d."], ["a b c d ."]) == 0


def test_an_unknown_word_of_the_reference_is_never_matched():
    known = bleu.tokenized_bleu(["a b c d e f"], ["a b c d e x"])
    assert bleu.tokenized_bleu(["a b c d e <unk>"], ["a b c d e <unk>"]) == pytest.approx(known)
    assert known < 90


@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_and_signatures_are_those_of_the_command(lowercase, tmp_path):
    said, wanted = tmp_path / "said", tmp_path / "wanted"
    said.write_text("\n".join(HYPOTHESES) + "\n")
    wanted.write_text("\n".join(REFERENCES) + "\n")
    command = [sys.executable, "-m", "sacrebleu", str(wanted), "-i", str(said)]
    command += ["-m", "bleu", "chrf", "--width", "6", "--force"]
    command += ["-lc", "--chrf-lowercase"] * lowercase
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = {row["name"].lower().rstrip("2"): row for row in json.loads(done.stdout)}
    found = bleu.scores(HYPOTHESES, REFERENCES, lowercase)
    assert found["bleu"] == pytest.approx(printed["bleu"]["score"], abs=1e-5)
    assert found["chrf"] == pytest.approx(printed["chrf"]["score"], abs=1e-5)
    for name, signature in bleu.signatures(lowercase).items():
        assert signature == re.sub(r"\s", "", printed[name]["signature"])


def test_text_that_looks_tokenized_is_scored_without_remark(caplog):
    lines = ["a b c ."] * 200
    bleu.scores(lines, lines, lowercase=False)
    assert caplog.text == ""
