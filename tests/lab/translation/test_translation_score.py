"""``labo score`` of translations, and ``labo evaluate`` on other test sets."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from labo.lab.errors import RequestError
from labo.lab.translation import bleu
from labo.lab.translation.score import evaluate_files, score_pairs
from labo.lab.translation.task import TranslationTask
from labo.lab.translation.text import Pipeline, TextOptions
from labo.lab.translation.translate import Translator
from tiny_corpus import labo
from tiny_translation import byte_folder, save_folder, trained_model, word_tokenizer


@pytest.fixture(scope="module")
def babbler(tmp_path_factory):
    """A model of bytes with a bias in its output layer."""
    return byte_folder(tmp_path_factory.mktemp("babbler") / "best").parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "best"
    return save_folder(folder, trained_model(), word_tokenizer("abcdefghij")).parent


@pytest.fixture
def sides(tmp_path):
    (tmp_path / "t.de").write_text("abc\nde fg\nhi\n")
    (tmp_path / "t.en").write_text("cba\nfg de\nih\n")
    return tmp_path / "t.de", tmp_path / "t.en"


def test_scores_are_those_of_the_model(babbler):
    """Against the logits of each pair alone, without padding."""
    translator = Translator(babbler)
    pairs = [("abc", "the cat"), ("", "x"), ("one two three", "")]
    for (source, target), found in zip(
        pairs, score_pairs(translator, *zip(*pairs, strict=True)), strict=True
    ):
        ids = torch.tensor([translator.tokenizer.encode(target)])
        logits = translator.model(
            torch.tensor([translator.tokenizer.encode(source)]),
            decoder_input_ids=torch.cat([torch.tensor([[2]]), ids[:, :-1]], 1),
        ).logits
        log_p = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).flatten()
        assert found.log_probabilities == pytest.approx(log_p.tolist(), abs=1e-5)
        assert found.tokens[-1] == "</s>"


def test_a_translation_has_the_score_that_the_search_gave_it(trained):
    translator = Translator(trained)
    sources = ["a b c", "d e", "f", "g h", "i a", "b", "c d e f"]
    best = [translation for (translation,) in translator.nbest(sources, 1)]
    found = score_pairs(translator, sources, [translation.text for translation in best])
    # A word that was left unfinished has other tokens when it is read again.
    same = [(f, b) for f, b in zip(found, best, strict=True) if f.tokens == b.tokens]
    assert same
    for score, translation in same:
        expected = [math.log(p) for p in translation.probabilities]
        assert score.log_probabilities == pytest.approx(expected, abs=1e-4)


def test_the_commands(trained, sides, capsys):
    assert labo("score", trained, *sides, "--tokens") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert rows[0]["log_probability"] == pytest.approx(sum(rows[0]["token_log_probability"]), 1e-4)
    assert labo("evaluate", trained, "--source", sides[0], "--reference", sides[1]) == 0
    shown = capsys.readouterr().out
    scores, _ = evaluate_files(trained, *sides)
    said = Translator(trained).translate(sides[0].read_text().splitlines())
    expected = bleu.scores(said, sides[1].read_text().splitlines(), lowercase=False)
    assert {name: scores[name] for name in expected} == expected
    tokens = sum(row["tokens"] for row in rows)
    assert scores["nll"] == pytest.approx(-sum(r["log_probability"] for r in rows) / tokens, 1e-4)
    assert f"{scores['chrf']:.4f}" in shown
    assert "bleu: nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "{run}", "{de}"], "needs two files: SOURCE TARGET"),
        (["score", "{run}", "{de}", "{short}"], "as many lines are needed"),
        (["evaluate", "{run}", "--source", "{de}"], "needs both --source and --reference"),
        (
            ["evaluate", "{run}", "beams=1", "--source", "{de}", "--reference", "{de}"],
            "takes neither --split nor KEY=VALUE",
        ),
    ],
)
def test_wrong_requests(trained, sides, tmp_path, capsys, arguments, message):
    (tmp_path / "short").write_text("a\n")
    names = {"run": trained, "de": sides[0], "short": tmp_path / "short"}
    assert labo(*(text.format(**names) for text in arguments)) == 2
    assert message in capsys.readouterr().err


def test_scores_of_a_tokenized_corpus_are_those_of_its_tokens(trained, tmp_path, monkeypatch):
    pipeline = Pipeline(TextOptions(tokenized=True), "de", "en")
    plain, tokens = "it's so, said he.", "it &apos;s so , said he ."

    class Perfect(Translator):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.pipeline = pipeline

        def translate(self, sources):
            return [plain]

    monkeypatch.setattr("labo.lab.translation.score.Translator", Perfect)
    (tmp_path / "t.de").write_text("a b\n")
    (tmp_path / "t.en").write_text(tokens + "\n")
    scores, _ = evaluate_files(trained, tmp_path / "t.de", tmp_path / "t.en")
    assert [scores[name] for name in ("bleu", "chrf", "tokenized_bleu")] == pytest.approx([100] * 3)


def test_the_tokenized_bleu_of_a_run_on_a_tokenized_corpus():
    pipeline = Pipeline(TextOptions(tokenized=True), "de", "en")
    tokens, other = "a hat , it &apos;s so , said he .", "a hat , it &apos;s so , said he !"

    class Split:
        pair = torch.zeros(1, dtype=torch.int)

        def __len__(self):
            return 1

        def target_text(self, index):
            return pipeline.restore(tokens)

    data = SimpleNamespace(text=pipeline.options)
    task = SimpleNamespace(_pipelines=[pipeline], data=data)
    scores = TranslationTask._scores(task, Split(), [pipeline.restore(other)])
    assert scores["tokenized_bleu"] == pytest.approx(bleu.tokenized_bleu([other], [tokens]))


def test_comet_is_an_option(trained, sides, monkeypatch):
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(RequestError, match="--comet needs a package: pip install unbabel-comet"):
        evaluate_files(trained, *sides, comet="some/model")

    def predict(rows, **_):
        assert rows[0].keys() == {"src", "mt", "ref"}
        return SimpleNamespace(system_score=0.25 * len(rows))

    package = ModuleType("comet")
    package.__version__ = "2.2"
    package.download_model = lambda name: f"cache of {name}"
    package.load_from_checkpoint = lambda path: SimpleNamespace(predict=predict, path=path)
    monkeypatch.setitem(sys.modules, "comet", package)
    scores, signatures = evaluate_files(trained, *sides, comet="some/model")
    assert scores["comet"] == 0.75
    assert signatures["comet"] == "model:model|version:2.2"
