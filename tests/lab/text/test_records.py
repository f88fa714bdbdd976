"""Lines, and rows with named columns: alike from every format, damaged ones refused in one line."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labo.lab import compressed
from labo.lab.text import records
from labo.lab.text.records import is_table, read_lines, read_rows
from labo.lab.translation.parallel import find_parallel_text
from tiny_corpus import refused, write
from tiny_language import write_rows

ROWS = [
    {"id": "1", "text": "Der Hund läuft."},
    {"id": "2", "text": 'Zwei Zeilen,\nund ein "Zitat".'},
    {"id": "3", "text": "日本語, with a comma"},
]
datasets.disable_progress_bars()


def table(folder: Path, form: str) -> Path:
    path, rows = folder / f"a.{form}", pa.Table.from_pylist(ROWS)
    if form == "jsonl":
        return write_rows(path, ROWS)
    if form == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n\n" for row in ROWS).encode()))
    elif form == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0])
            writer.writeheader()
            writer.writerows(ROWS)
    elif form == "parquet":
        pq.write_table(rows, path)
    elif form == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as stream:
            stream.write_table(rows)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)
    return path


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "csv", "parquet", "arrow", "folder"])
def test_every_format_holds_the_same_rows(tmp_path, form):
    path = table(tmp_path, form)
    assert is_table(path)
    assert [row for _, row in read_rows(path)] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{", r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a\.jsonl:2: not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n\xff\n', r":2: byte 0xff is not UTF-8"),
        ("a.csv", b"text,b\n1\n", r"a\.csv:2: not as many cells as the first line has names"),
        ("a.csv", b'text\n"1\n', r"a\.csv: not CSV"),
        ("a.parquet", b"PAR1 not", r"a\.parquet: damaged after row 0"),
        ("a.arrow", b"ARROW1 not", r"a\.arrow: damaged after row 0"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with refused(message):
        list(read_rows(path))


def test_damaged_folders_of_datasets_are_refused(tmp_path):
    path = table(tmp_path, "folder")
    next(path.glob("data-00001*.arrow")).unlink()
    with refused(r"data-00001-of-00002\.arrow: no such file"):
        list(read_rows(path))
    (path / "state.json").write_text("[]")
    with refused("not written by datasets"):
        list(read_rows(path))


# Lines ------------------------------------------------------------------------------------------


def test_lines_end_at_line_feeds_only(tmp_path):
    write(tmp_path / "x", "a\x0bb\x0cc\u2028d\x85e\r\nf\rg\n\nh")
    assert list(read_lines(tmp_path / "x")) == ["a\x0bb\x0cc\u2028d\x85e", "f\rg", "", "h"]


def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with refused("pipe: truncated or damaged after line 0 .* not a regular file"):
        list(read_lines(tmp_path / "pipe"))


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_LONGEST_LINE", 1000)
    write(tmp_path / "a.tsv", "a\tb\n" + "x" * 1001)
    with refused(r"a.tsv:2: a line of more than 1000 bytes"):
        list(find_parallel_text(str(tmp_path / "a.tsv"), "de", "en"))


def test_text_that_inflates_a_thousandfold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "_ALWAYS_ALLOWED", 1 << 16)
    write(tmp_path / "a.tsv.gz", gzip.compress(b"a\tb\n" * 100_000))
    with refused(r"a.tsv.gz: inflates to more than 200 times its size"):
        list(find_parallel_text(str(tmp_path / "a.tsv.gz"), "de", "en"))
