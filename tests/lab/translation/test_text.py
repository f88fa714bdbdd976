"""Text to subwords and back: the recipes' steps, byte-pair encoding of both kinds, tokenizers."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from labo.lab.errors import DataError
from labo.lab.translation.text import (
    SPECIAL_TOKENS,
    Merges,
    Pipeline,
    Size,
    TextOptions,
    encode,
    languages_without_moses_rules,
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
MOSES = TextOptions(moses=True)


def pieces(tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


def words(lines=LINES, **size) -> Merges:
    return learn_merges(lambda: lines, words=True, size=Size(**size), reserved=4)


# The pipeline -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "text", "tokenized"),
    [
        # the examples of sacremoses' own documentation and tests
        (
            "en",
            "This, is a sentence with weird» symbols… appearing everywhere¿",
            "This , is a sentence with weird » symbols … appearing everywhere ¿",
        ),
        (
            "en",
            "This ain't funny. It's actually hillarious, yet double Ls. | [] < > [ ] & You're "
            "gonna shake it off? Don't?",
            "This ain &apos;t funny . It &apos;s actually hillarious , yet double Ls . &#124; "
            "&#91; &#93; &lt; &gt; &#91; &#93; &amp; You &apos;re gonna shake it off ? Don "
            "&apos;t ?",
        ),
        ("en", "It costs 5,300 dollars, Mr. Smith.", "It costs 5,300 dollars , Mr. Smith ."),
        ("fr", "L'amitié nous a fait forts.", "L&apos; amitié nous a fait forts ."),
        ("de", "Er kam am 3. Mai um 8 Uhr.", "Er kam am 3. Mai um 8 Uhr ."),
    ],
)
def test_moses_tokenization_is_that_of_sacremoses(language, text, tokenized):
    assert Pipeline(MOSES, language, language).source(text) == tokenized


@pytest.mark.parametrize(
    ("text", "tokenized"),
    [("Er wurde 70.", "Er wurde 70 ."), ("in the U.S.", "in the U.S ."), ("well...", "well ...")],
)
def test_the_last_period_ends_the_sentence_as_in_the_perl_script(text, tokenized):
    assert Pipeline(MOSES, "de", "de").source(text) == tokenized


def test_each_step_of_the_pipeline():
    def run(text: str, **options: bool) -> str:
        return Pipeline(TextOptions(**options), "en", "en").source(text)

    assert run("  A  B\u2019s \t") == "A  B\u2019s"
    assert run("B\u2019s", straight_apostrophes=True) == "B's"
    assert run("ÄB", lowercase=True) == "äb"
    assert run("„A“ \u2013 it\u2019s", normalize_punctuation=True) == '"A" - it\'s'
    assert run("a\u200bb\x07c", remove_nonprinting=True) == "a b c"
    assert run("well-known", moses=True) == "well-known"
    assert run("well-known", moses=True, aggressive_hyphens=True) == "well @-@ known"
    assert run(" it &apos;s  so ", tokenized=True) == "it &apos;s so"


def test_the_pipeline_uses_the_rules_of_each_language():
    pipeline = Pipeline(MOSES, "fr", "en")
    assert pipeline.source("l'homme") == "l&apos; homme"
    assert pipeline.target("it's") == "it &apos;s"
    assert pipeline.restore("it &apos;s &quot; good &quot; .") == 'it\'s "good".'
    assert pipeline.restore_source("l&apos; homme") == "l'homme"


@pytest.mark.parametrize(
    "text",
    ["It's a well-known fact, isn't it?", 'He said: "No & yes" (twice).', "3.5 % of $5,300!"],
)
def test_restore_inverts_moses(text):
    pipeline = Pipeline(TextOptions(moses=True, aggressive_hyphens=True), "en", "en")
    assert pipeline.restore(pipeline.target(text)).replace(" %", "%") == text.replace(" %", "%")


@given(st.text())
def test_running_text_only_loses_the_spaces_at_its_ends(text):
    pipeline = Pipeline(TextOptions(), "de", "en")
    assert pipeline.source(text) == pipeline.restore(text) == text.strip()


@given(st.text(alphabet="aB1.,-'\u2019\"&<|[]  \t\u00a0\u2009äÉ…"))
def test_tokenized_text_has_single_spaces_and_no_bare_markup(text):
    line = Pipeline(TextOptions(moses=True, normalize_punctuation=True), "en", "en").source(text)
    assert line == " ".join(line.split(" ")) == line.strip()
    assert not set(line) & set("<>|[]'\"")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moses": True, "tokenized": True}, "must not be tokenized already"),
        ({"aggressive_hyphens": True}, "an option of moses"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        TextOptions(**options)


def test_languages_that_moses_does_not_know():
    assert languages_without_moses_rules(["de", "en", "uk", "ja"]) == {"uk"}


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
    monkeypatch.setattr("labo.lab.translation.text._MOST_LEARNED", 2)
    few = learn()
    assert few.alphabet == whole.alphabet
    assert {a.strip("Ġ") + b for a, b in few.merges} < {a.strip("Ġ") + b for a, b in whole.merges}
    assert not set("efghxy") & set("".join(a + b for a, b in few.merges).replace("</w>", ""))
    monkeypatch.setattr(
        "labo.lab.translation.text._MOST_COUNTED", 3
    )  # forgets ef and gh on the way
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


@pytest.mark.parametrize("compress", [False, True])
def test_published_merges_split_as_subword_nmt_does(tmp_path, compress):
    path = tmp_path / "codes"
    path.write_bytes(gzip.compress(CODES.encode()) if compress else CODES.encode())
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
        ("", r"codes:1: "),
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


KNOWN = sorted({character for line in LINES for word in line.split() for character in word[:-1]})


@given(st.lists(st.text(alphabet=KNOWN).map(lambda inside: inside + "e"), min_size=1))
def test_tokens_of_known_characters_come_back_with_single_spaces(tokens):
    ids = WORDS("  ".join(tokens)).input_ids
    assert WORDS.decode(ids, skip_special_tokens=True) == " ".join(tokens)


def test_unknown_characters_become_unknown_tokens():
    assert pieces(WORDS, "ж .") == ["<unk>", ".</w>", "</s>"]


def test_special_tokens_have_the_ids_of_fairseq_and_tags_follow():
    assert BYTES.convert_tokens_to_ids([*SPECIAL_TOKENS, "<de>", "<fr>"]) == [0, 1, 2, 3, 4, 5]
    assert (BYTES.bos_token_id, BYTES.pad_token_id) == (0, 1)
    assert (BYTES.eos_token_id, BYTES.unk_token_id) == (2, 3)


def test_a_tag_at_the_head_of_a_text_is_the_tag():
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
