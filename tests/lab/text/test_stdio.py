"""Lines in, lines out: as commands read stdin and write stdout."""

from __future__ import annotations

import io
import os

import pytest

from labo.lab.text import stdio
from labo.lab.text.stdio import answer_lines


def echo(lines, first, advance):
    return (f"{number} {line}" for number, line in enumerate(lines, first))


@pytest.mark.parametrize("at_once", [2, 2000])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"", ""),
        (b"one", "1 one\n"),
        (b"\n\n \t\none\n\n", "1 \n2 \n3  \t\n4 one\n5 \n"),
        (b"\xef\xbb\xbfone\r\ntwo three", "1 one\n2 two three\n"),
        (b"a\rb\x0b\x0c\xc2\x85\xe2\x80\xa8c\x00d\n", "1 a\rb\x0b\x0c\x85\u2028c\x00d\n"),
        (
            "日本語 \U0001f600 \u200b עברית\n".encode() * 3,
            "".join(f"{n} 日本語 \U0001f600 \u200b עברית\n" for n in (1, 2, 3)),
        ),
    ],
)
def test_one_line_for_each_line(given, expected, at_once, monkeypatch, capsys):
    monkeypatch.setattr(stdio, "_LINES_AT_ONCE", at_once)
    target = io.BytesIO()
    answer_lines(io.BytesIO(given), target, echo)
    assert target.getvalue().decode() == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("at_once", [2, 2000])
def test_bytes_that_are_not_utf8_are_replaced_with_a_notice(at_once, monkeypatch, capsys):
    monkeypatch.setattr(stdio, "_LINES_AT_ONCE", at_once)
    target = io.BytesIO()
    answer_lines(io.BytesIO(b"one\n" * 4 + b"ca\xe9 \xff\n"), target, echo)
    assert target.getvalue().decode().splitlines()[4] == "5 ca\ufffd \ufffd"
    assert capsys.readouterr().err == (
        "labo: line 5: byte 0xe9 is not UTF-8, it is read as U+FFFD\n"
    )


def test_a_pipe_is_answered_line_by_line(monkeypatch):
    monkeypatch.setattr(stdio, "_MORE_SECONDS", 0.0)
    reading, writing = os.pipe()
    answers = []

    class Target(io.BytesIO):
        def flush(self):
            answers.append(self.getvalue())
            if len(answers) == 1:
                os.write(writing, b"two\nthree")
                os.close(writing)

    os.write(writing, b"one\n")  # the rest is sent only when this is answered
    with open(reading, "rb") as source:
        answer_lines(source, Target(), echo)
    assert answers[0] == b"1 one\n"
    assert answers[-1] == b"1 one\n2 two\n3 three\n"


def test_a_reader_that_goes_away_ends_it_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as target:
        answer_lines(io.BytesIO(b"one\n" * 3), target, echo)
        target.write(b"what is still in the buffer goes nowhere")
