"""Preparing parallel text: every format read alike, every fault in one line, all or nothing."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from operator import neg
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import lab_runs
from labo.cli import main
from labo.lab import compressed
from labo.lab.errors import DataError, LabError, RequestError
from labo.lab.run import checksums
from labo.lab.run.files import sealed, sha256
from labo.lab.text import arrow
from labo.lab.text import folder as folders
from labo.lab.text import lines as text_lines
from labo.lab.text.lines import read_lines
from labo.lab.translation import cleaning, guard, prepare, prepared
from labo.lab.translation.languages import look_swapped
from labo.lab.translation.options import PREPARE_PRESETS, Processing, choose, parse_pairs
from labo.lab.translation.parallel import find_parallel_text
from labo.lab.translation.prepare import prepare_pairs
from labo.lab.translation.prepared import Pair, Prepared
from labo.lab.translation.text import Pipeline, TextOptions

NOUNS = {"Hund": "dog", "Katze": "cat", "Straße": "street", "Kind": "child", "Baum": "tree"}
VERBS = {"sieht": "sees", "kennt": "knows", "sucht": "looks for"}
PAIRS = [
    (f"Das {one} {verb} „{other}“.", f"The {NOUNS[one]} {VERBS[verb]} the “{NOUNS[other]}”.")
    for one in NOUNS
    for verb in VERBS
    for other in NOUNS
    if one != other
]  # 60
SPLITS = {"train": PAIRS[:44], "valid": PAIRS[44:52], "test": PAIRS[52:]}


@contextmanager
def refused(message: str, kind: type[Exception] = DataError):
    """The request is refused, in one line that matches."""
    with pytest.raises(kind, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def write(path: Path, text: str | bytes, compress: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def lines(texts) -> str:
    return "".join(f"{text}\n" for text in texts)


def write_corpus(folder: Path, splits=SPLITS) -> Path:
    for split, pairs in splits.items():
        for language, side in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
            write(folder / f"{split}.{language}", lines(side))
    return folder


def ask(folder: Path, preset: str | None = None, text=(), **settings):
    """Options for the corpus in a folder."""
    files = {split: [str(folder / split)] for split in SPLITS}
    return choose(preset, {"pair": ["de-en"], "vocabulary": 300} | files | dict(text) | settings)


def run(folder: Path, out: str = "out", preset: str | None = None, text=(), **settings) -> Prepared:
    return prepare.prepare(ask(folder, preset, text, **settings), folder / out)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def plain(corpus) -> Prepared:
    return run(corpus, "plain")


@pytest.fixture(scope="module")
def moses(corpus) -> Prepared:
    return run(corpus, "moses", text={"moses": True, "lowercase": True}, vocabulary=None, merges=50)


# Formats ----------------------------------------------------------------------------------------


def xml(pairs, side: int, ids=None) -> str:
    body = "".join(
        f'<seg id="{ids[i] if ids else i + 1}"> {pair[side].replace("&", "&amp;")} </seg>\n'
        for i, pair in enumerate(pairs)
    )
    return (
        f'<?xml version="1.0"?>\n<mteval>\n<doc docid="7">\n<url>x</url>\n{body}</doc></mteval>\n'
    )


def tagged(pairs, side: int) -> str:
    """As WIT3 publishes its talks; translators are named on one side only."""
    people = "<reviewer>A</reviewer>\n<translator>B</translator>\n" if side == 0 else ""
    head = f"<doc docid='1'>\n<url>http://x</url>\n<keywords>a, b</keywords>\n{people}"
    head += "<speaker>C</speaker>\n<talkid>1</talkid>\n"
    title, description, *rest = (pair[side] for pair in pairs)
    return (
        f"{head}<title>{title}</title>\n<description>{description}</description>\n"
        f"{lines(f' {text} ' for text in rest)}</doc>\n"
    )


ODD = [*PAIRS[:5], ("R&D <b> 'x'", "R&D <b> “y”"), ("日本\u2028語", "a\x85b")]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("form", ["lines", "crlf", "tsv", "swapped", "xml", "sgm", "tags", "two"])
def test_every_format_gives_the_same_pairs(tmp_path, form, compress):
    gz = ".gz" * compress
    german, english = zip(*ODD, strict=True)
    files, name, columns = {}, "x", ("source", "target")
    if form in ("lines", "crlf"):
        files = {"x.de": lines(german), "x.en": lines(english).removesuffix("\n")}
        if form == "crlf":
            files = {k: "\ufeff" + v.replace("\n", "\r\n") for k, v in files.items()}
    elif form == "tsv":
        files, name = {"x.tsv": lines("\t".join(pair) for pair in ODD)}, f"x.tsv{gz}"
    elif form == "swapped":
        rows = (f"{one}\tCC\t{other}" for other, one in ODD)
        files, name, columns = {"x.txt": lines(rows)}, f"x.txt{gz}", ("en", "-", "de")
    elif form in ("xml", "sgm"):
        files = {f"x.de.{form}": xml(ODD, 0), f"x.en.{form}": xml(ODD, 1)}
    elif form == "tags":
        files = {"train.tags.de-en.de": tagged(ODD, 0), "train.tags.de-en.en": tagged(ODD, 1)}
        name = "train.tags.{pair}"
    else:
        files, name = {"a": lines(german), "b": lines(english)}, f"a{gz},{tmp_path}/b{gz}"
    for file, text in files.items():
        write(tmp_path / f"{file}{gz}", text, compress)
    found = find_parallel_text(f"{tmp_path}/{name}", "de", "en", columns)
    assert list(found) == ODD
    assert list(found) == ODD  # once more: it can be read again


def test_a_segment_may_run_over_several_lines(tmp_path):
    text = '<doc docid="1">\n<seg id="1">one\ntwo</seg><seg id="2">three</seg>\n</doc>\n'
    for language in ("de", "en"):
        write(tmp_path / f"x.{language}.xml", text)
    assert list(find_parallel_text(f"{tmp_path}/x", "de", "en")) == [
        ("one two", "one two"),
        ("three", "three"),
    ]


def test_several_files_are_one_corpus_in_their_order(corpus):
    parts = [str(corpus / "valid"), str(corpus / "test")]
    data = run(corpus, "several", test=parts).split("test")
    texts = [(data.source_text(i), data.target_text(i)) for i in range(len(data))]
    assert texts == SPLITS["valid"] + SPLITS["test"]


def test_reading_holds_no_more_than_a_line(tmp_path):
    count = 30_000
    for language in ("de", "en"):
        write(tmp_path / f"x.{language}.gz", (f"{language} " * 50 + "\n") * count, compress=True)
    text = find_parallel_text(f"{tmp_path}/x", "de", "en")
    tracemalloc.start()
    assert sum(1 for _ in text) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # of 9 MB


def test_preparing_asks_for_pairs_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_CHUNK", 4)
    ahead = []
    cleaned = 0
    original = prepare.clean_pairs

    def clean(text, pairs, rows):
        nonlocal cleaned
        cleaned += len(rows)
        return original(text, pairs, rows)

    def rows(pairs):
        for number, pair in enumerate(pairs):
            ahead.append(number - cleaned)
            yield 0, *pair

    monkeypatch.setattr(prepare, "clean_pairs", clean)
    splits = {"train": rows(SPLITS["train"])} | {
        split: [(0, *pair) for pair in SPLITS[split]] for split in ("valid", "test")
    }
    prepare_pairs(tmp_path / "out", [Pair("de", "en")], splits, Processing(vocabulary=300))
    assert len(ahead) == 44
    assert max(ahead) < 4


def test_processes_work_in_order_and_only_a_little_ahead():
    taken = []

    def items():
        for number in range(40):
            taken.append(number)
            yield number

    results = cleaning.map_in_order(neg, items(), 2)
    assert next(results) == 0
    assert len(taken) <= 5
    assert [0, *results] == [-n for n in range(40)]


# What is written --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "moses"])
def test_what_is_stored_is_what_the_saved_tokenizer_says_of_the_text(request, kind):
    data: Prepared = request.getfixturevalue(kind)
    tokenizer = AutoTokenizer.from_pretrained(data.path / "tokenizer")
    pipeline = Pipeline(data.text, "de", "en")
    for name, pairs in SPLITS.items():
        split = data.split(name)
        assert len(split) == len(pairs) == data.manifest["sizes"][name]
        for index, (source, target) in enumerate(pairs):
            assert split.source(index).tolist() == tokenizer(pipeline.source(source)).input_ids
            assert split.target(index).tolist() == tokenizer(pipeline.target(target)).input_ids
            text = tokenizer.decode(split.target(index), skip_special_tokens=True)
            assert text == pipeline.target(target)
            if name != "train":
                assert (split.source_text(index), split.target_text(index)) == (source, target)


def test_datasets_reads_the_splits(plain):
    for name in SPLITS:
        split = plain.split(name)
        rows = datasets.Dataset.from_file(str(plain.path / f"{name}.arrow"))
        columns = ["source", "target", "pair", "source_text", "target_text"]
        assert rows.column_names == columns[: 3 if name == "train" else 5]
        assert rows["source"] == [split.source(i).tolist() for i in range(len(split))]
        assert rows["target"] == [split.target(i).tolist() for i in range(len(split))]


@pytest.mark.parametrize("batch", [3, 100_000])
def test_splits_are_numpy_arrays_however_many_batches_they_have(corpus, plain, monkeypatch, batch):
    monkeypatch.setattr(arrow, "_BATCH", batch)
    monkeypatch.setattr(prepare, "_CHUNK", 3)
    split = run(corpus, f"batches{batch}").split("train")
    whole = plain.split("train")
    assert split.pair.tolist() == [0] * 44
    for i in range(len(split)):
        assert split.source(i).tolist() == whole.source(i).tolist()
        assert split.target(i).tolist() == whole.target(i).tolist()
    assert split.source(0).dtype == np.int32
    assert split.lengths("source").tolist() == [len(split.source(i)) for i in range(44)]


@pytest.mark.parametrize("kind", ["plain", "moses"])
def test_frequencies_are_the_counts_of_the_training_split(request, kind):
    data: Prepared = request.getfixturevalue(kind)
    split = data.split("train")
    for side in ("source", "target"):
        counts = Counter(np.concatenate(split.sides[side].chunks).tolist())
        frequencies = data.frequencies(side)
        assert frequencies.tolist() == [counts[i] for i in range(len(data.tokenizer))]
        assert frequencies[2] == len(split)
        assert frequencies.sum() == data.manifest["tokens"]["train"][side]


def test_subwords_are_learned_from_the_training_split_alone(tmp_path):
    names = ("train", "valid", "test")
    one, other = ({n: list(SPLITS[n]) for n in names} for _ in range(2))
    other["valid"] = [("xyzxyz" * 5, "qqqq" * 9)] * 30
    data = [run(write_corpus(tmp_path / str(n), s)) for n, s in enumerate((one, other))]
    assert digests(data[0].path / "tokenizer") == digests(data[1].path / "tokenizer")
    assert data[0].fingerprint != data[1].fingerprint


def test_sides_may_share_all_or_the_merges_or_nothing(corpus):
    text = {"moses": True}
    kinds = {
        share: run(corpus, share, text=text, share=share, vocabulary=None, merges=20)
        for share in ("all", "merges", "nothing")
    }
    joint, common, separate = kinds.values()
    assert joint.tokenizer is joint.target_tokenizer
    assert [d.manifest["vocabulary"]["kind"] for d in kinds.values()] == [
        "joint",
        "separate",
        "separate",
    ]
    pipeline = Pipeline(joint.text, "de", "en")
    for source, target in SPLITS["train"]:
        # one set of merges: split alike, numbered otherwise
        assert joint.tokenizer.tokenize(pipeline.source(source)) == common.tokenizer.tokenize(
            pipeline.source(source)
        )
        assert joint.tokenizer.tokenize(pipeline.target(target)) == (
            common.target_tokenizer.tokenize(pipeline.target(target))
        )
    sizes = [len(d.tokenizer) + len(d.target_tokenizer) for d in (joint, common)]
    assert sizes[1] < sizes[0]
    merges = [
        json.loads((separate.path / folder / "tokenizer.json").read_text())["model"]["merges"]
        for folder in ("tokenizer", "target_tokenizer")
    ]
    assert [len(m) for m in merges] == [20, 20]
    for data in (common, separate):
        assert len(data.frequencies("source")) == data.manifest["vocabulary"]["source"]
        assert len(data.frequencies("target")) == data.manifest["vocabulary"]["target"]
        split = data.split("test")
        assert data.target_tokenizer.decode(split.target(0), skip_special_tokens=True) == (
            pipeline.target(SPLITS["test"][0][1])
        )


def test_the_manifest_says_what_there_is(plain, corpus):
    manifest = json.loads((plain.path / "prepared.json").read_text())
    assert manifest["pairs"] == [{"source": "de", "target": "en", "tag": None}]
    assert manifest["vocabulary"] == {"kind": "joint", "source": 300, "target": 300}
    assert manifest["sizes"] == {"train": 44, "valid": 8, "test": 8}
    assert manifest["sha256"] == {
        name: digest for name, digest in digests(plain.path).items() if name != "prepared.json"
    }
    listing = "".join(f"{digest}  {name}\n" for name, digest in manifest["sha256"].items())
    assert manifest["fingerprint"] == hashlib.sha256(listing.encode()).hexdigest()
    assert manifest["inputs"][0] == {
        "file": "train.de",
        "sha256": hashlib.sha256((corpus / "train.de").read_bytes()).hexdigest(),
    }
    assert str(corpus) not in (plain.path / "prepared.json").read_text()


def test_tokenized_text_is_split_by_published_merges_and_shown_as_people_read_it(tmp_path):
    pairs = [("er &apos;s lower .", "it &apos;s low .")]
    write_corpus(tmp_path, dict.fromkeys(SPLITS, pairs))
    codes = write(tmp_path / "codes", "#version: 0.2\nl o\nlo w</w>\ne r</w>\n")
    data = run(tmp_path, text={"tokenized": True}, codes=str(codes), vocabulary=None)
    names = data.tokenizer.convert_ids_to_tokens(data.split("train").source(0).tolist())
    assert names[-5:] == ["lo", "w", "er</w>", ".</w>", "</s>"]
    assert data.split("test").target_text(0) == "it's low."
    assert data.manifest["processing"]["codes"] == {
        "file": "codes",
        "sha256": hashlib.sha256(codes.read_bytes()).hexdigest(),
    }


# Cleaning and holding out -----------------------------------------------------------------------


def counted(folder: Path, pairs, **settings) -> Prepared:
    return run(write_corpus(folder, SPLITS | {"train": pairs}), **settings)


def test_training_pairs_are_cleaned_and_the_dropped_are_counted(tmp_path):
    bad = [("", "x"), ("  ", "y"), ("a " * 12, "b " * 12), ("a b c", "a b c d e"), ("a b", "a b c")]
    data = counted(tmp_path, PAIRS[:40] + bad, max_tokens=11, max_ratio=1.5)
    assert data.manifest["dropped"]["train"] == {"empty": 2, "too long": 1, "length ratio": 1}
    assert data.manifest["read"]["train"] == 45
    assert data.manifest["sizes"]["train"] == 41  # 3 to 2 is not above 1.5


def test_scored_splits_lose_nothing_but_empty_lines(tmp_path):
    pairs = [("a " * 50, "b"), ("", "b"), ("c", "d")]
    limits = {"max_tokens": 20, "max_ratio": 1.5, "max_pieces": 50, "max_piece_ratio": 1.5}
    write_corpus(tmp_path, {"train": SPLITS["train"] + pairs, "valid": pairs, "test": pairs})
    data = run(tmp_path, **limits)
    for split in ("valid", "test"):
        assert data.manifest["dropped"][split] == {"empty": 1}
        assert len(data.split(split)) == 2
    assert data.manifest["dropped"]["train"]["too long"] == 1


def test_every_nth_cleaned_training_pair_is_held_out(tmp_path):
    bad = [("", "dropped before counting")]
    folder = write_corpus(tmp_path, {"train": bad + PAIRS[:30] + bad + PAIRS[30:]})
    data = run(folder, valid=None, test=None, holdout=23, holdout_test=5)
    valid, test = data.split("valid"), data.split("test")
    assert [valid.source_text(i) for i in range(len(valid))] == [PAIRS[22][0], PAIRS[45][0]]
    rest = [pair for number, pair in enumerate(PAIRS, 1) if number % 23]
    assert [test.target_text(i) for i in range(len(test))] == [p[1] for p in rest[4::5]]
    train = data.split("train")
    texts = data.tokenizer.batch_decode(
        [train.source(i) for i in range(len(train))], skip_special_tokens=True
    )
    assert texts == [p[0] for number, p in enumerate(rest, 1) if number % 5]


def test_limits_in_subwords_hold_for_training_and_held_out_pairs(tmp_path):
    long = [("ж" * 60, "ж" * 60)]
    folder = write_corpus(tmp_path, {"train": PAIRS[:9] + long + PAIRS[9:19], "test": long})
    data = run(folder, valid=None, holdout=10, max_pieces=100, vocabulary=262)
    assert data.manifest["dropped"]["valid"] == {"too long": 1}
    assert data.manifest["sizes"] == {"train": 18, "valid": 1, "test": 1}


def test_training_text_keeps_its_apostrophes(tmp_path):
    data = counted(tmp_path, [("l\u2019a", "b\u2019c")] * 4, text={"straight_apostrophes": True})
    train = data.split("train")
    assert data.tokenizer.decode(train.source(0), skip_special_tokens=True) == "l\u2019a"
    assert data.text.straight_apostrophes


# Guards -----------------------------------------------------------------------------------------


TOKENIZED = [("er &apos;s .", "it &apos;s ."), ("gut @-@ e .", "well @-@ done .")] * 4
SUBWORDS = [("Da@@ s Ki@@ nd", "The chi@@ ld"), ("▁Der ▁Ba um", "▁The ▁tre e")] * 4


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (TOKENIZED, "train.de: the text is tokenized already .100% of 8 lines .*--tokenized takes"),
        (SUBWORDS, "train.de: the text is split into subwords already .*--join-subwords joins"),
    ],
)
@pytest.mark.parametrize("preset", [None, "iwslt14"])
def test_processed_text_is_refused(tmp_path, pairs, message, preset):
    settings = {"vocabulary": None, "merges": 5} if preset else {}
    with refused(message):
        counted(tmp_path, pairs, preset=preset, **settings)
    assert not (tmp_path / "out").exists()


def test_tokenized_text_is_taken_as_such_under_a_preset(tmp_path):
    write_corpus(tmp_path, dict.fromkeys(SPLITS, TOKENIZED))
    settings = {"vocabulary": None, "merges": 5}
    data = run(tmp_path, preset="iwslt14", text={"tokenized": True}, **settings)
    assert data.text.tokenized
    assert not data.text.moses
    train = data.split("train")
    text = data.tokenizer.decode(train.source(0), skip_special_tokens=True)
    assert text == "er &apos;s ."
    assert data.manifest["notes"] == ["the text is tokenized and taken as such"]


def test_subwords_are_joined_and_marks_can_be_taken_as_text(tmp_path):
    data = counted(tmp_path, SUBWORDS, join_subwords=True)
    decoded = data.tokenizer.batch_decode(
        [data.split("train").source(i) for i in range(2)], skip_special_tokens=True
    )
    assert decoded == ["Das Kind", "Der Baum"]
    assert data.manifest["notes"] == ["the text is split into subwords: they are joined first"]
    data = run(tmp_path, "raw", force_raw=True)
    assert data.tokenizer.decode(data.split("train").source(0), skip_special_tokens=True) == (
        "Da@@ s Ki@@ nd"
    )
    assert "train.de looks split into subwords already" in data.manifest["notes"][0]
    with refused("--force-raw excludes --tokenized", RequestError):
        ask(tmp_path, text={"tokenized": True}, force_raw=True)


def test_pairs_that_share_a_sentence_are_held_out_together(tmp_path):
    rows = [(f"q{i // 3}", f"z{i // 2}") for i in range(12)] + [
        (f"s{i}", f"t{i}") for i in range(60)
    ]
    rows = [rows[i * 31 % len(rows)] for i in range(len(rows))]
    folder = write_corpus(tmp_path, {"train": rows})
    data = run(folder, valid=None, test=None, holdout=6, holdout_test=6)
    texts = {}
    for split in SPLITS:
        part = data.split(split)
        for side, sentence in (("source", part.source), ("target", part.target)):
            ids = [sentence(i) for i in range(len(part))]
            texts[split, side] = set(data.tokenizer.batch_decode(ids, skip_special_tokens=True))
    for side in ("source", "target"):
        assert not texts["train", side] & texts["valid", side]
        assert not texts["train", side] & texts["test", side]
        assert not texts["valid", side] & texts["test", side]
    nothing = {"source": 0, "target": 0, "pair": 0}
    assert data.manifest["overlap"] == {"valid": nothing, "test": nothing}
    assert sum(data.manifest["sizes"].values()) == len(rows)
    by_pair = run(
        folder, "by-pair", valid=None, test=None, holdout=6, holdout_test=6, holdout_by="pair"
    )
    assert by_pair.manifest["overlap"]["valid"]["source"] > 0
    shown = by_pair.split("valid")
    assert [shown.source_text(i) for i in range(len(shown))] == [row[0] for row in rows[5::6]]


def test_presets_hold_out_pairs(corpus):
    for preset, every in (("iwslt14", 23), ("wmt14", 100)):
        options = ask(corpus, preset, valid=None, vocabulary=None)
        assert (options.holdout, options.holdout_by) == (every, "pair")
    assert ask(corpus).holdout_by == "group"


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(20, 32)), max_size=40), st.integers(2, 6))
def test_groups_are_connected_components(pairs, n):
    source, target = (np.array([p[i] for p in pairs], dtype=np.uint64) for i in (0, 1))
    expected = list(range(len(pairs)))
    for _ in pairs:  # by brute force
        for i, one in enumerate(pairs):
            for j, other in enumerate(pairs):
                if one[0] == other[0] or one[1] == other[1]:
                    expected[i] = expected[j] = min(expected[i], expected[j])
    groups = guard.sentence_groups(source, target)
    assert groups.tolist() == expected
    held_out = guard.hold_out(groups, n)
    for group in set(expected):
        assert len({bool(h) for g, h in zip(expected, held_out, strict=True) if g == group}) == 1


def test_suspicious_pairs_are_counted_and_dropped_on_request(tmp_path):
    odd = [PAIRS[0], PAIRS[0], ("Anna", "Anna"), ("Добрый день", "Good day"), ("x", "12")]
    data = counted(tmp_path, PAIRS[:44] + odd)
    assert data.manifest["found"]["train"] == {"copy": 1, "duplicate": 2, "wrong script": 1}
    assert data.manifest["sizes"]["train"] == 49
    data = run(tmp_path, "dropped", drop="duplicates,copies,script")
    assert data.manifest["found"]["train"] == {}
    assert data.manifest["dropped"]["train"] == {"copy": 1, "duplicate": 2, "wrong script": 1}
    assert data.manifest["sizes"]["train"] == 45
    with refused("--drop: doubles is none of duplicates, copies, script", RequestError):
        ask(tmp_path, drop=["doubles"])


def test_the_overlap_with_train_is_counted(tmp_path):
    valid = [PAIRS[0], (PAIRS[1][0], "New."), ("Neu.", PAIRS[2][1]), ("Neu.", "New.")]
    write_corpus(tmp_path, SPLITS | {"valid": valid})
    found = run(tmp_path).manifest["overlap"]
    assert found["valid"] == {"source": 2, "target": 2, "pair": 1}
    assert found["test"] == {"source": 0, "target": 0, "pair": 0}


@pytest.mark.parametrize(
    ("line", "language", "wrong"),
    [
        ("Добрый день", "ru", False),
        ("Добрый день", "de", True),
        ("Good day", "ru", True),
        ("Größe", "de", False),
        ("日本語です", "ja", False),
        ("漢字", "zh", False),
        ("한국어", "ko", False),
        ("hello", "ja", True),
        ("12.5 %", "ru", False),
        ("anything", "qq", False),
        ("GPT-4 и Python", "ru", True),
    ],
)
def test_scripts_of_languages(line, language, wrong):
    assert guard.wrong_script(line, language) == wrong


# Named columns ----------------------------------------------------------------------------------


def table(folder: Path, form: str, names=("de", "en")) -> Path:
    rows = [dict(zip(names, pair, strict=True)) | {"id": i} for i, pair in enumerate(PAIRS[:5])]
    path = folder / f"x.{form}"
    if form == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif form == "jsonl":
        path.write_text(lines(map(json.dumps, rows)))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif form == "nested":
        nested = [{"id": r["id"], "translation": {n: r[n] for n in names}} for r in rows]
        datasets.Dataset.from_list(nested).save_to_disk(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "nested", "folder"])
def test_named_columns_are_read(tmp_path, form):
    path = table(tmp_path, form)
    assert list(find_parallel_text(str(path), "de", "en")) == PAIRS[:5]
    assert list(find_parallel_text(str(path), "en", "de")) == [(e, d) for d, e in PAIRS[:5]]


@pytest.mark.parametrize("columns", ["source=german,target=english", "de=german,en=english"])
def test_columns_may_have_any_names(tmp_path, columns):
    path = str(table(tmp_path, "csv", ("german", "english")))
    assert list(find_parallel_text(path, "de", "en", columns.split(","))) == PAIRS[:5]
    with refused("no column de or source, only german, english, id; name it with --columns"):
        list(find_parallel_text(path, "de", "en"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "de,en\na\n", "x.csv:2: not as many cells as the first line has names"),
        ("x.jsonl", '{"de": "a", "en": "b"}\n[1]\n', "x.jsonl:2: not a JSON object"),
        ("x.jsonl", '{"de": 1, "en": "b"}\n', "x.jsonl:1: de is not text but 1"),
        ("x.parquet", "PAR1", "x.parquet: damaged after row 0"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with refused(message):
        list(find_parallel_text(str(path), "de", "en"))


def test_a_folder_of_several_splits_is_refused(tmp_path):
    parts = {"train": datasets.Dataset.from_list([{"de": "a", "en": "b"}])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")
    with refused("all holds several splits; give one of .*all/train"):
        find_parallel_text(str(tmp_path / "all"), "de", "en")
    assert list(find_parallel_text(str(tmp_path / "all" / "train"), "de", "en")) == [("a", "b")]


def test_a_yaml_file_lists_the_inputs_of_each_pair(tmp_path, capsys):
    write(tmp_path / "german.txt", lines(p[0] for p in PAIRS))
    write(tmp_path / "english.txt", lines(p[1] for p in PAIRS))
    table(tmp_path, "csv", ("fr", "en"))
    write_corpus(tmp_path)
    listing = write(
        tmp_path / "inputs.yaml",
        "de-en:\n  train: ['german.txt,english.txt', train]\n  valid: valid\n  test: test\n"
        "fr-en:\n  train: x.csv\n  valid: x.csv\n  test: [x.csv]\n",
    )
    assert labo("prepare", tmp_path / "out", "--inputs", listing, "--vocabulary", 300) == 0
    data = Prepared(tmp_path / "out")
    assert [str(pair) for pair in data.pairs] == ["de-en", "fr-en"]
    assert data.manifest["read"] == {"train": 60 + 44 + 5, "valid": 13, "test": 13}
    assert "labo: warning: test: also in train: 100.0% of the sources" in capsys.readouterr().err
    arguments = ("prepare", tmp_path / "other", "--inputs", listing)
    assert labo(*arguments, "--pair", "de-en") == 2
    assert "--inputs and --pair exclude each other" in capsys.readouterr().err
    write(listing, "de-en: {train: a, dev: b}\n")
    assert labo(*arguments) == 2
    assert "de-en.dev: must be train, valid or test" in capsys.readouterr().err


def test_the_command_needs_files(tmp_path, capsys):
    assert labo("prepare", tmp_path / "out") == 2
    assert "labo: --pair: " in capsys.readouterr().err


# Several pairs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "tag", "tags"),
    [
        (["de-en"], None, [None]),
        (["de-en", "fr-en"], None, ["<de>", "<fr>"]),
        (["en-de", "en-fr"], None, ["<de>", "<fr>"]),
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


def test_several_pairs_become_one_corpus_with_tags(tmp_path):
    for split, pairs in SPLITS.items():
        for pair, source in (("de-en", 0), ("fr-en", 1)):
            language = pair[:2]
            write(tmp_path / pair / f"{split}.{language}", lines(p[source] for p in pairs))
            write(tmp_path / pair / f"{split}.en", lines(p[1] for p in pairs))
    files = {split: [f"{tmp_path}/{{pair}}/{split}"] for split in SPLITS}
    data = prepare.prepare(
        choose(None, {"pair": ["de-en", "fr-en"], "vocabulary": 310} | files), tmp_path / "out"
    )
    split = data.split("valid")
    assert [str(pair) for pair in data.pairs] == ["de-en", "fr-en"]
    assert split.pair.tolist() == [0] * 8 + [1] * 8
    assert {int(split.source(i)[0]) for i in range(8)} == {4}
    assert {int(split.source(i)[0]) for i in range(8, 16)} == {5}
    tokenizer = AutoTokenizer.from_pretrained(data.path / "tokenizer")
    text = f"<fr> {split.source_text(9)}"
    assert split.source(9).tolist() == tokenizer(text).input_ids
    assert data.frequencies("source")[4:6].tolist() == [44, 44]
    assert data.frequencies("target")[4:6].tolist() == [0, 0]


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "x", r"x\.de: no such file, nor with \.gz, \.xml or \.sgm at its end"),
        ({"x.de": "a\n"}, "x", r"x\.en: no such file"),
        ({"x.de": "a\n"}, "x.de,y", r"^y: no such file|/y: no such file"),
        ({"x.de": "a\n"}, "x.de", r"x\.de:1: 1 columns separated by tabs, but .* need 2"),
        ({"x": "a\tb\nc\n"}, "x", r"x:2: 1 columns, but line 1 has 2"),
        ({"x": "a\tb\nc\td\te\n"}, "x", r"x:2: 3 columns, but line 1 has 2"),
        ({"x.de": "a\nb\n", "x.en": "a\n"}, "x", r"x\.de has 2 lines, .*x\.en has 1: not aligned"),
        (
            {"x.de": "a\n", "x.en": "a\nb\nc\n"},
            "x",
            r"x\.de has 1 lines, .*x\.en has 3: not aligned",
        ),
        (
            {"x.de": b"ok\nb\xe4d\n", "x.en": "a\nb\n"},
            "x",
            r"x\.de:2: byte 0xe4 is not UTF-8",
        ),
        (
            {"x.de": gzip.compress(b"a\n" * 9)[:-9], "x.en": "a\n" * 9},
            "x",
            r"x\.de: truncated or damaged",
        ),
        (
            {"x.de.xml": xml(PAIRS[:2], 0), "x.en.xml": xml(PAIRS[:2], 1, ids=[1, 3])},
            "x",
            r"segment 2 is '7 2' in .*x\.de\.xml, '7 3' in .*: not aligned",
        ),
        (
            {"x.de.xml": xml(PAIRS[:2], 0), "x.en.xml": xml(PAIRS[:3], 1)},
            "x",
            r"segment 3 is missing in .*x\.de\.xml, '7 3' in",
        ),
        (
            {"x.de.xml": '<seg id="1">a\nb\n', "x.en.xml": xml(PAIRS[:1], 1)},
            "x",
            r"x\.de\.xml:1: a <seg> without its end",
        ),
        (
            {"x.de.xml": xml(PAIRS[:1], 0), "x.en": "a\n"},
            "x",
            r"one has <seg> elements, the other has not",
        ),
        ({}, "x.{lang}", r"only \{pair\}, \{source\} and \{target\} are filled in"),
        ({}, "a,b,c", r"two files are FILE,FILE"),
    ],
)
def test_files_that_cannot_be_used_are_refused(corpus, tmp_path, files, name, message):
    for file, content in files.items():
        write(tmp_path / file, content)
    with refused(message):
        run(corpus, out=f"../{tmp_path.name}-out", train=[f"{tmp_path}/{name}"])
    assert not list(corpus.parent.glob(f"*{tmp_path.name}-out*"))


def test_unknown_columns_are_refused(tmp_path):
    write(tmp_path / "x", "a\tb\n")
    with refused("columns en,fr: none is source or de"):
        find_parallel_text(f"{tmp_path}/x", "de", "en", ("en", "fr"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "wmt"}, "unknown preset 'wmt'; did you mean 'wmt14'"),
        (
            {"pair": ["german-english"]},
            "--pair: each is two languages, .*got german-english",
        ),
        ({"pair": ["de-de"]}, "got de-de"),
        ({"pair": ["de-en", "de-en"]}, "given once; got de-en, de-en"),
        ({"train": []}, "--train: no training data"),
        ({"valid": []}, "--valid: no such data; give --valid or --holdout"),
        ({"test": []}, "--test: no such data; give --test or --holdout-test"),
        ({"holdout": 23}, "--valid and --holdout exclude each other"),
        ({"valid": [], "holdout": 1}, "leaves none to train on"),
        ({"merges": 9}, "--vocabulary and --merges exclude each other"),
        ({"vocabulary": None, "codes": "x"}, "they need --moses, or text that is --tokenized"),
        ({"share": "some"}, "--share: .*'all', 'merges' or 'nothing'"),
        ({"max_tokens": -1}, "--max-tokens: .*greater than or equal to 0"),
        ({"tag": "german"}, "--tag: "),
        ({"aggressive_hyphens": True}, "^--aggressive-hyphens is an option of --moses$"),
    ],
)
def test_wrong_requests_are_refused(corpus, settings, message):
    with refused(message, RequestError):
        ask(corpus, **settings)


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


@pytest.mark.parametrize(
    "manifest", ['{"format": 2, "task": "language_modeling"}', '{"format": 2,', '{"name": "mine"}']
)
def test_force_replaces_nothing_that_another_command_made(corpus, tmp_path, manifest):
    out = tmp_path / "out"
    write(out / "prepared.json", manifest)
    before = digests(out)
    with refused("out exists and was not made by `labo prepare`: choose another", RequestError):
        prepare.prepare(ask(corpus), out, force=True)
    assert digests(out) == before


def test_an_existing_folder_that_is_read_is_not_written(plain, tmp_path, capsys):
    """Text, subwords and the list of inputs in the folder that --force would replace."""
    out = tmp_path / "out"
    shutil.copytree(plain.path, out)
    write_corpus(out / "raw")
    dataset = datasets.Dataset.from_dict({"de": ["a"], "en": ["b"]})
    dataset.save_to_disk(tmp_path / "rows")
    write(out / "codes", "#version: 0.2\na b\n")
    write(out / "inputs.yaml", f"de-en:\n  train: {out}/raw/train\n")
    before = digests(tmp_path)
    outside = write_corpus(tmp_path.parent / f"{tmp_path.name}-raw")
    codes = {"vocabulary": None, "codes": str(out / "codes"), "text": {"tokenized": True}}
    for options, folder, message in (
        (ask(out / "raw"), out, "out contains the input .*out/raw/train.de: choose another"),
        (ask(outside, **codes), out, "out contains the input .*out/codes"),
        (ask(outside, train=[str(tmp_path / "rows")]), tmp_path / "rows/x", "is inside the input"),
    ):
        with refused(message, RequestError):
            prepare.prepare(options, folder, force=True)
    arguments = ["prepare", str(out), "--inputs", str(out / "inputs.yaml"), "--force"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert "out contains the input" in capsys.readouterr().err
    assert digests(tmp_path) == before


@pytest.mark.parametrize(
    ("train", "settings", "message"),
    [
        ([("", "a"), ("b", "")], {}, "the train split is empty: dropped 2 empty"),
        (PAIRS[:3], {"max_pieces": 1}, "the train split is empty: dropped 3 too long"),
        (PAIRS[:3], {"valid": None, "holdout": 9}, "the valid split is empty$"),
        (PAIRS[:3], {"vocabulary": 200}, "vocabulary of 200 cannot hold"),
    ],
)
def test_a_corpus_of_which_nothing_is_left_is_refused(tmp_path, train, settings, message):
    folder = write_corpus(tmp_path / "in", SPLITS | {"train": train})
    with refused(message):
        prepare.prepare(ask(folder, **settings), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


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


@pytest.fixture
def copy(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(plain.path, tmp_path / "copy")


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_every_flipped_bit_of_a_prepared_folder_is_found(copy):
    chance = random.Random(0)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    for number in range(150):
        path = files[number % len(files)]
        whole = path.read_bytes()
        flip(path, chance.randrange(len(whole)), chance.randrange(8))
        with pytest.raises(DataError):
            Prepared(copy)
        path.write_bytes(whole)
    Prepared(copy)


def test_a_verified_folder_is_not_read_again_unless_it_changed_or_verify_says_so(copy, monkeypatch):
    monkeypatch.setattr(checksums, "_SETTLED", -(10**18))
    Prepared(copy)
    read = []
    real = checksums.sha256
    monkeypatch.setattr(checksums, "sha256", lambda path: read.append(path.name) or real(path))
    Prepared(copy)
    assert read == []
    os.utime(copy / "valid.arrow")
    Prepared(copy)
    assert read == ["valid.arrow"]
    monkeypatch.setenv("LABO_VERIFY", "1")
    Prepared(copy)
    assert len(read) > 5


def test_a_file_that_was_changed_a_moment_ago_is_not_remembered(copy, monkeypatch):
    """Its time of change may stay the same when it is changed once more."""
    Prepared(copy)
    stamp = (copy / "valid.arrow").stat()
    flip(copy / "valid.arrow", 100)
    os.utime(copy / "valid.arrow", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with refused("valid.arrow is damaged"):
        Prepared(copy)


def seal(folder: Path) -> None:
    """Make the checksums of a folder fit what is in it."""
    manifest = json.loads((folder / "prepared.json").read_text())
    manifest["sha256"] = {name: sha256(folder / name) for name in manifest["sha256"]}
    write(folder / "prepared.json", json.dumps(sealed(manifest)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("source", [[10**6]], "a source token id is outside"),
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
    with (
        pa.OSFile(str(copy / "train.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    seal(copy)
    with refused(message):
        Prepared(copy).split("train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("frequencies.json", "{}", "source: missing"),
        ("frequencies.json", '{"source": [1], "target": [1]}', "1 counts of source types, not"),
        ("frequencies.json", '{"source": [-1], "target": [1]}', "greater than or equal to 0"),
        ("train.arrow", "", "train.arrow: cannot be read"),
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


def test_a_manifest_cannot_name_files_elsewhere(copy):
    manifest = json.loads((copy / "prepared.json").read_text())
    manifest["sha256"]["../secret"] = "0" * 64
    write(copy / "prepared.json", json.dumps(sealed(manifest)))
    with refused("names a file elsewhere"):
        Prepared(copy)


# Replacing --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("swap", ["with", "without"])
@pytest.mark.parametrize("moment", range(1, 6))
def test_a_replacement_that_is_killed_leaves_the_old_or_the_new(plain, tmp_path, swap, moment):
    for name in ("data", "new"):
        shutil.copytree(plain.path, tmp_path / name)
        (tmp_path / name / f"{name}.mark").touch()
    lab_runs.replace_and_die(tmp_path / "new", tmp_path / "data", swap == "with", moment)
    Prepared(tmp_path / "data")
    assert len(list((tmp_path / "data").glob("*.mark"))) == 1


def test_a_failed_replacement_keeps_the_old(corpus, tmp_path, monkeypatch):
    out = tmp_path / "data"
    before = prepare.prepare(ask(corpus), out).fingerprint

    def fail(*paths):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folders, "replace_folder", fail)
    with pytest.raises(LabError, match="Input/output error"):
        prepare.prepare(ask(corpus, vocabulary=310), out, force=True)
    assert Prepared(out).fingerprint == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


# No hang, no abort ------------------------------------------------------------------------------


def test_a_word_of_a_megabyte_is_dropped_or_refused_and_never_learned_from(tmp_path):
    files = {f"{split}.{side}": "the cat sat\n" * 4 for split in SPLITS for side in ("de", "en")}
    files["train.de"] += "x" * 1_000_000 + "\n"
    files["train.en"] += "a cat\n"
    for name, text in files.items():
        write(tmp_path / name, text)
    names = {split: [str(tmp_path / split)] for split in SPLITS}
    settings = {"pair": ["de-en"], **names, "vocabulary": 300}
    data = prepare.prepare(choose(None, settings), tmp_path / "out")
    assert data.manifest["dropped"]["train"] == {"too many characters": 1}
    assert data.manifest["read"]["train"] == 5
    # Without the limit the word is encoded, and the subwords are learned in no more time.
    data = prepare.prepare(choose(None, settings | {"max_characters": 0}), tmp_path / "all")
    assert data.manifest["sizes"]["train"] == 5
    write(tmp_path / "valid.de", "the cat sat\n" * 3 + "x" * 10_001 + "\n")
    with refused("line 4 of the valid split has 10001 characters; .* set by --max-characters"):
        prepare.prepare(choose(None, settings), tmp_path / "no")


@pytest.mark.parametrize("text", ["<seg id=1>" * 20_000, "<seg id=1>\n" * 20_000, "<seg " * 20_000])
def test_unclosed_tags_are_refused_at_once(tmp_path, text):
    write(tmp_path / "a.xml", text)
    write(tmp_path / "b.xml", text)
    with refused(r"a.xml:1: a <seg> (without its end|tag that does not end)"):
        list(find_parallel_text(f"{tmp_path}/a.xml,{tmp_path}/b.xml", "de", "en"))


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, "_LONGEST_LINE", 1000)
    write(tmp_path / "a.tsv", "a\tb\n" + "x" * 1001)
    with refused(r"a.tsv:2: a line of more than 1000 bytes"):
        list(find_parallel_text(str(tmp_path / "a.tsv"), "de", "en"))


def test_text_that_inflates_a_thousandfold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "_ALWAYS_ALLOWED", 1 << 16)
    write(tmp_path / "a.tsv.gz", gzip.compress(b"a\tb\n" * 100_000))
    with refused(r"a.tsv.gz: inflates to more than 200 times its size"):
        list(find_parallel_text(str(tmp_path / "a.tsv.gz"), "de", "en"))


def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with refused("pipe: truncated or damaged after line 0 .* not a regular file"):
        list(read_lines(tmp_path / "pipe"))


@pytest.mark.parametrize("option", ["--vocabulary", "--merges"])
def test_a_vocabulary_that_no_memory_holds_is_refused(corpus, tmp_path, capsys, option):
    arguments = ["prepare", str(tmp_path / "out"), "--pair", "de-en", option, str(10**12)]
    with pytest.raises(SystemExit):
        main([*arguments, "--train", "x", "--valid", "x", "--test", "x"])
    assert f"{option[2:]}: should be less than or equal to 10000000" in capsys.readouterr().err


def test_names_are_filled_in_and_nothing_else(tmp_path):
    for name in ("{pair.upper}", "{source:1000000000}", "{0}", "{", "}", "{}", "{other}"):
        with refused("only {pair}, {source} and {target} are filled in"):
            find_parallel_text(str(tmp_path / name), "de", "en")


# Presets ----------------------------------------------------------------------------------------


def test_presets_are_the_recipes(corpus):
    fourteen = ask(corpus, "iwslt14", valid=None, vocabulary=None)
    assert (fourteen.holdout, fourteen.merges, fourteen.share) == (23, 10_000, "merges")
    assert (fourteen.max_tokens, fourteen.max_ratio) == (175, 1.5)
    assert fourteen.text == TextOptions(moses=True, lowercase=True, straight_apostrophes=True)
    assert fourteen.training_text == TextOptions(moses=True, lowercase=True)
    wmt = ask(corpus, "wmt14", valid=None, vocabulary=None)
    assert (wmt.holdout, wmt.merges, wmt.max_pieces, wmt.max_piece_ratio) == (100, 40_000, 250, 1.5)
    assert wmt.training_text.normalize_punctuation
    assert not wmt.text.normalize_punctuation
    seventeen = ask(corpus, "iwslt17", vocabulary=None)
    assert (seventeen.vocabulary, seventeen.max_pieces, seventeen.share) == (16_384, 250, "all")
    assert not seventeen.text.spaced


@pytest.mark.parametrize("preset", PREPARE_PRESETS)
def test_options_go_over_every_preset(corpus, preset):
    options = ask(corpus, preset, {"lowercase": True}, vocabulary=500, max_tokens=7)
    assert (options.vocabulary, options.merges, options.holdout) == (500, None, 0)
    assert options.max_tokens == 7
    assert options.text.lowercase
    assert options.training_text.lowercase


@given(
    st.sampled_from(sorted(PREPARE_PRESETS)), st.sampled_from(["moses", "tokenized"]), st.booleans()
)
def test_text_options_hold_for_training_text_too(preset, name, value):
    text = {name: value} | ({"moses": False, "aggressive_hyphens": False} if value else {})
    if name == "moses":
        text = {"moses": value, "aggressive_hyphens": False}
    files = {"pair": ["de-en"], "train": ["a"], "valid": ["b"], "test": ["c"]}
    options = choose(preset, text | files)
    assert getattr(options.text, name) == getattr(options.training_text, name) == value


# The same input, the same output; all or nothing ------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from labo.lab.translation import cleaning, options, prepare

folder, out, number = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
files = {split: [str(folder / split)] for split in ("train", "valid", "test")}
for name, text in (("bytes", {}), ("words", {"moses": True})):
    settings = {"pair": ["de-en"], "merges": 80, "share": "merges"} | files
    prepare.prepare(options.choose(None, text | settings), out / f"{name}{number}")
"""


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_same_input_gives_the_same_bytes_in_every_process(corpus, tmp_path):
    for number in (1, 2):
        process = start(SCRIPT, corpus, tmp_path, number, PYTHONHASHSEED=str(number))
        assert process.communicate()[1] == ""  # no bar, for it is no terminal
        assert process.returncode == 0
    for name in ("bytes", "words"):
        assert digests(tmp_path / f"{name}1") == digests(tmp_path / f"{name}2")


def test_the_result_does_not_depend_on_the_number_of_processes(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_CHUNK", 7)
    options = ask(corpus, text={"moses": True}, holdout=5, valid=None)
    for workers in (1, 2):
        prepare.prepare(options, tmp_path / str(workers), workers=workers)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


HANGING = """
import sys, time
from labo.lab.translation import cleaning, options, prepare

def hang(self, inputs):
    print("nearly done", flush=True)
    time.sleep(600)

prepare._Work.write_manifest = hang
exec(sys.argv[4])
"""


def test_a_killed_preparation_leaves_nothing_that_looks_finished(corpus, tmp_path):
    process = start(HANGING, corpus, tmp_path, "", SCRIPT)
    assert process.stdout.readline() == "nearly done\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "bytes").exists()
    left = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert left  # the next attempt clears it away
    assert all(path.name.startswith(".") for path in left)
    for path in left:
        with refused("no prepared data here"):
            Prepared(path)
    prepare.prepare(ask(corpus), tmp_path / "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["bytes"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_preparation_clears_up(corpus, tmp_path, monkeypatch, plain, fault):
    def fail(*_):
        raise fault

    monkeypatch.setattr(prepare._Work, "write_manifest", fail)
    with pytest.raises((KeyboardInterrupt, LabError)):
        prepare.prepare(ask(corpus), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# The command line -------------------------------------------------------------------------------


def labo(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code or 0


def test_the_command_prepares_and_says_what_it_did(corpus, tmp_path, capsys):
    status = labo(
        *("prepare", tmp_path / "out", "--pair", "de-en", "--train", corpus / "train"),
        *("--valid", corpus / "valid", "--test", corpus / "test", "--test", corpus / "valid"),
        *("--preset", "multi30k", "--merges", 30, "--no-lowercase", "--share", "merges"),
    )
    output = capsys.readouterr()
    assert status == 0
    assert output.err == ""
    data = Prepared(tmp_path / "out")
    assert data.text == TextOptions(moses=True, normalize_punctuation=True)
    assert data.manifest["processing"]["merges"] == 30
    assert len(data.split("test")) == 16
    rows = [line.split() for line in output.out.splitlines()]
    tokens = data.manifest["tokens"]["test"]
    assert ["test", "16", "0", "16", str(tokens["source"]), str(tokens["target"])] in [
        row[:6] for row in rows
    ]
    assert output.out.endswith(
        f"labo train translation data.path={tmp_path / 'out'} model.embeddings=decoder\n"
    )
    assert "valid: also in train: 0.0% of the sources, 0.0% of the targets" in output.out
    assert "separate" in output.out
    german, english = SPLITS["valid"][0]
    assert f"\nGerman: {german}\nEnglish: {english}\n" in output.out


@pytest.mark.parametrize(
    ("columns", "warned"), [("de,en", True), ("en,de", False), ("de_AT,eng", True)]
)
def test_swapped_languages_are_warned_about(tmp_path, capsys, columns, warned):
    write(tmp_path / "x.tsv", lines(f"{english}\t{german}" for german, english in PAIRS))
    arguments = ("prepare", tmp_path / "out", "--columns", columns, "--train", tmp_path / "x.tsv")
    languages = ("de_AT", "eng") if "eng" in columns else ("de", "en")
    options = ("--pair", "-".join(languages), "--holdout", 10, "--holdout-test", 10)
    assert labo(*arguments, *options, "--vocabulary", 300) == 0
    output = capsys.readouterr()
    warning = "x.tsv: the languages look swapped: "
    assert (f"labo: warning: {warning}" in output.err) == warned
    assert (f"note: {warning}" in output.out) == warned
    assert "German: " in output.out
    assert "English: " in output.out


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [
        ("de", "xx", 44),  # no table of words
        ("en", "en", 44),
        ("en_GB", "en_US", 44),
        ("de", "en", 19),  # too few sentences
        ("fr", "it", 44),  # neither is there
    ],
)
def test_what_is_not_clearly_swapped_is_not_called_so(source, target, count):
    swapped = [(english, german) for german, english in PAIRS[:count]]
    assert not look_swapped(swapped, source, target)
    mixed = swapped + PAIRS[:count]
    assert not look_swapped(mixed, "de", "en")


def test_the_command_takes_columns_and_warns_of_languages(tmp_path, capsys):
    write(tmp_path / "x.tsv", lines(f"{english}\t{german}" for german, english in PAIRS))
    arguments = ("prepare", tmp_path / "out", "--pair", "uk-en", "--train", tmp_path / "x.tsv")
    options = ("--columns", "en,uk", "--holdout", 10, "--holdout-test", 10, "--moses")
    assert labo(*arguments, *options, "--vocabulary", 100) == 0
    assert "Moses has no rules for uk" in capsys.readouterr().out
    data = Prepared(tmp_path / "out").split("valid")
    assert (data.source_text(0), data.target_text(0)) == PAIRS[9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "wmt"], "labo: unknown preset 'wmt'; did you mean 'wmt14'?"),
        (["--holdout", "23"], "labo: --valid and --holdout exclude each other\n"),
        (["--codes", "nowhere", "--moses"], "labo: nowhere: no such file\n"),
    ],
)
def test_the_command_refuses_in_one_line(corpus, tmp_path, capsys, arguments, message):
    files = [text for split in SPLITS for text in (f"--{split}", corpus / split)]
    assert labo("prepare", tmp_path / "out", "--pair", "de-en", *files, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_lines_end_at_line_feeds_only(tmp_path):
    write(tmp_path / "x", "a\x0bb\x0cc\u2028d\x85e\r\nf\rg\n\nh")
    assert list(read_lines(tmp_path / "x")) == ["a\x0bb\x0cc\u2028d\x85e", "f\rg", "", "h"]


def test_what_is_held_is_not_read_again(plain, tmp_path):
    folder = shutil.copytree(plain.path, tmp_path / "data")
    data = Prepared(folder)
    data.hold()
    shutil.rmtree(folder)
    for split in ("train", "valid", "test"):
        assert len(data.split(split)) == len(plain.split(split))
    assert data.tokenizer_files == plain.tokenizer_files
    assert (data.frequencies("target") == plain.frequencies("target")).all()
