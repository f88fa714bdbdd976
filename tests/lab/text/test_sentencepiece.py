"""SentencePiece models are read without their package."""

from __future__ import annotations

import struct
from random import Random

import pytest

from labo.lab.errors import DataError
from labo.lab.text.bpe_dropout import BpeDropout
from labo.lab.text.sentencepiece import make_piece_tokenizer, read_sentencepiece
from labo.lab.translation.options import choose
from labo.lab.translation.prepare import prepare

SCORES = {"▁": -3.0, "l": -3.1, "o": -3.2, "w": -3.3, "e": -3.4, "r": -3.5, "n": -3.6}
SCORES |= {"lo": -1.0, "low": -1.2, "▁low": -1.4, "er": -1.6, "▁n": -1.8, "<": -5.0, "s": -5.1}
SCORES |= {">": -5.2, "/": -5.3}


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


def write(path, kind: int):
    """A protocol buffer as ``spm_train`` writes it, with control tokens and without a table."""
    control = [field(1, field(1, name.encode()) + field(2, 0.0) + field(3, 3)) for name in ("<s>",)]
    pieces = [field(1, field(1, text.encode()) + field(2, s)) for text, s in SCORES.items()]
    path.write_bytes(b"".join([*control, *pieces, field(2, field(3, kind))]))
    return path


def tokens(tokenizer, line):
    return tokenizer.backend_tokenizer.encode(line).tokens


@pytest.mark.parametrize("kind", [1, 2], ids=["unigram", "bpe"])
def test_text_is_split_and_comes_back(tmp_path, kind):
    tokenizer = make_piece_tokenizer(read_sentencepiece(write(tmp_path / "m", kind)), ["<de>"])
    assert tokens(tokenizer, " lower  new") == ["▁low", "er", "▁n", "e", "w", "</s>"]
    assert tokenizer.decode(tokenizer.encode("lower new"), skip_special_tokens=True) == "lower new"
    assert tokens(tokenizer, "<de> low")[1:] == ["▁low", "</s>"]
    assert tokenizer.encode("<de> low")[0] == 4
    # What looks like a special token is text, and what is unknown is unknown.
    ids = tokenizer.encode("low </s>")
    assert ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "low </s>"
    assert 3 in tokenizer.encode("☃")


def test_merges_can_be_left_out(tmp_path):
    tokenizer = make_piece_tokenizer(read_sentencepiece(write(tmp_path / "m", 2)), [])
    ids = tokenizer.encode("lower ☃ new low")
    assert BpeDropout(tokenizer, 0.0)(ids, Random(0)) == ids
    other = BpeDropout(tokenizer, 0.5)(ids, Random(1))
    assert len(other) > len(ids)
    assert tokenizer.decode(other) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no pieces"),
        (b"#version: 0.2\n", "not a SentencePiece model"),
        (field(1, field(1, b"a") + field(2, 0.5))[:-2], "cut off"),
        (field(1, field(1, b"a")) + field(2, field(3, 3)), "only unigram and bpe"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_sentencepiece(tmp_path / "m")


def test_prepare_takes_a_model(tmp_path):
    for side in ("de", "en"):
        (tmp_path / f"t.{side}").write_text("lower new\nnew low\nlow lower\n")
    files = {split: [str(tmp_path / "t")] for split in ("train", "valid", "test")}
    model = str(write(tmp_path / "m", 1))
    options = choose(None, {"pair": ["de-en"], "sentencepiece": model, **files})
    data = prepare(options, tmp_path / "out")
    train = data.split("train")
    found = data.tokenizer.convert_ids_to_tokens(train.source(0).tolist())
    assert found == ["▁low", "er", "▁n", "e", "w", "</s>"]
    assert data.manifest["processing"]["sentencepiece"]["file"] == "m"
