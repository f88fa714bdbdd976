"""The built-in phrases: right in every language, drawn with a Zipf law, never seen before."""

from __future__ import annotations

import datetime
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from babel import Locale

from labo.lab.errors import DataError
from labo.lab.run.checksums import cache_folder
from labo.lab.translation import cldr
from labo.lab.translation.cldr import cldr_data, draw_phrases
from labo.lab.translation.options import parse_pairs
from labo.lab.translation.prepared import Prepared
from tiny_corpus import refused


def draw(*names: str, size: int = 1500, held_out: int = 100, seed: int = 0):
    return draw_phrases(parse_pairs(names), size=size, held_out=held_out, seed=seed)


@pytest.fixture(scope="module")
def phrases():
    return draw("de-en", "fr-en")


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("date", ("Montag, 5. März 2012", "Monday, March 5, 2012", "lundi 5 mars 2012")),
        ("relative_time", ("vor 3 Stunden", "3 hours ago", "il y a 3 heures")),
        ("rate", ("12 Meter pro Sekunde", "12 meters per second", "12 mètres par seconde")),
    ],
)
def test_one_content_is_formatted_in_each_language(monkeypatch, kind, texts):
    monkeypatch.setattr(cldr, "_day", lambda generator: datetime.date(2012, 3, 5))
    monkeypatch.setattr(cldr, "_number", lambda generator: 3)
    monkeypatch.setattr(cldr, "_quantity", lambda generator: 12)
    book = cldr._Phrasebook(0)
    wanted = dict(zip(cldr.LANGUAGES, texts, strict=True))
    for seed in range(3000):
        content = getattr(book, kind)(random.Random(seed))
        said = {name: " ".join(content(name).split()) for name in cldr.LANGUAGES}
        if said["en"] == wanted["en"]:
            assert said == wanted
            return
    pytest.fail(f"{wanted['en']!r} was never drawn")


def test_what_is_named_has_a_name_in_all_languages():
    book = cldr._Phrasebook(0)
    sizes = [len(z.names) for z in (book.territories, book.languages, book.currencies)]
    assert sizes == [263, 643, 303]
    assert 180 < len(book.units.names) <= 191
    for language in cldr.LANGUAGES:
        locale = Locale(language)
        assert set(book.territories.names) <= set(locale.territories)
        assert set(book.languages.names) <= set(locale.languages)


def test_no_phrase_occurs_twice(phrases):
    texts = [text for rows in phrases.values() for row in rows for text in set(row[1:])]
    assert len(texts) == len(set(texts))
    assert {split: len(rows) for split, rows in phrases.items()} == {
        "train": 3000,
        "valid": 200,
        "test": 200,
    }


def test_phrases_are_clean_and_reordered(phrases):
    rows = [row for rows in phrases.values() for row in rows]
    for _, source, target in rows:
        for text in (source, target):
            assert text == " ".join(text.split(" ")).strip()
            assert not set(text) & set("\u00a0\u202f\u2009{}")
    # "vor 3 Stunden" is "3 hours ago": the number moves
    moved = sum(
        source.split()[0].isdecimal() != target.split()[0].isdecimal() for _, source, target in rows
    )
    assert moved > len(rows) / 20


def test_splits_are_drawn_alike(phrases):
    means = [
        sum(len(row[2].split()) for row in rows) / len(rows)
        for rows in (phrases["train"], phrases["valid"], phrases["test"])
    ]
    assert max(means) < 1.25 * min(means)


def test_names_follow_a_zipf_law():
    zipf = cldr._Zipf([f"name {i}" for i in range(200)], seed=1)
    generator = random.Random(2)
    counts = Counter(zipf.draw(generator) for _ in range(60_000))
    total = sum(1 / k for k in range(1, 201))
    for rank in (1, 2, 5, 20):
        expected = 60_000 / rank / total
        assert counts[zipf.names[rank - 1]] == pytest.approx(expected, abs=5 * expected**0.5)
    assert len(counts) == 200
    assert len(set(zipf.draw_several(generator, 4))) == 4


def test_the_seed_decides_the_phrases():
    assert draw("de-en", size=80, held_out=9) == draw("de-en", size=80, held_out=9)
    assert draw("de-en", size=80, held_out=9) != draw("de-en", size=80, held_out=9, seed=1)


@pytest.mark.parametrize("name", ["de-en", "en-fr"])
@pytest.mark.usefixtures("_own_cache")
def test_every_direction_is_prepared(name):
    data = cldr_data([name], size=300, vocabulary=500)
    assert [str(pair) for pair in data.pairs] == [name]
    assert data.manifest["sizes"] == {"train": 300, "valid": 30, "test": 30}
    assert data.manifest["vocabulary"] == {"kind": "joint", "source": 500, "target": 500}
    test = data.split("test")
    for index in range(30):
        target = data.tokenizer.decode(test.target(index), skip_special_tokens=True)
        assert target == test.target_text(index)


@pytest.mark.usefixtures("_own_cache")
def test_several_directions_are_tagged():
    data = cldr_data(["de-en", "fr-en"], size=200, vocabulary=500)
    assert [pair.tag for pair in data.pairs] == ["<de>", "<fr>"]
    train = data.split("train")
    assert len(train) == 400
    assert {int(train.source(i)[0]) for i in range(400)} == {4, 5}


def test_the_cache_is_used_and_named_by_what_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path))
    one = cldr_data(["de-en"], size=100, vocabulary=300)
    monkeypatch.setattr(cldr, "prepare_pairs", None)  # cannot be called again
    assert cldr_data(["de-en"], size=100, vocabulary=300).path == one.path
    monkeypatch.undo()
    monkeypatch.setenv("LABO_CACHE", str(tmp_path))
    other = cldr_data(["de-en"], size=100, vocabulary=310)
    assert other.path != one.path
    assert sorted(tmp_path.iterdir()) == sorted([one.path, other.path])


def test_the_cache_lies_where_users_keep_theirs(tmp_path, monkeypatch):
    monkeypatch.delenv("LABO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "labo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "labo"


def test_two_processes_at_once_make_one_result(tmp_path):
    script = (
        "from labo.lab.translation.cldr import cldr_data\n"
        "print(cldr_data(['de-en'], size=200, vocabulary=400).fingerprint)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | {"LABO_CACHE": str(tmp_path), "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    prints = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    (folder,) = tmp_path.iterdir()
    assert prints == {f"{Prepared(folder).fingerprint}\n"}


@pytest.mark.parametrize("names", [["de-es"], ["deen"], ["de-de"], [], ["de-en", "de-en"]])
@pytest.mark.usefixtures("_own_cache")
def test_other_languages_are_refused(names):
    with refused("languages: "):
        cldr_data(names)


def test_a_corpus_larger_than_there_are_phrases_is_refused(monkeypatch):
    monkeypatch.setattr(cldr._Phrasebook, "draw", lambda self, chance: lambda language: language)
    with pytest.raises(DataError, match="only some 1 different phrases for de-en"):
        cldr.draw_phrases(parse_pairs(["de-en"]), size=100, held_out=10, seed=0)
