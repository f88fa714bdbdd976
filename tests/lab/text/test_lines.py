"""Text files, line by line."""

from __future__ import annotations

import gzip
import os

from labo.lab import compressed
from labo.lab.text import lines as text_lines
from labo.lab.text.lines import read_lines
from labo.lab.translation.parallel import find_parallel_text
from tiny_corpus import (
    refused,
    write,
)


def test_lines_end_at_line_feeds_only(tmp_path):
    write(tmp_path / "x", "a\x0bb\x0cc\u2028d\x85e\r\nf\rg\n\nh")
    assert list(read_lines(tmp_path / "x")) == ["a\x0bb\x0cc\u2028d\x85e", "f\rg", "", "h"]


def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with refused("pipe: truncated or damaged after line 0 .* not a regular file"):
        list(read_lines(tmp_path / "pipe"))


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
