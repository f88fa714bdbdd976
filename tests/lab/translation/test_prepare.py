"""Preparing parallel text: what is written, cleaned, held out and said."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from labo.lab.errors import LabError, RequestError
from labo.lab.recipes import load_recipe
from labo.lab.text import arrow
from labo.lab.translation import prepare
from labo.lab.translation.options import PREPARE_PRESETS, Processing, choose
from labo.lab.translation.prepare import prepare_pairs
from labo.lab.translation.prepared import Pair, Prepared
from labo.lab.translation.text import Pipeline, TextOptions
from tiny_corpus import (
    PAIRS,
    SPLITS,
    ask,
    counted,
    digests,
    labo,
    lines,
    refused,
    run,
    write,
    write_corpus,
)


@pytest.fixture(scope="module")
def moses(corpus) -> Prepared:
    return run(corpus, "moses", text={"moses": True, "lowercase": True}, vocabulary=None, merges=50)


def train_sources(data: Prepared) -> list[str]:
    train = data.split("train")
    ids = [train.source(i) for i in range(len(train))]
    return data.tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_several_files_are_one_corpus_in_their_order(corpus):
    parts = [str(corpus / "valid"), str(corpus / "test")]
    data = run(corpus, "several", test=parts).split("test")
    texts = [(data.source_text(i), data.target_text(i)) for i in range(len(data))]
    assert texts == SPLITS["valid"] + SPLITS["test"]


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


def test_splits_are_the_same_however_many_batches_they_have(corpus, plain, monkeypatch):
    monkeypatch.setattr(arrow, "_BATCH", 3)
    monkeypatch.setattr(prepare, "_CHUNK", 3)
    split, whole = run(corpus, "batches").split("train"), plain.split("train")
    assert split.pair.tolist() == [0] * 44
    for i in range(len(split)):
        assert split.source(i).tolist() == whole.source(i).tolist()
        assert split.sides["target"].part(i, 2, 3).tolist() == whole.target(i)[2:5].tolist()
    assert split.lengths("source").tolist() == [len(split.source(i)) for i in range(44)]


def test_frequencies_are_the_counts_of_the_training_split(plain):
    split = plain.split("train")
    for side in ("source", "target"):
        counts = Counter(np.concatenate(split.sides[side].chunks).tolist())
        frequencies = plain.frequencies(side)
        assert frequencies.tolist() == [counts[i] for i in range(len(plain.tokenizer))]
        assert frequencies[2] == len(split)
        assert frequencies.sum() == plain.manifest["tokens"]["train"][side]


def test_subwords_are_learned_from_the_training_split_alone(tmp_path):
    names = ("train", "valid", "test")
    one, other = ({n: list(SPLITS[n]) for n in names} for _ in range(2))
    other["valid"] = [("xyzxyz" * 5, "qqqq" * 9)] * 30
    data = [run(write_corpus(tmp_path / str(n), s)) for n, s in enumerate((one, other))]
    assert digests(data[0].path / "tokenizer") == digests(data[1].path / "tokenizer")
    assert data[0].fingerprint != data[1].fingerprint


def test_sides_may_share_all_or_the_merges_or_nothing(corpus):
    text = {"moses": True}
    joint, common, separate = (
        run(corpus, share, text=text, share=share, vocabulary=None, merges=20)
        for share in ("all", "merges", "nothing")
    )
    assert joint.tokenizer is joint.target_tokenizer
    assert [d.joint for d in (joint, common, separate)] == [True, False, False]
    pipeline = Pipeline(joint.text, "de", "en")
    for pair in SPLITS["train"]:
        # one set of merges: split alike, numbered otherwise
        source, target = pipeline.source(pair[0]), pipeline.target(pair[1])
        assert joint.tokenizer.tokenize(source) == common.tokenizer.tokenize(source)
        assert joint.tokenizer.tokenize(target) == common.target_tokenizer.tokenize(target)
    sizes = [len(d.tokenizer) + len(d.target_tokenizer) for d in (joint, common)]
    assert sizes[1] < sizes[0]
    for folder in ("tokenizer", "target_tokenizer"):
        learned = json.loads((separate.path / folder / "tokenizer.json").read_text())
        assert len(learned["model"]["merges"]) == 20
    for data in (common, separate):
        assert len(data.frequencies("source")) == len(data.tokenizer)
        assert len(data.frequencies("target")) == len(data.target_tokenizer)
        said = data.target_tokenizer.decode(data.split("test").target(0), skip_special_tokens=True)
        assert said == pipeline.target(SPLITS["test"][0][1])


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


def test_training_pairs_are_cleaned_and_the_dropped_are_counted(tmp_path):
    bad = [("", "x"), ("  ", "y"), ("a " * 12, "b " * 12), ("a b c", "a b c d e"), ("a b", "a b c")]
    data = counted(tmp_path, PAIRS[:40] + bad, max_tokens=11, max_ratio=1.5)
    assert data.manifest["dropped"]["train"] == {"empty": 2, "too long": 1, "length ratio": 1}
    assert data.manifest["read"]["train"] == 45
    assert data.manifest["sizes"]["train"] == 41  # 3 to 2 is not above 1.5


def test_scored_splits_lose_nothing_but_empty_lines(tmp_path):
    pairs = [("a " * 50, "b"), ("", "b"), ("c", "d")]
    limits = {"max_tokens": 20, "max_ratio": 1.5, "max_pieces": 50, "max_piece_ratio": 1.5}
    write_corpus(tmp_path, SPLITS | {"valid": pairs})
    data = run(tmp_path, **limits)
    assert data.manifest["dropped"]["valid"] == {"empty": 1}
    assert len(data.split("valid")) == 2


def test_every_nth_cleaned_training_pair_is_held_out(tmp_path):
    bad = [("", "dropped before counting")]
    folder = write_corpus(tmp_path, {"train": bad + PAIRS[:30] + bad + PAIRS[30:]})
    data = run(folder, valid=None, test=None, holdout=23, holdout_test=5)
    valid, test = data.split("valid"), data.split("test")
    assert [valid.source_text(i) for i in range(len(valid))] == [PAIRS[22][0], PAIRS[45][0]]
    rest = [pair for number, pair in enumerate(PAIRS, 1) if number % 23]
    assert [test.target_text(i) for i in range(len(test))] == [p[1] for p in rest[4::5]]
    assert train_sources(data) == [p[0] for number, p in enumerate(rest, 1) if number % 5]


def test_limits_in_subwords_hold_for_training_and_held_out_pairs(tmp_path):
    long = [("ж" * 60, "ж" * 60)]
    folder = write_corpus(tmp_path, {"train": PAIRS[:9] + long + PAIRS[9:19], "test": long})
    data = run(folder, valid=None, holdout=10, max_pieces=100, vocabulary=262)
    assert data.manifest["dropped"]["valid"] == {"too long": 1}
    assert data.manifest["sizes"] == {"train": 18, "valid": 1, "test": 1}


def test_training_text_keeps_its_apostrophes(tmp_path):
    data = counted(tmp_path, [("l\u2019a", "b\u2019c")] * 4, text={"straight_apostrophes": True})
    assert train_sources(data) == ["l\u2019a"] * 4
    assert data.text.straight_apostrophes


TOKENIZED = [("er &apos;s .", "it &apos;s ."), ("gut @-@ e .", "well @-@ done .")] * 4


SUBWORDS = [("Da@@ s Ki@@ nd", "The chi@@ ld"), ("▁Der ▁Ba um", "▁The ▁tre e")] * 4


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (TOKENIZED, "train.de: the text is tokenized already .100% of 8 lines .*--tokenized takes"),
        (SUBWORDS, "train.de: the text is split into subwords already .*--join-subwords joins"),
    ],
)
def test_processed_text_is_refused(tmp_path, pairs, message):
    with refused(message):
        counted(tmp_path, pairs, preset="iwslt14", vocabulary=None, merges=5)
    assert not (tmp_path / "out").exists()


def test_tokenized_text_is_taken_as_such_under_a_preset(tmp_path):
    write_corpus(tmp_path, dict.fromkeys(SPLITS, TOKENIZED))
    settings = {"vocabulary": None, "merges": 5}
    data = run(tmp_path, preset="iwslt14", text={"tokenized": True}, **settings)
    assert data.text.tokenized
    assert not data.text.moses
    assert train_sources(data)[0] == "er &apos;s ."
    assert data.manifest["notes"] == ["the text is tokenized and taken as such"]


def test_subwords_are_joined_and_marks_can_be_taken_as_text(tmp_path):
    data = counted(tmp_path, SUBWORDS, join_subwords=True)
    assert train_sources(data)[:2] == ["Das Kind", "Der Baum"]
    assert data.manifest["notes"] == ["the text is split into subwords: they are joined first"]
    data = run(tmp_path, "raw", force_raw=True)
    assert train_sources(data)[0] == "Da@@ s Ki@@ nd"
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
    nothing = {"source": 0, "target": 0, "pair": 0}
    assert data.manifest["overlap"] == {"valid": nothing, "test": nothing}
    assert sum(data.manifest["sizes"].values()) == len(rows)
    for side in ("source_text", "target_text"):
        splits = (data.split("valid"), data.split("test"))
        one, other = ({getattr(part, side)(i) for i in range(len(part))} for part in splits)
        assert one
        assert not one & other
    by_pair = run(
        folder, "by-pair", valid=None, test=None, holdout=6, holdout_test=6, holdout_by="pair"
    )
    assert by_pair.manifest["overlap"]["valid"]["source"] > 0
    shown = by_pair.split("valid")
    assert [shown.source_text(i) for i in range(len(shown))] == [row[0] for row in rows[5::6]]


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


def test_a_yaml_file_lists_the_inputs_of_each_pair(tmp_path, capsys):
    write(tmp_path / "german.txt", lines(p[0] for p in PAIRS))
    write(tmp_path / "english.txt", lines(p[1] for p in PAIRS))
    write(tmp_path / "x.csv", "fr,en\n" + lines(",".join(pair) for pair in PAIRS[:5]))
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
    assert "unknown key 'de-en.dev' (keys of de-en: train, valid, test)" in capsys.readouterr().err


def test_several_pairs_become_one_corpus_with_tags(tmp_path):
    for pair, source in (("de-en", 0), ("fr-en", 1)):
        write_corpus(tmp_path / pair)
        for split, pairs in SPLITS.items():
            write(tmp_path / pair / f"{split}.{pair[:2]}", lines(p[source] for p in pairs))
    data = run(tmp_path / "{pair}", tmp_path / "out", pair=["de-en", "fr-en"], vocabulary=310)
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


def test_the_same_input_gives_the_same_bytes_in_any_process_and_number_of_them(corpus, tmp_path):
    files = {f"--{split}": str(corpus / split) for split in ("train", "test")}
    options = {"--pair": "de-en", "--merges": "80", "--share": "merges", "--holdout": "5"} | files
    command = [sys.executable, "-m", "labo", "prepare", str(tmp_path / "out"), "--workers", "2"]
    command += ["--moses", *(text for option in options.items() for text in option)]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stderr == b""  # no bar, for it is no terminal
    settings = {"merges": 80, "share": "merges", "holdout": 5, "vocabulary": None, "valid": None}
    here = run(corpus, tmp_path / "here", text={"moses": True}, **settings)
    assert digests(here.path) == digests(tmp_path / "out")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_preparation_clears_up(corpus, tmp_path, monkeypatch, fault):
    def fail(*_):
        raise fault

    write(tmp_path / ".out.preparing" / "train.text", "left by one that was killed")
    monkeypatch.setattr(prepare._Work, "write_manifest", fail)
    with pytest.raises((KeyboardInterrupt, LabError)):
        prepare.prepare(ask(corpus), tmp_path / "out")
    assert not list(tmp_path.iterdir())


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
        f"labo train multi30k data.path={tmp_path / 'out'} model.embeddings=decoder\n"
    )
    assert "valid: also in train: 0.0% of the sources, 0.0% of the targets" in output.out
    assert "separate" in output.out
    german, english = SPLITS["valid"][0]
    assert f"\nGerman: {german}\nEnglish: {english}\n" in output.out


@pytest.mark.parametrize("preset", [None, *PREPARE_PRESETS])
def test_the_recipe_of_the_preset_is_printed(plain, preset, capsys):
    prepare.summarize(plain, preset=preset)
    *_, command = capsys.readouterr().out.splitlines()
    _, _, recipe, setting = command.split()
    assert load_recipe(recipe, [setting]).data.path == str(plain.path)
    assert recipe == {None: "translation", "iwslt17": "iwslt17_multi"}.get(preset, preset)


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


def test_the_command_takes_columns_and_warns_of_languages(tmp_path, capsys):
    write(tmp_path / "x.tsv", lines(f"{english}\t{german}" for german, english in PAIRS))
    arguments = ("prepare", tmp_path / "out", "--pair", "uk-en", "--train", tmp_path / "x.tsv")
    options = ("--columns", "en,uk", "--holdout", 10, "--holdout-test", 10, "--moses")
    assert labo(*arguments, *options, "--vocabulary", 100) == 0
    assert "Moses has no rules for uk" in capsys.readouterr().out
    data = Prepared(tmp_path / "out").split("valid")
    assert (data.source_text(0), data.target_text(0)) == PAIRS[9]


def test_the_command_refuses_in_one_line(corpus, tmp_path, capsys):
    assert labo("prepare", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith("labo: --pair: ")
    files = [text for split in SPLITS for text in (f"--{split}", corpus / split)]
    codes = ("--codes", "nowhere", "--moses")
    assert labo("prepare", tmp_path / "out", "--pair", "de-en", *files, *codes) == 2
    assert capsys.readouterr().err == "labo: nowhere: no such file\n"
    assert not list(tmp_path.iterdir())
