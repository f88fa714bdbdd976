"""Parallel text: every format is read alike, every fault is one line."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labo.lab.translation.parallel import find_parallel_text
from tiny_corpus import PAIRS, lines, refused, write


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


def table(folder: Path, names=("de", "en")) -> Path:
    return write(folder / "x.csv", lines(map(",".join, [names, *PAIRS[:5]])))


def test_named_columns_are_read(tmp_path):
    path = table(tmp_path)
    assert list(find_parallel_text(str(path), "de", "en")) == PAIRS[:5]
    assert list(find_parallel_text(str(path), "en", "de")) == [(e, d) for d, e in PAIRS[:5]]
    nested = [{"id": 1, "translation": dict(zip(("de", "en"), p, strict=True))} for p in PAIRS[:5]]
    datasets.Dataset.from_list(nested).save_to_disk(tmp_path / "nested")
    assert list(find_parallel_text(str(tmp_path / "nested"), "de", "en")) == PAIRS[:5]
    pq.write_table(pa.Table.from_pylist(nested), tmp_path / "x.parquet")
    (tmp_path / "parts").mkdir()
    (tmp_path / "x.parquet").rename(tmp_path / "parts" / "x.parquet")
    assert list(find_parallel_text(str(tmp_path / "parts"), "de", "en")) == PAIRS[:5]


@pytest.mark.parametrize("columns", ["source=german,target=english", "de=german,en=english"])
def test_columns_may_have_any_names(tmp_path, columns):
    path = str(table(tmp_path, ("german", "english")))
    assert list(find_parallel_text(path, "de", "en", columns.split(","))) == PAIRS[:5]
    with refused("no column de or source, only german, english; name it with --columns"):
        list(find_parallel_text(path, "de", "en"))


def test_what_is_not_text_is_refused(tmp_path):
    path = write(tmp_path / "x.jsonl", '{"de": 1, "en": "b"}\n')
    with refused("x.jsonl:1: de is not text but 1"):
        list(find_parallel_text(str(path), "de", "en"))


def test_a_folder_of_several_splits_is_refused(tmp_path):
    parts = {"train": datasets.Dataset.from_list([{"de": "a", "en": "b"}])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")
    with refused("all holds several splits; give one of .*all/train"):
        find_parallel_text(str(tmp_path / "all"), "de", "en")
    assert list(find_parallel_text(str(tmp_path / "all" / "train"), "de", "en")) == [("a", "b")]


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "x", r"x\.de: no such file, nor with \.gz, \.xml or \.sgm at its end"),
        ({"x.de": "a\n"}, "x.de,y", r"^y: no such file|/y: no such file"),
        ({"x.de": "a\n"}, "x.de", r"x\.de:1: 1 columns separated by tabs, but .* need 2"),
        ({"x": "a\tb\nc\td\te\n"}, "x", r"x:2: 3 columns, but line 1 has 2"),
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
            {"x.de.xml": '<seg id="1">a\nb\n', "x.en.xml": xml(PAIRS[:1], 1)},
            "x",
            r"x\.de\.xml:1: a <seg> without its end",
        ),
        (
            {"x.de.xml": xml(PAIRS[:1], 0), "x.en": "a\n"},
            "x",
            r"one has <seg> elements, the other has not",
        ),
        ({}, "a,b,c", r"two files are FILE,FILE"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, files, name, message):
    for file, content in files.items():
        write(tmp_path / file, content)
    with refused(message):
        list(find_parallel_text(f"{tmp_path}/{name}", "de", "en"))


@pytest.mark.parametrize("text", ["<seg id=1>" * 20_000, "<seg id=1>\n" * 20_000, "<seg " * 20_000])
def test_unclosed_tags_are_refused_at_once(tmp_path, text):
    write(tmp_path / "a.xml", text)
    write(tmp_path / "b.xml", text)
    with refused(r"a.xml:1: a <seg> (without its end|tag that does not end)"):
        list(find_parallel_text(f"{tmp_path}/a.xml,{tmp_path}/b.xml", "de", "en"))


def test_names_are_filled_in_and_nothing_else(tmp_path):
    for name in ("{pair.upper}", "{source:1000000000}", "{0}", "{", "}", "{}", "{other}"):
        with refused("only {pair}, {source} and {target} are filled in"):
            find_parallel_text(str(tmp_path / name), "de", "en")
