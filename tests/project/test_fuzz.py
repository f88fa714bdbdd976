"""A small, fixed part of ``make fuzz``, and whether it would notice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fuzz import commands, native, readers

from labo.cli import _status_and_message
from labo.lab.errors import DataError
from scripts import ROOT


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", readers.READERS)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    assert readers.fuzz_reader(name, 25, folder) == []


@pytest.mark.parametrize("name", commands.SUBJECTS)
def test_commands_say_what_is_wrong_with_a_file(name, tmp_path):
    assert commands.fuzz_commands(name, 5, tmp_path) == []


def test_the_kernel_stays_within_its_buffers_and_would_be_found_out():
    """The last thing that the child does is to read beside a tensor."""
    report = native.fuzz_kernel(300, sanitizers="address", beside=True)
    assert "300 cases held" in report, report
    assert "AddressSanitizer: heap-buffer-overflow" in report
    assert "labo_read_beside" in report


def test_the_page_counts_the_readers():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"| {len(readers.READERS)} readers on files" in page
    assert f"| {len(readers.READERS)} 000 |" in page
    assert f"| {300 * len(commands.SUBJECTS)} |" in page


# ------------------------------------------------------------------ whether it would notice


def key_error(folder: Path) -> None:
    content = (folder / "file").read_bytes()
    if content != b"whole":
        raise KeyError("step")


def endless(folder: Path) -> None:
    while (folder / "file").read_bytes() != b"whole":
        time.sleep(0.01)


def wordy(folder: Path) -> None:
    if (folder / "file").read_bytes() != b"whole":
        error = DataError("one")
        error.args = ("one\ntwo",)
        raise error


def make(folder: Path) -> list[Path]:
    (folder / "file").write_bytes(b"whole")
    return [folder / "file"]


@pytest.mark.parametrize(
    ("read", "problem"),
    [(key_error, "KeyError: 'step'"), (endless, "TooSlowError"), (wordy, "several lines")],
)
def test_a_bad_reader_is_found(read, problem, tmp_path, monkeypatch):
    monkeypatch.setitem(readers.READERS, "bad", readers.Reader(make, read))
    monkeypatch.setattr(readers, "SECONDS", 1)
    failures = readers.fuzz_reader("bad", 2, tmp_path)
    assert failures
    assert all(problem in failure for failure in failures)


def test_a_class_name_in_a_message_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "labo", lambda arguments: _status_and_message(KeyError("step")))
    subject = commands.Subject(
        lambda folder: (folder / "a.json").write_text('{"a": 1}'), ("a.json",), (("train",),)
    )
    monkeypatch.setitem(commands.SUBJECTS, "bad", subject)
    failures = commands.fuzz_commands("bad", 3, tmp_path)
    assert len(failures) == 3
    assert "KeyError: 'step'" in failures[0]
