"""The options of labo prepare, and its presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from labo.lab.errors import RequestError
from labo.lab.translation.options import PREPARE_PRESETS, parse_pairs
from labo.lab.translation.text import TextOptions
from tiny_corpus import ask, labo, refused

CORPUS = Path("corpus")  # is not read
OWN_TOKENIZER = {"vocabulary": None, "tokenizer": "x"}


@pytest.mark.parametrize(
    ("names", "tag", "tags"),
    [
        (["de-en"], None, [None]),
        (["de-en", "fr-en"], None, ["<de>", "<fr>"]),
        (["de-en", "en-de"], None, ["<en>", "<de>"]),
        (["de-en", "fr-en"], "target", ["<en>", "<en>"]),
        (["de-en", "fr-en"], "none", [None, None]),
        (["pt_BR-en"], "source", ["<pt_BR>"]),
    ],
)
def test_tags_name_what_the_model_must_be_told(names, tag, tags):
    pairs = parse_pairs(names, tag)
    assert [str(pair) for pair in pairs] == names
    assert [pair.tag for pair in pairs] == tags


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "wmt"}, "unknown preset 'wmt'; did you mean 'wmt14'"),
        (
            {"pair": ["german-english"]},
            "--pair: each is two languages, .*got german-english",
        ),
        ({"pair": ["de-en", "de-en"]}, "given once; got de-en, de-en"),
        ({"train": []}, "--train: no training data"),
        ({"valid": []}, "--valid: no such data; give --valid or --holdout"),
        ({"holdout": 23}, "--valid and --holdout exclude each other"),
        ({"valid": [], "holdout": 1}, "leaves none to train on"),
        ({"merges": 9}, "--vocabulary and --merges exclude each other"),
        ({"vocabulary": None, "codes": "x"}, "they need --moses, or text that is --tokenized"),
        ({"tokenizer": "x"}, "--vocabulary and --tokenizer exclude each other"),
        ({**OWN_TOKENIZER, "moses": True}, "^--tokenizer takes running text, without --moses"),
        ({**OWN_TOKENIZER, "share": "merges"}, "^--tokenizer is for both sides: --share must be"),
        ({"prefix": "x"}, "--prefix: only with --tokenizer"),
        ({"max_tokens": -1}, "--max-tokens: .*greater than or equal to 0"),
        ({"aggressive_hyphens": True}, "^--aggressive-hyphens is an option of --moses$"),
        ({"moses": True, "tokenized": True}, "must not be --tokenized already"),
    ],
)
def test_wrong_requests_are_refused(settings, message):
    with refused(message, RequestError):
        ask(CORPUS, **settings)


def test_presets_are_the_recipes():
    fourteen, wmt = (ask(CORPUS, n, valid=None, vocabulary=None) for n in ("iwslt14", "wmt14"))
    assert (fourteen.holdout, fourteen.merges, fourteen.share) == (23, 10_000, "merges")
    assert fourteen.holdout_by == wmt.holdout_by == "pair"
    assert ask(CORPUS).holdout_by == "group"
    assert (fourteen.max_tokens, fourteen.max_ratio) == (175, 1.5)
    assert fourteen.text == TextOptions(moses=True, lowercase=True, straight_apostrophes=True)
    assert fourteen.training_text == TextOptions(moses=True, lowercase=True)
    assert (wmt.holdout, wmt.merges, wmt.max_pieces, wmt.max_piece_ratio) == (100, 40_000, 250, 1.5)
    assert wmt.training_text.normalize_punctuation
    assert not wmt.text.normalize_punctuation
    seventeen = ask(CORPUS, "iwslt17", vocabulary=None)
    assert (seventeen.vocabulary, seventeen.max_pieces, seventeen.share) == (16_384, 250, "all")
    assert not seventeen.text.spaced


@pytest.mark.parametrize("preset", PREPARE_PRESETS)
def test_options_go_over_every_preset(preset):
    options = ask(CORPUS, preset, {"lowercase": True}, vocabulary=500, max_tokens=7)
    assert (options.vocabulary, options.merges, options.holdout) == (500, None, 0)
    assert options.max_tokens == 7
    assert options.text.lowercase
    assert options.training_text.lowercase


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["moses", "tokenized"])
@pytest.mark.parametrize("preset", PREPARE_PRESETS)
def test_text_options_hold_for_training_text_too(preset, name, value):
    text = {name: value} | ({"moses": False, "aggressive_hyphens": False} if value else {})
    if name == "moses":
        text = {"moses": value, "aggressive_hyphens": False}
    options = ask(CORPUS, preset, text, vocabulary=None)
    assert getattr(options.text, name) == getattr(options.training_text, name) == value


@pytest.mark.parametrize("option", ["--vocabulary", "--merges"])
def test_a_vocabulary_that_no_memory_holds_is_refused(tmp_path, capsys, option):
    arguments = ["prepare", str(tmp_path / "out"), "--pair", "de-en", option, str(10**12)]
    assert labo(*arguments, "--train", "x", "--valid", "x", "--test", "x") == 2
    assert f"{option[2:]}: should be less than or equal to 10000000" in capsys.readouterr().err
