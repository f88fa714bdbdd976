"""Prepared folders: made whole or not at all, and verified when they are read."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import datasets
import pyarrow as pa
import pytest

import lab_runs
from labo.lab.errors import DataError, LabError, RequestError
from labo.lab.language_modeling.prepared import PreparedDocuments
from labo.lab.run.files import sealed, sha256
from labo.lab.text import folder as folders
from labo.lab.translation import prepare, prepared
from labo.lab.translation.prepared import Prepared
from tiny_corpus import ask, digests, labo, refused, write, write_corpus
from tiny_language import prepare_prompts, prepare_texts


@pytest.fixture
def copy(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(plain.path, tmp_path / "copy")


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def seal(folder: Path) -> None:
    """Make the checksums of a folder fit what is in it."""
    manifest = json.loads((folder / "prepared.json").read_text())
    manifest["sha256"] = {name: sha256(folder / name) for name in manifest["sha256"]}
    write(folder / "prepared.json", json.dumps(sealed(manifest)))


def test_an_existing_folder_is_kept_unless_told_otherwise(corpus, tmp_path, plain):
    options = ask(corpus)
    out = tmp_path / "out"
    out.mkdir()
    before = digests(prepare.prepare(options, out).path)  # an empty folder is no obstacle
    with refused("out exists; --force replaces it", RequestError):
        prepare.prepare(options, out)
    assert digests(out) == before
    prepare.prepare(ask(corpus, vocabulary=310), out, force=True)
    assert Prepared(out).manifest["vocabulary"]["source"] == 310
    other = tmp_path / "other"
    write(other / "mine.txt", "precious")
    with refused("other exists and holds no prepared data", RequestError):
        prepare.prepare(options, other, force=True)
    assert (other / "mine.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_force_replaces_nothing_that_another_command_made(corpus, tmp_path):
    out = tmp_path / "out"
    for manifest in ('{"format": 2, "task": "language_modeling"}', '{"format": 2,', "{}"):
        write(out / "prepared.json", manifest)
        with refused("out exists and was not made by `labo prepare`: choose anoth", RequestError):
            prepare.prepare(ask(corpus), out, force=True)
        assert (out / "prepared.json").read_text() == manifest


def test_an_existing_folder_that_is_read_is_not_written(plain, tmp_path, capsys):
    """Text, subwords and the list of inputs in the folder that --force would replace."""
    out = shutil.copytree(plain.path, tmp_path / "out")
    write_corpus(out / "raw")
    rows = tmp_path / "rows"
    datasets.Dataset.from_dict({"de": ["a"], "en": ["b"]}).save_to_disk(rows)
    write(out / "codes", "#version: 0.2\na b\n")
    write(out / "inputs.yaml", f"de-en:\n  train: {out}/raw/train\n")
    before = digests(tmp_path)
    outside = write_corpus(tmp_path.parent / f"{tmp_path.name}-raw")
    codes = {"vocabulary": None, "codes": str(out / "codes"), "text": {"tokenized": True}}
    for options, folder, message in (
        (ask(out / "raw"), out, "out contains the input .*out/raw/train.de: choose another"),
        (ask(outside, **codes), out, "out contains the input .*out/codes"),
        (ask(outside, train=[str(rows)]), rows / "x", "is inside the input"),
    ):
        with refused(message, RequestError):
            prepare.prepare(options, folder, force=True)
    assert labo("prepare", out, "--inputs", out / "inputs.yaml", "--force") == 2
    assert "out contains the input" in capsys.readouterr().err
    assert digests(tmp_path) == before


def test_what_cannot_be_written_is_said_in_one_line(corpus, tmp_path):
    write(tmp_path / "file", "")
    with refused("cannot write .*out: ", LabError):
        prepare.prepare(ask(corpus), tmp_path / "file" / "out")


def test_folders_that_are_not_prepared_are_refused(plain, tmp_path):
    with refused("no prepared data here; `labo prepare` makes it"):
        Prepared(tmp_path / "none")
    write(tmp_path / "prepared.json", '{"format": 1}')
    with refused("prepared.json: not of format 2"):
        Prepared(tmp_path)
    write(tmp_path / "prepared.json", "{")
    with refused("prepared.json: not JSON"):
        Prepared(tmp_path)
    write(tmp_path / "prepared.json", '{"format": 2}')
    with refused("prepared.json: checksum: missing; sha256: missing; pairs: missing"):
        Prepared(tmp_path)
    manifest = (plain.path / "prepared.json").read_text()
    write(tmp_path / "prepared.json", manifest)
    with refused("frequencies.json is missing; run `labo prepare` again"):
        Prepared(tmp_path)
    for file in json.loads(manifest)["sha256"]:
        write(tmp_path / file, (plain.path / file).read_bytes()[:100])
    with refused(r"is damaged .its checksum does not fit.; run `labo prepare` again"):
        Prepared(tmp_path)


def test_every_flipped_bit_of_a_prepared_folder_is_found(copy):
    chance = random.Random(0)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    for number in range(60):
        path = files[number % len(files)]
        whole = path.read_bytes()
        flip(path, chance.randrange(len(whole)), chance.randrange(8))
        with pytest.raises(DataError):
            Prepared(copy)
        path.write_bytes(whole)
    Prepared(copy)


def test_a_file_that_was_changed_a_moment_ago_is_not_remembered(copy, monkeypatch):
    """Its time of change may stay the same when it is changed once more."""
    Prepared(copy)
    stamp = (copy / "valid.arrow").stat()
    flip(copy / "valid.arrow", 100)
    os.utime(copy / "valid.arrow", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with refused("valid.arrow is damaged"):
        Prepared(copy)


def write_split(folder: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(str(folder / "train.arrow"), table.schema) as stream:
        stream.write_table(table)
    seal(folder)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("target", [[-1]], "a target token id is outside"),
        ("target", [[]], "a target sentence has no token"),
        ("pair", [5], "a language pair is outside"),
        ("source", [None], "it has empty cells"),
    ],
)
def test_ids_that_fit_no_vocabulary_are_refused(copy, column, value, message):
    """Whoever wrote the folder: an index out of range would be read from anywhere in memory."""
    columns = {"source": [[5]], "target": [[5]], "pair": [0]} | {column: value}
    table = pa.table(columns, schema=prepared.schema("train"))
    write_split(copy, table)
    with refused(f"train.arrow: {message}"):
        Prepared(copy).split("train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("frequencies.json", "{}", "0 counts of source types, not"),
        ("frequencies.json", '{"source": [-1], "target": [1]}', "greater than or equal to 0"),
        ("train.arrow", "ARROW1", "train.arrow: cannot be read"),
        ("tokenizer/tokenizer.json", "{}", "tokenizer: cannot be read"),
    ],
)
def test_files_of_the_wrong_kind_are_refused_in_a_line(copy, name, content, message):
    write(copy / name, content)
    seal(copy)
    with refused(message):
        data = Prepared(copy)
        data.split("train")
        data.frequencies("source")
        _ = data.tokenizer


def test_force_follows_a_link_and_replaces_what_it_leads_to(corpus, tmp_path):
    real, link = tmp_path / "disk" / "data", tmp_path / "link"
    prepare.prepare(ask(corpus), real)
    link.symlink_to(real)
    before = Prepared(link).fingerprint
    prepare.prepare(ask(corpus, vocabulary=310), link, force=True)
    assert link.is_symlink()
    assert Prepared(real).fingerprint == Prepared(link).fingerprint != before
    assert [path.name for path in real.parent.iterdir()] == ["data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


@pytest.mark.parametrize("moment", range(1, 5))
def test_a_replacement_that_is_killed_leaves_the_old_or_the_new(plain, tmp_path, moment):
    for name in ("data", "new"):
        shutil.copytree(plain.path, tmp_path / name)
        (tmp_path / name / f"{name}.mark").touch()
    lab_runs.replace_and_die(tmp_path / "new", tmp_path / "data", moment)
    Prepared(tmp_path / "data")
    assert len(list((tmp_path / "data").glob("*.mark"))) == 1


def test_a_failed_replacement_keeps_the_old(corpus, tmp_path, monkeypatch):
    out = tmp_path / "data"
    before = prepare.prepare(ask(corpus), out).fingerprint
    fail = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(folders, "replace_folder", fail)
    with pytest.raises(LabError, match="Input/output error"):
        prepare.prepare(ask(corpus, vocabulary=310), out, force=True)
    assert Prepared(out).fingerprint == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_what_is_held_is_not_read_again(plain, tmp_path):
    folder = shutil.copytree(plain.path, tmp_path / "data")
    data = Prepared(folder)
    data.hold()
    shutil.rmtree(folder)
    for split in ("train", "valid", "test"):
        assert len(data.split(split)) == len(plain.split(split))
    assert data.tokenizer_files == plain.tokenizer_files
    assert (data.frequencies("target") == plain.frequencies("target")).all()


# Documents: what they share with sentence pairs is tested above. -------------------------------


@pytest.fixture(scope="module", params=["text", "prompt"])
def prepared_documents(request, tmp_path_factory) -> Path:
    prepare = prepare_texts if request.param == "text" else prepare_prompts
    return prepare(tmp_path_factory.mktemp("documents") / "data")


@pytest.fixture
def documents(prepared_documents, tmp_path) -> Path:
    return shutil.copytree(prepared_documents, tmp_path / "documents")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": [[10**6]]}, r"a token id is outside \[0, \d+\)"),
        ({"input_ids": [[]], "labels": [[]]}, "a document has no token"),
        ({"bytes": [-1]}, "a document has a negative number of bytes"),
        ({"labels": [[10**6]]}, r"a label is outside \[0, \d+\), and not -100"),
        ({"labels": [[5, 5]]}, "a document has more labels than tokens, or fewer"),
    ],
)
def test_documents_that_fit_no_vocabulary_are_refused(documents, values, message):
    data = PreparedDocuments(documents)
    columns = {"input_ids": [[5]], "labels": [[-100]], "bytes": [1]} | values
    schema = data.schema("train")
    write_split(documents, pa.table({n: columns[n] for n in schema.names}, schema=schema))
    if data.kind == "text" and values.keys() == {"labels"}:  # has none
        PreparedDocuments(documents).split("train")
        return
    with refused(f"train.arrow: {message}"):
        PreparedDocuments(documents).split("train")


def test_a_folder_of_the_other_kind_or_that_was_replaced_is_refused(documents, plain):
    with refused("not made by `labo prepare`"):
        Prepared(documents)
    with refused("not made by `labo prepare-text`"):
        PreparedDocuments(plain.path)
    write(documents / "frequencies.json", json.dumps({"tokens": [10**30]}))
    seal(documents)
    data = PreparedDocuments(documents)
    with refused(r"frequencies.json: tokens: should be less than"):
        data.hold()
    shutil.copy(plain.path / "prepared.json", documents / "prepared.json")
    write(documents / "frequencies.json", json.dumps({"tokens": [1]}))
    with refused("was replaced while it was read"):
        data.hold()


def test_a_manifest_cannot_name_files_elsewhere(copy):
    manifest = json.loads((copy / "prepared.json").read_text())
    manifest["sha256"]["../secret"] = "0" * 64
    write(copy / "prepared.json", json.dumps(sealed(manifest)))
    with refused("names a file elsewhere"):
        Prepared(copy)
