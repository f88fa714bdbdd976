"""Exports to CTranslate2: the same translations, whole folders or none."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import shutil
import sys

import ctranslate2
import pytest
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES

from labo.lab.errors import LabError, RequestError
from labo.lab.translation.decoding import decode
from labo.lab.translation.export import export
from labo.lab.translation.model import BOS, EOS, PAD
from labo.lab.translation.options import Decode
from labo.lab.translation.translate import Translator
from tiny_corpus import labo
from tiny_translation import (
    POSITIONS,
    VOCABULARY,
    byte_folder,
    random_model,
    save_folder,
    sentences,
    trained_model,
    word_tokenizer,
)

LETTERS = "abcdefghij"


def translations(folder, sources, tokenizer, target_tokenizer=None, **options):
    """Ids and scores of the best translations by CTranslate2."""
    translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)
    results = translator.translate_batch(
        [tokenizer.convert_ids_to_tokens(source) for source in sources],
        **({"min_decoding_length": 1} | options),
        max_decoding_length=POSITIONS - 1,
        return_scores=True,
    )
    ids = (target_tokenizer or tokenizer).convert_tokens_to_ids
    return [(tuple(ids(found.hypotheses[0])), found.scores[0]) for found in results]


def without_unsaid(model):
    """The model with no probability for the tokens that are suppressed.

    CTranslate2 gives their probability to the other tokens, so that scores would not agree.
    """
    model = copy.deepcopy(model)
    model.final_logits_bias[0, [BOS, PAD]] = -1e4
    return model


@pytest.mark.parametrize("penalty", [1.0, 0.6, 2.0])
def test_translations_and_scores_are_the_same(penalty, tmp_path):
    model = without_unsaid(trained_model())
    tokenizer = word_tokenizer(LETTERS)
    save_folder(tmp_path / "best", model, tokenizer)
    export(tmp_path, tmp_path / "out")
    sources = sentences(40, seed=5, longest=9)
    # With a shortest output CTranslate2 also gives the first </s>'s probability to the others.
    options = Decode(length_penalty=penalty, max_extra=POSITIONS, min_length=0)
    expected = decode(model, sources, options)
    search = {"beam_size": 5, "length_penalty": penalty, "min_decoding_length": 0}
    found = translations(tmp_path / "out", sources, tokenizer, **search)
    for (best,), (ids, score) in zip(expected, found, strict=True):
        assert ids == best.ids
        assert score == pytest.approx(best.score, abs=1e-4)
    assert len({ids for ids, _ in found}) > 20


@pytest.mark.parametrize("embeddings", ["shared", "decoder", "separate"])
def test_every_way_to_share_embeddings(embeddings, tmp_path):
    separate = embeddings != "shared"
    source = word_tokenizer(LETTERS)
    target = word_tokenizer("klmnopqrstuv") if separate else source
    model = random_model(VOCABULARY, len(target), embeddings=embeddings, ending=2.0)
    model = without_unsaid(model)
    save_folder(tmp_path / "best", model, source, target if separate else None)
    export(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "target_tokenizer").exists() == separate
    sources = sentences(8)
    options = Decode(max_extra=POSITIONS)
    found = translations(tmp_path / "out", sources, source, target, beam_size=5)
    for (best,), (ids, _) in zip(decode(model, sources, options), found, strict=True):
        assert ids == best.ids


def test_start_and_padding_are_never_said(tmp_path):
    model = random_model()
    model.final_logits_bias[0, [BOS, PAD]] = 30.0
    tokenizer = word_tokenizer(LETTERS)
    save_folder(tmp_path / "best", model, tokenizer)
    export(tmp_path, tmp_path / "out")
    for ids, _ in translations(tmp_path / "out", sentences(8), tokenizer, beam_size=5):
        assert not {BOS, PAD, EOS} & set(ids)


@pytest.mark.parametrize(
    ("text", "sentence"), [({}, "abc d"), ({"moses": True, "lowercase": True}, "ABC d!")]
)
def test_the_printed_lines_translate(text, sentence, tmp_path):
    tokenizer = word_tokenizer(LETTERS if not text else "abcdefghi!")
    save_folder(tmp_path / "best", trained_model(), tokenizer, text=text)
    lines = export(tmp_path, tmp_path / "out")
    (expected,) = Translator(tmp_path).translate([sentence])
    shutil.rmtree(tmp_path / "best")  # the exported folder needs it no longer
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(lines.replace("'...'", repr(sentence)), {})
    assert printed.getvalue() == expected + "\n"
    assert expected


def test_the_printed_lines_of_a_tagged_pair(tmp_path, capsys):
    pairs = (
        {"source": "de", "target": "en", "tag": "<de>"},
        {"source": "fr", "target": "en", "tag": "<fr>"},
    )
    byte_folder(tmp_path / "best", pairs=pairs)
    out = tmp_path / "deep" / "out"
    assert labo("export", tmp_path, "--out", out) == 0
    lines = capsys.readouterr().out
    assert "['<de>'] + tokenizer" in lines
    assert "# fr-en: <fr>" in lines
    exec(lines.replace("'...'", "'Äpfel'"), {})
    assert json.loads((out / "labo.json").read_text())["pairs"] == list(pairs)


def test_a_smaller_model(tmp_path):
    tokenizer = word_tokenizer(LETTERS)
    save_folder(tmp_path / "best", trained_model(), tokenizer)
    sizes = {}
    for kind in (None, "int8", "float16"):
        out = tmp_path / str(kind)
        export(tmp_path, out, kind)
        sizes[kind] = (out / "model.bin").stat().st_size
    assert sizes["int8"] < sizes["float16"] < sizes[None]
    found = translations(tmp_path / "int8", [tokenizer.encode("abc")], tokenizer, beam_size=5)
    assert not {BOS, PAD} & set(found[0][0])


def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    byte_folder(tmp_path / "best")
    (tmp_path / "there").mkdir()
    capsys.readouterr()
    for arguments, line in [
        (["--out", "there"], "there exists: choose another --out"),
        (
            ["--out", "x", "--to", "onnx"],
            "--to onnx: a model for translation is exported to ctranslate2",
        ),
        (
            ["--out", "x", "--quantization", "int4"],
            f"--quantization int4: choose from {', '.join(ACCEPTED_MODEL_TYPES)}",
        ),
    ]:
        assert labo("export", ".", *arguments) == 2
        assert capsys.readouterr() == ("", f"labo: {line}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "there"]


def test_a_failed_export_leaves_nothing_and_a_killed_one_is_swept_up(tmp_path, monkeypatch):
    byte_folder(tmp_path / "best")
    killed = tmp_path / ".out.tmp"
    killed.mkdir()
    (killed / "model.bin").write_bytes(b"half")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("labo.lab.translation.export._add_text", full)
        with pytest.raises(LabError, match=r"cannot write .*out: No space left on device"):
            export(tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    export(tmp_path, tmp_path / "out")
    assert not killed.exists()
    assert ctranslate2.contains_model(str(tmp_path / "out"))


def test_a_missing_ctranslate2_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2.converters", None)
    spec = importlib.util.find_spec("labo.lab.translation.export")
    with pytest.raises(RequestError, match=r"install torch-labo\[ctranslate2\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
