"""Byte-pair encoding of both kinds, and the tokenizers made of it."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labo.lab.errors import DataError
from labo.lab.text.subwords import (
    SPECIAL_TOKENS,
    Merges,
    Size,
    encode,
    learn_merges,
    make_tokenizer,
    read_codes,
    restrict,
)

LINES = [
    "der kleine hund läuft über die wiese .",
    "die kleine katze schläft auf der wiese .",
    "the little dog runs over the meadow .",
    "the little cat sleeps on the meadow .",
] * 3


def pieces(tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


def words(lines=LINES, **size) -> Merges:
    return learn_merges(lambda: lines, words=True, size=Size(**size), reserved=4)


# Byte-pair encoding -----------------------------------------------------------------------------


def test_the_pair_that_occurs_most_is_merged_first():
    learned = words(["ab ab ab cd cd ef"], merges=10)
    assert learned.merges == (("a", "b</w>"), ("c", "d</w>"))  # ef occurs once
    assert learned.alphabet == ("a", "b</w>", "c", "d</w>", "e", "f</w>")


def test_merges_do_not_depend_on_the_order_of_the_lines_nor_on_the_run():
    shuffled = random.Random(1).sample(LINES, len(LINES))
    assert len({words(lines, merges=60) for lines in (LINES, LINES, LINES, shuffled)}) == 1
    lines = ["".join(pair) for pair in zip("abcdefgh" * 2, "hgfedcba" * 2, strict=True)]  # all ties
    assert len({words(lines, merges=8) for _ in range(5)}) == 1


@pytest.mark.parametrize(("is_words", "types"), [(True, 60), (False, 300)])
def test_the_size_of_the_vocabulary_is_exact(is_words, types):
    def learn(size: Size) -> Merges:
        return learn_merges(lambda: LINES, words=is_words, size=size, reserved=5)

    assert len(make_tokenizer(learn(Size(vocabulary=types)), ["<de>"])) == types
    assert len(learn(Size(merges=7)).merges) == 7


@pytest.mark.parametrize("is_words", [True, False])
def test_of_too_many_words_the_most_frequent_are_learned_from(monkeypatch, is_words):
    def learn() -> Merges:
        lines = ["ab ab ab", "cd cd", "ef", "gh xyxy", "cd ef"]
        return learn_merges(lambda: lines, words=is_words, size=Size(merges=9), reserved=4)

    whole = learn()
    monkeypatch.setattr("labo.lab.text.subwords._MOST_LEARNED", 2)
    few = learn()
    assert few.alphabet == whole.alphabet
    assert {a.strip("Ġ") + b for a, b in few.merges} < {a.strip("Ġ") + b for a, b in whole.merges}
    assert not set("efghxy") & set("".join(a + b for a, b in few.merges).replace("</w>", ""))
    monkeypatch.setattr("labo.lab.text.subwords._MOST_COUNTED", 3)  # forgets ef and gh on the way
    assert learn() == few


def test_a_vocabulary_smaller_than_the_alphabet_is_refused():
    with pytest.raises(DataError, match="vocabulary of 100 cannot hold the 256 symbols"):
        learn_merges(lambda: LINES, words=False, size=Size(vocabulary=100), reserved=4)


def test_private_characters_in_a_text_are_not_mixed_up_with_stand_ins():
    private = "\U000f0000\U000f0001"
    learned = words([f"{private}a {private}b"] * 3, merges=5)
    assert make_tokenizer(learned, []).decode(
        make_tokenizer(learned, [])(f"{private}b").input_ids, skip_special_tokens=True
    ) == (f"{private}b")


CODES = "#version: 0.2\nl o\nlo w</w>\ne r</w>\nn e\nl o\n"


def test_published_merges_split_as_subword_nmt_does(tmp_path):
    path = tmp_path / "codes.gz"
    path.write_bytes(gzip.compress(CODES.encode()))
    tokenizer = make_tokenizer(read_codes(path, lambda: ["low lower newer x"]), [])
    # by hand: the first merge of the list that applies, until none does
    assert pieces(tokenizer, "low")[:-1] == ["low</w>"]
    assert pieces(tokenizer, "lower")[:-1] == ["lo", "w", "er</w>"]
    assert pieces(tokenizer, "newer")[:-1] == ["ne", "w", "er</w>"]
    assert pieces(tokenizer, "lo")[:-1] == ["l", "<unk>"]  # no word ended in o
    assert pieces(tokenizer, "x low")[:-1] == ["x</w>", "low</w>"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("l o\n", r"codes:1: merges of subword-nmt begin with '#version: 0.2'"),
        ("#version: 0.2\nl o\nl o w\n", r"codes:3: not a merge of two symbols: 'l o w'"),
    ],
)
def test_files_that_are_no_merges_are_refused(tmp_path, text, message):
    (tmp_path / "codes").write_text(text)
    with pytest.raises(DataError, match=message):
        read_codes(tmp_path / "codes", lambda: [])


@pytest.mark.parametrize("is_words", [True, False])
def test_a_restricted_vocabulary_splits_its_own_text_as_before(is_words):
    size = Size(merges=80)
    whole = learn_merges(lambda: LINES, words=is_words, size=size, reserved=4)
    german = [line for line in LINES if "the" not in line.split()]
    full = make_tokenizer(whole, [])
    used = {piece for line in german for piece in pieces(full, line)}
    part = restrict(whole, used)
    small = make_tokenizer(part, [])
    assert len(small) < len(full)
    assert [pieces(small, line) for line in german] == [pieces(full, line) for line in german]
    assert set(part.alphabet) == set(whole.alphabet) or is_words


# Tokenizers -------------------------------------------------------------------------------------

BYTES = make_tokenizer(
    learn_merges(lambda: LINES, words=False, size=Size(vocabulary=330), reserved=6),
    ["<de>", "<fr>"],
)
WORDS = make_tokenizer(words(merges=40), [])


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@example("</s> <s><unk> <pad>")
@example("  \t\r\n\u2028 日本 🏴\u200d☠ ")
@settings(max_examples=200)
def test_any_running_text_comes_back_exactly(text):
    if "<de>" not in text and "<fr>" not in text:
        ids = BYTES(text).input_ids
        assert BYTES.decode(ids, skip_special_tokens=True) == text
        assert ids[-1] == 2
        assert 3 not in ids
        assert not {0, 1, 2} & set(ids[:-1])


def test_tokens_come_back_with_single_spaces_and_unknown_characters_are_unknown():
    ids = WORDS("der  kleine\thund .").input_ids
    assert WORDS.decode(ids, skip_special_tokens=True) == "der kleine hund ."
    assert pieces(WORDS, "ж .") == ["<unk>", ".</w>", "</s>"]


def test_special_tokens_have_the_ids_of_fairseq_and_tags_follow():
    assert BYTES.convert_tokens_to_ids([*SPECIAL_TOKENS, "<de>", "<fr>"]) == [0, 1, 2, 3, 4, 5]
    assert (BYTES.bos_token_id, BYTES.pad_token_id) == (0, 1)
    assert (BYTES.eos_token_id, BYTES.unk_token_id) == (2, 3)
    # A tag at the head of a text is the tag.
    plain = BYTES("der hund").input_ids
    assert BYTES("<de> der hund").input_ids == BYTES("<de>der hund").input_ids == [4, *plain]


def test_a_text_full_of_markup_does_not_make_special_tokens_by_merging():
    lines = ["a <s> b </s> <pad> <unk> c"] * 20
    for is_words in (True, False):
        learned = learn_merges(lambda: lines, words=is_words, size=Size(merges=60), reserved=4)
        tokenizer = make_tokenizer(learned, [])
        ids = tokenizer(lines[0]).input_ids
        assert not {0, 1, 2, 3} & set(ids[:-1])
        assert tokenizer.decode(ids, skip_special_tokens=True) == lines[0]
        assert len(set(tokenizer.get_vocab().values())) == len(tokenizer)


def test_encode_gives_what_the_saved_tokenizer_gives(tmp_path: Path):
    from transformers import AutoTokenizer

    for number, tokenizer in enumerate((BYTES, WORDS)):
        tokenizer.save_pretrained(tmp_path / str(number))
        loaded = AutoTokenizer.from_pretrained(tmp_path / str(number))
        texts = [*LINES[:4], "", "</s> ж"]
        assert [loaded(text).input_ids for text in texts] == list(encode(tokenizer, texts))
