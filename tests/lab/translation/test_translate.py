"""``labo translate``: a line for a line, whatever the lines are."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from labo.lab.errors import RequestError
from labo.lab.run.checksums import write_manifest
from labo.lab.run.files import sha256
from labo.lab.text import stdio
from labo.lab.text.subwords import encode
from labo.lab.translation.decoding import Hypothesis, decode
from labo.lab.translation.options import Decode
from labo.lab.translation.translate import ModelFolder, Translator, translate_stream
from tiny_corpus import labo, refused
from tiny_translation import (
    POSITIONS,
    byte_folder,
    byte_tokenizer,
    image_folder,
    random_model,
    save_folder,
    trained_model,
    word_tokenizer,
)

MULTILINGUAL = (
    {"source": "de", "target": "en", "tag": "<de>"},
    {"source": "fr", "target": "en", "tag": "<fr>"},
    {"source": "fr", "target": "de", "tag": "<fr>"},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory whose model babbles bytes."""
    path = tmp_path_factory.mktemp("run")
    byte_folder(path / "best", decode=Decode(beam=2, max_extra=5))
    return path


def stream(run, given: bytes, **options) -> bytes:
    target = io.BytesIO()
    translate_stream(run, io.BytesIO(given), target, **options)
    return target.getvalue()


def test_text_goes_through_pipeline_and_model_and_back(tmp_path):
    """The words are lowercased and tokenized on the way in, and put together on the way out."""
    tokenizer = word_tokenizer("abcdefghi.")
    save_folder(
        tmp_path / "best", trained_model(), tokenizer, text={"moses": True, "lowercase": True}
    )
    translator = Translator(tmp_path)
    (expected,) = decode(trained_model(), [tokenizer.encode("abc d .")], Decode())[0]
    (found,) = translator.nbest(["ABC D."], 1)[0]
    assert [*found.tokens] == [*tokenizer.convert_ids_to_tokens(list(expected.ids)), "</s>"]
    said = tokenizer.decode(expected.ids)
    assert found.text == translator.pipeline.restore(said)
    assert translator.translate(["ABC D."]) == [found.text]
    assert found.score == pytest.approx(expected.score)


def test_an_output_never_breaks_its_line(run, monkeypatch):
    said = byte_tokenizer().encode("a\nb\r\nc\u2028d\x85\x0ce\n")[:-1]

    def say(model, sources, options, **arguments):
        return [[Hypothesis(tuple(said), -1.0, (0.5,) * len(said))] for _ in sources]

    monkeypatch.setattr("labo.lab.translation.translate.decode", say)
    assert stream(run, b"one\ntwo\n") == b"a b c d  e\n" * 2


def test_special_tokens_in_a_text_are_text(run):
    translator = Translator(run)
    (ids,) = encode(translator.tokenizer, ["</s>"])
    assert ids[-1] == 2
    assert not {0, 1, 2, 3} & set(ids[:-1])


def test_a_long_line_is_cut_with_one_notice(run, monkeypatch, capsys):
    monkeypatch.setattr(stdio, "_LINES_AT_ONCE", 2)  # lines are numbered through all chunks
    given = b"one\n\n" + b"x" * 100 + b"\n" + b"y" * (POSITIONS - 1)
    lines = stream(run, given, nbest=1).splitlines()
    assert [line.partition(b"\t")[0] for line in lines] == [b"1", b"2", b"3", b"4"]
    assert capsys.readouterr().err == (
        "labo: line 3 has 101 tokens, the model takes 40: the rest is left out\n"
    )


def test_python_is_told_by_a_warning(run):
    with pytest.warns(UserWarning, match="line 2 has 101 tokens"):
        found = Translator(run).translate(["", "x" * 100])
    assert found[0] == ""
    assert len(found) == 2


def test_nbest_lines(run):
    rows = [
        line.split("\t", 2) for line in stream(run, b"one\n\ntwo", nbest=2).decode().splitlines()
    ]
    assert [row[0] for row in rows] == ["1", "1", "2", "2", "3", "3"]
    assert [row[1:] for row in rows[2:4]] == [["0.0000", ""]] * 2
    assert float(rows[0][1]) >= float(rows[1][1])
    plain = stream(run, b"one\n\ntwo").splitlines()
    assert plain == [row[2].encode() for row in rows[::2]]
    assert stream(run, b"two\n\t\none\n").splitlines() == plain[::-1]


def test_scores_are_json(run):
    given = "one\n\nzwei Ä".encode()
    records = [json.loads(line) for line in stream(run, given, scores=True).splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3]
    assert [record["text"] for record in records] == stream(run, given).decode().splitlines()
    assert records[1] == {"line": 2, "text": "", "score": 0.0, "tokens": [], "probabilities": []}
    for record in records[::2]:
        assert len(record["tokens"]) == len(record["probabilities"]) > 0
        log_p = sum(map(math.log, record["probabilities"]))
        assert record["score"] == pytest.approx(log_p / len(record["tokens"]))
    both = [json.loads(line) for line in stream(run, given, scores=True, nbest=2).splitlines()]
    assert [record["line"] for record in both] == [1, 1, 2, 2, 3, 3]
    assert both[::2] == records


def test_search_options_replace_those_of_the_recipe(run):
    assert Translator(run).options == Decode(beam=2, max_extra=5)
    changed = Translator(run, beam=4, length_penalty=0.5, batch_tokens=None).options
    assert changed == Decode(beam=4, length_penalty=0.5, max_extra=5)
    assert len(stream(run, b"one", nbest=4, beam=4).splitlines()) == 4
    with pytest.raises(RequestError, match="beam: should be greater than or equal to 1, got 0"):
        Translator(run, beam=0)
    with pytest.raises(RequestError, match="unknown key 'baem'; did you mean 'beam'"):
        Translator(run, baem=3)
    with pytest.raises(RequestError, match="--nbest 3 is more than the beam of 2"):
        stream(run, b"one", nbest=3)


def test_separate_vocabularies(tmp_path):
    source, target = byte_tokenizer(), word_tokenizer("xyz")
    model = random_model(len(source), len(target), embeddings="separate", ending=2.0)
    save_folder(tmp_path / "best", model, source, target)
    (best,) = Translator(tmp_path).nbest(["Äpfel"], 1)[0]
    assert set(best.text) <= set("xyz ")
    assert set(best.tokens) <= {*target.get_vocab()}


def test_the_pair_sets_the_tag_of_the_source(tmp_path):
    byte_folder(tmp_path / "best", pairs=MULTILINGUAL)
    folder = ModelFolder(tmp_path)
    assert str(folder.pair("de")) == str(folder.pair("de-en")) == "de-en"
    tokenizer, _ = folder.tokenizers()
    translator = Translator(tmp_path, pair="fr-en")
    tag = tokenizer.convert_tokens_to_ids("<fr>")
    assert tag != 3
    source = [tag, *tokenizer.encode("one")]
    ((expected,),) = decode(translator.model, [source], Decode())
    (found,) = translator.nbest(["one"], 1)[0]
    assert found.probabilities == pytest.approx(expected.probabilities)
    other = Translator(tmp_path, pair="de").nbest(["one"], 1)[0][0]
    assert other.probabilities != pytest.approx(expected.probabilities)
    for pair, line in [
        (None, "translates de-en, fr-en, fr-de: choose with --pair"),
        ("fr", "--pair fr: .* translates de-en, fr-en, fr-de"),
        ("en-de", "--pair en-de: .* translates de-en"),
    ]:
        with pytest.raises(RequestError, match=line):
            Translator(tmp_path, pair=pair)


def damaged(tmp_path, name: str, content: bytes | None):
    """A run with one file gone or not what it was."""
    byte_folder(tmp_path / "best")
    if content is None:
        (tmp_path / "best" / name).unlink()
    else:
        (tmp_path / "best" / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("config.json", None, "is no run with best/config.json"),
        ("config.json", b"{", "config.json: not JSON"),
        (
            "config.json",
            b'{"labo": {"task": "translation"}}',
            "labo.pairs: missing; labo.text: missing",
        ),
        ("config.json", b'{"labo": 3}', "holds no model of labo"),
        ("model.safetensors", None, r"holds no \*.safetensors"),
        ("model.safetensors", b"damage", "model.safetensors: cannot be read"),
        ("tokenizer.json", b"{}", "best: cannot be read"),
        ("adapter_config.json", b"{}", "best: holds adapters .* beside the model: merge them"),
    ],
)
def test_a_damaged_folder_is_refused(name, content, line, tmp_path):
    with refused(line, RequestError):
        Translator(damaged(tmp_path, name, content))


class Malicious:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("command", [["translate"], ["export", "--out", "out"]])
def test_pickled_weights_are_refused_and_not_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "was here"
    folder = damaged(tmp_path, "model.safetensors", None) / "best"
    for weights in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin"):
        (folder / weights).write_bytes(pickle.dumps(Malicious(trace)))
    capsys.readouterr()
    assert labo(command[0], ".", *command[1:]) == 2
    said = capsys.readouterr().err
    assert "best: holds no *.safetensors; other formats can run code and are not read" in said
    assert not trace.exists()


def test_a_model_that_is_not_the_one_that_was_saved_is_refused(tmp_path):
    folder = byte_folder(tmp_path / "best")
    names = [path.name for path in folder.iterdir()]
    write_manifest(folder, {name: [sha256(folder / name)] for name in names})
    Translator(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(RequestError, match=r"model.safetensors is damaged"):
        Translator(folder)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"d_model": 0}, "best: cannot be loaded"),
        ({"d_model": "wide"}, "config.json: cannot be used: .*'d_model': .*'wide'"),
        ({"d_model": 10**7}, "config.json: d_model is 10000000, but the weights have"),
        ({"vocab_size": 3, "decoder_vocab_size": 3}, "lack .*, or have another shape"),
        ({"encoder_layers": 2}, "its weights lack model.encoder.layers.1"),
        ({"decoder_layers": 1}, "have model.decoder.layers.1.* no part of the model"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(changes, line, tmp_path):
    path = byte_folder(tmp_path / "best") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with refused(line, RequestError):
        Translator(tmp_path)


def test_a_line_of_a_megabyte_is_cut_with_a_notice(run, capsys):
    assert stream(run, b"x" * 1_000_000 + b"\none").count(b"\n") == 2
    assert (
        "has 1000000 characters, of which the first 20000 are translated" in capsys.readouterr().err
    )


def test_an_image_run_and_no_run_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "best")
    capsys.readouterr()
    images = "labo: . holds a model for image_classification, not a model for translation\n"
    missing = "labo: nowhere is no run with best/config.json\n"
    for command, line in [
        (["translate", "."], images),
        (["translate", "nowhere"], missing),
        (["export", "nowhere", "--out", "out"], missing),
    ]:
        assert labo(*command) == 2
        assert capsys.readouterr() == ("", line)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_the_command(run):
    """From its own process: bytes in, bytes out, whatever the locale; nothing on stderr."""
    command = [sys.executable, "-m", "labo", "translate", str(run), "--beam", "3", "--nbest", "3"]
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    given = "zwölf\n\ndrei".encode()
    done = subprocess.run(command, input=given, capture_output=True, env=env, timeout=300)
    assert done.stderr == b""
    assert done.returncode == 0
    assert done.stdout == stream(run, given, beam=3, nbest=3)
