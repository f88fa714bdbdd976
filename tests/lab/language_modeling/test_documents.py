"""Documents of every kind: read alike from every format, wrong ones refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from labo.lab.language_modeling import documents
from labo.lab.language_modeling.documents import find_inputs, read_documents
from labo.lab.language_modeling.tokenizers import chat_renderer
from tiny_corpus import refused
from tiny_language import write_rows

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye."},
]


def read(*names: Path | str, unit="file", column="text"):
    render = chat_renderer(None)
    return [
        document
        for path in find_inputs([str(name) for name in names])
        for document in read_documents(path, unit, column, render)
    ]


def texts(*names: Path | str, **options) -> list[str]:
    return [document.text for document in read(*names, **options)]


def test_a_text_file_is_one_document_or_many(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\n \nthree\n")
    assert texts(path) == ["one\ntwo\n\n \nthree"]
    assert texts(path, unit="paragraph") == ["one\ntwo", "three"]
    assert texts(path, unit="line") == ["one", "two", "", " ", "three"]
    assert [d.name for d in read(path, unit="paragraph")] == ["a.txt:1", "a.txt:5"]


def test_a_folder_is_read_in_order_and_other_files_are_passed_over(tmp_path):
    for name, text in [("b/x.md", "second"), ("a.txt", "first"), ("c.jpg", "no text")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write_rows(tmp_path / "d.jsonl", [{"text": "third", "body": "other"}])
    assert texts(tmp_path) == ["first", "second", "third"]
    assert texts(tmp_path / "d.jsonl", column="body") == ["other"]


@pytest.mark.parametrize("more", [[], [{"role": "user", "content": "?"}]])
def test_of_a_chat_what_the_assistant_says_is_learned(tmp_path, more):
    """It ends with the last answer."""
    (found,) = read(write_rows(tmp_path / "a.jsonl", [{"messages": CHAT + more}]))
    assert found.kind == "chat"
    assert [part.text for part in found.parts if part.learned] == ["Hi!</s>", "Bye.</s>"]
    assert found.text == chat_renderer(None)(CHAT, False)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"txt": "a"}, r"a\.jsonl:1: no column 'text', nor prompt .*; it has txt"),
        ({}, "it has none"),
        ({"text": 3}, "text must be a string, got int"),
        ({"prompt": "a", "completion": None}, "completion must be a string, got NoneType"),
        ({"messages": ["hello"]}, "message 1 must have a role"),
        ({"messages": [{"role": "user", "content": [1]}]}, "message 1 must have a content"),
        ({"messages": CHAT[:2]}, "no message of the assistant"),
    ],
)
def test_wrong_rows_are_refused(tmp_path, row, message):
    with refused(message):
        read(write_rows(tmp_path / "a.jsonl", [row]))


def test_missing_inputs_are_refused(tmp_path):
    with refused("nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    with refused("no files that end in .txt"):
        read(tmp_path)


def test_a_document_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LARGEST", 10)
    path = tmp_path / "a.txt"
    path.write_text("12345\n67890\n")
    with refused("more than 10 characters; --documents paragraph"):
        read(path)
    assert texts(path, unit="line") == ["12345", "67890"]
    with refused("text has more than 10 characters"):
        read(write_rows(tmp_path / "a.jsonl", [{"text": "x" * 11}]))


def test_a_template_that_rewrites_what_was_said_is_refused():
    def render(messages, answer):
        return f"{len(messages)} " + " ".join(m["content"] for m in messages)

    with refused("the chat template changes earlier messages when message 3"):
        documents._chat("here", CHAT, render)

    def fail(messages, answer):
        raise TypeError("no")

    with refused("here: the chat template fails: no"):
        documents._chat("here", CHAT, fail)
