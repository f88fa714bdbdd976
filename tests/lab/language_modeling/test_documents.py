"""Documents of every kind: read alike from every format, wrong ones refused in one line."""

from __future__ import annotations

import gzip
import json
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labo.lab.errors import DataError
from labo.lab.language_modeling import documents
from labo.lab.language_modeling.documents import Part, find_inputs, read_documents
from labo.lab.language_modeling.tokenizers import chat_renderer

TEXTS = ["Der Hund läuft.", 'Zwei Zeilen,\nund ein "Zitat".', "日本語, with a comma"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye."},
]


@contextmanager
def refused(message: str):
    with pytest.raises(DataError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def read(*names: Path | str, unit="file", column="text"):
    render = chat_renderer(None)
    return [
        document
        for path in find_inputs([str(name) for name in names])
        for document in read_documents(path, unit, column, render)
    ]


def texts(*names: Path | str, **options) -> list[str]:
    return [document.text for document in read(*names, **options)]


def json_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_jsonl(folder: Path) -> Path:
    return json_lines(folder / "a.jsonl", [{"text": text, "more": 1} for text in TEXTS])


def write_gzipped_jsonl(folder: Path) -> Path:
    path = folder / "a.jsonl.gz"
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS)
    path.write_bytes(gzip.compress(lines.encode()))
    return path


def write_csv(folder: Path) -> Path:
    path = folder / "a.csv"
    rows = [
        "id,text",
        *(f'{i},"{text.replace(chr(34), chr(34) * 2)}"' for i, text in enumerate(TEXTS)),
    ]
    path.write_text("\r\n".join(rows) + "\r\n", newline="")
    return path


def write_parquet(folder: Path) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS, "id": [1, 2, 3]}), path)
    return path


def write_arrow_file(folder: Path) -> Path:
    path = folder / "a.arrow"
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def write_dataset(folder: Path) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "set", num_shards=2)
    return folder / "set"


@pytest.mark.parametrize(
    "write",
    [
        write_jsonl,
        write_gzipped_jsonl,
        write_csv,
        write_parquet,
        write_arrow_file,
        write_dataset,
    ],
)
def test_every_format_holds_the_same_texts(tmp_path, write):
    found = read(write(tmp_path))
    assert [document.text for document in found] == TEXTS
    assert {document.kind for document in found} == {"text"}
    assert all(part.learned for document in found for part in document.parts)


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
    json_lines(tmp_path / "d.jsonl", [{"text": "third"}])
    assert texts(tmp_path) == ["first", "second", "third"]


def test_a_prompt_is_given_and_its_completion_learned(tmp_path):
    (found,) = read(json_lines(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}]))
    assert found.parts == (Part("2+2=", False), Part("4", True))
    assert found.kind == "prompt"


def test_of_a_chat_what_the_assistant_says_is_learned(tmp_path):
    (found,) = read(json_lines(tmp_path / "a.jsonl", [{"messages": CHAT}]))
    assert found.kind == "chat"
    assert [part.text for part in found.parts if part.learned] == ["Hi!</s>", "Bye.</s>"]
    assert found.text == chat_renderer(None)(CHAT, False)


def test_a_chat_that_goes_on_after_the_last_answer_ends_there(tmp_path):
    more = [*CHAT, {"role": "user", "content": "?"}]
    (found,) = read(json_lines(tmp_path / "a.jsonl", [{"messages": more}]))
    assert found.text == chat_renderer(None)(CHAT, False)


def test_another_column_may_hold_the_text(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"text": "no", "body": "yes"}])
    assert texts(path, column="body") == ["yes"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"txt": "a"}, r"a\.jsonl:1: no column 'text', nor prompt .*; it has txt"),
        ({}, "it has none"),
        ({"text": 3}, "text must be a string, got int"),
        ({"prompt": "a"}, "no column 'text'"),
        ({"prompt": "a", "completion": None}, "completion must be a string, got NoneType"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["hello"]}, "message 1 must have a role"),
        ({"messages": [{"role": "user", "content": [1]}]}, "message 1 must have a content"),
        ({"messages": CHAT[:2]}, "no message of the assistant"),
        ([1], "not a JSON object"),
    ],
)
def test_wrong_rows_are_refused(tmp_path, row, message):
    with refused(message):
        read(json_lines(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{", r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\xff\n', r":2: byte 0xff is not UTF-8"),
        ("a.csv", b"text,b\n1\n", r"a\.csv:2: not as many cells"),
        ("a.csv", b"text\n1,2\n", r"a\.csv:2: not as many cells"),
        ("a.csv", b'text\n"1\n', r"a\.csv: not CSV"),
        ("a.parquet", b"PAR1 not", r"a\.parquet: damaged after row 0"),
        ("a.arrow", b"ARROW1 not", r"a\.arrow: damaged after row 0"),
        ("a.txt", b"\xff", r"a\.txt:1: byte 0xff is not UTF-8"),
        ("a.txt.gz", b"\x1f\x8b broken", "truncated or damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with refused(message):
        read(tmp_path / name)


def test_missing_inputs_are_refused(tmp_path):
    with refused("nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    with refused("no files that end in .txt"):
        read(tmp_path)
    datasets.disable_progress_bars()
    both = datasets.DatasetDict(
        {s: datasets.Dataset.from_dict({"text": ["a"]}) for s in ("x", "y")}
    )
    both.save_to_disk(tmp_path / "both")
    with refused(r"both: several splits; name one of its folders \(x, y\)"):
        read(tmp_path / "both")
    (tmp_path / "both" / "x" / "data-00000-of-00001.arrow").unlink()
    with refused(r"data-00000-of-00001\.arrow: no such file"):
        read(tmp_path / "both" / "x")
    (tmp_path / "both" / "y" / "state.json").write_text("[]")
    with refused("not written by datasets"):
        read(tmp_path / "both" / "y")


def test_a_document_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LARGEST", 10)
    path = tmp_path / "a.txt"
    path.write_text("12345\n67890\n")
    with refused("more than 10 characters; --documents paragraph"):
        read(path)
    assert texts(path, unit="line") == ["12345", "67890"]
    with refused("text has more than 10 characters"):
        read(json_lines(tmp_path / "a.jsonl", [{"text": "x" * 11}]))


def test_a_template_that_rewrites_what_was_said_is_refused():
    def render(messages, answer):
        return f"{len(messages)} " + " ".join(m["content"] for m in messages)

    with refused("the chat template changes earlier messages when message 3"):
        documents._chat("here", CHAT, render)

    def fail(messages, answer):
        raise TypeError("no")

    with refused("here: the chat template fails: no"):
        documents._chat("here", CHAT, fail)
