"""Rows with named columns: read alike from every format, damaged ones refused in one line."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labo.lab.text.records import is_table, read_rows
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
