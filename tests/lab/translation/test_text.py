"""Raw lines to what the subword model sees, and back: the steps of the public recipes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labo.lab.translation.text import Pipeline, TextOptions, languages_without_moses_rules

MOSES = TextOptions(moses=True)


@pytest.mark.parametrize(
    ("language", "text", "tokenized"),
    [
        # the examples of sacremoses' own documentation and tests
        (
            "en",
            "This ain't funny. It's actually hillarious, yet double Ls. | [] < > [ ] & You're "
            "gonna shake it off? Don't?",
            "This ain &apos;t funny . It &apos;s actually hillarious , yet double Ls . &#124; "
            "&#91; &#93; &lt; &gt; &#91; &#93; &amp; You &apos;re gonna shake it off ? Don "
            "&apos;t ?",
        ),
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


def test_plain_text_of_a_tokenized_corpus_gets_its_tokens_back():
    pipeline = Pipeline(TextOptions(tokenized=True, lowercase=True), "de", "en")
    line = "a &quot; hat &quot; , it &apos;s so ."
    assert pipeline.restore(line) == 'a "hat", it\'s so.'
    assert pipeline.tokens(pipeline.restore(line)) == line
    for options in (MOSES, TextOptions()):
        pipeline = Pipeline(options, "de", "en")
        assert pipeline.tokens("It's so.") == pipeline.target("It's so.")


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


def test_languages_that_moses_does_not_know():
    assert languages_without_moses_rules(["de", "en", "uk", "ja"]) == {"uk"}
